//! The token streams of a trajectory on the wire: one branch of an episode.
//!
//! Invariant: the first branch, whose fields are those of the trajectory itself, passes the same checks as every other.

use serde::ser::{SerializeStruct, Serializer};
use serde::{Deserialize, Serialize};
use trajectory::{
    Branch, KeptTokens, PolicyVersion, Sample, SampleError, SampleStreams, TokenExperts, Trajectory, Turn,
    VersionRun,
};
use utoipa::ToSchema;

use super::group::{
    ExpertsBody, ItemLimits, KeptBody, MappedSequence, RunBody, TurnBody, ValidationResult, one, reject,
};
use crate::http::problem::ProblemCode;

/// A further token stream of an episode. The three streams have one entry per token, prompt and completion.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = BranchRequest)]
pub(super) struct BranchBody {
    /// Token ids of prompt and completion.
    pub(super) token_ids: Vec<u32>,
    /// True for tokens that the policy sampled and that are trained on, in one branch of the episode each; never for the
    /// first.
    pub(super) loss_mask: Vec<bool>,
    /// Log-probability under the distribution that the token was sampled from, nats; 0 where the mask is false.
    pub(super) behavior_logprobs: Vec<f32>,
    /// Runs of policy versions over all tokens.
    pub(super) versions: Option<Vec<RunBody>>,
    /// The version that sampled all tokens, instead of `versions`.
    pub(super) policy_version: Option<u64>,
    /// Sampling temperature, above 0.
    #[serde(default = "one")]
    pub(super) temperature: f32,
    /// The tokens that truncation (top-k, top-p) kept.
    pub(super) kept: Option<KeptBody>,
    /// The experts of the tokens, of a model with experts.
    pub(super) experts: Option<ExpertsBody>,
    /// The model calls that are in no earlier branch, in order.
    #[serde(default)]
    pub(super) turns: Vec<TurnBody>,
}

impl BranchBody {
    /// Validates and converts a branch of a trajectory, which may be a `baseline`.
    pub(super) fn check(self, limits: ItemLimits, baseline: bool) -> ValidationResult<Branch> {
        let tokens = self.token_ids.len();
        if tokens == 0 {
            return reject(ProblemCode::EmptyTrajectory, "`token_ids` is empty");
        }
        if tokens > limits.tokens {
            return reject(
                ProblemCode::TooManyTokens,
                format!("{tokens} tokens, at most {} are taken", limits.tokens),
            );
        }
        if let Some(size) = limits.vocabulary {
            let kept = self.kept.iter().flat_map(|kept| &kept.ids);
            if let Some(id) = self.token_ids.iter().chain(kept).find(|id| **id >= size) {
                let detail = format!("token id {id}; the vocabulary has {size} ids, from 0");
                return reject(ProblemCode::TokenOutOfVocabulary, detail);
            }
        }
        check_turns(&self.turns, tokens)?;
        let mut rewards = self.turns.iter().filter_map(|turn| turn.reward);
        if let Some(reward) = rewards.find(|reward| !reward.is_finite()) {
            return reject(ProblemCode::NotFinite, format!("a reward is {reward}"));
        }
        if let Some(token) = self.loss_mask.iter().position(|trained| baseline && *trained) {
            let detail = format!("`loss_mask` is true at token {token}; a `baseline` is not trained on");
            return reject(ProblemCode::BadBaseline, detail);
        }
        let sample = Sample::new(SampleStreams {
            versions: runs(self.versions, self.policy_version, tokens)?,
            token_ids: self.token_ids,
            loss_mask: self.loss_mask,
            behavior_logprobs: self.behavior_logprobs,
            kept: self.kept.map(|kept| KeptTokens { offsets: kept.offsets, ids: kept.ids }),
            experts: self
                .experts
                .map(|experts| TokenExperts { per_token: experts.per_token, ids: experts.ids }),
            temperature: self.temperature,
        })
        .or_else(|error| reject(code_of(&error), error.to_string()))?;
        Ok(Branch { sample, turns: self.turns.into_iter().map(Turn::from).collect() })
    }
}

/// The further branches of a trajectory.
pub(super) fn checked_branches(
    branches: Vec<BranchBody>,
    limits: ItemLimits,
    baseline: bool,
) -> ValidationResult<Vec<Branch>> {
    let (count, most) = (branches.len(), Trajectory::MAX_BRANCHES);
    if count > most {
        return reject(
            ProblemCode::TooManyTrajectories,
            format!("{count} branches of one trajectory, at most {most} are taken"),
        );
    }
    let check = |(n, branch): (usize, BranchBody)| {
        branch.check(limits, baseline).map_err(|rejection| super::group::Rejection {
            detail: format!("branches[{n}]: {}", rejection.detail),
            ..rejection
        })
    };
    branches.into_iter().enumerate().map(check).collect()
}

fn check_turns(turns: &[TurnBody], tokens: usize) -> ValidationResult<()> {
    let mut free = 0;
    for (n, turn) in turns.iter().enumerate() {
        if turn.start < free || turn.end < turn.start || turn.end > tokens {
            let TurnBody { start, end, .. } = turn;
            let detail = format!(
                "turns[{n}] is {start}..{end}; turns are ascending, do not overlap and end by {tokens}"
            );
            return reject(ProblemCode::BadTurn, detail);
        }
        let prefilled: u64 = turn.prefill.iter().map(|run| u64::from(run.len)).sum();
        if prefilled > turn.start as u64 || turn.prefill.iter().any(|run| run.len == 0) {
            let detail = format!(
                "turns[{n}].prefill has runs of {prefilled} tokens; each has one at least, and {} tokens are before the \
                 completion",
                turn.start
            );
            return reject(ProblemCode::BadTurn, detail);
        }
        free = turn.end;
    }
    Ok(())
}

fn runs(
    versions: Option<Vec<RunBody>>,
    version: Option<u64>,
    tokens: usize,
) -> ValidationResult<Vec<VersionRun>> {
    match (versions, version) {
        (Some(runs), None) => match runs.iter().position(|run| run.len == 0) {
            Some(n) => reject(ProblemCode::BadVersions, format!("versions[{n}] has no tokens; leave it out")),
            None => {
                let run = |run: RunBody| VersionRun { version: PolicyVersion(run.version), len: run.len };
                Ok(runs.into_iter().map(run).collect())
            }
        },
        (None, Some(version)) => match u32::try_from(tokens) {
            Ok(len) => Ok(vec![VersionRun { version: PolicyVersion(version), len }]),
            Err(_) => {
                reject(ProblemCode::TooManyTokens, format!("{tokens} tokens are more than one run can have"))
            }
        },
        (None, None) => reject(ProblemCode::BadVersions, "give `policy_version` or `versions`"),
        (Some(_), Some(_)) => {
            reject(ProblemCode::BadVersions, "give either `policy_version` or `versions`, not both")
        }
    }
}

fn code_of(error: &SampleError) -> ProblemCode {
    match error {
        SampleError::Empty => ProblemCode::EmptyTrajectory,
        SampleError::FirstTokenTrained => ProblemCode::FirstTokenTrained,
        SampleError::Logprob { value, .. } if value.is_finite() => ProblemCode::LogprobPositive,
        SampleError::Logprob { .. } => ProblemCode::NotFinite,
        SampleError::Temperature(_) => ProblemCode::BadTemperature,
        SampleError::Kept { .. } => ProblemCode::BadKept,
        SampleError::Experts { .. } => ProblemCode::BadExperts,
        _ => ProblemCode::UnequalLengths,
    }
}

impl From<&Turn> for TurnBody {
    fn from(turn: &Turn) -> Self {
        let Turn { completion, stop, reward, prefill } = turn;
        let run = |run: &VersionRun| RunBody { version: run.version.0, len: run.len };
        let prefill = prefill.iter().map(run).collect();
        Self { start: completion.start, end: completion.end, stop: *stop, reward: *reward, prefill }
    }
}

impl From<TurnBody> for Turn {
    fn from(TurnBody { start, end, stop, reward, prefill }: TurnBody) -> Self {
        let run = |run: RunBody| VersionRun { version: PolicyVersion(run.version), len: run.len };
        Self { completion: start..end, stop, reward, prefill: prefill.into_iter().map(run).collect() }
    }
}

/// A branch in an answer; every field is present, but `experts` only where they were recorded.
pub(super) struct BranchView<'a>(pub(super) &'a Branch);

impl Serialize for BranchView<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Branch { sample, turns } = self.0;
        let mut branch =
            serializer.serialize_struct("Branch", 7 + usize::from(sample.experts().is_some()))?;
        branch.serialize_field("token_ids", sample.token_ids())?;
        branch.serialize_field("loss_mask", sample.loss_mask())?;
        branch.serialize_field("behavior_logprobs", sample.behavior_logprobs())?;
        branch.serialize_field("versions", sample.versions())?;
        branch.serialize_field("temperature", &sample.temperature())?;
        branch.serialize_field("kept", &sample.kept())?;
        if let Some(experts) = sample.experts() {
            branch.serialize_field("experts", experts)?;
        }
        branch.serialize_field("turns", &MappedSequence(turns, TurnBody::from))?;
        branch.end()
    }
}
