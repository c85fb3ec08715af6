//! What PyTorch computes for the tiny models of `tests/goldens`.
//!
//! Invariant: everything that `make_goldens.py` stored is there and has the shape that its doc states, or opening
//! panics. It compares nothing; that is for the tests.

pub(crate) mod counting;
pub(crate) mod gguf;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{
    Config, Decoder, GradientSink, Layout, Pack, Parameters, Prediction, PredictionGradient, Target,
    ThreadPool, TrainedTargets,
};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

/// Directory names of the models.
pub(crate) const MODELS: [&str; 20] = [
    "qwen2",
    "qwen2_sharded",
    "qwen3",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mistral",
    "phi3",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "gemma3",
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
];

/// A model and what PyTorch computes for it, in f32.
pub(crate) struct Golden {
    /// The model directory (it has no tokenizer).
    pub(crate) dir: PathBuf,
    /// Its config.
    pub(crate) config: Config,
    /// Its weights, read by this crate.
    pub(crate) parameters: Parameters,
    /// Some weights as PyTorch read them, by name.
    pub(crate) some_parameters: Vec<(String, Vec<f32>)>,
    /// `[pairs]` rotary frequencies of the first layer that has any.
    pub(crate) inv_freq: Vec<f32>,
    /// The sequences.
    pub(crate) sequences: Vec<GoldenSequence>,
    /// Divides the logits in the loss.
    pub(crate) temperature: f32,
    /// Sum over sequences and positions of `coefficient * log_softmax(logits / temperature)[next token]`.
    pub(crate) loss: f32,
    /// Gradient of the loss by every parameter; zero for frozen ones, which have none.
    pub(crate) gradients: Parameters,
}

/// One sequence of a [`Golden`].
pub(crate) struct GoldenSequence {
    /// `[len]` token ids.
    pub(crate) tokens: Vec<u32>,
    /// `[len]` weights of the log-probabilities in the loss; 0 at the last position.
    pub(crate) coefficients: Vec<f32>,
    /// `[len, vocab_size]` row-major, before the temperature.
    pub(crate) logits: Vec<f32>,
}

/// The directory of the goldens.
pub(crate) fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

/// Numbers of targets of samples, which add up to `n`.
pub(crate) fn samples(n: usize) -> [usize; 3] {
    [n / 3, n / 2 - n / 3, n - n / 2]
}

/// A loss with the derivatives `slopes [n]`, which appends the predictions that it is given to `predictions`.
pub(crate) fn recorded<'a>(
    samples: &'a [usize],
    slopes: &'a [PredictionGradient],
    predictions: &'a mut Vec<Prediction>,
) -> impl FnMut(Range<usize>, &[Prediction]) -> Vec<PredictionGradient> + 'a {
    move |range, predicted| {
        let start: usize = samples[..range.start].iter().sum();
        assert_eq!(start, predictions.len(), "samples come in their order");
        assert_eq!(predicted.len(), samples[range].iter().sum::<usize>(), "samples come whole");
        predictions.extend_from_slice(predicted);
        slopes[start..start + predicted.len()].to_vec()
    }
}

/// A training pass with the derivatives `slopes [n]` for `targets [n]` at `rows [n]` of the pack. Returns the predictions.
pub(crate) fn train(
    decoder: &Decoder,
    pack: &Pack,
    (rows, targets): (&[usize], &[Target<'_>]),
    slopes: &[PredictionGradient],
    gradients: &mut dyn GradientSink,
    pool: &ThreadPool,
) -> Vec<Prediction> {
    let samples = samples(rows.len());
    let trained = TrainedTargets { rows, targets, samples: &samples };
    let mut predictions = Vec::new();
    decoder.train(pack, trained, &mut recorded(&samples, slopes, &mut predictions), gradients, pool).unwrap();
    predictions
}

/// One pack of all sequences, in their order.
pub(crate) fn pack_of<'a>(sequences: impl IntoIterator<Item = &'a [u32]>) -> Pack {
    let mut pack = Pack::new();
    for sequence in sequences {
        pack.push(sequence).unwrap();
    }
    pack
}

/// `[T, vocab_size]` logits of every token of the pack, row-major.
pub(crate) fn logits_of(decoder: &Decoder, pack: &Pack) -> Vec<f32> {
    decoder.logits(pack).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The values as they are stored, so that an equality of two zeros or NaNs means what it says.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

impl Golden {
    /// Opens one of [`MODELS`].
    pub(crate) fn open(name: &str) -> Self {
        let dir = goldens().join(name);
        let config = Config::load(&dir).unwrap();
        let parameters = Parameters::load(&dir, &config).unwrap();
        let bytes = std::fs::read(dir.join("golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let offsets = integers(&file, "offsets");
        let (tokens, coefficients) = (integers(&file, "tokens"), floats(&file, "coefficients"));
        let sequence = |(index, bounds): (usize, &[usize])| {
            let range = bounds[0]..bounds[1];
            let logits = floats(&file, &format!("logits.{index}"));
            assert_eq!(logits.len(), range.len() * config.vocab_size);
            GoldenSequence {
                tokens: tokens[range.clone()].iter().map(|&id| id as u32).collect(),
                coefficients: coefficients[range].to_vec(),
                logits,
            }
        };
        let sequences = offsets.windows(2).enumerate().map(sequence).collect();
        let parameter = |name: &str| name.strip_prefix("param.").map(|name| name.to_owned());
        let some_parameters = file.names().into_iter().filter_map(parameter).collect::<Vec<_>>();
        Self {
            sequences,
            some_parameters: some_parameters
                .into_iter()
                .map(|name| (name.clone(), floats(&file, &format!("param.{name}"))))
                .collect(),
            inv_freq: floats(&file, "inv_freq"),
            temperature: floats(&file, "temperature")[0],
            loss: floats(&file, "loss")[0],
            gradients: gradients(&file, parameters.layout()),
            dir,
            config,
            parameters,
        }
    }
}

fn gradients(file: &SafeTensors<'_>, layout: &Arc<Layout>) -> Parameters {
    let mut gradients = Parameters::zeros(Arc::clone(layout));
    for spec in layout.specs().iter().filter(|spec| !spec.frozen) {
        let values = floats(file, &format!("grad.{}", spec.name));
        gradients.values_mut()[spec.range()].copy_from_slice(&values);
    }
    gradients
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
    tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn integers(file: &SafeTensors<'_>, name: &str) -> Vec<usize> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), Dtype::I64, "{name}");
    let values = tensor.data().as_chunks::<8>().0.iter();
    values.map(|bytes| usize::try_from(i64::from_le_bytes(*bytes)).unwrap()).collect()
}
