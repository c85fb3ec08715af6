//! A run with several trainer ranks, killed and resumed with other numbers of ranks.

use crate::support::{Home, Moment, Run, finish};

const STEPS: u64 = 12;

/// Groups and tasks of every step, in order.
fn tasks(run: &Run) -> Vec<(u64, u64)> {
    let samples = (1..=STEPS).flat_map(|step| run.samples(step));
    samples.map(|group| (group["group"].as_u64().unwrap(), group["task"].as_u64().unwrap())).collect()
}

#[test]
fn a_killed_run_resumes_with_another_number_of_ranks() {
    let home = Home::new();
    let sets = ["buffer.max_staleness=0"];
    let whole = home.small("whole", &sets);
    let sharded = ["buffer.max_staleness=0", "trainer.world=2", "trainer.zero=3"];
    let run = home.run("sharded");
    let mut child = home.start_small("sharded", &sharded);
    assert!(run.wait_for(Moment::Step(4), &mut child));
    child.kill().unwrap();
    finish(child);
    let mut child = home.start(&["resume", "sharded", "--set", "trainer.world=1"]);
    assert!(run.wait_for(Moment::Step(8), &mut child));
    child.kill().unwrap();
    finish(child);
    home.rlrun(&["resume", "sharded", "--set", "trainer.world=4"]).ok();
    let steps: Vec<_> = run.values("step");
    assert_eq!(steps, (1..=STEPS).map(|step| step as f64).collect::<Vec<_>>());
    assert_eq!(tasks(&run), tasks(&whole), "every group is trained on once, in the same order");
    // Rounding differs, so samples diverge; the run still learns.
    let rewards = |run: &Run| run.values("reward/mean").iter().sum::<f64>() / STEPS as f64;
    assert!((rewards(&run) - rewards(&whole)).abs() < 0.2, "{} {}", rewards(&run), rewards(&whole));
}
