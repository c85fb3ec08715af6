//! The parts of recipes against what is known of them.

use device::device::DeviceLocation;

use super::super::tests::{SIZES, recipe};
use super::*;
use crate::recipe::schema::Lora;
use crate::recipe::words::{DeviceWord, OptimizerKind, TargetModule};

fn config() -> Config {
    Config::fresh(&SIZES)
}

#[test]
fn parts_count_what_they_say() {
    let config = config();
    let memory = Memory::of(&recipe(), &config, 1000);
    let bytes = |name: &str| memory.parts.iter().find(|part| part.name == name).unwrap().bytes;
    let weights = 4 * Layout::new(&config).len() as u64;
    assert_eq!(bytes("policy"), weights);
    assert_eq!(bytes("served"), weights, "the head is also the embedding");
    let mut quantized = recipe();
    quantized.rollout.quantization = Quantization::Int8;
    let served = |recipe: &Recipe| {
        let parts = Memory::of(recipe, &config, 0).parts;
        parts.into_iter().find(|part| part.name == "served").unwrap().bytes
    };
    assert_eq!(served(&quantized), weights - 3 * 2 * (4 * 8 * 8 + 3 * 8 * 16));
    quantized.rollout.quantization = Quantization::Bf16;
    assert_eq!(served(&quantized), weights + 4 * 80 - 2 * (2 * (4 * 8 * 8 + 3 * 8 * 16) + 80));
    assert_eq!(bytes("optimizer"), 2 * weights);
    assert!(memory.parts.iter().all(|part| !["update", "adapter"].contains(&part.name)));
    let (attention, gate_up) = (2 * 8 + 24 + 8, 2 * 16);
    assert_eq!(bytes("activations"), 100 * 4 * (2 * (attention + gate_up) + attention + 8 + 2 * gate_up));
    assert_eq!(bytes("kv cache"), 2 * 2 * 2 * 4 * 640 * 4);
    assert_eq!(bytes("tokenizer"), 2 * 13 * 1000);
    assert_eq!(bytes("logits"), 4 * 10 * 100);
    assert_eq!(memory.bound(), memory.parts.iter().map(|part| part.bytes).sum::<u64>());
    assert_eq!(memory.bound() - memory.total(), bytes("published") + bytes("checkpoint"));
    assert_eq!(memory.to_string().lines().count(), memory.parts.len() + 2);
}

#[test]
fn an_optimizer_of_matrices_and_an_adapter_have_parts_of_their_own() {
    let config = config();
    let mut recipe = recipe();
    let bytes = |recipe: &Recipe, name: &str| {
        Memory::of(recipe, &config, 0).parts.iter().find(|part| part.name == name).unwrap().bytes
    };
    recipe.placement.trainer_threads = Some(3);
    recipe.trainer.optimizer = OptimizerKind::Muon;
    let (all, matrices) = (Layout::new(&config).len() as u64, 2 * (4 * 8 * 8 + 3 * 8 * 16));
    assert_eq!(bytes(&recipe, "optimizer"), 8 * (all - matrices) + 4 * matrices);
    assert_eq!(bytes(&recipe, "update"), 3 * 4 * (2 * 8 * 16 + 2 * 8 * 8));
    recipe.trainer.optimizer = OptimizerKind::Adamw;
    let target_modules = vec![TargetModule::QProj, TargetModule::DownProj];
    recipe.lora = Some(Lora { rank: 2, target_modules, ..Lora::default() });
    let changed = 2 * (2 * (8 + 8) + 2 * (16 + 8));
    assert_eq!(bytes(&recipe, "optimizer"), 8 * changed);
    // Two sums of the tree over four leaves, and the leaf that is computed.
    assert_eq!(bytes(&recipe, "gradients"), 3 * 4 * changed);
    assert_eq!(bytes(&recipe, "adapter"), 4 * (changed + 2 * (8 * 8 + 8 * 16)));
}

#[test]
fn every_zero_stage_shards_one_more_tensor() {
    let mut config = config();
    config.layers = vec![config.layers[0]; 8];
    let mut recipe = recipe();
    recipe.trainer.world = 4;
    let bytes = |recipe: &Recipe, name: &str| {
        Memory::of(recipe, &config, 0).parts.iter().find(|part| part.name == name).unwrap().bytes
    };
    let layout = Layout::new(&config);
    let weights = 4 * layout.len() as u64;
    let (layer, ends) = (4 * layout.layers()[0].len() as u64, 4 * (10 * 8 + 8));
    assert_eq!((bytes(&recipe, "policy"), bytes(&recipe, "gradients")), (4 * weights, 5 * weights));
    recipe.trainer.zero = 2;
    let in_flight = 4 * (ends + 3 * layer);
    assert_eq!((bytes(&recipe, "policy"), bytes(&recipe, "gradients")), (4 * weights, weights + in_flight));
    recipe.trainer.zero = 3;
    assert_eq!(bytes(&recipe, "policy"), weights + 4 * (ends + 2 * layer));
    assert_eq!(bytes(&recipe, "optimizer"), 2 * weights, "it is shared in every stage");
}

#[test]
fn tensor_ranks_keep_some_rows_of_the_residual_streams() {
    let config = config();
    let mut recipe = recipe();
    recipe.trainer.world = 2;
    let activations = |recipe: &Recipe| {
        let parts = Memory::of(recipe, &config, 0).parts;
        parts.into_iter().find(|part| part.name == "activations").unwrap().bytes
    };
    recipe.trainer.parallel.tensor = 2;
    let shard = shard_of(&config, 2);
    let alone = Size::of(&shard, recipe.trainer.recompute, Quantization::None, F32);
    // Of two streams of 8 values in each of two layers another rank has half.
    let of_token = alone.activations_per_token - 4 * 2 * 2 * 8 / 2;
    assert_eq!(activations(&recipe), 2 * micro_batch_tokens(&recipe) * of_token);
}

/// Two layers in two stages: the first has embedding and head too, and one micro-batch more in flight.
#[test]
fn a_device_of_a_stage_has_its_layers_of_the_micro_batches_in_flight() {
    let (config, layout) = (config(), layout_of(&config()));
    let bytes = |stages: usize, name: &str| {
        let mut recipe = recipe();
        recipe.placement.device = DeviceWord::At(DeviceLocation::Cuda(0));
        (recipe.trainer.world, recipe.trainer.parallel.pipeline) = (stages, stages);
        let devices = devices::DeviceMemory::of(&recipe, &config);
        devices[0].parts.iter().find(|part| part.name == name).map(|part| part.bytes)
    };
    let alone = bytes(1, "activations").unwrap();
    // One of two layers, of three micro-batches.
    assert_eq!(bytes(2, "activations"), Some(alone / 2 * 3));
    let (ends, len) = (10 * 8 + 8, layout.len() as u64);
    let (policy, copies) = (bytes(2, "policy").unwrap(), bytes(2, "copies").unwrap());
    assert_eq!((policy, bytes(1, "copies")), (2 * len / 2, None));
    // In bf16 with gradients in f32.
    assert_eq!(copies, (2 + 4) * ends / 2);
}

/// The first of two context ranks has more than half of the tokens of a long sequence, because each attends to fewer.
#[test]
fn a_device_of_a_context_rank_has_the_tokens_of_the_one_with_the_most() {
    let config = config();
    let activations = |context: usize, longest: usize| {
        let mut recipe = recipe();
        recipe.placement.device = DeviceWord::At(DeviceLocation::Cuda(0));
        (recipe.trainer.world, recipe.trainer.parallel.context) = (context, context);
        (recipe.data.max_prompt_length, recipe.rollout.max_completion_length) = (longest / 2, longest / 2);
        recipe.trainer.microbatch_tokens = 40_000;
        let devices = devices::DeviceMemory::of(&recipe, &config);
        let bytes = devices[0].parts.iter().find(|part| part.name == "activations").unwrap().bytes;
        bytes as f64 / micro_batch_tokens(&recipe) as f64
    };
    let (long, short) = (activations(2, 40_000), activations(2, 100));
    assert!(long > 1.3 * short, "{long} {short}");
    // Of two layers in bf16: results of eight values of each, and sent and received queries, keys and values, 24 values.
    let exchanged = (2 * 8 * 2 + 24 * 2 * (2 + 4)) as f64;
    let expected = (activations(1, 100) + exchanged) / 2.0;
    assert!((short - expected).abs() < 0.01 * short, "{short} {expected}");
}

#[test]
fn every_sampler_in_a_process_of_its_own_is_counted() {
    let config = config();
    let bytes = |recipe: &Recipe, name: &str| {
        Memory::of(recipe, &config, 1000).parts.iter().find(|part| part.name == name).unwrap().bytes
    };
    let alone = recipe();
    let mut recipe = alone.clone();
    (recipe.placement.processes, recipe.placement.rollout_workers) = (true, Some(3));
    for (name, count) in [("process", 4), ("tokenizer", 4), ("served", 3), ("kv cache", 3), ("decoding", 3)] {
        assert_eq!(bytes(&recipe, name), count * bytes(&alone, name), "{name}");
    }
}

#[test]
fn sizes_beyond_all_bounds_saturate() {
    let mut recipe = recipe();
    recipe.rollout.max_running = usize::MAX;
    let config = config();
    assert_eq!(Memory::of(&recipe, &config, 0).total(), u64::MAX);
}
