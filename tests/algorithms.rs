//! Every algorithm trains, and the auxiliary models survive a crash.
//!
//! The task is that of `small.toml`: answers that end in an even digit. Runs are synchronous, so they end with the same bits
//! every time and the rewards compared here are always the same numbers.

use std::fs;

use trainer::algorithm::AlgorithmKind;

use crate::support::{Home, Moment, Run, finish};

/// Steps of a run that must learn.
const STEPS: u64 = 20;
/// Steps over which rewards are averaged.
const WINDOW: usize = 5;

/// Algorithms that every change has to let learn: the losses and baselines that differ most. The others have parts of them.
const LEARNING: [AlgorithmKind; 11] = [
    AlgorithmKind::Grpo,
    AlgorithmKind::Dapo,
    AlgorithmKind::Reinforce,
    AlgorithmKind::Remax,
    AlgorithmKind::Gspo,
    AlgorithmKind::Cispo,
    AlgorithmKind::Sapo,
    AlgorithmKind::Ppo,
    AlgorithmKind::Tb,
    AlgorithmKind::Hpt,
    AlgorithmKind::Distill,
];

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// How much the mean reward rises from the first steps to the last.
fn rise(run: &Run) -> f64 {
    let rewards = run.values("reward/mean");
    mean(&rewards[rewards.len() - WINDOW..]) - mean(&rewards[..WINDOW])
}

/// [`every_algorithm_learns`] trains the others for longer, too.
#[test]
fn every_algorithm_trains_and_those_that_differ_most_learn() {
    algorithms_train(|kind| if LEARNING.contains(&kind) { STEPS } else { 6 });
}

#[test]
#[ignore = "takes a minute; all algorithms train above, and those that differ most learn"]
fn every_algorithm_learns() {
    algorithms_train(|_| STEPS);
}

/// Trains with every algorithm for `steps` steps; one with [`STEPS`] must learn.
fn algorithms_train(steps: impl Fn(AlgorithmKind) -> u64) {
    let home = Home::new();
    let common = ["buffer.max_staleness=0", "seed=3"];
    // All runs begin with its policy after the warm-up. Its policy after training is the teacher of distillation.
    let of_teacher = format!("trainer.steps={STEPS}");
    let teacher = home.small("teacher", &[&common[..], &["checkpoint.interval=100", &of_teacher]].concat());
    let reference = format!("algorithm.reference={:?}", teacher.checkpoint(STEPS).join("model"));
    let start = format!("model.path={:?}", teacher.checkpoint(0).join("model"));
    for &kind in AlgorithmKind::ALL {
        let (word, steps) = (kind.as_str(), steps(kind));
        let (set, set_steps) = (format!("algorithm.kind={word}"), format!("trainer.steps={steps}"));
        let own = [&set[..], &set_steps, &start, "warmup.steps=0", "checkpoint.interval=0"];
        let mut sets = [&common[..], &own].concat();
        match kind {
            AlgorithmKind::Distill => sets.push(&reference),
            AlgorithmKind::Ppo | AlgorithmKind::Vapo => sets.push("critic.learning_rate=2e-3"),
            _ => {}
        }
        let run = home.small(word, &sets);
        assert_eq!(run.values("step").len() as u64, steps, "{word}");
        assert_eq!(run.values("kl/mismatch").iter().fold(0.0_f64, |a, b| a.max(*b)), 0.0, "{word}");
        if steps == STEPS {
            assert!(rise(&run) > 0.2, "{word}: {:?}", run.values("reward/mean"));
        } else {
            assert!(run.values("loss/mean").iter().all(|loss| loss.is_finite()), "{word}");
            let norms = run.values("optim/grad_norm");
            assert!(norms.iter().any(|norm| *norm > 0.0), "{word}: nothing was trained");
        }
    }
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
    parts_combine(&home, |name| !["geometric", "k3"].contains(&name));
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
#[ignore = "other corrections of the mismatch are above"]
fn masks_of_whole_sequences_report_their_metrics() {
    parts_combine(&Home::new(), |name| ["geometric", "k3"].contains(&name));
}

/// Runs the combinations that `includes` accepts by name, and asserts that each has its metrics.
fn parts_combine(home: &Home, includes: impl Fn(&str) -> bool) {
    let short = ["checkpoint.interval=0", "buffer.max_staleness=2"];
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
    for (name, sets, metrics) in cases.into_iter().filter(|(name, ..)| includes(name)) {
        // Divergences grow, and groups are solved, with the steps.
        let steps = if ["loss_kl", "hpt"].contains(&name) { 4 } else { 2 };
        let run = home.small(name, &[&short[..], &[&format!("trainer.steps={steps}")], sets].concat());
        for metric in metrics {
            let values = run.values(metric);
            let is_whole = values.len() == steps && values.iter().all(|v| v.is_finite());
            assert!(is_whole, "{name}: {metric} {values:?}");
        }
    }
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

/// A reward that measures correct answers.
const REWARD: &str = "[[rewards]]\nkind = \"math\"\n";

/// Arguments of training on pairs.
const PAIRS: [&str; 4] = ["--set", "trainer.steps=40", "--set", "trainer.learning_rate=1e-3"];

/// A recipe of 80 supervised steps that ends with `own`. Sections about sampling are errors without sampling, so it does not extend
/// `small.toml`.
fn without_sampling(own: &str) -> String {
    let model = "[model.random]\nhidden_size = 32\nintermediate_size = 64\nnum_heads = 4\nnum_kv_heads = 2\ninitializer_range = 0.06\n";
    let data = "[data]\nmax_prompt_length = 16\n[data.arithmetic]\nmax_operand = 19\ntrain_tasks = 300\neval_tasks = 40\n";
    let rest = "[rollout]\nmax_completion_length = 24\n[trainer]\nsteps = 80\nlearning_rate = 5e-3\n[eval]\ninterval = 40\n[checkpoint]\ninterval = 20\n";
    format!("{model}{data}{rest}{own}")
}

/// Trains on pairs with the loss `kind`: the policy comes to prefer the chosen answers.
fn pairs_are_learned(home: &Home, kind: &str) {
    let own = format!("{REWARD}[supervised]\nkind = \"{kind}\"\nbatch = 16\n");
    home.write("pairs.toml", without_sampling(&own));
    home.rlrun(&[&["pairs.toml", "--run-dir", kind], &PAIRS[..]].concat()).ok();
    let accuracy = home.run(kind).values("pairs/accuracy");
    assert!(mean(&accuracy[30..]) > 0.95, "{kind}: {accuracy:?}");
}

#[test]
fn supervised_training_learns_without_sampling() {
    let home = Home::new();
    home.write("sft.toml", without_sampling(&format!("{REWARD}[supervised]\nbatch = 16\n")));
    home.rlrun(&["sft.toml", "--run-dir", "sft", "--set", "trainer.steps=40"]).ok();
    let losses = home.run("sft").values("loss/mean");
    assert!(losses[39] < 0.8 * losses[0], "{losses:?}");

    home.write("reward.toml", without_sampling("[supervised]\nkind = \"reward_model\"\nbatch = 16\n"));
    home.rlrun(&["reward.toml", "--run-dir", "reward"]).ok();
    let scored = home.run("reward");
    assert_eq!(scored.metrics().last().unwrap()["eval/pair_accuracy"], 1.0);
    let config = fs::read_to_string(scored.checkpoint(80).join("model/config.json")).unwrap();
    assert!(config.contains("Qwen2ForSequenceClassification") && !config.contains("CausalLM"), "{config}");

    pairs_are_learned(&home, "dpo");
    // A stopped and resumed run ends with the same result as an uninterrupted run.
    let mut child = home.start(&[&["pairs.toml", "--run-dir", "killed"], &PAIRS[..]].concat());
    if home.run("killed").wait_for(Moment::Checkpoint(20), &mut child) {
        child.kill().unwrap();
    }
    finish(child);
    home.rlrun(&["resume", "killed"]).ok();
    let bytes = |name: &str| fs::read(home.run(name).checkpoint(40).join("model/model.safetensors")).unwrap();
    assert!(bytes("dpo") == bytes("killed"));
}

#[test]
#[ignore = "the same with another loss is above"]
fn identity_preference_optimisation_learns_without_sampling() {
    pairs_are_learned(&Home::new(), "ipo");
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
