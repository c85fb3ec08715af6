//! Ranks on devices that compute a pass together make the steps of one rank on a device, within rounding: partial sums are added in another
//! order.

use std::sync::Arc;

use device::device::DeviceLocation;
use model::on_device::DeviceDtype;
use model::{
    Architecture, Config, ContextExchange, ExpertSpec, FeedForward, LayerSpec, Parameters, Recompute,
    ResidentParameters,
};
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::{
    CollectivePlace, ContextParallel, DeviceConfig, Frozen, Learner, LearnerConfig, OptimizerPlace,
    ParallelConfig,
};
use trajectory::Group;

use crate::{LEARNER, config, group, policy_step, samples};

/// Ranks by what they divide.
#[derive(Clone, Copy, Debug)]
struct Degrees {
    data: usize,
    pipeline: usize,
    context: usize,
    tensor: usize,
    /// Of the ranks that divide rows and tokens.
    expert: usize,
}

const ONE: Degrees = Degrees { data: 1, pipeline: 1, context: 1, tensor: 1, expert: 1 };

/// Few rows, because the emulator is slow.
fn groups() -> [Arc<Group>; 2] {
    [group(0, &[1.0, 0.0], 0.0), group(5, &[0.2, 0.9, 0.1], 0.0)]
}

/// Three layers of a model whose heads four ranks can share, with a vocabulary that no degree divides.
fn shared(architecture: Architecture) -> Config {
    let base = config();
    let layers = base.layers[..1].repeat(3);
    let config = Config { layers, vocab_size: 129, num_heads: 8, num_kv_heads: 4, ..base };
    Config { head_dim: 4, ..config }.of_family(architecture)
}

/// The same with a network beside the experts that has a gate.
fn gated() -> Config {
    shared(Architecture::Qwen3Moe).map_layers(|layer| {
        let FeedForward::Experts(spec) = layer.feed_forward else { return layer };
        let spec = ExpertSpec { shared_width: 8, shared_gate: true, ..spec };
        LayerSpec { feed_forward: FeedForward::Experts(spec), ..layer }
    })
}

fn settings(
    degrees: Degrees,
    zero: usize,
    (dtype, collective): (DeviceDtype, CollectivePlace),
) -> LearnerConfig {
    let Degrees { data, pipeline, context, tensor, expert } = degrees;
    let world = data * pipeline * context * tensor;
    let context = ContextParallel { degree: context, ..ContextParallel::NONE };
    let parallel = ParallelConfig { tensor, context, pipeline, expert };
    // One GPU is no group.
    let place = match collective {
        CollectivePlace::Device => DeviceLocation::Emulated,
        _ => DeviceLocation::of_tests(),
    };
    let (places, optimizer) = (vec![place; world].into(), OptimizerPlace::Host);
    let device = DeviceConfig { optimizer, places, collective, ..DeviceConfig::new(place, dtype) };
    // Several micro-batches, and rows that context ranks have parts of.
    LearnerConfig { world, parallel, zero, microbatch_tokens: 40, device: Some(device), ..LEARNER }
}

/// Whether a test includes a model, by its name, with ranks, by their place in the list of the test.
type Included = fn(&str, usize) -> bool;

/// Norms of two steps, and the log-probabilities after them.
fn stepped(settings: LearnerConfig, model: &Config) -> (Vec<f32>, Vec<f32>) {
    let mut learner = Learner::new(settings, model.clone(), Parameters::random(model, 5), None).unwrap();
    let groups = groups();
    let norms = (0..2).map(|_| policy_step(&mut learner, &groups, 1e-3).0).collect();
    let scores = learner.score(&samples(&groups)).unwrap();
    (norms, scores.into_iter().flatten().map(|prediction| prediction.logprob).collect())
}

/// Compares those of `ranks` that are included with one rank.
fn assert_near_one_rank(
    what: &str,
    (model, dtype): (&Config, DeviceDtype),
    ranks: &[(Degrees, usize, Recompute, CollectivePlace)],
    includes: Included,
) {
    let ranks: Vec<_> =
        (0..).zip(ranks).filter(|(at, _)| includes(what, *at)).map(|(_, ranks)| ranks).collect();
    if ranks.is_empty() {
        return;
    }
    let (norms, scores) = stepped(settings(ONE, 1, (dtype, CollectivePlace::Auto)), model);
    assert!(norms.iter().all(|norm| *norm > 0.0), "it learns");
    let tolerance = if dtype == DeviceDtype::F32 { 1e-4 } else { 5e-2 };
    for (degrees, zero, recompute, collective) in ranks {
        let settings = settings(*degrees, *zero, (dtype, *collective));
        let (found, others) = stepped(LearnerConfig { recompute: *recompute, ..settings }, model);
        let what = format!("{what} {dtype:?}: {degrees:?}, stage {zero}, {recompute:?}, {collective:?}");
        // After an update of weights by the sign of a gradient near zero, more than rounding differs.
        for ((found, expected), factor) in found.iter().zip(&norms).zip([1.0, 10.0]) {
            assert!((found - expected).abs() <= factor * tolerance * expected, "{what}: {found} {expected}");
        }
        assert_eq!(others.len(), scores.len(), "{what}");
        for (found, expected) in others.iter().zip(&scores) {
            let bound = 20.0 * tolerance * expected.abs();
            assert!((found - expected).abs() <= bound, "{what}: {found} {expected}");
        }
    }
}

#[test]
fn tensor_ranks_share_weights() {
    tensor_ranks_are_near(|what, _| ["qwen3", "glm4 with experts"].contains(&what));
}

#[test]
#[ignore = "takes minutes; two models are above"]
fn tensor_ranks_share_weights_in_all_combinations() {
    tensor_ranks_are_near(|_, _| true);
}

fn tensor_ranks_are_near(includes: Included) {
    for (what, model, dtype) in [
        ("qwen2", shared(Architecture::Qwen2), DeviceDtype::F32),
        ("qwen3", shared(Architecture::Qwen3), DeviceDtype::Bf16),
        ("gemma3", shared(Architecture::Gemma3), DeviceDtype::F32),
        ("glm4 with experts", shared(Architecture::Glm4Moe), DeviceDtype::F32),
        ("a gated network beside experts", gated(), DeviceDtype::F32),
    ] {
        let of = |tensor, data, zero, collective| {
            (Degrees { tensor, data, ..ONE }, zero, Recompute::None, collective)
        };
        let ranks = [
            of(2, 1, 1, CollectivePlace::Device),
            of(4, 1, 2, CollectivePlace::Host),
            of(2, 2, 3, CollectivePlace::Device),
        ];
        assert_near_one_rank(what, (&model, dtype), &ranks, includes);
    }
}

/// One or two key-value heads, of which four ranks have copies: with biases, norms of heads and experts.
#[test]
fn tensor_ranks_have_copies_of_key_value_heads() {
    for (what, model, dtype) in [
        ("qwen2", Config { num_kv_heads: 2, ..shared(Architecture::Qwen2) }, DeviceDtype::F32),
        ("qwen3", Config { num_kv_heads: 1, ..shared(Architecture::Qwen3Moe) }, DeviceDtype::F32),
    ] {
        let of = |(tensor, data, pipeline), zero, recompute, collective| {
            (Degrees { tensor, data, pipeline, ..ONE }, zero, recompute, collective)
        };
        let ranks = [
            of((4, 1, 1), 1, Recompute::None, CollectivePlace::Device),
            if what == "qwen2" {
                of((4, 2, 1), 3, Recompute::Block, CollectivePlace::Host)
            } else {
                of((4, 1, 2), 2, Recompute::Block, CollectivePlace::Auto)
            },
        ];
        assert_near_one_rank(what, (&model, dtype), &ranks, |_, _| true);
    }
}

#[test]
fn stages_divide_layers() {
    stages_are_near(|what, at| match what {
        "tied" => true,
        "with experts" => at == 1,
        _ => at == 0,
    });
}

#[test]
#[ignore = "takes minutes; each model is above"]
fn stages_divide_layers_in_all_combinations() {
    stages_are_near(|_, _| true);
}

fn stages_are_near(includes: Included) {
    for (what, model, dtype) in [
        ("tied", Config { tie_word_embeddings: true, ..shared(Architecture::Qwen3) }, DeviceDtype::F32),
        ("with experts", shared(Architecture::Qwen3Moe), DeviceDtype::F32),
        ("qwen3", shared(Architecture::Qwen3), DeviceDtype::Bf16),
    ] {
        let of = |(pipeline, data, tensor), zero, recompute| {
            (Degrees { pipeline, data, tensor, ..ONE }, zero, recompute, CollectivePlace::Auto)
        };
        let ranks = [
            of((2, 1, 1), 1, Recompute::None),
            of((3, 1, 1), 2, Recompute::Block),
            of((2, 2, 1), 3, Recompute::Sequence),
            of((2, 1, 2), 1, Recompute::Block),
        ];
        assert_near_one_rank(what, (&model, dtype), &ranks, includes);
    }
}

#[test]
fn context_ranks_share_tokens() {
    context_ranks_are_near(|what, at| what == "qwen3" || at == usize::from(what != "gemma3"));
}

#[test]
#[ignore = "takes minutes; each model is above"]
fn context_ranks_share_tokens_in_all_combinations() {
    context_ranks_are_near(|_, _| true);
}

fn context_ranks_are_near(includes: Included) {
    for (what, model, dtype) in [
        ("qwen3", shared(Architecture::Qwen3), DeviceDtype::F32),
        ("gemma3", shared(Architecture::Gemma3), DeviceDtype::Bf16),
        ("sinks and experts with biases", shared(Architecture::GptOss), DeviceDtype::F32),
        ("latents", shared(Architecture::DeepseekV3), DeviceDtype::F32),
    ] {
        let of = |(context, data, pipeline, tensor), zero, recompute, collective| {
            (Degrees { context, data, pipeline, tensor, ..ONE }, zero, recompute, collective)
        };
        let mut ranks = vec![
            of((2, 1, 1, 1), 1, Recompute::None, CollectivePlace::Host),
            of((4, 1, 1, 1), 2, Recompute::Block, CollectivePlace::Device),
        ];
        if what == "qwen3" {
            ranks.push(of((2, 2, 1, 1), 3, Recompute::Sequence, CollectivePlace::Device));
            ranks.push(of((2, 1, 2, 1), 2, Recompute::Block, CollectivePlace::Host));
            ranks.push(of((2, 1, 1, 2), 1, Recompute::None, CollectivePlace::Device));
        }
        assert_near_one_rank(what, (&model, dtype), &ranks, includes);
    }
}

/// Ranks with the experts of others, more of them than micro-batches, and ranks with the same experts.
#[test]
fn ranks_divide_experts() {
    expert_ranks_are_near(|_, at| at != 4);
}

#[test]
#[ignore = "takes minutes; each model is above"]
fn ranks_divide_experts_in_all_combinations() {
    expert_ranks_are_near(|_, _| true);
}

fn expert_ranks_are_near(includes: Included) {
    for (what, model, dtype) in [
        ("qwen3", shared(Architecture::Qwen3Moe), DeviceDtype::F32),
        ("experts with biases", shared(Architecture::GptOss), DeviceDtype::F32),
        ("a gated network beside experts", gated(), DeviceDtype::F32),
        ("glm4", shared(Architecture::Glm4Moe), DeviceDtype::Bf16),
    ] {
        let of = |(expert, data, context, tensor), recompute, collective| {
            (Degrees { expert, data, context, tensor, ..ONE }, 3, recompute, collective)
        };
        let mut ranks = vec![of((2, 2, 1, 1), Recompute::None, CollectivePlace::Device)];
        if what == "qwen3" {
            ranks.push(of((4, 4, 1, 1), Recompute::Block, CollectivePlace::Host));
            ranks.push(of((2, 4, 1, 1), Recompute::Block, CollectivePlace::Device));
            ranks.push(of((2, 2, 1, 2), Recompute::None, CollectivePlace::Device));
            ranks.push(of((2, 1, 2, 1), Recompute::None, CollectivePlace::Host));
            let stages = Degrees { expert: 2, data: 2, pipeline: 2, ..ONE };
            ranks.push((stages, 3, Recompute::Block, CollectivePlace::Device));
        }
        assert_near_one_rank(what, (&model, dtype), &ranks, includes);
    }
}

/// Context ranks form the gradients of the factors of an adapter from their tokens, and score rows of their own under a frozen model.
#[test]
fn context_ranks_train_an_adapter_and_score_under_a_reference() {
    let model = shared(Architecture::Qwen3);
    let run = |degrees, zero, recompute| {
        let base = Parameters::random(&model, 5);
        let lora = LoraConfig { rank: 3, alpha: 6.0, target_modules: TargetModule::BLOCK.to_vec() };
        let adapter = Adapter::new(lora, &base, 1);
        let settings = settings(degrees, zero, (DeviceDtype::F32, CollectivePlace::Auto));
        let settings = LearnerConfig { recompute, ..settings };
        let mut learner = Learner::adapting(settings, model.clone(), base, adapter, None).unwrap();
        let groups = groups();
        let norms: Vec<f32> = (0..2).map(|_| policy_step(&mut learner, &groups, 1e-3).0).collect();
        let other = ResidentParameters::of(model.clone(), Arc::new(Parameters::random(&model, 6)));
        let frozen = Frozen { weights: other.into(), pool: None };
        let scores = learner.score_under(&frozen, &samples(&groups)).unwrap();
        (norms, scores.into_iter().flatten().map(|prediction| prediction.logprob).collect::<Vec<f32>>())
    };
    let (norms, scores) = run(ONE, 1, Recompute::None);
    for (context, zero, recompute) in [(2, 1, Recompute::Block), (4, 2, Recompute::None)] {
        let (found, others) = run(Degrees { context, ..ONE }, zero, recompute);
        for ((found, expected), factor) in found.iter().zip(&norms).zip([1.0, 10.0]) {
            assert!((found - expected).abs() <= factor * 1e-4 * expected, "{context}: {found} {expected}");
        }
        assert_eq!(others.len(), scores.len());
        for (found, expected) in others.iter().zip(&scores) {
            assert!((found - expected).abs() <= 1e-4 * expected.abs(), "{context}: {found} {expected}");
        }
    }
}

#[test]
fn what_ranks_on_devices_cannot_divide_is_named() {
    let one_key = Config { num_kv_heads: 1, ..shared(Architecture::Qwen3) };
    let refused = |settings: LearnerConfig, model: &Config, expected: &str| {
        let error = settings.check_parallel(model, false).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let of = |degrees| settings(degrees, 1, (DeviceDtype::F32, CollectivePlace::Auto));
    let context = Degrees { context: 2, ..ONE };
    refused(of(context), &one_key, "1 key-value heads, which 2 ranks cannot share evenly");
    let model = shared(Architecture::Qwen3);
    let with = |change: &dyn Fn(&mut ContextParallel)| {
        let mut settings = of(context);
        change(&mut settings.parallel.context);
        settings
    };
    refused(with(&|context| context.sections = 4), &model, "a rank on a device has one section");
    let keys = with(&|context| context.exchange = Some(ContextExchange::Keys));
    refused(keys, &model, "ranks on devices exchange heads");
}
