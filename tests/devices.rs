//! Runs whose roles compute on devices: the emulator, which runs the kernels that GPUs run.

use serde_json::{Map, Value};

use crate::support::{Home, Run};

/// A run of seconds for an emulator that takes a thousand times as long as a GPU.
pub(crate) const FEW: [&str; 11] = [
    // Its rewards differ within a group in every step.
    "seed=6",
    "model.random.num_layers=2",
    "model.random.intermediate_size=256",
    "buffer.max_staleness=0",
    "rollout.group_size=4",
    "rollout.max_running=8",
    "buffer.batch_groups=2",
    "trainer.steps=2",
    "data.arithmetic.eval_tasks=2",
    "warmup.steps=2",
    "warmup.batch_tasks=4",
];

fn run(home: &Home, name: &str, sets: &[&str]) -> Run {
    let run = home.small(name, &[&FEW, sets].concat());
    assert!(run.values("optim/grad_norm").iter().any(|norm| *norm > 0.0), "{name} has trained nothing");
    run
}

/// The sampled texts of a step.
fn texts(run: &Run, step: u64) -> Vec<String> {
    let trajectories = |group: &Map<String, Value>| group["trajectories"].as_array().unwrap().clone();
    let all = run.samples(step).iter().flat_map(trajectories).collect::<Vec<_>>();
    all.iter().map(|trajectory| trajectory["completion"].to_string()).collect()
}

#[test]
fn a_run_on_a_device_learns_as_on_the_processor() {
    let home = Home::new();
    let here = run(&home, "here", &[]);
    let there = run(&home, "there", &["placement.device=emulated"]);
    let sampler = run(&home, "sampler", &["placement.rollout_device=emulated"]);
    for other in [&there, &sampler] {
        assert_eq!(other.values("step"), here.values("step"));
        for name in ["reward/mean", "optim/grad_norm", "loss/mean"] {
            for (found, expected) in other.values(name).iter().zip(here.values(name)) {
                assert!(
                    (found - expected).abs() <= 1e-3 * expected.abs().max(1.0),
                    "{name}: {found} {expected}"
                );
            }
        }
        // Sampler and trainer differ by rounding alone, whichever of them is on a device.
        assert!(
            other.values("logprob_abs_diff/max").iter().all(|off| *off < 1e-4),
            "{:?}",
            other.values("logprob_abs_diff/max")
        );
        assert_eq!(texts(other, 1), texts(&here, 1));
    }
}

/// Sampler and trainer on a device record and replay the experts of a version, as the processor does, and with the same loads.
#[test]
fn a_device_replays_the_experts_that_it_recorded() {
    for family in ["qwen3_moe", "olmoe"] {
        replays_on_a_device(&format!("model.random.architecture={family}"));
    }
}

fn replays_on_a_device(family: &str) {
    let home = Home::new();
    let sets = [
        family,
        "model.random.experts=4",
        "model.random.experts_per_token=2",
        "rollout.routing_replay=true",
        // As on a device. A leaf of its own computes a prompt once more, and loads count the tokens that are computed.
        "trainer.leaves=1",
    ];
    let here = run(&home, "here", &sets);
    let there = run(&home, "there", &[&sets[..], &["placement.device=emulated"]].concat());
    assert_eq!(there.values("experts/replayed"), [1.0; 2]);
    for metric in ["experts/replayed", "experts/changed", "experts/load_cv", "experts/load_peak"] {
        assert_eq!(there.values(metric), here.values(metric), "{metric}");
    }
    for metric in ["reward/mean", "optim/grad_norm", "loss/mean"] {
        for (found, expected) in there.values(metric).iter().zip(here.values(metric)) {
            assert!(
                (found - expected).abs() <= 1e-3 * expected.abs().max(1.0),
                "{metric}: {found} {expected}"
            );
        }
    }
    assert_eq!(texts(&there, 1), texts(&here, 1));
}

#[test]
fn a_model_answers_on_a_device_as_on_the_processor() {
    let home = Home::new();
    run(&home, "run", &[]);
    let answer = |more: &[&str]| {
        home.rlrun(&[&["generate", "run", "12+34=", "5+5=", "--max-tokens", "6"], more].concat()).ok().stdout
    };
    let here = answer(&[]);
    assert_eq!(answer(&["--device", "emulated"]), here);
    assert_eq!(here.lines().count(), 2);
}

#[test]
fn master_weights_and_moments_of_a_bf16_run_survive_a_resume() {
    let home = Home::new();
    let sets = ["placement.device=emulated", "model.dtype=bf16", "checkpoint.interval=1"];
    let whole = run(&home, "whole", &sets);
    let first = run(&home, "first", &[&sets[..], &["trainer.steps=1"]].concat());
    home.rlrun(&["resume", "first", "--set", "trainer.steps=2"]).ok();
    // The restored state has the saved bits: the next step is the same.
    assert_eq!(first.values("optim/grad_norm"), whole.values("optim/grad_norm"));
    assert_eq!(texts(&first, 2), texts(&whole, 2));
}

#[test]
fn ranks_exchange_from_device_to_device() {
    let home = Home::new();
    let sets = [
        "placement.trainer_device=emulated",
        "trainer.world=2",
        "trainer.zero=2",
        "checkpoint.interval=1",
        "algorithm.kl_coef=0.1",
    ];
    let offloaded = ["trainer.collective=host", "placement.reference_weights=host"];
    let by_host = run(&home, "host", &[&sets[..], &offloaded].concat());
    let direct = run(&home, "direct", &[&sets[..], &["trainer.collective=device"]].concat());
    assert_eq!(texts(&direct, 1), texts(&by_host, 1));
    for (found, expected) in direct.values("optim/grad_norm").iter().zip(by_host.values("optim/grad_norm")) {
        assert!((found - expected).abs() <= 1e-3 * expected, "{found} {expected}");
    }
    let [direct_kl, host_kl] = [&direct, &by_host].map(|run| *run.values("kl/ref").last().unwrap());
    assert!(host_kl > 0.0 && (direct_kl - host_kl).abs() <= 1e-2 * host_kl, "{direct_kl} {host_kl}");
    // A checkpoint of sharded state can be resumed with another number of ranks.
    let sets = ["--set", "trainer.steps=3", "--set", "trainer.world=1", "--set", "trainer.collective=auto"];
    home.rlrun(&[&["resume", "direct"], &sets[..]].concat()).ok();
    assert_eq!(home.run("direct").values("step").last(), Some(&3.0));
}

/// Sums over the ranks are rounded otherwise than those of one rank: steps begin equal, and stay near.
#[test]
fn ranks_on_devices_share_passes() {
    let home = Home::new();
    let cases = [
        ("direct", &["trainer.world=2", "trainer.collective=device", "trainer.parallel.tensor=2"][..]),
        (
            "host",
            &["trainer.world=2", "trainer.collective=host", "trainer.zero=3", "trainer.parallel.tensor=2"],
        ),
        ("context", &["trainer.world=2", "trainer.collective=device", "trainer.parallel.context=2"]),
        ("stages", &["trainer.world=2", "trainer.parallel.pipeline=2"]),
        (
            "processes",
            &[
                "trainer.world=4",
                "trainer.ranks=processes",
                "placement.processes=true",
                "trainer.zero=2",
                "trainer.parallel.pipeline=2",
                "trainer.parallel.context=2",
            ],
        ),
    ];
    are_near_one_rank(&home, &["model.random.num_kv_heads=2"], &cases);
    goes_on_with_one_rank(&home, "direct", "tensor");
}

#[test]
fn ranks_on_devices_divide_experts() {
    let home = Home::new();
    let model = [
        "model.random.architecture=olmoe",
        "model.random.experts=4",
        "model.random.experts_per_token=2",
        "trainer.zero=3",
    ];
    let direct = ["trainer.world=2", "trainer.parallel.expert=2", "trainer.collective=device"];
    let processes = [
        "trainer.world=2",
        "trainer.parallel.expert=2",
        "trainer.ranks=processes",
        "placement.processes=true",
        "trainer.collective=host",
    ];
    are_near_one_rank(&home, &model, &[("direct", &direct[..]), ("processes", &processes)]);
    goes_on_with_one_rank(&home, "direct", "expert");
}

/// Checkpoints have whole tensors: the run `name`, whose ranks divide passes by `degree`, goes on with one rank.
fn goes_on_with_one_rank(home: &Home, name: &str, degree: &str) {
    let sets = ["steps=3", "world=1", "collective=auto"].map(|set| format!("trainer.{set}"));
    let alone = format!("trainer.parallel.{degree}=1");
    let sets: Vec<&str> = sets.iter().chain([&alone]).flat_map(|set| ["--set", set]).collect();
    home.rlrun(&[&["resume", name], &sets[..]].concat()).ok();
    assert_eq!(home.run(name).values("step").last(), Some(&3.0));
}

/// Runs `model` on one rank and in each of `cases`, a name and settings.
fn are_near_one_rank(home: &Home, model: &[&str], cases: &[(&str, &[&str])]) {
    let placed = [&["placement.trainer_device=emulated", "checkpoint.interval=1"][..], model].concat();
    let alone = run(home, "alone", &placed);
    for (name, own) in cases {
        let shared = run(home, name, &[&placed[..], own].concat());
        assert_eq!(texts(&shared, 1), texts(&alone, 1), "{name}");
        let norms = [shared.values("optim/grad_norm"), alone.values("optim/grad_norm")];
        for (step, tolerance) in [(0, 1e-3), (1, 5e-2)] {
            let [found, expected] = norms.each_ref().map(|norms| norms[step]);
            assert!((found - expected).abs() <= tolerance * expected, "{name}: {norms:?}");
        }
    }
}

#[test]
fn processes_push_from_device_to_device() {
    let home = Home::new();
    let sets = ["placement.device=emulated", "placement.processes=true"];
    let by_host = run(&home, "host", &sets);
    // The run assigns the worker its device.
    let devices = ["weights.transport=cuda-ipc", "placement.rollout_devices=[\"emulated\"]"];
    let elsewhere = ["placement.device=cpu", "placement.trainer_device=emulated"];
    let mapped = run(&home, "mapped", &[&sets[..], &elsewhere, &devices].concat());
    assert_same(&mapped, &by_host);
}

#[test]
fn a_broadcast_within_a_process_brings_the_same_bits() {
    let home = Home::new();
    let sets = ["placement.device=emulated", "checkpoint.interval=0"];
    let by_host = run(&home, "host", &[&sets[..], &["buffer.listen=127.0.0.1:0"]].concat());
    let broadcast = run(&home, "broadcast", &[&sets[..], &["weights.transport=nccl"]].concat());
    assert_same(&broadcast, &by_host);
    let weights = |run: &Run| std::fs::read(run.checkpoint(2).join("model/model.safetensors")).unwrap();
    assert!(weights(&broadcast) == weights(&by_host));
    assert!(broadcast.values("weights/received_bytes").last().is_some_and(|bytes| *bytes > 0.0));
}

#[test]
fn ranks_broadcast_a_shard_each() {
    let home = Home::new();
    let sets =
        ["placement.device=emulated", "trainer.world=2", "trainer.zero=2", "trainer.collective=device"];
    let by_host = run(&home, "host", &sets);
    let broadcast = run(&home, "broadcast", &[&sets[..], &["weights.transport=nccl"]].concat());
    assert_same(&broadcast, &by_host);
}

/// Asserts that two runs have the same samples and the same weights.
fn assert_same(one: &Run, other: &Run) {
    for step in 1..=2 {
        assert_eq!(texts(one, step), texts(other, step));
    }
    assert_eq!(one.values("optim/grad_norm"), other.values("optim/grad_norm"));
}
