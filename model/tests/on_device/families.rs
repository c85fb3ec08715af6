//! Families of models on devices: those of `Config::of_family`, and the directories of `tests/goldens` against PyTorch.

use std::sync::Arc;

use device::Device;
use device::device::DeviceLocation;
use model::on_device::{DeviceDecoder, FlatGradients, FlatWeights};
use model::{Architecture, Config, LayerSpec, Layout, Norm, PredictionGradient, Recompute, Sizes, Target};

use super::{DeviceDtype, decodes, distance, trains_in_bf16, trains_in_f32};
use crate::common::{Golden, MODELS, pack_of};

/// Families of dense layers, then of experts.
const FAMILIES: [Architecture; 19] = [
    Architecture::Llama,
    Architecture::Mistral,
    Architecture::Qwen2,
    Architecture::Qwen3,
    Architecture::Phi3,
    Architecture::Smollm3,
    Architecture::Olmo2,
    Architecture::Olmo3,
    Architecture::Granite,
    Architecture::Gemma3,
    Architecture::Qwen3Moe,
    Architecture::Olmoe,
    Architecture::Glm4Moe,
    Architecture::GptOss,
    Architecture::DeepseekV3,
    Architecture::Glm4MoeLite,
    Architecture::Qwen35,
    Architecture::Qwen3Next,
    Architecture::Qwen35Moe,
];

fn config(family: Architecture, num_layers: usize) -> Config {
    let sizes = Sizes {
        vocab_size: 29,
        hidden_size: 32,
        intermediate_size: 24,
        num_layers,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 64,
    };
    Config::fresh(&sizes).of_family(family)
}

#[test]
fn families_train_and_decode() {
    for family in FAMILIES {
        // Every fourth layer of some families differs. Rounding in bf16 adds up over layers, most where only results are normalised,
        // and with experts it changes routes.
        let ([exact, rounded], name) = ([4, 2].map(|layers| config(family, layers)), format!("{family:?}"));
        trains_in_f32(&exact, &name);
        decodes(DeviceDtype::F32, &exact, 1e-4);
        if exact.experts().is_none() {
            trains_in_bf16(&rounded, &name);
            decodes(DeviceDtype::Bf16, &rounded, 0.3);
        }
    }
}

/// Experts whose result is normalised and multiplied, which is in no family.
#[test]
fn results_of_experts_are_normalised() {
    let layer = |layer| LayerSpec { norm: Norm::RmsAround, residual_multiplier: 0.6, ..layer };
    let config = config(Architecture::Glm4Moe, 3).map_layers(layer);
    trains_in_f32(&config, "experts between norms");
    decodes(DeviceDtype::F32, &config, 1e-4);
}

#[test]
fn loss_and_gradients_are_those_of_pytorch() {
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    for name in MODELS {
        let Golden { config, parameters, sequences, temperature, loss, gradients, .. } = Golden::open(name);
        let layout = parameters.layout();
        let decoder = DeviceDecoder::<f32>::new(&device, &config, layout, Recompute::None).unwrap();
        let (mut rows, mut targets, mut slopes) = (Vec::new(), Vec::new(), Vec::new());
        let mut start = 0;
        for sequence in &sequences {
            for (t, token) in sequence.tokens.iter().skip(1).enumerate() {
                rows.push(start + t);
                targets.push(Target { token: *token, temperature, kept: None });
                let logprob = sequence.coefficients[t];
                slopes.push(PredictionGradient { logprob, entropy: 0.0, value: 0.0 });
            }
            start += sequence.tokens.len();
        }
        let pack = pack_of(sequences.iter().map(|sequence| &sequence.tokens[..]));
        let mut weights = FlatWeights::upload(&device, &parameters).unwrap();
        let mut found = FlatGradients::new(&device, layout).unwrap();
        let (predictions, trace) = decoder.forward(&mut weights, &pack, &rows, &targets).unwrap();
        let terms = predictions.iter().zip(&slopes);
        let value: f64 = terms.map(|(p, g)| f64::from(p.logprob) * f64::from(g.logprob)).sum();
        assert!((value - f64::from(loss)).abs() <= 1e-3, "{name}: loss {value}, not {loss}");
        decoder.backward(&mut weights, trace, &slopes, &mut found, None).unwrap();
        let found = device.download(found.buffer().all()).unwrap();
        for spec in layout.specs().iter().filter(|spec| !spec.frozen) {
            let off = distance(&found[spec.range()], &gradients.values()[spec.range()]);
            assert!(off < 1e-3, "{name}: {} is off by {off} of its norm", spec.name);
        }
    }
}

/// What devices refuse, they refuse by name.
#[test]
fn wide_heads_are_refused_by_name() {
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let config = Config { head_dim: 264, ..config(Architecture::Qwen3, 2) };
    let layout = Arc::new(Layout::new(&config));
    let error = DeviceDecoder::<f32>::new(&device, &config, &layout, Recompute::None).unwrap_err();
    assert!(error.to_string().contains("heads of more than 256 values"), "{error}");
}
