//! Metrics of a weight push: its cost, and the lag of every sampler.

use ::weights::{Distribution, Lag, PushCost};

use crate::metrics::Metrics;

/// Records the last push, if there was one, and the slowest sampler that received one.
pub(super) fn measure(
    metrics: &mut Metrics,
    push: Option<PushCost>,
    lags: &[Lag],
    distribution: Distribution,
) {
    if let Some(push) = push {
        metrics.set("weights/bytes", push.delta_bytes.unwrap_or(push.full_bytes) as f64);
        metrics.set("weights/publish_s", push.took.as_secs_f64());
        if let Some(density) = push.density {
            metrics.set("weights/density", density);
        }
    }
    let receipts = || lags.iter().filter_map(|lag| lag.receipt);
    let slowest =
        |seconds: &dyn Fn(&::weights::Receipt) -> f64| receipts().map(|r| seconds(&r)).fold(0.0, f64::max);
    metrics.set("weights/subscribers", lags.len() as f64);
    metrics.set("weights/apply_s", slowest(&|receipt| receipt.took.as_secs_f64()));
    metrics.set("weights/stall_s", slowest(&|receipt| receipt.stalled.as_secs_f64()));
    metrics.set("weights/received_bytes", receipts().map(|receipt| receipt.bytes as f64).sum());
    metrics.set("weights/taken_bytes", receipts().map(|receipt| receipt.taken as f64).sum());
    metrics.set("weights/sent_bytes", distribution.bytes_sent as f64);
    metrics.set("weights/relays", distribution.relays as f64);
    metrics.set("weights/relay_failures", distribution.fallbacks as f64);
}
