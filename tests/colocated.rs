//! Colocation: sampler and trainer take turns on one device.

use crate::support::Home;

/// With a larger bound sequences are in flight when the trainer asks for the device. Interruptions, curation and a separate
/// critic are covered too.
#[test]
fn colocated_runs_keep_the_staleness_bound() {
    let home = Home::new();
    let everything = [
        "placement.memory_mib=0",
        "algorithm.kind=\"ppo\"",
        "algorithm.kl_coef=0.05",
        "critic.learning_rate=1e-3",
        "rollout.interrupt_text=\"=\"",
        "rollout.interrupt_after_min=3",
        "rollout.interrupt_after_max=9",
    ];
    let curated = ["curation.dynamic_sampling=true"];
    for (name, sets) in
        [("keep", &everything[..]), ("recompute", &curated), ("drain", &["placement.memory_mib=0"])]
    {
        let on_update = format!("rollout.on_update=\"{name}\"");
        let colocated =
            ["placement.policy=\"colocated\"", "buffer.max_staleness=2", "trainer.steps=6", &on_update];
        let run = home.small(name, &[&colocated, sets].concat());
        let of = |metric: &str| run.values(metric);
        assert_eq!(run.steps().len(), 6);
        assert!(of("staleness/max").iter().all(|staleness| *staleness <= 2.0), "{name}");
        // A batch that is already in the buffer is trained on without a turn of the sampler, which then frees nothing.
        assert!(of("time/phase_switch").iter().all(|seconds| *seconds >= 0.0), "{name}");
        assert!(of("memory/freed_sampler_mib")[5] > 0.0 && of("memory/freed_trainer_mib")[5] > 0.0, "{name}");
    }
}

#[test]
fn moved_state_leaves_memory_and_no_files() {
    let home = Home::new();
    // With one leaf a step has one buffer of gradients.
    let colocated =
        ["placement.policy=\"colocated\"", "buffer.max_staleness=0", "trainer.steps=3", "trainer.leaves=1"];
    let freed = |name: &str, sets: &[&str]| {
        let run = home.small(name, &[&colocated, sets].concat());
        let mut files: Vec<_> =
            std::fs::read_dir(&run.path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        files.sort();
        (run.values("memory/freed_trainer_mib")[2], files)
    };
    let (kept, files) = freed("kept", &[]);
    let (moved, same) = freed("moved", &["placement.memory_mib=0"]);
    // Gradients alone, or with the weights and both moments of AdamW.
    assert!((moved / kept - 4.0).abs() < 1e-9, "{kept} MiB with everything kept, {moved} without");
    assert_eq!(files, same);
}

#[test]
fn a_killed_or_stopped_colocated_run_resumes_with_the_same_bits() {
    let home = Home::new();
    let sets = [
        "placement.policy=\"colocated\"",
        "placement.memory_mib=0",
        "buffer.max_staleness=0",
        "checkpoint.interval=2",
        "trainer.steps=6",
    ];
    let weights =
        |name: &str| std::fs::read(home.run(name).checkpoint(6).join("model/model.safetensors")).unwrap();
    home.small("whole", &sets);
    let mut child = home.start_small("killed", &sets);
    assert!(home.run("killed").wait_for(crate::support::Moment::Step(3), &mut child));
    child.kill().unwrap();
    child.wait().unwrap();
    home.rlrun(&["resume", "killed"]).ok();
    assert!(weights("whole") == weights("killed"));
    let mut child = home.start_small("stopped", &sets);
    assert!(home.run("stopped").wait_for(crate::support::Moment::Step(1), &mut child));
    crate::support::interrupt(&child);
    crate::support::finish(child).ok();
    home.rlrun(&["resume", "stopped"]).ok();
    assert!(weights("whole") == weights("stopped"));
}

#[test]
fn the_placement_is_shown_and_refused_without_sampling() {
    let home = Home::new();
    let check = |sets: &[&str]| {
        let sets: Vec<_> = sets.iter().flat_map(|set| ["--set", set]).collect();
        home.rlrun(&[&["check", "small.toml"], &sets[..]].concat())
    };
    assert!(check(&[]).ok().stdout.contains("placement: sampler and trainer work at the same time"));
    let turns = check(&["placement.policy=\"colocated\"", "placement.memory_mib=7"]).ok().stdout;
    assert!(turns.contains("take turns") && turns.contains("`placement.memory_mib` = 7"), "{turns}");
    home.write(
        "sft.toml",
        "[model.random]\n[data.arithmetic]\n[supervised]\nkind = \"sft\"\n[[rewards]]\nkind = \"math\"\n[trainer]\nsteps = 1\n\
         [placement]\npolicy = \"colocated\"\n",
    );
    home.rlrun(&["check", "sft.toml"]).refused(&["`placement.policy` has no effect"]);
}
