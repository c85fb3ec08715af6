//! Low-rank factors of linear operations whose rows have different adapters (LoRA, Hu et al. 2021, arXiv 2106.09685), so
//! that many adapters of one base compute in one batch (Punica, Chen et al. 2023, arXiv 2310.18547).
//!
//! `out[row] += B (scale A x[row])` with `A [rank, in]` and `B [out, rank]` of the adapter of the row. The adapter of each
//! row is read on the device, so that a recorded step serves any.
//!
//! Invariant: a row without an adapter is unchanged, and others depend on their own adapter alone.

use super::experts::ExpertInputs;
use super::routes::RoutedRows;
use super::{THREADS, rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// The number of a row without an adapter.
pub const NO_ADAPTER: u32 = u32::MAX;
/// Ranks per block.
const RANKS: usize = 8;

/// Where the factors of an adapter are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterPlace {
    /// The first value of `A [rank, in]` among all factors.
    pub a: usize,
    /// The first value of `B [out, rank]` among all factors.
    pub b: usize,
    /// Rank of both.
    pub rank: usize,
    /// What the product is multiplied with.
    pub scale: f32,
}

/// The adapters of a linear operation, on the host.
#[derive(Clone, Debug)]
pub struct AdaptedOutputs {
    /// Width of the input; of an embedding the size of its vocabulary.
    pub input: usize,
    /// Width of the output.
    pub output: usize,
    /// Columns of the output that have factors of their own.
    pub sites: Vec<std::ops::Range<usize>>,
    /// Number of adapters.
    pub adapters: usize,
    /// `[networks, sites, adapters]` factors; a network is an expert, or the only one.
    pub places: Vec<Option<AdapterPlace>>,
}

impl AdaptedOutputs {
    /// The largest rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.places.iter().flatten().map(|place| place.rank).max().unwrap_or(0)
    }

    /// Number of networks.
    #[must_use]
    pub fn networks(&self) -> usize {
        self.places.len() / (self.sites.len() * self.adapters).max(1)
    }

    /// The table of the kernels, for `len` factors in all.
    ///
    /// # Panics
    /// If a place is beyond the factors, or a site beyond the output.
    #[must_use]
    pub fn table(&self, len: usize) -> Vec<u32> {
        let count = self.networks() * self.sites.len() * self.adapters;
        assert_eq!(self.places.len(), count, "a place for each network, site and adapter");
        let mut table = Vec::with_capacity(2 * self.sites.len() + 6 * count);
        for site in &self.sites {
            assert!(site.end <= self.output, "columns {site:?} of {}", self.output);
            table.extend([site.start as u32, site.len() as u32]);
        }
        let words = |place: usize| [place as u32, (place as u64 >> 32) as u32];
        for (number, place) in self.places.iter().enumerate() {
            let Some(AdapterPlace { a, b, rank, scale }) = *place else {
                table.extend([0; 6]);
                continue;
            };
            let site = &self.sites[number / self.adapters % self.sites.len()];
            let ends = [a + rank * self.input, b + rank * site.len()];
            assert!(ends.iter().all(|end| *end <= len), "{place:?} of {len} factors");
            table.extend(words(a).into_iter().chain(words(b)));
            table.extend([rank as u32, scale.to_bits()]);
        }
        table
    }
}

/// The adapters of a linear operation, on a device.
#[derive(Clone, Copy, Debug)]
pub struct AdapterFactors<'a, T: Storage> {
    /// `[n]` the factors of all adapters.
    pub factors: View<'a, T>,
    /// What [`AdaptedOutputs::table`] gives.
    pub table: View<'a, u32>,
    /// Number of sites of the operation.
    pub sites: usize,
    /// Number of adapters.
    pub adapters: usize,
    /// Largest rank of the operation.
    pub rank: usize,
}

/// The adapters of the rows of a batch.
#[derive(Clone, Copy, Debug)]
pub struct RowAdapters<'a> {
    /// `[T]` the adapter of each token, or [`NO_ADAPTER`].
    pub of_tokens: View<'a, u32>,
    /// The experts of the tokens, for an operation that each expert has; a token then has a row for each of its experts.
    pub routes: Option<RoutedRows<'a>>,
}

impl RowAdapters<'_> {
    /// Number of rows.
    fn rows(&self) -> usize {
        self.routes.map_or(self.of_tokens.len(), |routes| routes.experts.len())
    }

    /// Arguments of the kernels.
    fn arguments<T: Storage>(&self, of: &AdapterFactors<'_, T>) -> Vec<Argument> {
        let per_token = self.rows().checked_div(self.of_tokens.len()).unwrap_or(1).max(1);
        assert_eq!(self.rows(), per_token * self.of_tokens.len(), "every token has {per_token} rows");
        let sizes = [per_token, of.adapters, of.sites].map(|n| Argument::from(size(n)));
        let [experts, rows] =
            [self.routes.map(|routes| routes.experts), self.routes.map(|routes| routes.rows)];
        let lists = [self.of_tokens.into(), experts.into(), rows.into(), of.table.into()];
        lists.into_iter().chain(sizes).chain([of.factors.into()]).collect()
    }
}

/// Values of the memory that [`add_adapted`] and [`add_embedded`] need for `rows` rows.
#[must_use]
pub fn shrunk_len<T: Storage>(of: &AdapterFactors<'_, T>, rows: usize) -> usize {
    rows * of.sites * of.rank
}

/// Adds what the adapters of `rows` add to the result `out [rows, output]` of a linear operation on `x` of this width.
/// Overwrites `shrunk`, of at least [`shrunk_len`] values.
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn add_adapted<T: Storage, Out: Storage>(
    device: &Device,
    of: &AdapterFactors<'_, T>,
    rows: &RowAdapters<'_>,
    (x, input): (ExpertInputs<'_, T>, usize),
    mut shrunk: ViewMut<'_, f32>,
    out: ViewMut<'_, Out>,
) -> Result<()> {
    let count = rows.rows();
    if count == 0 || of.rank == 0 {
        return Ok(());
    }
    assert!(shrunk.len() >= shrunk_len(of, count), "{} values for {count} rows", shrunk.len());
    let (x, of_tokens) = match x {
        ExpertInputs::OfTokens(x) => (x, true),
        ExpertInputs::OfRows(x) => (x, false),
    };
    let inputs = if of_tokens { rows.of_tokens.len() } else { count };
    assert_eq!(x.len(), inputs * input, "an input of {input} values for each token or row");
    let mut arguments = rows.arguments(of);
    let own = [input, usize::from(of_tokens), of.rank].map(|n| Argument::from(size(n)));
    arguments.extend([Argument::from(x)].into_iter().chain(own).chain([shrunk.reborrow().into()]));
    let grid = [count, of.sites * of.rank.div_ceil(RANKS), 1];
    device.launch(&format!("shrink_adapters_{}", T::SUFFIX), grid, RANKS * 32, 0, &arguments)?;
    expand(device, of, rows, shrunk, out)
}

/// Adds what the adapters of the tokens `ids [T]` add to their rows `out [T, width]` of an embedding. Overwrites `shrunk`, of at
/// least [`shrunk_len`] values. The host must have checked that all ids are below `vocabulary`.
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn add_embedded<T: Storage>(
    device: &Device,
    of: &AdapterFactors<'_, T>,
    rows: &RowAdapters<'_>,
    (ids, vocabulary): (View<'_, u32>, usize),
    mut shrunk: ViewMut<'_, f32>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let count = rows.rows();
    if count == 0 || of.rank == 0 {
        return Ok(());
    }
    assert_eq!(ids.len(), count, "a token has one row");
    assert!(of.sites == 1 && shrunk.len() >= shrunk_len(of, count), "{} values for {count}", shrunk.len());
    let mut arguments = rows.arguments(of);
    let own = [vocabulary, of.rank].map(|n| Argument::from(size(n)));
    arguments.extend([Argument::from(ids)].into_iter().chain(own).chain([shrunk.reborrow().into()]));
    let grid = [count, of.rank.div_ceil(THREADS), 1];
    device.launch(&format!("look_up_adapters_{}", T::SUFFIX), grid, THREADS, 0, &arguments)?;
    expand(device, of, rows, shrunk, out)
}

/// Adds the products of `B` with `shrunk [rows, sites, rank]` to `out [rows, output]`.
fn expand<T: Storage, Out: Storage>(
    device: &Device,
    of: &AdapterFactors<'_, T>,
    rows: &RowAdapters<'_>,
    shrunk: ViewMut<'_, f32>,
    out: ViewMut<'_, Out>,
) -> Result<()> {
    let count = rows.rows();
    let output = out.len() / count;
    rows_of(out.len(), output);
    let mut arguments = rows.arguments(of);
    let own = [Argument::from(shrunk), size(of.rank).into(), size(output).into(), out.into()];
    arguments.extend(own);
    let grid = [count, output.div_ceil(THREADS), 1];
    device.launch(&format!("expand_adapters_{}_{}", T::SUFFIX, Out::SUFFIX), grid, THREADS, 0, &arguments)
}
