//! Incremental decoding over a paged key-value cache.
//!
//! Invariant: a page is written only through a sequence that owns it alone; [`KvCache::own`] copies a shared one first.
//! Prefill and decode are the same call: a row is one new token of some sequence, and rows of one sequence may follow
//! each other.

use candle_core::Result;

use super::Decoder;
use crate::Config;
use crate::ops::attention::{self, PAGE, PagedQuery};
use crate::ops::heads::Angles;
use crate::ops::values;

/// Keys and values of running sequences, in pages of 16 positions that sequences with a common prefix share.
#[derive(Debug)]
pub struct KvCache {
    /// Per layer, keys and values `[pages, PAGE, kv_heads * head_dim]`.
    layers: Vec<(Vec<f32>, Vec<f32>)>,
    kv_width: usize,
    /// How many sequences hold each page.
    holders: Vec<u32>,
    free: Vec<u32>,
}

impl KvCache {
    /// Positions of one page.
    pub const PAGE: usize = PAGE;

    /// A cache for at least `positions` positions, all free.
    #[must_use]
    pub fn new(config: &Config, positions: usize) -> Self {
        let pages = Self::pages_for(positions);
        let kv_width = config.num_kv_heads * config.head_dim;
        let pool = || vec![0.0; pages * PAGE * kv_width];
        Self {
            layers: (0..config.num_layers).map(|_| (pool(), pool())).collect(),
            kv_width,
            holders: vec![0; pages],
            free: (0..pages as u32).rev().collect(),
        }
    }

    /// Pages that hold `positions` positions.
    #[must_use]
    pub fn pages_for(positions: usize) -> usize {
        positions.div_ceil(PAGE)
    }

    /// Number of pages that nobody holds.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Number of all pages.
    #[must_use]
    pub fn total_pages(&self) -> usize {
        self.holders.len()
    }

    /// Takes a free page, or `None` if there is none.
    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    /// Lets one more sequence hold `pages`.
    pub fn share(&mut self, pages: &[u32]) {
        for page in pages {
            assert!(self.holders[*page as usize] > 0, "only a held page can be shared");
            self.holders[*page as usize] += 1;
        }
    }

    /// Gives up one holding of each of `pages`.
    pub fn release(&mut self, pages: &[u32]) {
        for page in pages {
            let holders = &mut self.holders[*page as usize];
            assert!(*holders > 0, "page {page} is released by somebody who does not hold it");
            *holders -= 1;
            if *holders == 0 {
                self.free.push(*page);
            }
        }
    }

    /// Makes `page` writable for one sequence: itself if nobody else holds it, else a copy. `None` if no page is free.
    pub fn own(&mut self, page: u32) -> Option<u32> {
        if self.holders[page as usize] == 1 {
            return Some(page);
        }
        let copy = self.take()?;
        let span = PAGE * self.kv_width;
        let (from, to) = (page as usize * span, copy as usize * span);
        for (keys, values) in &mut self.layers {
            keys.copy_within(from..from + span, to);
            values.copy_within(from..from + span, to);
        }
        self.holders[page as usize] -= 1;
        Some(copy)
    }

    fn write(&mut self, layer: usize, row: &StepRow<'_>, key: &[f32], value: &[f32]) {
        let slot = row.pages[row.position / PAGE] as usize * PAGE + row.position % PAGE;
        let at = slot * self.kv_width..(slot + 1) * self.kv_width;
        let (keys, values) = &mut self.layers[layer];
        keys[at.clone()].copy_from_slice(key);
        values[at].copy_from_slice(value);
    }
}

/// One new token of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepRow<'a> {
    /// The token.
    pub token: u32,
    /// Its position; everything before it is in the cache or in an earlier row of the same step.
    pub position: usize,
    /// Pages of its sequence, up to and including the one of `position`.
    pub pages: &'a [u32],
}

impl Decoder {
    /// Puts the tokens of `rows` into the cache and returns logits `[wanted, V]` after those rows that are `wanted`.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    ///
    /// # Panics
    /// If a row's pages do not reach its position.
    pub fn step(&self, cache: &mut KvCache, rows: &[StepRow<'_>], wanted: &[usize]) -> Result<Vec<f32>> {
        let token_ids: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let positions: Vec<u32> = rows.iter().map(|row| row.position as u32).collect();
        let queries: Vec<_> =
            rows.iter().map(|row| PagedQuery { pages: row.pages, position: row.position }).collect();
        let angles = Angles::new(&positions, &self.inv_freq);
        let mut x = self.embed(&token_ids)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let attend = |qkv: &candle_core::Tensor| {
                for (row, qkv) in rows.iter().zip(values(qkv)?.chunks_exact(self.shape.width())) {
                    let (key, value) = qkv[self.shape.query_width()..].split_at(self.shape.kv_width());
                    cache.write(layer, row, key, value);
                }
                let (keys, cached_values) = &cache.layers[layer];
                attention::paged(qkv, &queries, self.shape, (keys, cached_values))
            };
            x = block.forward(&x, &angles, attend)?.into_output();
        }
        let normed = self.normed_rows(&x, wanted)?;
        let mut logits = vec![0.0; wanted.len() * self.head.output()];
        self.head.apply_slice(&values(&normed)?, &mut logits);
        Ok(logits)
    }
}
