//! Adapters against their formula in f64, and their files against PEFT's.

use half::{bf16, f16};
use model::{Config, Layout, SharedCores, Sizes};
use safetensors::tensor::{Dtype, TensorView};

use super::*;
use crate::moments::noise;

fn base() -> Parameters {
    Parameters::random(&small_config(), 3)
}

/// With an embedding that is not the head.
fn untied() -> Parameters {
    Parameters::random(&Config { tie_word_embeddings: false, ..small_config() }, 3)
}

fn small_config() -> Config {
    Config::fresh(&Sizes {
        vocab_size: 20,
        hidden_size: 16,
        intermediate_size: 24,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 8,
    })
}

fn config(target_modules: &[TargetModule]) -> LoraConfig {
    LoraConfig { rank: 4, alpha: 6.0, target_modules: target_modules.to_vec() }
}

/// An adapter with random `B`.
fn changed(target_modules: &[TargetModule], base: &Parameters) -> Adapter {
    let mut adapter = Adapter::new(config(target_modules), base, 7);
    for (i, value) in adapter.values_mut().iter_mut().enumerate() {
        *value = noise(i as u32) as f32 / u32::MAX as f32 - 0.5;
    }
    adapter
}

#[test]
fn a_new_adapter_has_peft_initialisation_and_changes_nothing() {
    let base = base();
    let adapter = Adapter::new(config(&TargetModule::BLOCK), &base, 7);
    assert_eq!(adapter.specs().len(), 2 * 7 * 2);
    let first: Vec<_> = adapter.specs()[..2].iter().map(|spec| (&spec.name[..], &spec.shape[..])).collect();
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora";
    assert_eq!(
        first,
        [(&format!("{name}_A.weight")[..], &[4, 16][..]), (&format!("{name}_B.weight"), &[16, 4])]
    );
    for spec in adapter.specs() {
        let values = &adapter.values()[spec.range()];
        if spec.name.contains("lora_B") {
            assert!(values.iter().all(|x| *x == 0.0));
            continue;
        }
        // torch.nn.init.kaiming_uniform_(a=sqrt(5)): sqrt(6 / (1 + 5) / fan_in).
        let bound = 1.0 / (spec.shape[1] as f32).sqrt();
        let (low, high) = values.iter().fold((0.0_f32, 0.0_f32), |(l, h), x| (l.min(*x), h.max(*x)));
        assert!(high <= bound && high > 0.7 * bound && low >= -bound && low < -0.7 * bound, "{}", spec.name);
    }
    let mut merged = base.clone();
    adapter.merge(merged.values_mut(), &ThreadPool::single());
    assert_eq!(merged.values(), base.values());
    assert_eq!(adapter, Adapter::new(config(&TargetModule::BLOCK), &base, 7));
    assert_ne!(adapter.values(), Adapter::new(config(&TargetModule::BLOCK), &base, 8).values());
}

#[test]
fn merged_is_the_base_plus_the_scaled_product() {
    let base = base();
    let targets = [TargetModule::DownProj, TargetModule::QProj, TargetModule::VProj];
    let adapter = changed(&targets, &base);
    let mut merged = base.clone();
    adapter.merge(merged.values_mut(), &ThreadPool::single());
    let of = |name: &str| {
        let spec = adapter.specs().iter().find(|spec| spec.name.ends_with(name))?;
        Some((&adapter.values()[spec.range()], spec.shape[1]))
    };
    for spec in base.layout().specs() {
        let (w0, w) = (base.get(&spec.name), merged.get(&spec.name));
        let module = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
        let Some((a, columns)) = of(&format!("{module}.lora_A.weight")) else {
            assert_eq!(w, w0, "{} is frozen", spec.name);
            continue;
        };
        assert!(targets.iter().any(|target| module.ends_with(target.as_str())), "{module}");
        let (b, rank) = of(&format!("{module}.lora_B.weight")).unwrap();
        for (i, (w, w0)) in w.iter().zip(w0).enumerate() {
            let (row, column) = (i / columns, i % columns);
            let product: f64 =
                (0..rank).map(|k| f64::from(b[row * rank + k]) * f64::from(a[k * columns + column])).sum();
            let expected = f64::from(*w0) + 1.5 * product;
            assert!((f64::from(*w) - expected).abs() < 1e-6, "{} [{row}, {column}]", spec.name);
        }
    }
    assert_eq!(adapter.base_parameters(&merged).values(), base.values());
    // Merging again, with more threads, gives the same bits.
    let again = merged.values().to_vec();
    adapter.merge(merged.values_mut(), &ThreadPool::new(&SharedCores::new(3), 3));
    assert_eq!(merged.values(), again);
}

/// Directional derivatives of `sum(G * W)` by `A` and `B` match the gradients exactly, since it is linear in each.
#[test]
fn gradients_are_the_derivative_of_a_function_of_the_weights() {
    let base = untied();
    let mut adapter = changed(&TargetModule::ALL, &base);
    let g: Vec<f32> =
        (0..base.values().len()).map(|i| noise(i as u32 ^ 99) as f32 / u32::MAX as f32 - 0.5).collect();
    let gradients = adapter.gradients(&g, &ThreadPool::single());
    assert_eq!(gradients, adapter.gradients(&g, &ThreadPool::new(&SharedCores::new(3), 3)));
    let value = |adapter: &Adapter| {
        let mut merged = base.clone();
        adapter.merge(merged.values_mut(), &ThreadPool::single());
        merged.values().iter().zip(&g).map(|(w, g)| f64::from(*w) * f64::from(*g)).sum::<f64>()
    };
    for index in (0..adapter.specs().len()).step_by(3) {
        let range = adapter.specs()[index].range();
        let direction: Vec<f32> =
            range.clone().map(|i| noise(i as u32 ^ 5) as f32 / u32::MAX as f32 - 0.5).collect();
        let mut at = |sign: f32| {
            let before = adapter.values()[range.clone()].to_vec();
            let moved = adapter.values_mut()[range.clone()].iter_mut();
            moved.zip(&direction).for_each(|(x, d)| *x += sign * d);
            let value = value(&adapter);
            adapter.values_mut()[range.clone()].copy_from_slice(&before);
            value
        };
        let numeric = (at(1.0) - at(-1.0)) / 2.0;
        let exact: f64 =
            gradients[range.clone()].iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        assert!((numeric - exact).abs() < 1e-4 * (1.0 + exact.abs()), "tensor {index}: {numeric} {exact}");
    }
}

#[test]
fn embedding_and_head_are_adapted_as_peft_does() {
    let base = untied();
    let adapter = Adapter::new(config(&[TargetModule::LmHead, TargetModule::EmbedTokens]), &base, 7);
    let specs: Vec<_> = adapter.specs().iter().map(|spec| (&spec.name[..], &spec.shape[..])).collect();
    let expected = [
        ("base_model.model.model.embed_tokens.lora_embedding_A", &[4, 20][..]),
        ("base_model.model.model.embed_tokens.lora_embedding_B", &[16, 4]),
        ("base_model.model.lm_head.lora_A.weight", &[4, 16]),
        ("base_model.model.lm_head.lora_B.weight", &[20, 4]),
    ];
    assert_eq!(specs, expected);
    let [a, b, _, d] = [0, 1, 2, 3].map(|index| &adapter.values()[adapter.specs()[index].range()]);
    assert!(a.iter().chain(d).all(|x| *x == 0.0));
    let variance = b.iter().map(|x| x * x).sum::<f32>() / b.len() as f32;
    assert!((0.5..1.6).contains(&variance), "a normal distribution, not one with a variance of {variance}");
    let mut merged = base.clone();
    adapter.merge(merged.values_mut(), &ThreadPool::single());
    assert_eq!(merged.values(), base.values());

    // The row of a token moves by its column of A.
    let adapter = changed(&[TargetModule::EmbedTokens], &base);
    adapter.merge(merged.values_mut(), &ThreadPool::single());
    let [a, b] = [0, 1].map(|index| &adapter.values()[adapter.specs()[index].range()]);
    let (name, token) = ("model.embed_tokens.weight", 13);
    for column in 0..16 {
        let product: f32 = (0..4).map(|k| b[column * 4 + k] * a[k * 20 + token]).sum();
        let moved = merged.get(name)[token * 16 + column] - base.get(name)[token * 16 + column];
        assert!((moved - 1.5 * product).abs() < 1e-6, "{column}: {moved}, not {}", 1.5 * product);
    }
}

#[test]
fn an_end_of_a_tied_model_is_refused() {
    let specs = [base(), untied()].map(|base| base.layout().specs().to_vec());
    for module in [TargetModule::EmbedTokens, TargetModule::LmHead] {
        let config = config(&[TargetModule::QProj, module]);
        let message = config.check(&specs[0]).unwrap_err().to_string();
        assert!(message.contains(module.as_str()) && message.contains("tie_word_embeddings"), "{message}");
        config.check(&specs[1]).unwrap();
    }
    config(&TargetModule::BLOCK).check(&specs[0]).unwrap();
}

#[test]
fn layers_of_another_model_are_refused_and_its_own_named() {
    let message = config(&[TargetModule::QAProj]).check(base().layout().specs()).unwrap_err().to_string();
    let there = "name some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
    assert!(message.contains("has none of the layers") && message.ends_with(there), "{message}");
}

#[test]
fn shapes_are_those_of_the_adapter() {
    let base = base();
    let adapter = changed(&[TargetModule::KProj, TargetModule::UpProj], &base);
    let (specs, frozen) = adapter.config().shapes(base.layout().specs());
    assert_eq!((&specs[..], frozen), (adapter.specs(), 2 * (8 * 16 + 24 * 16)));
}

#[test]
fn files_round_trip() {
    let files = tempfile::tempdir().unwrap();
    let base = base();
    let targets = [TargetModule::QProj, TargetModule::DownProj];
    let adapter = changed(&targets, &base);
    let dir = files.path().join("adapter");
    lora_files::write(&dir, &adapter, &files.path().join("base").to_string_lossy()).unwrap();
    // The order of the layers does not matter.
    let turned = config(&[targets[1], targets[0]]);
    assert_eq!(Adapter::open(&dir, &turned, &base).unwrap().values(), adapter.values());
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(json["target_modules"], serde_json::json!(["q_proj", "down_proj"]));
    assert_eq!((json["r"].as_i64(), json["lora_alpha"].as_i64()), (Some(4), Some(6)));
    assert!(json["base_model_name_or_path"].as_str().unwrap().ends_with("base"));
    let copy = files.path().join("copy");
    export(&dir, &copy, "org/name").unwrap();
    assert_eq!(Adapter::open(&copy, adapter.config(), &base).unwrap(), adapter);
    let exported: serde_json::Value =
        serde_json::from_slice(&std::fs::read(copy.join("adapter_config.json")).unwrap()).unwrap();
    let renamed = serde_json::json!({"base_model_name_or_path": "org/name"});
    let mut expected = json.clone();
    expected.as_object_mut().unwrap().extend(renamed.as_object().unwrap().clone());
    assert_eq!(exported, expected);
    assert!(export(&dir, &copy, "org/name").unwrap_err().to_string().contains("exists"));
}

#[test]
fn half_precision_adapters_are_read() {
    let base = base();
    let adapter = changed(&[TargetModule::OProj], &base);
    type Kind = (Dtype, fn(f32) -> [u8; 2], fn(f32) -> f32);
    let kinds: [Kind; 2] = [
        (Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes(), |x| bf16::from_f32(x).to_f32()),
        (Dtype::F16, |x| f16::from_f32(x).to_le_bytes(), |x| f16::from_f32(x).to_f32()),
    ];
    for (dtype, bytes, rounded) in kinds {
        let files = tempfile::tempdir().unwrap();
        let dir = files.path().join("adapter");
        lora_files::write(&dir, &adapter, "base").unwrap();
        let data: Vec<(&ParameterSpec, Vec<u8>)> = adapter
            .specs()
            .iter()
            .map(|spec| (spec, adapter.values()[spec.range()].iter().flat_map(|x| bytes(*x)).collect()))
            .collect();
        let views = data
            .iter()
            .map(|(spec, data)| (&spec.name, TensorView::new(dtype, spec.shape.clone(), data).unwrap()));
        let file = dir.join("adapter_model.safetensors");
        std::fs::write(&file, safetensors::serialize(views, None).unwrap()).unwrap();
        let read = Adapter::open(&dir, adapter.config(), &base).unwrap();
        let expected: Vec<f32> = adapter.values().iter().map(|x| rounded(*x)).collect();
        assert_eq!(read.values(), expected);
    }
}

#[test]
fn unsupported_adapters_are_rejected_with_the_reason() {
    let files = tempfile::tempdir().unwrap();
    let base = base();
    let adapter = changed(&[TargetModule::QProj], &base);
    let dir = files.path().join("adapter");
    lora_files::write(&dir, &adapter, "base").unwrap();
    let message = |config: &LoraConfig| Adapter::open(&dir, config, &base).unwrap_err().to_string();
    let wanted = adapter.config().clone();
    for other in [
        LoraConfig { rank: 8, ..wanted.clone() },
        LoraConfig { alpha: 1.0, ..wanted.clone() },
        LoraConfig { target_modules: vec![TargetModule::KProj], ..wanted.clone() },
    ] {
        let message = message(&other);
        let found = "has rank = 4, alpha = 6, target_modules = [\"q_proj\"], but the recipe says";
        assert!(message.contains(found) && message.contains("adapter_config.json"), "{message}");
    }
    let path = dir.join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    for (from, to, says) in [
        ("\"use_dora\": false", "\"use_dora\": true", "has `use_dora` true"),
        ("\"LORA\"", "\"IA3\"", "has `peft_type` \"IA3\""),
        ("\"q_proj\"", "\"conv1d\"", "adapts `conv1d`, which is not supported"),
        ("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]", "has `modules_to_save`"),
        ("\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"", "initialised with \"pissa\""),
        ("{", "[", "is not JSON"),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
        assert!(message(&wanted).contains(says), "{}", message(&wanted));
    }
    std::fs::write(&path, text).unwrap();

    let weights = dir.join("adapter_model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &whole[..whole.len() - 8]).unwrap();
    assert!(message(&wanted).contains("is not a safetensors file"), "{}", message(&wanted));
    std::fs::remove_file(&weights).unwrap();
    assert!(message(&wanted).contains("cannot be read"), "{}", message(&wanted));
    let wide = changed(&[TargetModule::QProj], &Parameters::random(&wide_config(), 1));
    std::fs::remove_dir_all(&dir).unwrap();
    lora_files::write(&dir, &wide, "base").unwrap();
    assert!(message(&wanted).contains("expected [4, 16]"), "{}", message(&wanted));
}

fn wide_config() -> Config {
    Config::fresh(&Sizes {
        vocab_size: 20,
        hidden_size: 32,
        intermediate_size: 24,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 8,
    })
}

#[test]
fn the_scale_is_alpha_over_rank() {
    assert_eq!(config(&[]).scale(), 1.5);
    assert!(config(&[]).shapes(Layout::new(&wide_config()).specs()).0.is_empty());
}
