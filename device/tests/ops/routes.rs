//! Routes of tokens to experts against a reference in f64.

use device::ops::routes::{GivenSlots, Padding, RouteInputs, RouteMemory, RoutedRows, Router, RouterKind};
use device::{Device, Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::narrow;

/// A slot, or a row, that is not there.
const NOWHERE: u32 = u32::MAX;

fn sigmoid(normalized: bool, groups: usize, chosen_groups: usize) -> RouterKind {
    RouterKind::Sigmoid { normalized, groups, chosen_groups, scale: 2.5 }
}

fn routers() -> Vec<Router> {
    let softmax = |normalized| RouterKind::Softmax { normalized };
    let of = |experts, per_token, kind| Router { experts, per_token, kind };
    vec![
        of(6, 2, softmax(true)),
        of(130, 7, softmax(false)),
        of(5, 5, softmax(true)),
        of(12, 3, sigmoid(true, 4, 2)),
        of(70, 40, sigmoid(false, 35, 25)),
        of(64, 6, sigmoid(true, 1, 1)),
        of(9, 1, RouterKind::SoftmaxOfChosen),
        of(33, 4, RouterKind::SoftmaxOfChosen),
    ]
}

/// Scores of a token.
fn scores(kind: RouterKind, logits: &[f32]) -> Vec<f64> {
    let wide = logits.iter().map(|logit| f64::from(*logit));
    match kind {
        RouterKind::Softmax { .. } => {
            let all: Vec<f64> = wide.map(f64::exp).collect();
            let total: f64 = all.iter().sum();
            all.iter().map(|exp| exp / total).collect()
        }
        RouterKind::Sigmoid { .. } => wide.map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        RouterKind::SoftmaxOfChosen => wide.collect(),
    }
}

/// The best `count` of `scores`, of equal ones the first, ascending.
fn best(scores: &[f64], among: impl Iterator<Item = usize>, count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = among.collect();
    all.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    all.truncate(count);
    all.sort_unstable();
    all
}

fn choose(router: Router, scores: &[f64], correction: Option<&[f64]>) -> Vec<usize> {
    let compared: Vec<f64> = match correction {
        Some(correction) => scores.iter().zip(correction).map(|(score, more)| score + more).collect(),
        None => scores.to_vec(),
    };
    let every = 0..router.experts;
    match router.kind {
        RouterKind::Sigmoid { groups, chosen_groups, .. } if chosen_groups < groups => {
            let width = router.experts / groups;
            let sum_of_two = |group: &[f64]| {
                best(group, 0..group.len(), 2).iter().map(|expert| group[*expert]).sum::<f64>()
            };
            let sums: Vec<f64> = compared.chunks(width).map(sum_of_two).collect();
            let open = best(&sums, 0..groups, chosen_groups);
            best(&compared, every.filter(|expert| open.contains(&(expert / width))), router.per_token)
        }
        _ => best(&compared, every, router.per_token),
    }
}

fn weights(kind: RouterKind, scores: &[f64], chosen: &[usize]) -> Vec<f64> {
    let own: Vec<f64> = chosen.iter().map(|expert| scores[*expert]).collect();
    let by = |values: Vec<f64>, normalized: bool, scale: f64| -> Vec<f64> {
        let total: f64 = if normalized { values.iter().sum() } else { 1.0 };
        values.iter().map(|value| value / total * scale).collect()
    };
    match kind {
        RouterKind::Softmax { normalized } => by(own, normalized, 1.0),
        RouterKind::Sigmoid { normalized, scale, .. } => by(own, normalized, f64::from(scale)),
        RouterKind::SoftmaxOfChosen => by(own.iter().map(|score| score.exp()).collect(), true, 1.0),
    }
}

/// The lists of routes, downloaded.
struct Found {
    weights: Vec<f32>,
    experts: Vec<u32>,
    counters: Vec<u32>,
}

/// Checks that rows are those of `routes.experts`, and downloads them.
fn downloaded(device: &Device, routes: &RoutedRows<'_>) -> Found {
    let experts = device.download(routes.experts).unwrap();
    let [counters, starts, slots, rows] = [routes.counters, routes.starts, routes.slots, routes.rows]
        .map(|list| device.download(list).unwrap());
    let mut expected = Vec::new();
    for expert in 0..routes.router.experts as u32 {
        assert_eq!(starts[expert as usize] as usize, expected.len());
        let of_expert = experts.iter().enumerate().filter(|(_, own)| **own == expert);
        expected.extend(of_expert.map(|(slot, _)| slot as u32));
        assert_eq!(counters[expert as usize] as usize, expected.len() - starts[expert as usize] as usize);
    }
    assert_eq!(starts[routes.router.experts] as usize, expected.len());
    assert_eq!(slots[..expected.len()], expected);
    for (row, slot) in slots[..expected.len()].iter().enumerate() {
        assert_eq!(rows[*slot as usize], row as u32);
    }
    let padding = experts.iter().zip(&rows).filter(|(expert, _)| **expert == NOWHERE);
    assert!(padding.into_iter().all(|(_, row)| *row == NOWHERE));
    Found { weights: device.download(routes.weights).unwrap(), experts, counters }
}

const NOTHING: RouteInputs<'_, f32> =
    RouteInputs { bias: None, correction: None, given: None, padding: None };

fn check<T: Storage>(router: Router, tokens: usize) {
    for device in devices() {
        let logits: Vec<f32> = noise(tokens * router.experts, 3).iter().map(|z| z * 4.0).collect();
        let correction: Vec<T> = narrow(noise(router.experts, 5));
        let wide: Vec<f64> = correction.iter().map(|value| f64::from(value.widen())).collect();
        let on_device = device.upload(&correction).unwrap();
        let bias: Vec<T> = narrow(noise(router.experts, 6));
        let on_bias = device.upload(&bias).unwrap();
        // Added to the logits of every token.
        let biased: Vec<f32> =
            logits.iter().enumerate().map(|(i, z)| z + bias[i % router.experts].widen()).collect();
        let corrected = matches!(router.kind, RouterKind::Sigmoid { .. });
        // More memory than is needed.
        let mut memory = RouteMemory::new(&device, &[router], tokens + 3).unwrap();
        device.upload_to(&logits, memory.logits(router, tokens)).unwrap();
        let correction = corrected.then_some(on_device.all());
        let inputs = RouteInputs { bias: Some(on_bias.all()), correction, given: None, padding: None };
        memory.route(&device, router, tokens, inputs).unwrap();
        let found = downloaded(&device, &memory.routes(router, tokens));
        let (mut experts, mut weights_of) = (Vec::new(), Vec::new());
        let mut d_logits = Vec::new();
        let d_weights = noise(tokens * router.per_token, 7);
        for (logits, d_weights) in biased.chunks(router.experts).zip(d_weights.chunks(router.per_token)) {
            let scores = scores(router.kind, logits);
            let chosen = choose(router, &scores, corrected.then_some(&wide[..]));
            weights_of.extend(weights(router.kind, &scores, &chosen));
            experts.extend(chosen.iter().map(|expert| *expert as u32));
            d_logits.extend(slopes(router.kind, logits, &chosen, d_weights));
        }
        assert_eq!(found.experts, experts, "{router:?}");
        assert_close(&found.weights, &weights_of, 1e-5);
        assert_eq!(found.counters[router.experts..], [0, 0]);
        let d_weights = device.upload(&d_weights).unwrap();
        let of_logits = memory.backward(&device, router, tokens, d_weights.all()).unwrap();
        assert_close(&device.download(of_logits).unwrap(), &d_logits, 1e-4);
    }
}

/// Gradient of the logits of a token by central differences.
fn slopes(kind: RouterKind, logits: &[f32], chosen: &[usize], d_weights: &[f32]) -> Vec<f64> {
    let loss = |logits: &[f32]| -> f64 {
        let weights = weights(kind, &scores(kind, logits), chosen);
        weights.iter().zip(d_weights).map(|(weight, d)| weight * f64::from(*d)).sum()
    };
    let slope = |at: usize| {
        let [mut below, mut above] = [logits.to_vec(), logits.to_vec()];
        (below[at], above[at]) = (logits[at] - 1e-2, logits[at] + 1e-2);
        let width = f64::from(above[at]) - f64::from(below[at]);
        (loss(&above) - loss(&below)) / width
    };
    (0..logits.len()).map(slope).collect()
}

#[test]
fn experts_weights_and_gradients_match_f64() {
    for router in routers() {
        for tokens in [0, 1, 70] {
            check::<f32>(router, tokens);
        }
        check::<bf16>(router, 9);
    }
}

#[test]
fn of_equal_scores_the_first_experts_are_chosen_and_a_nan_disturbs_no_other_token() {
    for device in devices() {
        for router in routers() {
            let mut memory = RouteMemory::new(&device, &[router], 3).unwrap();
            let mut logits = vec![0.5; 3 * router.experts];
            logits[router.experts..2 * router.experts].fill(f32::NAN);
            device.upload_to(&logits, memory.logits(router, 3)).unwrap();
            memory.route(&device, router, 3, NOTHING).unwrap();
            let found = downloaded(&device, &memory.routes(router, 3));
            let first: Vec<u32> = (0..router.per_token as u32).collect();
            for experts in found.experts.chunks(router.per_token) {
                assert_eq!(experts, first, "{router:?}");
            }
        }
    }
}

#[test]
fn given_experts_are_taken_and_counted() {
    let router = Router { experts: 6, per_token: 2, kind: RouterKind::Softmax { normalized: true } };
    for device in devices() {
        let logits = noise(4 * 6, 3);
        let mut memory = RouteMemory::new(&device, &[router], 4).unwrap();
        device.upload_to(&logits, memory.logits(router, 4)).unwrap();
        memory.route(&device, router, 4, NOTHING).unwrap();
        let own = downloaded(&device, &memory.routes(router, 4)).experts;
        // Of two layers the second: the own experts, others, an expert beyond the last, and none.
        let other = if own[2..4] == [1, 4] { [0, 4] } else { [1, 4] };
        let first = [own[0] as u16, own[1] as u16];
        let all = [[7, 7], first, [7, 7], other, [7, 7], [2, 6], [7, 7], [u16::MAX; 2]].concat();
        let all = device.upload(&all).unwrap();
        let given = GivenSlots { all: all.all(), slots: 4, first: 2 };
        device.upload_to(&logits, memory.logits(router, 4)).unwrap();
        memory.route(&device, router, 4, RouteInputs { given: Some(given), ..NOTHING }).unwrap();
        let found = downloaded(&device, &memory.routes(router, 4));
        assert_eq!(found.experts[2..4], other.map(u32::from));
        assert_eq!((&found.experts[..2], &found.experts[4..]), (&own[..2], &own[4..]));
        assert_eq!(found.counters[6..], [2, 1]);
        let scores = scores(router.kind, &logits[6..12]);
        let expected = weights(router.kind, &scores, &other.map(usize::from));
        assert_close(&found.weights[2..4], &expected, 1e-5);
    }
}

/// Rows of several ranks, each of which has them by expert, and none.
#[test]
fn rows_that_others_have_routed_are_grouped_by_expert() {
    let router = Router { experts: 4, per_token: 1, kind: RouterKind::Softmax { normalized: false } };
    for device in devices() {
        for experts in [&[0, 0, 3, 1, 3, 0, 1, 1, 1][..], &[]] {
            let mut memory = RouteMemory::of_rows::<f32>(&device, router, experts).unwrap();
            let weights = noise(experts.len(), 3);
            device.upload_to(&weights, memory.weights(router, experts.len())).unwrap();
            let routes = memory.routes(router, experts.len());
            assert!(routes.scores.is_empty());
            let found = downloaded(&device, &routes);
            assert_eq!((&found.experts[..], found.weights), (experts, weights));
        }
    }
}

#[test]
fn padding_has_no_rows() {
    let router = Router { experts: 6, per_token: 2, kind: RouterKind::Softmax { normalized: true } };
    for device in devices() {
        let mut memory = RouteMemory::new(&device, &[router], 5).unwrap();
        let places = device.upload(&[3, 160, 0, 161, 175]).unwrap();
        let padding = Some(Padding { slots: places.all(), end: 160 });
        device.upload_to(&noise(30, 3), memory.logits(router, 5)).unwrap();
        memory.route(&device, router, 5, RouteInputs { padding, ..NOTHING }).unwrap();
        let found = downloaded(&device, &memory.routes(router, 5));
        let there = found.experts.chunks(2).map(|experts| experts[0] != NOWHERE).collect::<Vec<_>>();
        assert_eq!(there, [true, false, true, false, false]);
        assert_eq!(found.counters[..6].iter().sum::<u32>(), 4);
    }
}
