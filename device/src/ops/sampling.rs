//! From logits to tokens, with their log-probabilities under the distributions that they were really drawn from.
//!
//! Invariant: nothing here waits or allocates but [`Drawn::new`], so that a step of decoding can be recorded and replayed.
//! The random numbers come from the caller: nothing here holds a generator.

use super::head::ROW_THREADS;
use super::{rows_of, size};
use crate::device::Device;
use crate::error::Result;
use crate::memory::{Buffer, View};

/// Most tokens that truncation may leave a row whose token is drawn on the device.
pub const KEPT: usize = 4096;
/// Settings of a row.
pub const SETTINGS: usize = 4;

/// How the token of each row is chosen; on the device, where the host overwrites it from step to step.
#[derive(Clone, Copy, Debug)]
pub struct SamplingRows<'a> {
    /// `[n, 4]`: the temperature, where 0 takes the most likely token; top-p, where 1 keeps all; min-p, where 0 keeps all;
    /// the uniform number in [0, 1) that the token is drawn by.
    pub settings: View<'a, f32>,
    /// `[n]`: keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: View<'a, u32>,
}

/// Tokens as they were drawn, for up to as many rows as there is room for.
#[derive(Debug)]
pub struct Drawn {
    /// `[rows]`
    pub tokens: Buffer<u32>,
    /// `[rows]` log-probabilities under the distributions drawn from, nats; 0 for a greedy choice.
    pub logprobs: Buffer<f32>,
    /// `[rows]` numbers of tokens that truncation left; 0 where nothing was to be cut off. If a row has more than [`KEPT`],
    /// its token, its log-probability and its ids mean nothing, and the host draws from its logits.
    pub kept_counts: Buffer<u32>,
    /// `[rows, KEPT]` the tokens that truncation left, ascending, from the start of each row on; the rest has anything in it.
    pub kept_ids: Buffer<u32>,
    /// `[rows * KEPT]` the lists of `kept_ids`, one right behind the other, after [`pack_kept`]; rows with more than
    /// [`KEPT`] have none.
    pub packed_ids: Buffer<u32>,
}

impl Drawn {
    /// Room for `rows` tokens.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(device: &Device, rows: usize) -> Result<Self> {
        Ok(Self {
            tokens: device.zeros(rows)?,
            logprobs: device.zeros(rows)?,
            kept_counts: device.zeros(rows)?,
            kept_ids: device.uninit(rows * KEPT)?,
            packed_ids: device.uninit(rows * KEPT)?,
        })
    }

    /// Most rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }
}

/// Draws a token for each row of `logits [n, vocabulary]` into the first `n` rows of `out`: top-k, then top-p within it, then
/// min-p, where the most likely token always stays, equal logits go by their ids, and the token is where the running sum of
/// probabilities in the order of ids passes the uniform number.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn sample(
    device: &Device,
    logits: View<'_, f32>,
    vocabulary: usize,
    rows: &SamplingRows<'_>,
    out: &mut Drawn,
) -> Result<()> {
    let n = rows_of(logits.len(), vocabulary);
    let (settings, top_k) = (rows.settings.len(), rows.top_k.len());
    assert!(settings == SETTINGS * n && top_k == n, "{settings} and {top_k} settings for {n} rows");
    assert!(n <= out.rows(), "{n} rows where there is room for {}", out.rows());
    let arguments = [
        logits.into(),
        size(vocabulary).into(),
        rows.settings.into(),
        rows.top_k.into(),
        out.tokens.all_mut().into(),
        out.logprobs.all_mut().into(),
        out.kept_counts.all_mut().into(),
        out.kept_ids.all_mut().into(),
        // Candidates that are left on the way.
        out.packed_ids.all_mut().into(),
    ];
    device.launch("sample", [n, 1, 1], ROW_THREADS, 0, &arguments)
}

/// Packs the lists of the first `n` rows, so that one download brings all.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If there are fewer rows.
pub fn pack_kept(device: &Device, n: usize, out: &mut Drawn) -> Result<()> {
    assert!(n <= out.rows(), "{n} rows of {}", out.rows());
    let arguments =
        [out.kept_counts.all().into(), out.kept_ids.all().into(), out.packed_ids.all_mut().into()];
    device.launch("pack_kept", [n, 1, 1], ROW_THREADS, 0, &arguments)
}
