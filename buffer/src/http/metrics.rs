//! Counters for Prometheus, in its text format. Invariant: labels come from our routes and from HTTP's statuses, never from
//! what a client wrote, so there are only so many series.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;

use super::state::ServerState;
use crate::Stats;

/// Upper bounds of the histogram, seconds; an fsync of a good disk takes one, of a bad one fifty milliseconds.
const BOUNDS: [f64; 12] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];

/// The route of a request that fits none.
const NO_ROUTE: &str = "none";

/// Requests to one route, by method and status.
type RequestCounts = BTreeMap<(&'static str, u16), u64>;

/// Everything that is counted.
#[derive(Debug, Default)]
pub(crate) struct BufferMetrics {
    requests: Mutex<BTreeMap<String, RequestCounts>>,
    append: Histogram,
    /// Connections that are open.
    pub(super) connections: AtomicU64,
    /// Connections that were closed at once because there were too many.
    pub(super) refused_connections: AtomicU64,
    /// Groups that were answered with `invalid`.
    pub(super) refused_groups: AtomicU64,
}

#[derive(Debug, Default)]
struct Histogram {
    /// Not cumulative; the last one is for all above the bounds.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl BufferMetrics {
    /// One request that stored groups, from its body to its answer.
    pub(super) fn appended(&self, took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.append.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.append.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn answered(&self, route: &str, method: &Method, status: StatusCode) {
        let key = (known(method), status.as_u16());
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counts) = requests.get_mut(route) {
            *counts.entry(key).or_default() += 1;
        } else {
            requests.insert(route.to_owned(), BTreeMap::from([(key, 1)]));
        }
    }

    /// The text that Prometheus scrapes; without `stats` the buffer is not usable just now.
    pub(super) fn text(&self, stats: Option<&Stats>) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text, stats);
        text
    }

    fn write(&self, text: &mut String, stats: Option<&Stats>) -> std::fmt::Result {
        family(text, "rlrun_buffer_requests_total", "counter", "Requests answered.")?;
        for (route, counts) in &*self.requests.lock().unwrap_or_else(PoisonError::into_inner) {
            for ((method, status), count) in counts {
                let labels = format!("method=\"{method}\",route=\"{route}\",status=\"{status}\"");
                writeln!(text, "rlrun_buffer_requests_total{{{labels}}} {count}")?;
            }
        }
        self.append.write(text)?;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        single(text, "rlrun_buffer_connections", "gauge", "Open connections.", load(&self.connections))?;
        let refused = "Connections closed at once because there were too many.";
        single(
            text,
            "rlrun_buffer_connections_refused_total",
            "counter",
            refused,
            load(&self.refused_connections),
        )?;
        let invalid = "Groups that were not stored because they are invalid.";
        let refused = load(&self.refused_groups);
        single(text, "rlrun_buffer_groups_refused_total", "counter", invalid, refused)?;
        single(text, "rlrun_buffer_up", "gauge", "1 if the buffer is usable.", u64::from(stats.is_some()))?;
        stats.map_or(Ok(()), |stats| write_stats(text, stats))
    }
}

impl Histogram {
    fn write(&self, text: &mut String) -> std::fmt::Result {
        let name = "rlrun_buffer_append_seconds";
        family(text, name, "histogram", "From the body of groups to the answer that they are durable.")?;
        let mut below = 0;
        for (n, bucket) in self.buckets.iter().enumerate() {
            below += bucket.load(Ordering::Relaxed);
            let bound = BOUNDS.get(n).map_or("+Inf".to_owned(), f64::to_string);
            writeln!(text, "{name}_bucket{{le=\"{bound}\"}} {below}")?;
        }
        let seconds = Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed)).as_secs_f64();
        writeln!(text, "{name}_sum {seconds}\n{name}_count {below}")
    }
}

fn write_stats(text: &mut String, stats: &Stats) -> std::fmt::Result {
    let count = |count: usize| count as u64;
    for (name, kind, help, value) in [
        ("policy_version", "gauge", "The version that the trainer has.", stats.policy_version.0),
        ("admitted_groups", "gauge", "Groups with a slot but no token.", count(stats.admitted)),
        ("claimed_groups", "gauge", "Groups being generated, scored or written.", count(stats.claimed)),
        ("finalized_groups", "gauge", "Groups that can be leased.", count(stats.finalized)),
        ("leased_groups", "gauge", "Groups leased and not acknowledged.", count(stats.leased)),
        ("leases", "gauge", "Leases not acknowledged.", count(stats.leases)),
        ("again_groups", "gauge", "Groups first in line to be generated again.", count(stats.again)),
        ("dropped_stale_total", "counter", "Groups dropped over the bound.", stats.dropped_stale),
        ("evicted_total", "counter", "Groups evicted.", stats.evicted),
        ("expired_total", "counter", "Leases and admissions whose hold was over.", stats.expired),
        ("quarantined_total", "counter", "Groups set aside: they cannot be trained on.", stats.quarantined),
        ("oldest_age", "gauge", "Versions between the oldest group and the next step.", stats.oldest_age),
        ("slots", "gauge", "Slots in all.", count(stats.slots)),
        ("slots_free", "gauge", "Slots free for a sampler with the newest version.", count(stats.slots_free)),
        ("bytes", "gauge", "Bytes of all groups that are kept.", stats.bytes),
        ("max_bytes", "gauge", "Most bytes that may be kept.", stats.max_bytes),
    ] {
        single(text, &format!("rlrun_buffer_{name}"), kind, help, value)?;
    }
    Ok(())
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) -> std::fmt::Result {
    writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}")
}

fn single(text: &mut String, name: &str, kind: &str, help: &str, value: u64) -> std::fmt::Result {
    family(text, name, kind, help)?;
    writeln!(text, "{name} {value}")
}

fn known(method: &Method) -> &'static str {
    let known = [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::DELETE];
    let names = ["GET", "HEAD", "POST", "PUT", "DELETE"];
    known.iter().position(|known| known == method).map_or("other", |n| names[n])
}

/// In front of all routes.
pub(crate) async fn count(State(shared): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = request.method().clone();
    let response = next.run(request).await;
    let route = route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str);
    shared.metrics.answered(route, &method, response.status());
    response
}

/// Measures one request that stores groups.
#[derive(Debug)]
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}
