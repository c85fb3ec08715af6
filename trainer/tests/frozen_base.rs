//! Training an adapter over a base that stays quantised.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use device::device::DeviceLocation;
use model::on_device::DeviceDtype;
use model::{AdaptedBase, Decoder, FrozenParameters, Pack, Parameters, Recompute, Target, ThreadPool};
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::loss::preference::Preference;
use trainer::supervised::{PairLoss, imitate};
use trainer::{DeviceConfig, Frozen, FrozenWeights, Learner, LearnerConfig, StateWeights};

use crate::spread::Processes;
use crate::{LEARNER, config, groups, samples};

/// Modules by their names in Hugging Face and in GGUF files.
const MODULES: [(&str, &str); 11] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Writes the weights of a model with 8-bit matrices.
fn write(path: &Path, parameters: &Parameters) {
    let tensor = |spec: &model::ParameterSpec| {
        let (module, kind) = spec.name.rsplit_once('.').unwrap();
        let (layer, module) = match module.strip_prefix("model.layers.") {
            Some(rest) => rest.split_once('.').unwrap(),
            None => ("", module),
        };
        let (_, name) = MODULES.iter().find(|(theirs, _)| *theirs == module).unwrap();
        let name =
            if layer.is_empty() { format!("{name}.{kind}") } else { format!("blk.{layer}.{name}.{kind}") };
        let values = Tensor::from_slice(parameters.get(&spec.name), &spec.shape[..], &Device::Cpu).unwrap();
        let dtype = if spec.shape.len() == 1 { GgmlDType::F32 } else { GgmlDType::Q8_0 };
        (name, QTensor::quantize(&values, dtype).unwrap())
    };
    let tensors: Vec<_> = parameters.layout().specs().iter().map(tensor).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (&name[..], tensor)).collect();
    let architecture = Value::String("qwen2".to_owned());
    gguf_file::write(&mut File::create(path).unwrap(), &[("general.architecture", &architecture)], &tensors)
        .unwrap();
}

/// A base whose rows are whole blocks.
fn base() -> Arc<FrozenParameters> {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.gguf");
    let config = config();
    write(&path, &Parameters::random(&config, 5));
    Arc::new(FrozenParameters::load(&path, &config).unwrap())
}

fn adapter(base: &FrozenParameters) -> Adapter {
    let lora = LoraConfig { rank: 3, alpha: 6.0, target_modules: TargetModule::BLOCK.to_vec() };
    Adapter::over(lora, base, 1)
}

#[test]
fn an_adapter_learns_over_a_quantised_base_in_the_memory_of_its_file() {
    let (base, groups) = (base(), groups());
    let rows = samples(&groups);
    let settings = LearnerConfig { leaves: 1, ..LEARNER };
    let mut learner = Learner::over(settings, Arc::clone(&base), adapter(&base), None).unwrap();
    let losses: Vec<f64> = (0..12).map(|_| imitate(&mut learner, &rows, 1e-2).unwrap().loss).collect();
    assert!(losses[11] < 0.8 * losses[0], "{losses:?}");
    assert_eq!(learner.updates(), 12);

    // Factors, their gradients and two moments.
    let factors = 4 * learner.adapter().unwrap().values().len() as u64;
    assert_eq!(learner.bytes(), base.bytes() + 4 * factors);
    let in_f32 = 4 * base.layout().len() as u64;
    assert!(3 * base.bytes() < in_f32, "{} of {in_f32}", base.bytes());

    // A sampler of the same base and factors computes what the trainer does.
    let decoder = Decoder::frozen(&base, learner.adapter().unwrap().factors(), Recompute::None);
    let scored = learner.score(&rows).unwrap();
    for (row, scored) in rows.iter().zip(scored) {
        let tokens = row.token_ids();
        let mut pack = Pack::new();
        pack.push(tokens).unwrap();
        let positions: Vec<usize> =
            (1..tokens.len()).filter(|t| row.loss_mask()[*t]).map(|t| t - 1).collect();
        let target = |t: &usize| Target { token: tokens[t + 1], temperature: row.temperature(), kept: None };
        let targets: Vec<_> = positions.iter().map(target).collect();
        let found = decoder.score(&pack, &positions, &targets, &ThreadPool::single()).unwrap();
        assert_eq!(found, scored);
    }
}

/// Norms of the gradients of some steps, and the factors after them.
fn steps(mut learner: Learner) -> (Vec<f32>, Vec<f32>) {
    let groups = groups();
    let rows = samples(&groups);
    let norms = (0..3).map(|_| imitate(&mut learner, &rows, 1e-2).unwrap().grad_norm).collect();
    (norms, learner.adapter().unwrap().values().to_vec())
}

/// Threads share the base; processes receive it from the leader.
#[test]
fn ranks_train_an_adapter_over_a_base_with_the_bits_of_one() {
    let base = base();
    for zero in [1, 2] {
        let settings = LearnerConfig { leaves: 4, zero, microbatch_tokens: 4096, ..LEARNER };
        let expected =
            steps(Learner::over(settings.clone(), Arc::clone(&base), adapter(&base), None).unwrap());
        for world in [2, 4] {
            let settings = LearnerConfig { world, ..settings.clone() };
            let threads = Learner::over(settings.clone(), Arc::clone(&base), adapter(&base), None).unwrap();
            assert!(steps(threads) == expected, "{world} threads, stage {zero}");
            let processes = Processes::new(world);
            let weights = StateWeights::Quantized(Arc::clone(&base));
            let (model, adapter) = (base.config().clone(), Some(adapter(&base)));
            let learner = processes.leader.learner(settings, model, weights, adapter, None).unwrap();
            assert!(steps(learner) == expected, "{world} processes, stage {zero}");
            processes.end();
        }
    }
}

/// A preference loss compares with the factors of the start, which followers receive once, on the processor and on a device.
#[test]
fn ranks_compare_with_other_factors_over_the_base() {
    let base = base();
    let groups = groups();
    let rows = samples(&groups);
    let rows = &rows[..rows.len() / 2 * 2];
    let of_start = || {
        let start = AdaptedBase::new(Arc::clone(&base), Arc::clone(adapter(&base).factors()));
        Box::new(Frozen { weights: FrozenWeights::Adapted(start), pool: None })
    };
    let losses = |mut learner: Learner| {
        let preference = Preference::Dpo { beta: 0.5, smoothing: 0.0 };
        let pairs = PairLoss::Preference { preference, reference: of_start() };
        [0; 3].map(|_| pairs.step(&mut learner, rows, 1e-2).unwrap().loss)
    };
    let settings = LearnerConfig { leaves: 2, ..LEARNER };
    let expected = losses(Learner::over(settings.clone(), Arc::clone(&base), adapter(&base), None).unwrap());
    assert!((expected[0] - 2.0_f64.ln()).abs() < 1e-6 && expected[2] < expected[0], "{expected:?}");
    let processes = Processes::new(2);
    let (model, weights) = (base.config().clone(), StateWeights::Quantized(Arc::clone(&base)));
    let adapter_of = Some(adapter(&base));
    let learner = processes.leader.learner(settings.clone(), model, weights, adapter_of, None).unwrap();
    assert!(losses(learner) == expected, "processes");
    processes.end();
    if cfg!(feature = "emulator") {
        let device = Some(DeviceConfig::new(DeviceLocation::of_tests(), DeviceDtype::F32));
        let settings = LearnerConfig { device, ..settings };
        let found = losses(Learner::over(settings, Arc::clone(&base), adapter(&base), None).unwrap());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-3, "{found} on a device, not {expected}");
        }
    }
}

/// A device has the bytes of the file, and none of its weights in f32 but those of a layer and of embedding and tail.
#[cfg(feature = "emulator")]
#[test]
fn a_device_trains_an_adapter_over_a_base_that_stays_quantised() {
    let base = base();
    let eps = trainer::optimizer::OptimizerConfig { eps: 1e-2, ..LEARNER.optimizer };
    let settings = LearnerConfig { leaves: 1, optimizer: eps, ..LEARNER };
    let (norms, factors) =
        steps(Learner::over(settings.clone(), Arc::clone(&base), adapter(&base), None).unwrap());
    for (world, dtype, tolerance) in
        [(1, DeviceDtype::F32, 1e-3), (2, DeviceDtype::F32, 1e-3), (1, DeviceDtype::Bf16, 0.05)]
    {
        let place = DeviceLocation::of_tests();
        let device = Some(DeviceConfig { places: [place; 2].into(), ..DeviceConfig::new(place, dtype) });
        let settings = LearnerConfig { device, world, ..settings.clone() };
        let learner = Learner::over(settings, Arc::clone(&base), adapter(&base), None).unwrap();
        assert!(learner.adapted().is_some() && learner.device_weights().is_none());
        let (of_device, found) = steps(learner);
        for (found, expected) in of_device.iter().zip(&norms) {
            assert!((found - expected).abs() < tolerance * expected, "{dtype:?}: {found}, not {expected}");
        }
        let off = found.iter().zip(&factors).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < tolerance, "{world} ranks in {dtype:?}: {off}");
    }
}

#[test]
fn what_needs_weights_in_f32_is_refused() {
    let base = base();
    let learner = Learner::over(LEARNER, Arc::clone(&base), adapter(&base), None).unwrap();
    let message = learner.parameters().unwrap_err().to_string();
    assert!(message.contains("stays quantised"), "{message}");
}
