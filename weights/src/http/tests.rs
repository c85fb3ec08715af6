//! Samplers that subscribe over real sockets to a server that comes and goes, and to one that lies.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use connect::{HttpClient, ServerAddress};
use futures_util::StreamExt;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use trajectory::PolicyVersion;

use super::remote::RemoteTransport;
use super::*;
use crate::{
    DeltaConfig, Digest, Dtype, Hub, HubConfig, HubPublisher, PublishConfig, Publisher, Receipt, Snapshot,
    Subscriber, WeightsError,
};

pub(super) const SOON: Duration = Duration::from_secs(20);
pub(super) const LEN: usize = 30_000;

/// A server on a port of its own, for as long as it lives.
pub(super) struct TestHub {
    tokio: Runtime,
    pub(super) address: SocketAddr,
    task: JoinHandle<()>,
}

impl TestHub {
    pub(super) fn start(router: Router) -> Self {
        Self::at(router, "127.0.0.1:0".parse().unwrap())
    }

    fn at(router: Router, address: SocketAddr) -> Self {
        let tokio =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        // Connections of a server that was stopped are still in the system's list for a while.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let (listener, address) = tokio.block_on(async {
            let listener = socket.listen(64).unwrap();
            let address = listener.local_addr().unwrap();
            (listener, address)
        });
        let task = tokio.spawn(async move { drop(axum::serve(listener, router).await) });
        Self { tokio, address, task }
    }

    pub(super) fn config(&self, name: &str) -> RemoteConfig {
        RemoteConfig {
            transport: RemoteTransport::Http,
            patience: SOON,
            ..RemoteConfig::new(format!("http://{}/", self.address), name)
        }
    }

    pub(super) fn connect(&self, name: &str) -> RemoteSubscriber {
        RemoteSubscriber::connect(self.config(name)).unwrap()
    }

    /// As if its process was killed: it sends nothing.
    fn stop(self) -> SocketAddr {
        self.task.abort();
        self.tokio.shutdown_timeout(Duration::from_secs(5));
        self.address
    }
}

pub(super) fn deltas(every: usize) -> PublishConfig {
    let full_every = NonZeroUsize::new(every).unwrap();
    PublishConfig { deltas: Some(DeltaConfig { full_every, compress: true }), ..PublishConfig::default() }
}

fn publisher(dtype: Dtype, config: PublishConfig) -> (HubPublisher, Hub) {
    let hub = Hub::new(HubConfig { dtype, ..HubConfig::default() });
    (HubPublisher::new(hub.clone(), config).unwrap(), hub)
}

/// Weights of which each version changes a few.
pub(super) fn values(version: u64) -> Vec<f32> {
    let last = |index: u64| (0..=version).rev().find(|v| index % 50 == v % 50).unwrap_or(0);
    (0..LEN as u64).map(|index| (last(index) * 1000 + index) as f32 * 0.01).collect()
}

pub(super) fn put(publisher: &HubPublisher, version: u64) {
    publisher.publish_values(PolicyVersion(version), &values(version)).unwrap();
}

pub(super) fn receipt(snapshot: &Snapshot) -> Receipt {
    let (version, digest, bytes) = (snapshot.version, Digest::of(&snapshot.values), snapshot.received.bytes);
    Receipt {
        version,
        digest,
        took: Duration::from_millis(3),
        stalled: Duration::from_micros(7),
        bytes,
        taken: bytes / 2,
    }
}

/// Applies it, and lets the hub know at once.
pub(super) fn apply(subscriber: &RemoteSubscriber, new: &Snapshot) {
    subscriber.applied(receipt(new)).unwrap();
    subscriber.flush().unwrap();
}

pub(super) fn next(subscriber: &RemoteSubscriber, after: Option<u64>) -> Arc<Snapshot> {
    subscriber.wait_newer(after.map(PolicyVersion), SOON).unwrap().expect("a version in time")
}

#[test]
fn versions_come_in_full_and_then_as_changes() {
    for dtype in Dtype::ALL {
        let (publisher, hub) = publisher(dtype, deltas(4));
        let served = TestHub::start(router(hub));
        let subscriber = served.connect("worker 1");
        assert!(subscriber.newest(None).unwrap().is_none());
        let mut kinds = Vec::new();
        let mut received = Vec::new();
        for version in 1..=9 {
            put(&publisher, version);
            let new = next(&subscriber, Some(version - 1));
            let expected = Snapshot::rounded(PolicyVersion(version), &values(version), dtype);
            assert_eq!((new.version, Digest::of(&new.values)), (expected.version, expected.digest()));
            assert_eq!(new.digest(), expected.digest());
            apply(&subscriber, &new);
            publisher.wait_applied(PolicyVersion(version), Duration::ZERO).unwrap();
            let cost = publisher.last_push().unwrap().unwrap();
            let expected = cost.delta_bytes.unwrap_or(cost.full_bytes);
            assert_eq!(new.received.bytes, expected, "{version}");
            kinds.push(cost.delta_bytes.is_none());
            // Some samplers hold on to what they got; it must not change under them.
            if version % 3 == 0 {
                received.push((new, version));
            }
        }
        assert_eq!(kinds, [true, false, false, false, true, false, false, false, true]);
        for (snapshot, version) in received {
            assert_eq!(
                Digest::of(&snapshot.values),
                Snapshot::rounded(snapshot.version, &values(version), dtype).digest()
            );
        }
        let lag = &publisher.lags().unwrap()[0];
        assert_eq!((&lag.subscriber[..], lag.versions), ("worker 1", 0));
        assert_eq!(lag.receipt.unwrap().stalled, Duration::from_micros(7));
    }
}

#[test]
fn a_subscriber_catches_up_by_deltas_or_in_full() {
    let (publisher, hub) = publisher(Dtype::Bf16, deltas(4));
    let served = TestHub::start(router(hub.clone()));
    let subscriber = served.connect("worker");
    put(&publisher, 1);
    next(&subscriber, None);
    let before = hub.bytes_sent().unwrap();
    for version in 2..=4 {
        put(&publisher, version);
    }
    let full = publisher.last_push().unwrap().unwrap().full_bytes;
    let new = next(&subscriber, Some(1));
    assert_eq!(new.version, PolicyVersion(4));
    assert!(new.received.bytes < full && hub.bytes_sent().unwrap() - before == new.received.bytes);
    for version in 5..=7 {
        put(&publisher, version);
    }
    let new = next(&subscriber, Some(4));
    assert_eq!((new.version, new.received.bytes), (PolicyVersion(7), full), "a new chain begins at 5");
    assert_eq!(Digest::of(&new.values), new.digest());
}

#[test]
fn shared_memory_is_used_where_it_can_be() {
    let directory = tempfile::tempdir().unwrap();
    let config = PublishConfig { shm: Some(directory.path().to_owned()), ..deltas(10) };
    let (publisher, hub) = publisher(Dtype::F32, config);
    let served = TestHub::start(router(hub.clone()));
    let connect = |name, transport| {
        let shared = directory.path().to_owned();
        RemoteSubscriber::connect(RemoteConfig { transport, shared, ..served.config(name) }).unwrap()
    };
    let subscribers =
        [("a", RemoteTransport::Any), ("b", RemoteTransport::Shm), ("c", RemoteTransport::Http)]
            .map(|(name, it)| connect(name, it));
    for version in 1..=6 {
        put(&publisher, version);
        for (subscriber, moved) in subscribers.iter().zip([false, false, true]) {
            let new = next(subscriber, Some(version - 1));
            assert_eq!(new.values[..], values(version)[..]);
            assert_eq!(new.received.bytes > 0, moved);
            apply(subscriber, &new);
        }
        publisher.wait_applied(PolicyVersion(version), Duration::ZERO).unwrap();
    }
    // What a server names elsewhere is not opened.
    let elsewhere = RemoteConfig { transport: RemoteTransport::Shm, ..served.config("elsewhere") };
    let error = RemoteSubscriber::connect(elsewhere).unwrap().wait_newer(None, SOON).unwrap_err();
    assert!(error.to_string().contains("no file of a publisher in /dev/shm"), "{error}");
    // Of another host the file cannot be opened.
    std::fs::remove_dir_all(directory.path()).unwrap();
    assert!(next(&connect("d", RemoteTransport::Any), None).received.bytes > 0);
    let error = connect("e", RemoteTransport::Shm).wait_newer(None, SOON).unwrap_err();
    assert!(error.to_string().contains("cannot open a file of the publisher"), "{error}");
}

#[test]
fn a_restarted_server_is_awaited_and_no_version_goes_back() {
    let (first, hub) = publisher(Dtype::F32, deltas(10));
    let served = TestHub::start(router(hub));
    let subscriber = served.connect("worker");
    put(&first, 7);
    let new = next(&subscriber, None);
    let address = served.stop();
    drop(first);
    // The receipt is kept.
    apply(&subscriber, &new);
    assert!(subscriber.wait_newer(Some(PolicyVersion(7)), Duration::from_millis(50)).unwrap().is_none());

    let (again, hub) = publisher(Dtype::F32, deltas(10));
    put(&again, 6);
    let _served = TestHub::at(router(hub), address);
    // It asks, and so the new server learns what it serves, and gives it nothing old.
    assert!(subscriber.wait_newer(Some(PolicyVersion(7)), Duration::from_secs(2)).unwrap().is_none());
    assert!(subscriber.wait_newer(None, Duration::from_millis(10)).unwrap().is_none());
    again.wait_applied(PolicyVersion(6), SOON).unwrap();
    put(&again, 7);
    again.wait_applied(PolicyVersion(7), Duration::ZERO).unwrap();
    put(&again, 8);
    let new = next(&subscriber, Some(7));
    assert_eq!(new.version, PolicyVersion(8));
    assert!(new.received.bytes < LEN as u64 * 4, "its weights are still a base for deltas");
    apply(&subscriber, &new);
    again.wait_applied(PolicyVersion(8), Duration::ZERO).unwrap();
}

#[test]
fn an_unreachable_hub_ends_the_wait_with_its_address() {
    let (_publisher, hub) = publisher(Dtype::F32, PublishConfig::default());
    let served = TestHub::start(router(hub));
    let config = RemoteConfig { patience: Duration::from_millis(100), ..served.config("worker 3") };
    let subscriber = RemoteSubscriber::connect(config.clone()).unwrap();
    let address = served.stop();
    let error = subscriber.wait_newer(None, SOON).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, WeightsError::Unreachable { .. }), "{text}");
    assert!(text.contains("worker 3") && text.contains(&address.to_string()), "{text}");
    assert!(matches!(RemoteSubscriber::connect(config), Err(WeightsError::Unreachable { .. })));
}

#[test]
fn a_restarted_worker_takes_over_its_name() {
    let (publisher, hub) = publisher(Dtype::F32, PublishConfig::default());
    let served = TestHub::start(router(hub));
    let (old, new) = (served.connect("worker"), served.connect("worker"));
    put(&publisher, 1);
    let taken = WeightsError::TakenOver { name: "worker".to_owned() };
    assert_eq!(old.wait_newer(None, SOON).unwrap_err(), taken);
    drop(old);
    apply(&new, &next(&new, None));
    publisher.wait_applied(PolicyVersion(1), Duration::ZERO).unwrap();
    drop(new);
    assert!(publisher.lags().unwrap().is_empty(), "it has unregistered");
    let error = RemoteSubscriber::connect(served.config("a/b")).unwrap_err();
    assert!(error.to_string().contains("bad_name"), "{error}");
}

#[test]
fn a_subscriber_with_other_weights_fails_alone() {
    let (publisher, hub) = publisher(Dtype::F32, PublishConfig::default());
    let served = TestHub::start(router(hub.clone()));
    let (liar, other) = (served.connect("liar"), served.connect("other"));
    put(&publisher, 1);
    let new = next(&liar, None);
    liar.applied(Receipt { digest: Digest::of(&[1.0]), ..receipt(&new) }).unwrap();
    let error = liar.wait_newer(Some(PolicyVersion(1)), SOON).unwrap_err();
    assert!(error.to_string().contains("liar serves weights"), "{error}");
    let left_out = hub.take_rejected().unwrap();
    assert!(matches!(left_out[0].error, WeightsError::Mismatch { .. }), "{left_out:?}");
    let error = liar.wait_newer(Some(PolicyVersion(1)), SOON).unwrap_err();
    assert!(error.to_string().contains("left_out"), "{error}");
    put(&publisher, 2);
    apply(&other, &next(&other, None));
    publisher.wait_applied(PolicyVersion(2), Duration::ZERO).unwrap();
}

#[test]
fn the_end_of_the_publisher_is_reported() {
    let (publisher, hub) = publisher(Dtype::F32, PublishConfig::default());
    let served = TestHub::start(router(hub));
    let subscriber = served.connect("orphan");
    put(&publisher, 3);
    drop(publisher);
    assert_eq!(next(&subscriber, None).version, PolicyVersion(3), "the last version can still be had");
    let gone = WeightsError::PublisherGone { newest: Some(PolicyVersion(3)) };
    assert_eq!(subscriber.wait_newer(Some(PolicyVersion(3)), SOON).unwrap_err(), gone);
}

/// Changes a byte of the weights in the first `times` answers of `route`.
pub(super) fn liar(hub: Hub, route: &'static str, times: usize) -> Router {
    let left = Arc::new(AtomicUsize::new(times));
    router(hub).layer(from_fn(move |request: Request, next: Next| {
        let (left, lies) = (Arc::clone(&left), request.uri().path().ends_with(route));
        async move {
            let answer: Response = next.run(request).await;
            let take = |left: usize| left.checked_sub(1);
            if !lies || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
                return answer;
            }
            let (head, body) = answer.into_parts();
            let mut bytes = Vec::new();
            let mut parts = body.into_data_stream();
            while let Some(part) = parts.next().await {
                bytes.extend_from_slice(&part.unwrap());
            }
            let middle = bytes.len() * 2 / 3;
            bytes[middle] ^= 0x10;
            Response::from_parts(head, Body::from(bytes))
        }
    }))
}

#[test]
fn damaged_changes_are_refused_and_fetched_in_full() {
    let (publisher, hub) = publisher(Dtype::Bf16, deltas(10));
    let served = TestHub::start(liar(hub, "/delta", 1));
    let subscriber = served.connect("worker");
    put(&publisher, 1);
    next(&subscriber, None);
    put(&publisher, 2);
    let new = next(&subscriber, Some(1));
    let cost = publisher.last_push().unwrap().unwrap();
    assert_eq!((new.version, new.received.bytes), (PolicyVersion(2), cost.full_bytes));
    assert_eq!(Digest::of(&new.values), new.digest());
    let refused = subscriber.take_refused().unwrap();
    let [error] = &refused[..] else { panic!("one was refused: {refused:?}") };
    assert!(error.to_string().contains(&format!("v2 ({})", new.digest())), "{error}");
    put(&publisher, 3);
    assert!(next(&subscriber, Some(2)).received.bytes < cost.full_bytes, "and then as usual");
}

#[test]
fn repeated_damage_ends_with_an_error() {
    for dtype in Dtype::ALL {
        let (publisher, hub) = publisher(dtype, PublishConfig::default());
        let served = TestHub::start(liar(hub, "/full", usize::MAX));
        let subscriber = served.connect("worker");
        put(&publisher, 1);
        let error = subscriber.wait_newer(None, SOON).unwrap_err();
        assert!(matches!(error, WeightsError::Corrupt { version: PolicyVersion(1), .. }), "{error}");
    }
}

#[test]
fn a_download_ends_when_its_subscriber_no_longer_waits() {
    let now = tokio::time::Instant::now();
    let part = axum::body::Bytes::from_static(b"weights");
    assert_eq!(routes::in_time(now + SOON, part.clone()).unwrap(), part);
    assert!(routes::in_time(now, part).is_err());
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let (_publisher, hub) = publisher(Dtype::F32, PublishConfig::default());
    let served = TestHub::start(router(hub));
    let url = format!("http://{}", served.address);
    let http = HttpClient::new(ServerAddress { url: &url, token: None, roots: None }).unwrap();
    let request = |method: &str, path: &str| http.request(method, &format!("/v1/weights/{path}"));
    let get = |path: &str| http.send(request("GET", path).body(()).unwrap(), SOON).unwrap().status();
    for path in ["full", "full?version=-1", "delta?from=x", "newest?name=a", "subscribers"] {
        let status = get(path).as_u16();
        assert!((400..500).contains(&status), "{path}: {status}");
    }
    for body in ["", "{}", "{\"name\": 3}", &"x".repeat(100_000)] {
        let request = request("POST", "subscribers").body(body).unwrap();
        let status = http.send(request, SOON).unwrap().status().as_u16();
        assert!((400..500).contains(&status), "{body:.10}: {status}");
    }
    assert_eq!(get("full?version=1").as_u16(), 410);
    let no_file = RemoteConfig { roots: Some(Path::new("/none.pem").to_owned()), ..served.config("x") };
    for config in [no_file, RemoteConfig { url: "no url".to_owned(), ..served.config("x") }] {
        let error = RemoteSubscriber::connect(config).unwrap_err();
        assert!(matches!(error, WeightsError::Refused { .. }), "{error}");
    }
}
