//! One publisher and several subscribers, on threads where order matters.

use super::*;
use crate::memory::hub;
use crate::{HubPublisher, Publisher, Subscriber};

const SOON: Duration = Duration::from_secs(20);

fn snapshot(version: u64) -> Snapshot {
    Snapshot::new(PolicyVersion(version), vec![version as f32; 64].into())
}

fn receipt(snapshot: &Snapshot) -> Receipt {
    let digest = Digest::of(&snapshot.values);
    let none = Duration::ZERO;
    Receipt { version: snapshot.version, digest, took: none, stalled: none, bytes: 0, taken: 0 }
}

#[test]
fn subscribers_see_versions_go_up_and_all_reach_the_last() {
    let (publisher, hub) = hub();
    let last = 200;
    std::thread::scope(|scope| {
        for index in 0..3 {
            let subscriber = hub.subscribe(format!("sampler {index}")).unwrap();
            scope.spawn(move || {
                let mut served = PolicyVersion(0);
                while served.0 < last {
                    let new = subscriber.wait_newer(Some(served), SOON).unwrap().expect("a version in time");
                    assert!(new.version > served);
                    assert_eq!(new.values[0], new.version.0 as f32);
                    subscriber.applied(receipt(&new)).unwrap();
                    served = new.version;
                }
            });
        }
        for version in 1..=last {
            publisher.publish(snapshot(version)).unwrap();
        }
        // A subscriber that has left is not waited for.
        publisher.wait_applied(PolicyVersion(last), SOON).unwrap();
    });
    assert!(publisher.lags().unwrap().is_empty());
}

#[test]
fn weights_other_than_published_stop_all_subscribers() {
    let (publisher, hub) = hub();
    let (liar, other) = (hub.subscribe("liar").unwrap(), hub.subscribe("other").unwrap());
    publisher.publish(snapshot(1)).unwrap();
    let wrong = Receipt { version: PolicyVersion(1), ..receipt(&snapshot(2)) };
    let error = liar.applied(wrong).unwrap_err();
    assert!(matches!(&error, WeightsError::Mismatch { subscriber, .. } if subscriber == "liar"), "{error}");
    assert_eq!(publisher.publish(snapshot(2)).unwrap_err(), error);
    assert_eq!(publisher.wait_applied(PolicyVersion(0), SOON).unwrap_err(), error);
    assert_eq!(other.wait_newer(Some(PolicyVersion(1)), SOON).unwrap_err(), error);
}

#[test]
fn a_version_that_does_not_exist_stops_the_run() {
    let (publisher, hub) = hub();
    let subscriber = hub.subscribe("stray").unwrap();
    publisher.publish(snapshot(1)).unwrap();
    let error = subscriber.applied(receipt(&snapshot(7))).unwrap_err();
    assert!(matches!(error, WeightsError::NeverPublished { version: PolicyVersion(7), .. }));
    assert_eq!(publisher.publish(snapshot(2)).unwrap_err(), error);
}

#[test]
fn a_subscriber_does_not_go_back() {
    let (publisher, hub) = hub();
    let (fast, _slow) = (hub.subscribe("fast").unwrap(), hub.subscribe("slow").unwrap());
    for version in [1, 2] {
        publisher.publish(snapshot(version)).unwrap();
    }
    fast.applied(receipt(&snapshot(2))).unwrap();
    assert!(matches!(fast.applied(receipt(&snapshot(1))), Err(WeightsError::WentBack { .. })));
}

#[test]
fn versions_only_go_up_from_wherever_the_run_starts() {
    let (publisher, _hub) = hub();
    publisher.publish(snapshot(40)).unwrap();
    let error = publisher.publish(snapshot(39)).unwrap_err();
    assert!(matches!(error, WeightsError::NotNewer { newest: PolicyVersion(40), .. }));
    publisher.publish(snapshot(41)).unwrap();
}

#[test]
fn subscribers_behind_are_named() {
    let (publisher, hub) = hub();
    let subscribers = ["a", "b", "c"].map(|name| hub.subscribe(name).unwrap());
    assert_eq!(hub.subscribe("b").unwrap_err(), WeightsError::NameTaken { name: "b".to_owned() });
    publisher.publish(snapshot(1)).unwrap();
    subscribers[0].applied(receipt(&snapshot(1))).unwrap();
    publisher.publish(snapshot(2)).unwrap();
    subscribers[2].applied(receipt(&snapshot(2))).unwrap();
    let error = publisher.wait_applied(PolicyVersion(2), Duration::ZERO).unwrap_err().to_string();
    assert!(
        error.contains("v2 was not applied by all within 0.0 s: a is at v1, b has applied none;"),
        "{error}"
    );
    let versions: Vec<u64> = publisher.lags().unwrap().iter().map(|lag| lag.versions).collect();
    assert_eq!(versions, [1, 2, 0]);
}

#[test]
fn a_version_that_is_published_again_must_be_equal_and_none_goes_back() {
    let (publisher, hub) = hub();
    let subscriber = hub.subscribe("sampler").unwrap();
    for version in [5, 6, 7] {
        publisher.publish(snapshot(version)).unwrap();
    }
    subscriber.applied(receipt(&snapshot(7))).unwrap();
    publisher.publish(snapshot(5)).unwrap();
    publisher.publish_values(PolicyVersion(6), &snapshot(6).values).unwrap();
    assert!(subscriber.newest(Some(PolicyVersion(7))).unwrap().is_none());
    assert_eq!(subscriber.newest(None).unwrap().unwrap().version, PolicyVersion(7));
    let other = Snapshot::new(PolicyVersion(6), vec![0.5; 64].into());
    let error = publisher.publish(other).unwrap_err();
    assert!(matches!(&error, WeightsError::Republished { version: PolicyVersion(6), .. }), "{error}");
    publisher.publish(snapshot(8)).unwrap();
}

/// A hub after a restart of its process, and a sampler of before it.
struct RestartedHub {
    publisher: HubPublisher,
    hub: Hub,
    caller: SubscriberId,
}

/// A restarted hub whose sampler served `version`.
fn restarted(version: u64) -> RestartedHub {
    let (publisher, hub) = hub();
    let caller = SubscriberId { name: "worker".to_owned(), connection: 7 };
    hub.accept(&caller, hub.life() - 1, receipt(&snapshot(version))).unwrap();
    RestartedHub { publisher, hub, caller }
}

#[test]
fn versions_applied_before_a_restart_are_compared_when_published_again() {
    let RestartedHub { publisher, hub, caller } = restarted(7);
    publisher.publish(snapshot(5)).unwrap();
    publisher.wait_applied(PolicyVersion(5), Duration::ZERO).unwrap();
    assert!(
        hub.newest(&caller, After::Version(Some(PolicyVersion(7)))).unwrap().is_none(),
        "no version decreases"
    );
    publisher.publish(snapshot(7)).unwrap();
    publisher.wait_applied(PolicyVersion(7), Duration::ZERO).unwrap();

    let RestartedHub { publisher, hub, .. } = restarted(7);
    publisher.publish(snapshot(6)).unwrap();
    publisher.publish(Snapshot::new(PolicyVersion(7), vec![0.5; 64].into())).unwrap();
    let left_out = hub.take_rejected().unwrap();
    assert!(
        matches!(&left_out[..], [RejectedSubscriber { error: WeightsError::Republished { who, .. }, .. }] if who == "worker"),
        "{left_out:?}"
    );
    assert!(publisher.lags().unwrap().is_empty(), "the run goes on without it");
}

#[test]
fn a_process_with_false_receipts_is_rejected_and_the_run_continues() {
    let (publisher, hub) = hub();
    let inside = hub.subscribe("sampler 0").unwrap();
    publisher.publish(snapshot(1)).unwrap();
    inside.applied(receipt(&snapshot(1))).unwrap();
    let life = hub.life();
    let of = |version| Receipt { version: PolicyVersion(version), ..receipt(&snapshot(9)) };
    // Another digest, versions that were never published, of this life and of none.
    let lies = [(life, of(1)), (life, of(7)), (life, of(u64::MAX)), (life - 1, of(u64::MAX))];
    for (n, (life, lie)) in lies.into_iter().enumerate() {
        let liar = hub.connect("liar".to_owned(), true).unwrap();
        let error = hub.accept(&liar, life, lie).unwrap_err();
        let left_out = [RejectedSubscriber { subscriber: "liar".to_owned(), error }];
        assert_eq!(hub.take_rejected().unwrap(), left_out, "lie {n}");
        let gone = WeightsError::Rejected { name: "liar".to_owned() };
        assert_eq!(hub.newest(&liar, After::Version(None)).unwrap_err(), gone);
        assert_eq!(hub.accept(&liar, hub.life(), receipt(&snapshot(1))).unwrap_err(), gone);
        assert_eq!(publisher.lags().unwrap().len(), 1, "it is not counted");
    }
    // A receipt of a former life is compared when its version is published again.
    let liar = hub.connect("liar".to_owned(), true).unwrap();
    hub.accept(&liar, life - 1, of(2)).unwrap();
    publisher.publish(snapshot(2)).unwrap();
    assert_eq!(hub.take_rejected().unwrap().len(), 1);
    inside.applied(receipt(&snapshot(2))).unwrap();
    publisher.wait_applied(PolicyVersion(2), Duration::ZERO).unwrap();
    // After a restart it is registered again.
    let honest = hub.connect("liar".to_owned(), true).unwrap();
    hub.accept(&honest, life, receipt(&snapshot(2))).unwrap();
    // A false receipt within this process still stops the run.
    inside.applied(Receipt { version: PolicyVersion(2), ..receipt(&snapshot(1)) }).unwrap_err();
    assert!(matches!(publisher.lags().unwrap_err(), WeightsError::Mismatch { .. }));
}

#[test]
fn no_subscriber_replaces_a_sampler_of_this_process() {
    let (publisher, hub) = hub();
    let inside = hub.subscribe("sampler 0").unwrap();
    publisher.publish(snapshot(1)).unwrap();
    let taken = WeightsError::NameTaken { name: "sampler 0".to_owned() };
    assert_eq!(hub.connect("sampler 0".to_owned(), true).unwrap_err(), taken);
    assert_eq!(hub.remote_caller("sampler 0".to_owned(), clock()).unwrap_err(), taken);
    // No hub gives such connections out, and counting on from them would not end well.
    for connection in [u64::MAX, u64::MAX - 1] {
        let error = hub.remote_caller("worker".to_owned(), connection).unwrap_err();
        assert!(matches!(error, WeightsError::BadConnection { .. }), "{error}");
    }
    let error = hub.remote_caller("x".repeat(10_000), 1).unwrap_err();
    assert!(matches!(&error, WeightsError::BadName { name, .. } if name.len() == 128), "{error}");
    hub.forget("sampler 0");
    inside.applied(receipt(&snapshot(1))).unwrap();
    inside.applied(Receipt { version: PolicyVersion(1), ..receipt(&snapshot(2)) }).unwrap_err();
    assert!(matches!(publisher.lags().unwrap_err(), WeightsError::Mismatch { .. }), "it was never a guest");
}

#[test]
fn a_connection_that_the_hub_issued_is_valid_after_the_clock_stepped_back() {
    let (_publisher, hub) = hub();
    hub.state().unwrap().last_connection = clock() + 2 * CLOCK_SKEW;
    let SubscriberId { name, connection } = hub.connect("worker".to_owned(), true).unwrap();
    hub.remote_caller(name.clone(), connection).unwrap();
    let error = hub.remote_caller(name, connection + 1).unwrap_err();
    assert!(matches!(error, WeightsError::BadConnection { .. }), "{error}");
}

#[test]
fn the_later_subscriber_of_a_name_keeps_it() {
    let (publisher, hub) = hub();
    let old = hub.connect("worker".to_owned(), true).unwrap();
    publisher.publish(snapshot(1)).unwrap();
    hub.accept(&old, hub.life(), receipt(&snapshot(1))).unwrap();
    let new = hub.connect("worker".to_owned(), true).unwrap();
    let taken = WeightsError::TakenOver { name: "worker".to_owned() };
    assert_eq!(hub.newest(&old, After::Version(None)).unwrap_err(), taken);
    assert_eq!(hub.accept(&old, hub.life(), receipt(&snapshot(1))).unwrap_err(), taken);
    hub.leave(&old);
    assert_eq!(publisher.lags().unwrap().len(), 1, "the new one is still there");
    // It is asked what it serves, not what its predecessor did.
    let error = publisher.wait_applied(PolicyVersion(1), Duration::ZERO).unwrap_err();
    assert!(error.to_string().contains("worker has applied none"), "{error}");
    hub.accept(&new, hub.life(), receipt(&snapshot(1))).unwrap();
    publisher.wait_applied(PolicyVersion(1), Duration::ZERO).unwrap();
    for name in ["", "a/b", "caf\u{e9}", &"x".repeat(200)] {
        assert!(matches!(hub.connect(name.to_owned(), true), Err(WeightsError::BadName { .. })), "{name}");
    }
}

#[test]
fn a_silent_subscriber_is_removed() {
    let hub = Hub::new(HubConfig { hold: Duration::from_millis(20), ..HubConfig::default() });
    let publisher = HubPublisher::new(hub.clone(), crate::PublishConfig::default()).unwrap();
    let here = hub.subscribe("here").unwrap();
    let away = hub.connect("away".to_owned(), true).unwrap();
    publisher.publish(snapshot(1)).unwrap();
    hub.accept(&away, hub.life(), receipt(&snapshot(1))).unwrap();
    publisher.publish(snapshot(2)).unwrap();
    here.applied(receipt(&snapshot(2))).unwrap();
    // It ends when the hold is over, long before the wait is.
    publisher.wait_applied(PolicyVersion(2), 10 * SOON).unwrap();
    assert_eq!(hub.served(&away).unwrap(), None);
    // A subscriber that calls again is registered again.
    hub.accept(&away, hub.life(), receipt(&snapshot(2))).unwrap();
    assert_eq!(hub.served(&away).unwrap(), Some(PolicyVersion(2)));
}

#[test]
fn a_receipt_counts_once_the_published_digest_is_there() {
    let hub = Hub::new(HubConfig::default());
    let caller = hub.connect("quick".to_owned(), true).unwrap();
    let new = Arc::new(snapshot(1));
    hub.announce(PublishedVersion::Host(Arc::clone(&new), None)).unwrap();
    hub.accept(&caller, hub.life(), receipt(&new)).unwrap();
    assert!(hub.wait_applied(PolicyVersion(1), Duration::ZERO).is_err());
    hub.digested(PolicyVersion(1), new.digest()).unwrap();
    hub.wait_applied(PolicyVersion(1), Duration::ZERO).unwrap();

    hub.announce(PublishedVersion::Host(Arc::new(snapshot(2)), None)).unwrap();
    hub.accept(&caller, hub.life(), Receipt { version: PolicyVersion(2), ..receipt(&new) }).unwrap();
    hub.digested(PolicyVersion(2), snapshot(2).digest()).unwrap();
    let left_out = hub.take_rejected().unwrap();
    assert!(matches!(left_out[0].error, WeightsError::Mismatch { .. }), "{left_out:?}");
    assert!(hub.lags().unwrap().is_empty());
}

#[test]
fn a_subscriber_learns_that_the_publisher_is_gone() {
    let (publisher, hub) = hub();
    let subscriber = hub.subscribe("orphan").unwrap();
    publisher.publish(snapshot(3)).unwrap();
    drop(publisher);
    assert!(
        subscriber.newest(Some(PolicyVersion(2))).unwrap().is_some(),
        "the last version can still be had"
    );
    let gone = WeightsError::PublisherGone { newest: Some(PolicyVersion(3)) };
    assert_eq!(subscriber.wait_newer(Some(PolicyVersion(3)), SOON).unwrap_err(), gone);
    assert!(gone.to_string().contains("the newest version is v3"));
}
