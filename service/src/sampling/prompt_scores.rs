//! Log-probabilities of prompts at temperature 1, by a thread of its own beside the engine.
//!
//! Invariant: a token has the log-probability that the engine samples it with and that a training pass over the same weights
//! computes, bit for bit. Memory is that of the keys and values of one prompt and of the logits of [`ROWS`] positions.

use std::sync::Arc;
use std::time::Duration;

use model::{
    Config, Decoder, FrozenParameters, KvCache, LowRank, Parameters, Recompute, Sampling, StepSequence,
    ThreadPool, logprobs_of, most_likely,
};
use rollout::RolloutError;
use tokio::sync::oneshot;

use super::checked::{PromptQuery, server_failure};
use super::waiting::{Abandonable, WaitingRequests};
use crate::data::ScoredToken;
use crate::outcome::FailedRequest;

/// Positions whose logits are computed together.
const ROWS: usize = 32;
/// Tokens that are computed together where no logits are wanted.
const CHUNK: usize = 256;
/// Longest wait for a request before the thread looks for a stop.
const LOOK_UP: Duration = Duration::from_millis(500);

/// The weights that a prompt is scored under.
#[derive(Clone, Debug)]
pub(super) enum ScoredWeights {
    /// Factors over a base.
    Adapted(Arc<FrozenParameters>, Arc<LowRank>),
    /// All of them.
    Whole(Arc<Config>, Arc<Parameters>),
}

impl ScoredWeights {
    /// The decoder of a training pass, which shares the weights.
    fn decoder(&self) -> Decoder {
        match self {
            Self::Adapted(base, factors) => Decoder::frozen(base, factors, Recompute::None),
            Self::Whole(config, parameters) => Decoder::trainable(config, parameters, Recompute::None),
        }
    }
}

/// A prompt that waits to be scored.
#[derive(Debug)]
pub(super) struct ScoreJob {
    pub(super) weights: ScoredWeights,
    /// `[P]`
    pub(super) prompt: Arc<[u32]>,
    pub(super) query: Arc<PromptQuery>,
    pub(super) reply: oneshot::Sender<Result<ScoredPrompt, FailedRequest>>,
}

impl Abandonable for ScoreJob {
    fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }
}

/// What was wanted of a prompt of `P` tokens; see [`SamplingOutput`](crate::data::SamplingOutput).
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ScoredPrompt {
    /// `[P]`
    pub(super) logprobs: Option<Vec<f32>>,
    /// `[P]`
    pub(super) alternatives: Option<Vec<Vec<ScoredToken>>>,
    /// `[P - 1][K]` and `K`.
    pub(super) targets: Option<(Vec<f32>, usize)>,
}

/// Scores what waits until the queue is closed.
pub(super) fn serve(jobs: &WaitingRequests<ScoreJob>, pool: &ThreadPool) {
    while jobs.closed().is_none() {
        let Some(ScoreJob { weights, prompt, query, reply }) = jobs.pop() else {
            jobs.wait(LOOK_UP);
            continue;
        };
        let over = || reply.is_closed() || jobs.closed().is_some();
        match score(&weights.decoder(), &prompt, &query, pool, over) {
            Ok(Some(scored)) => {
                // The client may be gone.
                let _ = reply.send(Ok(scored));
            }
            Ok(None) => {}
            Err(error) => {
                let _ = reply.send(Err(server_failure(format!("the prompt could not be scored: {error}"))));
            }
        }
    }
}

/// What `query` wants of `prompt [P]`, at least one token. `None` if it is `over` before all is computed.
fn score(
    decoder: &Decoder,
    prompt: &[u32],
    query: &PromptQuery,
    pool: &ThreadPool,
    over: impl Fn() -> bool,
) -> Result<Option<ScoredPrompt>, RolloutError> {
    let length = prompt.len();
    let mut scored = ScoredPrompt {
        logprobs: query.logprobs.then(|| vec![f32::NAN; length]),
        alternatives: (query.alternatives > 0).then(|| vec![Vec::new(); length]),
        targets: query.targets.as_ref().map(|(targets, width)| (unscored(targets), *width)),
    };
    // Position `i` is predicted by the token before it; the last token predicts none of the prompt.
    let known = length - 1;
    let first = query.last.map_or(1, |last| length.saturating_sub(last).max(1));
    let mut cache = KvCache::new(decoder.config(), known);
    let (mut pages, mut position) = (Vec::new(), 0);
    while position < known && first < length {
        if over() {
            return Ok(None);
        }
        let wants = position + 1 >= first;
        let end = if wants { known.min(position + ROWS) } else { (first - 1).min(position + CHUNK) };
        cache.make_writable(&mut pages, position, end);
        let tokens = &prompt[position..end];
        let wanted = if wants { tokens.len() } else { 0 };
        let step = StepSequence { tokens, position, pages: &pages, wanted, adapter: None };
        let mut logits = decoder.step(&mut cache, &[step], pool)?;
        let rows = logits.chunks_exact_mut(decoder.config().vocab_size);
        for (place, logits) in (position + 1..).zip(rows) {
            scored.take(place, prompt[place], query, logits);
        }
        position = end;
    }
    Ok(Some(scored))
}

/// `[n]` the log-probabilities of `targets [n]` before any is computed: 0 where no target is.
fn unscored(targets: &[i64]) -> Vec<f32> {
    targets.iter().map(|target| if *target < 0 { 0.0 } else { f32::NAN }).collect()
}

impl ScoredPrompt {
    /// Takes what is wanted of position `place`, which has `token`, from `logits [V]`.
    fn take(&mut self, place: usize, token: u32, query: &PromptQuery, logits: &mut [f32]) {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs[place] = logprobs_of(logits, &[token])[0];
        }
        if let (Some((found, width)), Some((targets, _))) = (&mut self.targets, &query.targets) {
            let row = (place - 1) * *width..place * *width;
            let ids: Vec<u32> =
                targets[row.clone()].iter().filter_map(|id| u32::try_from(*id).ok()).collect();
            let mut own = logprobs_of(logits, &ids).into_iter();
            let asked = found[row.clone()].iter_mut().zip(&targets[row]).filter(|(_, id)| **id >= 0);
            asked.zip(&mut own).for_each(|((found, _), logprob)| *found = logprob);
        }
        if let Some(alternatives) = &mut self.alternatives {
            let likely = most_likely(logits, Sampling::PLAIN, query.alternatives);
            alternatives[place] = likely.into_iter().map(|likely| (likely.token, likely.logprob)).collect();
        }
    }
}
