//! The paged KV cache (PagedAttention, Kwon et al. 2023, arXiv 2309.06180), and its recurrent states.
//!
//! Invariant: a page is written by one sequence only; [`KvCache::own`] copies a shared page first (copy on write).

use super::decode::StepSequence;
use super::states::{StateCache, StatePlace};
use crate::Config;
use crate::ops::attention::{PAGE, PageLayout};

/// KV cache of the running sequences, in pages of 16 positions. Sequences with a common prefix share its pages. A page has the
/// positions of all layers with attention, so it stays after the sliding windows of some have passed it: windows save time, and no
/// memory. Layers with a recurrence have a state of a sequence at some of its positions ([`KvCache::resumable`]).
#[derive(Debug)]
pub struct KvCache {
    pub(super) layout: PageLayout,
    /// `[attention layers, layout.len()]` each. A page that a step writes is empty during the step; all are if a device has the
    /// values.
    pub(super) pages: Vec<Vec<f32>>,
    /// Pending page copies of a device or of other ranks, from and to; `None` if all values are here.
    copies: Option<Vec<[u32; 2]>>,
    /// Whether a device has the values.
    is_elsewhere: bool,
    /// Reference count of each page.
    holders: Vec<u32>,
    free: Vec<u32>,
    pub(super) routes: Option<RouteCache>,
    /// Of a model with a recurrence.
    pub(super) states: Option<StateCache>,
}

/// The experts that the network chose for the tokens in the cache.
#[derive(Debug)]
pub(super) struct RouteCache {
    /// Experts of a token in all layers.
    pub(super) slots: usize,
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
        (cache.copies, cache.is_elsewhere) = (None, false);
        cache.states = StateCache::new(config, cache.pages.len());
        cache.restore(config);
        cache
    }

    /// A cache whose keys, values and states are on a device: the reference counts of its pages, and the slots of its states, alone.
    #[must_use]
    pub fn elsewhere(config: &Config, positions: usize) -> Self {
        let pages = Self::pages_for(positions);
        Self {
            layout: PageLayout::new(config.head_shape()),
            pages: vec![Vec::new(); pages],
            copies: Some(Vec::new()),
            is_elsewhere: true,
            holders: vec![0; pages],
            free: (0..pages as u32).rev().collect(),
            routes: None,
            states: StateCache::elsewhere(config, pages),
        }
    }

    /// The same, whose page copies the caches of other ranks repeat before their next step.
    pub(crate) fn repeated(self) -> Self {
        Self { copies: Some(Vec::new()), ..self }
    }

    /// Makes the page copies `[from, to]` of another cache, in order.
    pub(crate) fn repeat(&mut self, copies: &[[u32; 2]]) {
        copies.iter().for_each(|[from, to]| self.copy_values(*from, *to));
    }

    /// The same, which also keeps the experts that the network chooses for every token, in all layers that have some.
    #[must_use]
    pub fn with_routes(self, config: &Config) -> Self {
        let (slots, pages) = (config.expert_slots(), self.pages.len());
        let routes = (slots > 0).then(|| RouteCache { slots, pages: vec![vec![0; PAGE * slots]; pages] });
        Self { routes, ..self }
    }

    /// Whether it keeps the experts of tokens.
    pub(crate) fn keeps_routes(&self) -> bool {
        self.routes.is_some()
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

    /// Page copies since the last call, from and to, in order. A device, or another rank, makes them before its next step.
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

    /// Memory of all pages and states, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let routes = self
            .routes
            .as_ref()
            .map_or(0, |routes| size_of::<u16>() * routes.slots * PAGE * routes.pages.len());
        let states = self.states.as_ref().map_or(0, StateCache::bytes);
        states + routes as u64 + self.pages.iter().map(|page| size_of_val(&page[..]) as u64).sum::<u64>()
    }

    /// The largest number of positions, at most `tokens`, from which a sequence with the page table `pages [n]` can resume: all of them, or
    /// in a model with a recurrence those after which there is a state.
    #[must_use]
    pub fn resumable(&self, pages: &[u32], tokens: usize) -> usize {
        self.states.as_ref().map_or(tokens, |states| states.resumable(pages, tokens))
    }

    /// Whether sequences have recurrent states, so that they can resume from some positions only.
    #[must_use]
    pub fn has_states(&self) -> bool {
        self.states.is_some()
    }

    /// Makes the state after `tokens` positions of the page table `pages [n]`, where a step has just ended, stay as long as their pages
    /// do: others may resume from there.
    pub fn keep_state(&mut self, pages: &[u32], tokens: usize) {
        if let Some(states) = &mut self.states {
            states.keep(pages, tokens);
        }
    }

    /// Frees the memory of all keys, values and states. Reference counts stay; [`KvCache::restore`] has to follow before the next
    /// step.
    pub fn forget(&mut self) {
        self.pages.iter_mut().for_each(|page| *page = Vec::new());
        if let Some(states) = &mut self.states {
            states.clear();
        }
    }

    /// Allocates all pages again. Their content is lost and has to be computed again.
    pub fn restore(&mut self, config: &Config) {
        if self.is_elsewhere {
            return;
        }
        let len = config.attention_layers() * self.layout.len();
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
                if let Some(states) = &mut self.states {
                    states.release(*page);
                }
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
        if let Some(states) = &mut self.states {
            states.copy(page, copy);
        }
        if let Some(copies) = &mut self.copies {
            copies.push([page, copy]);
        }
        if !self.is_elsewhere {
            self.copy_values(page, copy);
        }
        self.holders[page as usize] -= 1;
        Some(copy)
    }

    fn copy_values(&mut self, from: u32, to: u32) {
        let mut copy = std::mem::take(&mut self.pages[to as usize]);
        copy.copy_from_slice(&self.pages[from as usize]);
        self.pages[to as usize] = copy;
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
    pub(super) fn check_out(&mut self, sequence: &StepSequence<'_>) -> Vec<Vec<f32>> {
        let take = |page: &u32| {
            let taken = std::mem::take(&mut self.pages[*page as usize]);
            assert!(!taken.is_empty(), "page {page} is written by two sequences of a step");
            taken
        };
        sequence.written().iter().map(take).collect()
    }

    /// Slots of a device that states need, with that of padding; 0 without a recurrence.
    pub(crate) fn state_slots(&self) -> usize {
        self.states.as_ref().map_or(0, StateCache::slots)
    }

    /// Copies of slots since the last call, from and to. A device makes them before its next step, in order.
    pub(crate) fn take_state_copies(&mut self) -> Vec<[u32; 2]> {
        self.states.as_mut().map_or_else(Vec::new, StateCache::take_copies)
    }

    /// Takes out the state that `sequence` resumes from; empty without a recurrence, `None` if it is not there.
    pub(crate) fn check_out_state(&mut self, sequence: &StepSequence<'_>) -> Option<StatePlace> {
        let Some(states) = &mut self.states else { return Some(StatePlace::Host(Vec::new())) };
        let holders = &self.holders;
        states.check_out(sequence.pages, sequence.position, |page| holders[page as usize] > 1)
    }

    /// Leaves the state after the last token of `sequence`.
    pub(crate) fn check_in_state(&mut self, sequence: &StepSequence<'_>, state: StatePlace) {
        if let Some(states) = &mut self.states {
            states.check_in(sequence.pages, sequence.end(), state);
        }
    }

    pub(super) fn check_in(&mut self, sequence: &StepSequence<'_>, pages: Vec<Vec<f32>>) {
        for (page, values) in sequence.written().iter().zip(pages) {
            self.pages[*page as usize] = values;
        }
    }

    /// Keeps the experts of the new tokens of `sequences`, from `routes [tokens, slots]`.
    pub(crate) fn keep_routes(&mut self, sequences: &[StepSequence<'_>], routes: &[u16]) {
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
