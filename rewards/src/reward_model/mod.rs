//! `model`: the score of a reward model, a sequence classifier with one label in Hugging Face layout.
//!
//! Invariant: where a model is placed changes when it scores and on which cores, never what it scores: a score depends on
//! the tokens alone, to the bit. Trajectories are scored in packed batches of whatever waits.
//!
//! - `placement = "colocated"`: on the policy's device, here the cores that the sampler may use. Such models share the
//!   budget `placement.memory_mib`; one that does not fit is read from its files when something waits, and let go when
//!   nothing waits any more.
//! - `placement = "separated"`: on cores of its own (`threads`), always in memory, beside generation.
//!
//! A model with the policy's tokenizer sees the very tokens that were sampled; any other sees the texts, with its own chat
//! template.

mod service;

use std::path::Path;
use std::sync::Arc;

use model::{Answered, Cores, MemoryBudget, Placement, Quantization, SequenceScorer, Team};

use crate::registry::Kind;
use crate::reward::Judged;
use crate::{BoxFuture, Load, Outcome, Reward, RewardContext, RewardError, RewardInput, RewardSpec};
use service::Service;

/// Tokens of a packed batch, if the recipe says nothing.
const BATCH_TOKENS: usize = 8192;

/// What reward models need of the run.
#[derive(Clone, Debug, Default)]
pub struct ModelContext {
    /// [`model::Tokenizer::fingerprint`] of the policy's tokenizer.
    pub policy_tokenizer: Option<String>,
    /// The cores that the sampler may use.
    pub policy_team: Option<Arc<Team>>,
    /// All cores of the process.
    pub cores: Option<Arc<Cores>>,
    /// What colocated models may keep in memory together.
    pub budget: Arc<MemoryBudget>,
}

/// The kind `model`.
pub(crate) fn kind() -> Kind {
    let parameters = &["path", "placement", "quantization", "batch_tokens", "threads"];
    Kind::new("model", parameters, &["path"], |spec, context| Ok(Box::new(RewardModel::new(spec, context)?)))
}

/// A reward that asks a reward model.
#[derive(Debug)]
struct RewardModel {
    name: String,
    about: String,
    /// Whether the model reads the tokens that the policy sampled.
    shares_tokens: bool,
    scorer: Arc<SequenceScorer>,
    service: Service,
    load: Load,
}

impl RewardModel {
    fn new(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        context.runtime(spec)?;
        let path = spec.required("path", spec.path.as_deref())?;
        let placement = spec.placement.unwrap_or_default();
        let failed = |reason: String| RewardError::Start { reward: spec.name().to_owned(), reason };
        if placement == Placement::Colocated && spec.threads.is_some() {
            return Err(failed(
                "`threads` are for `placement = \"separated\"`; colocated it uses the sampler's".into(),
            ));
        }
        let models = &context.models;
        let everything = MemoryBudget::default();
        let budget = if placement == Placement::Colocated { &*models.budget } else { &everything };
        let quantization = spec.quantization.unwrap_or(Quantization::None);
        let scorer =
            SequenceScorer::open(path, quantization, budget).map_err(|error| failed(error.to_string()))?;
        let scorer = Arc::new(scorer);
        let cores = models.cores.clone().unwrap_or_else(Cores::all);
        let team = match (placement, &models.policy_team) {
            (Placement::Colocated, Some(team)) => Arc::clone(team),
            _ => Arc::new(Team::new(&cores, spec.threads.unwrap_or(cores.total()))),
        };
        let shares_tokens =
            models.policy_tokenizer.as_deref().is_some_and(|policy| scorer.shares_tokens(policy));
        let service =
            Service::start(spec, Arc::clone(&scorer), team, spec.batch_tokens.unwrap_or(BATCH_TOKENS))?;
        let about = about(path, placement, scorer.is_swapped(), shares_tokens);
        Ok(Self {
            name: spec.name().to_owned(),
            about,
            shares_tokens,
            scorer,
            service,
            load: Load::default(),
        })
    }

    /// What the model reads of a trajectory.
    fn tokens(&self, input: &RewardInput<'_>) -> Result<Answered, RewardError> {
        let failed = |reason: String| RewardError::Failed {
            reward: self.name.clone(),
            trajectory: input.trajectory(),
            reason,
        };
        let answered = if self.shares_tokens && !input.prompt_ids.is_empty() {
            Answered { prompt: input.prompt_ids.to_vec(), completion: input.completion_ids.to_vec() }
        } else {
            let encoded = self.scorer.encode(&input.task.prompt, input.text, !input.truncated);
            encoded.map_err(|error| failed(error.to_string()))?
        };
        let (length, longest) = (answered.len(), self.scorer.max_context());
        if length > longest {
            return Err(failed(format!(
                "{length} tokens are more than the {longest} that the reward model reads; lower data.max_prompt_length \
                 or rollout.max_completion_length"
            )));
        }
        if answered.is_empty() {
            return Err(failed("there is no token to score".to_owned()));
        }
        Ok(answered)
    }

    async fn judge(&self, input: &RewardInput<'_>) -> Judged {
        let waiting = self.load.wait();
        let answered = self.tokens(input)?;
        self.service.score(answered, waiting, input).await.map(|score| Outcome::from(f64::from(score)))
    }
}

fn about(path: &Path, placement: Placement, swapped: bool, shares_tokens: bool) -> String {
    let place = match (placement, swapped) {
        (Placement::Separated, _) => "separated",
        (Placement::Colocated, false) => "colocated, beside the policy",
        (Placement::Colocated, true) => "colocated, swapped in when something waits",
    };
    let reads = if shares_tokens { "the policy's tokens" } else { "texts, with a tokenizer of its own" };
    format!("reward model {}, {place}, reads {reads}", path.display())
}

impl Reward for RewardModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        Box::pin(crate::join(inputs.iter().map(|input| Box::pin(self.judge(input)) as BoxFuture<'_, _>)))
    }

    fn about(&self) -> Option<String> {
        Some(self.about.clone())
    }

    fn load(&self) -> &Load {
        &self.load
    }
}
