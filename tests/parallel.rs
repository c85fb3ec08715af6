//! Whole runs whose ranks share passes: their metrics and weights have the bits of a run of one rank.

use crate::support::{Home, Run};

/// What ranks must not change.
const METRICS: [&str; 6] =
    ["reward/mean", "loss/mean", "optim/grad_norm", "kl/mismatch", "entropy/mean", "completions/mean_length"];

const SYNCHRONOUS: [&str; 6] = [
    "buffer.max_staleness=0",
    "rollout.bitwise=true",
    "model.reduction=tree",
    "trainer.zero=2",
    "trainer.parallel.sections=4",
    "checkpoint.interval=10",
];

const DENSE: [&str; 2] = ["model.random.num_kv_heads=4", "model.random.architecture=qwen3"];

const EXPERTS: [&str; 4] = [
    "model.random.num_kv_heads=4",
    "model.random.architecture=qwen3_moe",
    "model.random.experts=4",
    "model.random.experts_per_token=2",
];

fn weights(run: &Run, step: u64) -> Vec<u8> {
    std::fs::read(run.checkpoint(step).join("model/model.safetensors")).unwrap()
}

/// Asserts that two runs of `steps` steps have the same metrics and weights.
fn same(one: &Run, other: &Run, steps: u64, what: &str) {
    for metric in METRICS {
        let (one, other) = (one.values(metric), other.values(metric));
        assert_eq!(one, other, "{what}: {metric}");
    }
    assert!(weights(one, steps) == weights(other, steps), "{what}: the weights differ");
}

/// Divisions in which ranks of every kind occur; [`twenty_steps_have_the_same_bits_for_all_degrees`] has each kind alone, too.
#[test]
fn steps_have_the_same_bits_with_ranks_of_every_kind() {
    have_the_same_bits(2, |model, name| match model {
        "dense" => ["context_4", "sampler_4_of_2"].contains(&name),
        _ => ["all", "sampler_2_of_4", "expert_2_and_tensor_2"].contains(&name),
    });
}

#[test]
#[ignore = "takes minutes; two steps of some divisions are above"]
fn twenty_steps_have_the_same_bits_for_all_degrees() {
    have_the_same_bits(20, |_, _| true);
}

/// Divisions of dense layers, each with its name.
const OF_LAYERS: [(&str, &[&str]); 11] = [
    ("tensor_2", &["trainer.world=2", "trainer.parallel.tensor=2"]),
    ("tensor_4", &["trainer.world=4", "trainer.parallel.tensor=4"]),
    ("context_2", &["trainer.world=2", "trainer.parallel.context=2"]),
    (
        "context_4",
        &[
            "trainer.world=4",
            "trainer.parallel.context=4",
            "trainer.parallel.exchange=heads",
            "trainer.zero=3",
        ],
    ),
    ("data_4", &["trainer.world=4"]),
    ("sampler_2", &["rollout.tensor=2"]),
    ("sampler_2_of_4", &["rollout.tensor=2", "trainer.world=4", "trainer.zero=3"]),
    (
        "sampler_4_of_2",
        &["rollout.tensor=4", "trainer.world=2", "trainer.parallel.tensor=2", "rollout.speculation=ngram"],
    ),
    ("pipeline_2", &["trainer.world=2", "trainer.parallel.pipeline=2"]),
    ("pipeline_and_data", &["trainer.world=4", "trainer.parallel.pipeline=2", "trainer.zero=3"]),
    (
        "all",
        &[
            "trainer.world=16",
            "trainer.parallel.pipeline=2",
            "trainer.parallel.tensor=2",
            "trainer.parallel.context=2",
            "trainer.zero=3",
        ],
    ),
];

/// Divisions of experts, each with its name.
const OF_EXPERTS: [(&str, &[&str]); 2] = [
    ("expert_4", &["trainer.world=4", "trainer.parallel.expert=4", "trainer.zero=3"]),
    (
        "expert_2_and_tensor_2",
        &["trainer.world=8", "trainer.parallel.expert=2", "trainer.parallel.tensor=2", "trainer.zero=3"],
    ),
];

/// Compares runs of `steps` steps of a dense model and of one with experts with runs of one rank, for the models and divisions that
/// `includes` accepts by name. One division warms up on its own, the others begin with the model that one rank has warmed up.
fn have_the_same_bits(steps: u64, includes: impl Fn(&str, &str) -> bool) {
    let home = Home::new();
    let set_steps = format!("trainer.steps={steps}");
    let experts = [&EXPERTS[..], &["model.random.intermediate_size=64"]].concat();
    for (name, model) in [("dense", &DENSE[..]), ("experts", &experts)] {
        let run = |what: &str, model: &[&str], sets: &[&str]| {
            let sets = [&SYNCHRONOUS[..], &[&set_steps], model, sets].concat();
            home.small(&format!("{name}_{what}"), &sets)
        };
        let expected = run("alone", model, &["checkpoint.keep_last=3"]);
        assert_eq!(expected.values("step").len() as u64, steps);
        let path = format!("model.path={:?}", expected.checkpoint(0).join("model"));
        let warm = [&path[..], "warmup.steps=0"];
        for (what, sets) in OF_LAYERS.iter().filter(|(what, _)| includes(name, what)) {
            let run = run(what, if *what == "all" { model } else { &warm[..] }, sets);
            same(&run, &expected, steps, what);
            let of_sampler = sets.iter().find_map(|set| set.strip_prefix("rollout.tensor="));
            let degree: f64 = of_sampler.map_or(0.0, |degree| degree.parse().unwrap());
            let taken = run.values("weights/taken_bytes");
            assert!(taken.iter().all(|bytes| *bytes == taken[0]), "{what}: {taken:?}");
            if degree == 0.0 {
                assert_eq!(taken[0], 0.0, "{what}");
            } else {
                // Norms, and routers, are on every rank.
                let all = weights(&run, steps).len() as f64;
                assert!(
                    taken[0] > 0.9 * all && taken[0] < all * (1.0 + 0.02 * degree),
                    "{what}: {taken:?} of {all}"
                );
            }
        }
        for (what, sets) in OF_EXPERTS.iter().filter(|(what, _)| name == "experts" && includes(name, what)) {
            same(&run(what, &warm[..], sets), &expected, steps, what);
        }
    }
}

/// A run goes on with another split of trainer and sampler, ranks and samplers as processes among them.
#[test]
fn a_resumed_run_may_have_another_split() {
    let home = Home::new();
    let sets = [&SYNCHRONOUS[..], &EXPERTS, &["checkpoint.interval=2"]].concat();
    let expected = home.small("whole", &[&sets[..], &["trainer.steps=6"]].concat());
    let first = ["trainer.steps=2", "trainer.world=4", "trainer.parallel.tensor=4", "rollout.tensor=2"];
    home.small("split", &[&sets[..], &first].concat());
    let go_on = |steps: &str, sets: &[&str]| {
        let sets = [&[steps], sets].concat();
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        home.rlrun(&[&["resume", "split"], &sets[..]].concat()).ok();
    };
    let context =
        ["trainer.world=2", "trainer.parallel.tensor=1", "trainer.parallel.context=2", "rollout.tensor=4"];
    go_on("trainer.steps=4", &context);
    let both = ["trainer.world=4", "trainer.parallel.tensor=2", "trainer.zero=3", "rollout.tensor=2"];
    let stages = ["trainer.world=2", "trainer.parallel.context=1", "trainer.parallel.pipeline=2"];
    go_on("trainer.steps=5", &stages);
    let both = [&both[..], &["trainer.parallel.pipeline=1"]].concat();
    go_on("trainer.steps=6", &[&both[..], &["trainer.ranks=processes", "placement.processes=true"]].concat());
    same(&home.run("split"), &expected, 6, "resumed");
}

#[test]
fn degrees_that_do_not_fit_are_refused() {
    let home = Home::new();
    let refused = |sets: &[&str], evidence: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let args = [&["small.toml", "--run-dir", "refused", "--set", "eval.correct.reward=regex"][..], &sets];
        home.rlrun(&args.concat()).refused(evidence);
        assert!(!home.path("refused").exists(), "nothing is written");
    };
    let tree = "model.reduction=tree";
    refused(&["trainer.world=2", "trainer.parallel.tensor=2"], &["model.reduction", "tree"]);
    refused(&[tree, "trainer.world=3", "trainer.parallel.tensor=2"], &["`trainer.world` to 4"]);
    refused(&["trainer.world=3", "trainer.parallel.context=3"], &["power of two", "the next is 4"]);
    refused(&[tree, "trainer.world=2", "trainer.parallel.tensor=2", "lora.rank=2"], &["lora"]);
    refused(&["trainer.world=2", "trainer.parallel.pipeline=2", "lora.rank=2"], &["pipeline", "lora"]);
    refused(&["trainer.world=64", "trainer.parallel.pipeline=64"], &["pipeline degree of 64", "layers"]);
    refused(&["trainer.world=2", "trainer.parallel.expert=2", "trainer.zero=3"], &["experts"]);
    refused(&["rollout.tensor=2"], &["parallelism of a sampler", "model.reduction", "tree"]);
    refused(&[tree, "rollout.tensor=8"], &["`rollout.tensor`", "4 query heads", "4 divides everything"]);
    refused(&["trainer.parallel.tensr=2"], &["trainer.parallel.tensor"]);
}
