//! The bound on staleness holds at every training step, for every `rollout.on_update`.

use crate::support::{Home, Run, lines, small_args};

const STEPS: u64 = 8;

/// Largest staleness of the sampled trajectories, computed from their versions instead of the metrics. `samples/` has all
/// groups.
fn oldest_trained(run: &Run) -> u64 {
    let of_step = |step: u64| {
        let groups = run.samples(step);
        assert_eq!(groups.len(), 8);
        let trajectories: Vec<_> =
            groups.iter().flat_map(|group| group["trajectories"].as_array().unwrap().clone()).collect();
        assert_eq!(trajectories.len(), 64);
        let oldest = |trajectory: &serde_json::Value| {
            let runs = trajectory["versions"].as_array().unwrap();
            runs.iter().map(|run| run["version"].as_u64().unwrap()).min().unwrap()
        };
        // The step that produces version `step` starts from the version before.
        trajectories.iter().map(|trajectory| step - 1 - oldest(trajectory)).max().unwrap()
    };
    (1..=STEPS).map(of_step).max().unwrap()
}

fn the_bound_holds(on_update: &str, bounds: &[u64]) {
    let home = Home::new();
    for &bound in bounds {
        let bound_set = format!("buffer.max_staleness={bound}");
        let update_set = format!("rollout.on_update=\"{on_update}\"");
        let steps_set = format!("trainer.steps={STEPS}");
        let run = home.small(&format!("bound_{bound}"), &[&bound_set, &update_set, &steps_set]);
        let reported = run.values("staleness/max");
        assert_eq!(reported.len() as u64, STEPS);
        let largest = reported.iter().copied().fold(0.0, f64::max);
        assert!(largest <= bound as f64, "{on_update}, bound {bound}: {reported:?}");
        assert_eq!(oldest_trained(&run) as f64, largest, "{on_update}, bound {bound}: {reported:?}");
        if bound == 0 {
            let mismatch = run.values("logprob_abs_diff/max");
            assert!(mismatch.iter().all(|diff| *diff <= 1e-5), "{on_update}: {mismatch:?}");
            assert!(
                run.values("optim/grad_norm").iter().any(|norm| *norm > 0.0),
                "{on_update}: nothing was compared"
            );
        }
        if bound == 4 {
            assert!(largest > 0.0, "{on_update}: nothing was asynchronous: {reported:?}");
        }
    }
}

#[test]
fn the_bound_holds_when_sequences_keep_their_cache() {
    the_bound_holds("keep", &[0, 1, 4]);
}

#[test]
fn the_bound_holds_when_the_cache_is_recomputed() {
    the_bound_holds("recompute", &[0, 4]);
}

#[test]
fn the_bound_holds_when_sequences_finish_first() {
    the_bound_holds("drain", &[0, 4]);
}

#[test]
#[ignore = "lower and higher bounds are above"]
fn a_bound_of_one_version_holds_for_every_update() {
    the_bound_holds("recompute", &[1]);
    the_bound_holds("drain", &[1]);
}

/// A trainer that takes much longer than its samplers: they come to run ahead by fewer versions than the bound allows.
#[test]
fn samplers_run_ahead_by_fewer_versions_if_the_trainer_never_waits() {
    let home = Home::new();
    let sets = [
        "buffer.max_staleness=6",
        "buffer.adapt_staleness=true",
        "trainer.steps=40",
        "checkpoint.interval=0",
    ];
    let run = home.run("run");
    home.rlrun_with(&[("RLRUN_FAILPOINTS", "rank-step=delay(250)")], &small_args("run", &sets)).ok();
    let ahead = run.values("buffer/ahead");
    assert_eq!((ahead.len(), ahead[0]), (40, 6.0));
    let changes = ahead.windows(2).filter(|pair| pair[0] != pair[1]).count();
    let events = lines(&run.path.join("events.jsonl"));
    let recorded = events.iter().filter(|event| event["event"] == "admission").count();
    assert!(recorded == changes && changes >= 3, "{recorded} events, {ahead:?}");
    assert!(ahead.windows(2).all(|pair| pair[0] - pair[1] <= 1.0), "{ahead:?}");
    let (stale, last) = (run.values("staleness/mean"), ahead[39]);
    assert!(last <= 3.0, "{ahead:?}");
    // What was admitted before a change is trained on first.
    assert!(stale[39] <= last + 1.5 && stale[39] < stale[10], "{stale:?} with {ahead:?}");
    assert!(run.values("staleness/max").iter().all(|max| *max <= 6.0));
}

/// A sampler that has more groups to sample than it may run at once: it tries fewer, within its bounds.
#[test]
fn the_limit_of_running_sequences_follows_what_the_sampler_measures() {
    let home = Home::new();
    let sets =
        ["rollout.max_running=16", "rollout.adapt_running=true", "trainer.steps=90", "checkpoint.interval=0"];
    let run = home.small("run", &sets);
    let limits = run.values("rollout/running_limit");
    assert_eq!((limits.len(), limits[0]), (90, 16.0));
    assert!(limits.iter().all(|limit| [8.0, 16.0].contains(limit)), "{limits:?}");
    let events = lines(&run.path.join("events.jsonl"));
    let changes: Vec<_> = events.iter().filter(|event| event["event"] == "running_limit").collect();
    assert!(!changes.is_empty(), "{limits:?}");
    let mut limit = 16;
    for change in changes {
        let fields = &change["fields"];
        assert_eq!((&fields["sampler"], &fields["running_before"]), (&"sampler 0".into(), &limit.into()));
        limit = fields["running"].as_u64().unwrap();
        assert!(fields["capacity_before"].as_f64().unwrap() > 0.0, "{fields}");
    }
    assert!(limits.contains(&8.0), "the metric shows the trial: {limits:?}");
}
