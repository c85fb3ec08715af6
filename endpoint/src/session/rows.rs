//! From the interactions of a session to the rows that are trained on: one for each branch.
//!
//! Invariant: a sampled token is trained on in at most one row, and only where the row has exactly the tokens before it
//! that it was sampled after. Everything else in a row is context.

use trajectory::{PolicyVersion, Sample, SampleError, SampleStreams, TokenExperts, Turn, VersionRun};

use super::{Continuation, Interaction, InteractionRole, credit};

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionRow {
    /// Its token streams.
    pub sample: Sample,
    /// The interactions that are trained on in it, as turns.
    pub turns: Vec<Turn>,
    /// `[turns]` which interactions they are.
    pub interactions: Vec<usize>,
    /// All interactions on its branch.
    pub branch: Vec<usize>,
    /// Number of tokens before its first response.
    pub prompt_length: usize,
}

/// The rows of the interactions of a session, in the order of their last calls. `roles [interactions]` say which are turns of
/// the agent; others are context at most. A branch without a token of its own to train on is no row.
///
/// # Errors
/// Log-probabilities that no sampler gives.
pub fn rows(interactions: &[Interaction], roles: &[InteractionRole]) -> Result<Vec<SessionRow>, SampleError> {
    let plans = plan(interactions, roles);
    let mut trained = vec![false; interactions.len()];
    plans.iter().flat_map(|plan| &plan.trained).for_each(|n| trained[*n] = true);
    let rewards = credit::of_trained(interactions, &trained);
    plans.iter().map(|plan| plan.row(interactions, &rewards)).collect()
}

/// Which interactions a row has, and which of them are trained on in it.
struct RowPlan {
    /// From the first call to the last.
    branch: Vec<usize>,
    trained: Vec<usize>,
}

fn plan(interactions: &[Interaction], roles: &[InteractionRole]) -> Vec<RowPlan> {
    let is_agent = |n: usize| roles[n] == InteractionRole::Agent;
    // Interactions of the agent that a later one of the agent continues, directly or through others.
    let mut inner = vec![false; interactions.len()];
    for last in (0..interactions.len()).filter(|n| is_agent(*n)) {
        chain(interactions, last).skip(1).for_each(|n| inner[n] = true);
    }
    let mut taken = vec![false; interactions.len()];
    let mut plans = Vec::new();
    for last in (0..interactions.len()).filter(|n| is_agent(*n) && !inner[*n]) {
        let mut branch: Vec<usize> = chain(interactions, last).collect();
        branch.reverse();
        let verbatim = |at: usize| {
            let next = branch.get(at + 1).map(|next| interactions[*next].continuation);
            !matches!(next, Some(Continuation::Realign(_)))
        };
        let trainable = |n: usize| !interactions[n].sampled_ids.is_empty();
        let trained: Vec<usize> = (0..branch.len())
            .filter(|at| verbatim(*at))
            .map(|at| branch[at])
            .filter(|n| is_agent(*n) && trainable(*n) && !taken[*n])
            .collect();
        trained.iter().for_each(|n| taken[*n] = true);
        if !trained.is_empty() {
            plans.push(RowPlan { branch, trained });
        }
    }
    plans
}

/// An interaction and those that it continues, back to the first of its branch.
fn chain(interactions: &[Interaction], last: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(last), |n| interactions[*n].continuation.interaction())
}

impl RowPlan {
    fn row(&self, interactions: &[Interaction], rewards: &[Option<f64>]) -> Result<SessionRow, SampleError> {
        let mut row = RowStreams::default();
        let mut turns = Vec::with_capacity(self.trained.len());
        let mut temperature = 1.0;
        for n in &self.branch {
            let Interaction { prompt_ids, sampled_ids, logprobs, versions, experts, .. } = &interactions[*n];
            if let Continuation::Realign(before) = interactions[*n].continuation {
                row.cut(interactions[before].prompt_ids.len());
            }
            row.read(experts.as_ref());
            row.context(prompt_ids, interactions[*n].prompt_version);
            let start = row.token_ids.len();
            let trained = self.trained.contains(n);
            row.token_ids.extend(sampled_ids);
            row.loss_mask.resize(row.token_ids.len(), trained);
            match trained {
                true => row.logprobs.extend(logprobs),
                false => row.logprobs.resize(row.token_ids.len(), 0.0),
            }
            for run in versions {
                row.versions.extend(std::iter::repeat_n(run.version, run.len as usize));
            }
            if trained {
                // A greedy completion is evaluated and not trained on.
                temperature =
                    if interactions[*n].temperature > 0.0 { interactions[*n].temperature } else { 1.0 };
                let completion = start..row.token_ids.len();
                let (stop, reward) = (interactions[*n].stop, rewards[*n]);
                turns.push(Turn { completion, stop, reward, prefill: Vec::new() });
            }
        }
        let prompt_length = self.branch.first().map_or(0, |n| interactions[*n].prompt_ids.len());
        Ok(SessionRow {
            sample: row.sample(temperature)?,
            turns,
            interactions: self.trained.clone(),
            branch: self.branch.clone(),
            prompt_length,
        })
    }
}

/// Streams of a row that is being made, `[tokens]` each.
#[derive(Default)]
struct RowStreams {
    token_ids: Vec<u32>,
    loss_mask: Vec<bool>,
    logprobs: Vec<f32>,
    versions: Vec<PolicyVersion>,
    /// `None` if a call has not recorded them.
    experts: Option<TokenExperts>,
}

impl RowStreams {
    /// Keeps the first `tokens` tokens.
    fn cut(&mut self, tokens: usize) {
        if let Some(experts) = &mut self.experts {
            experts.truncate(tokens, self.token_ids.len());
        }
        self.token_ids.truncate(tokens);
        self.loss_mask.truncate(tokens);
        self.logprobs.truncate(tokens);
        self.versions.truncate(tokens);
    }

    /// Adds the experts of the tokens that a call read first, of all its tokens.
    fn read(&mut self, experts: Option<&TokenExperts>) {
        match (&mut self.experts, experts) {
            (none, Some(experts)) if self.token_ids.is_empty() => *none = Some(experts.clone()),
            (Some(known), Some(experts)) => known.extend(experts),
            (known, _) => *known = None,
        }
    }

    /// Adds what `prompt [P]` has after the tokens so far, which it begins with.
    fn context(&mut self, prompt: &[u32], version: PolicyVersion) {
        debug_assert!(prompt.starts_with(&self.token_ids), "a prompt continues its branch");
        self.token_ids.extend(&prompt[self.token_ids.len().min(prompt.len())..]);
        let tokens = self.token_ids.len();
        self.loss_mask.resize(tokens, false);
        self.logprobs.resize(tokens, 0.0);
        self.versions.resize(tokens, version);
    }

    fn sample(self, temperature: f32) -> Result<Sample, SampleError> {
        let runs = self.versions.chunk_by(|a, b| a == b);
        let versions = runs.map(|run| VersionRun { version: run[0], len: run.len() as u32 }).collect();
        Sample::new(SampleStreams {
            token_ids: self.token_ids,
            loss_mask: self.loss_mask,
            behavior_logprobs: self.logprobs,
            versions,
            kept: None,
            experts: self.experts,
            temperature,
        })
    }
}
