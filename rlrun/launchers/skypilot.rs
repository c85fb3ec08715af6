//! The task of a run for SkyPilot.
//!
//! All machines run the same command; the first is the run, the others join it (`--by-rank`). A managed job recovers from
//! preemptions and starts again after status 75.

use std::path::Path;

use serde_json::json;

use super::manifest::yaml;
use super::{LaunchPlan, shell};
use crate::args::SkypilotArgs;
use crate::credentials::Credentials;

/// Where a machine has the run directories, the credentials and the recipe.
const RUNS: &str = "/tmp/rlrun/runs";
const CREDENTIALS: &str = "/tmp/rlrun/credentials";
const RECIPE: &str = "/tmp/rlrun/recipe.toml";
/// Failures that are tried again.
const RESTARTS: u32 = 50;

/// The task, with the recipe in the file `recipe` and the credentials in the directory `credentials` of this machine.
pub(crate) fn task(
    plan: &LaunchPlan,
    args: &SkypilotArgs,
    recipe: &Path,
    credentials: &Credentials,
) -> String {
    let mut resources = json!({
        "ports": plan.port,
        "job_recovery": { "max_restarts_on_errors": RESTARTS, "recover_on_exit_codes": [75] },
    });
    if let Some(accelerators) = &args.accelerators {
        resources["accelerators"] = json!(accelerators);
    }
    if let Some(cpus) = plan.cpus {
        resources["cpus"] = json!(format!("{cpus}+"));
    }
    if let Some(infra) = &args.infra {
        resources["infra"] = json!(infra);
    }
    let mut mounts = json!({ CREDENTIALS: credentials.directory(), RECIPE: recipe });
    if let Some(bucket) = &args.bucket {
        mounts[RUNS] = json!({ "source": bucket, "mode": "MOUNT_CACHED" });
    }
    let mut command: Vec<String> =
        [plan.program.as_str(), RECIPE, "--by-rank", "--quiet", "--run-dir"].map(str::to_owned).to_vec();
    command.push(format!("{RUNS}/{}", plan.name));
    command.extend(["--set".to_owned(), format!("buffer.credentials={CREDENTIALS:?}")]);
    let run = format!("mkdir -p {RUNS}\nexec {}\n", shell(&command));
    let nodes = 1 + plan.trainer_ranks + plan.rollout_workers;
    yaml(&json!({
        "name": plan.name, "num_nodes": nodes, "resources": resources, "file_mounts": mounts, "setup": args.setup, "run": run,
    }))
}
