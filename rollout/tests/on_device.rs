//! The engine on a device: what it generates is what the processor generates, however it is batched.
//!
//! In f32 both draw the same tokens: their logits differ by rounding, and a uniform number as near to a boundary as that
//! does not come up here.

use device::Device;
use device::device::DeviceLocation;
use model::on_device::DeviceDtype;
use model::{Architecture, Sampling};
use rollout::{Completion, Engine, EngineConfig, Episode, Network, RequestOptions, SampleRequest, ServeOn};
use trajectory::PolicyVersion;

use crate::adapters::{adapter, with};
use crate::episodes::{STOPS, chatting_of};
use crate::roles::{ByTurns, LONG, TOKENS, played};
use crate::{CONFIG, Model, complete, request};

const TRUNCATED: Sampling = Sampling { temperature: 0.8, top_p: 0.9, top_k: 12, min_p: 0.01 };

fn on() -> ServeOn {
    ServeOn::Device(Device::open(DeviceLocation::of_tests()).unwrap(), DeviceDtype::F32)
}

fn engine(model: &Model, config: EngineConfig) -> Engine {
    let network = Network::new(&on(), model.directory.config(), &model.parameters()).unwrap();
    Engine::new(config, model.stop(&[]), network, PolicyVersion(0)).unwrap()
}

fn assert_same(found: &[Completion], expected: &[Completion]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!((found.group, found.index), (expected.group, expected.index));
        assert_eq!(found.token_ids, expected.token_ids, "{} of {}", found.index, found.group);
        assert_eq!(found.kept, expected.kept);
        let off =
            found.logprobs.iter().zip(&expected.logprobs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-3, "{off}");
    }
}

#[test]
fn completions_are_those_of_the_processor() {
    let model = Model::new();
    for sampling in [Sampling::PLAIN, TRUNCATED, Sampling::GREEDY] {
        let requests = || (0..2).map(|g| request(g, 2, sampling)).collect();
        let expected = complete(&mut model.engine(CONFIG, &[]), requests());
        let mut engine = engine(&model, CONFIG);
        let found = complete(&mut engine, requests());
        assert_same(&found, &expected);
        assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
    }
}

/// Families whose layers normalise, attend or multiply in another way.
#[test]
fn families_generate_as_on_the_processor() {
    families_generate(&[Architecture::Olmo3, Architecture::Gemma3]);
}

#[test]
#[ignore = "takes seconds a family; two are above"]
fn families_generate_as_on_the_processor_in_all_combinations() {
    families_generate(&[
        Architecture::Olmo3,
        Architecture::Smollm3,
        Architecture::Granite,
        Architecture::Gemma3,
    ]);
}

fn families_generate(families: &[Architecture]) {
    for &family in families {
        let model = Model::of_family(family, 128);
        let requests = || (0..2).map(|g| request(g, 2, Sampling::PLAIN)).collect();
        let expected = complete(&mut model.engine(CONFIG, &[]), requests());
        assert_same(&complete(&mut engine(&model, CONFIG), requests()), &expected);
    }
}

/// Recurrent states are shared by samples of a prompt, kept at the ends of prompts, moved to other slots, and computed again after
/// a sleep.
#[test]
fn recurrences_generate_as_on_the_processor() {
    let model = Model::of_family(Architecture::Qwen35, 160);
    let config = EngineConfig { max_prompt_length: 100, ..CONFIG };
    let requests = |groups: std::ops::Range<u64>| -> Vec<SampleRequest> {
        let prompt =
            |group: u64| (0..17 + 8 * group).map(|i| 4 + ((i * 13 + group * 5) % 90) as u32).collect();
        groups.map(|g| SampleRequest { prompt: prompt(g), ..request(g, 3, Sampling::PLAIN) }).collect()
    };
    let expected = complete(&mut model.engine(config, &[]), requests(0..4));
    for max_running in [8, 3] {
        let config = EngineConfig { max_running, prefill_chunk: 7, ..config };
        let mut engine = engine(&model, config);
        assert_same(&complete(&mut engine, requests(0..4)), &expected);
        assert_eq!(engine.pages().0, engine.pages().1, "every page is given back");
        engine.sleep();
        let (served, _) = on().prepare(model.directory.config(), model.parameters().values().into()).unwrap();
        engine.wake_up(served, PolicyVersion(0)).unwrap();
        assert_same(&complete(&mut engine, requests(1..3)), &expected[3..9]);
    }
}

/// A request that begins as an earlier one did resumes on the device where the processor does.
#[test]
fn kept_prefixes_of_recurrences_are_continued() {
    let model = Model::of_family(Architecture::Qwen35, 160);
    let config = EngineConfig { max_prompt_length: 100, ..CONFIG };
    let options = RequestOptions { prefix_cache: Some(7), seed: Some(1), ..RequestOptions::default() };
    let of = |prompt: Vec<u32>| {
        vec![SampleRequest { prompt, options: options.clone(), ..request(1, 2, Sampling::PLAIN) }]
    };
    let first: Vec<u32> = (0..40).map(|i| 4 + (i * 13 + 5) % 90).collect();
    let branched = [&first[..36], &[50, 51, 52, 53, 54]].concat();
    let early = [&first[..20], &[60, 61]].concat();
    let mut engines = [model.engine(config, &[]), engine(&model, config)];
    for prompt in [first.clone(), first, branched, early] {
        let [expected, found] = engines.each_mut().map(|engine| {
            let before = engine.counts().reused_tokens;
            (complete(engine, of(prompt.clone())), engine.counts().reused_tokens - before)
        });
        assert_same(&found.0, &expected.0);
        assert_eq!(found.1, expected.1, "reused tokens");
    }
    assert!(engines[1].counts().reused_tokens > 0);
}

/// The experts of every token but the newest, whatever else is in a step, and with prompts in chunks.
#[test]
fn recorded_experts_are_those_of_the_processor() {
    experts_are_recorded(&[Architecture::DeepseekV3]);
}

#[test]
#[ignore = "takes seconds a family; one is above"]
fn recorded_experts_are_those_of_the_processor_in_all_combinations() {
    experts_are_recorded(&[Architecture::Qwen3Moe, Architecture::Glm4Moe, Architecture::DeepseekV3]);
}

fn experts_are_recorded(families: &[Architecture]) {
    for &family in families {
        let model = Model::of_family(family, 128);
        let requests = || (0..3).map(|g| request(g, 2, Sampling::PLAIN)).collect();
        let recorded = |engine: Engine| complete(&mut engine.recording_experts(), requests());
        let expected = recorded(model.engine(CONFIG, &[]));
        let config = EngineConfig { max_running: 3, prefill_chunk: 5, ..CONFIG };
        for found in [recorded(engine(&model, CONFIG)), recorded(engine(&model, config))] {
            assert_same(&found, &expected);
            for (found, expected) in found.iter().zip(&expected) {
                assert!(expected.experts.is_some(), "{family:?}");
                assert_eq!(found.experts, expected.experts, "{family:?}");
            }
        }
        let plain = complete(&mut engine(&model, CONFIG), requests());
        assert!(plain.iter().all(|completion| completion.experts.is_none()));
    }
}

/// Requests with different adapters in one batch, under experts, while new weights come in and after a sleep; `model/tests/on_device` has
/// layers without experts, too.
#[test]
fn adapters_generate_as_on_the_processor() {
    adapters_generate(&[Architecture::DeepseekV3]);
}

#[test]
#[ignore = "takes seconds a family; one is above"]
fn adapters_generate_as_on_the_processor_in_all_combinations() {
    adapters_generate(&[Architecture::Qwen2, Architecture::DeepseekV3]);
}

fn adapters_generate(families: &[Architecture]) {
    for &family in families {
        let model = Model::of_family(family, 128);
        let config = model.directory.config();
        let adapters = || vec![adapter(config, 0.7), adapter(config, 1.3)];
        let go = |engine: Engine, on: &ServeOn, sleeps: bool| {
            let mut engine = engine.with_adapters(adapters()).unwrap();
            for group in 0..6 {
                let of = [None, Some(1), Some(0)][group as usize % 3];
                engine.submit(with(request(group, 2, Sampling::PLAIN), of, group > 2)).unwrap();
            }
            let mut completions = Vec::new();
            for _ in 0..6 {
                completions.extend(engine.step().unwrap());
            }
            let (served, _) = on.prepare(config, model.other_parameters().values().into()).unwrap();
            if sleeps {
                engine.sleep();
                engine.wake_up(served, PolicyVersion(1)).unwrap();
            } else {
                engine.apply(served, PolicyVersion(1)).unwrap();
            }
            while !engine.is_idle() {
                completions.extend(engine.step().unwrap());
            }
            completions.sort_by_key(|completion| (completion.group, completion.index));
            completions
        };
        let limits = EngineConfig { prefill_chunk: 5, ..CONFIG };
        for sleeps in [false, true] {
            let expected = go(model.engine(limits, &[]), &ServeOn::Host(model::Quantization::None), sleeps);
            assert_same(&go(engine(&model, limits), &on(), sleeps), &expected);
        }
    }
}

/// Later turns continue the pages that their episodes have kept on the device.
#[test]
fn episodes_of_several_turns_are_those_of_the_processor() {
    let (model, directory) = chatting_of(Model::with_context(TOKENS));
    let play = |engine| played(engine, &directory, 2, ByTurns::new(&[], 4), 1.0, Sampling::PLAIN);
    let (expected, on_processor) = play(model.engine(LONG, &STOPS));
    let network = Network::new(&on(), model.directory.config(), &model.parameters()).unwrap();
    let (found, on_device) = play(Engine::new(LONG, model.stop(&STOPS), network, PolicyVersion(0)).unwrap());
    assert!(found.iter().any(|episode| episode.turns.len() == 4));
    let tokens = |episodes: &[Episode]| -> Vec<Vec<u32>> {
        episodes.iter().map(|episode| episode.token_ids().to_vec()).collect()
    };
    assert_eq!(tokens(&found), tokens(&expected));
    assert_eq!(on_device.reused_tokens, on_processor.reused_tokens);
    assert!(on_device.reused_tokens > 0 && on_device.prefilled_tokens == on_processor.prefilled_tokens);
}

#[test]
fn completions_do_not_depend_on_batching_and_chunking() {
    let model = Model::new();
    let requests = || (0..3).map(|g| request(g, 2, Sampling::PLAIN)).collect();
    let expected = complete(&mut model.engine(CONFIG, &[]), requests());
    let mut engine = engine(&model, EngineConfig { max_running: 3, prefill_chunk: 5, ..CONFIG });
    assert_same(&complete(&mut engine, requests()), &expected);
}

#[test]
fn new_weights_are_applied_in_the_middle_and_an_engine_that_slept_continues() {
    let model = Model::new();
    let other = model.other_parameters();
    let go = |mut engine: Engine, on: &ServeOn, sleeps: bool| {
        let requests: Vec<_> = (0..2).map(|g| request(g, 2, Sampling::PLAIN)).collect();
        requests.into_iter().for_each(|request| engine.submit(request).unwrap());
        let mut completions = Vec::new();
        for _ in 0..6 {
            completions.extend(engine.step().unwrap());
        }
        let (served, _) = on.prepare(model.directory.config(), other.values().into()).unwrap();
        if sleeps {
            assert!(engine.sleep() > 0 && engine.is_asleep());
            engine.wake_up(served, PolicyVersion(1)).unwrap();
        } else {
            engine.apply(served, PolicyVersion(1)).unwrap();
        }
        while !engine.is_idle() {
            completions.extend(engine.step().unwrap());
        }
        completions.sort_by_key(|c| (c.group, c.index));
        completions
    };
    for sleeps in [false, true] {
        let expected = go(model.engine(CONFIG, &[]), &ServeOn::Host(model::Quantization::None), sleeps);
        assert_same(&go(engine(&model, CONFIG), &on(), sleeps), &expected);
    }
}
