//! The driver of a run in Ray and its description of the processes.
//!
//! Ray has no stable interface for Rust, so the driver is a Python script: one actor per process of the run, which owns the
//! process as a child, starts it again after status 75, and gives workers the run's address and credentials.

use serde_json::json;

use super::LaunchPlan;
use crate::args::RayArgs;

/// The driver, for the Python of the cluster.
pub(crate) const DRIVER: &str = include_str!("rlrun_ray.py");

/// The recipe in the working directory of the job, which all nodes get.
pub(crate) const RECIPE: &str = "recipe.toml";

/// The description of the processes that the driver reads.
pub(crate) fn processes(plan: &LaunchPlan, args: &RayArgs) -> String {
    let run_dir = plan.run_dir.display().to_string();
    let description = json!({
        "run_dir": run_dir,
        "lead": plan.lead(RECIPE, &run_dir, args.interface.as_deref()),
        // The driver replaces URL when the run is served.
        "trainer": plan.trainer("URL"),
        "trainer_ranks": plan.trainer_ranks,
        "rollout": plan.rollout(RECIPE, "URL"),
        "rollout_workers": plan.rollout_workers,
        "cpus": plan.cpus.unwrap_or(1),
        "gpus": plan.gpus,
    });
    format!("{description:#}\n")
}
