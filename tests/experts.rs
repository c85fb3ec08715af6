//! Models with experts in whole runs: load metrics, and routing replay.

use crate::support::{Home, Run};
use crate::workers::PROCESSES;

const EXPERTS: [&str; 3] =
    ["model.random.architecture=olmoe", "model.random.experts=4", "model.random.experts_per_token=2"];

fn run(home: &Home, name: &str, sets: &[&str]) -> Run {
    home.small(name, &[&EXPERTS[..], sets].concat())
}

/// Of the current version the sampler's experts are those that the trainer would choose, in every turn of an episode.
#[test]
fn replayed_experts_of_the_current_version_change_no_bit() {
    let home = Home::new();
    let synchronous = ["buffer.max_staleness=0", "rollout.bitwise=true", "trainer.steps=2"];
    let episodes = ["environment.kind=retry", "environment.max_turns=4", "environment.max_tokens=90"];
    for (name, more) in [("turns", &episodes[..]), ("ranks", &["trainer.world=2", "trainer.zero=3"])] {
        let sets = [&synchronous[..], more].concat();
        let own = run(&home, name, &sets);
        let replayed =
            run(&home, &format!("{name}_replayed"), &[&sets[..], &["rollout.routing_replay=true"]].concat());
        assert_eq!(replayed.values("experts/replayed"), [1.0; 2], "{name}");
        assert_eq!(replayed.values("experts/changed"), [0.0; 2], "{name}");
        for metric in ["loss/mean", "optim/grad_norm", "experts/load_cv", "experts/load_peak"] {
            assert_eq!(own.values(metric), replayed.values(metric), "{name}: {metric}");
        }
        assert!(own.values("experts/load_peak").iter().all(|peak| (1.0..=4.0).contains(peak)), "{name}");
        assert!(own.steps().iter().all(|step| !step.contains_key("experts/replayed")), "{name}");
    }
}

/// One family of each kind of attention: with sinks, latent, and with a recurrent state.
#[test]
fn families_with_experts_replay_them() {
    replay_their_experts(&["gpt_oss", "deepseek_v3", "qwen3_next"]);
}

#[test]
#[ignore = "takes half a minute; three families are above"]
fn every_other_family_with_experts_replays_them() {
    replay_their_experts(&["qwen3_moe", "glm4_moe", "glm4_moe_lite", "qwen3_5_moe"]);
}

/// Fresh models of `families`: the sampler's experts change no bit of the trainer's.
fn replay_their_experts(families: &[&str]) {
    let home = Home::new();
    for family in families {
        let architecture = format!("model.random.architecture={family}");
        let sets = [
            &architecture[..],
            "model.random.experts=4",
            "model.random.experts_per_token=2",
            "buffer.max_staleness=0",
            "rollout.bitwise=true",
            "rollout.routing_replay=true",
            "trainer.steps=2",
        ];
        let run = home.small(family, &sets);
        assert_eq!(run.values("experts/replayed"), [1.0; 2], "{family}");
        assert_eq!(run.values("experts/changed"), [0.0; 2], "{family}");
        assert_eq!(run.values("kl/mismatch"), [0.0; 2], "{family}");
    }
}

/// A quantised sampler prefers other experts for some tokens. With its experts the trainer's log-probabilities are nearer to its own.
#[test]
fn a_trainer_replays_the_experts_of_a_quantized_sampler() {
    let home = Home::new();
    let sets = ["buffer.max_staleness=0", "rollout.quantization=int8", "trainer.steps=4"];
    let own = run(&home, "own", &sets);
    let replayed = run(&home, "replayed", &[&sets[..], &["rollout.routing_replay=true"]].concat());
    let changed = replayed.values("experts/changed");
    assert!(changed.iter().all(|share| *share > 0.0 && *share < 0.5), "{changed:?}");
    // The first step has the same samples in both runs.
    let [before, after] = [&own, &replayed].map(|run| run.values("kl/mismatch")[0]);
    assert!(after < before, "{after} with the sampler's experts, {before} without");
}

/// Groups of older versions carry their experts through the journal and the buffer of another process.
#[test]
fn stale_groups_carry_their_experts_through_journal_and_processes() {
    let home = Home::new();
    let stale = ["rollout.routing_replay=true", "trainer.learning_rate=1e-2", "trainer.steps=8"];
    let local = run(&home, "local", &stale);
    let workers = run(&home, "workers", &[&stale[..], &PROCESSES[..]].concat());
    for run in [&local, &workers] {
        assert_eq!(run.values("experts/replayed"), [1.0; 8]);
        assert!(run.values("staleness/max").iter().any(|staleness| *staleness > 0.0));
        assert!(run.values("experts/changed").iter().any(|share| *share > 0.0));
    }
}

/// An adapter on the experts of gpt-oss trains, and is refused where PEFT would have to read it; one on attention is not.
#[test]
fn an_adapter_on_fused_experts_is_not_written_for_peft() {
    let home = Home::new();
    let family = "model.random.architecture=gpt_oss";
    let sets = [family, "trainer.steps=1", "lora.rank=2"];
    home.small("all", &sets);
    home.rlrun(&["export", "all", "--adapter", "--out", "x"])
        .refused(&["`gate_proj` in one tensor", "without --adapter"]);
    assert!(!home.path("x").exists());
    home.rlrun(&["export", "all", "--out", "merged"]).ok();
    home.small("attention", &[&sets[..], &["lora.target_modules=[\"q_proj\", \"o_proj\"]"]].concat());
    home.rlrun(&["export", "attention", "--adapter", "--out", "x"]).ok();
}

/// The correction is part of checkpoints and pushes, so a resumed run has the same bits; and it makes loads more equal.
#[test]
fn a_rate_moves_the_correction_of_routers() {
    let home = Home::new();
    let sets = [
        "model.random.architecture=glm4_moe",
        "model.random.experts=4",
        "model.random.experts_per_token=2",
        "buffer.max_staleness=0",
        "checkpoint.interval=2",
        "trainer.router_correction_rate=0.05",
    ];
    let whole = home.small("whole", &[&sets[..], &["trainer.steps=4"]].concat());
    home.small("half", &[&sets[..], &["trainer.steps=2"]].concat());
    home.rlrun(&["resume", "half", "--set", "trainer.steps=4"]).ok();
    let weights = |run: &Run| std::fs::read(run.checkpoint(4).join("model/model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&home.run("half")), "a resumed run has the same bits");
    let frozen = home.small("frozen", &[&sets[..5], &["trainer.steps=4"]].concat());
    assert!(weights(&whole) != weights(&frozen));
}

#[test]
fn a_model_without_experts_refuses_routing_replay() {
    let home = Home::new();
    let args = ["small.toml", "--run-dir", "run", "--set", "rollout.routing_replay=true"];
    home.rlrun(&args).refused(&["rollout.routing_replay", "the model has no experts"]);
    assert!(!home.path("run").exists());
}

#[test]
fn a_model_without_a_correction_refuses_its_rate() {
    let home = Home::new();
    let args = ["small.toml", "--run-dir", "run", "--set", "trainer.router_correction_rate=0.001"];
    home.rlrun(&args)
        .refused(&["trainer.router_correction_rate", "the routers of the model have no correction"]);
    assert!(!home.path("run").exists());
}
