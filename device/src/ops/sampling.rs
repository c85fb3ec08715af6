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
/// Numbers that a [`Choice`] is packed into.
pub const SETTINGS: usize = 5;
/// Numbers that a draw is unpacked from.
pub const DRAW: usize = 3;

/// How the token of a row is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// The number in [0, 1) that the token is drawn by.
    pub uniform: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
}

/// What was drawn for a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowDraw {
    /// The token.
    pub token: u32,
    /// Its log-probability under the distribution drawn from, nats; 0 for a greedy choice.
    pub logprob: f32,
    /// Number of tokens that truncation left; 0 where nothing was to be cut off. If it is more than [`KEPT`], the other
    /// fields and the ids mean nothing, and the host draws from the logits.
    pub kept: usize,
}

/// Tokens as they were drawn, for up to as many rows as there is room for.
#[derive(Debug)]
pub struct Drawn {
    /// `[rows, 3]`, which [`RowDraw::unpack`] reads.
    pub draws: Buffer<u32>,
    /// `[rows, KEPT]` the tokens that truncation left, ascending, from the start of each row on; the rest has anything in it.
    pub kept_ids: Buffer<u32>,
    /// `[rows * KEPT]` the lists of `kept_ids`, one right behind the other, after [`pack_kept`]; rows with more than
    /// [`KEPT`] have none.
    pub packed_ids: Buffer<u32>,
}

impl Choice {
    /// As the device takes it, so that one upload brings the choices of all rows.
    #[must_use]
    pub fn pack(self) -> [u32; SETTINGS] {
        let Self { temperature, top_p, min_p, uniform, top_k } = self;
        let [temperature, top_p, min_p, uniform] = [temperature, top_p, min_p, uniform].map(f32::to_bits);
        [temperature, top_p, min_p, uniform, top_k]
    }
}

impl RowDraw {
    /// The draws `[n, 3]` of rows, as one download brings them.
    pub fn unpack(draws: &[u32]) -> impl Iterator<Item = Self> {
        let (draws, _) = draws.as_chunks::<DRAW>();
        draws.iter().map(|[token, logprob, kept]| Self {
            token: *token,
            logprob: f32::from_bits(*logprob),
            kept: *kept as usize,
        })
    }
}

impl Drawn {
    /// Room for `rows` tokens.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(device: &Device, rows: usize) -> Result<Self> {
        Ok(Self {
            draws: device.zeros(DRAW * rows)?,
            kept_ids: device.uninit(rows * KEPT)?,
            packed_ids: device.uninit(rows * KEPT)?,
        })
    }

    /// Most rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.draws.len() / DRAW
    }
}

/// Draws a token for each row of `logits [n, vocabulary]` into the first `n` rows of `out`, by its [`Choice`] in `choices
/// [n, 5]`: top-k, then top-p within it, then min-p, where the most likely token always stays, equal logits go by their ids,
/// and the token is where the running sum of probabilities in the order of ids passes the uniform number.
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
    out: &mut Drawn,
) -> Result<()> {
    let n = rows_of(logits.len(), vocabulary);
    assert_eq!(choices.len(), SETTINGS * n, "{SETTINGS} numbers for each of {n} rows");
    assert!(n <= out.rows(), "{n} rows where there is room for {}", out.rows());
    let arguments = [
        logits.into(),
        size(vocabulary).into(),
        choices.into(),
        out.draws.all_mut().into(),
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
    let arguments = [out.draws.all().into(), out.kept_ids.all().into(), out.packed_ids.all_mut().into()];
    device.launch("pack_kept", [n, 1, 1], ROW_THREADS, 0, &arguments)
}
