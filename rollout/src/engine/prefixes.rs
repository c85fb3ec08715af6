//! KV pages of completions that ended, for any later request whose prompt begins with the same tokens: the next turn of a
//! conversation, or another conversation with the same system message (prefix cache, vLLM, arXiv 2309.06180).
//!
//! Kept pages have no reservation: they are freed when the engine needs their space, least recently used first.
//!
//! Invariant: kept pages have the keys and values of their tokens under the weights that are served, so that a request which
//! continues them samples what it would sample after a prefill of its whole prompt.

use std::collections::VecDeque;

use model::KvCache;

use super::retained::CachedPrefix;
use crate::sampler::RequestOptions;

/// Most completions that are kept of a model without a recurrence.
pub(super) const MOST: usize = 512;

/// The kept completions, least recently used first.
#[derive(Debug)]
pub(super) struct PrefixCache {
    kept: VecDeque<KeptPrefix>,
    /// Most completions that are kept.
    most: usize,
}

/// What a request and a kept completion have in common if the request may continue it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefixKey {
    salt: u64,
    /// Another adapter has other keys and values.
    adapter: Option<usize>,
}

impl PrefixKey {
    /// That of a request, if it takes part in the prefix cache.
    pub(super) fn of(options: &RequestOptions) -> Option<Self> {
        options.prefix_cache.map(|salt| Self { salt, adapter: options.adapter })
    }
}

#[derive(Debug)]
struct KeptPrefix {
    /// Requests with another key do not find it.
    key: PrefixKey,
    /// The tokens whose keys and values are in `pages`.
    token_ids: Vec<u32>,
    pages: Vec<u32>,
}

impl PrefixCache {
    /// Keeps `most` completions at most.
    pub(super) fn new(most: usize) -> Self {
        Self { kept: VecDeque::new(), most }
    }

    /// Keeps `pages`, which have `token_ids` in the cache. A kept prefix of them is freed.
    pub(super) fn keep(
        &mut self,
        key: PrefixKey,
        token_ids: Vec<u32>,
        mut pages: Vec<u32>,
        cache: &mut KvCache,
    ) {
        cache.release(&pages.split_off(KvCache::pages_for(token_ids.len())));
        self.kept.retain(|kept| {
            let stays = kept.key != key || !token_ids.starts_with(&kept.token_ids);
            if !stays {
                cache.release(&kept.pages);
            }
            stays
        });
        self.kept.push_back(KeptPrefix { key, token_ids, pages });
        while self.kept.len() > self.most {
            self.pop(cache);
        }
    }

    /// The longest kept beginning of `prompt` from which it can resume, whose pages are now shared: all but its last token at most,
    /// since the logits of the last are wanted.
    pub(super) fn share(&mut self, key: PrefixKey, prompt: &[u32], cache: &mut KvCache) -> CachedPrefix {
        let most = prompt.len().saturating_sub(1);
        let of_key = self.kept.iter().enumerate().filter(|(_, kept)| kept.key == key);
        let usable =
            |kept: &KeptPrefix| cache.resumable(&kept.pages, common(&kept.token_ids, prompt).min(most));
        let longest = of_key.map(|(at, kept)| (usable(kept), at)).max();
        // Less than a page costs a copy of the page.
        let Some((tokens, at)) = longest.filter(|(tokens, _)| *tokens >= KvCache::PAGE) else {
            return CachedPrefix::default();
        };
        let Some(kept) = self.kept.remove(at) else { return CachedPrefix::default() };
        let pages = kept.pages[..KvCache::pages_for(tokens)].to_vec();
        cache.share(&pages);
        self.kept.push_back(kept);
        CachedPrefix { tokens, pages }
    }

    /// Frees kept pages until `pages` are free or none is kept.
    pub(super) fn evict(&mut self, pages: usize, cache: &mut KvCache) {
        while cache.free_pages() < pages && self.pop(cache) {}
    }

    /// Frees the pages that were kept of the adapters that `changed` names.
    pub(super) fn forget(&mut self, cache: &mut KvCache, changed: impl Fn(Option<usize>) -> bool) {
        self.kept.retain(|kept| {
            let stays = !changed(kept.key.adapter);
            if !stays {
                cache.release(&kept.pages);
            }
            stays
        });
    }

    /// Frees all kept pages.
    pub(super) fn clear(&mut self, cache: &mut KvCache) {
        while self.pop(cache) {}
    }

    /// Frees the pages that were not used for the longest time. False if none are kept.
    fn pop(&mut self, cache: &mut KvCache) -> bool {
        let Some(first) = self.kept.pop_front() else { return false };
        cache.release(&first.pages);
        true
    }
}

/// Number of tokens that both begin with.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
