//! `model`: the score of a reward model, a sequence classifier with one label in Hugging Face layout.
//!
//! Invariant: the placement of a model changes when and on which cores it computes, never its scores: a score depends on the
//! tokens alone, to the bit. The sequences that wait are scored in packed batches.
//!
//! - `placement = "colocated"`: on the policy's device, here the cores that the sampler may use. Such models share the
//!   budget `placement.memory_mib`; one that does not fit is read from its files when sequences wait, and its memory is freed
//!   when the queue is empty.
//! - `placement = "separated"`: beside generation and always in memory, on cores of its own (`threads`), or with a `url` in
//!   another process, on this host or another, that `rlrun serve reward` started.
//!
//! A model with the policy's tokenizer sees the very tokens that were sampled; any other sees the texts, with its own chat
//! template.

mod remote;
pub mod server;
mod service;
mod wire;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use model::{
    MemoryBudget, Placement, PromptCompletion, Quantization, SequenceScorer, SharedCores, ThreadPool,
};

use serde::{Deserialize, Serialize};

use crate::registry::RewardKind;
use crate::reward::{Judged, each};
use crate::{BoxFuture, Load, Outcome, Reward, RewardContext, RewardError, RewardInput, RewardSpec};
use remote::RemoteModel;
use service::ScoringService;
use wire::RewardModelRequest;

/// Default for the tokens of a packed batch.
const BATCH_TOKENS: usize = 8192;

/// The parts of a run that reward models use.
#[derive(Clone, Debug, Default)]
pub struct ModelContext {
    /// [`model::Tokenizer::fingerprint`] of the policy's tokenizer.
    pub policy_tokenizer: Option<String>,
    /// The cores that the sampler may use.
    pub policy_pool: Option<Arc<ThreadPool>>,
    /// All cores of the process.
    pub cores: Option<Arc<SharedCores>>,
    /// Memory budget of all colocated models.
    pub budget: Arc<MemoryBudget>,
    /// Models of the recipe that another process of the run serves, by the name of their reward.
    pub servers: Arc<BTreeMap<String, ModelServer>>,
}

/// Address of a process of the run that serves a reward model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelServer {
    /// Such as `http://127.0.0.1:40123`.
    pub url: String,
    /// Bearer token, if it needs one.
    pub token: Option<String>,
}

/// The kind `model`.
pub(crate) fn kind() -> RewardKind {
    let parameters = &[
        "path",
        "url",
        "placement",
        "quantization",
        "batch_tokens",
        "threads",
        "allow",
        "token_env",
        "retries",
        "max_answer_kib",
    ];
    RewardKind::new("model", parameters, &[], |spec, context| Ok(Box::new(RewardModel::new(spec, context)?)))
}

/// A reward that is the score of a reward model.
#[derive(Debug)]
struct RewardModel {
    name: String,
    about: String,
    /// Whether the model reads the tokens that the policy sampled.
    shares_tokens: bool,
    location: ModelLocation,
    load: Load,
}

/// The process that has the model.
#[derive(Debug)]
enum ModelLocation {
    /// This process, on a thread of its own.
    Local { scorer: Arc<SequenceScorer>, service: ScoringService },
    /// Another process.
    Remote(RemoteModel),
}

impl RewardModel {
    fn new(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        context.runtime(spec)?;
        check_keys(spec)?;
        let policy = context.models.policy_tokenizer.as_deref();
        let (location, shares_tokens, about) = match (&spec.url, &spec.path) {
            (Some(url), _) => {
                let remote = RemoteModel::connect(spec, context)?;
                let shares = policy.is_some_and(|policy| remote.shares_tokens(policy));
                (ModelLocation::Remote(remote), shares, about(url, "separated, in another process", shares))
            }
            (None, Some(path)) if context.models.servers.contains_key(spec.name()) => {
                let remote = connect(spec, context)?;
                let shares = policy.is_some_and(|policy| remote.shares_tokens(policy));
                let about = about(&path.display().to_string(), "separated, in a process of the run", shares);
                (ModelLocation::Remote(remote), shares, about)
            }
            (None, Some(path)) => {
                let StartedModel { scorer, service, placement } = start(spec, path, context)?;
                let shares = policy.is_some_and(|policy| scorer.shares_tokens(policy));
                let about = about(&path.display().to_string(), placement, shares);
                (ModelLocation::Local { scorer, service }, shares, about)
            }
            (None, None) => return Err(spec.missing("path")),
        };
        Ok(Self { name: spec.name().to_owned(), about, shares_tokens, location, load: Load::default() })
    }

    /// The tokens of a trajectory, if the model reads them.
    fn sampled(&self, input: &RewardInput<'_>) -> Option<PromptCompletion> {
        let known = self.shares_tokens && !input.prompt_ids.is_empty();
        known.then(|| PromptCompletion {
            prompt: input.prompt_ids.to_vec(),
            completion: input.completion_ids.to_vec(),
        })
    }

    async fn judge(&self, input: &RewardInput<'_>) -> Judged {
        let failed = |reason: String| input.trajectory().failed(&self.name, reason);
        let waiting = self.load.wait();
        let (sampled, ended) = (self.sampled(input), !input.truncated);
        let score = match &self.location {
            ModelLocation::Local { scorer, service } => {
                let encode = || scorer.encode(&input.task.prompt, input.text, ended);
                let tokens = sampled.map_or_else(encode, Ok).map_err(|error| failed(error.to_string()))?;
                let tokens = checked(tokens, scorer.max_context()).map_err(failed)?;
                service.score(tokens, waiting, input).await?
            }
            ModelLocation::Remote(remote) => {
                let request = match sampled {
                    Some(tokens) => {
                        let tokens = checked(tokens, remote.max_context()).map_err(failed)?;
                        RewardModelRequest::Tokens {
                            prompt_ids: tokens.prompt,
                            completion_ids: tokens.completion,
                        }
                    }
                    None => RewardModelRequest::Texts {
                        prompt: (&input.task.prompt).into(),
                        completion: input.text.to_owned(),
                        ended,
                    },
                };
                remote.score(request, waiting, input).await?
            }
        };
        Ok(Outcome::from(f64::from(score)))
    }
}

/// The model of this reward in another process of the run.
fn connect(spec: &RewardSpec, context: &RewardContext) -> Result<RemoteModel, RewardError> {
    const TOKEN: &str = "token of the run";
    let Some(server) = context.models.servers.get(spec.name()) else { return Err(spec.missing("url")) };
    let token = server.token.iter().map(|token| (TOKEN.to_owned(), token.clone()));
    let context = RewardContext { environment: Arc::new(token.collect()), ..context.clone() };
    let (url, token_env) = (Some(server.url.clone()), server.token.as_ref().map(|_| TOKEN.to_owned()));
    RemoteModel::connect(&RewardSpec { url, token_env, ..spec.clone() }, &context)
}

/// A model in this process.
struct StartedModel {
    scorer: Arc<SequenceScorer>,
    service: ScoringService,
    /// A description.
    placement: &'static str,
}

fn start(spec: &RewardSpec, path: &Path, context: &RewardContext) -> Result<StartedModel, RewardError> {
    let models = &context.models;
    let placement = spec.placement.unwrap_or_default();
    let everything = MemoryBudget::default();
    let budget = if placement == Placement::Colocated { &*models.budget } else { &everything };
    let quantization = spec.quantization.unwrap_or(Quantization::None);
    let failed = |reason: String| RewardError::Start { reward: spec.name().to_owned(), reason };
    let scorer =
        SequenceScorer::open(path, quantization, budget).map_err(|error| failed(error.to_string()))?;
    let scorer = Arc::new(scorer);
    let cores = models.cores.clone().unwrap_or_else(SharedCores::all);
    let pool = match (placement, &models.policy_pool) {
        (Placement::Colocated, Some(pool)) => Arc::clone(pool),
        _ => Arc::new(ThreadPool::new(&cores, spec.threads.unwrap_or(cores.total()))),
    };
    let service =
        ScoringService::start(spec, Arc::clone(&scorer), pool, spec.batch_tokens.unwrap_or(BATCH_TOKENS))?;
    let place = match (placement, scorer.is_swapped()) {
        (Placement::Separated, _) => "separated",
        (Placement::Colocated, false) => "colocated, beside the policy",
        (Placement::Colocated, true) => "colocated, swapped in when something waits",
    };
    Ok(StartedModel { scorer, service, placement: place })
}

/// Refuses keys that have no effect for the placement of the model.
fn check_keys(spec: &RewardSpec) -> Result<(), RewardError> {
    const LOCAL: [&str; 4] = ["path", "quantization", "batch_tokens", "threads"];
    const REMOTE: [&str; 4] = ["allow", "token_env", "retries", "max_answer_kib"];
    let colocated = spec.placement == Some(Placement::Colocated);
    let given = spec.given();
    let find = |keys: &[&str]| given.iter().find(|key| keys.contains(&key.as_str())).cloned();
    let wrong = if spec.url.is_some() {
        let key = find(&LOCAL).or_else(|| colocated.then(|| "placement".to_owned()));
        key.map(|key| (key, "is for a model in this process; with `url` it is in another"))
    } else if colocated && spec.threads.is_some() {
        Some(("threads".to_owned(), "is for `placement = \"separated\"`; colocated it uses the sampler's"))
    } else {
        find(&REMOTE).map(|key| (key, "is for a model behind a `url`"))
    };
    wrong.map_or(Ok(()), |(key, reason)| Err(spec.wrong(&key, reason)))
}

/// The tokens, if a model can read them.
fn checked(tokens: PromptCompletion, longest: usize) -> Result<PromptCompletion, String> {
    let length = tokens.len();
    if length > longest {
        return Err(format!(
            "{length} tokens are more than the {longest} that the reward model reads; lower data.max_prompt_length or \
             rollout.max_completion_length"
        ));
    }
    if tokens.is_empty() { Err("there is no token to score".to_owned()) } else { Ok(tokens) }
}

fn about(model: &str, place: &str, shares_tokens: bool) -> String {
    let reads = if shares_tokens { "the policy's tokens" } else { "texts, with a tokenizer of its own" };
    format!("reward model {model}, {place}, reads {reads}")
}

impl Reward for RewardModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        each(inputs, |input| self.judge(input))
    }

    fn about(&self) -> Option<String> {
        Some(self.about.clone())
    }

    fn load(&self) -> &Load {
        &self.load
    }
}
