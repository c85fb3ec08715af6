//! The thread on which a reward model computes: it takes what waits, packs it, scores it.
//!
//! Invariant: every request gets one answer, or learns that there will be none; a timeout ends the waiting of whoever
//! asked, and what nobody waits for any more is not computed. The thread ends when its service is dropped.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use model::{PromptCompletion, SequenceScorer, ThreadPool};
use tokio::sync::oneshot;

use crate::load::Waiting;
use crate::{RewardError, RewardInput, RewardSpec};

/// A sequence that waits for its score.
struct Request {
    answered: PromptCompletion,
    /// Its turn has come.
    begun: oneshot::Sender<()>,
    scored: oneshot::Sender<Result<f32, String>>,
}

/// The worker of one reward model.
#[derive(Debug)]
pub(super) struct Service {
    name: String,
    timeout: Duration,
    requests: Option<Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Starts the thread; it scores at most `batch_tokens` tokens at once, or one sequence that has more.
    pub(super) fn start(
        spec: &RewardSpec,
        scorer: Arc<SequenceScorer>,
        pool: Arc<ThreadPool>,
        batch_tokens: usize,
    ) -> Result<Self, RewardError> {
        let name = spec.name().to_owned();
        let (requests, receiver) = channel();
        let failed = |error: std::io::Error| RewardError::Start {
            reward: name.clone(),
            reason: format!("the system gives no thread: {error}"),
        };
        let thread = std::thread::Builder::new()
            .name(format!("reward {name}"))
            .spawn(move || serve(&receiver, &scorer, &pool, batch_tokens))
            .map_err(failed)?;
        Ok(Self { name, timeout: spec.timeout(), requests: Some(requests), thread: Some(thread) })
    }

    /// The score of a sequence; `begin` is called when its turn has come, and what it returns is kept until the end. The
    /// timeout begins with the turn: waiting in the queue is not the model's time.
    pub(super) async fn ask<T>(
        &self,
        answered: PromptCompletion,
        begin: impl FnOnce() -> T,
    ) -> Result<f32, Lost> {
        let ((begun, began), (scored, score)) = (oneshot::channel(), oneshot::channel());
        let requests = self.requests.as_ref().ok_or(Lost::Gone)?;
        requests.send(Request { answered, begun, scored }).map_err(|_| Lost::Gone)?;
        began.await.map_err(|_| Lost::Gone)?;
        let _running = begin();
        match tokio::time::timeout(self.timeout, score).await {
            Ok(Ok(Ok(score))) => Ok(score),
            Ok(Ok(Err(reason))) => Err(Lost::Refused(reason)),
            Ok(Err(_)) => Err(Lost::Gone),
            Err(_) => Err(Lost::Late(self.timeout)),
        }
    }

    /// The same for a trajectory that waits.
    pub(super) async fn score(
        &self,
        answered: PromptCompletion,
        waiting: Waiting<'_>,
        input: &RewardInput<'_>,
    ) -> Result<f32, RewardError> {
        self.ask(answered, || waiting.begin()).await.map_err(|lost| match lost {
            Lost::Late(limit) => input.trajectory().timed_out(&self.name, limit),
            lost => input.trajectory().failed(&self.name, lost.to_string()),
        })
    }
}

/// Why there is no score.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    /// The thread has ended.
    #[error("the worker of the reward model has ended; its message stands in the log")]
    Gone,
    /// The network refused the sequence.
    #[error("{0}")]
    Refused(String),
    /// It took too long.
    #[error("no score within {:.1} s", .0.as_secs_f64())]
    Late(Duration),
}

impl Drop for Service {
    fn drop(&mut self) {
        // Without its sender the thread ends after the batch at hand.
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            // If it panicked, whoever asked has been told.
            let _ = thread.join();
        }
    }
}

fn serve(requests: &Receiver<Request>, scorer: &SequenceScorer, pool: &Arc<ThreadPool>, batch_tokens: usize) {
    while let Ok(first) = requests.recv() {
        // Weights that are swapped in stay until nothing waits any more.
        let ready = scorer.load();
        let mut next = Some(first);
        while let Some(first) = next.take().or_else(|| requests.try_recv().ok()) {
            let mut tokens = first.answered.len();
            let mut batch = vec![first];
            while let Ok(request) = requests.try_recv() {
                tokens += request.answered.len();
                if tokens > batch_tokens {
                    next = Some(request);
                    break;
                }
                batch.push(request);
            }
            batch.retain(|request| !request.scored.is_closed());
            match &ready {
                Ok(ready) => answer(batch, |answered| {
                    let _reservation = pool.reserve_core();
                    ready.score(answered, pool).map_err(|error| error.to_string())
                }),
                Err(error) => answer(batch, |_| Err(error.to_string())),
            }
        }
    }
}

/// Scores a batch and tells everybody.
fn answer(mut batch: Vec<Request>, score: impl FnOnce(&[PromptCompletion]) -> Result<Vec<f32>, String>) {
    // Completions of one prompt become neighbours, so that the prompt is computed once.
    batch.sort_by(|a, b| a.answered.prompt.cmp(&b.answered.prompt));
    let (answered, tell): (Vec<_>, Vec<_>) =
        batch.into_iter().map(|request| (request.answered, (request.begun, request.scored))).unzip();
    let mut waiting = Vec::with_capacity(tell.len());
    for (begun, scored) in tell {
        // Whoever does not listen any more is told in vain.
        let _ = begun.send(());
        waiting.push(scored);
    }
    if answered.is_empty() {
        return;
    }
    match score(&answered) {
        Ok(scores) => waiting.into_iter().zip(scores).for_each(|(tell, score)| drop(tell.send(Ok(score)))),
        Err(error) => waiting.into_iter().for_each(|tell| drop(tell.send(Err(error.clone())))),
    }
}
