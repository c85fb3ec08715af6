//! Adapters of one base in one batch: each row has the bits that it has alone.

use std::sync::Arc;

use model::{
    Decoder, FrozenParameters, KvCache, LowRank, Quantization, Recompute, SharedCores, StepSequence,
    ThreadPool,
};

use crate::common::{Golden, MODELS, bits, logits_of, pack_of};
use crate::low_rank::factors_of;

/// Two adapters that differ in every factor.
fn adapters(golden: &Golden) -> [Arc<LowRank>; 2] {
    let first = factors_of(&golden.config, golden.parameters.layout());
    let mut second = first.clone();
    second
        .values_mut()
        .iter_mut()
        .rev()
        .enumerate()
        .for_each(|(i, value)| *value = 0.15 * (i as f32 * 0.3).cos());
    [Arc::new(first), Arc::new(second)]
}

/// The logits of every token of `sequences`, each with the adapter of its number, which are fed together: some tokens in a first
/// step, the others one at a time.
fn decode(decoder: &Decoder, sequences: &[(&[u32], Option<usize>)], pool: &ThreadPool) -> Vec<Vec<u32>> {
    let mut cache = KvCache::new(decoder.config(), 16 * 8 * sequences.len());
    let mut pages = vec![Vec::new(); sequences.len()];
    let (mut done, mut logits) = (vec![0; sequences.len()], vec![Vec::new(); sequences.len()]);
    while let Some(longest) = sequences.iter().zip(&done).map(|((tokens, _), done)| tokens.len() - done).max()
        && longest > 0
    {
        let mut steps = Vec::new();
        for (number, ((tokens, adapter), pages)) in sequences.iter().zip(&mut pages).enumerate() {
            let position = done[number];
            let end = tokens.len().min(if position == 0 { 3 + number } else { position + 1 });
            if end > position {
                cache.make_writable(pages, position, end);
                let tokens = &tokens[position..end];
                steps.push((
                    number,
                    StepSequence { tokens, position, pages, wanted: tokens.len(), adapter: *adapter },
                ));
            }
        }
        let (numbers, steps): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
        let found = decoder.step(&mut cache, &steps, pool).unwrap();
        let mut rest = &found[..];
        for (number, step) in numbers.into_iter().zip(steps) {
            let (own, after) = rest.split_at(step.wanted * decoder.config().vocab_size);
            logits[number].extend(bits(own));
            rest = after;
            done[number] += step.tokens.len();
        }
    }
    logits
}

/// Adapters in any order, twice, and none, on all threads, have the bits of a decoder that trains the one adapter over the same
/// base.
#[test]
fn sequences_with_different_adapters_have_the_bits_of_training_each_alone() {
    for name in MODELS {
        let golden = Golden::open(name);
        let adapters = adapters(&golden);
        let base = FrozenParameters::load(&golden.dir, &golden.config).unwrap();
        let mut decoder = Decoder::new(&golden.config, &golden.parameters);
        decoder.set_adapters(&adapters);
        let tokens = &golden.sequences[0].tokens;
        let short = &tokens[..tokens.len().min(7)];
        let batch = [(&tokens[..], Some(1)), (short, None), (&tokens[..], Some(0)), (short, Some(1))];
        let none = Arc::new(LowRank::zeros(1, 1.0, Vec::new()));
        let expected: Vec<Vec<u32>> = batch
            .iter()
            .map(|(tokens, adapter)| {
                let factors = adapter.map_or(&none, |adapter| &adapters[adapter]);
                let alone = Decoder::frozen(&base, factors, Recompute::None);
                bits(&logits_of(&alone, &pack_of([*tokens])))
            })
            .collect();
        assert!(expected[0] != expected[2] && expected[1] != expected[3], "{name}: adapters change logits");
        for threads in [1, 3] {
            let pool = ThreadPool::new(&SharedCores::new(threads), threads);
            assert!(decode(&decoder, &batch, &pool) == expected, "{name}: {threads} threads");
        }
        decoder.set_adapters(&adapters[1..]);
        let changed = [(&tokens[..], Some(0)), (short, None)];
        let found = decode(&decoder, &changed, &ThreadPool::single());
        assert!(found == expected[..2], "{name}: after a change of the adapters");
    }
}

/// With weights in 8 or 16 bits a row has the bits that it has alone, too.
#[test]
fn over_quantised_weights_a_row_does_not_depend_on_the_others() {
    for name in ["llama", "qwen3_moe", "deepseek_v3"] {
        let golden = Golden::open(name);
        let tokens = &golden.sequences[0].tokens[..];
        let batch = [(tokens, Some(0)), (tokens, Some(1)), (tokens, None)];
        for quantization in [Quantization::Int8, Quantization::Bf16] {
            let mut decoder = Decoder::sampler(&golden.config, &golden.parameters, quantization);
            decoder.set_adapters(&adapters(&golden));
            let pool = ThreadPool::single();
            let together = decode(&decoder, &batch, &pool);
            assert!(together[0] != together[1] && together[1] != together[2], "{name}");
            let alone: Vec<_> = batch.iter().map(|one| decode(&decoder, &[*one], &pool).remove(0)).collect();
            assert!(together == alone, "{name}, {quantization:?}");
        }
    }
}

#[test]
fn an_adapter_that_is_not_there_is_refused() {
    let golden = Golden::open("llama");
    let decoder = Decoder::new(&golden.config, &golden.parameters);
    let mut cache = KvCache::new(&golden.config, 16);
    let mut pages = Vec::new();
    cache.make_writable(&mut pages, 0, 1);
    let step = StepSequence { tokens: &[1], position: 0, pages: &pages, wanted: 1, adapter: Some(0) };
    let error = decoder.step(&mut cache, &[step], &ThreadPool::single()).unwrap_err().to_string();
    assert!(error.contains("adapter 0") && error.contains("has 0"), "{error}");
}
