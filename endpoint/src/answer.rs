//! What the sampler answers, checked and as text, for every protocol to write.
//!
//! Invariant: a completion that reaches a client has one finite log-probability of at most 0 per token. The tokens of all
//! deltas of a choice together are those of the choice.

use std::time::Instant;

use futures_util::future::select_all;
use model::TokenLogprob;
use rollout::{Completion, PendingRequest, RequestEvent};
use trajectory::{StopReason, VersionRun};

use crate::ApiError;
use crate::limits::AnswerPermit;
use crate::service::{Generation, Service};
use crate::sessions::SessionTurn;
use crate::text::TextStream;

/// A completion that has ended. `C` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Which of the completions of the request it is.
    pub index: usize,
    /// Which prompt it continues.
    pub prompt: usize,
    /// `[C]` its tokens, the stop token included.
    pub token_ids: Vec<u32>,
    /// `[C]` behavior log-probabilities, nats.
    pub logprobs: Vec<f32>,
    /// `[C]` the most likely tokens at each position; empty if none were asked for.
    pub alternatives: Vec<Vec<TokenLogprob>>,
    /// Runs of policy versions over the tokens.
    pub versions: Vec<VersionRun>,
    /// The version that began to prefill the prompt.
    pub prompt_version: trajectory::PolicyVersion,
    /// The experts of the tokens of prompt and completion; `None` if the sampler does not record them.
    pub experts: Option<trajectory::TokenExperts>,
    /// The text, without stop token and stop string.
    pub text: String,
    /// Why it ended.
    pub stop: StopReason,
    /// What of the request ended it.
    pub matched: Option<StopMatch>,
}

/// A stop token or stop string of the request that ended a completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopMatch {
    /// The token.
    Token(u32),
    /// The string.
    Text(String),
}

impl Choice {
    /// `stop` or `length`.
    #[must_use]
    pub fn finish_reason(&self) -> &'static str {
        match self.stop {
            StopReason::StopToken | StopReason::StopString => "stop",
            StopReason::Length => "length",
        }
    }
}

/// New tokens of a choice. `N` tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Which of the completions of the request it is.
    pub index: usize,
    /// `[N]` new tokens.
    pub token_ids: Vec<u32>,
    /// `[N]` their log-probabilities, nats.
    pub logprobs: Vec<f32>,
    /// `[N]` the most likely tokens at each position; empty if none were asked for.
    pub alternatives: Vec<Vec<TokenLogprob>>,
    /// New text.
    pub text: String,
    /// The whole choice, if it has ended.
    pub ended: Option<Choice>,
}

/// An answer that is being sampled. Dropping it aborts what has not ended.
#[derive(Debug)]
pub struct RunningAnswer {
    service: Service,
    /// Requests that have not ended, each with the number of its prompt.
    requests: Vec<(usize, PendingRequest)>,
    prompts: Vec<Vec<u32>>,
    /// Completions per prompt.
    samples: usize,
    streams: Vec<ChoiceStream>,
    choices: Vec<Choice>,
    turn: Option<Box<dyn SessionTurn>>,
    /// The id that the client gets.
    id: String,
    stop: rollout::RequestStop,
    begun: Instant,
    _permit: AnswerPermit,
}

#[derive(Debug)]
struct ChoiceStream {
    text: TextStream,
    /// Tokens that deltas have had.
    tokens: usize,
    /// When the last of them came.
    newest: Option<Instant>,
}

/// What of an answer is not submitted yet.
#[derive(Debug)]
pub(crate) struct AnswerParts {
    pub(crate) generation: Generation,
    pub(crate) requests: Vec<PendingRequest>,
    pub(crate) turn: Option<Box<dyn SessionTurn>>,
    pub(crate) permit: AnswerPermit,
}

impl RunningAnswer {
    pub(crate) fn new(service: Service, parts: AnswerParts) -> Self {
        let AnswerParts { generation, requests, turn, permit } = parts;
        let Generation { prompts, parameters, .. } = generation;
        let (samples, mut stop) = (parameters.samples, parameters.options.stop);
        stop.strings.extend_from_slice(&service.policy().stop_strings);
        let tokenizer = service.directory().tokenizer();
        let stream =
            |_| ChoiceStream { text: TextStream::new(tokenizer, &stop.strings), tokens: 0, newest: None };
        let streams = (0..prompts.len() * samples).map(stream).collect();
        let begun = Instant::now();
        let requests = requests.into_iter().enumerate().collect();
        Self {
            service,
            requests,
            prompts,
            samples,
            streams,
            choices: Vec::new(),
            turn,
            id: String::new(),
            stop,
            begun,
            _permit: permit,
        }
    }

    /// The same, under the id that the client gets.
    #[must_use]
    pub fn named(mut self, id: &str) -> Self {
        id.clone_into(&mut self.id);
        self
    }

    /// `[P]` the tokens of each prompt.
    #[must_use]
    pub fn prompts(&self) -> &[Vec<u32>] {
        &self.prompts
    }

    /// The next tokens; `None` after the last choice. Cancel safe.
    ///
    /// # Errors
    /// If the request failed; nothing follows.
    pub async fn next(&mut self) -> Option<Result<Delta, ApiError>> {
        loop {
            if self.requests.is_empty() {
                return None;
            }
            let waits = self.requests.iter_mut().map(|(_, request)| Box::pin(request.next()));
            let (event, at, _) = select_all(waits).await;
            let (prompt, queued) = (self.requests[at].0, self.requests[at].1.queued());
            match event {
                None => drop(self.requests.remove(at)),
                Some(RequestEvent::Failed(error)) => {
                    self.requests.clear();
                    return Some(Err(error.into()));
                }
                Some(RequestEvent::Partial(partial)) => {
                    let index = prompt * self.samples + partial.index as usize;
                    let text = self.streams[index].text.push(&partial.token_ids);
                    let delta = Delta {
                        index,
                        token_ids: partial.token_ids,
                        logprobs: partial.logprobs,
                        alternatives: partial.alternatives,
                        text,
                        ended: None,
                    };
                    self.count(&delta, queued);
                    return Some(Ok(delta));
                }
                Some(RequestEvent::Completed(completion)) => {
                    let ended = self.ended(prompt, *completion);
                    if let Ok(delta) = &ended {
                        self.count(delta, queued);
                    }
                    return Some(ended);
                }
            }
        }
    }

    /// All choices, by index.
    ///
    /// # Errors
    /// If the request failed.
    pub async fn collect(mut self) -> Result<(Vec<Vec<u32>>, Vec<Choice>), ApiError> {
        let mut choices = Vec::with_capacity(self.streams.len());
        while let Some(delta) = self.next().await {
            choices.extend(delta?.ended);
        }
        choices.sort_by_key(|choice| choice.index);
        Ok((std::mem::take(&mut self.prompts), choices))
    }

    /// Time without tokens after which a stream shows that it lives.
    pub(crate) fn keep_alive(&self) -> std::time::Duration {
        self.service.limits().keep_alive
    }

    /// Tokens of the prompts and of the choices that have ended.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompts.iter().map(Vec::len).sum(),
            completion_tokens: self.streams.iter().map(|stream| stream.tokens).sum(),
        }
    }

    fn ended(&mut self, prompt: usize, completion: Completion) -> Result<Delta, ApiError> {
        let index = prompt * self.samples + completion.index as usize;
        let choice = self.choice(index, prompt, completion)?;
        let stream = &mut self.streams[index];
        let from = stream.tokens;
        let delta = Delta {
            index,
            token_ids: choice.token_ids[from..].to_vec(),
            logprobs: choice.logprobs[from..].to_vec(),
            alternatives: choice.alternatives.get(from..).unwrap_or_default().to_vec(),
            text: stream.text.rest(&choice.text),
            ended: Some(choice.clone()),
        };
        let metrics = self.service.metrics();
        metrics.completion(choice.token_ids.len(), choice.finish_reason(), self.begun.elapsed());
        self.choices.push(choice);
        if self.choices.len() == self.streams.len()
            && let Some(turn) = self.turn.take()
        {
            self.choices.sort_by_key(|choice| choice.index);
            turn.record(&self.id, self.prompts.first().map(Vec::as_slice).unwrap_or_default(), &self.choices);
        }
        Ok(delta)
    }

    /// The completion as a choice.
    fn choice(&self, index: usize, prompt: usize, completion: Completion) -> Result<Choice, ApiError> {
        let token_ids = completion.token_ids[completion.prompt_length..].to_vec();
        let vocabulary = self.service.directory().config().vocab_size;
        check(&token_ids, &completion.logprobs, vocabulary)?;
        let matched = match completion.stop {
            StopReason::Length => None,
            StopReason::StopToken => {
                token_ids.last().filter(|id| self.stop.token_ids.contains(id)).map(|id| StopMatch::Token(*id))
            }
            StopReason::StopString => self.matched(&token_ids, completion.text.len()).map(StopMatch::Text),
        };
        Ok(Choice {
            index,
            prompt,
            token_ids,
            logprobs: completion.logprobs,
            alternatives: completion.alternatives,
            versions: completion.versions,
            prompt_version: completion.prompt_version,
            experts: completion.experts,
            text: completion.text,
            stop: completion.stop,
            matched,
        })
    }

    /// The stop string behind the first `at` bytes of the text of `token_ids`.
    fn matched(&self, token_ids: &[u32], at: usize) -> Option<String> {
        let whole = self.service.directory().tokenizer().decode(token_ids).ok()?;
        let behind = whole.get(at..)?;
        self.stop.strings.iter().find(|stop| behind.starts_with(stop.as_str())).cloned()
    }

    fn count(&mut self, delta: &Delta, queued: Option<std::time::Duration>) {
        let now = Instant::now();
        let stream = &mut self.streams[delta.index];
        stream.tokens += delta.token_ids.len();
        let metrics = self.service.metrics();
        match stream.newest.replace(now) {
            None => metrics.first_token(now.duration_since(self.begun), queued),
            Some(before) => metrics.more_tokens(delta.token_ids.len(), now.duration_since(before)),
        }
    }
}

impl Drop for RunningAnswer {
    fn drop(&mut self) {
        if !self.requests.is_empty() && self.choices.len() < self.streams.len() {
            self.service.metrics().disconnected.inc();
        }
    }
}

/// Tokens of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of its prompts.
    pub prompt_tokens: usize,
    /// Of its choices.
    pub completion_tokens: usize,
}

/// Checks tokens and log-probabilities before they are sent.
fn check(token_ids: &[u32], logprobs: &[f32], vocabulary: usize) -> Result<(), ApiError> {
    if token_ids.len() != logprobs.len() {
        let (tokens, numbers) = (token_ids.len(), logprobs.len());
        return Err(ApiError::internal(format!("{tokens} tokens have {numbers} log-probabilities")));
    }
    if let Some(id) = token_ids.iter().find(|id| **id as usize >= vocabulary) {
        return Err(ApiError::internal(format!(
            "the sampler returned token {id} of a vocabulary of {vocabulary}"
        )));
    }
    match logprobs.iter().find(|logprob| !(logprob.is_finite() && **logprob <= 0.0)) {
        None => Ok(()),
        Some(logprob) => Err(ApiError::internal(format!(
            "the sampler returned the log-probability {logprob}; the weights of the policy may not be finite"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_answers_are_not_sent() {
        check(&[1, 2], &[-0.5, 0.0], 3).unwrap();
        for (ids, logprobs) in [
            (&[1][..], &[][..]),
            (&[3], &[-1.0]),
            (&[1], &[f32::NAN]),
            (&[1], &[f32::NEG_INFINITY]),
            (&[1], &[0.1]),
        ] {
            assert_eq!(check(ids, logprobs, 3).unwrap_err().status.as_u16(), 500);
        }
    }
}
