//! Every algorithm learns, and the auxiliary models survive a crash.
//!
//! The task is that of `small.toml`: answers that end in an even digit. Runs are synchronous, so they end with the same bits
//! every time and the rewards compared here are always the same numbers.

use std::fs;

use trainer::algorithm::AlgorithmKind;

use crate::support::{Home, Moment, Run, finish};

/// Steps of a run that must learn.
const STEPS: usize = 20;
/// Steps over which rewards are averaged.
const WINDOW: usize = 5;

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// How much the mean reward rises from the first steps to the last.
fn rise(run: &Run) -> f64 {
    let rewards = run.values("reward/mean");
    mean(&rewards[rewards.len() - WINDOW..]) - mean(&rewards[..WINDOW])
}

fn every_algorithm_learns(kinds: &[AlgorithmKind]) {
    let home = Home::new();
    let steps = format!("trainer.steps={STEPS}");
    let common = ["buffer.max_staleness=0", "checkpoint.interval=0", "seed=3", &steps];
    // Its policy after training is the teacher of distillation.
    let teacher = home.small("teacher", &common);
    let reference = format!("algorithm.reference={:?}", teacher.checkpoint(STEPS as u64).join("model"));
    for kind in kinds {
        let word = kind.as_str();
        let set = format!("algorithm.kind={word}");
        let mut sets = [&common[..], &[&set]].concat();
        match kind {
            AlgorithmKind::Distill => sets.push(&reference),
            AlgorithmKind::Ppo | AlgorithmKind::Vapo => sets.push("critic.learning_rate=2e-3"),
            _ => {}
        }
        let run = home.small(word, &sets);
        assert!(rise(&run) > 0.2, "{word}: {:?}", run.values("reward/mean"));
        assert_eq!(run.values("kl/mismatch").iter().fold(0.0_f64, |a, b| a.max(*b)), 0.0, "{word}");
    }
}

#[test]
fn the_first_half_of_the_algorithms_learns() {
    every_algorithm_learns(&AlgorithmKind::ALL[..AlgorithmKind::ALL.len() / 2]);
}

#[test]
fn the_second_half_of_the_algorithms_learns() {
    every_algorithm_learns(&AlgorithmKind::ALL[AlgorithmKind::ALL.len() / 2..]);
}

#[test]
fn a_critic_can_be_a_head_of_the_policy() {
    let home = Home::new();
    let sets =
        ["algorithm.kind=ppo", "critic.kind=shared", "critic.value_clip=0.5", "trainer.steps=20", "seed=3"];
    let run =
        home.small("shared", &[&sets[..], &["buffer.max_staleness=0", "trainer.minibatches=2"]].concat());
    assert!(rise(&run) > 0.2, "{:?}", run.values("reward/mean"));
    let losses = run.values("critic/loss");
    assert!(mean(&losses[15..]) < 0.6 * mean(&losses[..5]), "{losses:?}");
}

#[test]
fn parts_of_algorithms_combine_and_report_their_metrics() {
    let home = Home::new();
    let short = ["trainer.steps=4", "checkpoint.interval=0", "buffer.max_staleness=2"];
    let cases: [(&str, &[&str], &[&str]); 9] = [
        ("loss_kl", &["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k2"], &["kl/ref"]),
        (
            "reward_kl",
            &["algorithm.kind=reinforce_pp", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
            &["kl/ref"],
        ),
        ("entropy", &["algorithm.entropy_coef=0.01", "algorithm.entropy_share=0.5"], &["is/masked_frac"]),
        ("dual", &["algorithm.dual_clip=3", "trainer.epochs=3"], &["clip/dual_mean"]),
        ("token_mask", &["algorithm.correction=token_mask"], &["is/masked_frac", "is/ess"]),
        ("geometric", &["algorithm.correction=geometric_mask", "trainer.minibatches=2"], &["is/masked_frac"]),
        ("k3", &["algorithm.correction=k3_mask"], &["is/masked_frac"]),
        ("interpolate", &["algorithm.proximal=interpolate", "trainer.minibatches=4"], &["is/ess"]),
        ("hpt", &["algorithm.kind=hpt", "algorithm.demonstration_gate=0.5"], &["demonstrated_frac"]),
    ];
    for (name, sets, metrics) in cases {
        let run = home.small(name, &[&short[..], sets].concat());
        for metric in metrics {
            let values = run.values(metric);
            assert!(values.len() == 4 && values.iter().all(|v| v.is_finite()), "{name}: {metric} {values:?}");
        }
    }
    // Half of the tokens are masked. Solved groups of HPT have no demonstration.
    let masked = home.run("entropy").values("is/masked_frac");
    assert!(masked.iter().all(|share| (0.35..=0.5).contains(share)), "{masked:?}");
    let demonstrated = home.run("hpt").values("demonstrated_frac");
    assert!(demonstrated.iter().any(|share| *share > 0.0), "{demonstrated:?}");
    // The reference is the policy before the first step.
    assert_eq!(home.run("loss_kl").values("kl/ref")[0], 0.0);
    assert!(home.run("loss_kl").values("kl/ref")[3] > 0.0);
}

#[test]
fn a_killed_run_with_critic_and_reference_ends_with_the_same_bits() {
    let home = Home::new();
    let sets = [
        "algorithm.kind=ppo",
        "algorithm.kl_coef=0.05",
        "critic.pretrain_steps=4",
        "critic.learning_rate=1e-3",
        "trainer.warmup_steps=2",
        "buffer.max_staleness=0",
    ];
    let whole = home.small("whole", &sets);
    let run = home.run("killed");
    let mut child = home.start_small("killed", &sets);
    for moment in [Moment::Start(1), Moment::Checkpoint(3), Moment::Checkpoint(6)] {
        if run.wait_for(moment, &mut child) {
            child.kill().unwrap();
        }
        finish(child);
        child = home.start(&["resume", "killed"]);
    }
    finish(child).ok();
    let files = ["model/model.safetensors", "critic/model/model.safetensors", "critic/optimizer.safetensors"];
    for file in files {
        let bytes = |run: &Run| fs::read(run.checkpoint(12).join(file)).unwrap();
        assert!(bytes(&whole) == bytes(&run), "{file} differs");
    }
    assert_eq!(whole.values("critic/loss"), run.values("critic/loss"));
    let norms = whole.values("optim/grad_norm");
    assert!(
        norms[..4].iter().all(|norm| *norm == 0.0) && norms[4] > 0.0,
        "only the critic learns: {norms:?}"
    );
    let rates = whole.values("optim/lr");
    assert!((rates[4] / rates[5] - 0.5).abs() < 1e-6, "then the policy begins its warm-up: {rates:?}");
}

#[test]
fn supervised_training_learns_without_sampling() {
    let home = Home::new();
    let small = fs::read_to_string(home.path("small.toml")).unwrap();
    let without = |recipe: &str| {
        // Sections about sampling are errors without sampling, so this recipe does not extend `small.toml`.
        let model = "[model.random]\nhidden_size = 32\nintermediate_size = 64\nnum_heads = 4\nnum_kv_heads = 2\ninitializer_range = 0.06\n";
        let data = "[data]\nmax_prompt_length = 16\n[data.arithmetic]\nmax_operand = 19\ntrain_tasks = 300\neval_tasks = 40\n";
        let rest = "[rollout]\nmax_completion_length = 24\n[trainer]\nsteps = 80\nlearning_rate = 5e-3\n[eval]\ninterval = 40\n[checkpoint]\ninterval = 20\n";
        format!("{model}{data}{rest}{recipe}")
    };
    assert!(small.contains("[buffer]"));
    let reward = "[[rewards]]\nkind = \"math\"\n";
    home.write("sft.toml", without(&format!("{reward}[supervised]\nbatch = 16\n")));
    home.rlrun(&["sft.toml", "--run-dir", "sft"]).ok();
    let losses = home.run("sft").values("loss/mean");
    assert!(losses[79] < 0.4 * losses[0], "{losses:?}");

    home.write("reward.toml", without("[supervised]\nkind = \"reward_model\"\nbatch = 16\n"));
    home.rlrun(&["reward.toml", "--run-dir", "reward"]).ok();
    let scored = home.run("reward");
    assert_eq!(scored.metrics().last().unwrap()["eval/pair_accuracy"], 1.0);
    let config = fs::read_to_string(scored.checkpoint(80).join("model/config.json")).unwrap();
    assert!(config.contains("Qwen2ForSequenceClassification") && !config.contains("CausalLM"), "{config}");

    for kind in ["dpo", "ipo"] {
        let recipe = format!("{reward}[supervised]\nkind = \"{kind}\"\nbatch = 16\n");
        home.write("pairs.toml", without(&recipe));
        home.rlrun(&[
            "pairs.toml",
            "--run-dir",
            kind,
            "--set",
            "trainer.steps=40",
            "--set",
            "trainer.learning_rate=1e-3",
        ])
        .ok();
        let accuracy = home.run(kind).values("pairs/accuracy");
        assert!(mean(&accuracy[30..]) > 0.95, "{kind}: {accuracy:?}");
    }

    // A stopped and resumed run ends with the same result as an uninterrupted run.
    home.write("pairs.toml", without(&format!("{reward}[supervised]\nkind = \"dpo\"\nbatch = 16\n")));
    let args = [
        "pairs.toml",
        "--run-dir",
        "killed",
        "--set",
        "trainer.steps=40",
        "--set",
        "trainer.learning_rate=1e-3",
    ];
    let mut child = home.start(&args);
    if home.run("killed").wait_for(Moment::Checkpoint(20), &mut child) {
        child.kill().unwrap();
    }
    finish(child);
    home.rlrun(&["resume", "killed"]).ok();
    let bytes = |name: &str| fs::read(home.run(name).checkpoint(40).join("model/model.safetensors")).unwrap();
    assert!(bytes("dpo") == bytes("killed"));
}

#[test]
fn pairs_and_demonstrations_are_read_from_files() {
    let home = Home::new();
    // Both formats of TRL: texts and messages.
    let row = |n: usize| {
        let rejected = format!(r#"[{{"role": "assistant", "content": "{n} is odd"}}]"#);
        format!(r#"{{"prompt": "{n}?", "chosen": "{n} is even", "rejected": {rejected}, "text": "even"}}"#)
    };
    home.write("rows.jsonl", (0..24).map(row).collect::<Vec<_>>().join("\n"));
    let recipe = |supervised: &str| {
        format!(
            "[model.random]\nhidden_size = 16\nintermediate_size = 32\n[data]\ntrain = \"rows.jsonl\"\neval = \"rows.jsonl\"\n\
             max_prompt_length = 8\n[rollout]\nmax_completion_length = 16\n[trainer]\nsteps = 30\nlearning_rate = 1e-2\n\
             [eval]\ninterval = 0\n[supervised]\nbatch = 8\n{supervised}"
        )
    };
    home.write("reward.toml", recipe("kind = \"reward_model\"\n"));
    home.rlrun(&["reward.toml", "--run-dir", "reward"]).ok();
    assert_eq!(home.run("reward").metrics().last().unwrap()["eval/pair_accuracy"], 1.0);

    let reward = "[[rewards]]\nkind = \"regex\"\npattern = \"even\"\n";
    home.write("sft.toml", recipe(&format!("completion_column = \"text\"\n{reward}")));
    home.rlrun(&["sft.toml", "--run-dir", "sft"]).ok();
    let losses = home.run("sft").values("loss/mean");
    assert!(losses[29] < 0.2 * losses[0], "{losses:?}");

    home.write("wrong.toml", recipe(&format!("completion_column = \"txt\"\n{reward}")));
    home.rlrun(&["wrong.toml", "--run-dir", "wrong"])
        .refused(&["task 0 has no text in column `txt`", "chosen"]);
}

#[test]
fn keys_without_effect_on_the_algorithm_are_refused() {
    let home = Home::new();
    let refused = |sets: &[&str], evidence: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["check", "small.toml"].into_iter().chain(sets).collect();
        home.rlrun(&args).refused(evidence);
    };
    refused(
        &["algorithm.kind=cispo", "algorithm.clip_eps_low=0.1"],
        &["`algorithm.clip_eps_low` has no effect"],
    );
    refused(&["algorithm.kind=grpo", "algorithm.beta=0.1"], &["`algorithm.beta` has no effect", "\"grpo\""]);
    refused(
        &["algorithm.kind=gdpo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
        &["`algorithm.kl_in` has no effect"],
    );
    refused(&["algorithm.kl_estimator=k1"], &["`algorithm.kl_estimator` has no effect"]);
    refused(&["algorithm.proximal=behavior", "algorithm.correction=token_mask"], &["`algorithm.correction`"]);
    refused(
        &["algorithm.correction=token_mask", "algorithm.behavior_weight_floor=9"],
        &["nothing lies between"],
    );
    refused(&["algorithm.kind=distill"], &["needs a teacher", "algorithm.reference"]);
    refused(&["algorithm.kind=pass_at_k", "algorithm.attempts=9"], &["`algorithm.attempts` is 9", "only 8"]);
    refused(
        &["algorithm.kind=ppo", "critic.kind=shared", "critic.pretrain_steps=3"],
        &["`critic.pretrain_steps`"],
    );
    refused(&["critic.lambda=1"], &["has no critic"]);
    refused(&["rollout.group_size=1"], &["`rollout.group_size` is 1"]);
    refused(&["algorithm.kind=grpoo"], &["did you mean \"grpo\"?"]);
    refused(&["supervised.kind=sft"], &["`buffer` has no effect", "`[supervised]`"]);
    let ok = home
        .rlrun(&["check", "small.toml", "--set", "algorithm.kind=ppo", "--set", "rollout.group_size=1"])
        .ok();
    assert!(ok.stdout.contains("no mistakes"), "{}", ok.stdout);
}
