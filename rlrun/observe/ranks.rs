//! Metrics of a trainer's ranks, and what is said when they change.

use serde_json::json;
use trainer::StepReport;
use trainer::trainer::elastic::Regrouping;

use super::Observer;
use crate::failure::Failure;
use crate::metrics::Metrics;

impl Observer<'_> {
    /// Records the ranks of a step, and how they have changed.
    pub(super) fn ranks(&mut self, metrics: &mut Metrics, step: &StepReport) -> Result<(), Failure> {
        metrics.set("trainer/world", step.world as f64);
        if self.recipe.trainer.elastic.snapshot_every > 0 {
            metrics.set("time/snapshot", step.time.snapshot);
            metrics.set("time/regroup", step.regroupings.iter().map(|change| change.seconds).sum());
        }
        for change in &step.regroupings {
            let Regrouping { lost, before, after, snapshot, repeated_steps, seconds, .. } = change;
            self.report.note(&sentence(change));
            let fields = json!({
                "lost": lost,
                "ranks_before": before,
                "ranks": after,
                "snapshot": snapshot,
                "repeated_steps": repeated_steps,
                "seconds": seconds,
            });
            self.event("regroup", &fields)?;
        }
        Ok(())
    }
}

/// What has happened to the ranks.
fn sentence(change: &Regrouping) -> String {
    let Regrouping { lost, before, after, snapshot, repeated_steps, seconds, .. } = change;
    match lost {
        Some(reason) => format!(
            "a rank of the trainer was lost ({reason}); training continues with {after} of {before} ranks after {seconds:.1} s, from \
             the snapshot of step {} in memory; {repeated_steps} steps after it were repeated",
            snapshot.0
        ),
        None => format!(
            "ranks have joined: the trainer has {after} instead of {before} ranks after {seconds:.1} s"
        ),
    }
}
