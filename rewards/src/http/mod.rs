//! `http`: a reward server with the protocol of OpenRLHF's or slime's remote rewards.
//!
//! Invariant: a response is not trusted. If its rewards have another length or are not numbers, that is an error that shows them;
//! scores and logs of another length are dropped. Up to `batch` waiting trajectories share one request, and each gets its own
//! outcome; a caller that stops waiting costs the others nothing.

pub mod allow;
pub(crate) mod transport;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Semaphore, oneshot};
use trajectory::Prompt;

use self::transport::{HttpTransport, RequestError, cut, seed};
use crate::registry::RewardKind;
use crate::reward::{Judged, each};
use crate::{BoxFuture, Load, Outcome, Reward, RewardContext, RewardError, RewardInput, RewardSpec};

/// The kind `http`.
pub(crate) fn kind() -> RewardKind {
    const KEYS: [&str; 7] = ["url", "dialect", "allow", "token_env", "retries", "max_answer_kib", "batch"];
    RewardKind::new("http", &KEYS, &["url"], |spec, context| Ok(Box::new(HttpReward::new(spec, context)?)))
}

/// Protocol of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialect {
    /// Request: lists `query`, `prompts` and `labels`. Response: `rewards`.
    Openrlhf,
    /// Request: one `prompt`, `response` and `label`. Response: a number, or an object with `score`.
    Slime,
}

/// Rewards of a server.
pub struct HttpReward {
    name: String,
    decode: Option<Arc<crate::registry::Decode>>,
    queue: Arc<RequestQueue>,
    load: Load,
}

/// The server, and the requests that wait for it.
struct RequestQueue {
    transport: Arc<HttpTransport>,
    dialect: Dialect,
    batch: usize,
    timeout: Duration,
    running: Arc<Semaphore>,
    waiting: Mutex<VecDeque<QueuedRequest>>,
}

/// The request of one trajectory, and the channels to its caller.
struct QueuedRequest {
    query: String,
    prompt: Value,
    response: String,
    label: String,
    seed: u64,
    started: oneshot::Sender<()>,
    answer: oneshot::Sender<Result<Outcome, RequestError>>,
}

impl HttpReward {
    /// Makes the reward; the first request connects.
    ///
    /// # Errors
    /// No runtime, or an invalid parameter.
    pub fn new(spec: &RewardSpec, context: &RewardContext) -> Result<Self, RewardError> {
        context.runtime(spec)?;
        let dialect = match spec.dialect.as_deref().unwrap_or("openrlhf") {
            "openrlhf" => Dialect::Openrlhf,
            "slime" => Dialect::Slime,
            _ => return Err(spec.wrong("dialect", "is \"openrlhf\" or \"slime\"")),
        };
        let batch = spec.batch.unwrap_or(1);
        if batch == 0 || (batch > 1 && dialect == Dialect::Slime) {
            return Err(spec.wrong("batch", "must be at least 1, and 1 in the dialect \"slime\""));
        }
        let queue = RequestQueue {
            transport: Arc::new(HttpTransport::new(spec, context, str::to_owned)?),
            dialect,
            batch,
            timeout: spec.timeout(),
            running: Arc::new(Semaphore::new(spec.concurrency.max(1))),
            waiting: Mutex::default(),
        };
        Ok(Self {
            name: spec.name().to_owned(),
            decode: context.decode.clone(),
            queue: Arc::new(queue),
            load: Load::default(),
        })
    }

    async fn judge(&self, input: &RewardInput<'_>) -> Judged {
        let waiting = self.load.wait();
        let (started, mut has_started) = oneshot::channel();
        let (answer, answered) = oneshot::channel();
        self.queue.push(self.entry(input, started, answer));
        // The holder of a permit sends the oldest requests, which may be those of other callers.
        loop {
            tokio::select! {
                biased;
                _ = &mut has_started => break,
                permit = Arc::clone(&self.queue.running).acquire_owned() => {
                    let entries = self.queue.take();
                    if entries.is_empty() {
                        continue;
                    }
                    let queue = Arc::clone(&self.queue);
                    // A separate task: it continues for the others if this caller stops waiting.
                    tokio::spawn(async move {
                        queue.send(entries).await;
                        drop(permit);
                    });
                }
            }
        }
        let _running = waiting.begin();
        let ended = || RequestError::Failed("the request was dropped as the run is ending".to_owned());
        let answer = answered.await.unwrap_or_else(|_| Err(ended()));
        answer.map_err(|error| error.of(&self.name, self.queue.timeout, input.trajectory()))
    }

    fn entry(
        &self,
        input: &RewardInput<'_>,
        started: oneshot::Sender<()>,
        answer: oneshot::Sender<Result<Outcome, RequestError>>,
    ) -> QueuedRequest {
        let (text, query) = input.decoded(self.decode.as_deref());
        let known = self.decode.is_some() && !input.prompt_ids.is_empty();
        let prompt = if known { Value::from(text) } else { messages(&input.task.prompt) };
        QueuedRequest {
            query,
            prompt,
            response: input.text.to_owned(),
            label: input.task.answer.clone().unwrap_or_default(),
            seed: seed(input.trajectory()),
            started,
            answer,
        }
    }
}

fn messages(prompt: &Prompt) -> Value {
    match prompt {
        Prompt::Text(text) => Value::from(text.as_str()),
        Prompt::Messages(messages) => {
            messages.iter().map(|message| json!({"role": message.role, "content": message.content})).collect()
        }
    }
}

impl RequestQueue {
    fn push(&self, entry: QueuedRequest) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push_back(entry);
    }

    /// The next batch, without requests whose callers have stopped waiting; notifies the callers that it starts.
    fn take(&self) -> Vec<QueuedRequest> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut batch = Vec::new();
        while batch.len() < self.batch {
            let Some(mut entry) = waiting.pop_front() else { break };
            let started = std::mem::replace(&mut entry.started, oneshot::channel().0);
            if started.send(()).is_ok() {
                batch.push(entry);
            }
        }
        batch
    }

    async fn send(&self, entries: Vec<QueuedRequest>) {
        let seed = entries.first().map_or(0, |entry| entry.seed);
        let answer = self.transport.post(&self.body(&entries), seed, self.timeout).await;
        let outcomes = answer.and_then(|answer| {
            self.read(&answer, entries.len())
                .map_err(|reason| RequestError::Failed(format!("{reason}: {}", cut(&answer.to_string()))))
        });
        for (index, entry) in entries.into_iter().enumerate() {
            let own = outcomes.as_ref().map(|outcomes| outcomes[index].clone()).map_err(Clone::clone);
            // The caller may have stopped waiting.
            let _closed = entry.answer.send(own);
        }
    }

    fn body(&self, entries: &[QueuedRequest]) -> Value {
        match (self.dialect, entries) {
            (Dialect::Slime, [entry]) => {
                json!({"prompt": entry.prompt, "response": entry.response, "label": entry.label})
            }
            _ => {
                let all =
                    |field: &dyn Fn(&QueuedRequest) -> Value| entries.iter().map(field).collect::<Vec<_>>();
                json!({
                    "query": all(&|entry| entry.query.as_str().into()),
                    "prompts": all(&|entry| entry.prompt.clone()),
                    "labels": all(&|entry| entry.label.as_str().into()),
                })
            }
        }
    }

    /// `count` outcomes, or what is wrong with the response.
    fn read(&self, answer: &Value, count: usize) -> Result<Vec<Outcome>, String> {
        match self.dialect {
            Dialect::Openrlhf => read_openrlhf(answer, count),
            Dialect::Slime => read_slime(answer).map(|outcome| vec![outcome]),
        }
    }
}

fn read_openrlhf(answer: &Value, count: usize) -> Result<Vec<Outcome>, String> {
    let rewards = answer.get("rewards").ok_or("the answer has no `rewards`")?;
    let rewards = rewards.as_array().ok_or("`rewards` in the answer is no list")?;
    if rewards.len() != count {
        return Err(format!("`rewards` in the answer has {} entries for {count} queries", rewards.len()));
    }
    let mut outcomes = Vec::with_capacity(count);
    for reward in rewards {
        let value =
            number(reward).ok_or_else(|| format!("the reward {reward} in the answer is no number"))?;
        outcomes.push(Outcome::from(value));
    }
    let scores = answer.get("scores").map(|scores| ("score", scores));
    let logs = answer.get("extra_logs").and_then(Value::as_object);
    let logs = logs.into_iter().flatten().map(|(name, values)| (name.as_str(), values));
    for (name, values) in scores.into_iter().chain(logs) {
        // Logs of another length are dropped; the rewards are still valid.
        let Some(values) = values.as_array().filter(|values| values.len() == count) else { continue };
        for (outcome, value) in outcomes.iter_mut().zip(values) {
            outcome.details.insert(name.to_owned(), value.clone());
        }
    }
    Ok(outcomes)
}

/// A number; true is 1.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_bool().map(|value| f64::from(u8::from(value))))
}

fn read_slime(answer: &Value) -> Result<Outcome, String> {
    if let Some(value) = number(answer) {
        return Ok(value.into());
    }
    let value =
        answer.get("score").and_then(number).ok_or("the answer is no number and has no number `score`")?;
    let others = answer.as_object().into_iter().flatten().filter(|(name, _)| *name != "score");
    Ok(Outcome {
        details: others.map(|(name, value)| (name.clone(), value.clone())).collect(),
        ..value.into()
    })
}

impl fmt::Debug for HttpReward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpReward")
            .field("name", &self.name)
            .field("transport", &self.queue.transport)
            .finish_non_exhaustive()
    }
}

impl Reward for HttpReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        each(inputs, |input| self.judge(input))
    }

    fn about(&self) -> Option<String> {
        Some(format!(
            "asks {} as {} does",
            self.queue.transport.url(),
            match self.queue.dialect {
                Dialect::Openrlhf => "OpenRLHF",
                Dialect::Slime => "slime",
            }
        ))
    }

    fn load(&self) -> &Load {
        &self.load
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_openrlhf() {
        let answer = json!({"rewards": [1, 0.5], "scores": [1.0, 0.0], "extra_logs": {"length": [3, 4]}});
        let outcomes = read_openrlhf(&answer, 2).unwrap();
        assert_eq!(outcomes[1], Outcome::from(0.5).with("score", 0.0).with("length", 4));
        for (answer, word) in [
            (json!({"rewards": [1]}), "1 entries for 2"),
            (json!({"rewards": [1, null]}), "null"),
            (json!({"rewards": [1, "2"]}), "no number"),
            (json!({"rewards": 1}), "no list"),
            (json!([1, 2]), "no `rewards`"),
        ] {
            let error = read_openrlhf(&answer, 2).unwrap_err();
            assert!(error.contains(word), "{answer}: {error}");
        }
    }

    #[test]
    fn logs_of_another_length_are_dropped() {
        for broken in [
            json!({"scores": [1]}),
            json!({"scores": 0.5}),
            json!({"scores": null}),
            json!({"extra_logs": {"a": 1.0, "c": [1, 2, 3]}}),
            json!({"extra_logs": [1, 2]}),
        ] {
            let mut answer = broken.clone();
            answer["rewards"] = json!([true, 0.5]);
            assert_eq!(read_openrlhf(&answer, 2).unwrap(), [1.0.into(), 0.5.into()], "{broken}");
        }
    }

    #[test]
    fn answers_of_slime() {
        assert_eq!(read_slime(&json!(0.25)).unwrap(), 0.25.into());
        assert_eq!(read_slime(&json!(true)).unwrap(), 1.0.into());
        assert_eq!(read_slime(&json!({"score": false})).unwrap(), 0.0.into());
        assert_eq!(
            read_slime(&json!({"score": 1, "why": "x"})).unwrap(),
            Outcome::from(1.0).with("why", "x")
        );
        for answer in [json!("1"), json!({"reward": 1}), json!([1]), json!(null)] {
            assert!(read_slime(&answer).is_err(), "{answer}");
        }
    }
}
