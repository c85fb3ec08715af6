//! Synchronous training by the pipeline equals the plain loop, bit for bit.

use std::path::Path;

use model::{ModelDirectory, Parameters};
use rlrun::pipeline::{self, Ending};
use rlrun::prepare::{Prepared, RewardRuntime};
use rlrun::program::Program;
use rlrun::recipe::Recipe;
use rlrun::report::{Report, Style};
use rlrun::run_dir::{RecipeTexts, RunDir};

use crate::reference_loop::Reference;

const RECIPE: &str = r#"
seed = 7
[model.random]
hidden_size = 32
intermediate_size = 48
num_layers = 2
num_heads = 4
num_kv_heads = 2
initializer_range = 0.2
[data]
max_prompt_length = 16
[data.arithmetic]
train_tasks = 200
eval_tasks = 0
[rollout]
group_size = 4
max_completion_length = 20
max_running = 6
prefill_chunk = 5
[[rewards]]
kind = "regex"
pattern = "[0-4]"
[buffer]
batch_groups = 3
max_staleness = 0
[trainer]
steps = 8
learning_rate = 1e-2
microbatch_tokens = 100000
[checkpoint]
interval = 100
"#;

/// The `regex` reward of the recipe, written out.
fn has_a_small_digit(text: &str) -> f64 {
    f64::from(text.contains(['0', '1', '2', '3', '4']))
}

/// Runs the recipe with `sets` and returns the run's weights, and the recipe.
fn run(root: &Path, name: &str, sets: &[&str]) -> (Parameters, Recipe) {
    let file = root.join(format!("{name}.toml"));
    std::fs::write(&file, RECIPE).unwrap();
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    let program = Program::default();
    let (recipe, origins) = Recipe::load(&file, &sets, &program).unwrap();
    let texts = RecipeTexts { given: RECIPE, resolved: &recipe.resolved_toml(&origins) };
    let run_dir = RunDir::create(&root.join(name), texts).unwrap();
    assert_eq!(
        pipeline::run(&recipe, &run_dir, &std::sync::Arc::new(Report::new(Style::Quiet)), &program).unwrap(),
        Ending::Done
    );
    let trained = run_dir.checkpoints().join("step_000008/model");
    (ModelDirectory::open(&trained).unwrap().load_parameters().unwrap(), recipe)
}

/// Another digest means that this machine computes other bits than others, or that a change of the program does so on all machines: then
/// it is the new value.
#[test]
fn all_machines_compute_the_same_bits() {
    let scratch = tempfile::tempdir().unwrap();
    let dppo = ["algorithm.kind=dppo", "trainer.minibatches=2", "trainer.schedule=cosine"];
    let digests = [("grpo", &[][..]), ("dppo", &dppo)].map(|(name, sets)| {
        let add = |digest: u64, value: &f32| {
            (digest.rotate_left(5) ^ u64::from(value.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        run(scratch.path(), name, sets).0.values().iter().fold(0, add)
    });
    assert_eq!(digests, [6_014_144_896_477_458_504, 14_236_069_219_184_680_920]);
}

#[test]
fn synchronous_training_equals_the_reference_loop_bit_for_bit() {
    let root = tempfile::tempdir().unwrap();
    let (trained, recipe) = run(root.path(), "sync", &[]);
    let directory = ModelDirectory::open(&root.path().join("sync/model")).unwrap();
    let runtime = RewardRuntime::new(&Program::default(), &model::SharedCores::all()).unwrap();
    let prepared = Prepared::new(&recipe, &directory, &runtime, root.path()).unwrap();
    let reference = Reference {
        directory: &directory,
        prompts: &prepared.train,
        reward: has_a_small_digit,
        seed: 7,
        steps: 8,
        batch_groups: 3,
        group_size: 4,
        max_completion_length: 20,
        learning_rate: 1e-2,
        max_grad_norm: 1.0,
        leaves: 4,
    };
    let (expected, rewards) = reference.run();
    assert_ne!(
        directory.load_parameters().unwrap().values(),
        expected.values(),
        "the loop has learned something"
    );
    assert!(rewards.iter().any(|r| *r > 0.0 && *r < 1.0), "{rewards:?}");
    let bits = |parameters: &Parameters| parameters.values().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert!(bits(&trained) == bits(&expected), "the pipeline and the plain loop end with different weights");
}

/// Bits do not depend on the batching and caching of sequences, nor on the store of the buffer.
#[test]
fn batching_and_storage_do_not_change_a_bit() {
    let root = tempfile::tempdir().unwrap();
    let (expected, _) = run(root.path(), "a", &[]);
    let sets = [
        "rollout.max_running=64",
        "rollout.prefill_chunk=512",
        "buffer.store=\"memory\"",
        "rollout.on_update=\"drain\"",
    ];
    let (other, _) = run(root.path(), "b", &sets);
    assert!(expected.values() == other.values());
}

/// All stages with one optimizer, and one stage for each other kind of learner; `trainer/tests/sharded.rs` has their product for
/// the learner alone.
#[test]
fn the_number_of_ranks_does_not_change_a_bit() {
    ranks_change_no_bit(|name, zero, world| match name {
        "adamw" => true,
        "micro-batches" => (zero, world) == (3, 4),
        "dion" => (zero, world) == (2, 4),
        _ => (zero, world) == (1, 2),
    });
}

#[test]
#[ignore = "takes a minute; some of the combinations are above"]
fn no_number_of_ranks_changes_a_bit_in_any_stage() {
    ranks_change_no_bit(|_, _, _| true);
}

/// Compares runs of several ranks with runs of one rank: powers of two up to `trainer.leaves`, for the kinds of learners, ZeRO stages
/// and numbers of ranks that `includes` accepts.
fn ranks_change_no_bit(includes: impl Fn(&str, usize, usize) -> bool) {
    let root = tempfile::tempdir().unwrap();
    let kinds: [(&str, &[&str]); 4] = [
        ("adamw", &[]),
        ("micro-batches", &["trainer.microbatch_tokens=40", "trainer.optimizer=\"adamw8bit\""]),
        ("dion", &["trainer.optimizer=\"dion\"", "trainer.leaves=8"]),
        ("lora", &["lora.rank=2", "trainer.microbatch_tokens=40"]),
    ];
    let groups = "buffer.batch_groups=4";
    for (name, sets) in kinds {
        for zero in 1..=3 {
            let worlds: Vec<usize> =
                [2, 4].into_iter().filter(|world| includes(name, zero, *world)).collect();
            if worlds.is_empty() {
                continue;
            }
            let stage = format!("trainer.zero={zero}");
            let of = |world: usize| {
                let ranks = format!("trainer.world={world}");
                let sets = [sets, &[groups, &stage, &ranks]].concat();
                run(root.path(), &format!("{name}-{zero}-{world}"), &sets).0
            };
            let expected = of(1);
            for world in worlds {
                assert!(
                    expected.values() == of(world).values(),
                    "{name}: {world} ranks differ, stage {zero}"
                );
            }
        }
    }
}

/// With the trainer's state in a file meanwhile, and once in memory.
#[test]
fn taking_turns_does_not_change_a_bit() {
    turns_change_no_bit(|name, how| name == "full" || how == "moved");
}

#[test]
#[ignore = "takes half a minute; one kind of learner with its state in memory is above"]
fn taking_turns_with_the_state_in_memory_does_not_change_a_bit() {
    turns_change_no_bit(|name, how| name != "full" && how == "kept");
}

/// Sampler and trainer alternate on the device, for the kinds of learners and the places of their state that `includes` accepts.
fn turns_change_no_bit(includes: impl Fn(&str, &str) -> bool) {
    let root = tempfile::tempdir().unwrap();
    let kinds: [(&str, &[&str]); 4] = [
        ("full", &[]),
        ("coded", &["trainer.optimizer=\"adamw8bit\"", "model.random.hidden_size=64", "trainer.world=2"]),
        ("lora", &["lora.rank=2", "rollout.on_update=\"drain\"", "rollout.quantization=\"int8\""]),
        ("dion", &["trainer.optimizer=\"dion\"", "algorithm.kl_coef=0.1", "buffer.store=\"memory\""]),
    ];
    for (name, sets) in kinds {
        let run =
            |how: &str, more: &[&str]| run(root.path(), &format!("{name}-{how}"), &[sets, more].concat()).0;
        let colocated = "placement.policy=\"colocated\"";
        let places = [("kept", &[colocated][..]), ("moved", &[colocated, "placement.memory_mib=0"])];
        let places: Vec<_> = places.into_iter().filter(|(how, _)| includes(name, how)).collect();
        if places.is_empty() {
            continue;
        }
        let expected = run("separated", &[]);
        for (how, more) in places {
            let other = run(how, more);
            assert!(expected.values() == other.values(), "{name}: {how} differs");
        }
    }
}
