//! Experts on a device against those on the processor: every kind of router and network, their gradients, and the routes of decoding.

use std::sync::Arc;

use device::device::DeviceLocation;
use device::{Device, Storage, bf16};
use model::on_device::{DeviceDecoder, DeviceDtype, FlatGradients, FlatWeights};
use model::{
    ANY_EXPERT, Config, Decoder, ExpertActivation, ExpertSpec, FeedForward, GradientSink, Gradients, Head,
    LayerSpec, Pack, Parameters, Recompute, RoutedTokens, RouterKind, SwigluClamp, ThreadPool, Unit,
};

use super::{Case, config, decodes, distance, flat, parameters};
use crate::common::{bits, train};

const SPEC: ExpertSpec = ExpertSpec {
    count: 6,
    per_token: 2,
    width: 12,
    router: RouterKind::Softmax { normalized: true },
    shared_width: 0,
    shared_gate: false,
    bias: false,
    fused_files: false,
    activation: ExpertActivation::SwiGlu,
};

fn with_experts(spec: ExpertSpec) -> Config {
    let layer = |layer| LayerSpec { feed_forward: FeedForward::Experts(spec), ..layer };
    config(true, false, Head::Language).map_layers(layer)
}

/// Every kind of router, network and expert.
pub(super) fn configs() -> Vec<(&'static str, Config)> {
    let sigmoid =
        |normalized, chosen_groups| RouterKind::Sigmoid { normalized, groups: 3, chosen_groups, scale: 1.5 };
    let clamped = ExpertActivation::Clamped(SwigluClamp { alpha: 1.702, limit: 0.4 });
    let mut mixed = with_experts(ExpertSpec { shared_width: 8, router: sigmoid(true, 2), ..SPEC });
    mixed.layers[0].feed_forward = FeedForward::SwiGlu;
    vec![
        ("softmax", with_experts(SPEC)),
        ("plain", with_experts(ExpertSpec { router: RouterKind::Softmax { normalized: false }, ..SPEC })),
        ("sigmoid", with_experts(ExpertSpec { per_token: 3, router: sigmoid(false, 3), ..SPEC })),
        (
            "chosen",
            with_experts(ExpertSpec {
                router: RouterKind::SoftmaxOfChosen,
                bias: true,
                activation: clamped,
                ..SPEC
            }),
        ),
        ("gated", with_experts(ExpertSpec { shared_width: 20, shared_gate: true, ..SPEC })),
        ("mixed", mixed),
    ]
}

fn gelu() -> Config {
    let layer = |layer| LayerSpec { feed_forward: FeedForward::GeGlu, ..layer };
    config(false, true, Head::LanguageAndValue).map_layers(layer)
}

/// Gradients on the processor, and the tokens of each layer's experts.
struct Counting {
    gradients: Gradients,
    layers: Vec<RoutedTokens>,
}

impl GradientSink for Counting {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        self.gradients.unit(unit)
    }

    fn done(&mut self, unit: Unit) {
        self.gradients.done(unit);
    }

    fn routed(&mut self, index: usize, tokens: &RoutedTokens) {
        self.layers.resize(self.layers.len().max(index + 1), RoutedTokens::default());
        self.layers[index].merge(tokens);
    }
}

/// Predictions, gradients and the tokens of experts.
type Trained = (Vec<f32>, Vec<f32>, Vec<RoutedTokens>);

fn here(case: &Case, config: &Config, parameters: &Parameters) -> Trained {
    let decoder = Decoder::trainable(config, &Arc::new(parameters.clone()), Recompute::None);
    let mut sink = Counting { gradients: Gradients::zeros(parameters.layout()), layers: Vec::new() };
    let of = (&case.rows[..], &case.targets[..]);
    let predictions = train(&decoder, &case.pack, of, &case.slopes, &mut sink, &ThreadPool::single());
    (flat(&predictions), sink.gradients.values().to_vec(), sink.layers)
}

fn there<T: Storage>(case: &Case, config: &Config, parameters: &Parameters, recompute: Recompute) -> Trained {
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let layout = parameters.layout();
    let decoder = DeviceDecoder::<T>::new(&device, config, layout, recompute).unwrap();
    let mut weights = FlatWeights::upload(&device, parameters).unwrap();
    let mut gradients = FlatGradients::new(&device, layout).unwrap();
    let (predictions, trace) = decoder.forward(&mut weights, &case.pack, &case.rows, &case.targets).unwrap();
    let scored = decoder.score(&mut weights, &case.pack, &case.rows, &case.targets).unwrap();
    assert_eq!(scored, predictions);
    let slopes = &case.slopes;
    let counts = decoder.backward(&mut weights, trace, slopes, &mut gradients, None).unwrap();
    assert_eq!(counts.is_empty(), config.experts().is_none());
    let layers = counts.download(&device).unwrap();
    (flat(&predictions), device.download(gradients.buffer().all()).unwrap(), layers)
}

/// The case with experts that are given to two of three tokens, in no order that a router would choose.
fn given(config: &Config) -> Case {
    let case = Case::new();
    let tokens = case.pack.token_ids().len();
    let mut all = Vec::new();
    for token in 0..tokens {
        for (index, layer) in config.layers.iter().enumerate() {
            let Some(spec) = layer.feed_forward.experts() else { continue };
            if token % 3 == 2 {
                all.extend(vec![ANY_EXPERT; spec.per_token]);
                continue;
            }
            let first = (token * 5 + index) % spec.count;
            let mut own: Vec<u16> =
                (0..spec.per_token).map(|k| ((first + k * 2) % spec.count) as u16).collect();
            own.sort_unstable();
            all.extend(own);
        }
    }
    Case { pack: case.pack.clone().routed(all), ..case }
}

fn assert_near(name: &str, config: &Config, case: &Case) -> Vec<RoutedTokens> {
    let parameters = parameters(config);
    let (predictions, gradients, layers) = here(case, config, &parameters);
    let (found, of_device, of_layers) = there::<f32>(case, config, &parameters, Recompute::None);
    assert_eq!(of_layers, layers, "{name}");
    assert!(distance(&found, &predictions) < 1e-5, "{name}: {}", distance(&found, &predictions));
    for spec in parameters.layout().specs() {
        let off = distance(&of_device[spec.range()], &gradients[spec.range()]);
        assert!(off < 2e-5, "{name}: {} has {off}", spec.name);
        let is_zero = of_device[spec.range()].iter().all(|value| *value == 0.0);
        assert!(is_zero || !spec.name.ends_with("e_score_correction_bias"), "{name}: it has no gradient");
    }
    layers
}

#[test]
fn predictions_gradients_and_loads_are_those_of_the_processor() {
    for (name, config) in configs() {
        let layers = assert_near(name, &config, &Case::new());
        let routed = layers.iter().filter(|layer| layer.tokens > 0);
        assert!(routed.clone().count() > 0 && routed.into_iter().all(|layer| layer.given == 0), "{name}");
    }
    assert!(assert_near("gelu", &gelu(), &Case::new()).is_empty());
}

#[test]
fn given_experts_are_computed_with_and_counted() {
    for (name, config) in configs() {
        let layers = assert_near(name, &config, &given(&config));
        let replayed = layers.iter().filter(|layer| layer.tokens > 0);
        assert!(replayed.clone().all(|layer| layer.given > 0 && layer.given < layer.tokens), "{name}");
        assert!(replayed.into_iter().any(|layer| layer.changed > 0), "{name}");
    }
}

#[test]
fn bf16_is_near_and_what_is_computed_again_changes_no_bit() {
    for (name, config) in configs().into_iter().chain([("gelu", gelu())]) {
        let mut parameters = parameters(&config);
        // What is lost by the weights alone is not of interest, and neither is another expert of nearly the same score.
        parameters.values_mut().iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
        let case = Case::new();
        let experts = every_expert(&config, case.pack.token_ids().len());
        let case = Case { pack: case.pack.clone().routed(experts), ..case };
        let (predictions, gradients, layers) = here(&case, &config, &parameters);
        let (found, of_device, of_layers) = there::<bf16>(&case, &config, &parameters, Recompute::None);
        let loads = |layers: &[RoutedTokens]| -> Vec<Vec<u64>> {
            layers.iter().map(|layer| layer.of_expert.clone()).collect()
        };
        assert_eq!(loads(&of_layers), loads(&layers), "{name}");
        assert!(distance(&found, &predictions) < 0.05, "{name}: {}", distance(&found, &predictions));
        let off = distance(&of_device, &gradients);
        assert!(off < 0.05, "{name}: {off}");
        for recompute in [Recompute::Block, Recompute::Sequence] {
            let (again, gradients, layers) = there::<bf16>(&case, &config, &parameters, recompute);
            assert!(bits(&again) == bits(&found) && bits(&gradients) == bits(&of_device), "{recompute:?}");
            assert_eq!(layers, of_layers, "{name}: {recompute:?}");
        }
    }
}

/// Experts for `tokens` tokens.
fn every_expert(config: &Config, tokens: usize) -> Vec<u16> {
    let mut all = Vec::new();
    for token in 0..tokens {
        for spec in config.layers.iter().filter_map(|layer| layer.feed_forward.experts()) {
            let mut own: Vec<u16> =
                (0..spec.per_token).map(|k| ((token + k * 2) % spec.count) as u16).collect();
            own.sort_unstable();
            all.extend(own);
        }
    }
    all
}

/// More tokens than a chunk of `Recompute::Sequence` has, so that counts and gradients are of two chunks.
#[test]
fn chunks_have_the_gradients_and_loads_of_the_whole() {
    let one = with_experts(ExpertSpec { shared_width: 4, shared_gate: true, ..SPEC });
    let config = Config { layers: one.layers[..1].to_vec(), ..one };
    let mut pack = Pack::new();
    for text in 0..84 {
        pack.push(&(0..50).map(|i| ((i * 11 + text) % 29) as u32).collect::<Vec<_>>()).unwrap();
    }
    let case = Case::new();
    let rows: Vec<usize> = (0..case.rows.len()).map(|i| i * 4200 / case.rows.len()).collect();
    let experts = every_expert(&config, 4200);
    let case = Case { pack: pack.routed(experts), rows, ..case };
    let parameters = parameters(&config);
    let (_, gradients, layers) = here(&case, &config, &parameters);
    let (_, found, of_layers) = there::<f32>(&case, &config, &parameters, Recompute::Sequence);
    assert_eq!(of_layers, layers);
    assert_eq!((layers[0].tokens, layers[0].given), (4200, 4200));
    for spec in parameters.layout().specs() {
        let off = distance(&found[spec.range()], &gradients[spec.range()]);
        assert!(off < 2e-5, "{}: {off}", spec.name);
    }
}

/// Three sequences leave one token of padding in each recorded step.
#[test]
fn decoding_gives_the_tokens_and_the_routes_of_the_processor() {
    for (_, config) in configs() {
        decodes(DeviceDtype::F32, &config, 1e-4);
    }
    decodes(DeviceDtype::F32, &gelu(), 1e-4);
    decodes(DeviceDtype::Bf16, &configs()[0].1, 0.3);
}

/// Row for row the same predictions, whatever else is in the pack: no row depends on what is beside it in a tile.
#[test]
fn a_sequence_has_the_same_bits_in_every_pack() {
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    for (name, config) in configs() {
        let parameters = parameters(&config);
        let decoder =
            DeviceDecoder::<bf16>::new(&device, &config, parameters.layout(), Recompute::None).unwrap();
        let mut weights = FlatWeights::upload(&device, &parameters).unwrap();
        let mut score = |others: usize| {
            let mut pack = Pack::new();
            pack.push(&[3, 1, 4, 1, 5, 9]).unwrap();
            (0..others).for_each(|i| {
                pack.push(&[(i % 29) as u32; 40]).unwrap();
            });
            let target = Case::new().targets[0];
            decoder.score(&mut weights, &pack, &[2, 5], &[target, target]).unwrap()
        };
        assert_eq!(score(0), score(6), "{name}");
    }
}
