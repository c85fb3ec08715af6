//! A relay: a subscriber that passes every version on to others, as SHARDCAST does (INTELLECT-2, arXiv 2505.07291).
//!
//! A thread receives versions, however long the sampler takes to apply them, and a server of its own hub sends them: the newest
//! in full, or the deltas that led to it. The sampler takes the newest from memory.
//!
//! Invariant: nothing is passed on before its digest equals the one that the run's hub announced. A relay stores the newest
//! version and, while the next is received, that one. It announces nothing and takes no receipts.

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use connect::listener::{AcceptedConnection, ConnectionLimits, accept_connections, answer_requests};
use hyper_util::service::TowerToHyperService;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use trajectory::PolicyVersion;

use super::remote::{RemoteConfig, RemoteSubscriber, RemoteTransport};
use super::routes::frames;
use super::wire::WeightsProblem;
use crate::{Dtype, Hub, HubConfig, Receipt, RelayAddress, Snapshot, Subscriber, WeightsError};

/// Longest wait for a newer version before the thread looks for a stop.
const LOOK_UP: Duration = Duration::from_millis(500);
/// How long a dropped relay waits for the thread that receives.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// Time between two looks whether the thread has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// How long the server has to end its answers after a stop.
const STOP: Duration = Duration::from_secs(1);
/// Bytes of a token.
const TOKEN: usize = 32;
/// What bounds the connections to a relay, each of which a subscriber keeps open.
const LIMITS: ConnectionLimits = ConnectionLimits {
    connections: 512,
    head_read: Duration::from_secs(10),
    write_stall: Duration::from_secs(30),
    stop: Duration::from_millis(100),
};

/// Where and what a relay serves.
#[derive(Debug)]
pub struct RelayConfig {
    /// A socket that listens.
    pub listener: TcpListener,
    /// URL by which other subscribers reach it; `None`: `http://` and the address of the listener.
    pub url: Option<String>,
    /// Precision of the weights, which is that of the run's hub.
    pub dtype: Dtype,
}

/// A subscriber that is a relay. Dropping it unsubscribes and ends its server.
pub struct RelaySubscriber {
    upstream: Arc<RemoteSubscriber>,
    received: Arc<ReceivedVersions>,
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    server: RelayServer,
}

/// The newest received version, for the sampler.
#[derive(Debug, Default)]
struct ReceivedVersions {
    state: Mutex<NewestReceived>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct NewestReceived {
    snapshot: Option<Arc<Snapshot>>,
    /// Why no newer one will be received.
    failure: Option<WeightsError>,
}

/// The server; it ends with this.
struct RelayServer {
    /// Dropping it stops the server.
    stop: Option<oneshot::Sender<()>>,
    runtime: Option<Runtime>,
}

impl RelaySubscriber {
    /// Subscribes, and passes versions on from the first one.
    ///
    /// # Errors
    /// As [`RemoteSubscriber::connect`]; a system that gives no thread, socket or random bytes.
    pub fn start(config: RemoteConfig, relay: RelayConfig) -> Result<Self, WeightsError> {
        let name = config.name.clone();
        let failed = |reason: String| WeightsError::Relay { name: name.clone(), reason };
        let system = |error: std::io::Error| failed(error.to_string());
        let address = relay.listener.local_addr().map_err(system)?;
        let mut secret = [0; TOKEN];
        getrandom::fill(&mut secret).map_err(|error| failed(error.to_string()))?;
        let token = blake3::Hash::from(secret).to_string();
        let url = relay.url.unwrap_or_else(|| format!("http://{address}"));
        let hub = Hub::new(HubConfig { dtype: relay.dtype, ..HubConfig::default() });
        let server = RelayServer::start(relay.listener, relay_router(hub.clone(), &token)).map_err(system)?;
        // A sampler on the host of the run has to receive what it passes on, too.
        let config = RemoteConfig { transport: RemoteTransport::Http, ..config };
        let upstream = RemoteSubscriber::connect_as(config, Some((RelayAddress { url, token }, hub)))?;
        let (upstream, received) = (Arc::new(upstream), Arc::new(ReceivedVersions::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let (from, to, ends) = (Arc::clone(&upstream), Arc::clone(&received), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("relay".to_owned());
        let thread = thread.spawn(move || to.fill(&from, &ends)).map_err(system)?;
        Ok(Self { upstream, received, address, stop, thread: Some(thread), server })
    }

    /// The address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends its server, as if its host was cut off.
    #[cfg(test)]
    fn stop_serving(&mut self) {
        self.server.end();
    }
}

impl Subscriber for RelaySubscriber {
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        self.received.wait_newer(after, wait)
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        self.upstream.applied(receipt)
    }
}

impl Drop for RelaySubscriber {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.server.end();
        self.thread.take().into_iter().for_each(|thread| end_within(thread, ENDS_WITHIN));
    }
}

/// Waits for the end of a thread that was asked to stop. Later it reads from a peer that is silent, and ends when that read does.
fn end_within(thread: JoinHandle<()>, limit: Duration) {
    let deadline = Instant::now() + limit;
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    // A panic of it was printed.
    drop(thread.join());
}

impl fmt::Debug for RelaySubscriber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelaySubscriber")
            .field("upstream", &self.upstream)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl ReceivedVersions {
    /// Receives versions until `stop` is set or `from` fails.
    fn fill(&self, from: &RemoteSubscriber, stop: &AtomicBool) {
        let mut after = None;
        while !stop.load(Ordering::Relaxed) {
            let next = from.wait_newer(after, LOOK_UP);
            let failed = next.is_err();
            let Ok(mut state) = self.state() else { return };
            match next {
                Ok(Some(snapshot)) => {
                    after = Some(snapshot.version);
                    state.snapshot = Some(snapshot);
                }
                Ok(None) => {}
                Err(error) => state.failure = Some(error),
            }
            drop(state);
            self.changed.notify_all();
            if failed {
                return;
            }
        }
    }

    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        let deadline = Instant::now() + wait;
        let mut state = self.state()?;
        loop {
            if let Some(newest) = state.snapshot.as_ref().filter(|newest| Some(newest.version) > after) {
                return Ok(Some(Arc::clone(newest)));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match &state.failure {
                Some(error) => return Err(error.clone()),
                None if left.is_zero() => return Ok(None),
                None => {}
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.map_err(|_| WeightsError::Poisoned)?.0;
        }
    }

    fn state(&self) -> Result<MutexGuard<'_, NewestReceived>, WeightsError> {
        self.state.lock().map_err(|_| WeightsError::Poisoned)
    }
}

impl RelayServer {
    fn start(listener: TcpListener, router: Router) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("relay-server")
            .enable_all()
            .build()?;
        listener.set_nonblocking(true)?;
        let entered = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)?;
        drop(entered);
        let (stop, stopped) = oneshot::channel::<()>();
        let answer = move |accepted: Option<AcceptedConnection>| {
            let AcceptedConnection { stream, permit, watcher, .. } = accepted?;
            let routes = TowerToHyperService::new(router.clone());
            Some(async move {
                answer_requests(stream, watcher, LIMITS.head_read, routes).await;
                drop(permit);
            })
        };
        let stopped = async { drop(stopped.await) };
        runtime.spawn(accept_connections(listener, LIMITS, stopped, async || {}, answer));
        Ok(Self { stop: Some(stop), runtime: Some(runtime) })
    }

    fn end(&mut self) {
        drop(self.stop.take());
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP);
        }
    }
}

impl Drop for RelayServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// The routes of a relay, for callers with its token.
fn relay_router(hub: Hub, token: &str) -> Router {
    // Digests are compared in constant time.
    let known = blake3::hash(format!("Bearer {token}").as_bytes());
    frames(hub).layer(from_fn(move |request: Request, next: Next| async move {
        let given = request.headers().get(AUTHORIZATION).map(|value| blake3::hash(value.as_bytes()));
        if given == Some(known) { next.run(request).await } else { unauthorized() }
    }))
}

fn unauthorized() -> Response {
    let detail = "the token is not that of this relay: ask the run for its relays".to_owned();
    WeightsProblem::new(401, "unauthorized", detail).into_response()
}

#[cfg(test)]
mod tests;
