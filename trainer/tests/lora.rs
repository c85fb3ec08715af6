//! Training a LoRA adapter.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{
    Config, Decoder, GradientSink, Gradients, ModelDirectory, Pack, Parameters, Prediction,
    PredictionGradient, Recompute, Target, ThreadPool, TrainedTargets, Unit,
};
use safetensors::SafeTensors;
use trainer::checkpoint::{base_path, load};
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::optimizer::OptimizerKind;
use trainer::{Learner, LearnerConfig, TrainerState};
use trajectory::PolicyVersion;

use crate::checkpoint::advance;
use crate::{LEARNER, config, groups, policy_step, save, with_optimizer};

fn lora() -> LoraConfig {
    LoraConfig { rank: 3, alpha: 6.0, target_modules: TargetModule::BLOCK.to_vec() }
}

fn base() -> Parameters {
    Parameters::random(&config(), 5)
}

/// An adapter with non-zero `B`.
fn moved() -> Adapter {
    let mut adapter = Adapter::new(lora(), &base(), 1);
    for (i, value) in adapter.values_mut().iter_mut().enumerate() {
        *value += 0.1 * (i as f32 * 0.7).sin();
    }
    adapter
}

fn learner(settings: LearnerConfig, adapter: Adapter) -> Learner {
    Learner::adapting(settings, config(), base(), adapter, None).unwrap()
}

const TOKENS: [u32; 9] = [3, 14, 15, 92, 65, 35, 89, 79, 32];

/// A loss of one sequence and its gradients by all weights.
fn loss(parameters: &Parameters) -> (f64, Gradients) {
    let (config, pool) = (config(), ThreadPool::single());
    let mut pack = Pack::new();
    pack.push(&TOKENS).unwrap();
    let rows: Vec<usize> = (0..TOKENS.len() - 1).collect();
    let target = |row: &usize| Target { token: TOKENS[row + 1], temperature: 0.9, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    let slope =
        |row: &usize| PredictionGradient { logprob: 1.0 - 0.3 * *row as f32, entropy: 0.2, value: 0.0 };
    let slopes: Vec<_> = rows.iter().map(slope).collect();
    let decoder = Decoder::trainable(&config, &Arc::new(parameters.clone()), Recompute::None);
    let mut gradients = Gradients::zeros(parameters.layout());
    let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &[rows.len()] };
    let mut value = 0.0;
    let mut slopes_of = |_: Range<usize>, predictions: &[Prediction]| {
        value += predictions.iter().zip(&slopes).fold(0.0, |sum, (p, s)| {
            sum + f64::from(p.logprob) * f64::from(s.logprob) + f64::from(p.entropy) * f64::from(s.entropy)
        });
        slopes.clone()
    };
    decoder.train(&pack, trained, &mut slopes_of, &mut gradients, &pool).unwrap();
    (value, gradients)
}

fn merged(adapter: &Adapter) -> Parameters {
    let mut parameters = base();
    adapter.merge(parameters.values_mut(), &ThreadPool::single());
    parameters
}

#[test]
fn gradients_are_finite_differences_of_the_loss() {
    let mut adapter = moved();
    let (_, full) = loss(&merged(&adapter));
    let gradients = adapter.gradients(full.values(), &ThreadPool::single());
    for index in 0..adapter.specs().len() {
        let spec = adapter.specs()[index].clone();
        let direction: Vec<f32> = spec.range().map(|i| (i as f32 * 1.3).cos()).collect();
        let step = 2e-3_f32;
        let mut at = |sign: f32| {
            let before = adapter.values()[spec.range()].to_vec();
            let values = adapter.values_mut()[spec.range()].iter_mut();
            values.zip(&direction).for_each(|(x, d)| *x += sign * step * d);
            let (value, _) = loss(&merged(&adapter));
            adapter.values_mut()[spec.range()].copy_from_slice(&before);
            value
        };
        // Five-point stencil: an error of fourth order.
        let near = (at(1.0) - at(-1.0)) / (2.0 * f64::from(step));
        let far = (at(2.0) - at(-2.0)) / (4.0 * f64::from(step));
        let numeric = (4.0 * near - far) / 3.0;
        let own = &gradients[spec.range()];
        let exact: f64 = own.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        let norm = own.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        assert!((numeric - exact).abs() < 2e-2 * norm, "{}: {numeric} {exact}, norm {norm}", spec.name);
        assert!(norm > 1e-4, "{}", spec.name);
    }
}

/// Gradients of the factors of an adapter.
struct FactorGradients<'a> {
    adapter: &'a Adapter,
    base: &'a Parameters,
    values: Vec<f32>,
}

impl GradientSink for FactorGradients<'_> {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        &mut self.values[self.adapter.factors().within(&self.base.layout().unit(unit))]
    }

    fn done(&mut self, _: Unit) {}
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = file.tensor(name).unwrap();
    view.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// An adapter with what PEFT computes, on a model of the goldens.
struct PeftGolden {
    directory: PathBuf,
    config: Config,
    base: Parameters,
    adapter: Adapter,
    tokens: Vec<u32>,
    numbers: Vec<u8>,
}

impl PeftGolden {
    fn open(name: &str, model: &str, target_modules: Vec<TargetModule>) -> Self {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
        let directory = tests.join("goldens").join(name);
        let model = tests.join("../../model/tests/goldens").join(model);
        let config = Config::load(&model).unwrap();
        let base = Parameters::load(&model, &config).unwrap();
        let lora = LoraConfig { rank: 2, alpha: 3.0, target_modules };
        let adapter = Adapter::open(&directory, &lora, &base).unwrap();
        let numbers = std::fs::read(directory.join("golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&numbers).unwrap();
        let tokens = file.tensor("tokens").unwrap();
        let tokens =
            tokens.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect();
        Self { directory, config, base, adapter, tokens, numbers }
    }

    fn pack(&self) -> Pack {
        let mut pack = Pack::new();
        pack.push(&self.tokens).unwrap();
        pack
    }

    /// A decoder with the adapter merged, whose logits are those of PEFT.
    fn decoder(&self) -> Decoder {
        let mut merged = self.base.clone();
        self.adapter.merge(merged.values_mut(), &ThreadPool::single());
        let decoder = Decoder::trainable(&self.config, &Arc::new(merged), Recompute::None);
        let logits: Vec<f32> =
            decoder.logits(&self.pack()).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let expected = floats(&self.file(), "logits");
        assert_eq!(logits.len(), expected.len());
        for (i, (ours, theirs)) in logits.iter().zip(&expected).enumerate() {
            assert!((ours - theirs).abs() < 1e-4, "logit {i} is {ours}, not {theirs}");
        }
        decoder
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.numbers).unwrap()
    }
}

/// Layers of experts are adapted each.
#[test]
fn an_adapter_of_experts_has_the_logits_of_peft() {
    use TargetModule::{DownProj, GateProj, QProj, UpProj};
    let golden = PeftGolden::open("adapter_experts", "qwen3_moe", vec![QProj, GateProj, UpProj, DownProj]);
    golden.decoder();
}

/// Every target of a model without latents.
fn every_target() -> Vec<TargetModule> {
    [&TargetModule::BLOCK[..], &[TargetModule::EmbedTokens, TargetModule::LmHead]].concat()
}

/// Checks the logits of an adapter that PEFT has written, and the gradient of every factor.
fn assert_logits_and_gradients(golden: &PeftGolden) {
    let PeftGolden { base, adapter, tokens, .. } = golden;
    let decoder = golden.decoder();
    let rows: Vec<usize> = (0..tokens.len() - 1).collect();
    let target = |row: &usize| Target { token: tokens[row + 1], temperature: 1.0, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &[rows.len()] };
    let slope =
        |row: &usize| PredictionGradient { logprob: 1.0 - *row as f32 / 10.0, entropy: 0.0, value: 0.0 };
    let mut slopes = |_: Range<usize>, _: &[Prediction]| rows.iter().map(slope).collect();
    let values = vec![0.0; adapter.values().len()];
    let mut found = FactorGradients { adapter, base, values };
    let decoder = decoder.adapting(Arc::clone(adapter.factors()));
    decoder.train(&golden.pack(), trained, &mut slopes, &mut found, &ThreadPool::single()).unwrap();
    // Rows of files may have another order.
    let (files, mut of_gradients) = (tempfile::tempdir().unwrap(), adapter.clone());
    of_gradients.values_mut().copy_from_slice(&found.values);
    of_gradients.save(&files.path().join("gradients"), "").unwrap();
    let gradients = std::fs::read(files.path().join("gradients/adapter_model.safetensors")).unwrap();
    let gradients = SafeTensors::deserialize(&gradients).unwrap();
    let norm = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    for spec in adapter.specs() {
        let theirs = floats(&golden.file(), &format!("grad.{}", spec.name));
        let found = floats(&gradients, &spec.name);
        let off: Vec<f32> = found.iter().zip(&theirs).map(|(a, b)| a - b).collect();
        let (error, scale) = (norm(&off), norm(&theirs));
        assert!(scale > 0.0 && error <= 1e-3 * scale, "{}: off by {error} of {scale}", spec.name);
    }
}

/// An adapter of every layer, embedding and head too.
#[test]
fn an_adapter_of_peft_has_its_logits_and_gradients() {
    let golden = PeftGolden::open("adapter", "llama", every_target());
    assert_logits_and_gradients(&golden);
    let PeftGolden { directory: peft, config, adapter, .. } = &golden;
    // PEFT has written both ends beside the factors. Another base model has other ones.
    let other = Parameters::random(config, 1);
    let message = Adapter::open(peft, adapter.config(), &other).unwrap_err().to_string();
    assert!(message.contains("base_layer.weight is not that of the base model"), "{message}");
}

/// Adapters of the projections of a recurrence, whose rows files have in another order, are read and written as PEFT has them.
#[test]
fn an_adapter_of_a_recurrence_has_the_logits_and_gradients_of_peft() {
    use TargetModule::{InProjA, InProjB, InProjBa, InProjQkv, InProjQkvz, InProjZ, OutProj};
    for (model, targets) in [
        ("qwen3_5", vec![InProjQkv, InProjZ, InProjB, InProjA, OutProj]),
        ("qwen3_next", vec![InProjQkvz, InProjBa, OutProj]),
    ] {
        let golden = PeftGolden::open(&format!("adapter_{model}"), model, targets);
        assert_logits_and_gradients(&golden);
        let files = tempfile::tempdir().unwrap();
        let again = files.path().join("again");
        golden.adapter.save(&again, model).unwrap();
        let [theirs, own] = [&golden.directory, &again]
            .map(|directory| std::fs::read(directory.join("adapter_model.safetensors")).unwrap());
        let [theirs, own] = [&theirs, &own].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        assert_eq!(own.len(), theirs.len(), "{model}");
        for (name, tensor) in theirs.iter() {
            let own = own.tensor(name).unwrap();
            assert!(own.shape() == tensor.shape() && own.data() == tensor.data(), "{model}: {name}");
        }
    }
}

/// Neither gradients nor optimizer have memory for frozen weights.
#[test]
fn a_learner_has_memory_for_gradients_of_its_adapter_alone() {
    let mut learner = learner(LearnerConfig { leaves: 1, ..LEARNER }, moved());
    advance(&mut learner, 1);
    let factors = 4 * learner.adapter().unwrap().values().len() as u64;
    let weights = 4 * base().values().len() as u64;
    // The sums of gradients, and two moments.
    assert_eq!(learner.bytes(), weights + factors + 2 * factors);
}

#[test]
fn embedding_and_head_learn_beside_the_layers() {
    let config = Config { tie_word_embeddings: false, ..config() };
    let base = Parameters::random(&config, 5);
    let lora = LoraConfig { target_modules: every_target(), ..lora() };
    let run = |world| {
        let settings = LearnerConfig { world, ..LEARNER };
        let adapter = Adapter::new(lora.clone(), &base, 1);
        let mut learner = Learner::adapting(settings, config.clone(), base.clone(), adapter, None).unwrap();
        advance(&mut learner, 2);
        learner.parameters().unwrap().values().to_vec()
    };
    let alone = run(1);
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let range = base.layout().spec(name).unwrap().range();
        assert_ne!(alone[range.clone()], base.values()[range], "{name}");
    }
    assert_eq!(run(2), alone);
}

#[test]
fn a_new_adapter_computes_the_same_as_the_base() {
    let learner = learner(LEARNER, Adapter::new(lora(), &base(), 1));
    assert_eq!(loss(&learner.parameters().unwrap()).0.to_bits(), loss(&base()).0.to_bits());
    assert_eq!(learner.parameters().unwrap().values(), base().values());
}

#[test]
fn only_the_adapter_is_updated_and_clipped() {
    let targets = vec![TargetModule::VProj, TargetModule::GateProj];
    let config = LoraConfig { target_modules: targets.clone(), ..lora() };
    let mut learner = learner(LEARNER, Adapter::new(config, &base(), 1));
    let groups = groups();
    let (norm, _) = policy_step(&mut learner, &groups, 1e-2);
    let (full, _) = policy_step(&mut crate::learner(LEARNER), &groups, 1e-2);
    assert!(norm > 0.0 && norm < 0.9 * full, "{norm} of {full}");
    advance(&mut learner, 2);
    let base = base();
    for spec in base.layout().specs() {
        let moved = learner.parameters().unwrap().get(&spec.name) != base.get(&spec.name);
        let wanted = targets.iter().any(|target| spec.name.ends_with(&format!("{}.weight", target.as_str())));
        assert_eq!(moved, wanted, "{}", spec.name);
    }
    let adapter = learner.adapter().unwrap();
    assert_eq!(learner.optimizer().unwrap().states().len(), adapter.specs().len());
    assert_eq!(learner.parameters().unwrap().values(), {
        let mut parameters = base;
        adapter.merge(parameters.values_mut(), &ThreadPool::single());
        parameters.into_values()
    });
}

#[test]
fn resuming_from_a_checkpoint_gives_the_same_bits() {
    for kind in OptimizerKind::ALL {
        let settings = with_optimizer(kind);
        let files = tempfile::tempdir().unwrap();
        let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
        let mut learner = learner(settings.clone(), moved());
        advance(&mut learner, 3);
        let state = |version, learner: &Learner| TrainerState {
            updates: learner.updates(),
            trained_tokens: 77,
            time_s: 1.5,
            ..TrainerState::at(PolicyVersion(version))
        };
        let dir = save(files.path(), &directory, &learner, &state(3, &learner), 1).unwrap();
        let read = load(&dir, settings.optimizer, Some(&lora())).unwrap();
        assert_eq!(read.adapter.as_ref(), learner.adapter());
        assert_eq!(read.weights.whole().unwrap().values(), learner.parameters().unwrap().values());
        let mut resumed = Learner::adapting(
            settings.clone(),
            config(),
            Parameters::clone(read.weights.whole().unwrap()),
            read.adapter.unwrap(),
            Some(read.optimizer),
        )
        .unwrap();
        advance(&mut resumed, 2);
        advance(&mut learner, 2);
        assert_eq!(resumed.parameters().unwrap().values(), learner.parameters().unwrap().values());
        assert_eq!(
            (resumed.adapter(), resumed.optimizer().unwrap()),
            (learner.adapter(), learner.optimizer().unwrap())
        );
        // The next checkpoint does not change the frozen model, which is kept when older checkpoints are removed.
        let written = |path: &str| std::fs::metadata(base_path(files.path()).join(path)).unwrap().modified();
        let before = written("model.safetensors").unwrap();
        let dir = save(files.path(), &directory, &resumed, &state(5, &resumed), 1).unwrap();
        assert_eq!(written("model.safetensors").unwrap(), before);
        assert!(load(&dir, settings.optimizer, Some(&lora())).is_ok());
        let frozen = ModelDirectory::open(&base_path(files.path())).unwrap().load_parameters().unwrap();
        assert_eq!(frozen.values(), base().values());
    }
}

#[test]
fn checkpoints_of_another_adapter_are_rejected() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let state = |version| TrainerState::at(PolicyVersion(version));
    let plain = save(files.path(), &directory, &crate::learner(LEARNER), &state(1), 3).unwrap();
    let message = |dir: &std::path::Path, lora: Option<&LoraConfig>| {
        load(dir, LEARNER.optimizer, lora).unwrap_err().to_string()
    };
    assert!(message(&plain, Some(&lora())).contains("the recipe has a section `[lora]`"));
    let adapted = save(files.path(), &directory, &learner(LEARNER, moved()), &state(2), 3).unwrap();
    assert!(message(&adapted, None).contains("the recipe has no section `[lora]`"));
    let other = LoraConfig { rank: 4, ..lora() };
    assert!(message(&adapted, Some(&other)).contains("has rank = 3"), "{}", message(&adapted, Some(&other)));

    // A frozen model that does not belong to the adapter.
    let path = base_path(files.path());
    std::fs::remove_dir_all(&path).unwrap();
    directory.save(&path, &Parameters::random(&config(), 6)).unwrap();
    let message = message(&adapted, Some(&lora()));
    assert!(message.contains("base") && message.contains("is not the model of the checkpoint"), "{message}");
}

#[test]
fn a_frozen_model_of_a_killed_attempt_is_replaced() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    directory.save(&base_path(files.path()), &Parameters::random(&config(), 6)).unwrap();
    let state = TrainerState::at(PolicyVersion(0));
    let dir = save(files.path(), &directory, &learner(LEARNER, moved()), &state, 1).unwrap();
    assert!(load(&dir, LEARNER.optimizer, Some(&lora())).is_ok());
}
