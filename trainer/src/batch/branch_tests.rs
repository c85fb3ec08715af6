//! Tests of episodes with branches. Invariant: an episode weighs the same, however many rows it is divided into.

use std::sync::Arc;

use trajectory::{
    Branch, Group, PolicyVersion, Sample, SampleStreams, StopReason, Trajectory, Turn, VersionRun,
};

use super::Batch;
use super::tests::{groups, inputs_with_gradient, split};
use crate::algorithm::Algorithm;
use crate::loss::Aggregation;
use crate::loss_inputs::{LossInputs, Scores};

/// The episode of `whole` as two rows: its first `at` trained tokens, and the rest after the same prompt and the first
/// part as context. Its reward and its turns stay the same.
fn cut(whole: &Trajectory, at: usize) -> Trajectory {
    let streams: SampleStreams = whole.sample.clone().into();
    let end = 2 + at;
    let first = SampleStreams {
        token_ids: streams.token_ids[..end].to_vec(),
        loss_mask: streams.loss_mask[..end].to_vec(),
        behavior_logprobs: streams.behavior_logprobs[..end].to_vec(),
        versions: vec![VersionRun { version: PolicyVersion(0), len: end as u32 }],
        ..streams.clone()
    };
    let mut second = streams;
    second.loss_mask[..end].fill(false);
    second.behavior_logprobs[..end].fill(0.0);
    let turn =
        |completion| Turn { completion, stop: StopReason::StopToken, reward: None, prefill: Vec::new() };
    let tokens = second.token_ids.len();
    Trajectory {
        sample: Sample::new(first).unwrap(),
        turns: vec![turn(2..end)],
        branches: vec![Branch { sample: Sample::new(second).unwrap(), turns: vec![turn(end..tokens)] }],
        ..whole.clone()
    }
}

proptest::proptest! {
    /// A row that is cut in two by hand has the same weights and advantages, under every aggregation.
    #[test]
    fn rows_of_an_episode_weigh_as_much_as_one_row(
        lengths in proptest::collection::vec(1..6_usize, 2..5), at in 0..6_usize, cut_one in 0..5_usize,
    ) {
        let outcomes: Vec<_> = lengths.iter().enumerate().map(|(i, n)| (Some(i as f64), *n)).collect();
        let whole = groups(&[&outcomes, &[(Some(0.0), 2), (Some(1.0), 3)]]);
        let mut branched = Group::clone(&whole[0]);
        let (n, at) = (cut_one % lengths.len(), at.min(lengths[cut_one % lengths.len()]));
        branched.trajectories[n] = cut(&branched.trajectories[n], at);
        let branched = vec![Arc::new(branched), Arc::clone(&whole[1])];
        for aggregation in [
            Aggregation::TokenMean,
            Aggregation::SequenceMean,
            Aggregation::PromptMean,
            Aggregation::Constant,
            Aggregation::SequenceSum,
        ] {
            let mut of_tokens: Vec<Vec<(f64, f64)>> = Vec::new();
            for groups in [&whole, &branched] {
                let algorithm = Algorithm { aggregation, ..Algorithm::grpo() };
                let batch = Batch::new(groups, &algorithm, split(1), &[]);
                let all = inputs_with_gradient(&batch, &algorithm, Scores::default());
                let tokens = |t: &LossInputs| -> Vec<(f64, f64)> {
                    t.weights.iter().copied().zip(t.advantages.iter().copied()).collect()
                };
                of_tokens.push(all.iter().flat_map(tokens).collect());
            }
            proptest::prop_assert_eq!(&of_tokens[0], &of_tokens[1], "{:?}", aggregation);
        }
    }
}

/// Values and penalties of the rows of an episode follow each other, so that its return is one.
#[test]
fn a_critic_sees_the_branches_of_an_episode_as_one_stream() {
    let whole = groups(&[&[(Some(1.0), 4), (Some(0.0), 3)]]);
    let mut branched = Group::clone(&whole[0]);
    branched.trajectories[0] = cut(&branched.trajectories[0], 1);
    let values = |rows: &[&[f64]]| Some(rows.iter().map(|row| row.to_vec()).collect());
    let one = Scores { values: values(&[&[0.1, 0.2, 0.3, 0.4], &[0.5; 3]]), ..Scores::default() };
    let two = Scores { values: values(&[&[0.1], &[0.2, 0.3, 0.4], &[0.5; 3]]), ..Scores::default() };
    let algorithm = Algorithm::ppo();
    let of = |groups: &[Arc<Group>], scores| -> Vec<(f64, f64)> {
        let batch = Batch::new(groups, &algorithm, split(1), &[]);
        let all = inputs_with_gradient(&batch, &algorithm, scores);
        all.iter().flat_map(|t| t.advantages.iter().copied().zip(t.returns.iter().copied())).collect()
    };
    assert_eq!(of(&whole, one), of(&[Arc::new(branched)], two));
}
