//! Prefill and decode over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv 2309.06180).
//!
//! Invariant: a page is written by one sequence only; [`KvCache::own`] copies a shared page first (copy on write). Prefill
//! and decode are the same call: a sequence has one or more new tokens.

use candle_core::{Result, Tensor};

use super::mixer::MixingRule;
use super::{Decoder, gather};
use crate::ops::attention::{AttentionRule, PAGE, PageLayout};
use crate::ops::experts::ExpertRoutes;
use crate::ops::norm::rms_norm;
use crate::ops::{matrix, unwritten, values};
use crate::{Config, ThreadPool};

/// Multiply-adds per thread below which waking another thread costs more than it saves.
const WORTH_A_THREAD: usize = 4_000_000;

/// KV cache of the running sequences, in pages of 16 positions. Sequences with a common prefix share its pages. A page has the
/// positions of all layers, so it stays after the sliding windows of some have passed it: windows save time, and no memory.
#[derive(Debug)]
pub struct KvCache {
    layout: PageLayout,
    /// `[layers, layout.len()]` each. A page that a step writes is empty during the step; all are if a device has the
    /// values.
    pages: Vec<Vec<f32>>,
    /// Pending page copies of a device, from and to; `None` if the values are on the host.
    copies: Option<Vec<[u32; 2]>>,
    /// Reference count of each page.
    holders: Vec<u32>,
    free: Vec<u32>,
    routes: Option<RouteCache>,
}

/// The experts that the network chose for the tokens in the cache.
#[derive(Debug)]
struct RouteCache {
    /// Experts of a token in all layers.
    slots: usize,
    /// `[PAGE, slots]` each.
    pages: Vec<Vec<u16>>,
}

impl KvCache {
    /// Positions of one page.
    pub const PAGE: usize = PAGE;

    /// A cache for at least `positions` positions, all free.
    #[must_use]
    pub fn new(config: &Config, positions: usize) -> Self {
        let mut cache = Self::elsewhere(config, positions);
        cache.copies = None;
        cache.restore(config);
        cache
    }

    /// A cache whose keys and values are on a device: the reference counts of its pages alone.
    #[must_use]
    pub fn elsewhere(config: &Config, positions: usize) -> Self {
        let pages = Self::pages_for(positions);
        Self {
            layout: PageLayout::new(config.head_shape()),
            pages: vec![Vec::new(); pages],
            copies: Some(Vec::new()),
            holders: vec![0; pages],
            free: (0..pages as u32).rev().collect(),
            routes: None,
        }
    }

    /// The same, which also keeps the experts that the network chooses for every token, in all layers that have some.
    #[must_use]
    pub fn with_routes(self, config: &Config) -> Self {
        let (slots, pages) = (config.expert_slots(), self.pages.len());
        let routes = (slots > 0).then(|| RouteCache { slots, pages: vec![vec![0; PAGE * slots]; pages] });
        Self { routes, ..self }
    }

    /// `[tokens, slots]` experts of the first `tokens` tokens of the page table `pages`, ascending in each layer; `None` if they are not
    /// kept.
    #[must_use]
    pub fn routes(&self, pages: &[u32], tokens: usize) -> Option<Vec<u16>> {
        let RouteCache { slots, pages: all } = self.routes.as_ref()?;
        let mut routes = Vec::with_capacity(tokens * slots);
        for page in &pages[..Self::pages_for(tokens)] {
            routes.extend_from_slice(&all[*page as usize]);
        }
        routes.truncate(tokens * slots);
        Some(routes)
    }

    /// Page copies since the last call, from and to, in order. A device makes them before its next step.
    pub(crate) fn take_copies(&mut self) -> Vec<[u32; 2]> {
        self.copies.as_mut().map_or_else(Vec::new, std::mem::take)
    }

    /// Pages that hold `positions` positions.
    #[must_use]
    pub fn pages_for(positions: usize) -> usize {
        positions.div_ceil(PAGE)
    }

    /// Number of free pages.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Number of all pages.
    #[must_use]
    pub fn total_pages(&self) -> usize {
        self.holders.len()
    }

    /// Memory of all pages, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let routes = self
            .routes
            .as_ref()
            .map_or(0, |routes| size_of::<u16>() * routes.slots * PAGE * routes.pages.len());
        routes as u64 + self.pages.iter().map(|page| size_of_val(&page[..]) as u64).sum::<u64>()
    }

    /// Frees the memory of all keys and values. Reference counts stay; [`KvCache::restore`] has to follow before the next
    /// step.
    pub fn forget(&mut self) {
        self.pages.iter_mut().for_each(|page| *page = Vec::new());
    }

    /// Allocates all pages again. Their content is lost and has to be computed again.
    pub fn restore(&mut self, config: &Config) {
        if self.copies.is_some() {
            return;
        }
        let len = config.num_layers() * self.layout.len();
        self.pages.iter_mut().for_each(|page| *page = vec![0.0; len]);
    }

    /// Allocates a page, or `None` if none is free.
    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    /// Increments the reference counts of `pages [n]`, for a sequence that shares them.
    pub fn share(&mut self, pages: &[u32]) {
        for page in pages {
            assert!(self.holders[*page as usize] > 0, "only an allocated page can be shared");
            self.holders[*page as usize] += 1;
        }
    }

    /// Decrements the reference counts of `pages [n]`; a page without references is free.
    pub fn release(&mut self, pages: &[u32]) {
        for page in pages {
            let holders = &mut self.holders[*page as usize];
            assert!(*holders > 0, "page {page} is released, but it is free");
            *holders -= 1;
            if *holders == 0 {
                self.free.push(*page);
            }
        }
    }

    /// A page with the content of `page` that one sequence may write: `page` itself if it is not shared, else a copy.
    /// `None` if no page is free.
    pub fn own(&mut self, page: u32) -> Option<u32> {
        if self.holders[page as usize] == 1 {
            return Some(page);
        }
        let copy = self.take()?;
        if let Some(RouteCache { pages, .. }) = &mut self.routes {
            pages[copy as usize] = pages[page as usize].clone();
        }
        if let Some(copies) = &mut self.copies {
            copies.push([page, copy]);
            self.holders[page as usize] -= 1;
            return Some(copy);
        }
        let mut to = std::mem::take(&mut self.pages[copy as usize]);
        to.copy_from_slice(&self.pages[page as usize]);
        self.pages[copy as usize] = to;
        self.holders[page as usize] -= 1;
        Some(copy)
    }

    /// Makes the pages of the positions `from..to` in the page table `pages` writable for one sequence alone; takes those
    /// that are not there.
    ///
    /// # Panics
    /// If no page is free; pages that a sequence may need are reserved before.
    pub fn make_writable(&mut self, pages: &mut Vec<u32>, from: usize, to: usize) {
        for page in from / PAGE..Self::pages_for(to) {
            let mine = match pages.get(page) {
                Some(shared) => self.own(*shared),
                None => self.take(),
            };
            let mine = mine.expect("the pages of an accepted request are reserved");
            if page == pages.len() {
                pages.push(mine);
            } else {
                pages[page] = mine;
            }
        }
    }

    /// Takes out the pages that `sequence` writes, so that a thread can write them while others read the rest.
    fn check_out(&mut self, sequence: &StepSequence<'_>) -> Vec<Vec<f32>> {
        let take = |page: &u32| {
            let taken = std::mem::take(&mut self.pages[*page as usize]);
            assert!(!taken.is_empty(), "page {page} is written by two sequences of a step");
            taken
        };
        sequence.written().iter().map(take).collect()
    }

    fn check_in(&mut self, sequence: &StepSequence<'_>, pages: Vec<Vec<f32>>) {
        for (page, values) in sequence.written().iter().zip(pages) {
            self.pages[*page as usize] = values;
        }
    }

    /// Keeps the experts of the new tokens of `sequences`, from `routes [tokens, slots]`.
    fn keep_routes(&mut self, sequences: &[StepSequence<'_>], routes: &[u16]) {
        let Some(RouteCache { slots, pages }) = &mut self.routes else { return };
        let mut rows = routes.chunks_exact(*slots);
        for sequence in sequences {
            for (position, row) in (sequence.position..).zip(rows.by_ref().take(sequence.tokens.len())) {
                let page = &mut pages[sequence.pages[position / PAGE] as usize];
                page[position % PAGE * *slots..][..*slots].copy_from_slice(row);
            }
        }
    }
}

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepSequence<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Position of the first; everything before it is in the cache.
    pub position: usize,
    /// Page table of the sequence, up to the page of its last token. The pages of the new tokens are not shared.
    pub pages: &'a [u32],
    /// Number of last tokens whose logits are returned.
    pub wanted: usize,
}

impl<'a> StepSequence<'a> {
    /// Index of the first page that is written.
    fn first_written(&self) -> usize {
        self.position / PAGE
    }

    fn written(&self) -> &'a [u32] {
        &self.pages[self.first_written()..KvCache::pages_for(self.position + self.tokens.len())]
    }
}

/// What one thread computes of a step.
struct StepPart<'a> {
    sequences: &'a [StepSequence<'a>],
    /// The pages that each sequence writes.
    own: Vec<Vec<Vec<f32>>>,
}

/// What one thread computed of a step.
struct PartOutput {
    /// `[wanted, V]`
    logits: Vec<f32>,
    /// `[T, slots]` the experts of the tokens; empty if they are not kept.
    routes: Vec<u16>,
}

impl Decoder {
    /// One step of continuous batching: adds the tokens of `sequences` to the cache and returns the logits
    /// `[wanted, vocab_size]` of the tokens whose logits are wanted, in order.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    ///
    /// # Panics
    /// If the pages of a sequence do not reach its last token, or two sequences write to the same page.
    pub fn step(
        &self,
        cache: &mut KvCache,
        sequences: &[StepSequence<'_>],
        pool: &ThreadPool,
    ) -> Result<Vec<f32>> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let worth = tokens * self.layout.len() / WORTH_A_THREAD + 1;
        let alone = ThreadPool::single();
        // Large weights are read from memory, so threads share their columns and synchronise at every layer. Small weights
        // fit a core's cache, so every thread reads all of them for some of the sequences.
        let (count, inside) = match worth {
            1 => (1, &alone),
            _ if self.columns_are_shared => (1, pool),
            _ => (pool.threads().min(worth), &alone),
        };
        let parts = split(sequences, tokens, count);
        let parts: Vec<StepPart<'_>> = parts
            .into_iter()
            .map(|sequences| StepPart {
                sequences,
                own: sequences.iter().map(|sequence| cache.check_out(sequence)).collect(),
            })
            .collect();
        let shared = &*cache;
        let done = pool.map(parts, |mut part| {
            let computed = self.step_part(shared, &mut part, inside);
            (part, computed)
        });
        let mut all = Vec::new();
        let mut failed = None;
        for (part, computed) in done {
            for (sequence, pages) in part.sequences.iter().zip(part.own) {
                cache.check_in(sequence, pages);
            }
            match computed {
                Ok(PartOutput { logits, routes }) => {
                    cache.keep_routes(part.sequences, &routes);
                    if all.is_empty() {
                        all = logits;
                    } else {
                        all.extend(logits);
                    }
                }
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(all), Err)
    }

    fn step_part(&self, cache: &KvCache, part: &mut StepPart<'_>, pool: &ThreadPool) -> Result<PartOutput> {
        let StepPart { sequences, own } = part;
        let (mut token_ids, mut positions, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in *sequences {
            token_ids.extend_from_slice(sequence.tokens);
            positions.extend((sequence.position..).take(sequence.tokens.len()).map(|p| p as u32));
            wanted.extend(token_ids.len() - sequence.wanted..token_ids.len());
        }
        let angles = self.angles(&positions);
        let mut x = self.embed(&token_ids, 0)?;
        let slots = cache.routes.as_ref().map_or(0, |routes| routes.slots);
        let (mut routes, mut first) = (vec![0; token_ids.len() * slots], 0);
        for (layer, block) in self.blocks.iter().enumerate() {
            let mix = |prepared: &Tensor| match block.rule() {
                MixingRule::Attention(rule) => {
                    self.attend(cache, sequences, own, (layer, rule), prepared, pool)
                }
            };
            let (output, trace) = block.forward_routed(&x, &angles, None, mix, pool)?;
            x = output;
            if let Some(chosen) = trace.routes().map(ExpertRoutes::experts).filter(|_| slots > 0) {
                let per_token = chosen.len() / token_ids.len();
                for (row, chosen) in routes.chunks_exact_mut(slots).zip(chosen.chunks_exact(per_token)) {
                    row[first..][..per_token]
                        .iter_mut()
                        .zip(chosen)
                        .for_each(|(kept, expert)| *kept = *expert as u16);
                }
                first += per_token;
            }
        }
        let picked = gather(&[&x], &wanted)?;
        let normed = rms_norm(&picked, &self.final_norm, self.config.rms_norm_eps, pool)?;
        let mut logits = unwritten(wanted.len() * self.head.output());
        self.head.apply_slice(&values(&normed)?, &mut logits, pool);
        Ok(PartOutput { logits, routes })
    }

    /// Writes keys and values of the new tokens of `qkv [T, width]`, and attends to all positions up to each of them.
    /// Returns `[T, heads * head_dim]`.
    fn attend(
        &self,
        cache: &KvCache,
        sequences: &[StepSequence<'_>],
        mut own: &mut [Vec<Vec<f32>>],
        (layer, rule): (usize, AttentionRule<'_>),
        qkv: &Tensor,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        let (rows, width, query_width) = (qkv.dim(0)?, self.shape.width(), self.shape.query_width());
        let mut out = unwritten(rows * query_width);
        let qkv = values(qkv)?;
        let (mut qkv, mut rest) = (&qkv[..], &mut out[..]);
        let mut parts = Vec::new();
        for sequences in split(sequences, rows, pool.threads()) {
            let rows: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
            let (own_part, own_rest) = own.split_at_mut(sequences.len());
            let (qkv_part, qkv_rest) = qkv.split_at(rows * width);
            let (out_part, out_rest) = rest.split_at_mut(rows * query_width);
            (own, qkv, rest) = (own_rest, qkv_rest, out_rest);
            parts.push((sequences, own_part, qkv_part, out_part));
        }
        pool.map(parts, |(sequences, own, qkv, out)| {
            self.attend_part(cache, sequences, own, (layer, rule), qkv, out);
        });
        matrix(out, query_width)
    }

    fn attend_part(
        &self,
        cache: &KvCache,
        sequences: &[StepSequence<'_>],
        own: &mut [Vec<Vec<f32>>],
        (layer, rule): (usize, AttentionRule<'_>),
        qkv: &[f32],
        out: &mut [f32],
    ) {
        let (shape, layout) = (self.shape, cache.layout);
        let of_layer = layer * layout.len()..(layer + 1) * layout.len();
        let mut rows = qkv.chunks_exact(shape.width()).zip(out.chunks_exact_mut(shape.query_width()));
        let (mut weights, mut of_sequence) = (Vec::new(), Vec::new());
        for (sequence, own) in sequences.iter().zip(own) {
            let first = sequence.first_written();
            of_sequence.clear();
            of_sequence.extend(rows.by_ref().take(sequence.tokens.len()));
            for (position, (row, _)) in (sequence.position..).zip(&of_sequence) {
                let (key, value) = row[shape.query_width()..].split_at(shape.kv_width());
                let page = &mut own[position / PAGE - first][of_layer.clone()];
                layout.write(page, position % PAGE, key, value);
            }
            let before = sequence.pages[..first].iter().map(|page| &cache.pages[*page as usize]);
            let pages: Vec<&[f32]> = before.chain(&*own).map(|page| &page[of_layer.clone()]).collect();
            for (position, (row, out)) in (sequence.position..).zip(&mut of_sequence) {
                let queries = &row[..shape.query_width()];
                layout.attend(rule, queries, &pages[..=position / PAGE], position + 1, &mut weights, out);
            }
        }
    }
}

/// Cuts `sequences` with `tokens` tokens into at most `count` runs of about equal length.
fn split<'a>(sequences: &'a [StepSequence<'a>], tokens: usize, count: usize) -> Vec<&'a [StepSequence<'a>]> {
    let mut parts = Vec::new();
    let (mut start, mut passed) = (0, 0);
    for (i, sequence) in sequences.iter().enumerate() {
        passed += sequence.tokens.len();
        if i + 1 == sequences.len() || passed * count >= tokens * (parts.len() + 1) {
            parts.push(&sequences[start..=i]);
            start = i + 1;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Parameters, SharedCores, Sizes};

    /// Both ways of sharing a step among threads give the bits of one thread.
    #[test]
    fn threads_that_share_columns_or_sequences_change_nothing() {
        let sizes = Sizes {
            vocab_size: 100,
            hidden_size: 64,
            intermediate_size: 256,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        };
        let config = Config::fresh(&sizes);
        let small = Decoder::new(&config, &Parameters::random(&config, 5));
        let large = Decoder { columns_are_shared: true, ..small.clone() };
        let tokens: Vec<Vec<u32>> =
            (0..40).map(|s| (0..1 + s % 9).map(|t| 4 + (s * 7 + t * 13) % 90).collect()).collect();
        let logits = |decoder: &Decoder, pool: &ThreadPool| {
            let mut cache = KvCache::new(&config, 2 * PAGE * tokens.len());
            let pages: Vec<[u32; 2]> =
                tokens.iter().map(|_| [(); 2].map(|()| cache.take().unwrap())).collect();
            let mut all = Vec::new();
            for step in 0..3 {
                let sequences: Vec<_> = tokens
                    .iter()
                    .zip(&pages)
                    .map(|(tokens, pages)| {
                        let position = step * tokens.len();
                        let pages = &pages[..KvCache::pages_for(position + tokens.len())];
                        StepSequence { tokens, position, pages, wanted: 1 }
                    })
                    .collect();
                all.extend(decoder.step(&mut cache, &sequences, pool).unwrap());
            }
            all.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let expected = logits(&small, &ThreadPool::single());
        let cores = SharedCores::new(3);
        for decoder in [&small, &large] {
            for threads in [1, 2, 3] {
                assert!(logits(decoder, &ThreadPool::new(&cores, threads)) == expected, "{threads} threads");
            }
        }
    }
}
