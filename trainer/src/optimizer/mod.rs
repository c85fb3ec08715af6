//! The optimizer: from gradients to updates, with a state for every tensor.
//!
//! AdamW moves everything, or one of the optimizers for matrices moves the matrices inside the network and AdamW the
//! rest: embedding, head, norms and biases. All take the same learning rate. Muon's updates are scaled to be as large as
//! AdamW's, so rates carry over; Dion's have singular values of `sqrt(rows / columns)` however large the matrix is, for
//! which its paper uses a rate of 0.01 where AdamW has 0.0003 or so.
//!
//! Invariant: an update is made of parts that do not depend on each other (a matrix whole, other tensors in pieces that
//! are cut at fixed places), so its bits do not depend on who computes them: ranks can own fragments of tensors.

mod dion;
mod muon;
mod orthonormal;

use std::ops::Range;

use model::{ParameterSpec, ThreadPool};
use serde::{Deserialize, Serialize};

use crate::adamw::Adam;
use crate::moments::{BLOCK, Coded, MIN_CODED, Moments, Piece};
use crate::shards::Fragment;

/// Which optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// AdamW with f32 moments: 8 bytes per weight.
    #[default]
    Adamw,
    /// AdamW with 8-bit moments: 2 bytes per weight, and two scales per block of 256.
    Adamw8bit,
    /// Muon for matrices, with 4 bytes per weight; AdamW with f32 moments for the rest.
    Muon,
    /// Dion for matrices, with 4 bytes per weight and a basis; AdamW with f32 moments for the rest.
    Dion,
}

/// Hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerConfig {
    /// Which optimizer.
    pub kind: OptimizerKind,
    /// AdamW: decay of the first moment.
    pub beta1: f32,
    /// AdamW: decay of the second moment.
    pub beta2: f32,
    /// AdamW: added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of matrices; norms and biases do not decay.
    pub weight_decay: f32,
    /// Muon and Dion: what stays of the momentum.
    pub momentum: f32,
    /// Dion: rank of an update as a fraction of the full one, above 0 and at most 1.
    pub dion_rank_fraction: f32,
}

/// The optimizer of some tensors with its state. That of a rank has states of the fragments that it owns.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    config: OptimizerConfig,
    /// Updates done.
    updates: u64,
    /// Of every tensor, in their order; of a rank's fragments, in theirs.
    states: Vec<TensorState>,
}

/// What an update changes of a tensor, or of a fragment of one.
#[derive(Debug)]
pub(crate) struct Owned<'a> {
    /// Number of the tensor.
    pub(crate) tensor: usize,
    /// Place of the first value in its tensor.
    pub(crate) offset: usize,
    pub(crate) values: &'a mut [f32],
    pub(crate) gradients: &'a [f32],
}

/// What an optimizer remembers of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TensorState {
    /// AdamW.
    Moments(Moments),
    /// Muon: the momentum `[rows, columns]`.
    Muon(Vec<f32>),
    /// Dion.
    Dion {
        /// What updates have not used yet, `[rows, columns]`.
        momentum: Vec<f32>,
        /// Right directions of the last update, `[rank, columns]`.
        basis: Vec<f32>,
    },
}

/// The numbers of one update of a matrix, by Muon or Dion.
#[derive(Clone, Copy, Debug)]
struct Factors {
    /// Multiplies the gradients: below 1 where they are clipped.
    gradient: f32,
    /// Muon: decay of the momentum. Dion: what stays in it of what was used.
    momentum: f32,
    learning_rate: f32,
    weight_decay: f32,
}

/// A part of an update that one thread does.
enum Part<'a> {
    Piece(Piece<'a>),
    Muon(muon::Update<'a>),
    Dion(dion::Update<'a>),
}

impl OptimizerKind {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::Adamw, Self::Adamw8bit, Self::Muon, Self::Dion];

    /// The word of the recipe.
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
    /// AdamW or another `kind` as most papers set it: betas 0.9 and `beta2`, no weight decay, momentum 0.95, full rank.
    #[must_use]
    pub fn usual(kind: OptimizerKind, beta2: f32) -> Self {
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

    /// The state of tensor number `index` before the first update.
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

    /// The state of a fragment before the first update.
    pub(crate) fn state_of(&self, fragment: &Fragment, spec: &ParameterSpec) -> TensorState {
        let Fragment { tensor, within } = fragment;
        let len = within.len();
        match (self.kind, hidden_matrix(spec)) {
            (OptimizerKind::Muon | OptimizerKind::Dion, Some(_)) => self.state(*tensor, spec),
            // How moments are kept follows from the whole tensor.
            (OptimizerKind::Adamw8bit, _) if spec.len() >= MIN_CODED => {
                TensorState::Moments(Moments::coded(len))
            }
            _ => TensorState::Moments(Moments::full(len)),
        }
    }

    /// Whether a tensor is moved as a whole, so that it cannot be shared.
    pub(crate) fn moves_whole(&self, spec: &ParameterSpec) -> bool {
        matches!(self.kind, OptimizerKind::Muon | OptimizerKind::Dion) && hidden_matrix(spec).is_some()
    }

    /// Memory of the state of all these tensors, bytes.
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

    /// Memory that an update takes on each of its threads, bytes: that of the largest matrix.
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
    /// An optimizer that has not seen a gradient.
    #[must_use]
    pub fn new(config: OptimizerConfig, specs: &[ParameterSpec]) -> Self {
        let states = specs.iter().enumerate().map(|(index, spec)| config.state(index, spec)).collect();
        Self { config, updates: 0, states }
    }

    /// One that goes on from saved states, of every tensor in their order.
    #[must_use]
    pub fn resume(config: OptimizerConfig, updates: u64, states: Vec<TensorState>) -> Self {
        Self { config, updates, states }
    }

    /// Updates done.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Its hyperparameters.
    #[must_use]
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// Which optimizer.
    #[must_use]
    pub fn kind(&self) -> OptimizerKind {
        self.config.kind
    }

    /// The state of every tensor, in their order.
    #[must_use]
    pub fn states(&self) -> &[TensorState] {
        &self.states
    }

    /// Updates `values` for `scale * gradients`, both flat in the order of `specs`, which follow each other.
    ///
    /// # Panics
    /// If the tensors are not those that the optimizer was made for.
    pub fn update(
        &mut self,
        specs: &[ParameterSpec],
        values: &mut [f32],
        (gradients, scale): (&[f32], f32),
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
            Owned { tensor, offset: 0, values, gradients: &gradients[spec.range()] }
        });
        self.update_owned(specs, owned.collect(), scale, learning_rate, pool);
    }

    /// Updates what each of the states belongs to, for `scale` times its gradients.
    ///
    /// # Panics
    /// If there is not one of `owned` for each state.
    pub(crate) fn update_owned(
        &mut self,
        specs: &[ParameterSpec],
        owned: Vec<Owned<'_>>,
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
        let matrix_factors = Factors { gradient: scale, momentum, learning_rate, weight_decay };
        let (mut matrices, mut pieces) = (Vec::new(), Vec::new());
        for (Owned { tensor, offset, values, gradients }, state) in owned.into_iter().zip(&mut self.states) {
            let spec = &specs[tensor];
            let columns = spec.shape.last().copied().unwrap_or(1);
            match state {
                TensorState::Moments(moments) => {
                    let factors = adam.of(tensor as u32, spec.shape.len() > 1);
                    pieces.extend(moments.pieces(offset, values, gradients, factors).map(Part::Piece));
                }
                TensorState::Muon(momentum) => {
                    matrices.push(Part::Muon(muon::Update {
                        values,
                        gradients,
                        momentum,
                        columns,
                        factors: matrix_factors,
                    }));
                }
                TensorState::Dion { momentum, basis } => {
                    let factors = matrix_factors;
                    let update = dion::Update { values, gradients, momentum, basis, columns, factors };
                    matrices.push(Part::Dion(update));
                }
            }
        }
        // The long parts first, so that short ones fill up the end.
        matrices.append(&mut pieces);
        pool.map(matrices, Part::run);
    }

    /// The numbers of the next update, of who has the states and does it.
    pub(crate) fn next_adam(&mut self, scale: f32, learning_rate: f32) -> Adam {
        self.updates += 1;
        Adam::new(&self.config, self.updates, learning_rate, scale)
    }

    /// Takes the states out, for who does the updates elsewhere.
    pub(crate) fn take_states(&mut self) -> Vec<TensorState> {
        std::mem::take(&mut self.states)
    }

    /// Puts back what [`Self::take_states`] took, as it is now.
    pub(crate) fn put_states(&mut self, states: Vec<TensorState>) {
        self.states = states;
    }

    /// The optimizer of a rank that owns `fragments`, before the first update.
    pub(crate) fn of_fragments(
        config: OptimizerConfig,
        specs: &[ParameterSpec],
        fragments: &[Fragment],
    ) -> Self {
        let state = |fragment: &Fragment| config.state_of(fragment, &specs[fragment.tensor]);
        Self { config, updates: 0, states: fragments.iter().map(state).collect() }
    }

    /// Of an optimizer of whole tensors, what a rank needs that owns `fragments`.
    pub(crate) fn cut(&self, fragments: &[Fragment]) -> Self {
        let state = |fragment: &Fragment| self.states[fragment.tensor].cut(&fragment.within);
        let states = fragments.iter().map(state).collect();
        Self { config: self.config, updates: self.updates, states }
    }

    /// The optimizer of whole tensors, of what the ranks have: the fragments of each and their states.
    pub(crate) fn join<'a>(
        config: OptimizerConfig,
        updates: u64,
        specs: &[ParameterSpec],
        ranks: impl Iterator<Item = (&'a [Fragment], &'a [TensorState])>,
    ) -> Self {
        let mut whole = Self { updates, ..Self::new(config, specs) };
        for (fragments, states) in ranks {
            for (fragment, state) in fragments.iter().zip(states) {
                whole.states[fragment.tensor].paste(&fragment.within, state);
            }
        }
        whole
    }
}

/// The numbers of a state, one stream after the other.
pub(crate) enum Stream<'a> {
    F32(&'a mut Vec<f32>),
    U8(&'a mut Vec<u8>),
}

impl Stream<'_> {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::F32(values) => size_of_val(&values[..]) as u64,
            Self::U8(codes) => codes.len() as u64,
        }
    }
}

impl Optimizer {
    /// Memory of everything that it remembers, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.states.iter().map(|state| state.bytes() as u64).sum()
    }

    /// Everything that it remembers, to be taken out of memory and put back as it was.
    pub(crate) fn streams(&mut self) -> Vec<Stream<'_>> {
        self.states.iter_mut().flat_map(TensorState::streams).collect()
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

    fn streams(&mut self) -> Vec<Stream<'_>> {
        match self {
            Self::Moments(Moments::Full { first, second }) => vec![Stream::F32(first), Stream::F32(second)],
            Self::Moments(Moments::Coded { first, second }) => vec![
                Stream::U8(&mut first.codes),
                Stream::F32(&mut first.scales),
                Stream::U8(&mut second.codes),
                Stream::F32(&mut second.scales),
            ],
            Self::Muon(momentum) => vec![Stream::F32(momentum)],
            Self::Dion { momentum, basis } => vec![Stream::F32(momentum), Stream::F32(basis)],
        }
    }

    /// Number of values of its tensor.
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
    /// What belongs to the values `within` of its tensor, which can be cut there.
    pub(crate) fn cut(&self, within: &Range<usize>) -> Self {
        match self {
            Self::Moments(moments) => Self::Moments(moments.cut(within)),
            Self::Muon(_) | Self::Dion { .. } => self.clone(),
        }
    }

    /// Puts `part` where [`Self::cut`] took it from.
    fn paste(&mut self, within: &Range<usize>, part: &Self) {
        match (self, part) {
            (Self::Moments(moments), Self::Moments(part)) => moments.paste(within, part),
            (state, part) => *state = part.clone(),
        }
    }
}

impl Part<'_> {
    fn run(self) {
        match self {
            Self::Piece(piece) => piece.update(),
            Self::Muon(update) => update.run(),
            Self::Dion(update) => update.run(),
        }
    }
}

/// Rows and columns of a matrix inside the network. Embedding and head are none: their rows belong to tokens.
fn hidden_matrix(spec: &ParameterSpec) -> Option<(usize, usize)> {
    let [rows, columns] = spec.shape[..] else { return None };
    let of_tokens = ["embed_tokens.weight", "lm_head.weight"];
    (!of_tokens.iter().any(|name| spec.name.ends_with(name))).then_some((rows, columns))
}

#[cfg(test)]
mod check;

#[cfg(test)]
mod tests;
