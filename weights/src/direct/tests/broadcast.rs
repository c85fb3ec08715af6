//! Broadcasts from one owner or several to samplers that come, go and die.

use super::super::nccl::{NcclConfig, NcclPublisher, NcclSubscriber, PushLead, PushOwner};
use super::super::round::PushPlan;
use super::*;

fn config(deadline: Duration) -> NcclConfig {
    // Several buckets, the last one short.
    NcclConfig { bucket_bytes: 4096, deadline, grace: Duration::from_secs(2), attempts: 4 }
}

fn nccl(deadline: Duration) -> NcclPublisher<bf16> {
    NcclPublisher::new(Hub::new(HubConfig::default()), &emulated(), config(deadline))
}

/// Serves versions as they come until there are no more; which they were.
fn serves<T: Storage + PartialEq>(sampler: &NcclSubscriber<T>) -> Vec<u64> {
    let mut serving: Option<DeviceWeights<T>> = None;
    let mut served = Vec::new();
    loop {
        match sampler.wait_newer(serving.as_ref().map(|weights| weights.version), SOON) {
            Ok(Some(new)) => {
                assert!(
                    emulated().download(new.values.all()).unwrap() == values::<T>(new.version.0),
                    "not the weights of {}",
                    new.version
                );
                applied(sampler, &new);
                sampler.flush().unwrap();
                served.push(new.version.0);
                if let Some(before) = serving.replace(new) {
                    sampler.give_back(before.values);
                }
            }
            Err(WeightsError::PublisherGone { .. }) => return served,
            other => panic!("{other:?}"),
        }
    }
}

fn wait_for(hub: &Hub, names: &[&str]) {
    let of = |there: &[SubscriberId]| there.iter().map(|caller| caller.name.clone()).collect::<Vec<_>>();
    let there = hub.wait_receivers(Instant::now(), SOON, |there| of(there) == names);
    assert_eq!(of(&there.unwrap()), names);
}

#[test]
fn a_version_is_broadcast_to_all_samplers_and_again_to_late_ones() {
    let publisher = nccl(SOON);
    let hub = publisher.hub().clone();
    let (_server, url) = serve(hub.clone());
    publish_from(&emulated(), &publisher, 1).unwrap();
    std::thread::scope(|scope| {
        let far = NcclSubscriber::<bf16>::connect(RemoteConfig::new(url, "far"), &emulated()).unwrap();
        let far = scope.spawn(move || serves(&far));
        wait_for(&hub, &["far"]);
        let trained = emulated().upload(&values::<bf16>(1)).unwrap();
        assert!(publisher.resend(trained.all()).unwrap(), "the first had no receiver");
        assert!(!publisher.resend(trained.all()).unwrap(), "everybody has it");
        publisher.wait_applied(PolicyVersion(1), SOON).unwrap();
        let near = NcclSubscriber::<bf16>::within(&hub, "near", &emulated()).unwrap();
        let near = scope.spawn(move || serves(&near));
        wait_for(&hub, &["far", "near"]);
        assert!(publisher.resend(trained.all()).unwrap());
        for version in 2..=4 {
            publisher.wait_applied(PolicyVersion(version - 1), SOON).unwrap();
            publish_from(&emulated(), &publisher, version).unwrap();
            assert_eq!(publisher.last_push().unwrap().unwrap().attempts, 1);
        }
        publish_from(&emulated(), &publisher, 3).unwrap();
        publisher.wait_applied(PolicyVersion(4), SOON).unwrap();
        drop(publisher);
        assert_eq!(far.join().unwrap(), [1, 2, 3, 4]);
        assert_eq!(near.join().unwrap(), [1, 2, 3, 4], "nothing twice");
    });
}

#[test]
fn a_sampler_that_dies_in_the_middle_of_a_push_is_left_out_of_the_next_attempt() {
    // `joins`: it gets one bucket of several. Otherwise it does not even come.
    for joins in [true, false] {
        let publisher = nccl(if joins { SOON } else { SHORT });
        let hub = publisher.hub().clone();
        std::thread::scope(|scope| {
            let good = NcclSubscriber::<bf16>::within(&hub, "good", &emulated()).unwrap();
            let dying = HubConnection::here(&hub, "dying").unwrap();
            assert!(dying.next_notice(After::Round(0), Instant::now()).unwrap().is_none());
            let dies = scope.spawn(move || {
                let notice = dying.next_notice(After::Round(0), Instant::now() + SOON).unwrap().unwrap();
                let round = notice.direct.round.unwrap();
                assert_eq!(round.members.iter().map(|m| &m.name[..]).collect::<Vec<_>>(), ["dying", "good"]);
                if joins {
                    let device = emulated();
                    let group =
                        device::DeviceGroup::join(&device, &round.id(0).unwrap(), 1, 3, round.deadline())
                            .unwrap();
                    let mut bucket = device.zeros::<bf16>(2048).unwrap();
                    group.broadcast(0, bucket.all_mut()).unwrap();
                }
                // As if its process was killed: it sends nothing and stays registered.
                std::mem::forget(dying);
            });
            let serving = scope.spawn(move || {
                let served = serves(&good);
                (served, good.take_failed().unwrap())
            });
            wait_for(&hub, &["dying", "good"]);
            publish_from(&emulated(), &publisher, 1).unwrap();
            assert_eq!(publisher.last_push().unwrap().unwrap().attempts, 2);
            dies.join().unwrap();
            while !hub.lags().unwrap().iter().any(|lag| lag.subscriber == "good" && lag.receipt.is_some()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let behind = publisher.wait_applied(PolicyVersion(1), Duration::ZERO).unwrap_err();
            assert!(behind.to_string().contains("dying has applied none"), "{behind}");
            drop(publisher);
            let (served, failed) = serving.join().unwrap();
            assert_eq!(served, [1]);
            assert!(failed.len() == 1 && failed[0].contains("rank 1"), "{failed:?}");
        });
    }
}

#[test]
fn no_member_waits_for_a_sampler_that_has_ended() {
    let publisher = nccl(10 * SOON);
    let hub = publisher.hub().clone();
    let (_server, url) = serve(hub.clone());
    let connect = || NcclSubscriber::<bf16>::connect(RemoteConfig::new(&url, "far"), &emulated()).unwrap();
    std::thread::scope(|scope| {
        let first = connect();
        assert!(first.newest(None).unwrap().is_none());
        let pushing = scope.spawn(|| publish_from(&emulated(), &publisher, 1));
        // Its process is killed when the push waits for it.
        let watcher = HubConnection::here(&hub, "watcher").unwrap();
        watcher.next_notice(After::Version(None), Instant::now() + SOON).unwrap().unwrap();
        std::mem::forget(first);
        hub.forget("far");
        pushing.join().unwrap().unwrap();
    });
    assert_eq!(publisher.last_push().unwrap().unwrap().attempts, 2);
    std::thread::scope(|scope| {
        let again = connect();
        let again = scope.spawn(move || serves(&again));
        wait_for(&hub, &["far"]);
        let trained = emulated().upload(&values::<bf16>(1)).unwrap();
        assert!(publisher.resend(trained.all()).unwrap(), "it goes by the name of one that was sent it");
        publisher.wait_applied(PolicyVersion(1), SOON).unwrap();
        publish_from(&emulated(), &publisher, 2).unwrap();
        drop(publisher);
        assert_eq!(again.join().unwrap(), [1, 2]);
    });
}

#[test]
fn several_owners_send_their_shards() {
    let hub = Hub::new(HubConfig::default());
    let lead = Arc::new(PushLead::<f32>::new(hub.clone(), &emulated(), config(SOON)));
    // One shard is empty.
    let cuts = [0..1500, 1500..1500, 1500..LEN];
    let (plans, barrier) = (Mutex::new(Vec::new()), Barrier::new(cuts.len()));
    std::thread::scope(|scope| {
        let sampler = NcclSubscriber::<f32>::within(&hub, "sampler", &emulated()).unwrap();
        let serving = scope.spawn(move || serves(&sampler));
        wait_for(&hub, &["sampler"]);
        let owners = cuts.iter().enumerate().map(|(index, cut)| {
            let lead = Arc::clone(&lead);
            let (plans, barrier, cuts, hub) = (&plans, &barrier, &cuts, &hub);
            scope.spawn(move || {
                let mut owner = PushOwner::<f32>::new(&emulated(), index);
                for version in 1..=3 {
                    if index == 0 {
                        let plan = lead.plan(PolicyVersion(version), cuts).unwrap();
                        *plans.lock().unwrap() = plan.to_bytes();
                    }
                    barrier.wait();
                    let plan = PushPlan::from_bytes(&plans.lock().unwrap()).unwrap();
                    assert_eq!(plan.members(), ["sampler"]);
                    let shard = emulated().upload(&values::<f32>(version)[cut.clone()]).unwrap();
                    let sent = owner.send(&plan, shard.all()).unwrap();
                    assert_eq!(sent, digest(&emulated(), shard.all()).unwrap());
                    barrier.wait();
                    if index == 0 {
                        let all = values::<f32>(version);
                        let of = |cut: &std::ops::Range<usize>| Digest::of(&all[cut.clone()]);
                        lead.done(&plan, &cuts.each_ref().map(of)).unwrap();
                        hub.wait_applied(PolicyVersion(version), SOON).unwrap();
                    }
                    barrier.wait();
                }
            })
        });
        owners.collect::<Vec<_>>().into_iter().for_each(|owner| owner.join().unwrap());
        drop(lead);
        assert_eq!(serving.join().unwrap(), [1, 2, 3]);
    });
}

/// The deadline is longer than the test may take: waiting for it fails.
#[test]
fn owners_do_not_wait_for_one_that_has_failed() {
    let hub = Hub::new(HubConfig::default());
    let lead = PushLead::<f32>::new(hub.clone(), &emulated(), config(Duration::from_secs(3600)));
    let cuts = [0..1024, 1024..LEN];
    let all = values::<f32>(1);
    std::thread::scope(|scope| {
        let sampler = NcclSubscriber::<f32>::within(&hub, "sampler", &emulated()).unwrap();
        let serving = scope.spawn(move || serves(&sampler));
        wait_for(&hub, &["sampler"]);
        let mut owners = [0, 1].map(|index| PushOwner::<f32>::new(&emulated(), index).watching(hub.clone()));
        let mut plan = lead.plan(PolicyVersion(1), &cuts).unwrap();
        for wrong in [Some(1), Some(0), None] {
            let sent = std::thread::scope(|scope| {
                let sends = owners.iter_mut().zip(&cuts).enumerate().map(|(index, (owner, cut))| {
                    let end = if wrong == Some(index) { cut.end - 1 } else { cut.end };
                    let shard = emulated().upload(&all[cut.start..end]).unwrap();
                    let plan = &plan;
                    scope.spawn(move || owner.send(plan, shard.all()))
                });
                sends.collect::<Vec<_>>().into_iter().map(|send| send.join().unwrap()).collect::<Vec<_>>()
            });
            if let Some(wrong) = wrong {
                let other = sent[1 - wrong].as_ref().unwrap_err().to_string();
                assert!(other.contains(&format!("owner {wrong} has failed")), "{other}");
                plan = lead.again(&plan).unwrap();
            } else {
                lead.done(&plan, &sent.into_iter().map(Result::unwrap).collect::<Vec<_>>()).unwrap();
            }
        }
        hub.wait_applied(PolicyVersion(1), SOON).unwrap();
        drop(lead);
        assert_eq!(serving.join().unwrap(), [1]);
    });
}

#[test]
fn a_plan_of_other_weights_is_refused() {
    let hub = Hub::new(HubConfig::default());
    let lead = PushLead::<f32>::new(hub, &emulated(), config(SOON));
    let plan = lead.plan(PolicyVersion(1), &[0..10, 10..30]).unwrap();
    let shard = emulated().zeros::<f32>(10).unwrap();
    for (index, cut) in [(0, 0..9), (1, 0..10), (2, 0..10)] {
        let error = PushOwner::<f32>::new(&emulated(), index).send(&plan, shard.view(cut)).unwrap_err();
        assert!(matches!(error, WeightsError::OtherWay { .. }), "{error}");
    }
    let narrow = emulated().zeros::<bf16>(10).unwrap();
    assert!(PushOwner::<bf16>::new(&emulated(), 0).send(&plan, narrow.all()).is_err());
    assert!(PushOwner::<f32>::new(&emulated(), 0).send(&plan, shard.all()).is_ok());
    assert!(PushPlan::from_bytes(b"{}").is_err());
}
