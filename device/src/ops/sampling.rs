//! Sampling: tokens from logits with temperature, top-k, top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082), and
//! their log-probabilities under the truncated distribution.
//!
//! Invariant: only [`SampledRows::new`] waits or allocates, so a decode step can be recorded and replayed. The caller
//! provides the random numbers.

use super::head::ROW_THREADS;
use super::{rows_of, size};
use crate::device::Device;
use crate::error::Result;
use crate::memory::{DeviceBuffer, View};

/// Largest number of tokens after truncation for a row that is sampled on the device.
pub const KEPT: usize = 4096;
/// Words of a packed [`RowSampling`].
pub const SETTINGS: usize = 5;
/// Words of a packed [`SampledToken`].
pub const DRAW: usize = 3;

/// Sampling parameters of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSampling {
    /// Temperature; 0 selects the most likely token (greedy).
    pub temperature: f32,
    /// Nucleus probability; 1 keeps all tokens.
    pub top_p: f32,
    /// Smallest probability relative to the most likely token; 0 keeps all tokens.
    pub min_p: f32,
    /// Uniform random number in [0, 1).
    pub uniform: f32,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: u32,
}

/// The sampled token of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledToken {
    /// Token id.
    pub token: u32,
    /// Log-probability under the truncated distribution, nats; 0 for greedy.
    pub logprob: f32,
    /// Number of tokens after truncation; 0 without truncation. Above [`KEPT`] the other fields and the ids are
    /// undefined, and the host has to sample from the logits.
    pub kept: usize,
}

/// Results of sampling for up to a fixed number of rows, on the device.
#[derive(Debug)]
pub struct SampledRows {
    /// `[rows, 3]`, decoded by [`SampledToken::unpack`].
    pub draws: DeviceBuffer<u32>,
    /// `[rows, KEPT]` ids of the kept tokens, ascending; the rest of each row is undefined.
    pub kept_ids: DeviceBuffer<u32>,
    /// `[rows * KEPT]` the lists of `kept_ids` concatenated by [`pack_kept`]; rows with more than [`KEPT`] tokens have
    /// none.
    pub packed_ids: DeviceBuffer<u32>,
}

impl RowSampling {
    /// Packs the parameters, so that all rows need one upload.
    #[must_use]
    pub fn pack(self) -> [u32; SETTINGS] {
        let Self { temperature, top_p, min_p, uniform, top_k } = self;
        let [temperature, top_p, min_p, uniform] = [temperature, top_p, min_p, uniform].map(f32::to_bits);
        [temperature, top_p, min_p, uniform, top_k]
    }
}

impl SampledToken {
    /// Unpacks the results `[n, 3]` of one download.
    pub fn unpack(draws: &[u32]) -> impl Iterator<Item = Self> {
        let (draws, _) = draws.as_chunks::<DRAW>();
        draws.iter().map(|[token, logprob, kept]| Self {
            token: *token,
            logprob: f32::from_bits(*logprob),
            kept: *kept as usize,
        })
    }
}

impl SampledRows {
    /// Allocates results for `rows` rows.
    ///
    /// # Errors
    /// If device memory is full.
    pub fn new(device: &Device, rows: usize) -> Result<Self> {
        Ok(Self {
            draws: device.zeros(DRAW * rows)?,
            kept_ids: device.uninit(rows * KEPT)?,
            packed_ids: device.uninit(rows * KEPT)?,
        })
    }

    /// Largest number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.draws.len() / DRAW
    }
}

/// Samples a token for each row of `logits [n, vocabulary]` into the first `n` rows of `out`, with the packed
/// [`RowSampling`] in `choices [n, 5]`. Truncation is top-k, then top-p within it, then min-p; the most likely token
/// always stays, and equal logits are ordered by id. The token is the first one, in order of ids, at which the
/// cumulative probability exceeds the uniform number.
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
    choices: View<'_, u32>,
    out: &mut SampledRows,
) -> Result<()> {
    let n = rows_of(logits.len(), vocabulary);
    assert_eq!(choices.len(), SETTINGS * n, "{SETTINGS} numbers for each of {n} rows");
    assert!(n <= out.rows(), "{n} rows of at most {}", out.rows());
    let arguments = [
        logits.into(),
        size(vocabulary).into(),
        choices.into(),
        out.draws.all_mut().into(),
        out.kept_ids.all_mut().into(),
        // Scratch for the candidates.
        out.packed_ids.all_mut().into(),
    ];
    device.launch("sample", [n, 1, 1], ROW_THREADS, 0, &arguments)
}

/// Concatenates the kept ids of the first `n` rows, so that one download has all.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If there are fewer rows.
pub fn pack_kept(device: &Device, n: usize, out: &mut SampledRows) -> Result<()> {
    assert!(n <= out.rows(), "{n} rows of {}", out.rows());
    let arguments = [out.draws.all().into(), out.kept_ids.all().into(), out.packed_ids.all_mut().into()];
    device.launch("pack_kept", [n, 1, 1], ROW_THREADS, 0, &arguments)
}
