//! Data from other processes that a run refused or quarantined: in the metrics, the events and the step line. Groups are
//! also written to a file.
//!
//! Invariant: peers cannot control the amount that is written: the number of groups and the length of names are bounded.

use std::io::Write;

use serde_json::json;
use trainer::report::Quarantined;

use super::samples::readable;
use super::{Observer, ObserverInputs};
use crate::failure::Failure;
use crate::metrics::Metrics;
use crate::peers::Refused;

/// Groups of a run that are written to `quarantine.jsonl`.
const WRITTEN: u64 = 256;

/// How much there was so far.
#[derive(Debug, Default)]
pub(super) struct PeerCounts {
    quarantined: u64,
    refused: u64,
    written: u64,
}

impl Observer<'_> {
    /// Counts and names what was refused and set aside since the step before.
    pub(super) fn peers(
        &mut self,
        metrics: &mut Metrics,
        inputs: &ObserverInputs<'_>,
    ) -> Result<(), Failure> {
        let step = inputs.step;
        let now: u64 = inputs.refused.iter().map(|refused| refused.count).sum();
        self.counts.quarantined += step.quarantined_groups;
        self.counts.refused += now;
        metrics.set("buffer/quarantined", self.counts.quarantined as f64);
        metrics.set("peers/refused", self.counts.refused as f64);
        if step.quarantined_groups > 0 {
            add(metrics, &format!("{} groups were set aside in quarantine", step.quarantined_groups));
        }
        if now > 0 {
            add(metrics, &format!("{now} times something from outside was refused"));
        }
        for quarantined in &step.quarantined {
            self.quarantined(quarantined)?;
        }
        for Refused { sender, code, count, example } in inputs.refused {
            let fields = json!({ "sender": sender, "code": code, "count": count, "example": example });
            self.event("refused", &fields)?;
            self.report.note(&format!("refused of {sender}, {count} times: {example}"));
        }
        Ok(())
    }

    fn quarantined(&mut self, quarantined: &Quarantined) -> Result<(), Failure> {
        let Quarantined { group, sender, reason } = quarantined;
        let reason = reason.to_string();
        let who = sender.as_deref().unwrap_or("an unknown sender");
        let fields = json!({ "group": group.id, "sender": sender, "reason": reason });
        self.event("quarantine", &fields)?;
        self.report.note(&format!("{} of {who} was quarantined and is not trained on: {reason}", group.id));
        if self.counts.written == WRITTEN {
            return Ok(());
        }
        self.counts.written += 1;
        let path = self.run_dir.path().join("quarantine.jsonl");
        let system = |source| Failure::System { what: format!("write {}", path.display()), source };
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&path).map_err(system)?;
        let tokens: Vec<&[u32]> = group
            .trajectories
            .iter()
            .flat_map(|trajectory| trajectory.samples())
            .map(|sample| sample.token_ids())
            .collect();
        let line =
            json!({ "reason": reason, "sender": sender, "group": readable(group, &[]), "token_ids": tokens });
        writeln!(file, "{line}").map_err(system)
    }
}

/// Adds to what the step line says.
fn add(metrics: &mut Metrics, text: &str) {
    if !metrics.bottleneck.is_empty() {
        metrics.bottleneck.push_str("; ");
    }
    metrics.bottleneck.push_str(text);
}
