//! The network on a device against that on the processor, for every optional part: predictions, gradients, decoding.
//!
//! The device is the emulator, which runs the kernels that GPUs run.

mod adapters;
mod attention;
mod experts;
mod factors;
mod families;
mod latents;
mod recurrent;
mod stored;

use std::sync::Arc;

use device::device::DeviceLocation;
use device::{Device, Storage, bf16};
use model::on_device::{
    DeviceDecoder, DeviceDtype, DeviceSampler, DrawRequest, FlatGradients, FlatWeights, StagedWeights,
};
use model::{
    Config, Decoder, Draw, Gradients, Head, KvCache, LayerSpec, Pack, Parameters, PredictionGradient,
    QueryKeyNorm, Recompute, Sampling, Sizes, StepSequence, Target, ThreadPool,
};

use crate::common::{bits, train};

const KEPT: [u32; 4] = [0, 5, 11, 28];

fn config(qk_norm: bool, tied: bool, head: Head) -> Config {
    let sizes = Sizes {
        vocab_size: 29,
        hidden_size: 32,
        intermediate_size: 24,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 64,
    };
    let fresh = Config::fresh(&sizes);
    let query_key_norm = if qk_norm { QueryKeyNorm::PerHead } else { QueryKeyNorm::None };
    let layer = |layer| LayerSpec { query_key_norm, qkv_bias: !qk_norm, output_bias: !tied, ..layer };
    Config { tie_word_embeddings: tied, head, ..fresh.map_layers(layer) }
}

fn configs() -> Vec<Config> {
    vec![
        config(false, true, Head::Language),
        config(true, false, Head::LanguageAndValue),
        config(false, false, Head::Value),
    ]
}

/// Weights in which nothing is zero or one by accident.
fn parameters(config: &Config) -> Parameters {
    let mut parameters = Parameters::random(config, 5);
    let wiggle = |i: usize| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
    parameters
        .values_mut()
        .iter_mut()
        .enumerate()
        .for_each(|(i, value)| *value = *value * 2.0 + 0.05 * wiggle(i));
    // Sharp attention would make a rounding in bf16 as large as what it rounds.
    let layout = Arc::clone(parameters.layout());
    for spec in
        layout.specs().iter().filter(|spec| spec.name.contains("self_attn.") && spec.name.contains("_norm"))
    {
        parameters.values_mut()[spec.range()].iter_mut().for_each(|value| *value *= 0.3);
    }
    parameters
}

fn noise(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| (((i + 1) * (seed + 17) * 7919) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// A pack with a prompt that two completions share, and what is predicted from it.
struct Case {
    pack: Pack,
    rows: Vec<usize>,
    targets: Vec<Target<'static>>,
    slopes: Vec<PredictionGradient>,
}

impl Case {
    fn new() -> Self {
        let mut pack = Pack::new();
        pack.push(&[3, 1, 4, 1, 5, 9, 2]).unwrap();
        let prompt = pack.push(&(0..20).map(|i| (i * 11 % 29) as u32).collect::<Vec<_>>()).unwrap();
        pack.push_continuation(prompt, &[27, 18, 28]).unwrap();
        pack.push_continuation(prompt, &[1, 2, 3, 4, 5, 6]).unwrap();
        // Some rows predict twice: the end of the prompt.
        let rows: Vec<usize> = (0..pack.token_ids().len()).step_by(2).chain([26, 26]).collect();
        let target = |(i, _): (usize, &usize)| match i % 3 {
            0 => Target { token: (i * 5 % 29) as u32, temperature: 1.0, kept: None },
            1 => Target { token: (i * 7 % 29) as u32, temperature: 0.7, kept: None },
            _ => Target { token: KEPT[i % 4], temperature: 1.3, kept: Some(&KEPT) },
        };
        let targets = rows.iter().enumerate().map(target).collect();
        let slope = |c: &[f32]| PredictionGradient { logprob: c[0], entropy: c[1], value: c[2] };
        let slopes = noise(3 * rows.len(), 1).chunks(3).map(slope).collect();
        Self { pack, rows, targets, slopes }
    }

    /// Predictions as numbers, and gradients, on the processor.
    fn here(&self, config: &Config, parameters: &Parameters) -> (Vec<f32>, Vec<f32>) {
        let pool = ThreadPool::single();
        let decoder = Decoder::trainable(config, &Arc::new(parameters.clone()), Recompute::None);
        let mut gradients = Gradients::zeros(parameters.layout());
        let of = (&self.rows[..], &self.targets[..]);
        let predictions = train(&decoder, &self.pack, of, &self.slopes, &mut gradients, &pool);
        (flat(&predictions), gradients.values().to_vec())
    }

    /// The same on a device.
    fn there<T: Storage>(
        &self,
        config: &Config,
        parameters: &Parameters,
        recompute: Recompute,
    ) -> (Vec<f32>, Vec<f32>) {
        let device = Device::open(DeviceLocation::of_tests()).unwrap();
        let layout = parameters.layout();
        let decoder = DeviceDecoder::<T>::new(&device, config, layout, recompute).unwrap();
        let mut weights = FlatWeights::upload(&device, parameters).unwrap();
        let mut gradients = FlatGradients::new(&device, layout).unwrap();
        let (rows, targets) = (&self.rows, &self.targets);
        let (predictions, trace) = decoder.forward(&mut weights, &self.pack, rows, targets).unwrap();
        assert_eq!(decoder.score(&mut weights, &self.pack, rows, targets).unwrap(), predictions);
        decoder.backward(&mut weights, trace, &self.slopes, &mut gradients, None).unwrap();
        (flat(&predictions), device.download(gradients.buffer().all()).unwrap())
    }
}

fn flat(predictions: &[model::Prediction]) -> Vec<f32> {
    predictions.iter().flat_map(|p| [p.logprob, p.entropy, p.value]).collect()
}

/// Norm of the difference relative to that of what is expected.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let off = norm(&mut found.iter().zip(expected).map(|(f, e)| f64::from(*f) - f64::from(*e)));
    off / norm(&mut expected.iter().map(|e| f64::from(*e))).max(1e-12)
}

#[test]
fn predictions_and_gradients_are_those_of_the_processor() {
    for config in configs() {
        trains_in_f32(&config, &format!("{:?}", config.head));
    }
}

/// Predictions and the gradient of every tensor, for the test of this name.
fn trains_in_f32(config: &Config, name: &str) {
    let (case, parameters) = (Case::new(), parameters(config));
    let (predictions, gradients) = case.here(config, &parameters);
    let (found, of_device) = case.there::<f32>(config, &parameters, Recompute::None);
    assert!(distance(&found, &predictions) < 1e-5, "{name}: {}", distance(&found, &predictions));
    // Tensor by tensor, so that a wrong gradient of a small one cannot hide.
    for spec in parameters.layout().specs() {
        let off = distance(&of_device[spec.range()], &gradients[spec.range()]);
        assert!(off < 2e-5, "{} of {name}: {off}", spec.name);
    }
}

#[test]
fn bf16_is_near_and_what_is_computed_again_changes_no_bit() {
    for config in configs() {
        trains_in_bf16(&config, &format!("{:?}", config.head));
    }
}

/// The same, nearly, in bf16, and whatever is computed again.
fn trains_in_bf16(config: &Config, name: &str) {
    let (case, mut parameters) = (Case::new(), parameters(config));
    // What is lost by the weights alone is not of interest.
    parameters.values_mut().iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
    let (predictions, gradients) = case.here(config, &parameters);
    let (found, of_device) = case.there::<bf16>(config, &parameters, Recompute::None);
    let off = distance(&found, &predictions);
    assert!(off < 0.05, "{name}: {off}");
    let off = distance(&of_device, &gradients);
    assert!(off < 0.05, "{name}: {off}");
    for recompute in [Recompute::Block, Recompute::Sequence] {
        let (again, gradients) = case.there::<bf16>(config, &parameters, recompute);
        assert!(
            bits(&again) == bits(&found) && bits(&gradients) == bits(&of_device),
            "{name}: {recompute:?}"
        );
    }
}

#[test]
fn tokens_beyond_the_vocabulary_are_refused() {
    let config = config(false, true, Head::Language);
    let parameters = parameters(&config);
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let decoder = DeviceDecoder::<f32>::new(&device, &config, parameters.layout(), Recompute::None).unwrap();
    let mut weights = FlatWeights::upload(&device, &parameters).unwrap();
    let mut pack = Pack::new();
    pack.push(&[1, 29]).unwrap();
    let target = Target { token: 1, temperature: 1.0, kept: None };
    let error = decoder.score(&mut weights, &pack, &[0], &[target]).unwrap_err().to_string();
    assert!(error.contains("token 1 has id 29") && error.contains("ends at 29"), "{error}");
    let mut pack = Pack::new();
    pack.push(&[1, 2]).unwrap();
    for target in [Target { token: 29, ..target }, Target { kept: Some(&[1, 29]), ..target }] {
        let error = decoder.score(&mut weights, &pack, &[0], &[target]).unwrap_err().to_string();
        assert!(error.contains("head") && error.contains("has id 29"), "{error}");
    }
}

/// Both caches have the same experts of the first `tokens` tokens of `pages`, if the model has some.
fn assert_routes(caches: &[KvCache; 2], pages: &[u32], tokens: usize) {
    let [here, there] = caches.each_ref().map(|cache| cache.routes(pages, tokens));
    assert_eq!(here, there);
    assert!(here.is_none_or(|routes| !routes.is_empty()));
}

/// `tokens` of a sequence from `position` on, without an adapter.
fn next<'a>(tokens: &'a [u32], position: usize, pages: &'a [u32], wanted: usize) -> StepSequence<'a> {
    StepSequence { tokens, position, pages, wanted, adapter: None }
}

/// Three sequences that share a prompt, step by step, with the logits of the processor: prefilled in two chunks, then one
/// token at a time, so that recorded steps of one size are replayed.
fn decodes(dtype: DeviceDtype, config: &Config, tolerance: f32) {
    let parameters = parameters(config);
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let staged = StagedWeights::upload(&device, dtype, &parameters).unwrap();
    let mut sampler = DeviceSampler::new(&device, config, staged).unwrap();
    let decoder = Decoder::new(config, &parameters);
    let mut caches = [KvCache::new(config, 40 * 16), KvCache::elsewhere(config, 40 * 16)]
        .map(|cache| cache.with_routes(config));
    let prompt: Vec<u32> = (0..21).map(|i| (i * 11 % 29) as u32).collect();
    let mut tokens = vec![prompt.clone(); 3];
    let mut pages: Vec<Vec<u32>> = Vec::new();
    for cache in &mut caches {
        pages = vec![vec![cache.take().unwrap(), cache.take().unwrap()]; 3];
        cache.share(&pages[0]);
        cache.share(&pages[0]);
    }
    let both = |caches: &mut [KvCache; 2], sampler: &mut DeviceSampler, sequences: &[StepSequence<'_>]| {
        let logits = decoder.step(&mut caches[0], sequences, &ThreadPool::single()).unwrap();
        sampler.step(&mut caches[1], sequences).unwrap();
        logits
    };
    both(&mut caches, &mut sampler, &[next(&prompt[..9], 0, &pages[0][..1], 0)]);
    let mut logits = both(&mut caches, &mut sampler, &[next(&prompt[9..], 9, &pages[0], 1)]);
    for step in 0..14 {
        // Greedy on the processor; the device draws the same, with log-probabilities near those of the processor.
        for (i, tokens) in tokens.iter_mut().enumerate() {
            let row = if step == 0 { 0 } else { i };
            let own = &logits[row * config.vocab_size..(row + 1) * config.vocab_size];
            let uniform = (i as f32 + 0.5) / 3.0;
            let sampling = Sampling { temperature: 0.8, ..Sampling::PLAIN };
            let expected = Draw::new(&mut own.to_vec(), sampling, uniform);
            let request = DrawRequest { row, sampling, uniform };
            let drawn = sampler.draw(&[request]).unwrap().remove(0);
            if dtype == DeviceDtype::F32 {
                assert_eq!(drawn.token, expected.token, "step {step}, sequence {i}");
            }
            if drawn.token == expected.token {
                assert!((drawn.logprob - expected.logprob).abs() < tolerance, "{drawn:?} {expected:?}");
            }
            tokens.push(expected.token);
        }
        let mut owned: [Vec<Vec<u32>>; 2] = [Vec::new(), Vec::new()];
        for (cache, owned) in caches.iter_mut().zip(&mut owned) {
            *owned = pages.clone();
            for (pages, tokens) in owned.iter_mut().zip(&tokens) {
                let page = (tokens.len() - 1) / KvCache::PAGE;
                let mine = match pages.get(page) {
                    Some(shared) => cache.own(*shared).unwrap(),
                    None => cache.take().unwrap(),
                };
                pages.truncate(page);
                pages.push(mine);
            }
        }
        assert_eq!(owned[0], owned[1], "both caches hand out the same pages");
        pages = std::mem::take(&mut owned[0]);
        let sequences: Vec<StepSequence<'_>> = tokens
            .iter()
            .zip(&pages)
            .map(|(tokens, pages)| {
                let position = tokens.len() - 1;
                next(&tokens[position..], position, pages, 1)
            })
            .collect();
        logits = both(&mut caches, &mut sampler, &sequences);
        if dtype == DeviceDtype::F32 {
            tokens.iter().zip(&pages).for_each(|(tokens, pages)| assert_routes(&caches, pages, tokens.len()));
        }
    }
}

#[test]
fn decoding_gives_the_tokens_of_the_processor() {
    decodes(DeviceDtype::F32, &config(false, true, Head::Language), 1e-4);
    decodes(DeviceDtype::F32, &config(true, false, Head::Language), 1e-4);
    decodes(DeviceDtype::Bf16, &config(false, true, Head::Language), 0.3);
}

/// A sequence goes on token by token while a long prompt comes in beside it, in chunks of more and of less than a tile.
#[test]
fn prompts_are_prefilled_beside_decoding() {
    prefills(&config(false, true, Head::Language));
}

fn prefills(config: &Config) {
    let parameters = parameters(config);
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let staged = StagedWeights::upload(&device, DeviceDtype::F32, &parameters).unwrap();
    let mut sampler = DeviceSampler::new(&device, config, staged).unwrap();
    let decoder = Decoder::new(config, &parameters);
    let mut caches = [KvCache::new(config, 16 * 16), KvCache::elsewhere(config, 16 * 16)];
    let text = |n: usize, by: usize| -> Vec<u32> { (0..n).map(|i| (i * by % 29) as u32).collect() };
    let (short, long) = (text(30, 11), text(120, 7));
    let mut take = |n: usize| -> Vec<u32> {
        let pages =
            caches.each_mut().map(|cache| (0..n).map(|_| cache.take().unwrap()).collect::<Vec<u32>>());
        assert_eq!(pages[0], pages[1], "both caches hand out the same pages");
        pages[0].clone()
    };
    let (own, others) = (take(2), take(8));
    let part = |of: std::ops::Range<usize>| {
        let wanted = usize::from(of.end > 69);
        next(&long[of.clone()], of.start, &others, wanted)
    };
    let one = |position: usize| next(&short[position..=position], position, &own, 1);
    let prompt = next(&short[..20], 0, &own, 1);
    let steps = [
        vec![prompt],
        vec![one(20), part(0..69)],
        vec![one(21), part(69..118)],
        vec![one(22), part(118..119)],
        vec![one(23), part(119..120)],
    ];
    for (number, step) in steps.iter().enumerate() {
        let logits = decoder.step(&mut caches[0], step, &ThreadPool::single()).unwrap();
        sampler.step(&mut caches[1], step).unwrap();
        for (row, own) in logits.chunks(config.vocab_size).enumerate() {
            let expected = Draw::new(&mut own.to_vec(), Sampling::PLAIN, 0.4);
            let drawn = sampler
                .draw(&[DrawRequest { row, sampling: Sampling::PLAIN, uniform: 0.4 }])
                .unwrap()
                .remove(0);
            assert_eq!(drawn.token, expected.token, "row {row} of step {number}");
            assert!((drawn.logprob - expected.logprob).abs() < 1e-4, "{drawn:?} {expected:?}");
        }
    }
}

#[test]
fn new_weights_are_served_from_the_next_step_on() {
    let config = config(false, true, Head::Language);
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let logprob = |sampler: &mut DeviceSampler, cache: &mut KvCache, page: u32, position: usize| {
        let sequence = StepSequence { tokens: &[7], position, pages: &[page], wanted: 1, adapter: None };
        sampler.step(cache, &[sequence]).unwrap();
        let sampling = Sampling::PLAIN;
        sampler.draw(&[DrawRequest { row: 0, sampling, uniform: 0.5 }]).unwrap().remove(0)
    };
    let stage = |seed| {
        let parameters = Parameters::random(&config, seed);
        StagedWeights::upload(&device, DeviceDtype::F32, &parameters).unwrap()
    };
    let fresh = |seed| {
        let mut cache = KvCache::elsewhere(&config, 16);
        let page = cache.take().unwrap();
        let mut sampler = DeviceSampler::new(&device, &config, stage(seed)).unwrap();
        logprob(&mut sampler, &mut cache, page, 0)
    };
    let mut cache = KvCache::elsewhere(&config, 16);
    let page = cache.take().unwrap();
    let mut sampler = DeviceSampler::new(&device, &config, stage(1)).unwrap();
    for seed in [1, 2, 1, 3] {
        let before = sampler.swap(stage(seed)).unwrap();
        // What was served is free to be overwritten.
        drop(before);
        // The first step of its size is made, the second is replayed.
        for _ in 0..2 {
            assert_eq!(logprob(&mut sampler, &mut cache, page, 0), fresh(seed), "weights {seed}");
        }
    }
}
