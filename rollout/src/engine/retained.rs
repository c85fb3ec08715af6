//! KV pages of completions that ended, kept for the next turn of their episode.
//!
//! Kept pages have no reservation. When the engine needs their space, the completion that ended first gives its pages up,
//! and the next turn of its episode prefills all tokens again. So it does when more are kept than a bound, which models with a
//! recurrence have: each has a state beside its pages.
//!
//! Invariant: kept pages have the keys and values of the tokens that they are kept for, so that a turn which continues them
//! samples what it would sample after a prefill of its whole prompt under the same weights.

use std::collections::VecDeque;

use model::KvCache;
use trajectory::GroupId;

use super::sequence::Sequence;
use crate::sampler::SampleRequest;

/// The kept completions, in the order in which they ended.
#[derive(Debug)]
pub(super) struct RetainedPages {
    completions: VecDeque<RetainedCompletion>,
    /// Most completions that are kept.
    most: usize,
}

/// The tokens of a prompt that are in the KV cache, and their pages.
#[derive(Debug, Default)]
pub(super) struct CachedPrefix {
    /// Number of tokens.
    pub(super) tokens: usize,
    pub(super) pages: Vec<u32>,
}

#[derive(Debug)]
struct RetainedCompletion {
    group: GroupId,
    index: u32,
    adapter: Option<usize>,
    /// The tokens whose keys and values are in `pages`.
    token_ids: Vec<u32>,
    pages: Vec<u32>,
}

impl RetainedPages {
    /// Keeps `most` completions at most.
    pub(super) fn new(most: usize) -> Self {
        Self { completions: VecDeque::new(), most }
    }

    /// Keeps `pages` of the episode of `sequence`, which have `token_ids` in the cache. Returns the number of tokens that have to be
    /// prefilled again, because too many are kept.
    pub(super) fn keep(
        &mut self,
        sequence: &Sequence,
        token_ids: Vec<u32>,
        mut pages: Vec<u32>,
        cache: &mut KvCache,
    ) -> usize {
        let (group, index, adapter) = (sequence.group, sequence.index, sequence.adapter());
        self.forget(cache, |kept| kept == (group, index));
        cache.release(&pages.split_off(KvCache::pages_for(token_ids.len())));
        self.completions.push_back(RetainedCompletion { group, index, adapter, token_ids, pages });
        let mut tokens = 0;
        while self.completions.len() > self.most {
            tokens += self.pop(cache).unwrap_or(0);
        }
        tokens
    }

    /// What is in the cache of the prompt of `request`, the next turn of its episode: all but its last token at most, since
    /// the logits of the last are wanted. Another adapter has other keys and values.
    pub(super) fn take(&mut self, request: &SampleRequest, cache: &mut KvCache) -> CachedPrefix {
        let (prompt, episode) = (&request.prompt, (request.group, request.first_index));
        let found = self.completions.iter().position(|kept| (kept.group, kept.index) == episode);
        let Some(kept) = found.and_then(|at| self.completions.remove(at)) else {
            return CachedPrefix::default();
        };
        let tokens = kept.token_ids.len();
        let continues = tokens < prompt.len() && prompt.starts_with(&kept.token_ids);
        if continues && kept.adapter == request.options.adapter {
            let (tokens, mut pages) = (cache.resumable(&kept.pages, tokens), kept.pages);
            cache.release(&pages.split_off(KvCache::pages_for(tokens)));
            return CachedPrefix { tokens, pages };
        }
        cache.release(&kept.pages);
        CachedPrefix::default()
    }

    /// Frees kept pages, oldest first, until `pages` are free or none is kept. Returns the number of tokens that have to be
    /// prefilled again.
    pub(super) fn evict(&mut self, pages: usize, cache: &mut KvCache) -> usize {
        let mut tokens = 0;
        while cache.free_pages() < pages
            && let Some(freed) = self.pop(cache)
        {
            tokens += freed;
        }
        tokens
    }

    /// Frees the pages that were kept first. Returns the number of their tokens, if there were any pages.
    fn pop(&mut self, cache: &mut KvCache) -> Option<usize> {
        let first = self.completions.pop_front()?;
        cache.release(&first.pages);
        Some(first.token_ids.len())
    }

    /// Gives up the pages of the episodes, by group and index, that `ended` names.
    pub(super) fn forget(&mut self, cache: &mut KvCache, ended: impl Fn((GroupId, u32)) -> bool) {
        self.drop_those(cache, |kept| ended((kept.group, kept.index)));
    }

    /// Gives up the pages that `adapter` filled.
    pub(super) fn forget_adapter(&mut self, cache: &mut KvCache, adapter: usize) {
        self.drop_those(cache, |kept| kept.adapter == Some(adapter));
    }

    fn drop_those(&mut self, cache: &mut KvCache, dropped: impl Fn(&RetainedCompletion) -> bool) {
        self.completions.retain(|kept| {
            let stays = !dropped(kept);
            if !stays {
                cache.release(&kept.pages);
            }
            stays
        });
    }
}
