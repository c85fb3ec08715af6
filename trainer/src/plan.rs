//! Assigns the rows of a step to leaves and micro-batches, and the leaves to ranks.
//!
//! The unit of planning is a run of neighbouring rows with a common prompt; the prompt goes through the network once. The
//! planner assigns units to leaves by cost: the most expensive unit first, each to the leaf with the least work. It then
//! packs the units of a leaf into as few micro-batches under the token budget as it can find, evenly filled. AReaL's
//! dynamic batching (Algorithm 1 of arXiv 2505.24298) also puts the longest sequence first into the emptiest batch, but
//! counts tokens only. A unit is split if it exceeds the budget, or if leaves of more equal cost are worth computing its
//! prompt twice.
//!
//! A leaf is a part of the step whose gradients are summed as one chain. The gradients of the leaves are summed as a
//! balanced binary tree (TBIK, arXiv 2511.17826), so the bits of the sum depend on the leaves and not on which rank
//! computes them.
//!
//! Invariant: the leaves and their micro-batches are a function of the rows, the model, the token budget and the number of leaves
//! alone, never of the number of ranks.

use std::cmp::Reverse;

use collective::Position;
use model::Config;
use trajectory::Sample;

/// A plan with split groups is used if its cost is at most this fraction of the cost of the plan with whole groups.
const WORTH: (u64, u64) = (15, 16);

/// Rows that go through the network together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MicroBatch {
    /// Indices of rows, ascending.
    pub rows: Vec<usize>,
    /// Tokens of all rows. A common prompt counts once.
    pub tokens: usize,
}

/// Lengths of a row, tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowSize {
    /// Tokens before the first trained token, which the rows of a group have in common.
    prompt: usize,
    /// Tokens after the prompt that go through the network.
    rest: usize,
    /// Trained tokens.
    predictions: usize,
}

/// Rows that share a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PromptUnit {
    rows: Vec<usize>,
    tokens: usize,
    /// FLOPs of the forward pass.
    cost: u64,
}

/// Cost of a forward pass, FLOPs. A backward pass costs about twice as much in every term, so no comparison needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ForwardCost {
    /// Cost of a token: the matrices of all layers.
    token: u64,
    /// Cost of a key that a token attends to: its score and its value, in all layers.
    pair: u64,
    /// Cost of a prediction: the head.
    prediction: u64,
}

/// The micro-batches of each of `leaves` leaves. A micro-batch has at most `budget` tokens, unless it is a single longer
/// row. A leaf may be empty.
#[must_use]
pub fn plan(rows: &[&Sample], model: &Config, budget: usize, leaves: usize) -> Vec<Vec<MicroBatch>> {
    let sizes: Vec<RowSize> = rows.iter().map(|sample| RowSize::of(sample)).collect();
    let same_prompt = |a: &usize, b: &usize| prompt(rows[*a]) == prompt(rows[*b]);
    let all: Vec<usize> = (0..rows.len()).collect();
    let groups: Vec<&[usize]> = all.chunk_by(same_prompt).collect();
    Planner { sizes: &sizes, cost: ForwardCost::of(model), budget }.plan(&groups, leaves)
}

/// Tokens of a row that go through the network: everything before its last trained token.
#[must_use]
pub fn row_tokens(sample: &Sample) -> usize {
    sample.loss_mask().iter().rposition(|trained| *trained).unwrap_or(0)
}

/// The tokens before the first trained token, `[prompt_tokens]`.
pub(crate) fn prompt(sample: &Sample) -> &[u32] {
    let trained = sample.loss_mask().iter().position(|trained| *trained);
    &sample.token_ids()[..trained.unwrap_or(0)]
}

impl RowSize {
    fn of(sample: &Sample) -> Self {
        let prompt = prompt(sample).len();
        Self { prompt, rest: row_tokens(sample) - prompt, predictions: sample.trained_tokens() }
    }
}

impl ForwardCost {
    fn of(model: &Config) -> Self {
        const MULTIPLY_ADD: u64 = 2;
        let [hidden, matrices, layers, heads, head_dim, vocabulary] = [
            model.hidden_size,
            model.layer_multiply_adds(),
            model.num_layers(),
            model.num_heads,
            model.head_dim,
            model.vocab_size,
        ]
        .map(|n| n as u64);
        Self {
            token: MULTIPLY_ADD * matrices,
            pair: MULTIPLY_ADD * layers * 2 * heads * head_dim,
            prediction: MULTIPLY_ADD * hidden * vocabulary,
        }
    }

    /// Cost of `tokens` tokens that attend to each other causally and to `before` earlier tokens.
    fn of_tokens(self, tokens: usize, before: usize) -> u64 {
        let (tokens, before) = (tokens as u64, before as u64);
        tokens * self.token + (tokens * before + tokens * (tokens + 1) / 2) * self.pair
    }
}

/// Position of a gradient in the sum of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Number of earlier rounds. Each round adds the sum of its slots to the chain over rounds.
    pub(crate) round: usize,
    /// Position among the slots of the round.
    pub(crate) index: usize,
    /// Slots of a round, a power of two or 1.
    pub(crate) count: usize,
}

/// One forward and backward pass of a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepPass<'a> {
    /// `None` if only other ranks have a micro-batch.
    pub(crate) batch: Option<&'a MicroBatch>,
    /// Position of the gradients in the sum over leaves.
    pub(crate) slot: Slot,
    /// Whether the pass adds the last gradients of its slot.
    pub(crate) complete: bool,
}

/// Number of leaves of a step of `world` ranks: a power of two of at least `least` and `world`, or `world` if that is no
/// power of two.
#[must_use]
pub fn leaves(least: usize, world: usize) -> usize {
    // The tree over a number of ranks that is no power of two has other bits, independent of the leaves below it.
    if world.is_power_of_two() { least.max(world).next_power_of_two() } else { world }
}

/// Number of gradient buffers for the sum of `rounds` rounds of `slots` slots each: the sum, and partial sums that wait
/// for their neighbours. `slots` is a power of two.
#[must_use]
pub fn sum_buffers(slots: usize, rounds: usize) -> usize {
    let of_round = slots.max(1).ilog2() as usize;
    if rounds > 1 { 1 + of_round } else { of_round.max(1) }
}

/// The passes of a rank in a step with the plan `leaves`. All ranks have the same number of passes if every pass reduces
/// its gradients.
///
/// With `accumulates` (ZeRO stage 1) a rank has neighbouring leaves and computes one after the other. The micro-batches of
/// a leaf are one chain, and a slot is a leaf. Otherwise (stages 2 and 3) every pass reduces its gradients over all ranks:
/// a round has one micro-batch of every leaf, ranks have every `world`th leaf, and the rounds are one chain.
pub(crate) fn step_passes(
    leaves: &[Vec<MicroBatch>],
    position: Position,
    accumulates: bool,
) -> Vec<StepPass<'_>> {
    let Position { rank, world } = position;
    let count = leaves.len() / world;
    if accumulates {
        let own = leaves[rank * count..(rank + 1) * count].iter().enumerate();
        let of_leaf = |(index, leaf): (usize, &'_ Vec<MicroBatch>)| {
            // A leaf without rows has one pass, whose gradients are zero.
            (0..leaf.len().max(1)).map(move |at| (Slot { round: 0, index, count }, at))
        };
        let pass = |(slot, at): (Slot, usize)| {
            let leaf = &leaves[rank * count + slot.index];
            StepPass { batch: leaf.get(at), slot, complete: at + 1 >= leaf.len() }
        };
        return own.flat_map(of_leaf).map(pass).collect();
    }
    let rounds = leaves.iter().map(Vec::len).max().unwrap_or(0);
    let slots = (0..rounds).flat_map(|round| (0..count).map(move |index| Slot { round, index, count }));
    let pass = |slot: Slot| StepPass {
        batch: leaves[slot.index * world + rank].get(slot.round),
        slot,
        complete: true,
    };
    slots.map(pass).collect()
}

struct Planner<'a> {
    sizes: &'a [RowSize],
    cost: ForwardCost,
    budget: usize,
}

impl Planner<'_> {
    fn plan(&self, groups: &[&[usize]], leaves: usize) -> Vec<Vec<MicroBatch>> {
        let whole = groups.iter().flat_map(|rows| self.split(&self.unit(rows.to_vec()), u64::MAX));
        let whole: Vec<PromptUnit> = whole.collect();
        let share = total(&whole) / leaves.max(1) as u64;
        let whole_groups = spread(whole.clone(), leaves);
        let finer = if leaves > 1 { &[1, 2, 4][..] } else { &[] };
        let best = finer.iter().fold(whole_groups, |best, parts| {
            let units = whole.iter().flat_map(|unit| self.split(unit, share / parts)).collect();
            let split = spread(units, leaves);
            if time(&split) < time(&best) / WORTH.1 * WORTH.0 { split } else { best }
        });
        best.into_iter().map(|leaf| micro_batches(leaf, self.budget)).collect()
    }

    /// The unit of `rows`, which have the same prompt.
    fn unit(&self, mut rows: Vec<usize>) -> PromptUnit {
        rows.sort_unstable();
        let prompt = rows.first().map_or(0, |row| self.sizes[*row].prompt);
        let sizes = || rows.iter().map(|row| self.sizes[*row]);
        let tokens = prompt + sizes().map(|size| size.rest).sum::<usize>();
        let of_row = |size: RowSize| {
            self.cost.of_tokens(size.rest, prompt) + size.predictions as u64 * self.cost.prediction
        };
        let cost = self.cost.of_tokens(prompt, 0) + sizes().map(of_row).sum::<u64>();
        PromptUnit { rows, tokens, cost }
    }

    /// Splits a unit into as few parts as possible, each within the budget and of a cost of at most `limit`, or a single row.
    fn split(&self, unit: &PromptUnit, limit: u64) -> Vec<PromptUnit> {
        let mut rows = unit.rows.clone();
        rows.sort_by_key(|row| Reverse(self.sizes[*row].rest));
        let parts = |n: usize| {
            let mut parts = vec![(0, Vec::new()); n];
            for row in &rows {
                if let Some((rest, part)) = parts.iter_mut().min_by_key(|(rest, part)| (*rest, part.len())) {
                    *rest += self.sizes[*row].rest;
                    part.push(*row);
                }
            }
            parts.into_iter().map(|(_, rows)| self.unit(rows)).collect::<Vec<_>>()
        };
        let fits = |part: &PromptUnit| part.tokens <= self.budget && part.cost <= limit;
        let at_least =
            unit.tokens.div_ceil(self.budget.max(1)).max(unit.cost.div_ceil(limit.max(1)) as usize);
        let fitting = (at_least.max(1)..rows.len()).map(parts).find(|parts| parts.iter().all(fits));
        fitting.unwrap_or_else(|| rows.iter().map(|row| self.unit(vec![*row])).collect())
    }
}

/// Cost of a step, FLOPs: the mean over a step of one rank, which computes every leaf, and a step of one rank per leaf,
/// which ends with the most expensive leaf; times twice the number of leaves. The number of ranks is unknown here.
fn time(leaves: &[Vec<PromptUnit>]) -> u64 {
    let costs = || leaves.iter().map(|leaf| total(leaf));
    costs().sum::<u64>().saturating_add(costs().max().unwrap_or(0).saturating_mul(leaves.len() as u64))
}

fn total(units: &[PromptUnit]) -> u64 {
    units.iter().map(|unit| unit.cost).sum()
}

/// Assigns units to `leaves` leaves: the most expensive first, each to the leaf with the least cost.
fn spread(mut units: Vec<PromptUnit>, leaves: usize) -> Vec<Vec<PromptUnit>> {
    units.sort_by_key(|unit| Reverse(unit.cost));
    let mut costs: Vec<(u64, Vec<PromptUnit>)> = vec![(0, Vec::new()); leaves.max(1)];
    for unit in units {
        if let Some((cost, leaf)) = costs.iter_mut().min_by_key(|(cost, _)| *cost) {
            *cost += unit.cost;
            leaf.push(unit);
        }
    }
    costs.into_iter().map(|(_, leaf)| leaf).collect()
}

/// Puts units into at most as many micro-batches as first-fit-decreasing, evenly filled if possible.
fn micro_batches(mut units: Vec<PromptUnit>, budget: usize) -> Vec<MicroBatch> {
    units.sort_by_key(|unit| Reverse(unit.tokens));
    let mut fewest: Vec<MicroBatch> = Vec::new();
    for unit in &units {
        match fewest.iter_mut().find(|batch| batch.takes(unit, budget)) {
            Some(batch) => batch.push(unit),
            None => fewest.push(MicroBatch { rows: unit.rows.clone(), tokens: unit.tokens }),
        }
    }
    let least = units.iter().map(|unit| unit.tokens).sum::<usize>().div_ceil(budget.max(1));
    let mut batches = (least..=fewest.len()).find_map(|n| even_batches(&units, budget, n)).unwrap_or(fewest);
    batches.iter_mut().for_each(|batch| batch.rows.sort_unstable());
    batches.sort_by_key(|batch| batch.rows.first().copied());
    batches
}

/// Puts each unit, the largest first, into the emptiest of `n` micro-batches. `None` if a unit does not fit.
fn even_batches(units: &[PromptUnit], budget: usize, n: usize) -> Option<Vec<MicroBatch>> {
    let mut batches = vec![MicroBatch::default(); n];
    for unit in units {
        let emptiest = batches.iter_mut().min_by_key(|batch| batch.tokens)?;
        if !emptiest.takes(unit, budget) {
            return None;
        }
        emptiest.push(unit);
    }
    Some(batches)
}

impl MicroBatch {
    fn takes(&self, unit: &PromptUnit, budget: usize) -> bool {
        self.rows.is_empty() || self.tokens + unit.tokens <= budget
    }

    fn push(&mut self, unit: &PromptUnit) {
        self.rows.extend(&unit.rows);
        self.tokens += unit.tokens;
    }
}

/// The reports of all leaves in order, from the reports by rank. With `accumulates` a rank has neighbouring leaves,
/// otherwise every `world`th leaf.
pub(crate) fn in_order_of_leaf<R>(reports: Vec<Vec<R>>, accumulates: bool) -> Vec<R> {
    if accumulates {
        return reports.into_iter().flatten().collect();
    }
    let mut ranks: Vec<_> = reports.into_iter().map(Vec::into_iter).collect();
    let mut ordered = Vec::new();
    loop {
        let before = ordered.len();
        ordered.extend(ranks.iter_mut().filter_map(Iterator::next));
        if ordered.len() == before {
            return ordered;
        }
    }
}

#[cfg(test)]
mod tests {
    use model::Sizes;
    use proptest::prelude::*;

    use super::*;

    fn model() -> Config {
        Config::fresh(&Sizes {
            vocab_size: 100,
            hidden_size: 32,
            intermediate_size: 48,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 128,
        })
    }

    /// Row sizes and rows by group, from the prompt length of each group and the rest of each row.
    fn groups_of(groups: &[(usize, Vec<usize>)]) -> (Vec<RowSize>, Vec<Vec<usize>>) {
        let (mut sizes, mut rows) = (Vec::new(), Vec::new());
        for (prompt, rests) in groups {
            rows.push((sizes.len()..sizes.len() + rests.len()).collect());
            sizes.extend(rests.iter().map(|rest| RowSize {
                prompt: *prompt,
                rest: *rest,
                predictions: rest + 1,
            }));
        }
        (sizes, rows)
    }

    /// The plan of some groups.
    struct PlannedGroups {
        plan: Vec<Vec<MicroBatch>>,
        /// Costs of the leaves.
        costs: Vec<u64>,
        /// The groups before they are split.
        units: Vec<PromptUnit>,
    }

    fn plan_groups(groups: &[(usize, Vec<usize>)], budget: usize, leaves: usize) -> PlannedGroups {
        let (sizes, rows) = groups_of(groups);
        let planner = Planner { sizes: &sizes, cost: ForwardCost::of(&model()), budget };
        let rows: Vec<&[usize]> = rows.iter().map(Vec::as_slice).collect();
        let plan = planner.plan(&rows, leaves);
        let of_group = |leaf: &[usize]| planner.unit(leaf.to_vec());
        let cost = |batch: &MicroBatch| -> u64 {
            let inside = |group: &&[usize]| -> Vec<usize> {
                group.iter().copied().filter(|row| batch.rows.contains(row)).collect()
            };
            let parts = rows.iter().map(inside).filter(|rows| !rows.is_empty());
            parts.map(|rows| of_group(&rows).cost).sum()
        };
        let costs = plan.iter().map(|leaf| leaf.iter().map(cost).sum()).collect();
        let units = rows.iter().map(|rows| of_group(rows)).collect();
        PlannedGroups { plan, costs, units }
    }

    proptest! {
        #[test]
        fn every_row_is_planned_once_within_the_budget(
            groups in prop::collection::vec((0..40usize, prop::collection::vec(0..50usize, 1..9)), 0..20),
            budget in 1..300usize,
            leaves in 1..5usize,
        ) {
            let PlannedGroups { plan, units, .. } = plan_groups(&groups, budget, leaves);
            let (sizes, _) = groups_of(&groups);
            prop_assert_eq!(plan.len(), leaves);
            let batches: Vec<&MicroBatch> = plan.iter().flatten().collect();
            let mut rows: Vec<usize> = batches.iter().flat_map(|batch| batch.rows.clone()).collect();
            rows.sort_unstable();
            prop_assert_eq!(rows, (0..sizes.len()).collect::<Vec<_>>());
            for batch in &batches {
                prop_assert!(batch.rows.is_sorted());
                prop_assert!(batch.tokens <= budget || batch.rows.len() == 1);
                let most: usize = batch.rows.iter().map(|row| sizes[*row].prompt + sizes[*row].rest).sum();
                prop_assert!(batch.tokens <= most);
            }
            prop_assert_eq!(&plan, &plan_groups(&groups, budget, leaves).plan, "the same rows give the same plan");
            // Any two micro-batches of a rank would not have fitted into one, so all but one are half full.
            if units.iter().all(|unit| unit.tokens <= budget) && leaves == 1 {
                let tokens: usize = units.iter().map(|unit| unit.tokens).sum();
                prop_assert!(batches.len() <= 2 * tokens.div_ceil(budget));
            }
        }

        #[test]
        fn many_small_groups_fill_ranks_and_micro_batches(
            groups in prop::collection::vec((1..30usize, prop::collection::vec(0..20usize, 1..5)), 60..90),
            leaves in 1..5usize,
        ) {
            let budget = 500;
            let PlannedGroups { plan, costs, units } = plan_groups(&groups, budget, leaves);
            let (largest, all) = (units.iter().map(|unit| unit.cost).max().unwrap(), total(&units));
            // The rank that got the last unit had at most the mean before.
            let slowest = *costs.iter().max().unwrap();
            prop_assert!(slowest <= all / leaves as u64 + largest, "{costs:?}");
            for leaf in &plan {
                let tokens: usize = leaf.iter().map(|batch| batch.tokens).sum();
                // No group is over a quarter of the budget, so all micro-batches but one are filled to three quarters.
                prop_assert!(leaf.len() <= (tokens * 4).div_ceil(budget * 3) + 1, "{leaf:?}");
            }
        }
    }

    #[test]
    fn groups_stay_together_and_in_order_where_they_can() {
        let groups = [(10, vec![5, 7, 6]), (4, vec![9, 9]), (8, vec![3])];
        let plan = plan_groups(&groups, 1000, 1).plan;
        assert_eq!(plan, [[MicroBatch { rows: (0..6).collect(), tokens: 28 + 22 + 11 }]]);
        let plan = plan_groups(&groups, 40, 1).plan;
        let rows: Vec<&[usize]> = plan[0].iter().map(|batch| &batch.rows[..]).collect();
        assert_eq!(rows, [&[0, 1, 2][..], &[3, 4, 5]]);
    }

    #[test]
    fn micro_batches_are_filled_evenly() {
        let groups: Vec<_> = (0..5).map(|_| (20, vec![0])).collect();
        let plan = plan_groups(&groups, 80, 1).plan;
        assert_eq!(plan[0].iter().map(|batch| batch.tokens).collect::<Vec<_>>(), [60, 40]);
    }

    #[test]
    fn a_group_is_split_where_ranks_would_be_idle() {
        let PlannedGroups { plan, costs, units } = plan_groups(&[(5, vec![20; 8])], 1000, 4);
        assert!(plan.iter().all(|leaf| leaf.len() == 1 && leaf[0].rows.len() == 2), "{plan:?}");
        assert!(costs.iter().max().unwrap() * 3 < units[0].cost);
        // A prompt that costs more than all the rest is not computed twice.
        let plan = plan_groups(&[(5000, vec![1, 1])], 10_000, 2).plan;
        assert_eq!(plan.iter().flatten().count(), 1, "{plan:?}");
    }

    #[test]
    fn long_rows_cost_more_than_their_tokens() {
        let groups = [(1, vec![4000]), (1, vec![1000]), (1, vec![1000]), (1, vec![1000]), (1, vec![1000])];
        let plan = plan_groups(&groups, 4500, 2).plan;
        assert_eq!(plan[0].iter().flat_map(|batch| &batch.rows).collect::<Vec<_>>(), [&0]);
    }

    #[test]
    fn costs_are_those_of_the_matrices() {
        let ForwardCost { token, pair, prediction } = ForwardCost::of(&model());
        // Query and output 32 x 32, key and value 32 x 16, gate, up and down 32 x 48; two layers.
        assert_eq!(token, 2 * 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48));
        assert_eq!((pair, prediction), (2 * 2 * 2 * 32, 2 * 32 * 100));
        let cost = ForwardCost { token: 0, pair: 1, prediction: 0 };
        assert_eq!((cost.of_tokens(3, 0), cost.of_tokens(2, 3)), (6, 3 * 2 + 3));
    }
}
