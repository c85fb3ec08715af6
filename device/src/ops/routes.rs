//! Which experts a token goes to, and the rows of every expert (mixture of experts, Shazeer et al. 2017, arXiv 1701.06538).
//!
//! A token has `k` slots, one for each of its experts, ascending. Slots are grouped by expert, and within it in the order of
//! tokens: each has a row of its expert, and there is no padding. Everything stays on the device, so that a route can be recorded.

use super::size;
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Tokens, one per warp, of a block; `WARPS` of the kernels.
const TOKENS: usize = 4;
/// Largest number of threads of a block that groups slots.
const GROUPING: usize = 512;
/// Slots per thread of such a block, at least.
const SLOTS_PER_THREAD: usize = 8;

/// A router, and the experts that it chooses from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Number of experts.
    pub experts: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// How they are chosen and weighed.
    pub kind: RouterKind,
}

/// How the experts of a token are chosen, and what their results are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterKind {
    /// Those with the largest probabilities of a softmax over all, weighed by these.
    Softmax {
        /// Whether the weights are divided by their sum.
        normalized: bool,
    },
    /// Those with the largest sigmoids, after a correction of each expert that balances loads and has no gradient
    /// (DeepSeek-V3, arXiv 2412.19437; Wang et al. 2024, arXiv 2408.15664), weighed by the sigmoids without it.
    Sigmoid {
        /// Whether the weights are divided by their sum.
        normalized: bool,
        /// Groups of neighbouring experts; divides their number.
        groups: usize,
        /// Groups of a token: those with the largest sums of their two best experts.
        chosen_groups: usize,
        /// Multiplies the weights.
        scale: f32,
    },
    /// Those with the largest logits, weighed by a softmax over the chosen.
    SoftmaxOfChosen,
}

/// What chooses experts besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct RouteInputs<'a, T: Storage> {
    /// `[experts]` added to the logits.
    pub bias: Option<View<'a, T>>,
    /// `[experts]` added to the scores that choose experts, not to those that weigh them.
    pub correction: Option<View<'a, T>>,
    /// Experts that are taken in place of the chosen ones.
    pub given: Option<GivenSlots<'a>>,
    /// Tokens that are padding.
    pub padding: Option<Padding<'a>>,
}

/// Experts that are given to `T` tokens: a part of those of all layers.
#[derive(Clone, Copy, Debug)]
pub struct GivenSlots<'a> {
    /// `[T, slots]` experts of each token in all layers, ascending in each; a number that is no expert's where the router chooses.
    pub all: View<'a, u16>,
    /// Experts of a token in all layers.
    pub slots: usize,
    /// The first of them in this layer.
    pub first: usize,
}

/// Tokens that go to no expert: those that write to the KV cache from `end` on.
#[derive(Clone, Copy, Debug)]
pub struct Padding<'a> {
    /// `[T]` position in the cache that a token writes to.
    pub slots: View<'a, u32>,
    /// The first position of padding.
    pub end: usize,
}

/// Memory of routes of at most `tokens` tokens.
#[derive(Debug)]
pub struct RouteMemory {
    /// `[T, experts]`
    scores: DeviceBuffer<f32>,
    /// `[T, k]`
    weights: DeviceBuffer<f32>,
    /// `[T, k]`
    experts: DeviceBuffer<u32>,
    /// Counters, starts, slots, rows and tiles.
    lists: DeviceBuffer<u32>,
}

/// Routes of `T` tokens to `k` of `E` experts each: `T k` rows.
#[derive(Clone, Copy, Debug)]
pub struct RoutedRows<'a> {
    /// What routed them.
    pub router: Router,
    /// Rows of a tile of the products of experts.
    pub(super) height: TileHeight,
    /// `[T, E]` scores of all experts; empty for rows that others have routed.
    pub scores: View<'a, f32>,
    /// `[T, k]` what the results of the experts are multiplied with.
    pub weights: View<'a, f32>,
    /// `[T, k]` experts of each token, ascending.
    pub experts: View<'a, u32>,
    /// `[E + 2]` tokens of each expert, tokens whose experts were given, and those of them for which the router prefers another one.
    pub counters: View<'a, u32>,
    /// `[E + 1]` where the rows of each expert begin.
    pub starts: View<'a, u32>,
    /// `[T k]` the slot of each row.
    pub slots: View<'a, u32>,
    /// `[T k]` the row of each slot.
    pub rows: View<'a, u32>,
    /// The number of tiles, then expert and first row of each.
    pub(super) tiles: View<'a, u32>,
}

/// Rows of a tile of the products of experts. With few rows per expert a low tile wastes little of the tensor cores; with many, a
/// high one reads the weights of an expert less often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TileHeight {
    Low,
    High,
}

impl TileHeight {
    /// That of `rows` rows of `experts` experts, which has tiles of [`TileHeight::rows`].
    fn of(rows: usize, experts: usize) -> Self {
        if rows / experts.max(1) >= 64 { Self::High } else { Self::Low }
    }

    /// Rows of a tile of `T`; the heights of the shapes in `expert_products.cu`.
    pub(super) fn rows<T: Storage>(self) -> usize {
        match (self, T::NARROW) {
            (Self::Low, _) => 16,
            (Self::High, false) => 64,
            (Self::High, true) => 128,
        }
    }
}

impl Router {
    /// Kernel arguments: kind, whether weights are normalised, groups, chosen groups and scale.
    fn arguments(self) -> [Argument; 5] {
        let number = |n: usize| Argument::from(size(n));
        let of = |kind: usize, normalized: bool, groups: usize, chosen: usize, scale: f32| {
            [number(kind), number(normalized.into()), number(groups), number(chosen), scale.into()]
        };
        match self.kind {
            RouterKind::Softmax { normalized } => of(0, normalized, 1, 1, 1.0),
            RouterKind::Sigmoid { normalized, groups, chosen_groups, scale } => {
                of(1, normalized, groups, chosen_groups, scale)
            }
            RouterKind::SoftmaxOfChosen => of(2, false, 1, 1, 1.0),
        }
    }

    /// Experts that a token can go to.
    fn reachable(self) -> usize {
        match self.kind {
            RouterKind::Sigmoid { groups, chosen_groups, .. } => {
                self.experts / groups.max(1) * chosen_groups.min(groups)
            }
            _ => self.experts,
        }
    }

    /// Largest number of tiles of `rows` rows: every expert in use may have one that is not full.
    pub(super) fn tiles(self, rows: usize, height: usize) -> usize {
        rows / height + rows.min(self.experts)
    }

    /// Lengths of counters, starts, slots, rows and tiles.
    fn lists(self, tokens: usize) -> [usize; 5] {
        let rows = tokens * self.per_token;
        let tiles = 1 + 2 * self.tiles(rows, TileHeight::Low.rows::<f32>());
        [self.experts + 2, self.experts + 1, rows, rows, tiles]
    }
}

impl RouteMemory {
    /// Memory for `tokens` tokens of each of `routers`, one at a time.
    ///
    /// # Errors
    /// [`crate::DeviceError::OutOfMemory`].
    pub fn new(device: &Device, routers: &[Router], tokens: usize) -> Result<Self> {
        let most = |of: &dyn Fn(&Router) -> usize| routers.iter().map(of).max().unwrap_or(0);
        let slots = tokens * most(&|router| router.per_token);
        Ok(Self {
            scores: device.uninit(tokens * most(&|router| router.experts))?,
            weights: device.uninit(slots)?,
            experts: device.uninit(slots)?,
            lists: device.uninit(most(&|router| router.lists(tokens).iter().sum()))?,
        })
    }

    /// Rows that others have routed: row `i` belongs to `experts[i]`, of those of `router`, whose tokens have one expert each.
    /// [`Self::weights`] says what each is multiplied with.
    ///
    /// # Errors
    /// [`crate::DeviceError::OutOfMemory`], or if the launch fails.
    ///
    /// # Panics
    /// If a token has several experts, or there is no such expert.
    pub fn of_rows<T: Storage>(device: &Device, router: Router, experts: &[u32]) -> Result<Self> {
        assert_eq!(router.per_token, 1, "every row has one expert");
        let rows = experts.len();
        let mut counters = vec![0_u32; router.experts + 2];
        experts.iter().for_each(|expert| counters[*expert as usize] += 1);
        let mut memory = Self {
            scores: device.uninit(0)?,
            weights: device.uninit(rows)?,
            experts: device.upload(experts)?,
            lists: device.uninit(router.lists(rows).iter().sum())?,
        };
        device.upload_to(&counters, memory.lists.view_mut(0..counters.len()))?;
        memory.group::<T>(device, router, rows)?;
        Ok(memory)
    }

    /// `[tokens, per_token]` what the results of the experts are multiplied with.
    ///
    /// # Panics
    /// If the memory is too small.
    pub fn weights(&mut self, router: Router, tokens: usize) -> ViewMut<'_, f32> {
        self.weights.view_mut(0..tokens * router.per_token)
    }

    /// Groups the slots of `tokens` tokens by their experts, whose tokens are counted.
    fn group<T: Storage>(&mut self, device: &Device, router: Router, tokens: usize) -> Result<()> {
        let Router { experts, per_token, .. } = router;
        let (rows, mut end) = (tokens * per_token, 0);
        let chosen: Argument = self.experts.view(0..rows).into();
        let [counters, starts, slots, rows_of, tiles] = router.lists(tokens).map(|len| {
            end += len;
            Argument::from(self.lists.view_mut(end - len..end))
        });
        let height = TileHeight::of(rows, experts).rows::<T>();
        let arguments =
            [chosen, size(rows).into(), size(height).into(), counters, starts, slots, rows_of, tiles];
        let threads = (rows / SLOTS_PER_THREAD).next_multiple_of(32).clamp(32, GROUPING);
        device.launch("group_routes", [experts, 1, 1], threads, 0, &arguments)
    }

    /// `[tokens, experts]` where the logits of a router belong.
    ///
    /// # Panics
    /// If the memory is too small.
    pub fn logits(&mut self, router: Router, tokens: usize) -> ViewMut<'_, f32> {
        self.scores.view_mut(0..tokens * router.experts)
    }

    /// The routes of `tokens` tokens of `router`, which [`Self::route`] or [`Self::of_rows`] has made.
    ///
    /// # Panics
    /// If the memory is too small.
    #[must_use]
    pub fn routes(&self, router: Router, tokens: usize) -> RoutedRows<'_> {
        let slots = tokens * router.per_token;
        let scored = if self.scores.is_empty() { 0 } else { tokens * router.experts };
        let mut end = 0;
        let [counters, starts, slots_of, rows, tiles] = router.lists(tokens).map(|len| {
            end += len;
            self.lists.view(end - len..end)
        });
        RoutedRows {
            router,
            height: TileHeight::of(slots, router.experts),
            scores: self.scores.view(0..scored),
            weights: self.weights.view(0..slots),
            experts: self.experts.view(0..slots),
            counters,
            starts,
            slots: slots_of,
            rows,
            tiles,
        }
    }

    /// Routes `tokens` tokens by their [`Self::logits`], which become scores.
    ///
    /// # Errors
    /// If a launch fails.
    ///
    /// # Panics
    /// If the shapes do not fit, or a token has more experts than it can go to.
    pub fn route<T: Storage>(
        &mut self,
        device: &Device,
        router: Router,
        tokens: usize,
        inputs: RouteInputs<'_, T>,
    ) -> Result<()> {
        let Router { experts, per_token, .. } = router;
        let RouteInputs { bias, correction, given, padding } = inputs;
        assert!(
            0 < per_token && per_token <= router.reachable(),
            "{router:?}: a token goes to distinct experts"
        );
        let is_of_experts = |values: &View<'_, T>| values.len() == experts;
        assert!(
            [bias, correction].iter().flatten().all(is_of_experts),
            "a bias and a correction for each expert"
        );
        assert!(
            padding.is_none_or(|padding| padding.slots.len() == tokens),
            "a place in the cache for each token"
        );
        let (stride, given) = match given {
            Some(GivenSlots { all, slots, first }) => {
                assert!(all.len() == tokens * slots && first + per_token <= slots, "experts of all tokens");
                (slots, Some(all.slice(if tokens == 0 { 0..0 } else { first..all.len() })))
            }
            None => (0, None),
        };
        let padding: [Argument; 2] = match padding {
            Some(Padding { slots, end }) => [slots.into(), size(end).into()],
            None => [Argument::null(), size(0).into()],
        };
        let [kind, normalized, groups, chosen_groups, scale] = router.arguments();
        let shared = match router.kind {
            RouterKind::Sigmoid { groups, .. } => 2 * groups * TOKENS * size_of::<f32>(),
            _ => 0,
        };
        let logits: Argument = self.logits(router, tokens).into();
        let rows = tokens * per_token;
        let chosen: Argument = self.experts.view_mut(0..rows).into();
        let weights: Argument = self.weights.view_mut(0..rows).into();
        let counted = router.lists(tokens)[0];
        device.clear(self.lists.view_mut(0..counted))?;
        let counters: Argument = self.lists.view_mut(0..counted).into();
        let [slots_written, end_written] = padding;
        let arguments = [
            logits,
            size(tokens).into(),
            size(experts).into(),
            size(per_token).into(),
            kind,
            normalized,
            groups,
            chosen_groups,
            scale,
            bias.into(),
            correction.into(),
            given.into(),
            size(stride).into(),
            slots_written,
            end_written,
            chosen,
            weights,
            counters,
        ];
        let grid = [tokens.div_ceil(TOKENS), 1, 1];
        device.launch(&format!("route_{}", T::SUFFIX), grid, 32 * TOKENS, shared, &arguments)?;
        self.group::<T>(device, router, tokens)
    }

    /// Replaces the scores of `tokens` tokens by the gradient `[tokens, experts]` of their logits, for the gradient `d_weights
    /// [tokens, per_token]` of their weights, and returns it. The correction has no gradient.
    ///
    /// # Errors
    /// If the launch fails.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn backward(
        &mut self,
        device: &Device,
        router: Router,
        tokens: usize,
        d_weights: View<'_, f32>,
    ) -> Result<View<'_, f32>> {
        assert_eq!(d_weights.len(), tokens * router.per_token, "a gradient for each slot");
        let [kind, normalized, _, _, scale] = router.arguments();
        let scores: Argument = self.logits(router, tokens).into();
        let RoutedRows { experts, weights, scores: d_logits, .. } = self.routes(router, tokens);
        let arguments = [
            scores,
            size(tokens).into(),
            size(router.experts).into(),
            size(router.per_token).into(),
            kind,
            normalized,
            scale,
            experts.into(),
            weights.into(),
            d_weights.into(),
        ];
        let grid = [tokens.div_ceil(TOKENS), 1, 1];
        device.launch("route_backward", grid, 32 * TOKENS, 0, &arguments)?;
        Ok(d_logits)
    }
}
