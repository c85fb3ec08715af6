//! One completion during decode.

use std::ops::Range;

use model::on_device::DrawRequest;
use model::{KvCache, Sampling, StepSequence, TokenLogprob};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use trajectory::{GroupId, KeptTokens, PolicyVersion, StopReason, TokenExperts, VersionRun};

use super::interrupt::Planned;
use super::network::{DrawnToken, TokenRequest};
use super::prefixes::PrefixKey;
use super::speculate::propose;
use super::stop::{StopRules, TextWatch};
use crate::RolloutError;
use crate::sampler::{Completion, PartialCompletion, RequestOptions, SampleRequest};

/// A prompt in the KV cache, from which completions begin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefilled<'a> {
    /// Number of the request.
    pub(super) number: u64,
    pub(super) request: &'a SampleRequest,
    /// The versions that prefilled it, but for what was in the cache.
    pub(super) prefill: &'a [VersionRun],
    pub(super) pages: &'a [u32],
}

/// One completion during decode.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Number of the request that it belongs to.
    pub(super) request: u64,
    pub(super) group: GroupId,
    pub(super) index: u32,
    /// Whether its pages stay in the cache for the next turn of its episode.
    pub(super) keep_cache: bool,
    pub(super) prompt_length: usize,
    prefill: Vec<VersionRun>,
    pub(super) token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    versions: Vec<VersionRun>,
    kept: Option<KeptTokens>,
    /// The most likely tokens at each position; empty if none were asked for.
    alternatives: Vec<Vec<TokenLogprob>>,
    options: RequestOptions,
    /// Sampled tokens that a partial completion has reported.
    reported: usize,
    sampling: Sampling,
    max_completion_length: usize,
    pub(super) pages: Vec<u32>,
    rng: ChaCha8Rng,
    watch: Option<TextWatch>,
    interruption: Option<Planned>,
    baseline: bool,
    /// The newest token and the proposals behind it, for the next pass.
    pass: Vec<u32>,
    /// Why it ended, once that is known.
    stopped: Option<StopReason>,
}

/// Proposals of one pass, and how many were accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Verified {
    /// Tokens appended.
    pub(super) sampled: u64,
    pub(super) proposed: u64,
    pub(super) accepted: u64,
}

impl Sequence {
    pub(super) fn new(
        prompt: Prefilled<'_>,
        n: usize,
        seed: u64,
        stop: &StopRules,
        interruption: Option<Planned>,
    ) -> Self {
        let Prefilled { number, request, prefill, pages } = prompt;
        let kept = KeptTokens { offsets: vec![0], ids: Vec::new() };
        let baseline = n >= request.samples;
        let index = request.first_index + n as u32;
        let sampling = if baseline { Sampling::GREEDY } else { request.sampling };
        Self {
            request: number,
            group: request.group,
            index,
            keep_cache: request.keep_cache,
            prompt_length: request.prompt.len(),
            prefill: prefill.to_vec(),
            token_ids: request.prompt.clone(),
            logprobs: Vec::new(),
            versions: Vec::new(),
            kept: sampling.truncates().then_some(kept),
            alternatives: Vec::new(),
            options: request.options.clone(),
            reported: 0,
            sampling,
            max_completion_length: request.max_completion_length,
            pages: pages.to_vec(),
            rng: match request.options.seed {
                Some(seed) => seeded_stream(seed, index),
                None => turn_stream(seed, request.group, index, request.turn),
            },
            watch: stop.watch(&request.options.stop),
            interruption,
            baseline,
            pass: Vec::new(),
            stopped: None,
        }
    }

    /// Most tokens that it can grow to, prompt included.
    pub(super) fn longest(&self) -> usize {
        self.prompt_length + self.max_completion_length
    }

    /// Chooses the tokens of the next pass: the newest, and at most `most` proposals. Makes their pages writable for this
    /// sequence alone.
    pub(super) fn prepare_pass(&mut self, most: usize, cache: &mut KvCache) {
        let sampled = self.logprobs.len();
        // One token more than was proposed is drawn, and the last has no successor.
        let left = self.max_completion_length.saturating_sub(sampled + 1);
        let inserts =
            |n: &usize| self.interruption.as_ref().is_some_and(|planned| planned.token(*n).is_some());
        let most = if (sampled..=sampled + most).any(|n| inserts(&n)) { 0 } else { most.min(left) };
        self.pass.clear();
        self.pass.push(self.token_ids[self.token_ids.len() - 1]);
        self.pass.extend_from_slice(propose(&self.token_ids, most));
        let first = self.token_ids.len() - 1;
        cache.make_writable(&mut self.pages, first, first + self.pass.len());
    }

    /// The tokens of the next pass.
    pub(super) fn pass(&self) -> StepSequence<'_> {
        let position = self.token_ids.len() - 1;
        StepSequence {
            tokens: &self.pass,
            position,
            pages: &self.pages,
            wanted: self.pass.len(),
            adapter: self.adapter(),
        }
    }

    /// The adapter that it is sampled with.
    pub(super) fn adapter(&self) -> Option<usize> {
        self.options.adapter
    }

    /// No other request may continue its pages.
    pub(super) fn leave_prefix_cache(&mut self) {
        self.options.prefix_cache = None;
    }

    /// Whether the next token is the first of a text that is put in.
    pub(super) fn is_interrupted_now(&self) -> bool {
        self.interruption.as_ref().is_some_and(|planned| planned.begins(self.logprobs.len()))
    }

    /// How the next tokens are drawn from `rows` of logits, one for each token of the pass. None if the next token is that
    /// of an interruption, which is inserted.
    pub(super) fn asks(&mut self, rows: Range<usize>, version: PolicyVersion) -> Vec<TokenRequest> {
        if let Some(token) = self.interruption.as_ref().and_then(|planned| planned.token(self.logprobs.len()))
        {
            self.push(token, 0.0, version);
            if self.options.alternatives > 0 {
                self.alternatives.push(Vec::new());
            }
            return Vec::new();
        }
        // What is not accepted leaves its random number to the next pass.
        let mut rng = self.rng.clone();
        // The likeliest token has the log-probability of a greedy choice.
        let scored = self.sampling.temperature == 0.0 && self.options.score_greedy;
        let alternatives = self.options.alternatives.max(usize::from(scored));
        let draw = |row| DrawRequest { row, sampling: self.sampling, uniform: uniform(&mut rng) };
        rows.map(draw).map(|draw| TokenRequest { draw, alternatives }).collect()
    }

    /// Appends the tokens drawn for a pass, up to the first that differs from its proposal or ends the sequence.
    pub(super) fn take(
        &mut self,
        draws: impl IntoIterator<Item = DrawnToken>,
        version: PolicyVersion,
        stop: &StopRules,
    ) -> Result<Verified, RolloutError> {
        let proposals = std::mem::take(&mut self.pass);
        let mut proposals = proposals.iter().skip(1);
        let mut verified = Verified { proposed: proposals.len() as u64, ..Verified::default() };
        for DrawnToken { draw, alternatives } in draws {
            let token = draw.token;
            let _drawn = uniform(&mut self.rng);
            if let (Some(kept), Some(ids)) = (&mut self.kept, draw.kept) {
                kept.ids.extend(ids);
                kept.offsets.push(kept.ids.len() as u32);
            }
            let greedy = self.sampling.temperature == 0.0 && self.options.score_greedy;
            let scored = alternatives.first().filter(|_| greedy).map(|likely| likely.logprob);
            self.push(token, scored.unwrap_or(draw.logprob), version);
            if self.options.alternatives > 0 {
                self.alternatives.push(alternatives);
            }
            verified.sampled += 1;
            if proposals.next() != Some(&token) {
                break;
            }
            verified.accepted += 1;
            if self.ended(stop)?.is_some() {
                break;
            }
        }
        Ok(verified)
    }

    /// What other requests need to continue its pages; none may if older weights than `version` filled some of them.
    pub(super) fn prefix_key(&self, version: PolicyVersion) -> Option<PrefixKey> {
        PrefixKey::of(&self.options).filter(|_| self.prompt_version() == version)
    }

    /// The version that began to prefill the prompt.
    fn prompt_version(&self) -> PolicyVersion {
        self.prefill.first().map_or_else(PolicyVersion::default, |run| run.version)
    }

    /// What was sampled since the last partial completion, if its request streams.
    pub(super) fn partial(&mut self) -> Option<PartialCompletion> {
        let (from, sampled) = (self.reported, self.logprobs.len());
        if !self.options.stream || from == sampled {
            return None;
        }
        self.reported = sampled;
        Some(PartialCompletion {
            group: self.group,
            index: self.index,
            token_ids: self.token_ids[self.prompt_length + from..].to_vec(),
            logprobs: self.logprobs[from..].to_vec(),
            alternatives: self.alternatives.get(from..).unwrap_or_default().to_vec(),
        })
    }

    fn push(&mut self, token: u32, logprob: f32, version: PolicyVersion) {
        self.token_ids.push(token);
        self.logprobs.push(logprob);
        match self.versions.last_mut() {
            Some(run) if run.version == version => run.len += 1,
            _ => self.versions.push(VersionRun { version, len: 1 }),
        }
    }

    /// Why the newest token ends it, if it does.
    pub(super) fn ended(&mut self, stop: &StopRules) -> Result<Option<StopReason>, RolloutError> {
        if self.stopped.is_none() {
            self.stopped = self.reason_to_stop(stop)?;
        }
        Ok(self.stopped)
    }

    fn reason_to_stop(&mut self, stop: &StopRules) -> Result<Option<StopReason>, RolloutError> {
        let newest = self.token_ids[self.token_ids.len() - 1];
        let (own, sampled) = (&self.options.stop, self.logprobs.len());
        let may_end = sampled >= own.min_tokens;
        if may_end && stop.is_stop_token_of(own, newest) {
            return Ok(Some(StopReason::StopToken));
        }
        if let Some(watch) = &mut self.watch
            && watch.push_once(sampled, newest, may_end)?
        {
            return Ok(Some(StopReason::StopString));
        }
        Ok((self.logprobs.len() >= self.max_completion_length).then_some(StopReason::Length))
    }

    /// The completion that ended for `reason`, whose tokens have `experts`.
    pub(super) fn finish(
        self,
        reason: StopReason,
        experts: Option<TokenExperts>,
        stop: &StopRules,
    ) -> Result<Completion, RolloutError> {
        let mut completion = &self.token_ids[self.prompt_length..];
        if reason == StopReason::StopToken {
            completion = &completion[..completion.len() - 1];
        }
        let text = stop.tokenizer.decode(completion)?;
        let text = match self.watch.as_ref().filter(|_| reason == StopReason::StopString) {
            Some(watch) => watch.cut(&text).to_owned(),
            None => text,
        };
        Ok(Completion {
            group: self.group,
            index: self.index,
            prompt_length: self.prompt_length,
            prompt_version: self.prompt_version(),
            prefill: self.prefill,
            token_ids: self.token_ids,
            inserted: self.interruption.and_then(|planned| planned.inserted(self.logprobs.len())),
            logprobs: self.logprobs,
            versions: self.versions,
            baseline: self.baseline,
            kept: self.kept,
            experts,
            alternatives: self.alternatives,
            sampling: self.sampling,
            stop: reason,
            text,
        })
    }
}

/// The next number of a stream, in [0, 1).
#[must_use]
pub fn uniform(rng: &mut ChaCha8Rng) -> f32 {
    (rng.next_u32() >> 8) as f32 / (1 << 24) as f32
}

/// The random numbers of a first turn: a ChaCha stream of its own, so that they depend on nothing else.
#[must_use]
pub fn random_stream(seed: u64, group: GroupId, index: u32) -> ChaCha8Rng {
    turn_stream(seed, group, index, 0)
}

/// The random numbers of completion `index` of a request with its own seed.
fn seeded_stream(seed: u64, index: u32) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[16..20].copy_from_slice(&index.to_le_bytes());
    key[20..27].copy_from_slice(b"request");
    ChaCha8Rng::from_seed(key)
}

/// The random numbers of turn `turn` of the episode `index` of `group`.
pub(super) fn turn_stream(seed: u64, group: GroupId, index: u32, turn: u32) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&group.0.to_le_bytes());
    key[16..20].copy_from_slice(&index.to_le_bytes());
    key[20..26].copy_from_slice(b"sample");
    key[26..30].copy_from_slice(&turn.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}
