//! Numbers of the service for Prometheus.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::ServiceShared;
use super::registry::ModelState;

/// Labels of a metric of one engine.
type OfEngine = Vec<(String, String)>;

/// All metrics, in the text format.
pub(super) fn text(shared: &ServiceShared) -> String {
    let mut metrics = Registry::with_prefix("rlrun_training");
    let mut number = |name: &str, help: &str, value: u64| {
        let gauge: Gauge<u64, AtomicU64> = Gauge::default();
        gauge.set(value);
        metrics.register(name, help, gauge);
    };
    {
        let registry = shared.registry();
        let loaded = registry.models.values().filter(|entry| !matches!(entry.state, ModelState::Unloaded));
        let waiting: usize = registry.models.values().map(|entry| entry.calls.waiting()).sum();
        number("sessions", "Sessions of clients", registry.sessions.len() as u64);
        number("models_loaded", "Models that are loaded", loaded.count() as u64);
        number("models_known", "Models, loaded or saved", registry.models.len() as u64);
        number("requests_open", "Requests that have not ended", registry.futures.open() as u64);
        number("outcome_bytes", "Memory of outcomes that are kept", registry.futures.bytes() as u64);
        number("requests_waiting", "Requests of models that wait for their turn", waiting as u64);
        number("numbers_waiting", "Numbers of data that wait for their pass", registry.queued_numbers as u64);
    }
    let hosts = {
        let table = shared.samplers();
        number("sampling_sessions", "Sampling sessions", table.len() as u64);
        table.hosts()
    };
    let family = |_| Family::<OfEngine, Gauge<u64, AtomicU64>>::default();
    let [waiting, running, adapters, sampled] = [(); 4].map(family);
    for host in hosts {
        let (labels, status) = (vec![("engine".to_owned(), host.name().to_owned())], host.status());
        waiting.get_or_create(&labels).inc_by(status.waiting as u64);
        running.get_or_create(&labels).inc_by(status.running as u64);
        adapters.get_or_create(&labels).inc_by(status.adapters as u64);
        sampled.get_or_create(&labels).inc_by(status.counts.sampled_tokens);
    }
    metrics.register("engine_waiting", "Sequences that wait for an engine", waiting);
    metrics.register("engine_running", "Sequences that an engine decodes", running);
    metrics.register("engine_adapters", "Adapters that an engine serves", adapters);
    metrics.register("engine_sampled_tokens", "Tokens that an engine has sampled", sampled);
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &metrics);
    text
}
