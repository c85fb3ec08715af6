//! Identities from the literature, on policies small enough to enumerate every sequence.
//!
//! The policy is a table: a softmax for the first token and one for the second after each first token. Every
//! expectation is an exact sum over nine sequences.

use trainer::advantage::{AdvantageEstimator, GroupOutcome, ScaleRewards, TrajectoryOutcome};
use trainer::loss::kl::KlPlacement;
use trainer::loss::trajectory_balance::{self, Balance};
use trainer::loss::{Correction, KlEstimator, KlPenalty, LossRow, PolicyLoss};

const TOKENS: usize = 3;
/// One softmax for the first token, one for the second after each first token.
const STATES: usize = 1 + TOKENS;
/// All sequences of two tokens.
const SEQUENCES: usize = TOKENS * TOKENS;

/// `[STATES][TOKENS]` logits.
type Policy = [[f64; TOKENS]; STATES];

fn sequence(index: usize) -> [usize; 2] {
    [index / TOKENS, index % TOKENS]
}

/// The states in which the tokens of a sequence are sampled.
fn states(index: usize) -> [usize; 2] {
    [0, 1 + sequence(index)[0]]
}

fn log_softmax(logits: &[f64; TOKENS]) -> [f64; TOKENS] {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let normaliser = most + logits.iter().map(|z| (z - most).exp()).sum::<f64>().ln();
    logits.map(|z| z - normaliser)
}

/// Log-probabilities of the two tokens of a sequence.
fn logprobs(policy: &Policy, index: usize) -> [f64; 2] {
    let (tokens, states) = (sequence(index), states(index));
    [0, 1].map(|t| log_softmax(&policy[states[t]])[tokens[t]])
}

/// Adds `slopes`, derivatives of a loss by the log-probabilities of a sequence, to the derivatives by the logits.
fn backward(policy: &Policy, index: usize, slopes: [f64; 2], gradient: &mut Policy) {
    let (tokens, states) = (sequence(index), states(index));
    for t in 0..2 {
        let probabilities = log_softmax(&policy[states[t]]).map(f64::exp);
        for (token, p) in probabilities.into_iter().enumerate() {
            let chosen = f64::from(u8::from(token == tokens[t]));
            gradient[states[t]][token] += slopes[t] * (chosen - p);
        }
    }
}

/// A random policy for a seed.
fn some_policy(seed: usize) -> Policy {
    let value = |state: usize, token: usize| ((seed * 7 + state * 5 + token * 3) as f64 * 1.3).sin();
    std::array::from_fn(|state| std::array::from_fn(|token| value(state, token)))
}

fn reward(index: usize) -> f64 {
    [0.0, 1.0, 0.3, 0.9, 0.1, 0.0, 0.5, 0.0, 1.0][index]
}

fn largest_difference(a: &Policy, b: &Policy) -> f64 {
    a.iter().flatten().zip(b.iter().flatten()).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()))
}

/// TBA (arXiv 2503.18929): on-policy, the gradient of trajectory balance is `2 / beta` times that of REINFORCE with the
/// group mean as baseline and the KL penalty subtracted from the reward.
#[test]
fn trajectory_balance_is_reinforce_with_a_kl_penalty() {
    let (policy, reference, beta) = (some_policy(1), some_policy(2), 0.25);
    // A group with repeated sequences, as in sampling.
    let group = [0, 4, 4, 8, 3, 1];
    let balances: Vec<Balance> = group
        .iter()
        .map(|i| Balance {
            current: logprobs(&policy, *i).iter().sum(),
            reference: logprobs(&reference, *i).iter().sum(),
            reward: reward(*i),
        })
        .collect();
    let log_z = trajectory_balance::log_z(&balances, beta);
    let divergence = KlPenalty { coef: beta, estimator: KlEstimator::K1, placement: KlPlacement::Reward };
    let penalty =
        |current: f64, reference: f64| divergence.coef * divergence.estimator.token(current, reference).0;
    let outcome = |i: &usize| TrajectoryOutcome {
        reward: reward(*i),
        tokens: 2,
        penalties: (0..2).map(|t| penalty(logprobs(&policy, *i)[t], logprobs(&reference, *i)[t])).collect(),
        ..TrajectoryOutcome::default()
    };
    let outcomes = [GroupOutcome { trajectories: group.iter().map(outcome).collect(), greedy: None }];
    let advantages = AdvantageEstimator::Group { scale: ScaleRewards::None }.of(&outcomes);
    let (mut of_balance, mut of_reinforce) = (Policy::default(), Policy::default());
    for (k, i) in group.iter().enumerate() {
        let share = 1.0 / group.len() as f64;
        let slope = trajectory_balance::row(balances[k], log_z, beta, 2)[0].derivative * share;
        backward(&policy, *i, [slope; 2], &mut of_balance);
        let current = logprobs(&policy, *i);
        let row = LossRow {
            current: &current,
            proximal: &current,
            behavior: &current,
            advantages: &advantages[0][k],
        };
        let slopes = PolicyLoss::Reinforce.row(row);
        backward(&policy, *i, [0, 1].map(|t| slopes[t].derivative * share * 2.0 / beta), &mut of_reinforce);
    }
    let size = of_balance.iter().flatten().fold(0.0, |most: f64, g| most.max(g.abs()));
    assert!(size > 0.1, "the gradient is not zero: {size}");
    assert!(largest_difference(&of_balance, &of_reinforce) < 1e-6 * size);
}

/// The minimum of trajectory balance is the reference times `exp(reward / beta)`, although all sequences are equally
/// frequent; the clipped surrogate on the same data converges to the best sequence only.
#[test]
fn trajectory_balance_finds_its_target_off_policy_and_ppo_does_not() {
    let (reference, beta) = (some_policy(3), 0.5);
    let weights: Vec<f64> = (0..SEQUENCES)
        .map(|i| (logprobs(&reference, i).iter().sum::<f64>() + reward(i) / beta).exp())
        .collect();
    let total: f64 = weights.iter().sum();
    let divergence_from_target = |policy: &Policy| -> f64 {
        let term = |i: usize| {
            let current: f64 = logprobs(policy, i).iter().sum();
            current.exp() * (current - (weights[i] / total).ln())
        };
        (0..SEQUENCES).map(term).sum()
    };
    let descend = |slopes: &dyn Fn(&Policy, usize) -> [f64; 2]| {
        let mut policy = some_policy(4);
        for _ in 0..20_000 {
            let mut gradient = Policy::default();
            (0..SEQUENCES).for_each(|i| backward(&policy, i, slopes(&policy, i), &mut gradient));
            policy.iter_mut().flatten().zip(gradient.iter().flatten()).for_each(|(p, g)| *p -= 0.05 * g);
        }
        divergence_from_target(&policy)
    };
    let balance = |policy: &Policy, i: usize| Balance {
        current: logprobs(policy, i).iter().sum(),
        reference: logprobs(&reference, i).iter().sum(),
        reward: reward(i),
    };
    let of_balance = descend(&|policy, i| {
        let group: Vec<Balance> = (0..SEQUENCES).map(|i| balance(policy, i)).collect();
        let log_z = trajectory_balance::log_z(&group, beta);
        [trajectory_balance::row(group[i], log_z, beta, 2)[0].derivative / SEQUENCES as f64; 2]
    });
    let mean = (0..SEQUENCES).map(reward).sum::<f64>() / SEQUENCES as f64;
    let uniform = [(1.0 / TOKENS as f64).ln(); 2];
    let of_surrogate = descend(&|policy, i| {
        let current = logprobs(policy, i);
        let row = LossRow {
            current: &current,
            proximal: &uniform,
            behavior: &uniform,
            advantages: &[reward(i) - mean; 2],
        };
        let losses = PolicyLoss::Clip { low: 0.2, high: 10.0, dual: None }.row(row);
        [0, 1].map(|t| losses[t].derivative / SEQUENCES as f64)
    });
    assert!(of_balance < 1e-9, "{of_balance}");
    assert!(of_surrogate > 0.05, "{of_surrogate}");
}

/// AReaL (arXiv 2505.24298, proposition 1): a sequence sampled by several versions has one behavior policy, that of the
/// recorded log-probabilities, so importance weights by these give the exact gradient of the current policy.
#[test]
fn sequences_of_mixed_versions_give_an_unbiased_gradient() {
    let (current, older, newer) = (some_policy(5), some_policy(6), some_policy(7));
    // The weights changed between the first and the second token.
    let behavior = |i: usize| [logprobs(&older, i)[0], logprobs(&newer, i)[1]];
    let estimate = |correction: Correction, recorded: &dyn Fn(usize) -> [f64; 2]| {
        let mut gradient = Policy::default();
        for i in 0..SEQUENCES {
            let (now, recorded) = (logprobs(&current, i), recorded(i));
            let row =
                LossRow { current: &now, proximal: &now, behavior: &recorded, advantages: &[reward(i); 2] };
            let weights = correction.weights(&now, &recorded).weights;
            let losses = PolicyLoss::Reinforce.row(row);
            let chance = behavior(i).iter().sum::<f64>().exp();
            backward(&current, i, [0, 1].map(|t| chance * weights[t] * losses[t].derivative), &mut gradient);
        }
        gradient
    };
    let mut exact = Policy::default();
    for i in 0..SEQUENCES {
        let chance = logprobs(&current, i).iter().sum::<f64>().exp();
        backward(&current, i, [-chance * reward(i); 2], &mut exact);
    }
    let whole = Correction::SequenceTruncate { cap: f64::INFINITY };
    assert!(largest_difference(&estimate(whole, &behavior), &exact) < 1e-12);
    // With the log-probabilities of one version only, or without weights, the gradient differs.
    let wrong = |i: usize| logprobs(&newer, i);
    assert!(largest_difference(&estimate(whole, &wrong), &exact) > 1e-3);
    assert!(largest_difference(&estimate(Correction::None, &behavior), &exact) > 1e-3);
}

/// For every estimator a reward of the whole is that of its only turn, which is what an environment without `[[rewards]]`
/// gives.
#[test]
fn the_reward_of_the_only_turn_is_the_reward() {
    let group = |turns: bool| GroupOutcome {
        trajectories: [(3, 1.0), (2, 0.25), (4, 0.0)]
            .map(|(tokens, reward)| TrajectoryOutcome {
                tokens,
                reward: if turns { 0.0 } else { reward },
                components: if turns { vec![] } else { vec![reward] },
                turns: if turns { vec![(tokens, reward)] } else { vec![] },
                ..TrajectoryOutcome::default()
            })
            .into(),
        greedy: None,
    };
    for (whole, of_turns) in [
        AdvantageEstimator::Group { scale: ScaleRewards::Group },
        AdvantageEstimator::LeaveOneOut,
        AdvantageEstimator::LengthWeighted,
        AdvantageEstimator::Greedy,
        AdvantageEstimator::Whiten { baseline: false, gamma: 1.0 },
        AdvantageEstimator::Whiten { baseline: true, gamma: 0.9 },
        AdvantageEstimator::BatchMean,
        AdvantageEstimator::None,
        AdvantageEstimator::Process,
    ]
    .map(|estimator| (estimator.clone(), estimator))
    .into_iter()
    .chain([(
        AdvantageEstimator::PerReward { weights: vec![1.0] },
        AdvantageEstimator::PerReward { weights: vec![] },
    )]) {
        let (found, expected) = (of_turns.of(&[group(true)]), whole.of(&[group(false)]));
        assert_eq!(found, expected, "{whole:?}");
        assert!(expected.iter().flatten().flatten().any(|advantage| *advantage != 0.0), "{whole:?}");
    }
}

/// A reward of the whole counts beside those of turns: it is one of the last turn.
#[test]
fn process_counts_the_reward_of_the_whole() {
    let group = |reward: f64, last: f64| GroupOutcome {
        trajectories: [1.0, 0.0]
            .map(|right| TrajectoryOutcome {
                tokens: 4,
                reward: reward * right,
                turns: vec![(2, 0.5), (2, last * right)],
                ..TrajectoryOutcome::default()
            })
            .into(),
        greedy: None,
    };
    let found = AdvantageEstimator::Process.of(&[group(1.0, 0.0)]);
    assert_eq!(found, AdvantageEstimator::Process.of(&[group(0.0, 1.0)]));
    assert!(found[0][0][3] > found[0][1][3]);
}
