//! A prompt during prefill, before its completions begin.

use std::collections::VecDeque;

use model::{KvCache, StepSequence};
use trajectory::{PolicyVersion, VersionRun};

use super::interrupt::Interruption;
use super::retained::CachedPrefix;
use super::sequence::{Prefilled, Sequence};
use super::stop::StopRules;
use crate::requests::FIRST_GROUP;
use crate::sampler::SampleRequest;

/// A request whose prompt is being prefilled.
#[derive(Debug)]
pub(super) struct PromptJob {
    /// Number of the request.
    pub(super) number: u64,
    pub(super) request: SampleRequest,
    /// Prompt tokens that are in the KV cache.
    pub(super) prefilled: usize,
    /// The versions that prefilled the tokens of this request.
    prefill: Vec<VersionRun>,
    pub(super) pages: Vec<u32>,
}

impl PromptJob {
    /// Request `number`, of whose prompt the tokens of `cached` are in the cache.
    pub(super) fn new(number: u64, request: SampleRequest, cached: CachedPrefix) -> Self {
        Self { number, request, prefilled: cached.tokens, prefill: Vec::new(), pages: cached.pages }
    }

    /// Prefills from the first token again, into the same pages.
    pub(super) fn restart(&mut self) {
        self.prefilled = 0;
        self.prefill.clear();
    }

    /// No other request may continue its pages, if some are filled.
    pub(super) fn leave_prefix_cache(&mut self) {
        if self.prefilled > 0 {
            self.request.options.prefix_cache = None;
        }
    }

    /// The next `tokens` tokens were prefilled by `version`.
    pub(super) fn advance(&mut self, tokens: usize, version: PolicyVersion) {
        match self.prefill.last_mut() {
            Some(run) if run.version == version => run.len += tokens as u32,
            _ => self.prefill.push(VersionRun { version, len: tokens as u32 }),
        }
        self.prefilled += tokens;
    }

    /// Prompt tokens after which a step ends, so that a recurrent state is left for requests that begin with the same tokens: the
    /// whole pages before the last token. None if no request may continue them.
    pub(super) fn state_at(&self) -> Option<usize> {
        let whole = self.request.prompt.len().saturating_sub(1) / KvCache::PAGE * KvCache::PAGE;
        (self.request.options.prefix_cache.is_some() && whole > 0).then_some(whole)
    }

    /// Takes the pages that the next `tokens` tokens need.
    pub(super) fn reserve_pages(&mut self, tokens: usize, cache: &mut KvCache) {
        cache.make_writable(&mut self.pages, self.prefilled, self.prefilled + tokens);
    }

    /// The next `tokens` tokens; logits are wanted of the last of the prompt.
    pub(super) fn next(&self, tokens: usize) -> StepSequence<'_> {
        let end = self.prefilled + tokens;
        StepSequence {
            tokens: &self.request.prompt[self.prefilled..end],
            position: self.prefilled,
            pages: &self.pages,
            wanted: usize::from(end == self.request.prompt.len()),
            adapter: self.request.options.adapter,
        }
    }

    /// The completions of the prompt, which share its pages.
    pub(super) fn into_sequences(
        self,
        cache: &mut KvCache,
        seed: u64,
        stop: &StopRules,
        interruption: Option<&Interruption>,
    ) -> VecDeque<Sequence> {
        let Self { number, request, pages, prefill, .. } = self;
        for _ in 1..request.sequences() {
            cache.share(&pages);
        }
        let prompt = Prefilled { number, request: &request, prefill: &prefill, pages: &pages };
        let sequence = |n: usize| {
            let index = request.first_index + n as u32;
            // Requests of clients are never interrupted: they would take the text for tokens of the policy.
            let interruption = interruption.filter(|_| request.group < FIRST_GROUP);
            let planned = interruption.map(|interruption| interruption.of(seed, request.group, index));
            Sequence::new(prompt, n, seed, stop, planned)
        };
        (0..request.sequences()).map(sequence).collect()
    }
}
