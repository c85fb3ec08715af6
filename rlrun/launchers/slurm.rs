//! The batch script of a run in Slurm.
//!
//! The run and the other ranks of its trainer are steps that end together. Every sampler is a step of its own: one that fails or is
//! preempted ends no other process and is started again. Workers find the run through its directory, which all nodes share.
//!
//! Slurm signals the steps before the time limit and at a preemption; the run saves and ends with status 75, and the script
//! puts the job back into the queue; so it does when the run was killed without time to save. A batch script must not forward signals to srun, which would kill all tasks at once.

use super::{LaunchPlan, shell};
use crate::args::SlurmArgs;

/// Seconds before a sampler that has ended is started again.
const PAUSE_S: u64 = 10;
/// Starts of a job after which a run that was killed, for example because it takes too much memory, is not started again.
const MOST_RESTARTS: u64 = 5;

/// The script for `sbatch`.
pub(crate) fn script(plan: &LaunchPlan, args: &SlurmArgs) -> String {
    let nodes = 1 + plan.trainer_ranks + plan.rollout_workers;
    let mut options = vec![
        format!("--job-name={}", plan.name),
        format!("--nodes={nodes}"),
        "--ntasks-per-node=1".to_owned(),
        "--requeue".to_owned(),
        "--open-mode=append".to_owned(),
        format!("--signal=TERM@{}", args.grace),
        format!("--output={}-%j.log", plan.run_dir.display()),
    ];
    let given = [("partition", &args.partition), ("account", &args.account), ("time", &args.time)];
    options.extend(given.iter().filter_map(|(name, value)| Some(format!("--{name}={}", value.as_ref()?))));
    options.extend(plan.cpus.map(|cpus| format!("--cpus-per-task={cpus}")));
    options.extend((plan.gpus > 0).then(|| format!("--gpus-per-node={}", plan.gpus)));
    options.extend(args.options.iter().cloned());
    let options: String = options.iter().map(|option| format!("#SBATCH {}\n", directive(option))).collect();

    let (recipe, run_dir) = (plan.recipe.display().to_string(), plan.run_dir.display().to_string());
    let mut lead = plan.lead(&recipe, &run_dir, args.interface.as_deref());
    lead.extend(plan.sets());
    let mut steps = format!("{}{} &\nrun=$!\n", step("0", 1, plan.cpus), shell(&lead));
    if plan.trainer_ranks > 0 {
        let start = step("1", plan.trainer_ranks, plan.cpus);
        steps.push_str(&format!("{start}{} &\n", shell(&plan.trainer(&run_dir))));
    }
    if plan.rollout_workers > 0 {
        let mut rollout = plan.rollout(&recipe, &run_dir);
        rollout.extend(plan.sets());
        let start = step("\"$1\"", 1, plan.cpus);
        let (first, last) = (1 + plan.trainer_ranks, plan.trainer_ranks + plan.rollout_workers);
        steps.push_str(&format!(
            "sampler() {{\n    \
             while true; do\n        \
             {start}{} && return\n        \
             # It would fail again for the same reason.\n        \
             case $? in 1 | 2) return ;; esac\n        \
             sleep {PAUSE_S}\n    \
             done\n\
             }}\n\
             for node in $(seq {first} {last}); do sampler \"$node\" & done\n",
            shell(&rollout)
        ));
    }
    format!(
        "#!/bin/bash\n{options}\n\
         {steps}\
         wait \"$run\"\n\
         status=$?\n\
         # 75: stopped and saved. Above 128: killed, unless that has happened often. The run resumes when the job starts again.\n\
         killed() {{ [ \"$status\" -gt 128 ] && [ \"${{SLURM_RESTART_COUNT:-0}}\" -lt {MOST_RESTARTS} ]; }}\n\
         if [ \"$status\" = 75 ] || killed; then scontrol requeue \"$SLURM_JOB_ID\" || true; fi\n\
         exit \"$status\"\n"
    )
}

/// `srun` for `tasks` nodes from number `first` on.
fn step(first: &str, tasks: usize, cpus: Option<usize>) -> String {
    let cpus = cpus.map_or_else(String::new, |cpus| format!("--cpus-per-task={cpus} "));
    format!("srun --label --relative={first} --nodes={tasks} --ntasks={tasks} {cpus}")
}

/// The value of a directive: Slurm reads it as words of a shell, up to the end of the line.
fn directive(option: &str) -> String {
    let line = option.replace(['\n', '\r'], " ");
    if line.contains(|c: char| c.is_whitespace() || "\"'#\\".contains(c)) {
        format!("\"{}\"", line.replace('\\', "\\\\").replace('"', "\\\""))
    } else {
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_stays_one_word_of_its_line() {
        assert_eq!(directive("--constraint=h100&ib"), "--constraint=h100&ib");
        assert_eq!(directive("--comment=a \"b\"\n#c"), "\"--comment=a \\\"b\\\" #c\"");
    }
}
