//! LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank adapters, as in PEFT.
//!
//! ```text
//! W = W0 + (alpha / rank) * B A,  A [rank, in], B [out, rank]
//! ```
//!
//! The network computes with the merged `W`, so sampling, scoring and the forward pass are those of a full model. The backward
//! pass forms the gradients of `A` and `B` and no gradient of `W` ([`model::low_rank`]); a device forms that of the experts of a
//! layer, which is projected on the factors. All linear layers of the blocks can have an adapter, those of every expert and of
//! recurrences too, and so can the embedding and the head of models that do not tie them.
//!
//! Invariant: merged weights are computed from the frozen `W0`, never from merged ones, so they are a function of `W0`,
//! `A` and `B` and do not drift. Only `A` and `B` have gradients and an optimizer state.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub use model::TargetModule;
use model::parameters::fill_normal;
use model::{
    AdaptedMatrix, FactorPair, FrozenParameters, Layout, LowRank, ParameterSpec, Parameters, ThreadPool,
    atomic, manifest,
};
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
    /// `A` and `B` of every adapted weight, in the order of the model's layout. A training pass shares them.
    factors: Arc<LowRank>,
    /// `A` and `B` of every adapted weight, with PEFT's names.
    specs: Vec<ParameterSpec>,
    /// `W0` of every adapted weight, concatenated.
    base: Vec<f32>,
    /// Of every adapted weight, for each row of `B` its row in files; `None` if it is the same.
    file_rows: Vec<Option<Vec<usize>>>,
}

/// Copies an adapter from a checkpoint to a new directory. `base` becomes PEFT's `base_model_name_or_path`: a directory
/// or a name on the Hugging Face hub.
///
/// # Errors
/// If `to` exists, or a file cannot be read or written.
pub fn export(from: &Path, to: &Path, base: &str) -> Result<(), TrainerError> {
    lora_files::copy(from, to, base)
}

/// Whether `dir` is an adapter in PEFT's layout.
#[must_use]
pub fn is_adapter(dir: &Path) -> bool {
    lora_files::is_adapter(dir)
}

/// The factors of the adapter in `dir`, in PEFT's layout, for a model of `layout`: to be served beside its weights.
///
/// # Errors
/// If a file is missing or broken, or the adapter is of another model or more than plain LoRA.
pub fn load_factors(dir: &Path, layout: &Layout) -> Result<Arc<LowRank>, TrainerError> {
    Ok(Adapter::read(dir, &lora_files::config(dir)?, layout)?.factors)
}

impl LoraConfig {
    /// Scale of the product `B A`.
    #[must_use]
    pub fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    /// Checks that the layers are those of a model with tensors `specs`.
    ///
    /// # Errors
    /// If embedding and head are one tensor and one of them is named, or the model has none of the layers.
    pub fn check(&self, specs: &[ParameterSpec]) -> Result<(), TrainerError> {
        let ends = [TargetModule::EmbedTokens, TargetModule::LmHead];
        let is_tied = AdaptedMatrix::all(specs).all(|matrix| matrix.module != Some(ends[1]));
        match ends.into_iter().find(|end| is_tied && self.target_modules.contains(end)) {
            Some(module) => Err(TrainerError::TiedTarget { module: module.as_str() }),
            None if self.targets(specs).next().is_none() => {
                let mut there: Vec<&str> = Vec::new();
                for module in AdaptedMatrix::all(specs).filter_map(|matrix| matrix.module) {
                    let possible = !is_tied || !ends.contains(&module);
                    if possible && !there.contains(&module.as_str()) {
                        there.push(module.as_str());
                    }
                }
                Err(TrainerError::NoTarget { there: there.join(", ") })
            }
            None => Ok(()),
        }
    }

    /// Shapes of `A` and `B` for every adapted weight of a model with tensors `specs`, and the number of frozen values
    /// under them.
    #[must_use]
    pub fn shapes(&self, specs: &[ParameterSpec]) -> (Vec<ParameterSpec>, usize) {
        let (mut matrices, mut len, mut frozen) = (Vec::new(), 0, 0);
        for matrix in self.targets(specs) {
            let AdaptedMatrix { name, rows, columns, .. } = matrix;
            let module = name.strip_suffix(".weight").unwrap_or(name);
            // PEFT keeps the factors of an embedding as parameters and not as layers.
            let (before, after, [a, b]) = match is_embedding(&matrix) {
                true => ("embedding_", "", [[self.rank, rows], [columns, self.rank]]),
                false => ("", ".weight", [[self.rank, columns], [rows, self.rank]]),
            };
            for (which, shape) in [('A', a), ('B', b)] {
                let name = format!("base_model.model.{module}.lora_{before}{which}{after}");
                matrices.push(ParameterSpec::new(name, &shape, len));
                len = shape.into_iter().fold(1, usize::saturating_mul).saturating_add(len);
            }
            frozen += matrix.weight.len();
        }
        (matrices, frozen)
    }

    /// The adapted weights among `specs`.
    fn targets<'a>(&'a self, specs: &'a [ParameterSpec]) -> impl Iterator<Item = AdaptedMatrix<'a>> {
        let is_adapted = move |matrix: &AdaptedMatrix<'_>| {
            matrix.module.is_some_and(|module| self.target_modules.contains(&module))
        };
        AdaptedMatrix::all(specs).filter(is_adapted)
    }
}

/// Whether a weight is the table of the embedding, whose rows are looked up.
fn is_embedding(matrix: &AdaptedMatrix<'_>) -> bool {
    matrix.module == Some(TargetModule::EmbedTokens)
}

impl Adapter {
    /// A new adapter on the frozen weights `base`: `A` is uniform within `1 / sqrt(in)`, PEFT's Kaiming initialisation,
    /// and `B` is zero, so the merged weights equal `base`; of an embedding `A` is zero and `B` is normal. The same seed gives
    /// the same bits on every platform, and each matrix has its own random stream.
    #[must_use]
    pub fn new(config: LoraConfig, base: &Parameters, seed: u64) -> Self {
        Self::zeros(config, base).initialized(seed)
    }

    /// The same for a base that stays quantised, into which it is never merged.
    #[must_use]
    pub fn over(config: LoraConfig, base: &FrozenParameters, seed: u64) -> Self {
        Self::skeleton(config, base.layout().specs()).initialized(seed)
    }

    fn initialized(mut self, seed: u64) -> Self {
        let factors = Arc::make_mut(&mut self.factors);
        let pairs = factors.pairs().to_vec();
        for (index, pair) in (0..).zip(pairs) {
            if pair.is_embedding {
                fill_normal(&mut factors.values_mut()[pair.b], 1.0, seed, index);
                continue;
            }
            let bound = 1.0 / (pair.columns as f64).sqrt();
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(index);
            let unit = 2.0 / (1_u64 << 53) as f64;
            for value in &mut factors.values_mut()[pair.a] {
                *value = (bound * ((rng.next_u64() >> 11) as f64 * unit - 1.0)) as f32;
            }
        }
        self
    }

    /// Loads the adapter in `dir`, in PEFT's layout, which must match `config`.
    ///
    /// # Errors
    /// If a file is missing or broken, or the adapter has another configuration or model.
    pub fn open(dir: &Path, config: &LoraConfig, base: &Parameters) -> Result<Self, TrainerError> {
        config.check(base.layout().specs())?;
        let mut adapter = Self::zeros(config.clone(), base);
        lora_files::read(dir, config, base.layout(), Some(base), &mut adapter)?;
        Ok(adapter)
    }

    /// The same as [`Self::open`] for a base that stays quantised.
    ///
    /// # Errors
    /// As there.
    pub fn open_over(dir: &Path, config: &LoraConfig, base: &FrozenParameters) -> Result<Self, TrainerError> {
        Self::read(dir, config, base.layout())
    }

    /// The same without frozen weights, for a model of `layout`.
    fn read(dir: &Path, config: &LoraConfig, layout: &Layout) -> Result<Self, TrainerError> {
        config.check(layout.specs())?;
        let mut adapter = Self::skeleton(config.clone(), layout.specs());
        lora_files::read(dir, config, layout, None, &mut adapter)?;
        Ok(adapter)
    }

    /// Writes it to the new directory `dir` in PEFT's layout, with a manifest, atomically. `base` becomes PEFT's
    /// `base_model_name_or_path`.
    ///
    /// # Errors
    /// If `dir` exists, or a file cannot be written.
    pub fn save(&self, dir: &Path, base: &str) -> Result<(), TrainerError> {
        Ok(atomic::directory(dir, |dir| {
            lora_files::fill(dir, self, base)?;
            manifest::write(dir)
        })?)
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
        self.factors.values()
    }

    /// All values `[n]`, mutable; [`Self::merge`] updates the weights.
    #[must_use]
    pub fn values_mut(&mut self) -> &mut [f32] {
        Arc::make_mut(&mut self.factors).values_mut()
    }

    /// The factors, for a training pass. It drops them before the next update, which otherwise copies them.
    #[must_use]
    pub fn factors(&self) -> &Arc<LowRank> {
        &self.factors
    }

    /// Writes the merged weights into the flat `parameters [n]` of the model; other weights are unchanged.
    ///
    /// # Panics
    /// If `parameters` is of another model.
    pub fn merge(&self, parameters: &mut [f32], pool: &ThreadPool) {
        let places = self.base_places();
        self.factors.merge(parameters, |index| &self.base[places[index].clone()], pool);
    }

    /// Gradients of `A` and `B`, flat in the order of [`Self::specs`], from the gradients `of_parameters [n]` of the
    /// whole model.
    ///
    /// # Panics
    /// If `of_parameters` is of another model.
    #[must_use]
    pub fn gradients(&self, of_parameters: &[f32], pool: &ThreadPool) -> Vec<f32> {
        self.factors.projected(&(0..of_parameters.len()), of_parameters, pool)
    }

    /// The frozen weights, which colocation moves out of memory and restores with the same values.
    pub(crate) fn base_mut(&mut self) -> &mut Vec<f32> {
        &mut self.base
    }

    /// Shapes and mutable values.
    pub(crate) fn parts_mut(&mut self) -> (&[ParameterSpec], &mut [f32]) {
        (&self.specs, Arc::make_mut(&mut self.factors).values_mut())
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
        let (specs, values) = self.parts_mut();
        optimizer.update(specs, values, gradients, learning_rate, pool);
    }

    /// The frozen model: `merged` with `W0` in place of the adapted weights.
    ///
    /// # Panics
    /// If `merged` is of another model.
    #[must_use]
    pub fn base_parameters(&self, merged: &Parameters) -> Parameters {
        let mut parameters = merged.clone();
        for (pair, place) in self.factors.pairs().iter().zip(self.base_places()) {
            parameters.values_mut()[pair.weight.clone()].copy_from_slice(&self.base[place]);
        }
        parameters
    }

    fn zeros(config: LoraConfig, base: &Parameters) -> Self {
        let mut adapter = Self::skeleton(config, base.layout().specs());
        for pair in adapter.factors.pairs() {
            adapter.base.extend_from_slice(&base.values()[pair.weight.clone()]);
        }
        adapter
    }

    /// An adapter of zeros without frozen weights, for a model with tensors `tensors`.
    pub(crate) fn skeleton(config: LoraConfig, tensors: &[ParameterSpec]) -> Self {
        let (specs, _) = config.shapes(tensors);
        let pair = |(matrix, factors): (AdaptedMatrix<'_>, &[ParameterSpec])| {
            let (a, b, is_embedding) = (factors[0].range(), factors[1].range(), is_embedding(&matrix));
            let AdaptedMatrix { weight, rows, columns, .. } = matrix;
            FactorPair { weight, a, b, rows, columns, is_embedding }
        };
        let pairs = config.targets(tensors).zip(specs.chunks_exact(2)).map(pair).collect();
        let factors = Arc::new(LowRank::zeros(config.rank, config.scale(), pairs));
        let file_rows = config.targets(tensors).map(|matrix| matrix.file_rows()).collect();
        Self { config, factors, specs, base: Vec::new(), file_rows }
    }

    /// A copy without the frozen weights: enough to write its files.
    pub(crate) fn without_base(&self) -> Self {
        let Self { config, factors, specs, base: _, file_rows } = self;
        let (config, factors, specs) = (config.clone(), Arc::clone(factors), specs.clone());
        Self { config, factors, specs, base: Vec::new(), file_rows: file_rows.clone() }
    }

    /// Number of values, and number of frozen weights.
    pub(crate) fn lengths(&self) -> (usize, usize) {
        (self.values().len(), self.base_places().last().map_or(0, |last| last.end))
    }

    /// Sets the values and the frozen weights of a skeleton; those are empty if the base stays quantised.
    pub(crate) fn fill(&mut self, values: &[f32], base: Vec<f32>) {
        debug_assert!(base.is_empty() || self.lengths() == (values.len(), base.len()), "of another adapter");
        self.values_mut().copy_from_slice(values);
        self.base = base;
    }

    /// For each row of the matrix of [`Self::specs`] with this index its row in files; `None` if it is the same.
    pub(crate) fn file_rows(&self, index: usize) -> Option<&[usize]> {
        let is_output = index % 2 == 1;
        self.file_rows[index / 2].as_deref().filter(|_| is_output)
    }

    /// The frozen weights, concatenated.
    pub(crate) fn base(&self) -> &[f32] {
        &self.base
    }

    /// Range of `W0` of every adapted weight among the frozen weights.
    fn base_places(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let place = |pair: &FactorPair| {
            end += pair.weight.len();
            end - pair.weight.len()..end
        };
        self.factors.pairs().iter().map(place).collect()
    }
}

#[cfg(test)]
mod tests;
