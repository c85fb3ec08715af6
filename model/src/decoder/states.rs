//! Recurrent states in the cache: what sequences keep of the tokens before the next one, in all layers with a recurrence.
//!
//! Keys and values are there for every position, a state for few: it lives with the page of the last token before it, one for a page
//! at most. A step starts from the state of its first position and leaves one behind its last token. The state moves on with its
//! sequence, unless other sequences share the page or it was asked to stay ([`StateCache::keep`]).
//!
//! Invariant: the state of a page is that after the tokens whose keys and values are in this page and in
//! those before it.

use std::ops::Range;

use crate::Config;
use crate::ops::attention::PAGE;

/// The states of a cache.
#[derive(Debug)]
pub(super) struct StateCache {
    /// Of each layer, its part of a state; empty for one with attention.
    layers: Vec<Range<usize>>,
    /// Values of a state.
    len: usize,
    /// Of each page.
    pages: Vec<Option<RecurrentState>>,
}

/// A state, and the number of tokens that it is of.
#[derive(Clone, Debug)]
struct RecurrentState {
    tokens: usize,
    values: Vec<f32>,
    /// Whether it stays when its sequence advances.
    stays: bool,
}

impl StateCache {
    /// For `pages` pages; `None` for a model without a recurrence.
    pub(super) fn new(config: &Config, pages: usize) -> Option<Self> {
        let (mut layers, mut len) = (Vec::new(), 0);
        for layer in &config.layers {
            let own = layer.delta_net.map_or(0, |delta_net| delta_net.state_len());
            layers.push(len..len + own);
            len += own;
        }
        (len > 0).then(|| Self { layers, len, pages: vec![None; pages] })
    }

    /// The part of a state that layer `index` has.
    pub(super) fn layer(&self, index: usize) -> Range<usize> {
        self.layers[index].clone()
    }

    /// Memory of all states, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.pages.iter().flatten().map(|stored| size_of_val(&stored.values[..]) as u64).sum()
    }

    /// Frees all states.
    pub(super) fn clear(&mut self) {
        self.pages.iter_mut().for_each(|stored| *stored = None);
    }

    /// Frees the state of a page.
    pub(super) fn release(&mut self, page: u32) {
        self.pages[page as usize] = None;
    }

    /// Copies the state of a page with the page.
    pub(super) fn copy(&mut self, from: u32, to: u32) {
        self.pages[to as usize] = self.pages[from as usize].clone();
    }

    /// The largest number of tokens, at most `tokens`, from which a sequence with this page table can resume.
    pub(super) fn resumable(&self, pages: &[u32], tokens: usize) -> usize {
        let stored = |page: &u32| self.pages[*page as usize].as_ref().map(|stored| stored.tokens);
        // A page that is shared for its beginning may have the state of another end.
        let within = pages.iter().enumerate().filter_map(|(index, page)| {
            stored(page).filter(|of| index * PAGE < *of && *of <= ((index + 1) * PAGE).min(tokens))
        });
        within.max().unwrap_or(0)
    }

    /// Makes the state after `tokens` tokens of this page table stay when its sequence advances.
    pub(super) fn keep(&mut self, pages: &[u32], tokens: usize) {
        let page = tokens.checked_sub(1).and_then(|last| pages.get(last / PAGE));
        if let Some(stored) = page.and_then(|page| self.pages[*page as usize].as_mut()) {
            stored.stays |= stored.tokens == tokens;
        }
    }

    /// Takes the state that a sequence with this page table resumes from, whose first new token is at `position`; `is_shared` says
    /// whether other sequences have a page. `None` if it is not there.
    pub(super) fn check_out(
        &mut self,
        pages: &[u32],
        position: usize,
        is_shared: impl Fn(u32) -> bool,
    ) -> Option<Vec<f32>> {
        let state = match position.checked_sub(1) {
            None => vec![0.0; self.len],
            Some(last) => {
                let page = *pages.get(last / PAGE)?;
                let stored = self.pages[page as usize].as_mut().filter(|stored| stored.tokens == position)?;
                if stored.stays || is_shared(page) {
                    stored.values.clone()
                } else {
                    self.pages[page as usize].take()?.values
                }
            }
        };
        // What was computed of tokens that are written again, or that follow them, is of others now.
        for page in &pages[position / PAGE..] {
            let stored = &mut self.pages[*page as usize];
            if stored.as_ref().is_some_and(|stored| stored.tokens > position) {
                *stored = None;
            }
        }
        Some(state)
    }

    /// Leaves the state after `tokens` tokens of a sequence.
    pub(super) fn check_in(&mut self, pages: &[u32], tokens: usize, values: Vec<f32>) {
        let Some(last) = tokens.checked_sub(1) else { return };
        self.pages[pages[last / PAGE] as usize] = Some(RecurrentState { tokens, values, stays: false });
    }
}
