//! Sampling of a token from logits, with its behavior log-probability: temperature, top-k, top-p (nucleus sampling, Holtzman
//! et al. 2019, arXiv 1904.09751) and min-p (Nguyen et al. 2024, arXiv 2407.01082) applied.
//!
//! Invariant: the log-probability is computed by the function that the trainer uses, so that equal weights give equal bits.
//! The random number comes from the caller; there is no generator here.

use crate::ops::simd::{exp, max, sum, vectorized};
use crate::ops::softmax::scale_and_normalizer;

/// Parameters of the sampling distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps the smallest set of tokens with at least this total probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens at least this likely relative to the most likely one; 0 keeps all.
    pub min_p: f32,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0 };

    /// The policy's own distribution.
    pub const PLAIN: Self = Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 };

    /// Whether some tokens may be cut off.
    #[must_use]
    pub fn truncates(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }
}

/// A token and its log-probability under the distribution that is sampled from, nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its log-probability, nats.
    pub logprob: f32,
}

/// The `count` most likely tokens of `logits [vocab_size]`, which are overwritten, most likely first: fewer if truncation
/// leaves fewer. A greedy choice has the distribution at temperature 1.
#[must_use]
pub fn most_likely(logits: &mut [f32], sampling: Sampling, count: usize) -> Vec<TokenLogprob> {
    let sampling = if sampling.temperature == 0.0 { Sampling::PLAIN } else { sampling };
    let scale = 1.0 / sampling.temperature;
    let ids = if sampling.truncates() {
        kept_tokens(logits, sampling, scale)
    } else {
        (0..logits.len() as u32).collect()
    };
    if sampling.truncates() {
        for (slot, id) in ids.iter().enumerate() {
            logits[slot] = logits[*id as usize];
        }
    }
    let candidates = &mut logits[..ids.len()];
    let log_normalizer = scale_and_normalizer(candidates, scale);
    let mut slots: Vec<usize> = (0..ids.len()).collect();
    let by_logit = |a: &usize, b: &usize| candidates[*b].total_cmp(&candidates[*a]).then(a.cmp(b));
    if count < slots.len() {
        slots.select_nth_unstable_by(count, by_logit);
        slots.truncate(count);
    }
    slots.sort_unstable_by(by_logit);
    let logprob = |slot: usize| at_most_0(candidates[slot] - log_normalizer);
    slots.into_iter().map(|slot| TokenLogprob { token: ids[slot], logprob: logprob(slot) }).collect()
}

/// Log-probabilities `[n]`, nats, of `tokens [n]` under `logits [vocab_size]` at temperature 1: those that a draw of them has. The
/// logits stay as they are.
///
/// # Panics
/// If a token lies beyond the vocabulary.
#[must_use]
pub fn logprobs_of(logits: &mut [f32], tokens: &[u32]) -> Vec<f32> {
    // A product with 1 is exact.
    let log_normalizer = scale_and_normalizer(logits, 1.0);
    tokens.iter().map(|token| at_most_0(logits[*token as usize] - log_normalizer)).collect()
}

/// A log-probability without what rounding put above 0. NaN is kept: the caller checks it.
fn at_most_0(logprob: f32) -> f32 {
    if logprob > 0.0 { 0.0 } else { logprob }
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The token.
    pub token: u32,
    /// Its log-probability under the distribution drawn from, nats; 0 for a greedy choice. NaN if the logits are not finite.
    pub logprob: f32,
    /// `[kept]` token ids that truncation left, ascending; `None` without truncation.
    pub kept: Option<Vec<u32>>,
}

impl Draw {
    /// Samples from `logits [vocab_size]`, which are overwritten, with the uniform random number `uniform` in [0, 1).
    ///
    /// # Panics
    /// If there are no logits.
    #[must_use]
    pub fn new(logits: &mut [f32], sampling: Sampling, uniform: f32) -> Self {
        if sampling.temperature == 0.0 {
            let token = argmax(logits);
            let defined = logits[token as usize].is_finite() && !logits.iter().any(|z| z.is_nan());
            return Self { token, logprob: if defined { 0.0 } else { f32::NAN }, kept: None };
        }
        let scale = 1.0 / sampling.temperature;
        let kept = sampling.truncates().then(|| kept_tokens(logits, sampling, scale));
        let candidates = match &kept {
            None => logits,
            Some(kept) => {
                for (slot, id) in kept.iter().enumerate() {
                    logits[slot] = logits[*id as usize];
                }
                &mut logits[..kept.len()]
            }
        };
        let log_normalizer = scale_and_normalizer(candidates, scale);
        let slot = inverse_cdf(candidates, log_normalizer, uniform);
        let logprob = at_most_0(candidates[slot] - log_normalizer);
        let token = kept.as_ref().map_or(slot as u32, |kept| kept[slot]);
        Self { token, logprob, kept }
    }
}

/// The first of the most likely tokens.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, z) in logits.iter().enumerate() {
        if *z > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Slots whose probabilities are added before the others.
const CHUNK: usize = 16;

/// First slot at which the running sum of probabilities passes `uniform` of their total.
fn inverse_cdf(scaled: &[f32], log_normalizer: f32, uniform: f32) -> usize {
    let mut sums = Vec::with_capacity(scaled.len().div_ceil(CHUNK));
    let mut p = [0.0; CHUNK];
    chunk_sums(scaled, log_normalizer, &mut sums);
    let mut left = uniform * sums.iter().sum::<f32>();
    for ((first, chunk), sum) in (0..).step_by(CHUNK).zip(scaled.chunks(CHUNK)).zip(sums) {
        if left < sum {
            probabilities(chunk, log_normalizer, &mut p);
            for (slot, p) in (first..).zip(p).filter(|(_, p)| *p > 0.0) {
                if left < p {
                    return slot;
                }
                left -= p;
            }
        } else {
            left -= sum;
        }
    }
    // Rounding left a crumb of the total: the last token that can be drawn.
    scaled.iter().rposition(|z| exp(z - log_normalizer) > 0.0).unwrap_or(0)
}

vectorized! {
    /// `p [CHUNK]` from `scaled [CHUNK]`, or from fewer: zeros beyond the last.
    fn probabilities(scaled: &[f32], log_normalizer: f32, p: &mut [f32; CHUNK]) {
        *p = [0.0; CHUNK];
        for (p, z) in p.iter_mut().zip(scaled) {
            *p = exp(z - log_normalizer);
        }
    }
}

vectorized! {
    /// Appends the sum of the probabilities of each chunk of `scaled [V]`, one after the other within it.
    fn chunk_sums(scaled: &[f32], log_normalizer: f32, sums: &mut Vec<f32>) {
        for block in scaled.chunks(CHUNK * CHUNK) {
            let mut p = [[0.0_f32; CHUNK]; CHUNK];
            for (p, z) in p.as_flattened_mut().iter_mut().zip(block) {
                *p = exp(z - log_normalizer);
            }
            // The sums of several chunks advance together: one alone would wait for each addition.
            let mut of_chunks = [0.0_f32; CHUNK];
            for slot in 0..CHUNK {
                for (sum, p) in of_chunks.iter_mut().zip(&p) {
                    *sum += p[slot];
                }
            }
            sums.extend_from_slice(&of_chunks[..block.len().div_ceil(CHUNK)]);
        }
    }
}

/// Top-k, then top-p within it, then min-p, ascending by id. The most likely token is always kept.
fn kept_tokens(logits: &[f32], sampling: Sampling, scale: f32) -> Vec<u32> {
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let (mut ids, mut total) = candidates(logits, sampling, scale);
    if sampling.top_k > 0 && sampling.top_k < ids.len() {
        ids.select_nth_unstable_by(sampling.top_k - 1, by_logit);
        ids.truncate(sampling.top_k);
    }
    ids.sort_unstable_by(by_logit);
    let top = logits[ids[0] as usize];
    let weight = |id: u32| exp((logits[id as usize] - top) * scale);
    if sampling.top_p < 1.0 {
        if sampling.top_k > 0 {
            total = ids.iter().map(|id| weight(*id)).sum::<f32>();
        }
        let limit = sampling.top_p * total;
        let mut reached = 0.0;
        let enough = ids.iter().position(|id| {
            reached += weight(*id);
            reached >= limit
        });
        ids.truncate(enough.map_or(ids.len(), |last| last + 1));
    }
    if sampling.min_p > 0.0 {
        let enough = ids.partition_point(|id| weight(*id) >= sampling.min_p);
        ids.truncate(enough.max(1));
    }
    ids.sort_unstable();
    ids
}

/// A superset of the tokens that top-p and min-p keep, so that few of a large vocabulary have to be sorted, and the total
/// weight of all tokens relative to that of the most likely one. With top-k it is all tokens.
fn candidates(logits: &[f32], sampling: Sampling, scale: f32) -> (Vec<u32>, f32) {
    let all = 0..logits.len() as u32;
    if sampling.top_k > 0 {
        return (all.collect(), 0.0);
    }
    let mut weights = vec![0.0; logits.len()];
    let total = relative_weights(logits, scale, &mut weights);
    // Tokens below this together weigh at most half of what top-p may cut off, so the others are enough for it.
    let rare = (1.0 - sampling.top_p).max(0.0) * total / (2 * logits.len()) as f32;
    let least = rare.max(sampling.min_p);
    // NaN is kept, as a logit and as a total: it has to show in the log-probability.
    let is_below = |id: &u32| total.is_finite() && weights[*id as usize] < least;
    (all.filter(|id| !is_below(id)).collect(), total)
}

vectorized! {
    /// Weights `[V]` of tokens relative to that of the most likely one. Returns their sum.
    fn relative_weights(logits: &[f32], scale: f32, weights: &mut [f32]) -> f32 {
        let top = max(logits);
        for (weight, z) in weights.iter_mut().zip(logits) {
            *weight = exp((z - top) * scale);
        }
        sum(weights)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ops::check::noise;

    #[test]
    fn logits_that_are_no_numbers_show_in_the_log_probability() {
        for sampling in [Sampling::PLAIN, Sampling { top_p: 0.5, min_p: 0.1, ..Sampling::PLAIN }] {
            let mut logits = [0.0, f32::NAN, 1.0];
            let draw = Draw::new(&mut logits, sampling, 0.5);
            assert!(draw.logprob.is_nan() && draw.token < 3, "{sampling:?} {draw:?}");
        }
    }

    /// Draws at evenly spaced uniform numbers hit each token with the frequency of its probability.
    #[test]
    fn the_log_probability_is_that_of_the_drawing() {
        let base: Vec<f32> = noise(20, 3).iter().map(|z| 3.0 * z).collect();
        let draws = 20_000;
        for sampling in [
            Sampling::PLAIN,
            Sampling { temperature: 0.7, ..Sampling::PLAIN },
            Sampling { top_k: 5, ..Sampling::PLAIN },
            Sampling { top_p: 0.8, ..Sampling::PLAIN },
            Sampling { min_p: 0.2, temperature: 1.4, ..Sampling::PLAIN },
        ] {
            let mut hits = vec![(0_u32, 0.0_f32); base.len()];
            for i in 0..draws {
                let draw = Draw::new(&mut base.clone(), sampling, (i as f32 + 0.5) / draws as f32);
                hits[draw.token as usize].0 += 1;
                hits[draw.token as usize].1 = draw.logprob;
            }
            for (count, logprob) in hits.into_iter().filter(|(count, _)| *count > 0) {
                let expected = f64::from(logprob.exp()) * f64::from(draws);
                assert!((f64::from(count) - expected).abs() < 2.5, "{sampling:?}: {count} of {expected}");
            }
        }
    }

    #[test]
    fn the_most_likely_tokens_have_the_log_probability_that_a_draw_of_them_has() {
        let base: Vec<f32> = noise(40, 9).iter().map(|z| 4.0 * z).collect();
        for sampling in [
            Sampling::PLAIN,
            Sampling { temperature: 0.7, ..Sampling::PLAIN },
            Sampling { top_p: 0.8, ..Sampling::PLAIN },
            Sampling { top_k: 3, ..Sampling::PLAIN },
        ] {
            let top = most_likely(&mut base.clone(), sampling, 5);
            assert_eq!(top.len(), if sampling.top_k == 3 { 3 } else { 5 });
            assert!(top.windows(2).all(|pair| pair[0].logprob >= pair[1].logprob), "{top:?}");
            let drawn: Vec<Draw> =
                (0..2000).map(|i| Draw::new(&mut base.clone(), sampling, i as f32 / 2000.0)).collect();
            let same = |likely: &TokenLogprob| {
                let draw = drawn.iter().find(|draw| draw.token == likely.token).unwrap();
                draw.logprob.to_bits() == likely.logprob.to_bits()
            };
            assert!(top[..2].iter().all(same), "{sampling:?} {top:?}");
        }
        let greedy = most_likely(&mut base.clone(), Sampling::GREEDY, 1);
        assert_eq!(greedy, most_likely(&mut base.clone(), Sampling::PLAIN, 1));
        assert_eq!(greedy[0].token, Draw::new(&mut base.clone(), Sampling::GREEDY, 0.5).token);
    }

    #[test]
    fn a_token_is_scored_as_a_draw_of_it() {
        let base: Vec<f32> = noise(40, 9).iter().map(|z| 4.0 * z).collect();
        for i in 0..200 {
            let draw = Draw::new(&mut base.clone(), Sampling::PLAIN, i as f32 / 200.0);
            let mut logits = base.clone();
            let scored = logprobs_of(&mut logits, &[draw.token, draw.token]);
            assert_eq!(scored, [draw.logprob; 2]);
            assert_eq!(logits, base);
        }
    }

    #[test]
    fn truncation_keeps_what_it_says() {
        let logits: Vec<f32> = [0.5_f32, 0.25, 0.125, 0.0625, 0.0625].iter().map(|p| p.ln()).collect();
        let kept = |s: Sampling| Draw::new(&mut logits.clone(), s, 0.0).kept;
        assert_eq!(kept(Sampling::PLAIN), None);
        assert_eq!(kept(Sampling { top_k: 2, ..Sampling::PLAIN }), Some(vec![0, 1]));
        assert_eq!(kept(Sampling { top_p: 0.7, ..Sampling::PLAIN }), Some(vec![0, 1]));
        assert_eq!(kept(Sampling { min_p: 0.2, ..Sampling::PLAIN }), Some(vec![0, 1, 2]));
        assert_eq!(kept(Sampling { min_p: 1.0, ..Sampling::PLAIN }), Some(vec![0]));
    }

    /// What top-p and min-p keep of a large vocabulary is what sorting all of it keeps.
    #[test]
    fn rare_tokens_are_left_out_before_the_sort() {
        for (seed, spread) in [(1, 0.1), (2, 2.0), (3, 8.0), (4, 30.0)] {
            let logits: Vec<f32> = noise(5000, seed).iter().map(|z| spread * z).collect();
            let mut sorted: Vec<u32> = (0..5000).collect();
            sorted.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            let p = |id: &u32| f64::from(logits[*id as usize] - logits[sorted[0] as usize]).exp();
            let total: f64 = sorted.iter().map(p).sum();
            for (top_p, min_p) in [(0.3, 0.0), (0.9, 0.0), (0.999, 0.0), (1.0, 0.05), (0.9, 0.2)] {
                let mut reached = 0.0;
                let mut expected: Vec<u32> = Vec::new();
                for id in &sorted {
                    if reached < f64::from(top_p) * total && p(id) >= f64::from(min_p) {
                        expected.push(*id);
                    }
                    reached += p(id);
                }
                let sampling = Sampling { top_p, min_p, ..Sampling::PLAIN };
                let kept = kept_tokens(&logits, sampling, 1.0);
                let difference = kept.len().abs_diff(expected.len());
                assert!(
                    difference <= 1 + kept.len() / 1000,
                    "{spread} {sampling:?}: {difference} of {}",
                    kept.len()
                );
                assert!(candidates(&logits, sampling, 1.0).0.len() >= kept.len());
            }
        }
        let (few, _) = candidates(&[0.0, 9.0, -9.0, 8.0], Sampling { top_p: 0.9, ..Sampling::PLAIN }, 1.0);
        assert_eq!(few, [1, 3]);
    }

    #[test]
    fn logits_that_are_not_finite_have_no_logprob() {
        for logits in [[f32::NAN, f32::NAN], [1.0, f32::NAN], [f32::INFINITY, 0.0]] {
            for sampling in [Sampling::GREEDY, Sampling::PLAIN] {
                assert!(Draw::new(&mut logits.clone(), sampling, 0.5).logprob.is_nan(), "{logits:?}");
            }
            assert!(most_likely(&mut logits.clone(), Sampling::PLAIN, 1)[0].logprob.is_nan(), "{logits:?}");
        }
    }

    proptest! {
        /// The running sum is that of one chunk after the other.
        #[test]
        fn the_drawn_slot_is_that_of_the_running_sum(n in 1..700usize, seed in 1..500u32, u in 0.0..1.0f32) {
            let scaled: Vec<f32> = noise(n, seed).iter().map(|z| 5.0 * z).collect();
            let p = |z: &f32| exp(*z - 4.0);
            let sum = |chunk: &[f32]| chunk.iter().map(p).sum::<f32>();
            let mut left = u * scaled.chunks(CHUNK).map(sum).sum::<f32>();
            let mut expected = None;
            for (c, chunk) in scaled.chunks(CHUNK).enumerate() {
                if left >= sum(chunk) {
                    left -= sum(chunk);
                    continue;
                }
                for (i, z) in chunk.iter().enumerate() {
                    if expected.is_none() && left < p(z) {
                        expected = Some(c * CHUNK + i);
                    }
                    left -= p(z);
                }
                if expected.is_some() {
                    break;
                }
            }
            if let Some(expected) = expected {
                prop_assert_eq!(inverse_cdf(&scaled, 4.0, u), expected);
            }
        }

        #[test]
        fn every_draw_is_possible(n in 1..60usize, seed in 1..500u32, u in 0.0..1.0f32, top_k in 0..9usize, top_p in 0.05..1.0f32) {
            let mut logits: Vec<f32> = noise(n, seed).iter().map(|z| 30.0 * z).collect();
            let draw = Draw::new(&mut logits, Sampling { temperature: 0.9, top_p, top_k, min_p: 0.0 }, u);
            prop_assert!((draw.token as usize) < n);
            prop_assert!(draw.logprob <= 0.0 && draw.logprob.is_finite());
            if let Some(kept) = draw.kept {
                prop_assert!(kept.binary_search(&draw.token).is_ok());
            }
        }
    }
}
