//! A base that stays quantised on a device, under factors, against the same on the processor, which does not merge them.

use std::sync::Arc;

use device::device::DeviceLocation;
use device::{Device, Storage, bf16};
use model::on_device::{
    DeviceDecoder, DeviceDtype, DeviceSampler, DrawRequest, StagedWeights, StoredWeights,
};
use model::{
    AdaptedBase, Config, Decoder, Draw, FrozenParameters, KvCache, LowRank, Recompute, Sampling,
    StepSequence, ThreadPool,
};

use super::factors::{on_device, on_processor};
use super::{Case, distance, flat};
use crate::common::{Golden, MODELS};
use crate::frozen::each;
use crate::low_rank::factors_of;

fn device() -> Device {
    Device::open(DeviceLocation::of_tests()).unwrap()
}

/// Predictions and gradients of factors, in `T`, which are `tolerance` from those of the processor.
fn trains<T: Storage>(name: &str, config: &Config, base: &FrozenParameters, tolerance: [f64; 2]) {
    let (case, device, layout) = (Case::new(), device(), base.layout());
    let factors = Arc::new(factors_of(config, layout));
    let here = Decoder::frozen(base, &factors, Recompute::None);
    let there = DeviceDecoder::<T>::new(&device, config, layout, Recompute::None).unwrap();
    let mut weights = StoredWeights::<T>::new(&device, base, &factors).unwrap();
    let expected = here.score(&case.pack, &case.rows, &case.targets, &ThreadPool::single()).unwrap();
    let found = there.score(&mut weights, &case.pack, &case.rows, &case.targets).unwrap();
    let off = distance(&flat(&found), &flat(&expected));
    assert!(off < tolerance[0], "{name}: predictions are off by {off}");
    let expected = on_processor(&case, &here, layout, &factors);
    let found = on_device(&case, &there, &mut weights, &factors);
    let off = distance(&found, &expected);
    assert!(off < tolerance[1] && expected.iter().any(|g| *g != 0.0), "{name}: gradients are off by {off}");
}

#[test]
fn files_of_every_format_train_on_a_device_as_on_the_processor() {
    each(|name, of| trains::<f32>(name, &of.config, &of.base, [1e-5, 1e-4]));
}

/// Directories of the families that devices compute, in the number formats of their files.
#[test]
fn directories_train_on_a_device_as_they_are_stored() {
    let mut computed = 0;
    for name in MODELS {
        let golden = Golden::open(name);
        let base = FrozenParameters::load(&golden.dir, &golden.config).unwrap();
        if DeviceDecoder::<f32>::new(&device(), &golden.config, base.layout(), Recompute::None).is_err() {
            continue;
        }
        trains::<f32>(name, &golden.config, &base, [1e-5, 1e-4]);
        computed += 1;
    }
    assert!(computed >= 14, "{computed} of {}", MODELS.len());
}

#[test]
fn layers_are_rounded_once_after_their_factors_are_added() {
    let golden = Golden::open("qwen3");
    let base = FrozenParameters::load(&golden.dir, &golden.config).unwrap();
    trains::<bf16>("qwen3", &golden.config, &base, [0.05, 0.05]);
    let (device, factors) = (device(), factors_of(&golden.config, base.layout()));
    let weights = StoredWeights::<bf16>::new(&device, &base, &factors).unwrap();
    // The file, the factors, one layer, and what is outside layers.
    let units = base.layout().units().map(|unit| base.layout().unit(unit).len());
    let (all, layers) = (base.layout().len(), base.layout().layers());
    let largest = layers.iter().map(ExactSizeIterator::len).max().unwrap();
    let ends = units.sum::<usize>() - layers.iter().map(ExactSizeIterator::len).sum::<usize>();
    let expected = base.bytes() as usize + 4 * factors.values().len() + 2 * (largest + ends);
    assert!((weights.bytes() as usize).abs_diff(expected) < all / 50, "{} of {expected}", weights.bytes());
}

/// Six tokens and their log-probabilities, drawn by `draw`, which computes a step and draws from its logits.
fn generated(
    mut cache: KvCache,
    mut draw: impl FnMut(&mut KvCache, StepSequence<'_>) -> Draw,
) -> Vec<(u32, f32)> {
    let (mut pages, mut tokens) = (Vec::new(), vec![3, 14, 15, 9, 2, 6]);
    let (mut position, mut found) = (0, Vec::new());
    for _ in 0..6 {
        cache.make_writable(&mut pages, position, tokens.len());
        let new = &tokens[position..];
        let sequence = StepSequence { tokens: new, position, pages: &pages, wanted: 1, adapter: None };
        let drawn = draw(&mut cache, sequence);
        position = tokens.len();
        tokens.push(drawn.token);
        found.push((drawn.token, drawn.logprob));
    }
    found
}

/// Those of a device. A greedy choice would have the log-probability 0.
fn sampled(sampler: &mut DeviceSampler, config: &Config) -> Vec<(u32, f32)> {
    generated(KvCache::elsewhere(config, 64), |cache, sequence| {
        sampler.step(cache, &[sequence]).unwrap();
        sampler.draw(&[DrawRequest { row: 0, sampling: Sampling::PLAIN, uniform: 0.5 }]).unwrap().remove(0)
    })
}

/// Those of the processor.
fn expected(policy: &AdaptedBase, config: &Config) -> Vec<(u32, f32)> {
    let decoder = policy.decoder();
    generated(KvCache::new(config, 64), |cache, sequence| {
        let mut logits = decoder.step(cache, &[sequence], &ThreadPool::single()).unwrap();
        Draw::new(&mut logits, Sampling::PLAIN, 0.5)
    })
}

fn assert_near(found: &[(u32, f32)], expected: &[(u32, f32)]) {
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.0, expected.0);
        let off = (found.1 - expected.1).abs();
        assert!(off < 1e-4 && expected.1 < 0.0, "{found:?}, not {expected:?}");
    }
}

/// Recorded steps read the factors that are there when they are replayed; other weights are refused.
#[test]
fn a_sampler_serves_new_factors_from_the_next_step_on() {
    let golden = Golden::open("qwen3");
    let base = Arc::new(FrozenParameters::load(&golden.dir, &golden.config).unwrap());
    let (config, device) = (&golden.config, device());
    let first = Arc::new(factors_of(config, base.layout()));
    let mut second = LowRank::clone(&first);
    second.values_mut().iter_mut().for_each(|value| *value *= 6.0);
    let [first, second] =
        [first, Arc::new(second)].map(|factors| AdaptedBase::new(Arc::clone(&base), factors));
    let mut sampler = DeviceSampler::over(&device, DeviceDtype::F32, &first).unwrap();
    let before = sampled(&mut sampler, config);
    assert_near(&before, &expected(&first, config));
    let factors = device.upload(second.factors().values()).unwrap();
    sampler.swap(StagedWeights::Factors(factors)).unwrap();
    let after = sampled(&mut sampler, config);
    assert_near(&after, &expected(&second, config));
    // Logits of such factors leave one token nearly all of the probability.
    let changed = before.iter().zip(&after).any(|(before, after)| before.0 != after.0);
    assert!(changed, "{before:?}, and {after:?}");
    let whole = StagedWeights::upload(&device, DeviceDtype::F32, &golden.parameters).unwrap();
    let error = sampler.swap(whole).unwrap_err().to_string();
    assert!(error.contains("stays quantised"), "{error}");
    let factors = device.upload(second.factors().values()).unwrap();
    let error = DeviceSampler::new(&device, config, StagedWeights::Factors(factors)).unwrap_err().to_string();
    assert!(error.contains("no base"), "{error}");
}
