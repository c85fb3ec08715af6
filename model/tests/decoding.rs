//! Decoding from the paged cache against the same sequences as a pack: the same bits, however the tokens are fed.
//!
//! Invariant: nothing here has a tolerance. Pages come from a cache that other sequences have filled before, so that a
//! key which is read without having been written shows.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::{
    Config, Decoder, KvCache, Pack, Quantization, Recompute, Reduction, SharedCores, StepSequence, ThreadPool,
};
use proptest::prelude::*;

use crate::common::{Golden, MODELS, bits, goldens, logits_of, pack_of};

/// A sequence on its way through the cache.
struct Running {
    tokens: Vec<u32>,
    /// How many tokens are in the cache.
    done: usize,
    pages: Vec<u32>,
    /// `[done - forked, vocab_size]` logits so far, from the token at which it was forked off.
    logits: Vec<f32>,
}

impl Running {
    fn new(tokens: Vec<u32>) -> Self {
        Self { tokens, done: 0, pages: Vec::new(), logits: Vec::new() }
    }

    /// A sequence that shares what is in the cache, and goes on with `suffix`.
    fn fork(&self, cache: &mut KvCache, suffix: &[u32]) -> Self {
        cache.share(&self.pages);
        let tokens = [&self.tokens[..self.done], suffix].concat();
        Self { tokens, done: self.done, pages: self.pages.clone(), logits: Vec::new() }
    }

    fn left(&self) -> usize {
        self.tokens.len() - self.done
    }

    /// Makes the pages of the next `count` tokens exist and be its own.
    fn prepare(&mut self, cache: &mut KvCache, count: usize) {
        let end = self.done + count;
        if let Some(page) = self.pages.get_mut(self.done / KvCache::PAGE)
            && count > 0
        {
            *page = cache.own(*page).unwrap();
        }
        while self.pages.len() < KvCache::pages_for(end) {
            self.pages.push(cache.take().unwrap());
        }
    }
}

/// Feeds all sequences together, `chunks[s]` tokens of sequence `s` at a time, to their ends.
fn run(decoder: &Decoder, cache: &mut KvCache, running: &mut [Running], chunks: &[usize]) {
    run_on(&ThreadPool::single(), decoder, cache, running, chunks);
}

fn run_on(
    pool: &ThreadPool,
    decoder: &Decoder,
    cache: &mut KvCache,
    running: &mut [Running],
    chunks: &[usize],
) {
    while running.iter().any(|r| r.left() > 0) {
        let counts: Vec<usize> = running.iter().zip(chunks).map(|(r, chunk)| r.left().min(*chunk)).collect();
        running.iter_mut().zip(&counts).for_each(|(r, count)| r.prepare(cache, *count));
        let sequences: Vec<StepSequence<'_>> = running
            .iter()
            .zip(&counts)
            .map(|(r, count)| StepSequence {
                tokens: &r.tokens[r.done..r.done + count],
                position: r.done,
                pages: &r.pages,
                wanted: *count,
                adapter: None,
            })
            .filter(|sequence| !sequence.tokens.is_empty())
            .collect();
        let logits = decoder.step(cache, &sequences, pool).unwrap();
        let mut logits = logits.chunks(decoder.config().vocab_size);
        for (r, count) in running.iter_mut().zip(&counts) {
            logits.by_ref().take(*count).for_each(|row| r.logits.extend_from_slice(row));
            r.done += count;
        }
    }
}

fn release(cache: &mut KvCache, running: &[Running]) {
    running.iter().for_each(|r| cache.release(&r.pages));
    assert_eq!(cache.free_pages(), cache.total_pages(), "all pages are given back");
}

fn decoder(name: &str) -> Decoder {
    let golden = Golden::open(name);
    Decoder::new(&golden.config, &golden.parameters)
}

/// A cache whose every position has been written by sequences that are gone.
fn used_cache(decoder: &Decoder, pages: usize) -> KvCache {
    let mut cache = KvCache::new(decoder.config(), pages * KvCache::PAGE);
    let mut running: Vec<_> = (0..pages).map(|s| Running::new(tokens(KvCache::PAGE, s + 100))).collect();
    run(decoder, &mut cache, &mut running, &vec![KvCache::PAGE; pages]);
    assert_eq!(cache.free_pages(), 0);
    release(&mut cache, &running);
    cache
}

/// `n` tokens of the golden vocabulary, different for each `seed`.
fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| (4 + (i * i * 31 + i * 17 + seed * 29) % 96) as u32).collect()
}

/// The logits of the last `count` tokens of `sequence`, computed from the whole.
fn expected(decoder: &Decoder, sequence: &[u32], count: usize) -> Vec<u32> {
    let logits = logits_of(decoder, &pack_of([sequence]));
    bits(&logits[(sequence.len() - count) * decoder.config().vocab_size..])
}

#[test]
fn chunks_of_every_size_give_the_bits_of_the_pack() {
    for name in MODELS {
        let decoder = decoder(name);
        let mut cache = used_cache(&decoder, 9);
        let sequences = [tokens(40, 1), tokens(1, 2), tokens(17, 3), tokens(33, 4)];
        let pack: Pack = pack_of(sequences.iter().map(Vec::as_slice));
        let packed = bits(&logits_of(&decoder, &pack));
        for chunks in [[1; 4], [2; 4], [3, 1, 16, 5], [16; 4], [17; 4], [40; 4]] {
            let mut running: Vec<_> = sequences.iter().cloned().map(Running::new).collect();
            run(&decoder, &mut cache, &mut running, &chunks);
            let stepped: Vec<u32> = running.iter().flat_map(|r| bits(&r.logits)).collect();
            assert!(stepped == packed, "{name}: chunks of {chunks:?}");
            release(&mut cache, &running);
        }
    }
}

#[test]
fn greedy_answers_are_those_of_transformers() {
    let read = std::fs::read(goldens().join("greedy.json")).unwrap();
    let rows: BTreeMap<String, BTreeMap<String, Vec<u32>>> = serde_json::from_slice(&read).unwrap();
    for name in MODELS {
        let (decoder, row) = (decoder(name), &rows[name]);
        let mut cache = used_cache(&decoder, 3);
        let mut running = [Running::new(row["prompt"].clone())];
        while running[0].tokens.len() < row["prompt"].len() + row["answer"].len() {
            running[0].logits.clear();
            run(&decoder, &mut cache, &mut running, &[KvCache::PAGE]);
            let last = running[0].logits.rchunks(decoder.config().vocab_size).next().unwrap();
            let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap();
            running[0].tokens.push(best as u32);
        }
        assert_eq!(running[0].tokens[row["prompt"].len()..], row["answer"], "{name}");
    }
}

/// With tree sums, sampler and trainer still compute the same bits, which are not those of chains.
#[test]
fn tree_sums_are_the_same_bits_in_both_halves() {
    for name in MODELS {
        let golden = Golden::open(name);
        let config = Config { reduction: Reduction::Tree, ..golden.config.clone() };
        let tree = Decoder::new(&config, &golden.parameters);
        let trained = Decoder::trainable(&config, &Arc::new(golden.parameters.clone()), Recompute::None);
        let sequence = tokens(40, 1);
        let packed = bits(&logits_of(&trained, &pack_of([sequence.as_slice()])));
        let chain = Decoder::new(&golden.config, &golden.parameters);
        assert_ne!(packed, bits(&logits_of(&chain, &pack_of([sequence.as_slice()]))), "{name}");
        let mut cache = used_cache(&tree, 3);
        let mut running = [Running::new(sequence)];
        run(&tree, &mut cache, &mut running, &[7]);
        assert!(bits(&running[0].logits) == packed, "{name}");
    }
}

/// What is sampled from in 8 or 16 bits is close to the policy, and as independent of the batch as the policy itself.
#[test]
fn a_quantized_sampler_is_close_and_does_not_depend_on_the_batch() {
    let cases = MODELS
        .into_iter()
        .flat_map(|name| [(name, Quantization::Int8, 1e-4..0.05), (name, Quantization::Bf16, 1e-4..0.02)]);
    for (name, quantization, bounds) in cases {
        let golden = Golden::open(name);
        let sampler = |quantization| Decoder::sampler(&golden.config, &golden.parameters, quantization);
        let (policy, quantized) = (decoder(name), sampler(quantization));
        let sequences = [tokens(40, 1), tokens(17, 3)];
        let pack = pack_of(sequences.iter().map(Vec::as_slice));
        let (exact, close) = (logits_of(&policy, &pack), logits_of(&quantized, &pack));
        assert_eq!(bits(&logits_of(&sampler(Quantization::None), &pack)), bits(&exact));
        let norm =
            |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let error =
            norm(&mut exact.iter().zip(&close).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
        // A token whose experts are nearly as probable may go to others, and norms of the narrow heads of a recurrence enlarge what
        // rounding changes.
        let (experts, recurs) = (golden.config.experts().is_some(), golden.config.state_len() > 0);
        let bounds = if experts || recurs { bounds.start..2.0 * bounds.end } else { bounds };
        assert!(bounds.contains(&error), "{name}, {quantization:?}: relative error of the logits {error}");

        let mut cache = used_cache(&quantized, 9);
        for chunks in [[1; 2], [16, 5], [40; 2]] {
            let mut running: Vec<_> = sequences.iter().cloned().map(Running::new).collect();
            run(&quantized, &mut cache, &mut running, &chunks);
            let stepped: Vec<u32> = running.iter().flat_map(|r| bits(&r.logits)).collect();
            assert!(stepped == bits(&close), "{name}, {quantization:?}: chunks of {chunks:?}");
            release(&mut cache, &running);
        }
    }
}

#[test]
fn only_the_wanted_logits_are_returned() {
    let decoder = decoder("qwen3");
    let mut cache = used_cache(&decoder, 2);
    let pages = [[cache.take().unwrap()], [cache.take().unwrap()]];
    let (long, short) = (tokens(5, 1), tokens(3, 2));
    let step = |cache: &mut KvCache, wanted: [usize; 2]| {
        let sequences = [
            StepSequence { tokens: &long, position: 0, pages: &pages[0], wanted: wanted[0], adapter: None },
            StepSequence { tokens: &short, position: 0, pages: &pages[1], wanted: wanted[1], adapter: None },
        ];
        bits(&decoder.step(cache, &sequences, &ThreadPool::single()).unwrap())
    };
    let both = [expected(&decoder, &long, 2), expected(&decoder, &short, 1)].concat();
    assert_eq!(step(&mut cache, [2, 1]), both);
    assert_eq!(step(&mut cache, [0, 3]), expected(&decoder, &short, 3));
    assert!(step(&mut cache, [0, 0]).is_empty());
}

/// Sequences enough that a step pays a second thread.
#[test]
fn threads_change_nothing() {
    let decoder = decoder("qwen2");
    let sequences: Vec<_> = (0..60).map(|s| tokens(150 + s % 7, s)).collect();
    let logits = |pool: &ThreadPool| {
        let mut cache = KvCache::new(decoder.config(), sequences.len() * 160);
        let mut running: Vec<_> = sequences.iter().cloned().map(Running::new).collect();
        run_on(pool, &decoder, &mut cache, &mut running, &[80; 60]);
        release(&mut cache, &running);
        running.iter().flat_map(|r| bits(&r.logits)).collect::<Vec<_>>()
    };
    let alone = logits(&ThreadPool::single());
    assert!(logits(&ThreadPool::new(&SharedCores::new(3), 3)) == alone);
}

/// A page that failed to be written is in its place again.
#[test]
fn a_step_that_fails_leaves_the_cache_usable() {
    let decoder = decoder("qwen2");
    let mut cache = used_cache(&decoder, 1);
    let page = [cache.take().unwrap()];
    let good = tokens(4, 1);
    let mut step = |tokens: &[u32]| {
        let sequence = StepSequence { tokens, position: 0, pages: &page, wanted: 1, adapter: None };
        decoder.step(&mut cache, &[sequence], &ThreadPool::single())
    };
    let err = step(&[5, 100]).unwrap_err().to_string();
    assert!(err.contains("token 1 has id 100, but the vocabulary ends at 100"), "{err}");
    assert_eq!(bits(&step(&good).unwrap()), expected(&decoder, &good, 1));
}

#[test]
fn a_shared_page_is_copied_once_per_writer_but_the_last() {
    let golden = Golden::open("qwen3");
    let mut cache = KvCache::new(&golden.config, 4 * KvCache::PAGE);
    let page = cache.take().unwrap();
    cache.share(&[page]);
    cache.share(&[page]);
    let (first, second) = (cache.own(page).unwrap(), cache.own(page).unwrap());
    assert_eq!(cache.own(page), Some(page), "the last holder keeps it");
    assert!(first != page && second != page && first != second);
    assert_eq!(cache.free_pages(), 1);
    cache.take().unwrap();
    cache.share(&[page]);
    assert_eq!((cache.own(page), cache.take()), (None, None), "no page is left to copy into");
    cache.release(&[page]);
    assert_eq!(cache.own(page), Some(page), "and nothing was given up by asking");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// A prompt is prefilled once; completions share its pages, and copy what they write to.
    #[test]
    fn shared_prompts_give_the_bits_of_the_pack(
        name in prop::sample::select(&MODELS[..]),
        prompt in 1..40usize,
        prompt_chunk in 1..20usize,
        completions in prop::collection::vec((1..25usize, 1..20usize), 1..5),
    ) {
        let decoder = decoder(name);
        let mut cache = used_cache(&decoder, 24);
        let prompt = tokens(prompt, 7);
        let mut running = vec![Running::new(prompt.clone())];
        run(&decoder, &mut cache, &mut running, &[prompt_chunk]);
        prop_assert!(bits(&running[0].logits) == expected(&decoder, &prompt, prompt.len()));
        for (seed, (length, _)) in completions.iter().enumerate() {
            let completion = running[0].fork(&mut cache, &tokens(*length, seed));
            running.push(completion);
        }
        let full = KvCache::pages_for(prompt.len());
        prop_assert_eq!(cache.total_pages() - cache.free_pages(), full, "the prompt is in the cache once");
        let chunks: Vec<usize> = std::iter::once(1).chain(completions.iter().map(|(_, chunk)| *chunk)).collect();
        run(&decoder, &mut cache, &mut running, &chunks);
        for (r, (length, _)) in running[1..].iter().zip(&completions) {
            prop_assert!(bits(&r.logits) == expected(&decoder, &r.tokens, *length), "{}", name);
        }
        // The prompt is as it was: its own continuation sees none of what the completions wrote.
        let own = tokens(9, 50);
        let mut last = vec![running[0].fork(&mut cache, &own)];
        run(&decoder, &mut cache, &mut last, &[2]);
        prop_assert!(bits(&last[0].logits) == expected(&decoder, &last[0].tokens, own.len()));
        running.append(&mut last);
        release(&mut cache, &running);
    }
}
