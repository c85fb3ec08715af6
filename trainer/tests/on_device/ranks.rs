//! Several ranks on devices make the step of one, as threads and as processes.

use std::sync::Arc;
use std::time::Duration;

use model::on_device::DeviceDtype;
use model::{Layout, Parameters, ThreadPool};
use trainer::{CollectivePlace, Leader, Learner, LearnerConfig, OptimizerPlace, follow};
use trajectory::{PolicyVersion, Sample, SampleStreams, VersionRun};

use super::{advance, assert_same, batch, exchanging, on_device, placed, steps, values};
use crate::{LEARNER, config, learner, samples};

#[test]
fn several_ranks_make_the_step_of_one_rank() {
    ranks_make_the_step_of_one(|dtype, collective| {
        dtype == DeviceDtype::F32 || collective == CollectivePlace::Device
    });
}

#[test]
#[ignore = "takes a minute; three of the four combinations are above"]
fn ranks_make_the_step_of_one_in_all_combinations() {
    ranks_make_the_step_of_one(|_, _| true);
}

fn ranks_make_the_step_of_one(includes: impl Fn(DeviceDtype, CollectivePlace) -> bool) {
    for dtype in [DeviceDtype::F32, DeviceDtype::Bf16] {
        // Several ranks sum in another order: a change of the last bit of an f32 can change its bf16 rounding.
        let tolerance = if dtype == DeviceDtype::F32 { 1e-5 } else { 2e-3 };
        for collective in [CollectivePlace::Host, CollectivePlace::Device] {
            if !includes(dtype, collective) {
                continue;
            }
            let (expected, norms, sums) = steps(learner(exchanging(collective, on_device(dtype))), 2);
            let run = |world, zero, microbatch_tokens| {
                let settings = LearnerConfig { world, zero, microbatch_tokens, ..on_device(dtype) };
                let found = steps(learner(exchanging(collective, settings)), 2);
                let what = format!(
                    "{dtype:?}, {collective:?}, {world} ranks, stage {zero}, {microbatch_tokens} tokens"
                );
                assert_same(&found.0[1], &expected[1], tolerance, &what);
                assert_same(&found.1, &norms, 10.0 * tolerance, &what);
                assert_eq!(found.2.tokens, sums.tokens, "{what}");
                found
            };
            run(3, 3, 20);
            // One of the ranks has no rows.
            run(2, 1, 100_000);
            run(2, 3, 100_000);
            run(2, 1, 20);
            assert!(run(2, 2, 20) == run(2, 3, 20), "{dtype:?}: gathered layers are those that are there");
        }
    }
}

#[test]
fn ranks_of_a_device_group_update_their_shards_on_their_devices() {
    let all = 4 * Layout::new(&config()).len() as u64;
    for (zero, computed) in [(1, 2 * all), (3, 0)] {
        let settings = LearnerConfig { world: 2, zero, ..on_device(DeviceDtype::F32) };
        let [mut meeting, mut apart] = [CollectivePlace::Device, CollectivePlace::Host]
            .map(|collective| learner(exchanging(collective, settings.clone())));
        advance(&mut meeting, 1);
        advance(&mut apart, 1);
        // Master weights and rounded shards once over all ranks; and all weights per rank below stage 3.
        assert_eq!(meeting.device_bytes(), [2 * all, 2 * all + computed], "stage {zero}");
        assert_eq!(apart.device_bytes()[0], 0, "moments are on the host");
        assert!(meeting.whole().unwrap().is_none(), "each owns its part");
        assert_eq!(meeting.device_weights().is_some(), zero == 1);
        let owned: usize = meeting.owned().unwrap().iter().map(|(_, values)| values.len()).sum();
        assert_eq!(4 * owned as u64, all);
        let (ours, theirs) = (meeting.optimizer().unwrap(), apart.optimizer().unwrap());
        assert_eq!((ours.updates(), ours.states().len()), (1, theirs.states().len()));
    }
}

#[test]
fn ranks_without_a_device_group_report_the_reason() {
    let settings = LearnerConfig { world: 2, ..placed(DeviceDtype::F32, OptimizerPlace::Host, &LEARNER) };
    let parameters = || Parameters::random(&config(), 5);
    let wished = exchanging(CollectivePlace::Device, settings.clone());
    let error = Learner::new(wished, config(), parameters(), None).unwrap_err().to_string();
    assert!(error.contains("update weights on the host") && error.contains("trainer.collective"), "{error}");
    let learner = Learner::new(settings, config(), parameters(), None).unwrap();
    assert!(learner.whole().unwrap().is_some(), "through the host they can");
}

#[test]
fn a_lost_rank_ends_the_step_on_devices() {
    let groups = batch();
    let rows = samples(&groups);
    let settings = LearnerConfig { world: 2, zero: 2, microbatch_tokens: 30, ..on_device(DeviceDtype::F32) };
    let settings = LearnerConfig { wait: Duration::from_secs(20), ..settings };
    let mut ranks = collective::threads::group(2, settings.wait).into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let leader = Leader::new(Arc::new(first));
    let follower = std::thread::spawn(move || follow(Arc::new(second), Arc::new(ThreadPool::single())));
    let parameters = Parameters::random(&config(), 5);
    let mut learner = leader.learner(settings, config(), parameters, None, None).unwrap();
    // A token outside the vocabulary ends the rank of its row. The other rank reports the loss of that rank.
    let beyond = Sample::new(SampleStreams {
        token_ids: vec![1, 1_000_000],
        loss_mask: vec![false, true],
        behavior_logprobs: vec![0.0, -1.0],
        versions: vec![VersionRun { version: PolicyVersion(0), len: 2 }],
        kept: None,
        experts: None,
        temperature: 1.0,
    })
    .unwrap();
    let rows: Vec<&Sample> = rows.into_iter().chain([&beyond]).collect();
    let error = trainer::supervised::imitate(&mut learner, &rows, 1e-2).unwrap_err().to_string();
    drop(learner);
    drop(leader);
    let other = follower.join().unwrap().unwrap_err().to_string();
    let said = [&error, &other].into_iter().filter(|text| text.contains("1000000")).count();
    assert_eq!(said, 1, "one names the token, the other the rank that is gone: {error}; {other}");
}

#[test]
fn every_process_of_a_trainer_has_a_device() {
    let groups = batch();
    let rows = samples(&groups);
    for (zero, collective) in [
        (1, CollectivePlace::Host),
        (3, CollectivePlace::Host),
        (2, CollectivePlace::Auto),
        (3, CollectivePlace::Auto),
    ] {
        let settings = LearnerConfig { world: 2, zero, microbatch_tokens: 30, ..on_device(DeviceDtype::F32) };
        let settings = exchanging(collective, settings);
        let parameters = || Parameters::random(&config(), 5);
        let step = |learner: &mut Learner| {
            let stepped = trainer::supervised::imitate(learner, &rows, 1e-2).unwrap();
            (stepped, values(learner), learner.optimizer().unwrap().into_owned())
        };
        let mut threads = Learner::new(settings.clone(), config(), parameters(), None).unwrap();
        let expected = step(&mut threads);
        let mut ranks = collective::threads::group(2, settings.wait).into_iter();
        let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
        let leader = Leader::new(Arc::new(first));
        let follower = std::thread::spawn(move || follow(Arc::new(second), Arc::new(ThreadPool::single())));
        let mut learner = leader.learner(settings, config(), parameters(), None, None).unwrap();
        let found = step(&mut learner);
        drop(learner);
        drop(leader);
        follower.join().unwrap().unwrap();
        assert!(found == expected, "stage {zero}, {collective:?}");
    }
}
