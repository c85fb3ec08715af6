//! Training an adapter over a base that stays quantised.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use model::{Decoder, FrozenParameters, Pack, Parameters, Recompute, Target, ThreadPool};
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::supervised::imitate;
use trainer::{Learner, LearnerConfig};

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

#[test]
fn what_needs_weights_in_f32_is_refused() {
    let base = base();
    let learner = Learner::over(LEARNER, Arc::clone(&base), adapter(&base), None).unwrap();
    let message = learner.parameters().unwrap_err().to_string();
    assert!(message.contains("stays quantised"), "{message}");
    let settings = LearnerConfig { world: 2, ..LEARNER };
    let message = Learner::over(settings, Arc::clone(&base), adapter(&base), None).unwrap_err().to_string();
    assert!(message.contains("trainer.world"), "{message}");
}
