//! Whole sequences: packs, the forward that remembers and the backward that adds up gradients.
//!
//! Invariant: no padding. A pack is one stream of tokens; a sequence sees only itself and the prefix that it continues.
//! How tokens are shared among threads, and what is computed again instead of kept, changes no bit of any result.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::block::{AttentionTrace, Block, FeedForwardReverse};
use super::{Decoder, gather};
use crate::ops::attention::{self, Segment};
use crate::ops::head::{self, Prediction, PredictionGradient, Target};
use crate::ops::heads::Angles;
use crate::ops::norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
use crate::ops::{embedding, matrix, value, values};
use crate::{Head, Layout, Team};

/// Tokens of a feed-forward block that are in memory at a time with [`Recompute::Sequence`].
const CHUNK: usize = 256;
/// Gradients that one thread sets to zero, or adds, at a time.
const BLOCK: usize = 1 << 18;

/// What the backward computes again instead of keeping it from the forward. Results are the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing but norms and activations: all products are kept.
    #[default]
    None,
    /// Each layer: only its input is kept. A third more compute.
    Block,
    /// Each layer, its feed-forward block 256 tokens at a time, as StreamBP does (arXiv 2506.03077).
    Sequence,
}

/// Sequences one after the other, without padding. Some may continue others: completions of a common prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pack {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    segments: Vec<Segment>,
}

/// Why a sequence cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// There is nothing in it.
    #[error("a sequence of a pack needs at least one token")]
    Empty,
    /// No sequence that stands alone begins there.
    #[error("row {row} of the pack does not begin a sequence that can be continued")]
    NoPrefix {
        /// The row that was named.
        row: usize,
    },
}

impl Pack {
    /// A pack without sequences.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a sequence and returns the row of its first token.
    ///
    /// # Errors
    /// If the sequence is empty.
    pub fn push(&mut self, sequence: &[u32]) -> std::result::Result<usize, PackError> {
        self.append(sequence, 0..0)
    }

    /// Appends a continuation of the sequence that begins at row `prefix`, which is computed once for all of its
    /// continuations, and returns the row of its first token. Continuations follow their prefix, before the next
    /// [`Pack::push`].
    ///
    /// # Errors
    /// If the continuation is empty, or `prefix` is not the first row of the last sequence that was pushed.
    pub fn push_continuation(
        &mut self,
        prefix: usize,
        sequence: &[u32],
    ) -> std::result::Result<usize, PackError> {
        let whole = self.segments.iter().rfind(|segment| segment.prefix.is_empty());
        let Some(found) = whole.filter(|segment| segment.rows.start == prefix) else {
            return Err(PackError::NoPrefix { row: prefix });
        };
        let prefix = found.rows.clone();
        self.append(sequence, prefix)
    }

    fn append(&mut self, sequence: &[u32], prefix: Range<usize>) -> std::result::Result<usize, PackError> {
        if sequence.is_empty() {
            return Err(PackError::Empty);
        }
        let start = self.token_ids.len();
        self.token_ids.extend_from_slice(sequence);
        self.positions.extend((prefix.len()..prefix.len() + sequence.len()).map(|p| p as u32));
        self.segments.push(Segment { rows: start..self.token_ids.len(), prefix });
        Ok(start)
    }

    /// `[T]` tokens of all sequences.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// `[T]` position of each token in its sequence.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Cuts the pack into at most `count` parts of about equal length, between sequences that do not see each other.
    fn parts(&self, count: usize) -> Vec<Part<'_>> {
        let total = self.token_ids.len();
        let mut parts: Vec<Part<'_>> = Vec::new();
        let mut start = 0;
        for (i, segment) in self.segments.iter().enumerate() {
            let last = i + 1 == self.segments.len();
            let cut = last || self.segments[i + 1].prefix.is_empty();
            let due = segment.rows.end * count >= total * (parts.len() + 1);
            if cut && (last || due) {
                let rows = parts.last().map_or(0, |part| part.rows.end)..segment.rows.end;
                parts.push(Part { pack: self, rows, segments: &self.segments[start..=i] });
                start = i + 1;
            }
        }
        parts
    }

    /// The parts of the given lengths.
    fn parts_of(&self, lengths: &[usize]) -> Vec<Part<'_>> {
        let (mut row, mut segment) = (0, 0);
        lengths
            .iter()
            .map(|length| {
                let rows = row..row + length;
                let count = self.segments[segment..].partition_point(|s| s.rows.start < rows.end);
                let segments = &self.segments[segment..segment + count];
                (row, segment) = (rows.end, segment + count);
                Part { pack: self, rows, segments }
            })
            .collect()
    }
}

/// Rows of a pack that one thread computes.
#[derive(Clone, Debug)]
struct Part<'a> {
    pack: &'a Pack,
    rows: Range<usize>,
    segments: &'a [Segment],
}

impl Part<'_> {
    fn token_ids(&self) -> &[u32] {
        &self.pack.token_ids[self.rows.clone()]
    }

    fn angles(&self, decoder: &Decoder) -> Angles {
        Angles::new(&self.pack.positions[self.rows.clone()], &decoder.inv_freq)
    }

    fn attend(&self, decoder: &Decoder, qkv: &Tensor) -> Result<Tensor> {
        attention::packed(qkv, self.segments, self.rows.start, decoder.shape)
    }
}

/// What a forward computed on the way, for its backward.
#[derive(Debug)]
pub struct Trace {
    parts: Vec<PartTrace>,
    /// Rows of the pack that predict something.
    rows: Vec<usize>,
    /// `[rows, d]` before and after the final norm.
    picked: Tensor,
    normed: Tensor,
}

/// What one thread kept of its rows.
#[derive(Debug)]
struct PartTrace {
    angles: Angles,
    layers: Vec<LayerTrace>,
    /// `[T, d]` the residual stream after the last layer.
    output: Tensor,
}

#[derive(Debug)]
struct LayerTrace {
    input: Tensor,
    /// Empty if it is computed again.
    kept: Option<(AttentionTrace, Tensor)>,
}

/// Gradients of all weights as one flat buffer, laid out as the parameters are.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    layout: Arc<Layout>,
    values: Vec<f32>,
}

impl Gradients {
    /// No gradient yet.
    #[must_use]
    pub fn zeros(layout: &Arc<Layout>) -> Self {
        Self { layout: Arc::clone(layout), values: vec![0.0; layout.len()] }
    }

    /// All values in canonical order.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The same, to scale or clip.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Gradient of the tensor of this Hugging Face name, if the model has it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        self.layout.spec(name).map(|spec| &self.values[spec.range()])
    }

    /// Adds another rank's gradients.
    ///
    /// # Panics
    /// If they are of another model.
    pub fn add(&mut self, other: &Self, team: &Team) {
        assert_eq!(self.values.len(), other.values.len(), "gradients of one model are added");
        let blocks = self.values.chunks_mut(BLOCK).zip(other.values.chunks(BLOCK));
        team.map(blocks.collect(), |(own, other): (&mut [f32], &[f32])| {
            own.iter_mut().zip(other).for_each(|(a, b)| *a += b);
        });
    }

    /// Sets all to zero.
    pub fn clear(&mut self, team: &Team) {
        team.map(self.values.chunks_mut(BLOCK).collect(), |block| block.fill(0.0));
    }
}

impl Decoder {
    /// Predictions of `targets`, each from the hidden state at its row of the pack.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    ///
    /// # Panics
    /// If there are not as many rows as targets.
    pub fn score(
        &self,
        pack: &Pack,
        rows: &[usize],
        targets: &[Target<'_>],
        team: &Team,
    ) -> Result<Vec<Prediction>> {
        assert_eq!(rows.len(), targets.len(), "every target is predicted from a row");
        let outputs = self.outputs(pack, team)?;
        let picked = gather(&outputs.iter().collect::<Vec<_>>(), rows)?;
        let normed = rms_norm(&picked, &self.final_norm, self.config.rms_norm_eps)?;
        self.predict(&normed, targets, team)
    }

    /// Predictions from the hidden states `[targets, d]` after the final norm.
    fn predict(&self, normed: &Tensor, targets: &[Target<'_>], team: &Team) -> Result<Vec<Prediction>> {
        let mut predictions = match self.config.head {
            Head::Value => vec![Prediction::default(); targets.len()],
            Head::Language | Head::LanguageAndValue => head::predict(normed, &self.head, targets, team)?,
        };
        value::predict(normed, &self.value_head, &mut predictions)?;
        Ok(predictions)
    }

    /// Logits `[T, V]` of every token of the pack: for tests and small inputs, they are all in memory.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    pub fn logits(&self, pack: &Pack) -> Result<Tensor> {
        let outputs = self.outputs(pack, &Team::alone())?;
        let rows: Vec<usize> = (0..pack.token_ids.len()).collect();
        let all = gather(&outputs.iter().collect::<Vec<_>>(), &rows)?;
        self.head.apply(&rms_norm(&all, &self.final_norm, self.config.rms_norm_eps)?, &Team::alone())
    }

    /// The residual stream after the last layer, part by part.
    fn outputs(&self, pack: &Pack, team: &Team) -> Result<Vec<Tensor>> {
        let run = |part: Part<'_>| {
            let angles = part.angles(self);
            let alone = Team::alone();
            let mut x = self.embed(part.token_ids(), part.rows.start)?;
            for block in &self.blocks {
                x = block.forward(&x, &angles, |qkv| part.attend(self, qkv), &alone)?;
            }
            Ok(x)
        };
        team.map(pack.parts(team.threads()), run).into_iter().collect()
    }

    /// Runs the pack and predicts `targets`, each from the hidden state at its row of the pack.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary.
    ///
    /// # Panics
    /// If there are not as many rows as targets.
    pub fn forward(
        &self,
        pack: &Pack,
        rows: &[usize],
        targets: &[Target<'_>],
        team: &Team,
    ) -> Result<(Vec<Prediction>, Trace)> {
        assert_eq!(rows.len(), targets.len(), "every target is predicted from a row");
        let run = |part: Part<'_>| self.forward_part(&part);
        let parts: Vec<PartTrace> =
            team.map(pack.parts(team.threads()), run).into_iter().collect::<Result<_>>()?;
        let picked = gather(&parts.iter().map(|part| &part.output).collect::<Vec<_>>(), rows)?;
        let normed = rms_norm(&picked, &self.final_norm, self.config.rms_norm_eps)?;
        let predictions = self.predict(&normed, targets, team)?;
        Ok((predictions, Trace { parts, rows: rows.to_vec(), picked, normed }))
    }

    fn forward_part(&self, part: &Part<'_>) -> Result<PartTrace> {
        let angles = part.angles(self);
        let mut x = self.embed(part.token_ids(), part.rows.start)?;
        let mut layers = Vec::with_capacity(self.blocks.len());
        let alone = Team::alone();
        for block in &self.blocks {
            let (kept, output) = if self.recompute == Recompute::None {
                let attention = block.attention(&x, &angles, |qkv| part.attend(self, qkv), &alone)?;
                let gate_up = block.gate_up(&attention.middle, &alone)?;
                let output = block.feed_forward(&attention.middle, &gate_up, &alone)?;
                (Some((attention, gate_up)), output)
            } else {
                (None, block.forward(&x, &angles, |qkv| part.attend(self, qkv), &alone)?)
            };
            layers.push(LayerTrace { input: std::mem::replace(&mut x, output), kept });
        }
        Ok(PartTrace { angles, layers, output: x })
    }

    /// Adds to `gradients` those of `sum(prediction_gradients * predictions)`, for the forward that left `trace`.
    ///
    /// # Errors
    /// If the trace is of another pack.
    ///
    /// # Panics
    /// If the decoder was packed to sample.
    pub fn backward(
        &self,
        pack: &Pack,
        trace: Trace,
        targets: &[Target<'_>],
        prediction_gradients: &[PredictionGradient],
        gradients: &mut Gradients,
        team: &Team,
    ) -> Result<()> {
        let Trace { mut parts, rows, picked, normed } = trace;
        let g = gradients.values_mut();
        let mut d_normed = match self.config.head {
            Head::Value => matrix(vec![0.0; values(&normed)?.len()], self.config.hidden_size)?,
            Head::Language | Head::LanguageAndValue => {
                let head_gradient = &mut g[self.layout.head()];
                head::predict_backward(
                    &normed,
                    &self.head,
                    targets,
                    prediction_gradients,
                    head_gradient,
                    team,
                )?
            }
        };
        if let Some(place) = self.layout.value_head() {
            let weight_gradient = &mut g[place];
            d_normed =
                value::backward(&normed, &self.value_head, prediction_gradients, weight_gradient, d_normed)?;
        }
        let norm_place =
            self.layout.spec("model.norm.weight").map(crate::ParameterSpec::range).unwrap_or_default();
        let eps = self.config.rms_norm_eps;
        rms_norm_weight_gradient(&picked, eps, &d_normed, &mut g[norm_place])?;
        let d_picked = rms_norm_backward(&picked, &self.final_norm, eps, &d_normed, None)?;

        // The parts of the forward are kept: they need not be as many as there are threads now.
        let cuts = pack.parts_of(&parts.iter().map(|part| part.output.dim(0)).collect::<Result<Vec<_>>>()?);
        let mut d: Vec<Tensor> =
            cuts.iter().map(|part| scatter(&d_picked, &rows, &part.rows)).collect::<Result<_>>()?;
        drop((picked, normed, d_picked));
        for block in self.blocks.iter().rev() {
            let layer: Vec<_> = cuts.iter().zip(&mut parts).zip(d).collect();
            d = self.reverse_layer(block, layer, g, team)?;
        }
        for (part, d) in cuts.iter().zip(&d) {
            embedding::embed_backward(part.token_ids(), d, &mut g[..self.embedding_len()])?;
        }
        Ok(())
    }

    /// Reverses one layer: of each part what the layer kept, which is freed, and the gradient of its output. Returns
    /// those of its input.
    fn reverse_layer(
        &self,
        block: &Block,
        layer: Vec<((&Part<'_>, &mut PartTrace), Tensor)>,
        gradients: &mut [f32],
        team: &Team,
    ) -> Result<Vec<Tensor>> {
        let begin = |((part, trace), g)| self.begin_reversing(block, part, trace, g);
        let mut parts: Vec<Reversing<'_>> = team.map(layer, begin).into_iter().collect::<Result<_>>()?;

        let d_middle = self.reverse_feed_forward(block, &parts, gradients, team)?;
        parts.iter_mut().for_each(|part| part.gate_up = None);

        let reverse = |(reversing, d_middle): (&Reversing<'_>, Tensor)| {
            let Reversing { part, angles, input, attention, .. } = reversing;
            let attend_backward = |qkv: &Tensor, g: &Tensor| {
                attention::packed_backward(qkv, part.segments, part.rows.start, self.shape, g)
            };
            block.attention_backward(input, attention, angles, &d_middle, attend_backward)
        };
        let reversed = team.map(parts.iter().zip(d_middle).collect(), reverse);
        let reversed: Vec<_> = reversed.into_iter().collect::<Result<_>>()?;
        let d = reversed.iter().map(|r| r.d_input.clone()).collect();
        let done: Vec<_> =
            parts.iter().zip(reversed).map(|(part, r)| (&part.attention, r, part.angles)).collect();
        block.attention_gradients(&done, gradients, team)?;
        Ok(d)
    }

    /// Takes what the layer kept of a part; what it did not keep is computed again, up to the middle of the layer.
    fn begin_reversing<'a>(
        &self,
        block: &Block,
        part: &'a Part<'a>,
        trace: &'a mut PartTrace,
        g: Tensor,
    ) -> Result<Reversing<'a>> {
        let Some(LayerTrace { input, kept }) = trace.layers.pop() else {
            unreachable!("a trace has as many layers as the decoder")
        };
        let (attention, gate_up) = match kept {
            Some((attention, gate_up)) => (attention, Some(gate_up)),
            None => {
                let attend = |qkv: &Tensor| part.attend(self, qkv);
                (block.attention(&input, &trace.angles, attend, &Team::alone())?, None)
            }
        };
        Ok(Reversing { part, angles: &trace.angles, input, attention, gate_up, g })
    }

    /// The feed-forward half, some tokens at a time. Returns the gradient of the middle of each part.
    fn reverse_feed_forward(
        &self,
        block: &Block,
        parts: &[Reversing<'_>],
        gradients: &mut [f32],
        team: &Team,
    ) -> Result<Vec<Tensor>> {
        let whole = |(p, part): (usize, &Reversing<'_>)| (p, 0..part.part.rows.len());
        let whole: Vec<(usize, Range<usize>)> = parts.iter().enumerate().map(whole).collect();
        let chunks = match self.recompute {
            Recompute::None | Recompute::Block => vec![whole],
            Recompute::Sequence => chunks(&whole, team.threads()),
        };
        let mut d_middle: Vec<Vec<Tensor>> = vec![Vec::new(); parts.len()];
        for pieces in chunks {
            let reverse = |(p, rows): &(usize, Range<usize>)| -> Result<FeedForwardReverse> {
                let cut = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len());
                let Reversing { attention, gate_up, g, .. } = &parts[*p];
                let gate_up = gate_up.as_ref().map(cut).transpose()?;
                block.feed_forward_backward(&cut(&attention.middle)?, gate_up.as_ref(), &cut(g)?)
            };
            let reversed: Vec<_> =
                team.map(pieces.iter().collect(), reverse).into_iter().collect::<Result<_>>()?;
            for ((p, _), piece) in pieces.iter().zip(&reversed) {
                d_middle[*p].push(piece.d_middle.clone());
            }
            block.feed_forward_gradients(&reversed, gradients, team)?;
        }
        let join = |pieces: Vec<Tensor>| match &pieces[..] {
            [only] => Ok(only.clone()),
            _ => Tensor::cat(&pieces, 0),
        };
        d_middle.into_iter().map(join).collect()
    }
}

/// One part of a layer that is being reversed.
struct Reversing<'a> {
    part: &'a Part<'a>,
    angles: &'a Angles,
    input: Tensor,
    attention: AttentionTrace,
    gate_up: Option<Tensor>,
    /// Gradient of the layer's output.
    g: Tensor,
}

/// Cuts rows of parts into chunks of [`CHUNK`] tokens in all, each into a piece for every thread, in the order of the
/// tokens.
fn chunks(parts: &[(usize, Range<usize>)], threads: usize) -> Vec<Vec<(usize, Range<usize>)>> {
    let each = CHUNK.div_ceil(threads);
    let mut pieces = Vec::new();
    for (p, rows) in parts {
        pieces.extend(rows.clone().step_by(each).map(|start| (*p, start..(start + each).min(rows.end))));
    }
    pieces.chunks(threads).map(<[_]>::to_vec).collect()
}

/// `[rows of the part, d]` with those rows of `g [rows, d]` added that lie in the part, zero elsewhere.
fn scatter(g: &Tensor, rows: &[usize], part: &Range<usize>) -> Result<Tensor> {
    let (_, width) = g.dims2()?;
    let mut out = vec![0.0; part.len() * width];
    for (row, g) in rows.iter().zip(values(g)?.chunks_exact(width)) {
        if part.contains(row) {
            let row = row - part.start;
            out[row * width..(row + 1) * width].iter_mut().zip(g).for_each(|(out, g)| *out += g);
        }
    }
    matrix(out, width)
}
