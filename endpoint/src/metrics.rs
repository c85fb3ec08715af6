//! Metrics under vLLM's names, in the text format of OpenMetrics, so that dashboards made for vLLM show this endpoint.
//!
//! Invariant: labels are the name of the model and reasons that this crate names, never text of a client, so the number of
//! series is bounded.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use rollout::requests::QueueStatus;

/// Upper bounds of times, seconds.
const SECONDS: [f64; 14] =
    [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0];
/// Upper bounds of lengths, tokens.
const TOKENS: [f64; 12] =
    [1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 50000.0, 200_000.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabels {
    finished_reason: &'static str,
}

/// What is counted between two scrapes.
#[derive(Debug)]
pub(crate) struct EndpointMetrics {
    registry: Registry,
    model: String,
    success: Family<ReasonLabels, Counter>,
    /// Prompt tokens of requests.
    pub(crate) prompt_tokens: Counter,
    /// Tokens sent to clients.
    pub(crate) generation_tokens: Counter,
    /// Requests that ended because their client left.
    pub(crate) disconnected: Counter,
    /// Repeated requests that got an answer that was made before.
    pub(crate) replayed: Counter,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    queued: Histogram,
    prompt_length: Histogram,
    completion_length: Histogram,
}

impl EndpointMetrics {
    /// The media type of [`Self::text`].
    pub(crate) const MEDIA_TYPE: &'static str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

    /// For a model called `model`.
    pub(crate) fn new(model: &str) -> Self {
        let seconds = || Histogram::new(SECONDS);
        let tokens = || Histogram::new(TOKENS);
        let mut metrics = Self {
            registry: labelled(model),
            model: model.to_owned(),
            success: Family::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            disconnected: Counter::default(),
            replayed: Counter::default(),
            first_token: seconds(),
            between_tokens: seconds(),
            whole: seconds(),
            queued: seconds(),
            prompt_length: tokens(),
            completion_length: tokens(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("vllm:request_success", "Completions that ended", self.success.clone());
        for (name, help, counter) in [
            ("vllm:prompt_tokens", "Prompt tokens of requests", &self.prompt_tokens),
            ("vllm:generation_tokens", "Tokens sampled for requests", &self.generation_tokens),
            ("rlrun:requests_disconnected", "Requests whose client left", &self.disconnected),
            ("rlrun:requests_replayed", "Repeated requests that got the first answer", &self.replayed),
        ] {
            registry.register(name, help, counter.clone());
        }
        for (name, help, histogram) in [
            ("vllm:time_to_first_token_seconds", "From the request to the first token", &self.first_token),
            ("vllm:inter_token_latency_seconds", "Between tokens of a completion", &self.between_tokens),
            ("vllm:e2e_request_latency_seconds", "From the request to its last token", &self.whole),
            ("vllm:request_queue_time_seconds", "In the queue of the sampler", &self.queued),
            ("vllm:request_prompt_tokens", "Tokens per prompt", &self.prompt_length),
            ("vllm:request_generation_tokens", "Tokens per completion", &self.completion_length),
        ] {
            registry.register(name, help, histogram.clone());
        }
    }

    /// A request has a prompt of `tokens`.
    pub(crate) fn prompt(&self, tokens: usize) {
        self.prompt_tokens.inc_by(tokens as u64);
        self.prompt_length.observe(tokens as f64);
    }

    /// The first token came after `waited`, of which `queued` in the queue.
    pub(crate) fn first_token(&self, waited: Duration, queued: Option<Duration>) {
        self.first_token.observe(waited.as_secs_f64());
        if let Some(queued) = queued {
            self.queued.observe(queued.as_secs_f64());
        }
    }

    /// `tokens` more of a completion came after `waited`.
    pub(crate) fn more_tokens(&self, tokens: usize, waited: Duration) {
        if tokens > 0 {
            self.between_tokens.observe(waited.as_secs_f64() / tokens as f64);
        }
    }

    /// A completion of `tokens` ended for `reason`, `waited` after its request.
    pub(crate) fn completion(&self, tokens: usize, reason: &'static str, waited: Duration) {
        self.success.get_or_create(&ReasonLabels { finished_reason: reason }).inc();
        self.generation_tokens.inc_by(tokens as u64);
        self.completion_length.observe(tokens as f64);
        self.whole.observe(waited.as_secs_f64());
    }

    /// The text that Prometheus scrapes.
    pub(crate) fn text(&self, status: &QueueStatus, open: usize) -> String {
        let mut scrape = labelled(&self.model);
        for (name, help, value) in [
            ("vllm:num_requests_running", "Requests that the sampler has", status.running as f64),
            ("vllm:num_requests_waiting", "Requests that wait for the sampler", status.waiting as f64),
            ("vllm:kv_cache_usage_perc", "Part of the KV cache that is reserved, 0 to 1", status.cache_usage),
            ("rlrun:policy_version", "Version of the policy that is served", status.version.0 as f64),
            ("rlrun:open_answers", "Answers that are open", open as f64),
            (
                "vllm:rl_weight_update_operations_in_flight",
                "Updates of the weights at this moment: they happen between two steps",
                0.0,
            ),
        ] {
            scrape.register(name, help, ConstGauge::new(value));
        }
        let counts = &status.counts;
        for (name, help, value) in [
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens that were looked up in the KV cache",
                counts.prefilled_tokens + counts.reused_tokens,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens that were in the KV cache", counts.reused_tokens),
            ("vllm:num_preemptions", "Sequences preempted: the pages of each are reserved before", 0),
            ("rlrun:weight_updates", "Updates of the weights", status.weight_updates),
        ] {
            scrape.register(name, help, ConstCounter::new(value));
        }
        let updates = ConstCounter::new(status.weight_updates_s);
        let help = "Time for which decoding stood still for updates of the weights";
        scrape.register("vllm:rl_weight_update_operation_duration_seconds", help, updates);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode_registry(&mut text, &self.registry);
        let _ = encode_registry(&mut text, &scrape);
        let _ = encode_eof(&mut text);
        text
    }
}

fn labelled(model: &str) -> Registry {
    let label = |name: &'static str, value: &str| (name.into(), value.to_owned().into());
    Registry::with_labels([label("model_name", model), label("engine", "0")].into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_vllm() {
        let metrics = EndpointMetrics::new("m");
        metrics.prompt(12);
        metrics.completion(3, "stop", Duration::from_millis(20));
        let text = metrics.text(&QueueStatus { running: 2, ..QueueStatus::default() }, 5);
        for line in [
            "vllm:num_requests_running{model_name=\"m\",engine=\"0\"} 2.0",
            "vllm:prompt_tokens_total{model_name=\"m\",engine=\"0\"} 12",
            "vllm:generation_tokens_total{model_name=\"m\",engine=\"0\"} 3",
            "vllm:request_success_total{model_name=\"m\",engine=\"0\",finished_reason=\"stop\"} 1",
            "vllm:request_prompt_tokens_sum{model_name=\"m\",engine=\"0\"} 12.0",
            "vllm:prefix_cache_hits_total{model_name=\"m\",engine=\"0\"} 0",
            "rlrun:open_answers{model_name=\"m\",engine=\"0\"} 5.0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
