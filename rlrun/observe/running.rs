//! How many sequences samplers run at once, where that adapts (`rollout.adapt_running`).
//!
//! Invariant: every reported change is one event, with the sampler that made it, in this process or in another.

use rollout::Activity;
use serde_json::json;

use super::Observer;
use crate::failure::Failure;
use crate::metrics::Metrics;

impl Observer<'_> {
    /// Writes the changes of a step, and measures the limits after it. Samplers of other processes report once a second; until the
    /// next report the last one counts.
    pub(super) fn running(
        &mut self,
        metrics: &mut Metrics,
        activity: &[(String, Activity)],
    ) -> Result<(), Failure> {
        self.limit_changes(activity)?;
        let limits: Vec<usize> = activity.iter().filter_map(|(_, of)| of.running_limit).collect();
        if !limits.is_empty() {
            self.running_limit = Some(limits.iter().sum::<usize>() as f64 / limits.len() as f64);
        }
        self.running_limit.iter().for_each(|limit| metrics.set("rollout/running_limit", *limit));
        Ok(())
    }

    /// Writes an event for every change that samplers report.
    pub(super) fn limit_changes(&mut self, activity: &[(String, Activity)]) -> Result<(), Failure> {
        for (sampler, change) in activity
            .iter()
            .flat_map(|(sampler, of)| of.limit_changes.iter().map(move |change| (sampler, change)))
        {
            let fields = json!({
                "sampler": sampler,
                "at": change.at,
                "version": change.version,
                "running_before": change.before,
                "running": change.after,
                "capacity_before": change.capacity,
                "demand": change.demand,
            });
            self.event("running_limit", &fields)?;
        }
        Ok(())
    }
}
