//! Runs that are recorded, repeated bit for bit, compared, and trained otherwise on the same trajectories.

use std::fs;
use std::path::Path;

use rollout::remote::EngineKind;

#[cfg(feature = "emulator")]
use crate::devices::FEW;
use crate::fake_engine::FakeEngine;
use crate::support::{CORRECT, Done, Home, Moment, Run, finish, interrupt, repository};

const RECORDED: &str = "log.schedule=true";
/// Long completions of few sequences and steps of several epochs, so that versions come while sequences are in flight.
const IN_FLIGHT: [&str; 8] = [
    "rollout.ignore_stop=true",
    "rollout.max_completion_length=40",
    "rollout.max_running=32",
    "rollout.group_size=4",
    "buffer.batch_groups=2",
    "trainer.epochs=2",
    "trainer.steps=6",
    "buffer.max_staleness=4",
];
/// Steps try smaller micro-batches.
const MICROBATCH: [&str; 2] = ["trainer.adapt_microbatch=true", "trainer.microbatch_tokens=512"];
/// Few small steps of a recipe of the repository, after a short warm-up.
const SHORT: [&str; 8] = [
    "trainer.steps=3",
    "eval.interval=0",
    "warmup.steps=20",
    "warmup.batch_tasks=16",
    "buffer.max_staleness=2",
    "buffer.batch_groups=2",
    "rollout.group_size=4",
    "checkpoint.interval=1",
];

/// Records a run of `recipe` in the run directory `name`.
fn recorded(home: &Home, recipe: &str, name: &str, sets: &[&str]) -> Run {
    let sets = [RECORDED].iter().chain(sets).flat_map(|set| ["--set", set]);
    let args: Vec<&str> = [recipe, "--run-dir", name].into_iter().chain(sets).collect();
    home.rlrun(&args).ok();
    home.run(name)
}

/// Replays the run `name` with `sets`, and asserts that the last checkpoints have the same bytes.
fn replays(home: &Home, name: &str, sets: &[&str]) -> Done {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let args: Vec<&str> = ["replay", name, "-q"].into_iter().chain(sets).collect();
    let done = home.rlrun(&args).ok();
    assert!(done.stdout.contains(" equals ") && done.stdout.contains(" bit for bit: "), "{}", done.stdout);
    let (run, again) = (home.run(name), home.run(&format!("{name}-replay")));
    let step = run.steps().last().unwrap()["step"].as_u64().unwrap();
    for file in ["model/model.safetensors", "optimizer.safetensors", "critic/model/model.safetensors"] {
        let bytes = |run: &Run| fs::read(run.checkpoint(step).join(file)).ok();
        assert!(bytes(&run) == bytes(&again), "{name}: {file} differs");
    }
    for metric in ["reward/mean", "loss/mean", "optim/grad_norm", "kl/mismatch"] {
        assert_eq!(run.values(metric), again.values(metric), "{name}: {metric}");
    }
    home.rlrun(&["check", again.path.join("resolved.toml").to_str().unwrap()]).ok();
    done
}

/// A mode of an asynchronous run: its name, its settings, and those of its replay.
const MODES: [(&str, &[&str], &[&str]); 11] = [
    // Another number of ranks and threads than in the recorded run.
    ("keep", &["rollout.prefill_chunk=3", "trainer.zero=2"], &["trainer.world=2"]),
    (
        "recompute",
        &["rollout.on_update=recompute", "trainer.world=2", "trainer.zero=3"],
        &["trainer.world=1", "placement.trainer_threads=1", "placement.rollout_threads=1"],
    ),
    ("drain", &["rollout.on_update=drain", "rollout.top_p=0.9"], &[]),
    ("colocated", &["placement.policy=colocated", "weights.dtype=bf16"], &[]),
    ("narrow", &["weights.dtype=bf16"], &["trainer.world=2"]),
    (
        "narrow-lora",
        &["weights.dtype=bf16", "lora.rank=4", "placement.processes=true", "placement.rollout_workers=2"],
        &[],
    ),
    ("lora", &["lora.rank=4"], &["trainer.recompute=block"]),
    (
        "critic",
        &["algorithm.kind=ppo", "rollout.on_update=drain", "rollout.top_p=0.9", "rollout.prefill_chunk=3"],
        &["trainer.world=2"],
    ),
    ("curated", &["buffer.on_stale=drop", "curation.success_pool=true"], &[]),
    (
        "samplers",
        &[
            "placement.processes=true",
            "placement.rollout_workers=2",
            "trainer.world=2",
            "trainer.ranks=processes",
            "trainer.elastic.snapshot_every=1",
        ],
        &[],
    ),
    ("microbatch", &MICROBATCH, &["trainer.world=2"]),
];

/// Modes that every change has to pass.
const FEW_MODES: [&str; 5] = ["recompute", "narrow-lora", "critic", "samplers", "microbatch"];

#[test]
fn asynchronous_runs_are_repeated_bit_for_bit() {
    let home = Home::new();
    are_repeated(&home, |name| FEW_MODES.contains(&name));
    let sizes = home.run("microbatch").values("trainer/microbatch_tokens");
    assert_eq!(sizes[..3], [512.0; 3], "the first steps are not compared");
    assert!(sizes.contains(&256.0) && sizes.contains(&128.0), "{sizes:?}");
    assert_eq!(home.run("microbatch-replay").values("trainer/microbatch_tokens"), sizes);
}

#[test]
#[ignore = "takes a minute; five modes are above"]
fn asynchronous_runs_of_every_other_mode_are_repeated_bit_for_bit() {
    are_repeated(&Home::new(), |name| !FEW_MODES.contains(&name));
}

/// Records and replays runs in the modes that `includes` accepts by name.
fn are_repeated(home: &Home, includes: impl Fn(&str) -> bool) {
    for (name, own, otherwise) in MODES.into_iter().filter(|(name, ..)| includes(name)) {
        let sets: Vec<&str> = IN_FLIGHT.iter().chain(own).copied().chain([CORRECT]).collect();
        recorded(home, "small.toml", name, &sets);
        let done = replays(home, name, otherwise);
        assert!(
            done.stdout.contains("6 steps, 1920 tokens of 48 trajectories") || name == "curated",
            "{}",
            done.stdout
        );
    }
}

#[test]
fn runs_with_experts_and_episodes_are_repeated_bit_for_bit() {
    with_experts_and_episodes(|name| ["guess", "roles", "experts"].contains(&name));
}

#[test]
#[ignore = "takes a minute; other runs with experts and with episodes are above"]
fn runs_with_tools_and_with_recurrent_experts_are_repeated_bit_for_bit() {
    with_experts_and_episodes(|name| ["tools", "recurrent"].contains(&name));
}

/// Records and replays the runs that `includes` accepts by name.
fn with_experts_and_episodes(includes: impl Fn(&str) -> bool) {
    let home = Home::new();
    let few = "data.seeds.eval_tasks=8";
    let experts = [
        few,
        "model.random.experts=4",
        "model.random.experts_per_token=2",
        "model.random.architecture=olmoe",
        "rollout.routing_replay=true",
    ];
    let recurrent = [&experts[..3], &["model.random.architecture=qwen3_next"]].concat();
    let runs = [
        // Without a longer warm-up all answers are wrong, and nothing is trained.
        ("tools", "tools_calculator", &["warmup.steps=150", "data.arithmetic.eval_tasks=8"][..]),
        // Episodes whose pages are given up: their next turns prefill them under other versions.
        (
            "guess",
            "guess_number",
            &[few, "rollout.max_running=16", "rollout.kv_cache_tokens=700", "trainer.epochs=3"],
        ),
        ("roles", "selfplay_tictactoe", &[few]),
        ("experts", "guess_number", &experts),
        ("recurrent", "guess_number", &recurrent),
    ];
    for (name, recipe, own) in runs.into_iter().filter(|(name, ..)| includes(name)) {
        let recipe = repository().join(format!("recipes/{recipe}.toml"));
        let sets: Vec<&str> = SHORT.iter().chain(own).copied().collect();
        let run = recorded(&home, recipe.to_str().unwrap(), name, &sets);
        assert!(run.values("optim/grad_norm").iter().any(|norm| *norm > 0.0), "{name}: nothing was trained");
        replays(&home, name, &[]);
    }
}

/// Another program sampled the tokens, which are taken as recorded: the engine is gone when the run is repeated.
#[test]
fn training_on_the_tokens_of_another_engine_is_repeated_bit_for_bit() {
    let home = Home::new();
    let engine = FakeEngine::new(EngineKind::Vllm);
    let urls = format!("rollout.urls=[\"http://{}\"]", engine.address);
    // No request of an older version comes after a push, which the engine of the test does not take.
    let synchronous = ["buffer.max_staleness=0", "trainer.steps=4", "trainer.epochs=2", "eval.interval=0"];
    let sets = [&["rollout.engine=vllm", &urls, CORRECT], &synchronous[..]].concat();
    recorded(&home, "small.toml", "engine", &sets);
    drop(engine);
    let done = replays(&home, "engine", &["trainer.world=2"]);
    let taken = "trajectories of an engine of another program were taken as recorded";
    assert!(
        done.stdout.contains(taken) && done.stdout.contains("0 tokens of 0 trajectories"),
        "{}",
        done.stdout
    );
    assert!(
        home.run("engine").values("optim/grad_norm").iter().any(|norm| *norm > 0.0),
        "nothing was trained"
    );
}

/// What sampled on a device, and ranks that share weights there, repeat their training.
#[cfg(feature = "emulator")]
#[test]
fn training_on_devices_is_repeated_bit_for_bit() {
    let home = Home::new();
    let ranks = ["placement.trainer_device=emulated", "trainer.world=2", "trainer.parallel.tensor=2"];
    for (name, sets) in [("sampler", &["placement.rollout_device=emulated"][..]), ("ranks", &ranks)] {
        recorded(&home, "small.toml", name, &[&FEW[..], &[CORRECT], sets].concat());
        let done = replays(&home, name, &[]);
        let taken = "trajectories of a run on devices were taken as recorded";
        assert!(done.stdout.contains(taken), "{name}: {}", done.stdout);
    }
    for (name, set, message) in [
        (
            "sampler",
            "placement.rollout_device=cpu",
            "`placement.rollout_device` cannot be changed in a replay",
        ),
        ("ranks", "trainer.zero=2", "whose ranks sum in an order of their own"),
    ] {
        home.rlrun(&["replay", name, "--run-dir", "other", "--set", set]).refused(&[message]);
    }
}

#[test]
fn a_run_that_was_killed_and_resumed_is_repeated_from_any_checkpoint() {
    let home = Home::new();
    let sets = [RECORDED, "buffer.max_staleness=2", "trainer.steps=9"];
    let run = home.run("run");
    let mut child = home.start_small("run", &sets);
    for moment in [Moment::Step(2), Moment::Step(5), Moment::Step(7)] {
        if run.wait_for(moment, &mut child) {
            child.kill().unwrap();
        }
        finish(child);
        child = home.start(&["resume", "run"]);
    }
    finish(child).ok();
    // From here on with another recipe.
    home.rlrun(&["resume", "run", "--set", "trainer.steps=12", "--set", "trainer.learning_rate=2e-3"]).ok();
    let done = replays(&home, "run", &[]);
    assert!(done.stdout.contains("12 steps"), "{}", done.stdout);
    let refused =
        home.rlrun(&["replay", "run", "--from", "1", "--run-dir", "no"]).refused(&["step 1 to begin at"]);
    assert!(refused.contains("those of steps 9, 12"), "{refused}");
    let later = home.rlrun(&["replay", "run", "-q", "--from", "9", "--run-dir", "later"]).ok().stdout;
    assert!(later.contains(" bit for bit: 3 steps, "), "{later}");
}

#[test]
fn a_replay_that_is_interrupted_says_what_it_has_compared() {
    let home = Home::new();
    recorded(&home, "small.toml", "run", &[CORRECT, "trainer.steps=40"]);
    let mut child = home.start(&["replay", "run", "-q"]);
    assert!(home.run("run-replay").wait_for(Moment::Step(1), &mut child));
    interrupt(&child);
    let done = finish(child);
    assert_eq!(done.status.code(), Some(75), "{}\n{}", done.stdout, done.stderr);
    for part in [
        "stopped after ",
        " of 40 recorded steps: these equal those of run bit for bit, and the others were not compared",
    ] {
        assert!(done.stderr.contains(part), "`{part}` is missing in:\n{}", done.stderr);
    }
    let again =
        home.rlrun(&["replay", "run", "-q"]).refused(&["choose another for the replay with --run-dir"]);
    assert!(!again.contains("rlrun resume"), "{again}");
    assert!(
        !done.stderr.contains("rlrun resume") && !done.stdout.contains(" bit for bit: "),
        "{}",
        done.stdout
    );
}

#[test]
fn a_resume_without_a_schedule_keeps_no_steps_that_it_makes_again() {
    let home = Home::new();
    let sets = [CORRECT, "trainer.steps=5", "checkpoint.interval=3", "checkpoint.keep_last=9"];
    recorded(&home, "small.toml", "run", &sets);
    fs::remove_dir_all(home.run("run").checkpoint(5)).unwrap();
    home.rlrun(&["resume", "run", "--set", "log.schedule=false"]).ok();
    let done = home.rlrun(&["replay", "run", "-q"]).ok().stdout;
    assert!(done.contains(" bit for bit: 3 steps, "), "{done}");
    // Steps 4 and 5 have no record.
    let resume = ["resume", "run", "--set", "log.schedule=true", "--set", "trainer.steps=7"];
    let resumed = home.rlrun(&resume).ok().stdout;
    assert!(
        resumed.contains("begins anew after step 5") && resumed.contains("it ends at step 3"),
        "{resumed}"
    );
    let later = home.rlrun(&["replay", "run", "-q", "--run-dir", "later"]).ok().stdout;
    assert!(later.contains(" bit for bit: 2 steps, "), "{later}");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in ["resolved.toml", "recipe.toml", "metrics.jsonl", "schedule.bin"] {
        fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

#[test]
fn a_schedule_that_is_not_whole_or_not_of_the_run_is_refused() {
    let home = Home::new();
    let sets = [CORRECT, "trainer.steps=3"];
    let run = recorded(&home, "small.toml", "run", &sets);
    let whole = fs::read(run.path.join("schedule.bin")).unwrap();
    let other = recorded(&home, "small.toml", "other", &[CORRECT, "trainer.steps=3", "seed=5"]);
    let foreign = fs::read(other.path.join("schedule.bin")).unwrap();
    let edited: Vec<u8> =
        whole.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == whole.len() / 2)).collect();
    for (name, bytes, evidence) in [
        ("cut", &whole[..whole.len() - 40], &["was cut, or its run is in progress", "after step 2"][..]),
        (
            "edited",
            &edited[..],
            &["was edited or damaged: the record at byte", "has other bytes than were written"],
        ),
        ("empty", &[], &["is empty"]),
        ("foreign", &foreign[..], &["is the schedule of another run"]),
        ("text", b"not a schedule, but long enough", &["is no schedule that this rlrun reads"]),
    ] {
        let place = home.path(name);
        copy(&run.path, &place);
        fs::write(place.join("schedule.bin"), bytes).unwrap();
        home.rlrun(&["replay", name]).refused(evidence);
        assert!(!home.path(&format!("{name}-replay")).exists(), "{name}: nothing was begun");
    }
    fs::remove_file(home.path("cut/schedule.bin")).unwrap();
    home.rlrun(&["replay", "cut"]).refused(&["is not there", "[log] schedule = true"]);
    let supervised = repository().join("recipes/sft_math.toml");
    let checked = ["check", supervised.to_str().unwrap(), "--set", RECORDED];
    home.rlrun(&checked).refused(&["`log.schedule` records what samplers and trainer did"]);

    for (args, evidence) in [
        (&["--set", "rollout.temperature=0.5"][..], "`rollout.temperature` cannot be changed in a replay"),
        (&["--set", "trainer.learning_rate=1"], "try it with --what-if trainer.learning_rate="),
        (&["--set", "trainer.world=3"], "3 ranks sum in another order"),
        (&["--set", "placement.policy=colocated"], "`placement.policy` cannot be changed"),
        (&["--from", "3"], "has steps 1 to 3"),
        (&["--run-dir", "run/checkpoints/../again"], "is in the recorded run"),
        (&["--what-if", "data.shuffle=false"], "`data.shuffle` cannot be changed"),
    ] {
        home.rlrun(&[&["replay", "run"], args].concat()).refused(&[evidence]);
    }
}

#[test]
fn a_model_that_changed_since_the_run_ends_the_replay_before_its_first_step() {
    let home = Home::new();
    home.small("before", &["trainer.steps=1"]);
    home.rlrun(&["export", "before", "--out", "model"]).ok();
    let sets = [CORRECT, "model.path=model", "warmup.steps=0", "trainer.steps=2"];
    recorded(&home, "small.toml", "run", &sets);
    home.rlrun(&["replay", "run", "-q", "--run-dir", "same"]).ok();
    fs::remove_dir_all(home.path("model")).unwrap();
    home.rlrun(&["export", "run", "--out", "model"]).ok();
    let done = home.rlrun(&["replay", "run", "-q"]);
    assert_eq!(done.status.code(), Some(1), "{}", done.stderr);
    let expected = "before its first step: the weights of step 0 differ in `model.embed_tokens.weight`";
    assert!(done.stderr.contains(expected), "{}", done.stderr);
}

#[test]
fn another_build_is_named_before_a_replay() {
    let home = Home::new();
    recorded(&home, "small.toml", "run", &[CORRECT, "trainer.steps=1"]);
    let own = home.rlrun(&["replay", "run", "--run-dir", "own"]).ok().stdout;
    assert!(!own.contains("another build"), "{own}");
    // The program with a byte more at its end is another file that computes the same.
    let program = home.path("rlrun-other");
    fs::copy(env!("CARGO_BIN_EXE_rlrun"), &program).unwrap();
    let mut bytes = fs::OpenOptions::new().append(true).open(&program).unwrap();
    std::io::Write::write_all(&mut bytes, b"\n").unwrap();
    drop(bytes);
    let mut command = std::process::Command::new(&program);
    let output =
        command.args(["replay", "run", "--run-dir", "other"]).current_dir(home.path("")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("steps 1 to 1 were recorded by another build of rlrun"), "{text}");
    assert!(text.contains("may differ in their last bits"), "{text}");
}

#[test]
fn runs_that_differ_in_a_key_differ_first_where_it_acts() {
    let home = Home::new();
    let sets = [CORRECT, "trainer.steps=3", "buffer.max_staleness=0"];
    recorded(&home, "small.toml", "one", &sets);
    recorded(&home, "small.toml", "same", &sets);
    recorded(&home, "small.toml", "other", &[&sets[..], &["trainer.learning_rate=2e-3"]].concat());
    let same = home.rlrun(&["diff", "one", "same"]).ok().stdout;
    assert!(same.starts_with("one and same are equal in what could be compared"), "{same}");

    let other = home.rlrun(&["diff", "one", "other"]).ok().stdout;
    for line in [
        "recipe: trainer.learning_rate 0.001 -> 0.002",
        "step 1: the weights differ after it, first `model.embed_tokens.weight`; learning rate 0.001 and 0.002",
        "metrics: first in step 1, `optim/lr`",
        "checkpoint 3: `model.embed_tokens.weight` differs in ",
    ] {
        assert!(other.contains(line), "`{line}` is missing in:\n{other}");
    }
    home.small("unrecorded", &["trainer.steps=1"]);
    for line in ["equal: all tensors of the policy in ", "equal: optimizer.safetensors of "] {
        assert!(same.contains(line), "`{line}` is missing in:\n{same}");
    }
    fs::copy(home.path("other/schedule.bin"), home.path("same/schedule.bin")).unwrap();
    let foreign = home.rlrun(&["diff", "one", "same"]).ok().stdout;
    assert!(foreign.contains("same/schedule.bin` is the schedule of another run"), "{foreign}");
    assert!(!foreign.contains("of the schedules"), "{foreign}");
    let without = home.rlrun(&["diff", "one", "unrecorded"]).ok().stdout;
    assert!(
        without.contains("not compared: trajectories and the weights of every step: unrecorded has no"),
        "{without}"
    );
    assert!(without.contains("not compared: metrics of steps 2 to 3 (2): only one has them"), "{without}");
    assert!(
        without.contains("not compared: recipe keys that change nothing else: log.schedule"),
        "{without}"
    );
    home.rlrun(&["diff", "one", "small.toml"]).refused(&["is no run directory"]);
}

#[test]
fn an_arm_trains_on_recorded_trajectories_until_they_are_of_another_policy() {
    let home = Home::new();
    recorded(&home, "small.toml", "run", &[CORRECT, "trainer.steps=5"]);
    let arm = |dir: &str, args: &[&str]| {
        home.rlrun(&[&["replay", "run", "-q", "--run-dir", dir], args].concat()).ok().stdout
    };
    let near = arm("near", &["--what-if", "trainer.learning_rate=9e-4"]);
    assert!(near.contains("5 recorded batches of run; no bound was crossed"), "{near}");
    let near = home.run("near");
    assert_eq!(near.values("optim/lr"), [f64::from(9e-4_f32); 5]);
    let (own, of_run) = (near.values("reward/mean"), home.run("run").values("reward/mean"));
    assert_eq!(own, of_run, "the trajectories are those of the run");
    assert!(near.checkpoint(5).is_dir());

    let far = arm("far", &["--what-if", "trainer.learning_rate=5e-2"]);
    assert!(
        far.contains("it stopped after step") && far.contains("more than --max-kl 0.05 above the"),
        "{far}"
    );
    let steps = home.run("far").steps().len();
    assert!(steps < 5, "{steps} steps");
    let all = arm("all", &["--what-if", "trainer.learning_rate=5e-2", "--keep-going"]);
    assert!(
        all.contains("5 recorded batches of run") && all.contains("a bound was crossed in step"),
        "{all}"
    );
    assert_eq!(home.run("all").steps().len(), 5);
}
