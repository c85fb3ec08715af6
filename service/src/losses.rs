//! The losses of the service: sums over tokens of the targets' log-probabilities `l`, with `r = exp(l - logprobs)`.
//!
//! ```text
//! cross_entropy        -weights l
//! importance_sampling  -r advantages
//! ppo                  -min(r advantages, clip(r, low, high) advantages)
//! cispo                -stop_gradient(clip(r, low, high)) advantages l
//! dro                  -(advantages l - beta / 2 (l - logprobs)^2)
//! gspo                 -min(s advantages, clip(s, low, high) advantages), s = exp(mean(l - logprobs)) of the sequence
//! ```
//!
//! Sources: tinker-docs.thinkingmachines.ai, Loss Functions; PPO arXiv 1707.06347, CISPO arXiv 2506.13585, DRO arXiv 2405.19107, GSPO
//! arXiv 2507.18071 equations 7 and 13, of which the latter has an advantage for each token.
//!
//! Invariant: a position without effect (weight or advantage and log-probability of 0, and not of the ratio of `gspo`) whose target is
//! not the next token is not computed: it is padding before what was sampled.

use std::collections::BTreeMap;

use model::{Prediction, PredictionGradient};
use serde::{Deserialize, Serialize};
use trainer::learner::RowLoss;
use trajectory::{PolicyVersion, Sample, SampleStreams, VersionRun};

use crate::data::{Datum, LossSetting, LossTensor, LossValues, PassRequest};
use crate::outcome::FailedRequest;

/// Longest name of an input that an error shows, bytes.
const SHOWN: usize = 80;

/// A loss with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ServedLoss {
    CrossEntropy,
    ImportanceSampling,
    Ppo { low: f64, high: f64 },
    Cispo { low: f64, high: f64 },
    Dro { beta: f64 },
    Gspo { low: f64, high: f64 },
}

/// What a loss says about one token.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TokenTerm {
    loss: f64,
    /// Derivative of the loss by the log-probability.
    slope: f64,
    /// The importance ratio, of the sequence for `gspo`; 1 for a loss without one.
    ratio: f64,
    clipped: bool,
}

/// The inputs of the loss at the scored positions of a datum, `S` of them.
#[derive(Clone, Debug, Default)]
struct TokenInputs {
    /// `[S]` weights or advantages.
    factors: Vec<f32>,
    /// `[S]` log-probabilities of the sampler, nats; empty for the cross-entropy.
    behavior: Vec<f32>,
    /// `[S]` bounds of single tokens; empty for those of the settings.
    bounds: [Vec<f32>; 2],
    /// `[S]` for `gspo`, whether a token counts in the ratio of the sequence; empty for the other losses.
    in_ratio: Vec<bool>,
}

/// The data of a pass, checked.
#[derive(Debug)]
pub(crate) struct PreparedPass {
    loss: ServedLoss,
    /// A row for every datum with a scored position.
    rows: Vec<TokenInputs>,
    samples: Vec<Sample>,
    targets: Vec<Vec<u32>>,
    /// Of every row its datum and its scored positions.
    places: Vec<(usize, Vec<usize>)>,
    /// Of every datum its number of positions.
    lengths: Vec<usize>,
}

/// What a pass says about its tokens; `+=` over the leaves of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PassReport {
    /// `[rows]` with the index of the row, `[S]` log-probabilities of the targets, nats.
    pub(crate) logprobs: Vec<(usize, Vec<f32>)>,
    loss: f64,
    tokens: u64,
    ratios: f64,
    largest_ratio: f64,
    clipped: u64,
}

impl PreparedPass {
    /// Checks `request` for a model with `vocabulary` tokens and a context of `context`.
    ///
    /// # Errors
    /// Names what does not fit.
    pub(crate) fn new(
        request: &PassRequest,
        vocabulary: usize,
        context: usize,
    ) -> Result<Self, FailedRequest> {
        let loss = ServedLoss::of(&request.loss, &request.settings)?;
        let mut prepared = Self {
            loss,
            rows: Vec::new(),
            samples: Vec::new(),
            targets: Vec::new(),
            places: Vec::new(),
            lengths: Vec::new(),
        };
        for (index, datum) in request.data.iter().enumerate() {
            let failed = |reason: String| FailedRequest::user(format!("datum {index}: {reason}"));
            let length = datum.tokens.len();
            if length == 0 {
                return Err(failed("it has no tokens; give at least one".to_owned()));
            }
            if length > context {
                return Err(failed(format!(
                    "it has {length} tokens, and the context of the model is {context}"
                )));
            }
            if let Some(token) = datum.tokens.iter().find(|token| **token as usize >= vocabulary) {
                return Err(failed(format!("token {token} is outside the vocabulary of {vocabulary}")));
            }
            prepared.lengths.push(length);
            prepared.add(index, datum, vocabulary, request.forward_only).map_err(failed)?;
        }
        Ok(prepared)
    }

    fn add(&mut self, index: usize, datum: &Datum, vocabulary: usize, all: bool) -> Result<(), String> {
        let length = datum.tokens.len();
        let targets = targets(datum, vocabulary)?;
        let inputs = LossInputsOf { datum, length };
        let known = self.loss.inputs();
        if let Some(name) = datum.inputs.keys().find(|name| !known.contains(&&name[..])) {
            return Err(format!("the loss has no input `{}`; it has {}", shown(name), known.join(", ")));
        }
        let (factors, behavior) = match self.loss {
            ServedLoss::CrossEntropy => (inputs.floats("weights")?, Vec::new()),
            _ => (inputs.floats("advantages")?, inputs.floats("logprobs")?),
        };
        let bound = |name| inputs.optional(name);
        let bounds = match self.loss {
            ServedLoss::Ppo { .. } | ServedLoss::Cispo { .. } | ServedLoss::Gspo { .. } => {
                [bound("clip_low_threshold")?, bound("clip_high_threshold")?]
            }
            _ => [Vec::new(), Vec::new()],
        };
        let in_ratio = match self.loss {
            ServedLoss::Gspo { .. } => inputs.in_ratio(&factors, &behavior)?,
            _ => Vec::new(),
        };
        let is_scored = |i: &usize| {
            let follows = datum.tokens.get(i + 1).is_none_or(|next| *next == targets[*i]);
            all || follows
                || factors[*i] != 0.0
                || behavior.get(*i).is_some_and(|logprob| *logprob != 0.0)
                || in_ratio.get(*i).is_some_and(|counts| *counts)
        };
        let scored: Vec<usize> = (0..length).filter(is_scored).collect();
        let Some(last) = scored.last() else { return Ok(()) };
        let of = |values: &[f32]| scored.iter().filter_map(|i| values.get(*i)).copied().collect::<Vec<f32>>();
        let mut token_ids = datum.tokens[..=*last].to_vec();
        token_ids.push(datum.tokens.get(last + 1).copied().unwrap_or(targets[*last]));
        let mut loss_mask = vec![false; token_ids.len()];
        scored.iter().for_each(|i| loss_mask[i + 1] = true);
        let len = u32::try_from(token_ids.len()).map_err(|error| error.to_string())?;
        let streams = SampleStreams {
            behavior_logprobs: vec![0.0; token_ids.len()],
            versions: vec![VersionRun { version: PolicyVersion(0), len }],
            token_ids,
            loss_mask,
            temperature: 1.0,
            ..SampleStreams::default()
        };
        self.samples.push(Sample::new(streams).map_err(|error| error.to_string())?);
        let [low, high] = bounds;
        let bounds = [of(&low), of(&high)];
        let in_ratio = scored.iter().filter_map(|i| in_ratio.get(*i)).copied().collect();
        self.rows.push(TokenInputs { factors: of(&factors), behavior: of(&behavior), bounds, in_ratio });
        self.targets.push(scored.iter().map(|i| targets[*i]).collect());
        self.places.push((index, scored));
        Ok(())
    }

    /// The rows.
    pub(crate) fn samples(&self) -> Vec<&Sample> {
        self.samples.iter().collect()
    }

    /// `[rows][S]` their targets.
    pub(crate) fn targets(&self) -> &[Vec<u32>] {
        &self.targets
    }

    /// Positions that are scored, of all rows.
    pub(crate) fn tokens(&self) -> usize {
        self.targets.iter().map(Vec::len).sum()
    }

    /// What a forward pass with the `predictions [rows][S]` says.
    pub(crate) fn reported(&self, predictions: &[Vec<Prediction>]) -> PassReport {
        let mut report = PassReport::default();
        for (index, predictions) in predictions.iter().enumerate() {
            self.row(index, predictions, &mut report);
        }
        report
    }

    /// `[data][N]` log-probabilities of the targets, nats; 0 where none was computed.
    pub(crate) fn outputs(&self, report: &PassReport) -> Vec<BTreeMap<String, Vec<f32>>> {
        let mut outputs: Vec<Vec<f32>> = self.lengths.iter().map(|length| vec![0.0; *length]).collect();
        for (row, logprobs) in &report.logprobs {
            let (datum, places) = &self.places[*row];
            places.iter().zip(logprobs).for_each(|(place, logprob)| outputs[*datum][*place] = *logprob);
        }
        outputs.into_iter().map(|logprobs| BTreeMap::from([("logprobs".to_owned(), logprobs)])).collect()
    }

    /// The ratio that all tokens of the row have in common; `None` if each has its own.
    fn sequence_ratio(&self, row: &TokenInputs, predictions: &[Prediction]) -> Option<f64> {
        let ServedLoss::Gspo { .. } = self.loss else { return None };
        let (mut sum, mut count) = (0.0, 0);
        for ((prediction, behavior), _) in
            predictions.iter().zip(&row.behavior).zip(&row.in_ratio).filter(|(_, counts)| **counts)
        {
            sum += f64::from(prediction.logprob) - f64::from(*behavior);
            count += 1;
        }
        // The mean of no token is 0.
        Some((sum / f64::from(count.max(1))).exp())
    }

    fn term(&self, row: &TokenInputs, token: usize, logprob: f32, sequence_ratio: Option<f64>) -> TokenTerm {
        let (factor, logprob) = (f64::from(row.factors[token]), f64::from(logprob));
        let behavior = row.behavior.get(token).map_or(logprob, |behavior| f64::from(*behavior));
        let ratio = sequence_ratio.unwrap_or_else(|| (logprob - behavior).exp());
        let within = |low: f64, high: f64| {
            let [low, high] = [(0, low), (1, high)].map(|(side, setting)| {
                row.bounds[side].get(token).map_or(setting, |own: &f32| f64::from(*own))
            });
            // Bounds of a token that exclude each other leave the upper one.
            ratio.max(low).min(high)
        };
        let term = |loss, slope, clipped| TokenTerm { loss, slope, ratio, clipped };
        match self.loss {
            ServedLoss::CrossEntropy => term(-factor * logprob, -factor, false),
            ServedLoss::ImportanceSampling => term(-ratio * factor, -ratio * factor, false),
            ServedLoss::Ppo { low, high } | ServedLoss::Gspo { low, high } => {
                let (plain, clipped) = (ratio * factor, within(low, high) * factor);
                if plain <= clipped { term(-plain, -plain, false) } else { term(-clipped, 0.0, true) }
            }
            ServedLoss::Cispo { low, high } => {
                let weight = within(low, high);
                term(-weight * factor * logprob, -weight * factor, weight.to_bits() != ratio.to_bits())
            }
            ServedLoss::Dro { beta } => {
                let distance = logprob - behavior;
                let objective = factor * logprob - 0.5 * beta * distance * distance;
                term(-objective, beta * distance - factor, false)
            }
        }
    }
}

impl RowLoss for PreparedPass {
    type Report = PassReport;

    fn row(
        &self,
        index: usize,
        predictions: &[Prediction],
        report: &mut PassReport,
    ) -> Vec<PredictionGradient> {
        let row = &self.rows[index];
        let sequence_ratio = self.sequence_ratio(row, predictions);
        let slope = |(token, prediction): (usize, &Prediction)| {
            let term = self.term(row, token, prediction.logprob, sequence_ratio);
            report.loss += term.loss;
            report.tokens += 1;
            report.ratios += term.ratio;
            report.largest_ratio = report.largest_ratio.max(term.ratio);
            report.clipped += u64::from(term.clipped);
            PredictionGradient { logprob: term.slope as f32, ..PredictionGradient::default() }
        };
        let slopes = predictions.iter().enumerate().map(slope).collect();
        report.logprobs.push((index, predictions.iter().map(|prediction| prediction.logprob).collect()));
        slopes
    }
}

impl PassReport {
    /// Adds that of another leaf.
    pub(crate) fn merge(&mut self, other: Self) {
        self.logprobs.extend(other.logprobs);
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.ratios += other.ratios;
        self.largest_ratio = self.largest_ratio.max(other.largest_ratio);
        self.clipped += other.clipped;
    }

    /// The sum over all tokens.
    pub(crate) fn loss(&self) -> f64 {
        self.loss
    }

    /// Metrics by `name:reduction`.
    pub(crate) fn metrics(&self, prepared: &PreparedPass) -> BTreeMap<String, f64> {
        let mut metrics = BTreeMap::from([
            ("loss:sum".to_owned(), self.loss),
            ("tokens:sum".to_owned(), self.tokens as f64),
        ]);
        if self.tokens > 0 && prepared.loss != ServedLoss::CrossEntropy {
            metrics.insert("ratio:mean".to_owned(), self.ratios / self.tokens as f64);
            metrics.insert("ratio:max".to_owned(), self.largest_ratio);
            metrics.insert("clipped:mean".to_owned(), self.clipped as f64 / self.tokens as f64);
        }
        metrics
    }
}

impl ServedLoss {
    /// Names of its inputs.
    fn inputs(self) -> &'static [&'static str] {
        match self {
            Self::CrossEntropy => &["target_tokens", "weights"],
            Self::ImportanceSampling | Self::Dro { .. } => &["target_tokens", "logprobs", "advantages"],
            Self::Ppo { .. } | Self::Cispo { .. } => {
                &["target_tokens", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold"]
            }
            Self::Gspo { .. } => &[
                "target_tokens",
                "logprobs",
                "advantages",
                "clip_low_threshold",
                "clip_high_threshold",
                "sequence_ratio_mask",
            ],
        }
    }

    fn of(name: &str, settings: &BTreeMap<String, LossSetting>) -> Result<Self, FailedRequest> {
        let known: &[&str] = match name {
            "ppo" | "cispo" | "gspo" => &["clip_low_threshold", "clip_high_threshold"],
            "dro" => &["beta"],
            _ => &[],
        };
        let number = |name: &str| match settings.get(name) {
            None => Ok(None),
            Some(LossSetting::Number(number)) if number.is_finite() => Ok(Some(*number)),
            Some(other) => {
                Err(FailedRequest::user(format!("`{name}` is {other:?}, and must be a finite number")))
            }
        };
        let clip = |low, high| -> Result<(f64, f64), FailedRequest> {
            let low = number("clip_low_threshold")?.unwrap_or(low);
            let high = number("clip_high_threshold")?.unwrap_or(high);
            match low <= high {
                true => Ok((low, high)),
                false => Err(FailedRequest::user(format!(
                    "`clip_low_threshold` is {low} and `clip_high_threshold` is {high}: they bound the ratio itself, such as 0.8 and 1.2"
                ))),
            }
        };
        let loss = match name {
            "cross_entropy" => Self::CrossEntropy,
            "importance_sampling" => Self::ImportanceSampling,
            "ppo" => clip(0.8, 1.2).map(|(low, high)| Self::Ppo { low, high })?,
            "cispo" => clip(0.0, 4.0).map(|(low, high)| Self::Cispo { low, high })?,
            "dro" => match number("beta")? {
                Some(beta) => Self::Dro { beta },
                None => {
                    return Err(FailedRequest::user(
                        "`dro` needs `beta` in loss_fn_config, such as 0.05".to_owned(),
                    ));
                }
            },
            // No default: the bounds of the paper are for its lengths of answers.
            "gspo" if !known.iter().all(|name| settings.contains_key(*name)) => {
                return Err(FailedRequest::user(
                    "`gspo` needs `clip_low_threshold` and `clip_high_threshold` in loss_fn_config: bounds of the ratio of a \
                     sequence, such as 0.9997 and 1.0004"
                        .to_owned(),
                ));
            }
            "gspo" => clip(1.0, 1.0).map(|(low, high)| Self::Gspo { low, high })?,
            "stable_reinforce" => {
                return Err(FailedRequest::user(
                    "the loss `stable_reinforce` has no public definition that this service could follow; use \
                     importance_sampling, ppo, cispo, gspo or dro, or forward_backward_custom"
                        .to_owned(),
                ));
            }
            other => {
                return Err(FailedRequest::user(format!(
                    "the loss `{}` is unknown; it is cross_entropy, importance_sampling, ppo, cispo, gspo or dro",
                    shown(other)
                )));
            }
        };
        match settings.keys().find(|name| !known.contains(&&name[..])) {
            Some(name) => {
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Err(FailedRequest::user(format!("the loss has no setting `{}`; it has {known}", shown(name))))
            }
            None => Ok(loss),
        }
    }
}

/// Inputs of the loss of a datum.
#[derive(Clone, Copy, Debug)]
struct LossInputsOf<'a> {
    datum: &'a Datum,
    length: usize,
}

impl LossInputsOf<'_> {
    /// `[N]` finite numbers.
    fn floats(self, name: &str) -> Result<Vec<f32>, String> {
        match self.datum.inputs.get(name) {
            None => Err(format!("it lacks `{name}`, one for each of its {} tokens", self.length)),
            Some(tensor) => self.read(name, tensor),
        }
    }

    /// The same, or nothing.
    fn optional(self, name: &str) -> Result<Vec<f32>, String> {
        self.datum.inputs.get(name).map_or(Ok(Vec::new()), |tensor| self.read(name, tensor))
    }

    /// `[N]` which tokens the ratio of the sequence is of: those of `sequence_ratio_mask`, or without it those that have an advantage in
    /// `factors [N]` or a log-probability in `behavior [N]`, as a prompt has neither.
    fn in_ratio(self, factors: &[f32], behavior: &[f32]) -> Result<Vec<bool>, String> {
        let mask = self.optional("sequence_ratio_mask")?;
        Ok(match mask.is_empty() {
            false => mask.iter().map(|counts| *counts != 0.0).collect(),
            true => factors.iter().zip(behavior).map(|(factor, own)| *factor != 0.0 || *own != 0.0).collect(),
        })
    }

    fn read(self, name: &str, tensor: &LossTensor) -> Result<Vec<f32>, String> {
        one_each(name, tensor, self.length)?;
        let values: Vec<f32> = match &tensor.values {
            LossValues::Float(values) => values.clone(),
            LossValues::Int(values) => values.iter().map(|value| *value as f32).collect(),
        };
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(format!("`{name}` is {} at position {at}, and must be finite", values[at])),
            None => Ok(values),
        }
    }
}

/// `[N]` the targets of a datum.
fn targets(datum: &Datum, vocabulary: usize) -> Result<Vec<u32>, String> {
    const NAME: &str = "target_tokens";
    let tensor = datum.inputs.get(NAME).ok_or_else(|| format!("it lacks `{NAME}`"))?;
    one_each(NAME, tensor, datum.tokens.len())?;
    let LossValues::Int(values) = &tensor.values else {
        return Err(format!("`{NAME}` must be whole numbers"));
    };
    let target = |(at, value): (usize, &i64)| match u32::try_from(*value) {
        Ok(token) if (token as usize) < vocabulary => Ok(token),
        _ => Err(format!("`{NAME}` is {value} at position {at}, and the vocabulary has {vocabulary} tokens")),
    };
    values.iter().enumerate().map(target).collect()
}

/// Checks that a tensor has one number for each of `length` tokens.
fn one_each(name: &str, tensor: &LossTensor, length: usize) -> Result<(), String> {
    let numbers = match &tensor.values {
        LossValues::Float(values) => values.len(),
        LossValues::Int(values) => values.len(),
    };
    match (tensor.shape.len(), numbers == length) {
        (..=1, true) => Ok(()),
        (2.., _) => Err(format!(
            "`{name}` has the shape {:?}; this service takes one number for each token, of shape [{length}]",
            tensor.shape
        )),
        (_, false) => Err(format!("`{name}` has {numbers} numbers, and the datum has {length} tokens")),
    }
}

/// The beginning of a name from outside.
fn shown(name: &str) -> &str {
    let mut end = name.len().min(SHOWN);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

#[cfg(test)]
mod tests;
