//! LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank adapters, as in PEFT.
//!
//! ```text
//! W = W0 + (alpha / rank) * B A,  A [rank, in], B [out, rank]
//! ```
//!
//! The network computes with the merged `W`, so sampling, scoring and backward passes are those of a full model. With
//! `s = alpha / rank` and the gradient `dW [out, in]`, the chain rule gives `s dW A^T` for `B` and `s B^T dW` for `A`.
//! Compared with computing `x A^T B^T` next to a frozen layer this costs the gradient of the whole matrix, and saves a
//! second code path in every role.
//!
//! Invariant: merged weights are computed from the frozen `W0`, never from merged ones, so they are a function of `W0`,
//! `A` and `B` and do not drift. Only `A` and `B` have an optimizer state.

use std::ops::Range;
use std::path::Path;

pub use model::TargetModule;
use model::products::{StridedMatrix, multiply};
use model::{ParameterSpec, Parameters, ThreadPool};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::TrainerError;
use crate::lora_files;
use crate::optimizer::{Optimizer, ScaledGradients};

/// Hyperparameters of LoRA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank of the adapter, at least 1.
    pub rank: usize,
    /// The product `B A` is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Layers with an adapter, at least one.
    pub target_modules: Vec<TargetModule>,
}

/// An adapter with the frozen weights under it.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    config: LoraConfig,
    /// Adapted weights, in the order of the model's layout.
    pairs: Vec<LoraPair>,
    /// `A` and `B` of every adapted weight, with PEFT's names.
    specs: Vec<ParameterSpec>,
    /// Values of `A` and `B`, in the order of `specs`.
    values: Vec<f32>,
    /// `W0` of every adapted weight, concatenated.
    base: Vec<f32>,
}

/// One adapted weight.
#[derive(Clone, Debug, PartialEq)]
struct LoraPair {
    /// Range of the weight in the flat parameters.
    weight: Range<usize>,
    /// Range of `W0` in the frozen weights.
    base: Range<usize>,
    /// Range of `A [rank, columns]` in the values.
    a: Range<usize>,
    /// Range of `B [rows, rank]` in the values, directly after `A`.
    b: Range<usize>,
    rows: usize,
    columns: usize,
}

/// Copies an adapter from a checkpoint to a new directory. `base` becomes PEFT's `base_model_name_or_path`: a directory
/// or a name on the Hugging Face hub.
///
/// # Errors
/// If `to` exists, or a file cannot be read or written.
pub fn export(from: &Path, to: &Path, base: &str) -> Result<(), TrainerError> {
    lora_files::copy(from, to, base)
}

impl LoraConfig {
    /// Scale of the product `B A`.
    #[must_use]
    pub fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    /// Shapes of `A` and `B` for every adapted weight of a model with tensors `specs`, and the number of frozen values
    /// under them.
    #[must_use]
    pub fn shapes(&self, specs: &[ParameterSpec]) -> (Vec<ParameterSpec>, usize) {
        let (mut matrices, mut len, mut frozen) = (Vec::new(), 0, 0);
        for (spec, rows, columns) in self.targets(specs) {
            let module = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
            for (which, shape) in [('A', [self.rank, columns]), ('B', [rows, self.rank])] {
                let name = format!("base_model.model.{module}.lora_{which}.weight");
                matrices.push(ParameterSpec { name, shape: shape.to_vec(), offset: len, frozen: false });
                len = shape.into_iter().fold(1, usize::saturating_mul).saturating_add(len);
            }
            frozen += spec.len();
        }
        (matrices, frozen)
    }

    /// The adapted weights among `specs`, each with rows and columns.
    fn targets<'a>(
        &'a self,
        specs: &'a [ParameterSpec],
    ) -> impl Iterator<Item = (&'a ParameterSpec, usize, usize)> {
        specs.iter().filter_map(|spec| {
            let module = TargetModule::of_weight(&spec.name)?;
            let [rows, columns] = spec.shape[..] else { return None };
            self.target_modules.contains(&module).then_some((spec, rows, columns))
        })
    }
}

impl Adapter {
    /// The frozen weights, which colocation moves out of memory and restores with the same values.
    pub(crate) fn base_mut(&mut self) -> &mut Vec<f32> {
        &mut self.base
    }

    /// A new adapter on the frozen weights `base`: `A` is uniform within `1 / sqrt(in)`, PEFT's Kaiming initialisation,
    /// and `B` is zero, so the merged weights equal `base`. The same seed gives the same bits on every platform, and
    /// each matrix has its own random stream.
    #[must_use]
    pub fn new(config: LoraConfig, base: &Parameters, seed: u64) -> Self {
        let mut adapter = Self::zeros(config, base);
        for (index, pair) in (0..).zip(&adapter.pairs) {
            let bound = 1.0 / (pair.columns as f64).sqrt();
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(index);
            let unit = 2.0 / (1_u64 << 53) as f64;
            for value in &mut adapter.values[pair.a.clone()] {
                *value = (bound * ((rng.next_u64() >> 11) as f64 * unit - 1.0)) as f32;
            }
        }
        adapter
    }

    /// Loads the adapter in `dir`, in PEFT's layout, which must match `config`.
    ///
    /// # Errors
    /// If a file is missing or broken, or the adapter has another configuration or model.
    pub fn open(dir: &Path, config: &LoraConfig, base: &Parameters) -> Result<Self, TrainerError> {
        let mut adapter = Self::zeros(config.clone(), base);
        lora_files::read(dir, config, &adapter.specs, &mut adapter.values)?;
        Ok(adapter)
    }

    /// Hyperparameters.
    #[must_use]
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The matrices `A [rank, in]` and `B [out, rank]` of every adapted weight, with PEFT's names.
    #[must_use]
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// All values `[n]` of `A` and `B`, in the order of [`Self::specs`].
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All values `[n]`, mutable; [`Self::merge`] updates the weights.
    #[must_use]
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Writes the merged weights into the flat `parameters [n]` of the model; other weights are unchanged.
    ///
    /// # Panics
    /// If `parameters` is of another model.
    pub fn merge(&self, parameters: &mut [f32], pool: &ThreadPool) {
        let scale = self.config.scale();
        let mut parts = Vec::with_capacity(self.pairs.len());
        let (mut rest, mut at) = (parameters, 0);
        for pair in &self.pairs {
            let (weight, after) = rest[pair.weight.start - at..].split_at_mut(pair.weight.len());
            parts.push((pair, weight));
            (rest, at) = (after, pair.weight.end);
        }
        pool.map(parts, |(pair, weight)| {
            let (a, b) = self.matrices(pair);
            multiply(b, a, weight);
            let base = &self.base[pair.base.clone()];
            weight.iter_mut().zip(base).for_each(|(w, base)| *w = base + scale * *w);
        });
    }

    /// Gradients of `A` and `B`, flat in the order of [`Self::specs`], from the gradients `of_parameters [n]` of the
    /// whole model.
    ///
    /// # Panics
    /// If `of_parameters` is of another model.
    #[must_use]
    pub fn gradients(&self, of_parameters: &[f32], pool: &ThreadPool) -> Vec<f32> {
        self.gradients_within(&(0..of_parameters.len()), of_parameters, pool)
    }

    /// The same for the weights in the range `place` of the flat parameters, whose gradients are `of_parameters
    /// [place]`.
    pub(crate) fn gradients_within(
        &self,
        place: &Range<usize>,
        of_parameters: &[f32],
        pool: &ThreadPool,
    ) -> Vec<f32> {
        let scale = self.config.scale();
        let mut gradients = vec![0.0; self.within(place).len()];
        let mut parts = Vec::new();
        let mut rest = &mut gradients[..];
        for pair in self.pairs.iter().filter(|pair| place.contains(&pair.weight.start)) {
            let (da, after) = rest.split_at_mut(pair.a.len());
            let (db, after) = after.split_at_mut(pair.b.len());
            parts.push((pair, da, db));
            rest = after;
        }
        pool.map(parts, |(pair, da, db)| {
            let (a, b) = self.matrices(pair);
            let weight = pair.weight.start - place.start..pair.weight.end - place.start;
            let dw = StridedMatrix::new(&of_parameters[weight], pair.columns);
            multiply(b.transposed(), dw, da);
            multiply(dw, a.transposed(), db);
            da.iter_mut().chain(db).for_each(|g| *g *= scale);
        });
        gradients
    }

    /// Range among [`Self::values`] of the matrices whose weights are in the range `place` of the flat parameters.
    pub(crate) fn within(&self, place: &Range<usize>) -> Range<usize> {
        let mut before = self.pairs.iter().filter(|pair| pair.weight.start < place.start);
        let start = before.next_back().map_or(0, |pair| pair.b.end);
        let mut inside = self.pairs.iter().filter(|pair| place.contains(&pair.weight.start));
        start..inside.next_back().map_or(start, |pair| pair.b.end)
    }

    /// Shapes and mutable values.
    pub(crate) fn parts_mut(&mut self) -> (&[ParameterSpec], &mut [f32]) {
        (&self.specs, &mut self.values)
    }

    /// One optimizer update of `A` and `B` with gradients `[n]`, flat in the order of [`Self::specs`].
    ///
    /// # Panics
    /// If `optimizer` has states for other tensors.
    pub fn update(
        &mut self,
        optimizer: &mut Optimizer,
        gradients: ScaledGradients<'_>,
        learning_rate: f32,
        pool: &ThreadPool,
    ) {
        optimizer.update(&self.specs, &mut self.values, gradients, learning_rate, pool);
    }

    /// The frozen model: `merged` with `W0` in place of the adapted weights.
    ///
    /// # Panics
    /// If `merged` is of another model.
    #[must_use]
    pub fn base_parameters(&self, merged: &Parameters) -> Parameters {
        let mut parameters = merged.clone();
        for pair in &self.pairs {
            parameters.values_mut()[pair.weight.clone()].copy_from_slice(&self.base[pair.base.clone()]);
        }
        parameters
    }

    fn zeros(config: LoraConfig, base: &Parameters) -> Self {
        let mut adapter = Self::skeleton(config, base.layout().specs());
        for pair in &adapter.pairs {
            adapter.base.extend_from_slice(&base.values()[pair.weight.clone()]);
        }
        adapter.values = vec![0.0; adapter.lengths().0];
        adapter
    }

    /// An adapter without values, for a model with tensors `tensors`.
    pub(crate) fn skeleton(config: LoraConfig, tensors: &[ParameterSpec]) -> Self {
        let (specs, _) = config.shapes(tensors);
        let (mut pairs, mut frozen) = (Vec::new(), 0);
        for ((weight, rows, columns), matrices) in config.targets(tensors).zip(specs.chunks_exact(2)) {
            let weight = weight.range();
            let base = frozen..frozen + weight.len();
            frozen = base.end;
            let (a, b) = (matrices[0].range(), matrices[1].range());
            pairs.push(LoraPair { weight, base, a, b, rows, columns });
        }
        Self { config, pairs, specs, values: Vec::new(), base: Vec::new() }
    }

    /// A copy without the frozen weights: enough to write its files.
    pub(crate) fn without_base(&self) -> Self {
        let Self { config, pairs, specs, values, base: _ } = self;
        let (config, pairs, specs, values) = (config.clone(), pairs.clone(), specs.clone(), values.clone());
        Self { config, pairs, specs, values, base: Vec::new() }
    }

    /// Number of values, and number of frozen weights.
    pub(crate) fn lengths(&self) -> (usize, usize) {
        let values = self.specs.last().map_or(0, |last| last.range().end);
        (values, self.pairs.last().map_or(0, |last| last.base.end))
    }

    /// Sets the values and the frozen weights of a skeleton.
    pub(crate) fn fill(&mut self, values: Vec<f32>, base: Vec<f32>) {
        debug_assert_eq!(self.lengths(), (values.len(), base.len()), "they are of another adapter");
        (self.values, self.base) = (values, base);
    }

    /// The frozen weights, concatenated.
    pub(crate) fn base(&self) -> &[f32] {
        &self.base
    }

    /// `A [rank, columns]` and `B [rows, rank]`.
    fn matrices(&self, pair: &LoraPair) -> (StridedMatrix<'_>, StridedMatrix<'_>) {
        let (a, b) = (&self.values[pair.a.clone()], &self.values[pair.b.clone()]);
        debug_assert_eq!(b.len(), pair.rows * self.config.rank, "B is [rows, rank]");
        (StridedMatrix::new(a, pair.columns), StridedMatrix::new(b, self.config.rank))
    }
}

#[cfg(test)]
mod tests;
