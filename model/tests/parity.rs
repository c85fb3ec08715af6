//! The decoder against PyTorch: logits, loss and the gradient of every weight, on the models of `tests/goldens`.
//!
//! Invariant: tolerances are those of f32 arithmetic in another order; whatever is computed twice by the decoder itself
//! is compared bit for bit.

use std::sync::Arc;

use model::{
    Decoder, GradientSink, Gradients, Pack, PackError, Prediction, PredictionGradient, Recompute,
    SharedCores, Target, ThreadPool,
};

use crate::common::{Golden, MODELS, bits, logits_of, pack_of, train};

/// What a golden's loss is made of: every token but the first of a sequence, predicted from the row before it.
struct Loss<'a> {
    rows: Vec<usize>,
    targets: Vec<Target<'a>>,
    gradients: Vec<PredictionGradient>,
}

impl Loss<'_> {
    /// The loss of the sequences at `indices`, packed in this order.
    fn new(golden: &Golden, indices: &[usize]) -> Self {
        let (mut rows, mut targets, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
        let mut start = 0;
        for sequence in indices.iter().map(|index| &golden.sequences[*index]) {
            for (t, token) in sequence.tokens.iter().skip(1).enumerate() {
                rows.push(start + t);
                targets.push(Target { token: *token, temperature: golden.temperature, kept: None });
                gradients.push(PredictionGradient {
                    logprob: sequence.coefficients[t],
                    entropy: 0.0,
                    value: 0.0,
                });
            }
            start += sequence.tokens.len();
        }
        Self { rows, targets, gradients }
    }

    fn value(&self, predictions: &[Prediction]) -> f64 {
        let terms = predictions.iter().zip(&self.gradients);
        terms.map(|(p, g)| f64::from(p.logprob) * f64::from(g.logprob)).sum()
    }
}

fn trainable(golden: &Golden) -> Decoder {
    trainable_with(golden, Recompute::None)
}

fn trainable_with(golden: &Golden, recompute: Recompute) -> Decoder {
    Decoder::trainable(&golden.config, &Arc::new(golden.parameters.clone()), recompute)
}

/// Adds the gradients of the sequences at `indices`, packed in this order.
fn reverse(decoder: &Decoder, golden: &Golden, indices: &[usize], gradients: &mut Gradients) {
    reverse_on(&ThreadPool::single(), decoder, golden, indices, gradients);
}

pub(crate) fn reverse_on(
    pool: &ThreadPool,
    decoder: &Decoder,
    golden: &Golden,
    indices: &[usize],
    gradients: &mut dyn GradientSink,
) {
    let (pack, loss) =
        (pack_of(indices.iter().map(|i| &golden.sequences[*i].tokens[..])), Loss::new(golden, indices));
    train(decoder, &pack, (&loss.rows, &loss.targets), &loss.gradients, gradients, pool);
}

fn all(golden: &Golden) -> Vec<usize> {
    (0..golden.sequences.len()).collect()
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Asserts that each tensor of `ours` equals that of `theirs` to `tolerance` of its norm.
fn assert_gradients(name: &str, golden: &Golden, ours: &Gradients, theirs: &[f32], tolerance: f64) {
    for spec in golden.parameters.layout().specs() {
        let (ours, theirs) = (ours.get(&spec.name).unwrap(), &theirs[spec.range()]);
        let scale = norm(theirs.iter().copied());
        assert!(scale > 0.0 || spec.frozen, "{name}: a gradient of zero would test nothing: {}", spec.name);
        let error = norm(ours.iter().zip(theirs).map(|(a, b)| a - b));
        assert!(error <= tolerance * scale, "{name}: {} is off by {} of its norm", spec.name, error / scale);
        for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
            assert_eq!(*a == 0.0, *b == 0.0, "{name}: {} [{i}] is {a}, not {b}", spec.name);
        }
    }
}

#[test]
fn logits_are_those_of_pytorch() {
    for name in MODELS {
        let golden = Golden::open(name);
        let decoder = Decoder::new(&golden.config, &golden.parameters);
        let ours = logits_of(&decoder, &pack_of(golden.sequences.iter().map(|s| &s.tokens[..])));
        let theirs: Vec<f32> = golden.sequences.iter().flat_map(|s| &s.logits).copied().collect();
        assert_eq!(ours.len(), theirs.len(), "{name}");
        for (i, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let (row, token) = (i / golden.config.vocab_size, i % golden.config.vocab_size);
            assert!((ours - theirs).abs() <= 1e-4, "{name}: row {row}, token {token}: {ours}, not {theirs}");
        }
    }
}

#[test]
fn loss_and_gradients_are_those_of_pytorch() {
    for name in MODELS {
        let golden = Golden::open(name);
        let (decoder, loss) = (trainable(&golden), Loss::new(&golden, &all(&golden)));
        let pack = pack_of(golden.sequences.iter().map(|s| &s.tokens[..]));
        let predictions = decoder.score(&pack, &loss.rows, &loss.targets, &ThreadPool::single()).unwrap();
        let value = loss.value(&predictions);
        assert!((value - f64::from(golden.loss)).abs() <= 1e-3, "{name}: loss {value}, not {}", golden.loss);

        let mut gradients = Gradients::zeros(golden.parameters.layout());
        reverse(&decoder, &golden, &all(&golden), &mut gradients);
        assert_gradients(name, &golden, &gradients, golden.gradients.values(), 1e-3);
    }
}

/// Micro-batches: the gradients of packs add up to those of one pack of all sequences, in whatever order.
#[test]
fn gradients_of_packs_add_up() {
    for name in MODELS {
        let golden = Golden::open(name);
        let decoder = trainable(&golden);
        let mut whole = Gradients::zeros(golden.parameters.layout());
        reverse(&decoder, &golden, &all(&golden), &mut whole);
        let mut parts = Gradients::zeros(golden.parameters.layout());
        reverse(&decoder, &golden, &[3, 1], &mut parts);
        let mut rest = Gradients::zeros(golden.parameters.layout());
        reverse(&decoder, &golden, &[2, 0], &mut rest);
        parts.add(&rest, &ThreadPool::single());
        assert_gradients(name, &golden, &parts, whole.values(), 1e-5);
    }
}

/// Neither the number of threads nor what is computed again changes a bit.
#[test]
fn threads_and_recomputation_change_nothing() {
    for name in MODELS {
        let golden = Golden::open(name);
        let gradients = |pool: &ThreadPool, recompute: Recompute| {
            let mut gradients = Gradients::zeros(golden.parameters.layout());
            // Sequences of 4 lengths, over and over: more tokens than a chunk of the recomputation has.
            let indices: Vec<usize> = (0..40).map(|i| i * 3 % golden.sequences.len()).collect();
            reverse_on(pool, &trainable_with(&golden, recompute), &golden, &indices, &mut gradients);
            bits(gradients.values())
        };
        let expected = gradients(&ThreadPool::single(), Recompute::None);
        for threads in [1, 2, 3] {
            let pool = ThreadPool::new(&SharedCores::new(threads), threads);
            for recompute in [Recompute::None, Recompute::Block, Recompute::Sequence] {
                assert!(gradients(&pool, recompute) == expected, "{name}: {threads} threads, {recompute:?}");
            }
        }
    }
}

/// A prompt that is computed once for its completions gives each of them the bits that it has alone, and all of them the
/// gradient that they have alone.
#[test]
fn a_shared_prefix_changes_nothing_but_the_cost() {
    for name in MODELS {
        let golden = Golden::open(name);
        let decoder = trainable(&golden);
        let prompt = &golden.sequences[0].tokens[..];
        let completions: Vec<&[u32]> = golden.sequences[1..].iter().map(|s| &s.tokens[..]).collect();
        let pool = ThreadPool::single();
        // Every token of a completion is predicted, the first from the last of the prompt.
        let (mut shared, mut alone) = (Pack::new(), Pack::new());
        let prefix = shared.push(prompt).unwrap();
        let (mut rows, mut rows_alone, mut targets, mut slopes) = (vec![], vec![], vec![], vec![]);
        for (c, completion) in completions.iter().enumerate() {
            let start = shared.push_continuation(prefix, completion).unwrap();
            let start_alone = alone.push(&[prompt, completion].concat()).unwrap() + prompt.len();
            for (t, token) in completion.iter().enumerate() {
                rows.push(if t == 0 { prefix + prompt.len() - 1 } else { start + t - 1 });
                rows_alone.push(start_alone + t - 1);
                targets.push(Target { token: *token, temperature: 0.9, kept: None });
                slopes.push(PredictionGradient {
                    logprob: 0.3 - 0.1 * ((c + t) % 7) as f32,
                    entropy: 0.01,
                    value: 0.0,
                });
            }
        }
        let of = |pack: &Pack, rows: &[usize]| {
            let mut gradients = Gradients::zeros(golden.parameters.layout());
            let predictions = train(&decoder, pack, (rows, &targets), &slopes, &mut gradients, &pool);
            (bits(&predictions.iter().map(|p| p.logprob).collect::<Vec<_>>()), gradients)
        };
        let (expected, whole) = of(&alone, &rows_alone);
        let (logprobs, gradients) = of(&shared, &rows);
        assert_eq!(logprobs, expected, "{name}");
        assert_gradients(name, &golden, &gradients, whole.values(), 1e-5);
        assert_eq!(shared.push_continuation(1, &[5]), Err(PackError::NoPrefix { row: 1 }));
    }
}

#[test]
fn scoring_gives_the_bits_of_the_forward() {
    for name in MODELS {
        let golden = Golden::open(name);
        let loss = Loss::new(&golden, &all(&golden));
        let pack = pack_of(golden.sequences.iter().map(|s| &s.tokens[..]));
        let mut gradients = Gradients::zeros(golden.parameters.layout());
        let (of, pool) = ((&loss.rows[..], &loss.targets[..]), ThreadPool::single());
        let forward = train(&trainable(&golden), &pack, of, &loss.gradients, &mut gradients, &pool);
        let frozen = Decoder::new(&golden.config, &golden.parameters);
        let score = frozen.score(&pack, &loss.rows, &loss.targets, &ThreadPool::single()).unwrap();
        let of = |p: &[Prediction]| bits(&p.iter().flat_map(|p| [p.logprob, p.entropy]).collect::<Vec<_>>());
        assert_eq!(of(&score), of(&forward), "{name}");
        assert!(score.iter().all(|p| p.logprob < 0.0 && p.entropy > 0.0), "{name}");
    }
}

#[test]
fn a_sequence_has_the_same_logits_alone_and_in_any_pack() {
    for name in MODELS {
        let golden = Golden::open(name);
        let decoder = Decoder::new(&golden.config, &golden.parameters);
        let packed = logits_of(&decoder, &pack_of(golden.sequences.iter().map(|s| &s.tokens[..])));
        let mut packed = &packed[..];
        for sequence in &golden.sequences {
            let alone = logits_of(&decoder, &pack_of([&sequence.tokens[..]]));
            let (here, rest) = packed.split_at(alone.len());
            assert_eq!(bits(&alone), bits(here), "{name}");
            packed = rest;
        }
        assert!(packed.is_empty());
    }
}

#[test]
fn a_token_beyond_the_vocabulary_is_an_error() {
    let golden = Golden::open("qwen2");
    let decoder = Decoder::new(&golden.config, &golden.parameters);
    let mut pack = Pack::new();
    pack.push(&[5, 100]).unwrap();
    let err = decoder.logits(&pack).unwrap_err().to_string();
    assert!(err.contains("token 1 has id 100, but the vocabulary ends at 100"), "{err}");
}
