//! Every advantage estimator, loss, correction and whole minibatch against PyTorch's autograd in f64.
//!
//! `trainer/tests/goldens/algorithms.py` computes the numbers; it was written from the papers' formulas, independently
//! of this crate.

use serde_json::Value;
use trainer::advantage::gae::{Discount, generalised};
use trainer::advantage::{AdvantageEstimator, GroupOutcome, TrajectoryOutcome, batch};
use trainer::algorithm::{Algorithm, Proximal};
use trainer::batch::{Batch, BatchSplit};
use trainer::loss::kl::KlPlacement;
use trainer::loss::preference::{Preference, PreferencePair, bradley_terry};
use trainer::loss::trajectory_balance::{self, Balance};
use trainer::loss::{
    Aggregation, Correction, KlEstimator, KlPenalty, LossRow, PolicyLoss, TokenCounts, correction, value,
};
use trainer::loss_inputs::{Scores, groups_to_score, loss_inputs};
use trainer::objective::{PolicyObjective, Predicted};
use trainer::report::TokenSums;
use trajectory::{
    Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
    Trajectory, Turn, VersionRun,
};

const TOLERANCE: f64 = 1e-9;

fn goldens(section: &str) -> Vec<Value> {
    let json: Value = serde_json::from_str(include_str!("goldens/algorithms.json")).unwrap();
    let cases = json[section].as_array().unwrap().clone();
    assert!(!cases.is_empty(), "there are goldens of {section}");
    cases
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is a number"))
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn word<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"))
}

fn close(ours: f64, theirs: f64, case: &Value) {
    assert!((ours - theirs).abs() <= TOLERANCE * (1.0 + theirs.abs()), "{ours} is not {theirs} in {case}");
}

fn all_close(ours: &[f64], theirs: &Value, case: &Value) {
    let theirs = numbers(theirs);
    assert_eq!(ours.len(), theirs.len(), "{case}");
    ours.iter().zip(&theirs).for_each(|(ours, theirs)| close(*ours, *theirs, case));
}

/// The advantage estimator of a case, with fields that its file omits.
fn advantage(case: &Value) -> AdvantageEstimator {
    let mut case = case.clone();
    if case["name"] == "whiten" {
        case["gamma"] = 1.0.into();
    }
    word(&case)
}

fn outcome(of: &Value) -> TrajectoryOutcome {
    let turns: Vec<(usize, f64)> = of["turns"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|turn| (turn["tokens"].as_u64().unwrap() as usize, number(&turn["reward"])))
        .collect();
    let tokens = turns.iter().map(|(tokens, _)| tokens).sum();
    TrajectoryOutcome {
        reward: of["reward"].as_f64().unwrap_or(0.0),
        correct: of["reward"].as_f64().is_some_and(|reward| reward > 0.5),
        tokens: of["length"].as_u64().map_or(tokens, |n| n as usize),
        components: of.get("components").map(numbers).unwrap_or_default(),
        turns,
        ..TrajectoryOutcome::default()
    }
}

#[test]
fn advantages() {
    for case in goldens("advantages") {
        let group = |group: &Value| GroupOutcome {
            trajectories: group.as_array().unwrap().iter().map(outcome).collect(),
            greedy: group[0].get("greedy").map(number),
        };
        let groups: Vec<GroupOutcome> = case["groups"].as_array().unwrap().iter().map(group).collect();
        let ours = advantage(&case).of(&groups);
        for (g, group) in groups.iter().enumerate() {
            for (t, trajectory) in group.trajectories.iter().enumerate() {
                let expected = &case["expected"][g][t];
                let expected: Vec<f64> = match expected {
                    Value::Array(_) => trajectory
                        .turns
                        .iter()
                        .zip(numbers(expected))
                        .flat_map(|((tokens, _), a)| vec![a; *tokens])
                        .collect(),
                    _ => vec![number(expected); trajectory.tokens],
                };
                assert_eq!(ours[g][t].len(), expected.len(), "{case}");
                ours[g][t].iter().zip(expected).for_each(|(a, b)| close(*a, b, &case));
            }
        }
    }
}

#[test]
fn losses() {
    for case in goldens("losses") {
        let name = case["name"].as_str().unwrap();
        if name.starts_with("trajectory_balance") {
            continue;
        }
        let [current, proximal, behavior, advantages] =
            ["current", "proximal", "behavior", "advantages"].map(|key| numbers(&case[key]));
        let row =
            LossRow { current: &current, proximal: &proximal, behavior: &behavior, advantages: &advantages };
        let tokens = word::<PolicyLoss>(&case).row(row);
        all_close(&tokens.iter().map(|t| t.loss).collect::<Vec<_>>(), &case["token_losses"], &case);
        all_close(&tokens.iter().map(|t| t.derivative).collect::<Vec<_>>(), &case["gradient"], &case);
    }
}

#[test]
fn trajectory_balance() {
    for case in goldens("losses") {
        match case["name"].as_str().unwrap() {
            "trajectory_balance" => {
                let (current, reference) = (numbers(&case["current"]), numbers(&case["reference"]));
                let balance = Balance {
                    current: current.iter().sum(),
                    reference: reference.iter().sum(),
                    reward: number(&case["reward"]),
                };
                let row = trajectory_balance::row(
                    balance,
                    number(&case["log_z"]),
                    number(&case["beta"]),
                    current.len(),
                );
                close(row.iter().map(|t| t.loss).sum(), number(&case["loss"]), &case);
                all_close(&row.iter().map(|t| t.derivative).collect::<Vec<_>>(), &case["gradient"], &case);
            }
            "trajectory_balance_group" => {
                let rows = case["current"].as_array().unwrap();
                let balance = |k: usize| Balance {
                    current: numbers(&case["current"][k]).iter().sum(),
                    reference: numbers(&case["reference"][k]).iter().sum(),
                    reward: number(&case["rewards"][k]),
                };
                let beta = number(&case["beta"]);
                let group: Vec<Balance> = (0..rows.len()).map(balance).collect();
                let log_z = trajectory_balance::log_z(&group, beta);
                close(log_z, number(&case["log_z"]), &case);
                let mut loss = 0.0;
                for (k, balance) in group.iter().enumerate() {
                    let tokens = numbers(&rows[k]).len();
                    let row = trajectory_balance::row(*balance, log_z, beta, tokens);
                    let share = 1.0 / group.len() as f64;
                    loss += row.iter().map(|t| t.loss * share).sum::<f64>();
                    let slopes: Vec<f64> = row.iter().map(|t| t.derivative * share).collect();
                    all_close(&slopes, &case["gradient"][k], &case);
                }
                close(loss, number(&case["loss"]), &case);
            }
            _ => {}
        }
    }
}

#[test]
fn corrections() {
    for case in goldens("corrections") {
        let behavior = numbers(&case["behavior"]);
        if case["name"] == "interpolated_proximal" {
            let ours: Vec<f64> = numbers(&case["current"])
                .iter()
                .zip(&behavior)
                .zip(numbers(&case["staleness"]))
                .map(|((current, behavior), d)| correction::interpolated(*current, *behavior, d as u64))
                .collect();
            all_close(&ours, &case["proximal"], &case);
            continue;
        }
        let ours = word::<Correction>(&case).weights(&numbers(&case["proximal"]), &behavior);
        all_close(&ours.weights, &case["weights"], &case);
        assert_eq!(ours.kept, word::<Vec<bool>>(&case["kept"]), "{case}");
    }
}

#[test]
fn divergences() {
    for case in goldens("divergences") {
        let estimator: KlEstimator = word(&case["estimator"]);
        let (current, reference) = (numbers(&case["current"]), numbers(&case["reference"]));
        let ours: Vec<(f64, f64)> =
            current.iter().zip(&reference).map(|(c, r)| estimator.token(*c, *r)).collect();
        all_close(&ours.iter().map(|(value, _)| *value).collect::<Vec<_>>(), &case["values"], &case);
        all_close(&ours.iter().map(|(_, slope)| *slope).collect::<Vec<_>>(), &case["gradient"], &case);
    }
}

#[test]
fn aggregations() {
    for case in goldens("aggregations") {
        let lengths: Vec<Vec<usize>> = word(&case["lengths"]);
        let mode: Aggregation = word(&case["mode"]);
        for (g, group) in lengths.iter().enumerate() {
            for (t, tokens) in group.iter().enumerate() {
                let counts = TokenCounts {
                    sequence_tokens: *tokens,
                    group_tokens: group.iter().sum(),
                    batch_tokens: lengths.iter().flatten().sum(),
                    batch_sequences: lengths.iter().flatten().count(),
                    batch_groups: lengths.len(),
                    max_completion_length: case["max_completion_length"].as_u64().unwrap() as usize,
                };
                close(mode.token_weight(&counts), number(&case["weights"][g][t]), &case);
            }
        }
    }
}

#[test]
fn generalised_advantages() {
    for case in goldens("gae") {
        if case["name"] == "whitened" {
            let masks: Vec<Vec<bool>> = word(&case["mask"]);
            let kept = |values: &Value| -> Vec<Vec<f64>> {
                let rows = values.as_array().unwrap().iter().zip(&masks);
                rows.map(|(row, mask)| {
                    numbers(row).into_iter().zip(mask).filter(|(_, m)| **m).map(|(v, _)| v).collect()
                })
                .collect()
            };
            let ours = batch::whiten(&vec![kept(&case["rows"])]);
            let theirs = kept(&case["expected"]);
            ours[0].concat().iter().zip(theirs.concat()).for_each(|(a, b)| close(*a, b, &case));
            continue;
        }
        let (rewards, values) = (numbers(&case["rewards"]), numbers(&case["values"]));
        let gamma = number(&case["gamma"]);
        let of =
            |lambda: &str| generalised(&rewards, &values, Discount { gamma, lambda: number(&case[lambda]) });
        let returns: Vec<f64> = of("lambda_critic").iter().zip(&values).map(|(a, v)| a + v).collect();
        all_close(&of("lambda_policy"), &case["advantages"], &case);
        all_close(&returns, &case["returns"], &case);
    }
}

#[test]
fn value_losses() {
    for case in goldens("value_losses") {
        let [values, old, returns] = ["values", "old_values", "returns"].map(|key| numbers(&case[key]));
        let clip = case["clip"].as_f64();
        let ours: Vec<(f64, f64)> = (0..values.len())
            .map(|t| {
                value::token(
                    value::ValuePrediction { value: values[t], old: old[t], target: returns[t] },
                    clip,
                )
            })
            .collect();
        all_close(&ours.iter().map(|(loss, _)| *loss).collect::<Vec<_>>(), &case["losses"], &case);
        all_close(&ours.iter().map(|(_, slope)| *slope).collect::<Vec<_>>(), &case["gradient"], &case);
    }
}

#[test]
fn preferences() {
    for case in goldens("preferences") {
        let pair = |prefix: &str| PreferencePair {
            chosen: number(&case[format!("{prefix}chosen")]),
            rejected: number(&case[format!("{prefix}rejected")]),
        };
        let (loss, slopes) = match case["name"].as_str().unwrap() {
            "bradley_terry" => bradley_terry(pair(""), number(&case["margin"])),
            _ => word::<Preference>(&case).loss(pair(""), pair("reference_")),
        };
        close(loss, number(&case["loss"]), &case);
        close(slopes.chosen, number(&case["gradient_chosen"]), &case);
        close(slopes.rejected, number(&case["gradient_rejected"]), &case);
    }
}

/// A group as leased from the buffer, with two prompt tokens before each trajectory.
fn group(id: usize, members: &[Value]) -> Group {
    let trajectory = |(index, member): (usize, &Value)| {
        let behavior = numbers(&member["behavior"]);
        let tokens = 2 + behavior.len();
        let mut behavior_logprobs = vec![0.0; 2];
        behavior_logprobs.extend(behavior.iter().map(|p| *p as f32));
        assert!(behavior.iter().all(|p| f64::from(*p as f32) == *p), "a sampler records f32");
        let streams = SampleStreams {
            token_ids: vec![1; tokens],
            loss_mask: (0..tokens).map(|t| t >= 2).collect(),
            behavior_logprobs,
            versions: vec![VersionRun { version: PolicyVersion(0), len: tokens as u32 }],
            kept: None,
            experts: None,
            temperature: 1.0,
        };
        Trajectory {
            index: index as u32,
            sample: Sample::new(streams).unwrap(),
            turns: vec![Turn {
                completion: 2..tokens,
                stop: StopReason::StopToken,
                reward: None,
                prefill: Vec::new(),
            }],
            text: String::new(),
            score: Score {
                total: Some(number(&member["reward"])),
                correct: Some(number(&member["reward"]) > 0.5),
                ..Score::default()
            },
            branches: Vec::new(),
            baseline: false,
            role: None,
        }
    };
    let task = Task {
        id: TaskId(id as u64),
        prompt: Prompt::Text(String::new()),
        answer: None,
        columns: serde_json::Map::new(),
    };
    let trajectories = members.iter().enumerate().map(trajectory).collect();
    Group { id: GroupId(id as u64), task, trajectories }
}

/// A whole minibatch through the code of a step: rows, scores, loss inputs, objective.
#[test]
fn batches() {
    for case in goldens("batches") {
        let divergence = match &case["kl"] {
            Value::Null => KlPenalty::OFF,
            kl => KlPenalty {
                coef: number(&kl["coef"]),
                estimator: word(&kl["estimator"]),
                placement: KlPlacement::Loss,
            },
        };
        let algorithm = Algorithm {
            advantage: advantage(&case["advantage"]),
            loss: word(&case["loss"]),
            correction: word(&case["correction"]),
            aggregation: word(&case["aggregation"]),
            kl: divergence,
            entropy_coef: number(&case["entropy_coef"]),
            entropy_share: number(&case["entropy_share"]),
            nll_coef: number(&case["nll_coef"]),
            drop_zero_variance: word(&case["drop_zero_variance"]),
            proximal: Proximal::Recompute,
            ..Algorithm::grpo()
        };
        let groups: Vec<std::sync::Arc<Group>> = case["groups"]
            .as_array()
            .unwrap()
            .iter()
            .enumerate()
            .map(|(id, members)| std::sync::Arc::new(group(id, members.as_array().unwrap())))
            .collect();
        let length = case["max_completion_length"].as_u64().unwrap() as usize;
        let split = BatchSplit { minibatches: 1, max_completion_length: length };
        let batch = Batch::new(&groups, &algorithm, split, &[]);
        let scored = groups_to_score(&batch, &algorithm);
        let rows = batch.rows(|group| scored[group]);
        let members: Vec<&Value> =
            rows.iter().map(|row| &case["groups"][row.group][row.trajectory.unwrap()]).collect();
        let each = |key: &str| Some(members.iter().map(|member| numbers(&member[key])).collect());
        let [start_logprobs, reference_logprobs, entropy] = ["proximal", "reference", "entropy"].map(each);
        let scores = Scores { start_logprobs, reference_logprobs, entropy, ..Scores::default() };
        let inputs = loss_inputs(&batch, &rows, scores, &algorithm, PolicyVersion(0));
        let objective = PolicyObjective {
            algorithm: &algorithm,
            rows: &rows,
            inputs: &inputs,
            log_z: Vec::new(),
            critic: None,
            compares_sampler: true,
            bitwise: None,
            token_log: None,
        };
        let mut sums = TokenSums::default();
        let expected = |key: &str| -> Vec<Value> {
            let groups = case["expected"][key].as_array().unwrap();
            groups.iter().flat_map(|group| group.as_array().unwrap().clone()).collect()
        };
        let (by_logprob, by_entropy) = (expected("gradient"), expected("entropy_gradient"));
        for (i, member) in members.iter().enumerate() {
            let predictions: Vec<Predicted> = numbers(&member["current"])
                .into_iter()
                .zip(numbers(&member["entropy"]))
                .map(|(logprob, entropy)| Predicted { logprob, entropy, value: 0.0 })
                .collect();
            let ours = objective.gradients(i, &predictions, &mut sums);
            all_close(&ours.iter().map(|d| d.logprob).collect::<Vec<_>>(), &by_logprob[i], &case);
            all_close(&ours.iter().map(|d| d.entropy).collect::<Vec<_>>(), &by_entropy[i], &case);
        }
        close(sums.loss, number(&case["expected"]["loss"]), &case);
    }
}
