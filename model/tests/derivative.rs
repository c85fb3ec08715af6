//! The whole decoder's backward against finite differences of its forward, on random models that no golden has: every
//! optional part on or off, several temperatures, truncated distributions, entropies, rows that predict twice.
//!
//! Invariant: a direction per tensor, so that a wrong gradient of a small tensor cannot hide behind a large one.

use std::sync::Arc;

use model::{
    Architecture, AttentionSpec, Config, Decoder, Gradients, Head, LayerSpec, Pack, Parameters,
    PredictionGradient, QueryKeyNorm, Recompute, Reduction, RopeScaling, Rotary, Sizes, Target, ThreadPool,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::common::{pack_of, train};

const SIZES: Sizes = Sizes {
    vocab_size: 29,
    hidden_size: 12,
    intermediate_size: 18,
    num_layers: 3,
    num_heads: 4,
    num_kv_heads: 2,
    max_position_embeddings: 32,
};

/// Distance of the nearer points of a difference from the middle, per value of a direction in [-1, 1).
const STEP: f32 = 2e-3;

/// Allowed error of a derivative relative to the norm of the tensor's gradient: four times the largest that the f32
/// rounding of the loss leaves at [`STEP`]. The seeds are fixed, so it either always holds or never.
const TOLERANCE: f64 = 1e-2;

const SEQUENCES: [&[u32]; 3] = [&[3, 1, 4, 1, 5, 9, 2, 6, 5], &[7], &[27, 18, 28, 18, 28]];

/// A loss over [`SEQUENCES`].
struct Loss {
    pack: Pack,
    rows: Vec<usize>,
    targets: Vec<Target<'static>>,
    gradients: Vec<PredictionGradient>,
}

impl Loss {
    fn new() -> Self {
        const KEPT: [u32; 4] = [0, 5, 11, 28];
        let pack = pack_of(SEQUENCES);
        // Every row once, then some again; a row may predict any token.
        let rows: Vec<usize> = (0..pack.token_ids().len()).chain([2, 9]).collect();
        let target = |(i, _): (usize, &usize)| match i % 3 {
            0 => Target { token: (i * 5 % 29) as u32, temperature: 1.0, kept: None },
            1 => Target { token: (i * 7 % 29) as u32, temperature: 0.7, kept: None },
            _ => Target { token: KEPT[i % 4], temperature: 1.3, kept: Some(&KEPT) },
        };
        let targets = rows.iter().enumerate().map(target).collect();
        let noise = noise(3 * rows.len(), 1);
        let gradient = |c: &[f32]| PredictionGradient { logprob: c[0], entropy: c[1], value: c[2] };
        Self { pack, gradients: noise.chunks(3).map(gradient).collect(), rows, targets }
    }

    fn value(&self, config: &Config, parameters: &Parameters) -> f64 {
        let decoder = Decoder::new(config, parameters);
        let predictions =
            decoder.score(&self.pack, &self.rows, &self.targets, &ThreadPool::single()).unwrap();
        let term = |(p, g): (&model::Prediction, &PredictionGradient)| {
            f64::from(p.logprob) * f64::from(g.logprob)
                + f64::from(p.entropy) * f64::from(g.entropy)
                + f64::from(p.value) * f64::from(g.value)
        };
        predictions.iter().zip(&self.gradients).map(term).sum()
    }

    fn gradients(&self, config: &Config, parameters: &Parameters) -> Gradients {
        let pool = ThreadPool::single();
        let decoder = Decoder::trainable(config, &Arc::new(parameters.clone()), Recompute::None);
        let mut gradients = Gradients::zeros(parameters.layout());
        let of = (&self.rows[..], &self.targets[..]);
        train(&decoder, &self.pack, of, &self.gradients, &mut gradients, &pool);
        gradients
    }
}

/// `[n]` values in [-1, 1).
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| (rng.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Weights far from any symmetry: norms around 1, everything else around 0.
fn random(config: &Config, seed: u64) -> Parameters {
    let mut parameters = Parameters::random(config, seed);
    let noise = noise(parameters.values().len(), seed);
    for (value, noise) in parameters.values_mut().iter_mut().zip(noise) {
        *value = if *value == 1.0 { 1.0 + 0.3 * noise } else { 0.5 * noise };
    }
    parameters
}

/// Models that differ in every optional part.
fn configs() -> Vec<Config> {
    let fresh = Config::fresh(&SIZES);
    let without_bias = |layer| LayerSpec { qkv_bias: false, ..layer };
    let bare = Config { tie_word_embeddings: false, ..fresh.clone().map_layers(without_bias) };
    let linear = Rotary { scaling: RopeScaling::Linear { factor: 2.0 }, ..Rotary::plain(10_000.0) };
    let full = Config { num_kv_heads: 1, head_dim: 4, rms_norm_eps: 1e-2, ..fresh.clone() };
    let full = full.map_layers(|layer| LayerSpec {
        output_bias: true,
        query_key_norm: QueryKeyNorm::PerHead,
        attention: AttentionSpec { rotary: Some(linear), ..layer.attention },
        ..layer
    });
    let critic = Config { head: Head::Value, ..bare.clone() };
    let both = Config { head: Head::LanguageAndValue, ..fresh.clone() };
    let tree = Config { reduction: Reduction::Tree, ..full.clone() };
    let window = |mut layer: LayerSpec| {
        layer.attention.window = Some(3);
        layer
    };
    // Norms around a block with an offset, GELU, two rotary embeddings, a scale and a window.
    let gemma = Config { logits_scaling: 2.0, ..fresh.clone() };
    let mut gemma = gemma.of_family(Architecture::Gemma3);
    gemma.layers[0] = window(gemma.layers[0]);
    gemma.layers[0].attention.rotary = Some(linear);
    gemma.layers[2].attention.scale = Some(0.4);
    // Norms after a block, a layer without rotary embedding, half of a head rotated, sums as trees.
    let after =
        Config { reduction: Reduction::Tree, logits_scaling: 4.0, rms_norm_eps: 0.05, ..fresh.clone() };
    let after = after.of_family(Architecture::Olmo2);
    let mut after = after.map_layers(|layer| LayerSpec { output_bias: true, ..window(layer) });
    after.layers[1].attention.rotary = None;
    after.layers[2].attention.rotary = Some(Rotary { share: 0.67, ..Rotary::plain(10_000.0) });
    // Multipliers of everything.
    let granite = Config {
        head: Head::LanguageAndValue,
        embedding_multiplier: 1.5,
        logits_scaling: 3.0,
        tie_word_embeddings: false,
        ..fresh.clone().of_family(Architecture::Granite)
    };
    let granite = granite.map_layers(|layer| LayerSpec { residual_multiplier: 0.6, ..layer });
    // Queries without a latent, rotated in halves, values as wide as keys; then with one and biases, sums as trees.
    let feed_forward = fresh.layers[0].feed_forward;
    let latent = fresh.clone().of_family(Architecture::DeepseekV3);
    let latent = latent.map_layers(|layer| LayerSpec { feed_forward, ..layer });
    let latent_tree = Config { reduction: Reduction::Tree, ..latent.clone() };
    let latent_tree =
        latent_tree.map_layers(|layer| LayerSpec { qkv_bias: true, output_bias: true, ..layer });
    let latent = latent.map_layers(|mut layer| {
        if let Some(latent) = &mut layer.attention.latent {
            (latent.query_rank, latent.interleaved, latent.value) = (None, false, latent.head_dim());
        }
        layer
    });
    vec![fresh, bare, full, critic, both, tree, gemma, after, granite, latent, latent_tree]
}

/// Derivative of the loss along `direction`, by central differences of fourth order.
fn difference(loss: &Loss, config: &Config, parameters: &Parameters, direction: &[f32]) -> f64 {
    let at = |step: f32| {
        let mut moved = parameters.clone();
        moved.values_mut().iter_mut().zip(direction).for_each(|(value, d)| *value += step * d);
        loss.value(config, &moved)
    };
    let (near, far) = (at(STEP) - at(-STEP), at(2.0 * STEP) - at(-2.0 * STEP));
    (8.0 * near - far) / (12.0 * f64::from(STEP))
}

fn assert_derivative(name: &str, loss: &Loss, config: &Config, seed: u64, only: impl Fn(usize) -> bool) {
    let parameters = random(config, 11);
    let gradients = loss.gradients(config, &parameters);
    let mut direction = noise(parameters.values().len(), seed);
    direction.iter_mut().enumerate().filter(|(i, _)| !only(*i)).for_each(|(_, d)| *d = 0.0);
    let along = gradients.values().iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d));
    let exact: f64 = along.sum();
    let squares = gradients.values().iter().enumerate().filter(|(i, _)| only(*i));
    let norm = squares.map(|(_, g)| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    let numeric = difference(loss, config, &parameters, &direction);
    assert!(norm > 1e-2, "{name}: a gradient of norm {norm} is too small to measure");
    assert!(
        (numeric - exact).abs() <= TOLERANCE * norm,
        "{name}: finite difference {numeric}, backward {exact}, norm {norm}"
    );
}

#[test]
fn backward_is_the_derivative_along_random_directions() {
    let loss = Loss::new();
    for config in configs() {
        for seed in 20..24 {
            let name = format!("all of {:?}", config.architecture);
            assert_derivative(&name, &loss, &config, seed, |_| true);
        }
    }
}

#[test]
fn backward_is_the_derivative_for_every_tensor() {
    let loss = Loss::new();
    for config in configs() {
        for (seed, spec) in (30..).zip(random(&config, 11).layout().specs()) {
            assert_derivative(&spec.name, &loss, &config, seed, |i| spec.range().contains(&i));
        }
    }
}
