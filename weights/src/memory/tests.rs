//! One publisher and several subscribers, on threads where order matters.

use super::*;

const SOON: Duration = Duration::from_secs(20);

fn snapshot(version: u64) -> Snapshot {
    Snapshot::new(PolicyVersion(version), vec![version as f32; 64].into())
}

fn receipt(snapshot: &Snapshot) -> Receipt {
    let digest = Digest::of(&snapshot.values);
    Receipt { version: snapshot.version, digest, took: Duration::ZERO, stalled: Duration::ZERO }
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
fn other_weights_than_published_stop_everybody() {
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
    for version in [39, 40] {
        let error = publisher.publish(snapshot(version)).unwrap_err();
        assert!(matches!(error, WeightsError::NotNewer { newest: PolicyVersion(40), .. }));
    }
    publisher.publish(snapshot(41)).unwrap();
}

#[test]
fn who_is_behind_is_named() {
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
fn digests_are_kept_only_as_long_as_a_receipt_may_name_them() {
    let (publisher, hub) = hub();
    let subscriber = hub.subscribe("slow").unwrap();
    for version in 1..=5 {
        publisher.publish(snapshot(version)).unwrap();
    }
    subscriber.applied(receipt(&snapshot(4))).unwrap();
    assert_eq!(publisher.shared.state().unwrap().digests.len(), 2);
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
