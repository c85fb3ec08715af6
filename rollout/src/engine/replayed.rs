//! Samples recorded trajectories again and compares every token.
//!
//! The record says which version sampled which tokens, and which version prefilled what of a prompt. With these versions the
//! network computes the same logits, the same random numbers draw from them, and a pass has as many tokens as one version
//! sampled in a row: the recorded tokens are proposals that are verified, as in speculation, so that no pass is made per token.
//!
//! Invariant: a trajectory without a difference is what an engine samples with the same weights, seed and versions, bit for bit.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use model::on_device::DrawRequest;
use model::{KvCache, Sampling, StepSequence, ThreadPool};
use trajectory::{GroupId, PolicyVersion, Sample, StopReason, TokenExperts, Trajectory, Turn, VersionRun};

use super::interrupt::Interruption;
use super::network::{Network, TokenRequest};
use super::sequence::{turn_stream, uniform};
use super::stop::StopRules;
use crate::RolloutError;

/// Most tokens of a pass.
const PASS: usize = 64;

/// How the recorded trajectories were sampled.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    /// Seed of all random streams.
    pub seed: u64,
    /// How tokens were chosen.
    pub sampling: Sampling,
    /// What ended completions.
    pub stop: StopRules,
    /// The text inserted into completions, if any was.
    pub interruption: Option<Interruption>,
    /// Whether the KV cache of sequences in flight was recomputed under every new version.
    pub recomputes: bool,
    /// Whether experts were recorded.
    pub records_experts: bool,
}

/// Samples recorded trajectories again, under the versions of the weights that it holds.
#[derive(Debug)]
pub struct TrajectoryReplay {
    config: ReplayConfig,
    networks: BTreeMap<PolicyVersion, Network>,
    pool: Arc<ThreadPool>,
}

/// The first difference between a recorded trajectory and the same trajectory sampled again.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledDifference {
    /// Position of the token in its sample, prompt included.
    pub token: usize,
    /// The version that sampled it.
    pub version: PolicyVersion,
    /// What differs.
    pub values: DifferentValues,
}

/// Recorded and repeated values that differ.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum DifferentValues {
    /// Token ids.
    Token {
        /// The recorded one.
        recorded: u32,
        /// The one that was sampled again.
        again: u32,
    },
    /// Log-probabilities, nats.
    Logprob {
        /// The recorded one.
        recorded: f32,
        /// The one that was computed again.
        again: f32,
    },
    /// Numbers of tokens that truncation kept, or the kept tokens themselves.
    Kept {
        /// Tokens in the recorded set.
        recorded: usize,
        /// Tokens in the set that was computed again.
        again: usize,
    },
    /// The experts that the tokens of a turn were routed to.
    Experts,
    /// Where a completion ends.
    End {
        /// Why it ended.
        recorded: StopReason,
    },
    /// Turns, versions and tokens that do not fit each other.
    Record(&'static str),
}

impl fmt::Display for SampledDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, version, values } = self;
        write!(f, "token {token}, sampled by {version}: ")?;
        match values {
            DifferentValues::Token { recorded, again } => {
                write!(f, "recorded is token id {recorded}, sampled again {again}")
            }
            DifferentValues::Logprob { recorded, again } => {
                let apart = (f64::from(*recorded) - f64::from(*again)).abs();
                write!(
                    f,
                    "recorded is log-probability {recorded:?}, computed again {again:?}, {apart:.3e} apart"
                )
            }
            DifferentValues::Kept { recorded, again } => {
                write!(f, "truncation kept {recorded} tokens in the record and {again} again, or others")
            }
            DifferentValues::Experts => f.write_str("up to it tokens were routed to other experts"),
            DifferentValues::End { recorded } => {
                write!(
                    f,
                    "the record says that the completion ends there by {recorded:?}, the stop rules do not"
                )
            }
            DifferentValues::Record(what) => f.write_str(what),
        }
    }
}

/// The KV cache of one trajectory.
struct TrajectoryCache {
    cache: KvCache,
    pages: Vec<u32>,
    /// Positions in it.
    known: usize,
    /// The version that filled it last.
    version: Option<PolicyVersion>,
}

/// A turn of a recorded sample.
struct ReplayedTurn<'a> {
    group: GroupId,
    trajectory: &'a Trajectory,
    sample: &'a Sample,
    /// `[tokens]`
    versions: &'a [PolicyVersion],
    turn: &'a Turn,
    /// Its number in the episode.
    number: usize,
    /// End of the turn before.
    before: usize,
}

impl TrajectoryReplay {
    /// A replay without weights that computes on `pool`.
    #[must_use]
    pub fn new(config: ReplayConfig, pool: Arc<ThreadPool>) -> Self {
        Self { config, networks: BTreeMap::new(), pool }
    }

    /// Holds `network` as the weights of `version`.
    pub fn hold(&mut self, version: PolicyVersion, network: Network) {
        self.networks.insert(version, network);
    }

    /// Frees the weights of versions before `version`.
    pub fn free_before(&mut self, version: PolicyVersion) {
        self.networks = self.networks.split_off(&version);
    }

    /// Whether it has all versions that sampled `trajectory`.
    #[must_use]
    pub fn can_sample(&self, trajectory: &Trajectory) -> bool {
        let prefilled = trajectory.turns.iter().flat_map(|turn| &turn.prefill);
        let mut runs = trajectory.sample.versions().iter().chain(prefilled);
        runs.all(|run| self.networks.contains_key(&run.version))
    }

    /// Samples a trajectory of one token stream again. Returns the first difference. It has all its versions.
    ///
    /// # Errors
    /// If the network fails.
    pub fn first_difference(
        &mut self,
        group: GroupId,
        trajectory: &Trajectory,
    ) -> Result<Option<SampledDifference>, RolloutError> {
        let sample = &trajectory.sample;
        let versions: Vec<PolicyVersion> = expanded(sample.versions());
        let Some(network) = versions.first().and_then(|version| self.networks.get(version)) else {
            return Ok(None);
        };
        let (config, cache) = (network.config(), network.cache(sample.token_ids().len() + KvCache::PAGE));
        let cache = if self.config.records_experts { cache.with_routes(config) } else { cache };
        let per_token = config.experts().map_or(0, |experts| experts.per_token as u32);
        let mut state = TrajectoryCache { cache, pages: Vec::new(), known: 0, version: None };
        let (mut before, mut drawn) = (0, 0);
        let mut experts: Option<TokenExperts> = None;
        for (number, turn) in trajectory.turns.iter().enumerate() {
            let versions = &versions;
            let recorded = ReplayedTurn { group, trajectory, sample, versions, turn, number, before };
            if let Some(difference) = self.turn(&recorded, &mut state, &mut drawn)? {
                return Ok(Some(difference));
            }
            before = turn.completion.end;
            if let Some(ids) = state.cache.routes(&state.pages, before - 1) {
                let all = TokenExperts { per_token, ids };
                experts.get_or_insert_with(|| TokenExperts { per_token, ids: Vec::new() }).extend(&all);
            }
        }
        let differ =
            sample.experts().zip(experts.as_ref()).is_some_and(|(recorded, again)| recorded != again);
        let last = before.saturating_sub(1);
        Ok(differ.then(|| recorded_at(&versions, last, DifferentValues::Experts)))
    }

    /// Samples the completion of a turn again, after its prompt.
    fn turn(
        &mut self,
        recorded: &ReplayedTurn<'_>,
        state: &mut TrajectoryCache,
        drawn: &mut usize,
    ) -> Result<Option<SampledDifference>, RolloutError> {
        let ReplayedTurn { sample, versions, turn, .. } = recorded;
        let Range { start, end } = turn.completion.clone();
        if start == 0 || end <= start || start < recorded.before || end > versions.len() {
            let what = "a turn has no prompt or no token";
            return Ok(Some(recorded_at(versions, start, DifferentValues::Record(what))));
        }
        let tokens = sample.token_ids();
        if !self.config.recomputes {
            let runs = recorded.prefill();
            let prefilled: usize = runs.iter().map(|run| run.len as usize).sum();
            let from = start.checked_sub(prefilled).filter(|from| *from <= state.known);
            let Some(from) = from else {
                let what = "the prompt has tokens that no version prefilled";
                return Ok(Some(recorded_at(versions, start, DifferentValues::Record(what))));
            };
            state.known = from;
            for run in runs {
                // The last token of the prompt is read by the pass that samples.
                let to = (state.known + run.len as usize).min(start - 1);
                self.read(tokens, to, run.version, state)?;
            }
        }
        let mut random = turn_stream(
            self.config.seed,
            recorded.group,
            recorded.trajectory.index,
            u32::try_from(recorded.number).unwrap_or(u32::MAX),
        );
        let mut at = start;
        while at < end {
            let version = versions[at];
            let same = versions[at..end].iter().take_while(|of| **of == version).count();
            let pass = at..at + same.min(PASS);
            let numbers = self.numbers(recorded, pass.clone(), &mut random);
            self.read(tokens, at - 1, version, state)?;
            if let Some(difference) = self.pass(recorded, pass.clone(), &numbers, state, drawn)? {
                return Ok(Some(difference));
            }
            at = pass.end;
        }
        Ok(self.ending(recorded))
    }

    /// The random number of every token of `pass`; `None` for tokens that were inserted.
    fn numbers(
        &self,
        recorded: &ReplayedTurn<'_>,
        pass: Range<usize>,
        random: &mut rand_chacha::ChaCha8Rng,
    ) -> Vec<Option<f32>> {
        let start = recorded.turn.completion.start;
        let (seed, index) = (self.config.seed, recorded.trajectory.index);
        let planned = self.config.interruption.as_ref().map(|text| text.of(seed, recorded.group, index));
        let inserted =
            |at: usize| planned.as_ref().is_some_and(|planned| planned.token(at - start).is_some());
        pass.map(|at| (!inserted(at)).then(|| uniform(random))).collect()
    }

    /// Reads tokens into the cache under `version`, until it has `to` positions.
    fn read(
        &mut self,
        tokens: &[u32],
        to: usize,
        version: PolicyVersion,
        state: &mut TrajectoryCache,
    ) -> Result<(), RolloutError> {
        if self.config.recomputes && state.version != Some(version) {
            state.known = 0;
        }
        while state.known < to {
            let chunk = state.known..to.min(state.known + PASS);
            self.step(&tokens[chunk.clone()], chunk.start, 0, version, state)?;
        }
        Ok(())
    }

    /// One pass of the network of `version` over `tokens`, the first at `position`; logits of the last `wanted`.
    fn step(
        &mut self,
        tokens: &[u32],
        position: usize,
        wanted: usize,
        version: PolicyVersion,
        state: &mut TrajectoryCache,
    ) -> Result<(), RolloutError> {
        let Some(network) = self.networks.get_mut(&version) else { return Ok(()) };
        let end = position + tokens.len();
        state.cache.make_writable(&mut state.pages, position, end);
        let step = StepSequence { tokens, position, pages: &state.pages, wanted, adapter: None };
        network.step(&mut state.cache, &[step], &self.pool)?;
        (state.known, state.version) = (end, Some(version));
        Ok(())
    }

    /// Draws the tokens of `pass` again and compares them with the recorded ones.
    fn pass(
        &mut self,
        recorded: &ReplayedTurn<'_>,
        pass: Range<usize>,
        numbers: &[Option<f32>],
        state: &mut TrajectoryCache,
        drawn: &mut usize,
    ) -> Result<Option<SampledDifference>, RolloutError> {
        let ReplayedTurn { trajectory, sample, versions, .. } = recorded;
        let (version, tokens) = (versions[pass.start], sample.token_ids());
        self.step(&tokens[pass.start - 1..pass.end - 1], pass.start - 1, pass.len(), version, state)?;
        let sampling = if trajectory.baseline { Sampling::GREEDY } else { self.config.sampling };
        let request = |(row, number): (usize, &Option<f32>)| {
            let draw = DrawRequest { row, sampling, uniform: (*number)? };
            Some(TokenRequest { draw, alternatives: 0 })
        };
        let requests: Vec<TokenRequest> = numbers.iter().enumerate().filter_map(request).collect();
        let Some(network) = self.networks.get_mut(&version) else { return Ok(None) };
        let again = network.draw(&requests, &self.pool)?;
        let positions = pass.clone().zip(numbers).filter(|(_, number)| number.is_some());
        for ((at, _), again) in positions.zip(again) {
            let draw = again.draw;
            if draw.token != tokens[at] {
                let values = DifferentValues::Token { recorded: tokens[at], again: draw.token };
                return Ok(Some(recorded_at(versions, at, values)));
            }
            // An environment may have taken a turn out of what is trained on, with what was recorded of it.
            if !sample.loss_mask()[at] {
                continue;
            }
            let recorded = sample.behavior_logprobs()[at];
            if recorded.to_bits() != draw.logprob.to_bits() {
                let values = DifferentValues::Logprob { recorded, again: draw.logprob };
                return Ok(Some(recorded_at(versions, at, values)));
            }
            let kept = sample.kept().map(|kept| kept.set(*drawn));
            *drawn += 1;
            let again = draw.kept.as_deref();
            if kept != again {
                let len = |set: Option<&[u32]>| set.map_or(0, <[u32]>::len);
                let values = DifferentValues::Kept { recorded: len(kept), again: len(again) };
                return Ok(Some(recorded_at(versions, at, values)));
            }
        }
        Ok(None)
    }

    /// Whether the stop tokens end the completion elsewhere than in the record.
    fn ending(&self, recorded: &ReplayedTurn<'_>) -> Option<SampledDifference> {
        let Turn { completion, stop, .. } = recorded.turn;
        let tokens = &recorded.sample.token_ids()[completion.clone()];
        let first = tokens.iter().position(|token| self.config.stop.is_stop_token(*token));
        let expected = (*stop == StopReason::StopToken).then(|| tokens.len() - 1);
        let values = DifferentValues::End { recorded: *stop };
        (first != expected).then(|| {
            let at = completion.start + first.or(expected).unwrap_or_default();
            recorded_at(recorded.versions, at, values)
        })
    }
}

impl ReplayedTurn<'_> {
    /// The versions that prefilled the end of the prompt, see [`Turn::prefill`].
    fn prefill(&self) -> Vec<VersionRun> {
        if !self.turn.prefill.is_empty() {
            return self.turn.prefill.clone();
        }
        let usual = self.turn.completion.start - self.before.saturating_sub(1);
        vec![VersionRun { version: self.versions[self.before], len: usual as u32 }]
    }
}

/// The version of every token.
fn expanded(runs: &[VersionRun]) -> Vec<PolicyVersion> {
    runs.iter().flat_map(|run| std::iter::repeat_n(run.version, run.len as usize)).collect()
}

fn recorded_at(versions: &[PolicyVersion], token: usize, values: DifferentValues) -> SampledDifference {
    let version = versions.get(token).copied().unwrap_or_default();
    SampledDifference { token, version, values }
}
