//! Frozen weights that stay quantised, under factors that are not merged into them, against the same weights in f32.
//!
//! Invariant: files are quantised here, and their f32 weights are those that the reader of models gives.

use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use model::{
    Architecture, Config, Decoder, FrozenParameters, KvCache, LowRank, ModelDirectory, ModelError, Pack,
    Parameters, PredictionGradient, Recompute, Reduction, SharedCores, Sizes, StepSequence, Target,
    ThreadPool, characters,
};

use crate::common::gguf::GgufContent;
use crate::common::{Golden, MODELS, bits, logits_of, pack_of, train};
use crate::low_rank::{OfFactors, factors_of};

const FORMATS: [GgmlDType; 6] =
    [GgmlDType::F16, GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::Q4_1, GgmlDType::Q4K, GgmlDType::Q6K];

const TOKENS: [u32; 21] = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71];

/// A quantised file, open both ways.
pub(crate) struct Quantized {
    pub(crate) config: Config,
    bytes: u64,
    pub(crate) base: FrozenParameters,
    parameters: Parameters,
}

/// A model whose rows are whole blocks of every format; Llama has an embedding that is not the head, and rows in another order.
fn config(architecture: Architecture) -> Config {
    let sizes = Sizes {
        vocab_size: 100,
        hidden_size: 256,
        intermediate_size: 512,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 64,
    };
    let config = Config::fresh(&sizes).of_family(architecture);
    Config { tie_word_embeddings: architecture != Architecture::Llama, ..config }
}

fn quantized(architecture: Architecture, dtype: GgmlDType) -> Quantized {
    let (config, root) = (config(architecture), tempfile::tempdir().unwrap());
    let path = root.path().join("model.gguf");
    write(&path, &config, dtype);
    let directory = ModelDirectory::open(&path).unwrap();
    let base = FrozenParameters::load(&path, directory.config()).unwrap();
    let (bytes, parameters) = (path.metadata().unwrap().len(), directory.load_parameters().unwrap());
    Quantized { config: directory.config().clone(), bytes, base, parameters }
}

fn write(path: &Path, config: &Config, dtype: GgmlDType) {
    let parameters = Parameters::random(config, 3);
    GgufContent::of(config, &parameters, dtype, (&characters(), "gpt-2")).write(path);
}

/// Every architecture and format.
pub(crate) fn each(check: impl Fn(&str, &Quantized)) {
    for architecture in [Architecture::Llama, Architecture::Qwen2] {
        for dtype in FORMATS {
            check(&format!("{architecture:?}, {dtype:?}"), &quantized(architecture, dtype));
        }
    }
}

fn pack() -> Pack {
    pack_of([&TOKENS[..], &TOKENS[4..11]])
}

/// Gradients of the factors.
fn gradients(decoder: &Decoder, of: &Quantized, factors: &Arc<LowRank>, pool: &ThreadPool) -> Vec<f32> {
    let rows: Vec<usize> = (0..TOKENS.len() - 1).collect();
    let target = |row: &usize| Target { token: TOKENS[row + 1], temperature: 0.9, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    let slope = |row: &usize| PredictionGradient { logprob: 1.0 - 0.1 * *row as f32, ..Default::default() };
    let slopes: Vec<_> = rows.iter().map(slope).collect();
    let mut found = OfFactors::new(of.parameters.layout(), factors);
    train(decoder, &pack(), (&rows, &targets), &slopes, &mut found, pool);
    found.values
}

/// The weights in f32 with the factors merged.
fn merged(of: &Quantized, factors: &Arc<LowRank>) -> Decoder {
    let (mut parameters, base) = (of.parameters.clone(), of.parameters.values());
    let frozen = |index: usize| &base[factors.pairs()[index].weight.clone()];
    factors.merge(parameters.values_mut(), frozen, &ThreadPool::single());
    Decoder::trainable(&of.config, &Arc::new(parameters), Recompute::None).adapting(Arc::clone(factors))
}

/// Products that dequantise some rows at a time are those with the whole f32 matrix: with factors that add nothing, forward
/// and backward have the same bits.
#[test]
fn quantised_weights_compute_what_they_do_in_f32() {
    each(|name, of| {
        let mut factors = factors_of(&of.config, of.base.layout());
        let zeros: Vec<_> = factors
            .pairs()
            .iter()
            .map(|pair| if pair.is_embedding { &pair.a } else { &pair.b })
            .cloned()
            .collect();
        zeros.into_iter().for_each(|range| factors.values_mut()[range].fill(0.0));
        let factors = Arc::new(factors);
        let (frozen, whole) = (Decoder::frozen(&of.base, &factors, Recompute::None), merged(of, &factors));
        assert_eq!(logits_of(&frozen, &pack()), logits_of(&whole, &pack()), "{name}");
        let pool = ThreadPool::single();
        let found = gradients(&frozen, of, &factors, &pool);
        assert_eq!(found, gradients(&whole, of, &factors, &pool), "{name}");
        assert!(found.iter().any(|gradient| *gradient != 0.0), "{name}");
    });
}

#[test]
fn factors_that_are_not_merged_compute_what_merged_ones_do() {
    each(|name, of| {
        let factors = Arc::new(factors_of(&of.config, of.base.layout()));
        let (frozen, whole) = (Decoder::frozen(&of.base, &factors, Recompute::None), merged(of, &factors));
        let norm = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let assert_near = |what: &str, found: &[f32], expected: &[f32]| {
            let off: Vec<f32> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
            let (error, scale) = (norm(&off), norm(expected));
            assert!(scale > 0.0 && error <= 1e-4 * scale, "{name}: {what}: off by {error} of {scale}");
        };
        assert_near("logits", &logits_of(&frozen, &pack()), &logits_of(&whole, &pack()));
        let pool = ThreadPool::single();
        let (found, expected) =
            (gradients(&frozen, of, &factors, &pool), gradients(&whole, of, &factors, &pool));
        for pair in factors.pairs() {
            for range in [&pair.a, &pair.b] {
                assert_near(&format!("{pair:?}"), &found[range.clone()], &expected[range.clone()]);
            }
        }
    });
}

/// Neither how tokens are fed, nor threads, nor what is computed again changes a bit.
#[test]
fn decoding_has_the_bits_of_the_training_forward() {
    each(|name, of| {
        let factors = Arc::new(factors_of(&of.config, of.base.layout()));
        let decoder = Decoder::frozen(&of.base, &factors, Recompute::None);
        let expected = bits(&logits_of(&decoder, &pack_of([&TOKENS[..]])));
        let of_factors = bits(&gradients(&decoder, of, &factors, &ThreadPool::single()));
        for threads in [1, 3] {
            let pool = ThreadPool::new(&SharedCores::new(threads), threads);
            for chunk in [1, 5, TOKENS.len()] {
                let mut cache = KvCache::new(&of.config, 64);
                let (mut pages, mut done, mut logits) = (Vec::new(), 0, Vec::new());
                for tokens in TOKENS.chunks(chunk) {
                    cache.make_writable(&mut pages, done, done + tokens.len());
                    let sequence = StepSequence {
                        tokens,
                        position: done,
                        pages: &pages,
                        wanted: tokens.len(),
                        adapter: None,
                    };
                    logits.extend(decoder.step(&mut cache, &[sequence], &pool).unwrap());
                    done += tokens.len();
                }
                assert!(bits(&logits) == expected, "{name}: {threads} threads, {chunk} tokens at a time");
            }
            let again = Decoder::frozen(&of.base, &factors, Recompute::Sequence);
            assert!(bits(&gradients(&again, of, &factors, &pool)) == of_factors, "{name}: {threads} threads");
        }
    });
}

/// Directories of every family, with every number format that transformers writes.
#[test]
fn weights_of_a_directory_stay_as_they_are_stored() {
    let none = Arc::new(LowRank::zeros(1, 1.0, Vec::new()));
    for name in MODELS {
        let golden = Golden::open(name);
        let base = FrozenParameters::load(&golden.dir, &golden.config).unwrap();
        let stored = Decoder::frozen(&base, &none, Recompute::None);
        let expected = Decoder::new(&golden.config, &golden.parameters);
        assert!(bits(&logits_of(&stored, &pack())) == bits(&logits_of(&expected, &pack())), "{name}");
    }
}

/// Another process computes with the tensors that it receives, and says which one was not whole.
#[test]
fn a_base_that_is_received_is_the_base_that_was_sent() {
    for name in ["qwen3", "gpt_oss"] {
        let golden = Golden::open(name);
        let base = FrozenParameters::load(&golden.dir, &golden.config).unwrap();
        let receive = |messages: Vec<Vec<u8>>| {
            let mut rest = messages.into_iter();
            FrozenParameters::received::<ModelError>(&golden.config, || Ok(rest.next().unwrap()))
        };
        let messages: Vec<Vec<u8>> = base.messages().collect();
        let there = receive(messages.clone()).unwrap();
        assert_eq!((there.digest(), there.bytes()), (base.digest(), base.bytes()), "{name}");
        let spec = &base.layout().specs()[1];
        for broken in [vec![], vec![0], vec![200; 9], messages[1][..messages[1].len() - 1].to_vec()] {
            let mut messages = messages.clone();
            messages[1] = broken;
            let error = receive(messages).unwrap_err().to_string();
            assert!(error.contains(&spec.name), "{error}");
        }
    }
}

#[test]
fn memory_is_that_of_the_file() {
    each(|name, of| {
        assert!(of.base.bytes() < of.bytes, "{name}: {} of {}", of.base.bytes(), of.bytes);
        let matrices: usize =
            of.base.layout().specs().iter().filter(|spec| spec.shape.len() == 2).map(|spec| spec.len()).sum();
        let most = if name.contains("F16") { 2 * matrices } else { matrices * 9 / 8 };
        assert!(of.base.bytes() <= (most + (64 << 10)) as u64, "{name}: {} for {matrices}", of.base.bytes());
        let factors = Arc::new(factors_of(&of.config, of.base.layout()));
        let own = Decoder::frozen(&of.base, &factors, Recompute::None).bytes();
        assert!(own < 16 << 10, "{name}: biases alone are copied, not {own} bytes");
    });
}

#[test]
fn what_cannot_stay_quantised_is_refused_by_name() {
    let (config, root) = (config(Architecture::Qwen2), tempfile::tempdir().unwrap());
    let path = root.path().join("model.gguf");
    write(&path, &config, GgmlDType::Q5_0);
    let failed = |path: &Path, config: &Config| FrozenParameters::load(path, config).unwrap_err().to_string();
    let message = failed(&path, &config);
    assert!(message.contains("token_embd.weight is Q5_0") && message.contains("Q4_K"), "{message}");
    let message = failed(root.path(), &config);
    assert!(message.contains("model.safetensors"), "{message}");
    let tree = Config { reduction: Reduction::Tree, ..config };
    assert!(failed(&path, &tree).contains("trees"), "{}", failed(&path, &tree));
}
