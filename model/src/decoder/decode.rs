//! Prefill and decode over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv 2309.06180).
//!
//! Invariant: prefill and decode are the same call: a sequence has one or more new tokens. A step that is given up gives all pages
//! back.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::cache::KvCache;
use super::mixer::MixingRule;
use super::states::StatePlace;
use super::{Decoder, gather};
use crate::ThreadPool;
use crate::ops::adapters::LinearPass;
use crate::ops::attention::{AttentionRule, PAGE};
use crate::ops::delta_net::{self, DeltaRule};
use crate::ops::experts::ExpertRoutes;
use crate::ops::norm::rms_norm;
use crate::ops::{matrix, unwritten, values};

/// Multiply-adds per thread below which waking another thread costs more than it saves.
const WORTH_A_THREAD: usize = 4_000_000;

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepSequence<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Position of the first; everything before it is in the cache.
    pub position: usize,
    /// Page table of the sequence, up to the page of its last token. The pages of the new tokens are not shared.
    pub pages: &'a [u32],
    /// Number of last tokens whose logits are returned.
    pub wanted: usize,
    /// Index of its adapter among those of the decoder ([`Decoder::set_adapters`]); `None` for the weights alone. Sequences with one
    /// adapter compute faster as neighbours.
    pub adapter: Option<usize>,
}

impl<'a> StepSequence<'a> {
    /// Index of the first page that is written.
    fn first_written(&self) -> usize {
        self.position / PAGE
    }

    /// Position behind the last token.
    pub(super) fn end(&self) -> usize {
        self.position + self.tokens.len()
    }

    pub(super) fn written(&self) -> &'a [u32] {
        &self.pages[self.first_written()..KvCache::pages_for(self.end())]
    }
}

/// What one thread computes of a step.
struct StepPart<'a> {
    sequences: &'a [StepSequence<'a>],
    /// The pages that each sequence writes.
    own: Vec<Vec<Vec<f32>>>,
    /// The recurrent state of each sequence; empty without one.
    states: Vec<Vec<f32>>,
}

/// What one thread computed of a step.
struct PartOutput {
    /// `[wanted, V]`
    logits: Vec<f32>,
    /// `[T, slots]` the experts of the tokens; empty if they are not kept.
    routes: Vec<u16>,
}

impl Decoder {
    /// One step of continuous batching: adds the tokens of `sequences` to the cache and returns the logits
    /// `[wanted, vocab_size]` of the tokens whose logits are wanted, in order; of one of several tensor ranks, those of its tokens.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, a sequence names an adapter that the decoder lacks, or one of a model with a recurrence
    /// begins where the cache has no state ([`KvCache::resumable`]). Then the sequences of the step may have lost their states, and
    /// begin again.
    ///
    /// # Panics
    /// If the pages of a sequence do not reach its last token, or two sequences write to the same page.
    pub fn step(
        &self,
        cache: &mut KvCache,
        sequences: &[StepSequence<'_>],
        pool: &ThreadPool,
    ) -> Result<Vec<f32>> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let worth = tokens * self.layout.len() / WORTH_A_THREAD + 1;
        let alone = ThreadPool::single();
        // Large weights are read from memory, so threads share their columns and synchronise at every layer. Small weights
        // fit a core's cache, so every thread reads all of them for some of the sequences.
        let (count, inside) = match worth {
            1 => (1, &alone),
            _ if self.columns_are_shared => (1, pool),
            // Calls of ranks are of the whole step.
            _ if self.ranks.calls_in_parts() => (1, &alone),
            _ => (pool.threads().min(worth), &alone),
        };
        let mut states = Vec::with_capacity(sequences.len());
        if let Some(adapter) = sequences.iter().filter_map(|sequence| sequence.adapter).max()
            && adapter >= self.adapters
        {
            candle_core::bail!("a sequence has adapter {adapter}, and the decoder has {}", self.adapters)
        }
        for sequence in sequences {
            let Some(StatePlace::Host(state)) = cache.check_out_state(sequence) else {
                candle_core::bail!("the cache has no recurrent state at position {}", sequence.position)
            };
            states.push(state);
        }
        let mut states = states.into_iter();
        let parts = split(sequences, tokens, count);
        let parts: Vec<StepPart<'_>> = parts
            .into_iter()
            .map(|sequences| StepPart {
                sequences,
                own: sequences.iter().map(|sequence| cache.check_out(sequence)).collect(),
                states: states.by_ref().take(sequences.len()).collect(),
            })
            .collect();
        let shared = &*cache;
        let done = pool.map(parts, |mut part| {
            let computed = self.step_part(shared, &mut part, inside);
            (part, computed)
        });
        let mut all = Vec::new();
        let mut failed = None;
        for (part, computed) in done {
            for (sequence, pages) in part.sequences.iter().zip(part.own) {
                cache.check_in(sequence, pages);
            }
            match computed {
                Ok(PartOutput { logits, routes }) => {
                    cache.keep_routes(part.sequences, &routes);
                    for (sequence, state) in part.sequences.iter().zip(part.states) {
                        cache.check_in_state(sequence, StatePlace::Host(state));
                    }
                    if all.is_empty() {
                        all = logits;
                    } else {
                        all.extend(logits);
                    }
                }
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(all), Err)
    }

    fn step_part(&self, cache: &KvCache, part: &mut StepPart<'_>, pool: &ThreadPool) -> Result<PartOutput> {
        let StepPart { sequences, own, states } = part;
        let (mut token_ids, mut positions, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let (mut adapters, mut adapters_wanted) = (Vec::new(), Vec::new());
        for sequence in *sequences {
            token_ids.extend_from_slice(sequence.tokens);
            positions.extend((sequence.position..).take(sequence.tokens.len()).map(|p| p as u32));
            wanted.extend(token_ids.len() - sequence.wanted..token_ids.len());
            adapters.extend(std::iter::repeat_n(sequence.adapter, sequence.tokens.len()));
            adapters_wanted.extend(std::iter::repeat_n(sequence.adapter, sequence.wanted));
        }
        let angles = self.angles(&positions);
        let mut x = self.embed(&token_ids, 0, &adapters)?;
        let slots = cache.routes.as_ref().map_or(0, |routes| routes.slots);
        let (mut routes, mut first) = (vec![0; token_ids.len() * slots], 0);
        // Of the layers with attention.
        let mut attending = 0;
        for (layer, block) in self.blocks.iter().enumerate() {
            let mix = |prepared: &Tensor| match block.rule() {
                MixingRule::Attention(rule) => {
                    attending += 1;
                    self.attend(cache, sequences, own, (attending - 1, rule), prepared, pool)
                }
                MixingRule::DeltaNet(rule) => {
                    let of_layer = cache.states.as_ref().map_or(0..0, |states| states.layer(layer));
                    recur(sequences, states, &of_layer, rule, prepared, pool)
                }
            };
            let (output, trace) =
                block.forward_routed(&x, &angles, None, mix, LinearPass { pool, adapters: &adapters })?;
            x = output;
            if let Some(chosen) = trace.routes().map(ExpertRoutes::experts).filter(|_| slots > 0) {
                let per_token = chosen.len() / token_ids.len();
                for (row, chosen) in routes.chunks_exact_mut(slots).zip(chosen.chunks_exact(per_token)) {
                    row[first..][..per_token]
                        .iter_mut()
                        .zip(chosen)
                        .for_each(|(kept, expert)| *kept = *expert as u16);
                }
                first += per_token;
            }
        }
        let picked = gather(&[&x], &wanted)?;
        let normed = rms_norm(&picked, &self.final_norm, self.config.rms_norm_eps, pool)?;
        let mut logits = unwritten(wanted.len() * self.head.output());
        let on = LinearPass { pool, adapters: &adapters_wanted };
        self.head.apply_slice(&values(&normed)?, &mut logits, on);
        Ok(PartOutput { logits, routes })
    }

    /// Writes keys and values of the new tokens of `qkv [T, width]`, and attends to all positions up to each of them.
    /// Returns `[T, heads * head_dim]`.
    fn attend(
        &self,
        cache: &KvCache,
        sequences: &[StepSequence<'_>],
        mut own: &mut [Vec<Vec<f32>>],
        (layer, rule): (usize, AttentionRule<'_>),
        qkv: &Tensor,
        pool: &ThreadPool,
    ) -> Result<Tensor> {
        let (rows, width, query_width) = (qkv.dim(0)?, self.shape.width(), self.shape.query_width());
        let mut out = unwritten(rows * query_width);
        let qkv = values(qkv)?;
        let (mut qkv, mut rest) = (&qkv[..], &mut out[..]);
        let mut parts = Vec::new();
        for sequences in split(sequences, rows, pool.threads()) {
            let rows: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
            let (own_part, own_rest) = own.split_at_mut(sequences.len());
            let (qkv_part, qkv_rest) = qkv.split_at(rows * width);
            let (out_part, out_rest) = rest.split_at_mut(rows * query_width);
            (own, qkv, rest) = (own_rest, qkv_rest, out_rest);
            parts.push((sequences, own_part, qkv_part, out_part));
        }
        pool.map(parts, |(sequences, own, qkv, out)| {
            self.attend_part(cache, sequences, own, (layer, rule), qkv, out);
        });
        matrix(out, query_width)
    }

    fn attend_part(
        &self,
        cache: &KvCache,
        sequences: &[StepSequence<'_>],
        own: &mut [Vec<Vec<f32>>],
        (layer, rule): (usize, AttentionRule<'_>),
        qkv: &[f32],
        out: &mut [f32],
    ) {
        let (shape, layout) = (self.shape, cache.layout);
        let of_layer = layer * layout.len()..(layer + 1) * layout.len();
        let mut rows = qkv.chunks_exact(shape.width()).zip(out.chunks_exact_mut(shape.query_width()));
        let (mut weights, mut of_sequence) = (Vec::new(), Vec::new());
        for (sequence, own) in sequences.iter().zip(own) {
            let first = sequence.first_written();
            of_sequence.clear();
            of_sequence.extend(rows.by_ref().take(sequence.tokens.len()));
            for (position, (row, _)) in (sequence.position..).zip(&of_sequence) {
                let (key, value) = row[shape.query_width()..].split_at(shape.kv_width());
                let page = &mut own[position / PAGE - first][of_layer.clone()];
                layout.write(page, position % PAGE, key, value);
            }
            let before = sequence.pages[..first].iter().map(|page| &cache.pages[*page as usize]);
            let pages: Vec<&[f32]> = before.chain(&*own).map(|page| &page[of_layer.clone()]).collect();
            for (position, (row, out)) in (sequence.position..).zip(&mut of_sequence) {
                let queries = &row[..shape.query_width()];
                layout.attend(rule, queries, &pages[..=position / PAGE], position + 1, &mut weights, out);
            }
        }
    }
}

/// Advances the part `of_layer` of the states of all sequences by their new tokens of `inputs [T, width]`. Returns `[T, values]`.
fn recur(
    sequences: &[StepSequence<'_>],
    states: &mut [Vec<f32>],
    of_layer: &Range<usize>,
    rule: DeltaRule<'_>,
    inputs: &Tensor,
    pool: &ThreadPool,
) -> Result<Tensor> {
    let (width, result) = (rule.spec.input_width(), rule.spec.value_width());
    let mut out = unwritten(inputs.dim(0)? * result);
    let inputs = values(inputs)?;
    let (mut inputs, mut rest) = (&inputs[..], &mut out[..]);
    let mut parts = Vec::new();
    for (sequence, state) in sequences.iter().zip(states) {
        let (own, inputs_rest) = inputs.split_at(sequence.tokens.len() * width);
        let (out, out_rest) = rest.split_at_mut(sequence.tokens.len() * result);
        (inputs, rest) = (inputs_rest, out_rest);
        parts.push((own, &mut state[of_layer.clone()], out));
    }
    pool.map(parts, |(inputs, state, out)| delta_net::resume(rule, inputs, state, out));
    matrix(out, result)
}

/// Cuts `sequences` with `tokens` tokens into at most `count` runs of about equal length.
fn split<'a>(sequences: &'a [StepSequence<'a>], tokens: usize, count: usize) -> Vec<&'a [StepSequence<'a>]> {
    let mut parts = Vec::new();
    let (mut start, mut passed) = (0, 0);
    for (i, sequence) in sequences.iter().enumerate() {
        passed += sequence.tokens.len();
        if i + 1 == sequences.len() || passed * count >= tokens * (parts.len() + 1) {
            parts.push(&sequences[start..=i]);
            start = i + 1;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Parameters, SharedCores, Sizes};

    /// Both ways of sharing a step among threads give the bits of one thread.
    #[test]
    fn threads_that_share_columns_or_sequences_change_nothing() {
        let sizes = Sizes {
            vocab_size: 100,
            hidden_size: 64,
            intermediate_size: 256,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        };
        let config = Config::fresh(&sizes);
        let small = Decoder::new(&config, &Parameters::random(&config, 5));
        let large = Decoder { columns_are_shared: true, ..small.clone() };
        let tokens: Vec<Vec<u32>> =
            (0..40).map(|s| (0..1 + s % 9).map(|t| 4 + (s * 7 + t * 13) % 90).collect()).collect();
        let logits = |decoder: &Decoder, pool: &ThreadPool| {
            let mut cache = KvCache::new(&config, 2 * PAGE * tokens.len());
            let pages: Vec<[u32; 2]> =
                tokens.iter().map(|_| [(); 2].map(|()| cache.take().unwrap())).collect();
            let mut all = Vec::new();
            for step in 0..3 {
                let sequences: Vec<_> = tokens
                    .iter()
                    .zip(&pages)
                    .map(|(tokens, pages)| {
                        let position = step * tokens.len();
                        let pages = &pages[..KvCache::pages_for(position + tokens.len())];
                        StepSequence { tokens, position, pages, wanted: 1, adapter: None }
                    })
                    .collect();
                all.extend(decoder.step(&mut cache, &sequences, pool).unwrap());
            }
            all.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let expected = logits(&small, &ThreadPool::single());
        let cores = SharedCores::new(3);
        for decoder in [&small, &large] {
            for threads in [1, 2, 3] {
                assert!(logits(decoder, &ThreadPool::new(&cores, threads)) == expected, "{threads} threads");
            }
        }
    }
}
