//! The language-model head after its matrix product: log-softmax, log-probability of the target token, and entropy, for
//! a chunk of rows. With a chunked product the full logits are never stored, as in Liger Kernel's fused linear
//! cross-entropy (arXiv 2410.10989).
//!
//! Invariant: the sampler computes log-probabilities with the same device function, so equal logits give equal bits.

use super::{rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Threads per block; one block per row. The sampling kernel has the same number.
pub(super) const ROW_THREADS: usize = 512;

/// Results of [`predict`] for a row: log-probability and entropy, and largest logit and log of the sum of weights, from which the backward
/// computes probabilities again.
pub const PREDICTED: usize = 4;

/// Targets of a batch of rows, on the device.
#[derive(Debug)]
pub struct HeadTargets {
    /// Target tokens, `[len]`.
    tokens: DeviceBuffer<u32>,
    /// Temperatures, `[len]`.
    temperatures: DeviceBuffer<f32>,
    /// `[len + 1]`: row i is truncated to the tokens `ids[starts[i]..starts[i + 1]]`; an empty range means no
    /// truncation.
    starts: DeviceBuffer<u64>,
    ids: DeviceBuffer<u32>,
}

/// The target of one row.
#[derive(Clone, Copy, Debug)]
pub struct HeadTarget<'a> {
    /// The token whose log-probability is wanted.
    pub token: u32,
    /// Temperature of the distribution, above 0.
    pub temperature: f32,
    /// `[kept]` token ids that truncation kept, ascending, with the target among them; `None` for no truncation.
    pub kept: Option<&'a [u32]>,
}

impl HeadTargets {
    /// Uploads the target of each row.
    ///
    /// # Errors
    /// If device memory is full.
    ///
    /// # Panics
    /// If the kept ids of a row are empty.
    pub fn new<'a>(device: &Device, targets: impl IntoIterator<Item = HeadTarget<'a>>) -> Result<Self> {
        let (mut tokens, mut temperatures, mut starts, mut ids) = (vec![], vec![], vec![0], vec![]);
        for HeadTarget { token, temperature, kept } in targets {
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

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Kernel arguments for `n` rows from row `first`.
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

/// Log-probability of the target token (at most 0) and entropy, nats, into `out [n, 4]`, under the softmax of `logits
/// [n, vocabulary]` divided by the temperature, over the kept tokens. Row 0 has the target `first`. The other two results of a row are
/// for [`predict_backward`].
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
    assert_eq!(out.len(), PREDICTED * rows, "{PREDICTED} results for each of {rows} rows");
    let [tokens, temperatures, starts, ids] = targets.rows(first, rows);
    let arguments = [logits.into(), size(vocabulary).into(), tokens, temperatures, starts, ids, out.into()];
    device.launch("predict", [rows, 1, 1], ROW_THREADS, 0, &arguments)
}

/// Gradient of `logits [n, vocabulary]` into `out [n, vocabulary]`, from `slopes [n, 2]`: the derivatives of the loss
/// by log-probability and entropy of [`predict`], whose result for the same logits is `predicted [n, 4]`. It is 0 for tokens that
/// truncation removed.
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
    (predicted, slopes): (View<'_, f32>, View<'_, f32>),
    out: ViewMut<'_, T>,
) -> Result<()> {
    let rows = rows_of(logits.len(), vocabulary);
    assert_eq!(predicted.len(), PREDICTED * rows, "{PREDICTED} results for each of {rows} rows");
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
        predicted.into(),
        slopes.into(),
        out.into(),
    ];
    device.launch(&format!("predict_backward_{}", T::SUFFIX), [rows, 1, 1], ROW_THREADS, 0, &arguments)
}
