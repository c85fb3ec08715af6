//! Adapters of one base in one batch on a device: each row has what the processor computes for it, and what it has alone.

use std::sync::Arc;

use device::device::DeviceLocation;
use device::{Device, bf16};
use model::on_device::{DeviceDtype, DeviceSampler, DrawRequest, StagedWeights};
use model::{
    AdaptedMatrix, Config, Decoder, Draw, FactorPair, KvCache, Layout, LowRank, Parameters, Sampling,
    StepSequence, TargetModule, ThreadPool,
};

use super::{configs, latents, parameters, recurrent};
use crate::common::{Golden, MODELS};

/// A token and its log-probability.
type Drawn = (u32, f32);

/// Uniform numbers that a token is drawn with, from the logits of each token.
const UNIFORMS: [f32; 3] = [0.1, 0.5, 0.9];

/// Factors of the matrices with a name that `takes`.
fn factors(
    config: &Config,
    layout: &Layout,
    (rank, seed): (usize, f32),
    takes: impl Fn(&AdaptedMatrix<'_>) -> bool,
) -> Arc<LowRank> {
    let (mut len, mut pairs) = (0, Vec::new());
    for AdaptedMatrix { module, weight, rows, columns, .. } in
        AdaptedMatrix::all(layout.specs()).filter(|matrix| takes(matrix))
    {
        let is_embedding = module == Some(TargetModule::EmbedTokens);
        if is_embedding && config.tie_word_embeddings {
            continue;
        }
        let (a, b) = if is_embedding { (rows, columns) } else { (columns, rows) };
        let (a, b) = (len..len + rank * a, len + rank * a..len + rank * (a + b));
        len = b.end;
        pairs.push(FactorPair { weight, a, b, rows, columns, is_embedding });
    }
    let mut factors = LowRank::zeros(rank, 0.5, pairs);
    factors.values_mut().iter_mut().enumerate().for_each(|(i, value)| *value = 0.2 * (i as f32 * seed).sin());
    Arc::new(factors)
}

/// Whether a matrix can have factors in PEFT.
fn is_target(matrix: &AdaptedMatrix<'_>) -> bool {
    matrix.module.is_some()
}

/// One of every target, and one of a higher rank that leaves out some of them.
fn adapters(config: &Config, layout: &Layout) -> Vec<Arc<LowRank>> {
    let some = |matrix: &AdaptedMatrix<'_>| {
        let without = ["q_proj", "up_proj", "embed", "in_proj_b"];
        is_target(matrix) && !without.iter().any(|of| matrix.name.contains(of))
    };
    vec![factors(config, layout, (3, 0.7), is_target), factors(config, layout, (8, 0.3), some)]
}

/// A sequence of known tokens, and its adapter.
#[derive(Clone, Copy)]
struct Fed<'a> {
    tokens: &'a [u32],
    adapter: Option<usize>,
}

/// The draws of every token of `sequences`, which are fed together: some tokens in a first step, the others one at a time. `step`
/// gives those of the wanted tokens.
fn feed(
    cache: &mut KvCache,
    sequences: &[Fed<'_>],
    mut step: impl FnMut(&mut KvCache, &[StepSequence<'_>]) -> Vec<Drawn>,
) -> Vec<Vec<Drawn>> {
    let mut pages = vec![Vec::new(); sequences.len()];
    let (mut done, mut drawn) = (vec![0; sequences.len()], vec![Vec::new(); sequences.len()]);
    while sequences.iter().zip(&done).any(|(fed, done)| fed.tokens.len() > *done) {
        let mut steps = Vec::new();
        for (number, (fed, pages)) in sequences.iter().zip(&mut pages).enumerate() {
            let position = done[number];
            let end = fed.tokens.len().min(if position == 0 { 1 + 2 * number } else { position + 1 });
            if end > position {
                cache.make_writable(pages, position, end);
                let tokens = &fed.tokens[position..end];
                let next =
                    StepSequence { tokens, position, pages, wanted: tokens.len(), adapter: fed.adapter };
                steps.push((number, next));
            }
        }
        // In a step, sequences with one token come first.
        steps.sort_by_key(|(_, step)| step.tokens.len() > 1);
        let (numbers, steps): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
        let found = step(cache, &steps);
        let mut rest = &found[..];
        for (number, step) in numbers.into_iter().zip(steps) {
            let (own, after) = rest.split_at(step.wanted * UNIFORMS.len());
            drawn[number].extend_from_slice(own);
            rest = after;
            done[number] += step.tokens.len();
        }
    }
    drawn
}

fn on_processor(decoder: &Decoder, sequences: &[Fed<'_>]) -> Vec<Vec<Drawn>> {
    let mut cache = KvCache::new(decoder.config(), 16 * 8 * sequences.len());
    feed(&mut cache, sequences, |cache, steps| {
        let logits = decoder.step(cache, steps, &ThreadPool::single()).unwrap();
        let rows = logits.chunks(decoder.config().vocab_size);
        let draws = rows.flat_map(|row| UNIFORMS.map(|at| Draw::new(&mut row.to_vec(), Sampling::PLAIN, at)));
        draws.map(|draw| (draw.token, draw.logprob)).collect()
    })
}

fn on_device(sampler: &mut DeviceSampler, sequences: &[Fed<'_>]) -> Vec<Vec<Drawn>> {
    let mut cache = KvCache::elsewhere(sampler.config(), 16 * 8 * sequences.len());
    sampler.forget();
    feed(&mut cache, sequences, |cache, steps| {
        sampler.step(cache, steps).unwrap();
        let rows = 0..steps.iter().map(|step| step.wanted).sum();
        let request = |row| UNIFORMS.map(|uniform| DrawRequest { row, sampling: Sampling::PLAIN, uniform });
        let requests: Vec<DrawRequest> = rows.flat_map(request).collect();
        sampler.draw(&requests).unwrap().into_iter().map(|draw| (draw.token, draw.logprob)).collect()
    })
}

/// Checks log-probabilities of equal tokens; in f32 all tokens are equal.
fn assert_near(found: &[Vec<Drawn>], expected: &[Vec<Drawn>], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.len(), expected.len());
        let mut compared = 0;
        for (found, expected) in found.iter().zip(expected) {
            assert!(tolerance > 1e-3 || found.0 == expected.0, "{what}, sequence {number}");
            if found.0 == expected.0 {
                let off = (found.1 - expected.1).abs() / expected.1.abs().max(1.0);
                assert!(off <= tolerance, "{what}, sequence {number}: {found:?}, not {expected:?}");
                compared += 1;
            }
        }
        assert!(2 * compared > found.len(), "{what}, sequence {number}");
    }
}

fn sampler(dtype: DeviceDtype, config: &Config, parameters: &Parameters) -> DeviceSampler {
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let staged = StagedWeights::upload(&device, dtype, parameters).unwrap();
    DeviceSampler::new(&device, config, staged).unwrap()
}

fn check(dtype: DeviceDtype, config: &Config, parameters: &Parameters, tolerance: f32, name: &str) {
    let adapters = adapters(config, parameters.layout());
    let mut decoder = Decoder::new(config, parameters);
    decoder.set_adapters(&adapters);
    let mut sampler = sampler(dtype, config, parameters);
    sampler.set_adapters(&adapters).unwrap();
    let long: Vec<u32> = (0..14).map(|i| (i * 11 % config.vocab_size.min(29)) as u32).collect();
    let of = |length: usize, adapter| Fed { tokens: &long[..length], adapter };
    // The last tokens are those of a sequence without an adapter, alone.
    let batch = [of(12, Some(1)), of(14, None), of(11, Some(0)), of(12, Some(1))];
    let expected = on_processor(&decoder, &batch);
    let found = on_device(&mut sampler, &batch);
    assert_near(&found, &expected, tolerance, name);
    for (one, together) in batch.iter().zip(&found) {
        let alone = on_device(&mut sampler, &[*one]);
        assert_near(&alone, std::slice::from_ref(together), tolerance, &format!("{name}, alone"));
    }
    // Other adapters take the place of those before.
    sampler.set_adapters(&adapters[1..]).unwrap();
    let changed = [of(12, Some(0)), of(14, None)];
    let again = on_device(&mut sampler, &changed);
    decoder.set_adapters(&adapters[1..]);
    assert_near(&again, &on_processor(&decoder, &changed), tolerance, &format!("{name}, changed"));
    sampler.set_adapters(&[]).unwrap();
    assert_near(&on_device(&mut sampler, &changed[1..]), &again[1..], tolerance, &format!("{name}, none"));
}

/// Every family that devices compute, with adapters of all matrices that can have one.
#[test]
fn rows_have_what_the_processor_computes_for_their_adapters() {
    for name in MODELS {
        let Golden { config, parameters, .. } = Golden::open(name);
        check(DeviceDtype::F32, &config, &parameters, 1e-5, name);
    }
}

#[test]
fn rows_in_bf16_are_near() {
    let latents = latents::configs().into_iter().take(1).map(|(_, config)| config);
    let recurrences = recurrent::configs().into_iter().take(1).map(|(_, config)| config);
    for config in configs().into_iter().take(2).chain(latents).chain(recurrences) {
        let mut parameters = parameters(&config);
        parameters.values_mut().iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
        check(DeviceDtype::Bf16, &config, &parameters, 0.3, "bf16");
    }
}

#[test]
fn adapters_change_what_is_drawn() {
    let Golden { config, parameters, .. } = Golden::open("llama");
    let mut sampler = sampler(DeviceDtype::F32, &config, &parameters);
    sampler.set_adapters(&adapters(&config, parameters.layout())).unwrap();
    let drawn = [None, Some(0), Some(1)]
        .map(|adapter| on_device(&mut sampler, &[Fed { tokens: &[1, 2, 3, 4, 5], adapter }]));
    assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2] && drawn[0] != drawn[2], "{drawn:?}");
}

#[test]
fn adapters_that_are_not_served_are_refused() {
    let Golden { config, parameters, .. } = Golden::open("qwen3_moe");
    let mut sampler = sampler(DeviceDtype::F32, &config, &parameters);
    let of_router =
        factors(&config, parameters.layout(), (2, 0.4), |matrix| matrix.name.ends_with("mlp.gate.weight"));
    let error = sampler.set_adapters(&[of_router]).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.mlp.gate.weight") && error.contains("merged"), "{error}");
    let mut cache = KvCache::elsewhere(&config, 16);
    let mut pages = Vec::new();
    cache.make_writable(&mut pages, 0, 1);
    let step = StepSequence { tokens: &[1], position: 0, pages: &pages, wanted: 1, adapter: Some(0) };
    let error = sampler.step(&mut cache, &[step]).unwrap_err().to_string();
    assert!(error.contains("adapter 0") && error.contains("has 0"), "{error}");
}
