//! The head of a language model behind its matrix product: log-softmax, log-probability of the target token and entropy,
//! from logits of a chunk of rows.
//!
//! Invariant: the sampler computes log-probabilities by the same function, so equal logits give equal bits.

use super::{rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{Buffer, View, ViewMut};

/// Threads of a block, which has a row. The sampler's are as many.
pub(super) const ROW_THREADS: usize = 512;

/// What the rows of a batch predict, and under which distributions; on the device.
#[derive(Debug)]
pub struct HeadTargets {
    /// `[len]`
    tokens: Buffer<u32>,
    /// `[len]`
    temperatures: Buffer<f32>,
    /// `[len + 1]`: row i keeps `ids[starts[i]..starts[i + 1]]`, or everything if that is none.
    starts: Buffer<u64>,
    ids: Buffer<u32>,
}

impl HeadTargets {
    /// Uploads, of each row, the token whose log-probability is wanted, the temperature, above 0, and the tokens that
    /// truncation left, ascending, with the wanted one among them; `None` for all.
    ///
    /// # Errors
    /// If there is no memory for them.
    ///
    /// # Panics
    /// If a row keeps nothing.
    pub fn new<'a>(
        device: &Device,
        targets: impl IntoIterator<Item = (u32, f32, Option<&'a [u32]>)>,
    ) -> Result<Self> {
        let (mut tokens, mut temperatures, mut starts, mut ids) = (vec![], vec![], vec![0], vec![]);
        for (token, temperature, kept) in targets {
            debug_assert!(temperature > 0.0, "a temperature of {temperature}");
            tokens.push(token);
            temperatures.push(temperature);
            if let Some(kept) = kept {
                assert!(!kept.is_empty(), "truncation leaves at least one token");
                debug_assert!(kept.is_sorted(), "kept tokens ascend");
                debug_assert!(kept.binary_search(&token).is_ok(), "{token} is among the kept ones");
                ids.extend_from_slice(kept);
            }
            starts.push(ids.len() as u64);
        }
        Ok(Self {
            tokens: device.upload(&tokens)?,
            temperatures: device.upload(&temperatures)?,
            starts: device.upload(&starts)?,
            ids: device.upload(&ids)?,
        })
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// `n` rows from row `first` on, as kernels take them.
    fn rows(&self, first: usize, n: usize) -> [Argument; 4] {
        assert!(first + n <= self.len(), "rows {first}..{} of {}", first + n, self.len());
        [
            self.tokens.view(first..first + n).into(),
            self.temperatures.view(first..first + n).into(),
            self.starts.view(first..first + n + 1).into(),
            self.ids.all().into(),
        ]
    }
}

/// Writes to `out [n, 2]` the log-probability of the target token, at most 0, and the entropy, both in nats, under
/// `logits [n, vocabulary]` over the temperature, among the kept tokens. The rows' targets are those from row `first` on.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn predict(
    device: &Device,
    logits: View<'_, f32>,
    vocabulary: usize,
    targets: &HeadTargets,
    first: usize,
    out: ViewMut<'_, f32>,
) -> Result<()> {
    let rows = rows_of(logits.len(), vocabulary);
    assert_eq!(out.len(), 2 * rows, "two results for each of {rows} rows");
    let [tokens, temperatures, starts, ids] = targets.rows(first, rows);
    let arguments = [logits.into(), size(vocabulary).into(), tokens, temperatures, starts, ids, out.into()];
    device.launch("predict", [rows, 1, 1], ROW_THREADS, 0, &arguments)
}

/// Writes to `out [n, vocabulary]` the gradient of `logits [n, vocabulary]` for `slopes [n, 2]`, those of a loss by what
/// [`predict`] says: by the log-probability and by the entropy. It is 0 for tokens that are not kept.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn predict_backward<T: Storage>(
    device: &Device,
    logits: View<'_, f32>,
    vocabulary: usize,
    targets: &HeadTargets,
    first: usize,
    slopes: View<'_, f32>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let rows = rows_of(logits.len(), vocabulary);
    assert_eq!(slopes.len(), 2 * rows, "two slopes for each of {rows} rows");
    assert_eq!(out.len(), logits.len(), "a gradient has the shape of what it is of");
    let [tokens, temperatures, starts, ids] = targets.rows(first, rows);
    let arguments = [
        logits.into(),
        size(vocabulary).into(),
        tokens,
        temperatures,
        starts,
        ids,
        slopes.into(),
        out.into(),
    ];
    device.launch(&format!("predict_backward_{}", T::SUFFIX), [rows, 1, 1], ROW_THREADS, 0, &arguments)
}
