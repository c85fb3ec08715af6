//! Gradients of low-rank factors on a device against those on the processor, for layers with and without experts.

use std::ops::Range;
use std::sync::Arc;

use device::device::DeviceLocation;
use device::{Device, DeviceBuffer, Storage, ViewMut, bf16};
use model::on_device::{DeviceDecoder, FlatWeights, UnitGradients, UnitWeights};
use model::{Config, Decoder, Layout, LowRank, Parameters, Recompute, ThreadPool, Unit};

use super::{Case, configs, distance, experts, latents, parameters, recurrent};
use crate::common::{bits, train};
use crate::low_rank::{OfFactors, factors_of};

/// Gradients of all factors on a device.
struct FactorBuffer {
    values: DeviceBuffer<f32>,
    layout: Arc<Layout>,
    factors: Arc<LowRank>,
}

impl UnitGradients for FactorBuffer {
    fn unit(&mut self, unit: Unit) -> device::Result<ViewMut<'_, f32>> {
        let place: Range<usize> = self.factors.within(&self.layout.unit(unit));
        Ok(self.values.view_mut(place))
    }

    fn done(&mut self, _: Unit) -> device::Result<()> {
        Ok(())
    }
}

fn here(case: &Case, config: &Config, parameters: &Parameters, factors: &Arc<LowRank>) -> Vec<f32> {
    let decoder = Decoder::trainable(config, &Arc::new(parameters.clone()), Recompute::None);
    on_processor(case, &decoder.adapting(Arc::clone(factors)), parameters.layout(), factors)
}

/// Gradients of `factors` of a decoder of a model of `layout` on the processor.
pub(super) fn on_processor(
    case: &Case,
    decoder: &Decoder,
    layout: &Arc<Layout>,
    factors: &Arc<LowRank>,
) -> Vec<f32> {
    let mut own = OfFactors::new(layout, factors);
    let (of, pool) = ((&case.rows[..], &case.targets[..]), ThreadPool::single());
    train(decoder, &case.pack, of, &case.slopes, &mut own, &pool);
    own.values
}

fn there<T: Storage>(
    case: &Case,
    config: &Config,
    parameters: &Parameters,
    factors: &Arc<LowRank>,
    recompute: Recompute,
) -> Vec<f32> {
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let decoder = DeviceDecoder::<T>::new(&device, config, parameters.layout(), recompute).unwrap();
    let mut weights = FlatWeights::upload(&device, parameters).unwrap();
    on_device(case, &decoder, &mut weights, factors)
}

/// Gradients of `factors` on a device.
pub(super) fn on_device<T: Storage>(
    case: &Case,
    decoder: &DeviceDecoder<T>,
    weights: &mut dyn UnitWeights<T>,
    factors: &Arc<LowRank>,
) -> Vec<f32> {
    let (device, layout) = (decoder.device(), decoder.layout());
    let of_device = decoder.factors(factors).unwrap();
    let values = device.zeros(factors.values().len()).unwrap();
    let mut own = FactorBuffer { values, layout: Arc::clone(layout), factors: Arc::clone(factors) };
    let (pack, slopes) = (&case.pack, &case.slopes);
    let (_, trace) = decoder.forward(weights, pack, &case.rows, &case.targets).unwrap();
    decoder.backward(weights, trace, slopes, &mut own, Some(&of_device)).unwrap();
    device.download(own.values.all()).unwrap()
}

/// Without experts, with them, with some layers of either kind, with latents, and with a recurrence.
fn cases() -> impl Iterator<Item = (String, Config)> {
    let dense = configs().into_iter().map(|config| (format!("{:?}", config.head), config));
    let experts =
        experts::configs().into_iter().filter(|(name, _)| ["chosen", "gated", "mixed"].contains(name));
    let latents = latents::configs().into_iter().take(3);
    let recurrences = recurrent::configs().into_iter().take(2).map(|(name, mut config)| {
        // Rounding in bf16 adds up over layers.
        config.layers.truncate(2);
        (name, config)
    });
    dense.chain(experts.chain(latents).chain(recurrences).map(|(name, config)| (name.to_owned(), config)))
}

#[test]
fn gradients_of_factors_are_those_of_the_processor() {
    for (name, config) in cases() {
        let (case, mut parameters) = (Case::new(), parameters(&config));
        let factors = Arc::new(factors_of(&config, parameters.layout()));
        let expected = here(&case, &config, &parameters, &factors);
        let found = there::<f32>(&case, &config, &parameters, &factors, Recompute::None);
        let mut compared = 0;
        // Pair by pair, so that a wrong gradient of a small one cannot hide.
        for pair in factors.pairs() {
            for range in [&pair.a, &pair.b] {
                let (found, expected) = (&found[range.clone()], &expected[range.clone()]);
                let off = distance(found, expected);
                assert!(off < 2e-5, "{name}: {pair:?} is off by {off}");
                compared += usize::from(expected.iter().any(|value| *value != 0.0));
            }
        }
        assert!(compared > factors.pairs().len(), "{name}: {compared} gradients are not zero");

        parameters.values_mut().iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
        let expected = here(&case, &config, &parameters, &factors);
        let found = there::<bf16>(&case, &config, &parameters, &factors, Recompute::None);
        let off = distance(&found, &expected);
        assert!(off < 0.05, "{name}: {off}");
        for recompute in [Recompute::Block, Recompute::Sequence] {
            let again = there::<bf16>(&case, &config, &parameters, &factors, recompute);
            assert!(bits(&again) == bits(&found), "{name}: {recompute:?}");
        }
    }
}

/// Factors of one matrix in the middle of an operand: all other weights are frozen, and their units have no gradients.
#[test]
fn weights_without_factors_have_no_gradient_on_a_device() {
    let config = configs().remove(0);
    let (case, parameters) = (Case::new(), parameters(&config));
    let mut all = factors_of(&config, parameters.layout()).pairs().to_vec();
    let keys = all.iter().position(|pair| pair.rows == 16 && pair.columns == 32).unwrap();
    let mut one = all.swap_remove(keys);
    let start = one.a.start;
    (one.a, one.b) = (0..one.a.len(), one.b.start - start..one.b.end - start);
    let mut factors = LowRank::zeros(3, 0.5, vec![one]);
    factors.values_mut().iter_mut().enumerate().for_each(|(i, value)| *value = 0.2 * (i as f32).sin());
    let factors = Arc::new(factors);
    let expected = here(&case, &config, &parameters, &factors);
    let found = there::<f32>(&case, &config, &parameters, &factors, Recompute::None);
    let off = distance(&found, &expected);
    assert!(off < 2e-5 && expected.iter().any(|value| *value != 0.0), "{off}");
}
