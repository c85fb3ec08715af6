//! Trees of relays over real sockets: versions go down them, and relays die, are late and lie.

use connect::{HttpClient, ServerAddress};

use super::super::routes::router;
use super::super::tests::{SOON, TestHub, apply, deltas, liar, next, put, receipt, values};
use super::*;
use crate::{Digest, Distribution, FallbackReason, HubPublisher, Publisher, RelayFallback};

/// A publisher whose hub is served; each node serves `fanout` others.
fn served(dtype: Dtype, fanout: usize, relay_wait: Duration) -> (HubPublisher, Hub, TestHub) {
    let hub = Hub::new(HubConfig { dtype, fanout, relay_wait, ..HubConfig::default() });
    let publisher = HubPublisher::new(hub.clone(), deltas(10)).unwrap();
    let server = TestHub::start(router(hub.clone()));
    (publisher, hub, server)
}

fn relay(server: &TestHub, name: &str, dtype: Dtype) -> RelaySubscriber {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    RelaySubscriber::start(server.config(name), RelayConfig { listener, url: None, dtype }).unwrap()
}

/// A relay that receives when a test asks for it, and whose address is `url`, with the hub that it fills.
fn puppet(server: &TestHub, name: &str, url: String) -> (RemoteSubscriber, Hub) {
    let hub = Hub::new(HubConfig::default());
    let address = RelayAddress { url, token: "token".to_owned() };
    let subscriber = RemoteSubscriber::connect_as(server.config(name), Some((address, hub.clone()))).unwrap();
    (subscriber, hub)
}

fn url(server: &TestHub) -> String {
    format!("http://{}", server.address)
}

fn soon(relay: &RelaySubscriber, after: u64) -> Arc<Snapshot> {
    relay.wait_newer(Some(PolicyVersion(after)), SOON).unwrap().expect("a version in time")
}

#[test]
fn a_dropped_relay_does_not_wait_for_a_silent_peer() {
    let (release, silent) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let _ = silent.recv();
    });
    end_within(thread, Duration::from_millis(10));
    drop(release);
}

/// The digest of a version as it is published.
fn digest(version: u64, dtype: Dtype) -> Digest {
    Snapshot::rounded(PolicyVersion(version), &values(version), dtype).digest()
}

/// Bytes that the last push takes.
fn bytes(publisher: &HubPublisher) -> u64 {
    let cost = publisher.last_push().unwrap().unwrap();
    cost.delta_bytes.unwrap_or(cost.full_bytes)
}

#[test]
fn the_hub_sends_each_version_to_its_children_alone() {
    for dtype in Dtype::ALL {
        let (publisher, hub, server) = served(dtype, 2, SOON);
        let relays: Vec<_> = (0..6).map(|n| relay(&server, &format!("relay {n}"), dtype)).collect();
        let leaves: Vec<_> = (0..3).map(|n| server.connect(&format!("leaf {n}"))).collect();
        let mut expected = 0;
        for version in 1..=5 {
            put(&publisher, version);
            expected += 2 * bytes(&publisher);
            for leaf in &leaves {
                let new = next(leaf, Some(version - 1));
                assert_eq!(
                    (new.version, Digest::of(&new.values)),
                    (PolicyVersion(version), digest(version, dtype))
                );
                assert_eq!(new.received.bytes, bytes(&publisher), "a leaf gets the same frames from a relay");
                apply(leaf, &new);
            }
            for relay in &relays {
                let new = soon(relay, version - 1);
                assert_eq!(Digest::of(&new.values), digest(version, dtype));
                relay.applied(receipt(&new)).unwrap();
            }
            publisher.wait_applied(PolicyVersion(version), SOON).unwrap();
            let sent = Distribution { bytes_sent: expected, relays: 6, fallbacks: 0 };
            assert_eq!(hub.distribution().unwrap(), sent, "version {version}");
        }
        drop(publisher);
        let gone = relays[0].wait_newer(Some(PolicyVersion(5)), SOON).unwrap_err();
        assert!(matches!(gone, WeightsError::PublisherGone { .. }), "{gone}");
        assert_eq!(soon(&relays[0], 4).version, PolicyVersion(5), "the last version can still be had");
    }
}

#[test]
fn a_relay_that_dies_is_replaced_by_the_hub() {
    let (publisher, hub, server) = served(Dtype::F32, 1, SOON);
    let (mut first, second) = (relay(&server, "first", Dtype::F32), relay(&server, "second", Dtype::F32));
    let leaf = server.connect("leaf");
    put(&publisher, 1);
    next(&leaf, None);
    assert_eq!(hub.bytes_sent().unwrap(), bytes(&publisher), "a chain from the hub");
    first.stop_serving();
    for version in 2..=3 {
        let before = hub.bytes_sent().unwrap();
        put(&publisher, version);
        assert_eq!(Digest::of(&next(&leaf, Some(version - 1)).values), digest(version, Dtype::F32));
        assert_eq!(soon(&first, version - 1).version, PolicyVersion(version));
        assert_eq!(hub.bytes_sent().unwrap() - before, 2 * bytes(&publisher), "its child asks the hub");
        // Not asked again for a while.
        assert_eq!(hub.distribution().unwrap().fallbacks, 1);
    }
    let reported = hub.take_fallbacks().unwrap();
    let [RelayFallback { subscriber, relay, version, reason, .. }] = &reported[..] else {
        panic!("one was reported: {reported:?}")
    };
    assert_eq!((&subscriber[..], &relay[..], version.0), ("second", "first", 2));
    assert_eq!(*reason, FallbackReason::Unreachable);
    assert!(hub.take_fallbacks().unwrap().is_empty());
    // One that leaves is no parent any more.
    drop(first);
    put(&publisher, 4);
    next(&leaf, Some(3));
    assert_eq!((soon(&second, 3).version.0, hub.distribution().unwrap().relays), (4, 1));
}

#[test]
fn damaged_bytes_of_a_relay_are_never_applied() {
    for (route, versions) in [("/full", 1..=1), ("/delta", 2..=2)] {
        let (publisher, hub, server) = served(Dtype::F32, 1, SOON);
        let passes_on = Hub::new(HubConfig::default());
        let lying = TestHub::start(liar(passes_on.clone(), route, usize::MAX));
        let address = RelayAddress { url: url(&lying), token: "token".to_owned() };
        let config = server.config("liar");
        let relay = RemoteSubscriber::connect_as(config, Some((address, passes_on))).unwrap();
        let leaf = server.connect("leaf");
        for version in 1..=2 {
            put(&publisher, version);
            next(&relay, Some(version - 1));
            let new = next(&leaf, Some(version - 1));
            assert_eq!(Digest::of(&new.values), digest(version, Dtype::F32));
            apply(&leaf, &new);
            assert_eq!(new.received.bytes, bytes(&publisher), "the base of its deltas is kept");
        }
        let reported = hub.take_fallbacks().unwrap();
        let damaged: Vec<_> = reported.iter().map(|report| (report.version.0, report.reason)).collect();
        let expected: Vec<_> = versions.map(|version| (version, FallbackReason::Damaged)).collect();
        assert_eq!(damaged, expected, "{route}: {reported:?}");
        assert!(leaf.take_refused().unwrap().is_empty(), "the hub sent nothing damaged");
    }
}

/// Frames without a fault, of other weights.
#[test]
fn a_relay_with_weights_of_its_own_is_refused() {
    let (publisher, hub, server) = served(Dtype::F32, 1, SOON);
    let foreign = Hub::new(HubConfig::default());
    let foreign_publisher = HubPublisher::new(foreign.clone(), deltas(10)).unwrap();
    let other = TestHub::start(router(foreign));
    let (relay, _) = puppet(&server, "foreign", url(&other));
    let leaf = server.connect("leaf");
    put(&publisher, 1);
    foreign_publisher.publish_values(PolicyVersion(1), &values(7)).unwrap();
    next(&relay, None);
    assert_eq!(Digest::of(&next(&leaf, None).values), digest(1, Dtype::F32));
    let reported = hub.take_fallbacks().unwrap();
    assert_eq!(reported[0].reason, FallbackReason::Damaged, "{reported:?}");
}

#[test]
fn a_late_relay_is_not_waited_for() {
    // One that has not received the version, and one that does not even answer.
    let empty = TestHub::start(router(Hub::new(HubConfig::default())));
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_url = format!("http://{}", silent.local_addr().unwrap());
    for late in [url(&empty), silent_url] {
        let (publisher, hub, server) = served(Dtype::Bf16, 1, Duration::from_millis(30));
        let (relay, _) = puppet(&server, "late", late);
        let leaf = server.connect("leaf");
        put(&publisher, 1);
        assert_eq!(Digest::of(&next(&leaf, None).values), digest(1, Dtype::Bf16));
        let reported = hub.take_fallbacks().unwrap();
        assert_eq!(reported[0].reason, FallbackReason::Slow, "{reported:?}");
        drop(relay);
    }
}

#[test]
fn a_relay_serves_members_alone_and_a_hub_takes_only_urls() {
    let (publisher, _hub, server) = served(Dtype::F32, 4, SOON);
    let relay = relay(&server, "relay", Dtype::F32);
    put(&publisher, 1);
    soon(&relay, 0);
    let address = format!("http://{}", relay.address());
    for token in [None, Some("guessed")] {
        let http = HttpClient::new(ServerAddress { url: &address, token, roots: None }).unwrap();
        for path in ["full?version=1", "delta?from=0", "newest?name=a&connection=1", "lags"] {
            let request = http.request("GET", &format!("/v1/weights/{path}")).body(()).unwrap();
            let status = http.send(request, SOON).unwrap().status().as_u16();
            assert!([401, 404].contains(&status), "{path}: {status}");
        }
    }
    let address = RelayAddress { url: "file:///etc/passwd".to_owned(), token: "t".to_owned() };
    let hub = Hub::new(HubConfig::default());
    let error = RemoteSubscriber::connect_as(server.config("x"), Some((address, hub))).unwrap_err();
    assert!(error.to_string().contains("bad_relay"), "{error}");
}
