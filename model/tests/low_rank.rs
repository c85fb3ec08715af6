//! Gradients of low-rank factors against those of the weights that they are merged into.
//!
//! Invariant: of every family, with factors of every matrix. The gradients of weights are proven against PyTorch elsewhere; the
//! chain rule gives those of factors from them.

use std::sync::Arc;

use model::{
    AdaptedMatrix, Config, Decoder, FactorPair, GradientSink, Gradients, Layout, LowRank, Recompute,
    SharedCores, TargetModule, ThreadPool, Unit,
};

use crate::common::{Golden, MODELS, bits};
use crate::parity::reverse_on;

const RANK: usize = 3;

/// Gradients of all factors.
pub(crate) struct OfFactors {
    layout: Arc<Layout>,
    factors: Arc<LowRank>,
    pub(crate) values: Vec<f32>,
}

impl OfFactors {
    pub(crate) fn new(layout: &Arc<Layout>, factors: &Arc<LowRank>) -> Self {
        let (layout, factors) = (Arc::clone(layout), Arc::clone(factors));
        let values = vec![0.0; factors.values().len()];
        Self { layout, factors, values }
    }
}

impl GradientSink for OfFactors {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        &mut self.values[self.factors.within(&self.layout.unit(unit))]
    }

    fn done(&mut self, _: Unit) {}
}

/// Factors of every matrix, but of a tensor that is embedding and head.
pub(crate) fn factors_of(config: &Config, layout: &Layout) -> LowRank {
    let mut len = 0;
    let mut pairs = Vec::new();
    for AdaptedMatrix { module, weight, rows, columns, .. } in AdaptedMatrix::all(layout.specs()) {
        let is_embedding = module == Some(TargetModule::EmbedTokens);
        if is_embedding && config.tie_word_embeddings {
            continue;
        }
        let (a, b) = if is_embedding { (rows, columns) } else { (columns, rows) };
        let (a, b) = (len..len + RANK * a, len + RANK * a..len + RANK * (a + b));
        len = b.end;
        pairs.push(FactorPair { weight, a, b, rows, columns, is_embedding });
    }
    let mut factors = LowRank::zeros(RANK, 0.5, pairs);
    let values = factors.values_mut().iter_mut().enumerate();
    values.for_each(|(i, value)| *value = 0.2 * (i as f32 * 0.7).sin());
    factors
}

/// The golden with the factors merged into its weights.
fn merged(mut golden: Golden, factors: &LowRank) -> Golden {
    let base = golden.parameters.clone();
    let of = |index: usize| &base.values()[factors.pairs()[index].weight.clone()];
    factors.merge(golden.parameters.values_mut(), of, &ThreadPool::single());
    golden
}

#[test]
fn gradients_of_factors_are_those_of_their_weights_projected() {
    for name in MODELS {
        let golden = Golden::open(name);
        let factors = Arc::new(factors_of(&golden.config, golden.parameters.layout()));
        let golden = merged(golden, &factors);
        let (all, alone): (Vec<usize>, _) = ((0..golden.sequences.len()).collect(), ThreadPool::single());
        let decoder =
            Decoder::trainable(&golden.config, &Arc::new(golden.parameters.clone()), Recompute::None);
        let mut whole = Gradients::zeros(golden.parameters.layout());
        reverse_on(&alone, &decoder, &golden, &all, &mut whole);
        let expected = factors.projected(&(0..whole.values().len()), whole.values(), &alone);

        let mut own = OfFactors::new(golden.parameters.layout(), &factors);
        reverse_on(&alone, &decoder.adapting(Arc::clone(&factors)), &golden, &all, &mut own);
        let norm = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        for pair in factors.pairs() {
            for range in [&pair.a, &pair.b] {
                let (own, expected) = (&own.values[range.clone()], &expected[range.clone()]);
                let off: Vec<f32> = own.iter().zip(expected).map(|(a, b)| a - b).collect();
                let (error, scale) = (norm(&off), norm(expected));
                assert!(scale > 0.0, "{name}: a gradient of zero would test nothing: {pair:?}");
                assert!(error <= 1e-5 * scale, "{name}: off by {} of the norm: {pair:?}", error / scale);
            }
        }
    }
}

/// Neither the number of threads nor what is computed again changes a bit.
#[test]
fn threads_and_recomputation_change_no_gradient_of_factors() {
    for name in MODELS {
        let golden = Golden::open(name);
        let factors = Arc::new(factors_of(&golden.config, golden.parameters.layout()));
        let golden = merged(golden, &factors);
        let parameters = Arc::new(golden.parameters.clone());
        // More tokens than a chunk of the recomputation has.
        let indices: Vec<usize> = (0..40).map(|i| i * 3 % golden.sequences.len()).collect();
        let of = |pool: &ThreadPool, recompute| {
            let decoder =
                Decoder::trainable(&golden.config, &parameters, recompute).adapting(Arc::clone(&factors));
            let mut own = OfFactors::new(golden.parameters.layout(), &factors);
            reverse_on(pool, &decoder, &golden, &indices, &mut own);
            bits(&own.values)
        };
        let expected = of(&ThreadPool::single(), Recompute::None);
        for threads in [1, 2, 3] {
            let pool = ThreadPool::new(&SharedCores::new(threads), threads);
            for recompute in [Recompute::None, Recompute::Block, Recompute::Sequence] {
                assert!(of(&pool, recompute) == expected, "{name}: {threads} threads, {recompute:?}");
            }
        }
    }
}

#[test]
fn weights_without_factors_have_no_gradient() {
    let golden = Golden::open("qwen2");
    let mut all = factors_of(&golden.config, golden.parameters.layout()).pairs().to_vec();
    // Those of one matrix in the first layer alone.
    all.truncate(1);
    let factors = Arc::new(LowRank::zeros(RANK, 1.0, all));
    let layout = golden.parameters.layout();
    let units = layout.units().map(|unit| factors.within(&layout.unit(unit)).len());
    let first = factors.values().len();
    let expected: Vec<usize> =
        layout.units().map(|unit| if unit == Unit::Layer(0) { first } else { 0 }).collect();
    assert_eq!(units.collect::<Vec<_>>(), expected);
}
