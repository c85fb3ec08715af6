//! Metrics of an exchange of outer gradients.

use trainer::ExchangeReport;

use crate::metrics::Metrics;

/// Records the exchange that a step has applied, if it has.
pub(super) fn measure(metrics: &mut Metrics, exchange: Option<ExchangeReport>) {
    let Some(exchange) = exchange else { return };
    metrics.set("island/round", exchange.round as f64);
    metrics.set("island/islands", exchange.islands as f64);
    metrics.set("island/sent_bytes", exchange.sent_bytes as f64);
    metrics.set("island/received_bytes", exchange.received_bytes as f64);
    metrics.set("island/wait_s", exchange.wait_s);
    metrics.set("island/outer_grad_norm", exchange.gradient_norm);
    metrics.set("island/late", f64::from(exchange.is_late));
}
