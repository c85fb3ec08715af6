//! Optimizers: AdamW, 8-bit AdamW, Muon and Dion, with an optimizer state per tensor.
//!
//! AdamW updates all tensors. Muon and Dion update the matrices inside the network, and AdamW the rest: embedding,
//! head, norms and biases. All use the same learning rate. Muon's updates have the size of AdamW's, so learning rates
//! carry over. The singular values of Dion's updates are `sqrt(rows / columns)`; its paper uses a learning rate of 0.01
//! where AdamW has about 0.0003.
//!
//! Under ZeRO a data-parallel rank has the optimizer state of its fragments only (`Optimizer::of_fragments`). Weights
//! passed to [`Optimizer::update`] are the f32 master weights.
//!
//! Invariant: an update consists of independent tasks (a whole matrix, or a fixed chunk of another tensor), so its bits
//! do not depend on which thread or rank computes a task.

mod dion;
mod muon;
mod orthonormal;

use std::ops::Range;
use std::sync::Arc;

use model::{ModelShard, ParameterSpec, ThreadPool};
use serde::{Deserialize, Serialize};

use crate::TrainerError;
use crate::adamw::AdamwUpdate;
use crate::moments::{BLOCK, Coded, MIN_CODED, MomentChunk, Moments};
use crate::zero::Fragment;

/// Optimizer kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// AdamW (arXiv 1711.05101) with f32 moments: 8 bytes of optimizer state per weight.
    #[default]
    Adamw,
    /// AdamW with 8-bit moments (after arXiv 2110.02861): 2 bytes per weight, and two f32 scales per block of 256.
    Adamw8bit,
    /// Muon (Moonlight, arXiv 2502.16982) for matrices, 4 bytes per weight; AdamW with f32 moments for the rest.
    Muon,
    /// Dion (arXiv 2504.05295) for matrices, 4 bytes per weight and a basis; AdamW with f32 moments for the rest.
    Dion,
}

/// Hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerConfig {
    /// Optimizer kind.
    pub kind: OptimizerKind,
    /// AdamW: decay rate of the first moment.
    pub beta1: f32,
    /// AdamW: decay rate of the second moment.
    pub beta2: f32,
    /// AdamW: added to the square root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of matrices; norms and biases do not decay.
    pub weight_decay: f32,
    /// Muon and Dion: decay rate of the momentum.
    pub momentum: f32,
    /// Dion: rank of an update as a fraction of the full rank, above 0 and at most 1.
    pub dion_rank_fraction: f32,
}

/// Optimizer state of some tensors; under ZeRO, of the fragments that a rank owns.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    config: OptimizerConfig,
    /// Number of updates so far.
    updates: u64,
    /// One state per tensor, or per fragment of a rank, in order. An optimizer that is cloned for a checkpoint shares them until
    /// one of the two changes.
    states: Arc<Vec<TensorState>>,
}

/// Flat gradients `[n]` with a factor.
#[derive(Clone, Copy, Debug)]
pub struct ScaledGradients<'a> {
    /// `[n]`
    pub gradients: &'a [f32],
    /// Multiplies the gradients; below 1 if they are clipped.
    pub scale: f32,
}

/// A tensor or fragment with its gradients, as input of an update.
#[derive(Debug)]
pub(crate) struct OwnedFragment<'a> {
    /// Index of the tensor.
    pub(crate) tensor: usize,
    /// Index of the tensor in the whole model, which its rounding is drawn from.
    pub(crate) number: usize,
    /// Index of the first value in its tensor.
    pub(crate) offset: usize,
    pub(crate) values: &'a mut [f32],
    pub(crate) gradients: &'a [f32],
}

/// Optimizer state of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TensorState {
    /// AdamW: first and second moment.
    Moments(Moments),
    /// Muon: momentum `[rows, columns]`.
    Muon(Vec<f32>),
    /// Dion.
    Dion {
        /// Momentum with error feedback, `[rows, columns]`.
        momentum: Vec<f32>,
        /// Right basis `Q^T` of the last update, `[rank, columns]`.
        basis: Vec<f32>,
    },
}

/// Hyperparameters of one Muon or Dion update.
#[derive(Clone, Copy, Debug)]
struct MatrixFactors {
    /// Gradient scale; below 1 if the gradient is clipped.
    gradient: f32,
    /// Muon: decay rate of the momentum. Dion: share of the used part that stays in the momentum.
    momentum: f32,
    learning_rate: f32,
    weight_decay: f32,
}

/// An independent part of an update, computed by one thread.
enum UpdateTask<'a> {
    Chunk(MomentChunk<'a>),
    Muon(muon::MuonUpdate<'a>),
    Dion(dion::DionUpdate<'a>),
}

impl OptimizerKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Adamw, Self::Adamw8bit, Self::Muon, Self::Dion];

    /// The name in a recipe.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Adamw => "adamw",
            Self::Adamw8bit => "adamw8bit",
            Self::Muon => "muon",
            Self::Dion => "dion",
        }
    }
}

impl OptimizerConfig {
    /// Common settings of `kind`: betas 0.9 and `beta2`, no weight decay, momentum 0.95, full rank.
    #[must_use]
    pub fn standard(kind: OptimizerKind, beta2: f32) -> Self {
        Self {
            kind,
            beta1: 0.9,
            beta2,
            eps: 1e-8,
            weight_decay: 0.0,
            momentum: 0.95,
            dion_rank_fraction: 1.0,
        }
    }

    /// Initial state of tensor `index`.
    pub(crate) fn state(&self, index: usize, spec: &ParameterSpec) -> TensorState {
        let zeros = || vec![0.0; spec.len()];
        match (self.kind, hidden_matrix(spec)) {
            (OptimizerKind::Muon, Some(_)) => TensorState::Muon(zeros()),
            (OptimizerKind::Dion, Some((rows, columns))) => {
                let rank = dion::rank(rows, columns, self.dion_rank_fraction);
                let basis = dion::first_basis(rank, columns, index as u32);
                TensorState::Dion { momentum: zeros(), basis }
            }
            (OptimizerKind::Adamw8bit, _) if spec.len() >= MIN_CODED => {
                TensorState::Moments(Moments::coded(spec.len()))
            }
            _ => TensorState::Moments(Moments::full(spec.len())),
        }
    }

    /// Initial state of the values `within` of a tensor, which is tensor `index` of the whole model.
    pub(crate) fn state_of(&self, within: &Range<usize>, index: usize, spec: &ParameterSpec) -> TensorState {
        let len = within.len();
        match (self.kind, hidden_matrix(spec)) {
            (OptimizerKind::Muon | OptimizerKind::Dion, Some(_)) => self.state(index, spec),
            // The size of the whole tensor decides whether its moments are 8-bit.
            (OptimizerKind::Adamw8bit, _) if spec.len() >= MIN_CODED => {
                TensorState::Moments(Moments::coded(len))
            }
            _ => TensorState::Moments(Moments::full(len)),
        }
    }

    /// Whether the optimizer needs the whole tensor, which then cannot be sharded.
    pub(crate) fn moves_whole(&self, spec: &ParameterSpec) -> bool {
        matches!(self.kind, OptimizerKind::Muon | OptimizerKind::Dion) && hidden_matrix(spec).is_some()
    }

    /// Memory of the optimizer state of `specs`, bytes.
    #[must_use]
    pub fn state_bytes(&self, specs: &[ParameterSpec]) -> u64 {
        let one = |spec: &ParameterSpec| {
            let len = spec.len();
            match (self.kind, hidden_matrix(spec)) {
                (OptimizerKind::Muon, Some(_)) => 4 * len,
                (OptimizerKind::Dion, Some((rows, columns))) => {
                    4 * (len + dion::rank(rows, columns, self.dion_rank_fraction) * columns)
                }
                (OptimizerKind::Adamw8bit, _) if len >= MIN_CODED => 2 * len + 8 * len.div_ceil(BLOCK),
                _ => 8 * len,
            }
        };
        specs.iter().map(|spec| one(spec) as u64).fold(0, u64::saturating_add)
    }

    /// Scratch memory of an update per thread, bytes: that of the largest matrix.
    #[must_use]
    pub fn scratch_bytes(&self, specs: &[ParameterSpec]) -> u64 {
        let one = |(rows, columns)| match self.kind {
            OptimizerKind::Adamw | OptimizerKind::Adamw8bit => 0,
            OptimizerKind::Muon => muon::scratch(rows, columns),
            OptimizerKind::Dion => dion::scratch(rows, columns, self.dion_rank_fraction),
        };
        4 * specs.iter().filter_map(hidden_matrix).map(one).max().unwrap_or(0) as u64
    }
}

impl Optimizer {
    /// Initializes the optimizer state of `specs`.
    #[must_use]
    pub fn new(config: OptimizerConfig, specs: &[ParameterSpec]) -> Self {
        let states = specs.iter().enumerate().map(|(index, spec)| config.state(index, spec)).collect();
        Self { config, updates: 0, states: Arc::new(states) }
    }

    /// Restores the optimizer from a state dict: one state per tensor, in order.
    #[must_use]
    pub fn from_states(config: OptimizerConfig, updates: u64, states: Vec<TensorState>) -> Self {
        Self { config, updates, states: Arc::new(states) }
    }

    /// Number of updates so far.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Hyperparameters.
    #[must_use]
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// Uses the hyperparameters `config` from the next update on.
    ///
    /// # Errors
    /// If its kind or the rank of its updates is another, for which the states would not fit.
    pub(crate) fn reconfigure(&mut self, config: OptimizerConfig) -> Result<(), TrainerError> {
        let OptimizerConfig { kind, dion_rank_fraction, .. } = self.config;
        if (kind, dion_rank_fraction) != (config.kind, config.dion_rank_fraction) {
            return Err(TrainerError::OtherOptimizer { found: kind.as_str(), wanted: config.kind.as_str() });
        }
        self.config = config;
        Ok(())
    }

    /// Optimizer kind.
    #[must_use]
    pub fn kind(&self) -> OptimizerKind {
        self.config.kind
    }

    /// The state of every tensor, in order.
    #[must_use]
    pub fn states(&self) -> &[TensorState] {
        &self.states
    }

    /// Updates the master weights `values [n]` with gradients `[n]`, both flat in the order of `specs`, which
    /// are contiguous.
    ///
    /// # Panics
    /// If the tensors differ from those that the optimizer was created for.
    pub fn update(
        &mut self,
        specs: &[ParameterSpec],
        values: &mut [f32],
        ScaledGradients { gradients, scale }: ScaledGradients<'_>,
        learning_rate: f32,
        pool: &ThreadPool,
    ) {
        assert!(
            values.len() == gradients.len()
                && values.len() == specs.last().map_or(0, |last| last.range().end)
                && self.states.iter().map(TensorState::len).eq(specs.iter().map(ParameterSpec::len)),
            "one state per tensor"
        );
        let mut rest = values;
        let owned = specs.iter().enumerate().map(|(tensor, spec)| {
            let (values, after) = std::mem::take(&mut rest).split_at_mut(spec.len());
            rest = after;
            OwnedFragment { tensor, number: tensor, offset: 0, values, gradients: &gradients[spec.range()] }
        });
        self.update_owned(specs, owned.collect(), scale, learning_rate, pool);
    }

    /// Updates the tensors or fragments of all states with `scale` times their gradients.
    ///
    /// # Panics
    /// If `owned` does not have one entry per state.
    pub(crate) fn update_owned(
        &mut self,
        specs: &[ParameterSpec],
        owned: Vec<OwnedFragment<'_>>,
        scale: f32,
        learning_rate: f32,
        pool: &ThreadPool,
    ) {
        assert!(
            self.states.iter().map(TensorState::len).eq(owned.iter().map(|owned| owned.values.len())),
            "one state per fragment"
        );
        let adam = self.next_adam(scale, learning_rate);
        let OptimizerConfig { momentum, weight_decay, .. } = self.config;
        let matrix_factors = MatrixFactors { gradient: scale, momentum, learning_rate, weight_decay };
        let (mut matrices, mut chunks) = (Vec::new(), Vec::new());
        for (OwnedFragment { tensor, number, offset, values, gradients }, state) in
            owned.into_iter().zip(Arc::make_mut(&mut self.states))
        {
            let spec = &specs[tensor];
            if spec.frozen {
                continue;
            }
            let columns = spec.shape.last().copied().unwrap_or(1);
            match state {
                TensorState::Moments(moments) => {
                    let factors = adam.of(number as u32, spec.shape.len() > 1);
                    chunks.extend(moments.chunks(offset, values, gradients, factors).map(UpdateTask::Chunk));
                }
                TensorState::Muon(momentum) => {
                    matrices.push(UpdateTask::Muon(muon::MuonUpdate {
                        values,
                        gradients,
                        momentum,
                        columns,
                        factors: matrix_factors,
                    }));
                }
                TensorState::Dion { momentum, basis } => {
                    let factors = matrix_factors;
                    let update = dion::DionUpdate { values, gradients, momentum, basis, columns, factors };
                    matrices.push(UpdateTask::Dion(update));
                }
            }
        }
        // Long tasks first, for an even load of the threads.
        matrices.append(&mut chunks);
        pool.map(matrices, UpdateTask::run);
    }

    /// The hyperparameters of the next AdamW update; counts it. For updates that run elsewhere, such as on a device.
    pub(crate) fn next_adam(&mut self, scale: f32, learning_rate: f32) -> AdamwUpdate {
        self.updates += 1;
        AdamwUpdate::new(&self.config, self.updates, learning_rate, scale)
    }

    /// Moves the states out, for updates that run elsewhere.
    pub(crate) fn take_states(&mut self) -> Vec<TensorState> {
        Arc::unwrap_or_clone(std::mem::take(&mut self.states))
    }

    /// Returns what [`Self::take_states`] moved out.
    pub(crate) fn put_states(&mut self, states: Vec<TensorState>) {
        self.states = Arc::new(states);
    }

    /// Initial optimizer of a rank that owns `fragments` (ZeRO) of tensors with these `specs`, which are those of a `shard` of the
    /// model or of all of it.
    pub(crate) fn of_fragments(
        config: OptimizerConfig,
        specs: &[ParameterSpec],
        fragments: &[Fragment],
        shard: Option<&ModelShard>,
    ) -> Self {
        let state = |Fragment { tensor, within }: &Fragment| {
            config.state_of(within, number_of(*tensor, shard), &specs[*tensor])
        };
        Self { config, updates: 0, states: Arc::new(fragments.iter().map(state).collect()) }
    }

    /// The part of a rank that owns `fragments`, of a `shard` of the model or of all of it, from an optimizer of whole tensors.
    ///
    /// # Errors
    /// If the states are of another precision than the configuration's.
    pub(crate) fn cut(
        &self,
        fragments: &[Fragment],
        shard: Option<&ModelShard>,
    ) -> Result<Self, TrainerError> {
        let state = |fragment: &Fragment| {
            self.states[number_of(fragment.tensor, shard)].part(fragment, shard, &self.config)
        };
        let states = fragments.iter().map(state).collect::<Result<_, _>>()?;
        Ok(Self { config: self.config, updates: self.updates, states: Arc::new(states) })
    }

    /// Gathers the shards of all ranks, with their fragments, to an optimizer of whole tensors.
    ///
    /// # Errors
    /// If a rank has moments of another precision.
    pub(crate) fn join<'a>(
        config: OptimizerConfig,
        updates: u64,
        specs: &[ParameterSpec],
        ranks: impl Iterator<Item = (&'a [Fragment], &'a [TensorState], Option<&'a ModelShard>)>,
    ) -> Result<Self, TrainerError> {
        let mut whole = Self { updates, ..Self::new(config, specs) };
        let states_of_all = Arc::make_mut(&mut whole.states);
        for (fragments, states, shard) in ranks {
            for (Fragment { tensor, within }, state) in fragments.iter().zip(states) {
                let Some(piece) = shard.map(|shard| &shard.pieces()[*tensor]) else {
                    states_of_all[*tensor].paste(within, state)?;
                    continue;
                };
                if !piece.owned {
                    continue;
                }
                let (start, whole) = (piece.own + within.start, specs[piece.tensor].offset);
                for (own, of_whole) in piece.within(start..piece.own + within.end) {
                    let part = state.cut(&(own.start - start..own.end - start));
                    states_of_all[piece.tensor]
                        .paste(&(of_whole.start - whole..of_whole.end - whole), &part)?;
                }
            }
        }
        Ok(whole)
    }
}

/// One flat array of an optimizer state.
pub(crate) enum StateStream<'a> {
    F32(&'a mut Vec<f32>),
    U8(&'a mut Vec<u8>),
}

impl StateStream<'_> {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::F32(values) => size_of_val(&values[..]) as u64,
            Self::U8(codes) => codes.len() as u64,
        }
    }
}

impl Optimizer {
    /// Memory of the optimizer state, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.states.iter().map(|state| state.bytes() as u64).sum()
    }

    /// All arrays of the optimizer state, to be moved out of memory and restored.
    pub(crate) fn streams(&mut self) -> Vec<StateStream<'_>> {
        Arc::make_mut(&mut self.states).iter_mut().flat_map(TensorState::streams).collect()
    }
}

impl TensorState {
    fn bytes(&self) -> usize {
        let coded = |coded: &Coded| coded.codes.len() + size_of_val(&coded.scales[..]);
        match self {
            Self::Moments(Moments::Full { first, second }) => {
                size_of_val(&first[..]) + size_of_val(&second[..])
            }
            Self::Moments(Moments::Coded { first, second }) => coded(first) + coded(second),
            Self::Muon(momentum) => size_of_val(&momentum[..]),
            Self::Dion { momentum, basis } => size_of_val(&momentum[..]) + size_of_val(&basis[..]),
        }
    }

    fn streams(&mut self) -> Vec<StateStream<'_>> {
        match self {
            Self::Moments(Moments::Full { first, second }) => {
                vec![StateStream::F32(first), StateStream::F32(second)]
            }
            Self::Moments(Moments::Coded { first, second }) => vec![
                StateStream::U8(&mut first.codes),
                StateStream::F32(&mut first.scales),
                StateStream::U8(&mut second.codes),
                StateStream::F32(&mut second.scales),
            ],
            Self::Muon(momentum) => vec![StateStream::F32(momentum)],
            Self::Dion { momentum, basis } => vec![StateStream::F32(momentum), StateStream::F32(basis)],
        }
    }

    /// Number of values of the tensor or fragment.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a tensor without values does not exist")]
    pub fn len(&self) -> usize {
        match self {
            Self::Moments(moments) => moments.len(),
            Self::Muon(momentum) | Self::Dion { momentum, .. } => momentum.len(),
        }
    }
}

impl TensorState {
    /// The state of the values `within` of its tensor; matrices of Muon and Dion are not cut.
    pub(crate) fn cut(&self, within: &Range<usize>) -> Self {
        match self {
            Self::Moments(moments) => Self::Moments(moments.cut(within)),
            Self::Muon(_) | Self::Dion { .. } => self.clone(),
        }
    }

    /// The state of a fragment of the tensor, of a `shard` of the model or of all of it.
    ///
    /// # Errors
    /// If this state is of another precision than that of the optimizer of the shard.
    pub(crate) fn part(
        &self,
        fragment: &Fragment,
        shard: Option<&ModelShard>,
        config: &OptimizerConfig,
    ) -> Result<Self, TrainerError> {
        let Some(shard) = shard else { return Ok(self.cut(&fragment.within)) };
        let piece = &shard.pieces()[fragment.tensor];
        let whole = shard.whole().specs()[piece.tensor].offset;
        let start = piece.own + fragment.within.start;
        let mut part =
            config.state_of(&fragment.within, piece.tensor, &shard.layout().specs()[fragment.tensor]);
        for (own, of_whole) in piece.within(start..piece.own + fragment.within.end) {
            let from = self.cut(&(of_whole.start - whole..of_whole.end - whole));
            part.paste(&(own.start - start..own.end - start), &from)?;
        }
        Ok(part)
    }

    /// Inverse of [`Self::cut`].
    fn paste(&mut self, within: &Range<usize>, part: &Self) -> Result<(), TrainerError> {
        match (self, part) {
            (Self::Moments(moments), Self::Moments(part)) => return moments.paste(within, part),
            (state, part) => *state = part.clone(),
        }
        Ok(())
    }
}

impl UpdateTask<'_> {
    fn run(self) {
        match self {
            Self::Chunk(chunk) => chunk.update(),
            Self::Muon(update) => update.run(),
            Self::Dion(update) => update.run(),
        }
    }
}

/// Index in the whole model of tensor `tensor` of a `shard` of it, or of all of it.
pub(crate) fn number_of(tensor: usize, shard: Option<&ModelShard>) -> usize {
    shard.map_or(tensor, |shard| shard.pieces()[tensor].tensor)
}

/// Rows and columns of a matrix inside the network. Embedding and head do not count: AdamW updates them.
fn hidden_matrix(spec: &ParameterSpec) -> Option<(usize, usize)> {
    let [rows, columns] = spec.shape[..] else { return None };
    let of_tokens = ["embed_tokens.weight", "lm_head.weight"];
    (!of_tokens.iter().any(|name| spec.name.ends_with(name))).then_some((rows, columns))
}

#[cfg(test)]
mod check;

#[cfg(test)]
mod tests;
