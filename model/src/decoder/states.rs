//! Recurrent states in the cache: what sequences keep of the tokens before the next one, in all layers with a recurrence.
//!
//! Keys and values are there for every position, a state for few: it lives with the page of the last token before it, one for a page
//! at most. A step starts from the state of its first position and leaves one behind its last token. The state moves on with its
//! sequence, unless other sequences share the page or it was asked to stay ([`StateCache::keep`]).
//!
//! The values are here, or in slots of a device's memory, of which only the numbers are here.
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
    /// If a device has the values.
    slots: Option<StateSlots>,
}

/// A state, and the number of tokens that it is of.
#[derive(Debug)]
struct RecurrentState {
    tokens: usize,
    place: StatePlace,
    /// Whether it stays when its sequence advances.
    stays: bool,
}

/// Where the values of a state are.
#[derive(Debug)]
pub(crate) enum StatePlace {
    /// Here; empty in a model without a recurrence.
    Host(Vec<f32>),
    /// In a slot of a device.
    Slot(u32),
}

/// The slots of a device. Slot 0 is that of padding.
#[derive(Debug)]
struct StateSlots {
    free: Vec<u32>,
    /// Slots that were in use so far, with that of padding.
    count: u32,
    /// Pending copies, from and to.
    copies: Vec<[u32; 2]>,
}

impl StateSlots {
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.count += 1;
            self.count - 1
        })
    }
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
        let none = || (0..pages).map(|_| None).collect();
        (len > 0).then(|| Self { layers, len, pages: none(), slots: None })
    }

    /// The same, whose values are on a device.
    pub(super) fn elsewhere(config: &Config, pages: usize) -> Option<Self> {
        let slots = StateSlots { free: Vec::new(), count: 1, copies: Vec::new() };
        Self::new(config, pages).map(|states| Self { slots: Some(slots), ..states })
    }

    /// The part of a state that layer `index` has.
    pub(super) fn layer(&self, index: usize) -> Range<usize> {
        self.layers[index].clone()
    }

    /// Memory of all states that are here, bytes.
    pub(super) fn bytes(&self) -> u64 {
        let of = |stored: &RecurrentState| match &stored.place {
            StatePlace::Host(values) => size_of_val(&values[..]) as u64,
            StatePlace::Slot(_) => 0,
        };
        self.pages.iter().flatten().map(of).sum()
    }

    /// Slots that a device needs, with that of padding.
    pub(super) fn slots(&self) -> usize {
        self.slots.as_ref().map_or(0, |slots| slots.count as usize)
    }

    /// Copies of slots since the last call, from and to, to be made in order.
    pub(super) fn take_copies(&mut self) -> Vec<[u32; 2]> {
        self.slots.as_mut().map_or_else(Vec::new, |slots| std::mem::take(&mut slots.copies))
    }

    /// Frees all states.
    pub(super) fn clear(&mut self) {
        self.pages.iter_mut().for_each(|stored| *stored = None);
        if let Some(slots) = &mut self.slots {
            *slots = StateSlots { free: Vec::new(), count: 1, copies: Vec::new() };
        }
    }

    /// Frees the state of a page.
    pub(super) fn release(&mut self, page: u32) {
        let stored = self.pages[page as usize].take();
        if let (Some(RecurrentState { place: StatePlace::Slot(slot), .. }), Some(slots)) =
            (stored, &mut self.slots)
        {
            slots.free.push(slot);
        }
    }

    /// Copies the state of a page with the page.
    pub(super) fn copy(&mut self, from: u32, to: u32) {
        self.release(to);
        let stored = self.pages[from as usize].as_ref();
        self.pages[to as usize] = stored.map(|RecurrentState { tokens, place, stays }| RecurrentState {
            tokens: *tokens,
            place: duplicate(place, &mut self.slots),
            stays: *stays,
        });
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
    /// whether other sequences have a page. `None` if it is not there. A slot at position 0 has the values of others.
    pub(super) fn check_out(
        &mut self,
        pages: &[u32],
        position: usize,
        is_shared: impl Fn(u32) -> bool,
    ) -> Option<StatePlace> {
        let state = match position.checked_sub(1) {
            None => match &mut self.slots {
                None => StatePlace::Host(vec![0.0; self.len]),
                Some(slots) => StatePlace::Slot(slots.take()),
            },
            Some(last) => {
                let page = *pages.get(last / PAGE)?;
                let stored = self.pages[page as usize].as_ref().filter(|stored| stored.tokens == position)?;
                if stored.stays || is_shared(page) {
                    duplicate(&stored.place, &mut self.slots)
                } else {
                    self.pages[page as usize].take()?.place
                }
            }
        };
        // What was computed of tokens that are written again, or that follow them, is of others now.
        for page in &pages[position / PAGE..] {
            if self.pages[*page as usize].as_ref().is_some_and(|stored| stored.tokens > position) {
                self.release(*page);
            }
        }
        Some(state)
    }

    /// Leaves the state after `tokens` tokens of a sequence.
    pub(super) fn check_in(&mut self, pages: &[u32], tokens: usize, place: StatePlace) {
        let Some(last) = tokens.checked_sub(1) else { return };
        let page = pages[last / PAGE];
        self.release(page);
        self.pages[page as usize] = Some(RecurrentState { tokens, place, stays: false });
    }
}

/// A copy of a state.
fn duplicate(place: &StatePlace, slots: &mut Option<StateSlots>) -> StatePlace {
    match (place, slots) {
        (StatePlace::Slot(from), Some(slots)) => {
            let to = slots.take();
            slots.copies.push([*from, to]);
            StatePlace::Slot(to)
        }
        (StatePlace::Host(values), _) => StatePlace::Host(values.clone()),
        (StatePlace::Slot(_), None) => unreachable!("a cache with slots has a list of them"),
    }
}
