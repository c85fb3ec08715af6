//! Metrics for Prometheus, in the OpenMetrics text format. Invariant: labels are routes of this server and statuses of HTTP,
//! never text of a client, so the number of series is bounded.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::state::ServerState;
use crate::Stats;

/// Upper bounds of the histogram, seconds; an fsync takes 1 ms on a good disk, 50 ms on a bad one.
const BOUNDS: [f64; 12] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];

/// The label of a request that matches no route.
const NO_ROUTE: &str = "none";

/// Prefix of all names.
const PREFIX: &str = "rlrun_buffer";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    method: &'static str,
    route: String,
    status: u16,
}

/// All metrics that are counted between two scrapes.
#[derive(Debug)]
pub(crate) struct BufferMetrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    append: Histogram,
    /// Open connections.
    pub(super) connections: Gauge,
    /// Connections closed at once because the limit was reached.
    pub(super) refused_connections: Counter,
    /// Groups answered with `invalid`.
    pub(super) refused_groups: Counter,
}

impl Default for BufferMetrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Registry::with_prefix(PREFIX),
            requests: Family::default(),
            append: Histogram::new(BOUNDS),
            connections: Gauge::default(),
            refused_connections: Counter::default(),
            refused_groups: Counter::default(),
        };
        let Self { mut registry, requests, append, connections, refused_connections, refused_groups } =
            metrics;
        registry.register("requests", "Requests answered", requests.clone());
        let durable = "From the body of groups to the answer that they are durable";
        registry.register("append_seconds", durable, append.clone());
        registry.register("connections", "Open connections", connections.clone());
        let refused = "Connections closed at once because the limit was reached";
        registry.register("connections_refused", refused, refused_connections.clone());
        let invalid = "Groups that were not stored because they are invalid";
        registry.register("groups_refused", invalid, refused_groups.clone());
        Self { registry, requests, append, connections, refused_connections, refused_groups }
    }
}

impl BufferMetrics {
    /// The media type of [`BufferMetrics::text`].
    pub(super) const MEDIA_TYPE: &'static str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

    /// Records one request that stored groups, from its body to its answer.
    pub(super) fn appended(&self, started: Instant) {
        self.append.observe(started.elapsed().as_secs_f64());
    }

    /// The text that Prometheus scrapes; `None` while the buffer is not usable.
    pub(super) fn text(&self, stats: Option<&Stats>) -> String {
        let mut text = String::new();
        let mut scrape = Registry::with_prefix(PREFIX);
        let up = ConstGauge::new(u64::from(stats.is_some()));
        scrape.register("up", "1 if the buffer is usable", up);
        if let Some(stats) = stats {
            register_stats(&mut scrape, stats);
        }
        // Writing to a string cannot fail.
        let _ = encode_registry(&mut text, &self.registry);
        let _ = encode_registry(&mut text, &scrape);
        let _ = encode_eof(&mut text);
        text
    }
}

fn register_stats(registry: &mut Registry, stats: &Stats) {
    let count = |count: usize| count as u64;
    for (name, help, value) in [
        ("policy_version", "The policy version of the trainer", stats.policy_version.0),
        ("admitted_groups", "Groups with a slot and no token yet", count(stats.admitted)),
        ("claimed_groups", "Groups being generated, scored or written", count(stats.claimed)),
        ("finalized_groups", "Groups that can be leased", count(stats.finalized)),
        ("leased_groups", "Groups leased and not acknowledged", count(stats.leased)),
        ("leases", "Leases not acknowledged", count(stats.leases)),
        ("again_groups", "Groups queued for re-admission", count(stats.again)),
        ("oldest_age", "Versions between the oldest group and the next step", stats.oldest_age),
        ("slots", "Number of slots", count(stats.slots)),
        ("slots_free", "Slots free for a sampler with the newest version", count(stats.slots_free)),
        ("bytes", "Bytes of all stored groups", stats.bytes),
        ("max_bytes", "Maximum number of bytes stored", stats.max_bytes),
    ] {
        registry.register(name, help, ConstGauge::new(value));
    }
    for (name, help, value) in [
        ("dropped_stale", "Groups dropped as stale", stats.dropped_stale),
        ("evicted", "Groups evicted", stats.evicted),
        ("expired", "Leases and admissions that expired", stats.expired),
        ("quarantined", "Groups quarantined: they cannot be trained on", stats.quarantined),
    ] {
        registry.register(name, help, ConstCounter::new(value));
    }
}

fn known(method: &Method) -> &'static str {
    let known = [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::DELETE];
    let names = ["GET", "HEAD", "POST", "PUT", "DELETE"];
    known.iter().position(|known| known == method).map_or("other", |n| names[n])
}

/// Middleware of all routes: counts the request.
pub(crate) async fn count(State(shared): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = known(request.method());
    let response = next.run(request).await;
    let route = route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str).to_owned();
    let labels = RequestLabels { method, route, status: response.status().as_u16() };
    shared.metrics.requests.get_or_create(&labels).inc();
    response
}
