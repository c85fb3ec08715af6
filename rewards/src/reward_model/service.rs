//! The thread of a reward model: it takes the waiting sequences, packs them into a batch and scores it.
//!
//! Invariant: every request gets one response or a closed channel; a timeout ends the wait of the caller, and a sequence whose
//! caller stopped waiting is not computed. The thread ends when its service is dropped.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use model::{PromptCompletion, SequenceScorer, ThreadPool};
use tokio::sync::oneshot;

use crate::load::WaitingTrajectory;
use crate::{RewardError, RewardInput, RewardSpec};

/// A sequence that waits for its score.
struct QueuedSequence {
    answered: PromptCompletion,
    /// Notified when its batch starts.
    started: oneshot::Sender<()>,
    scored: oneshot::Sender<Result<f32, String>>,
}

/// The thread of one reward model, and its queue.
#[derive(Debug)]
pub(super) struct ScoringService {
    name: String,
    timeout: Duration,
    requests: Option<Sender<QueuedSequence>>,
    thread: Option<JoinHandle<()>>,
}

impl ScoringService {
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

    /// The score of a sequence; `begin` is called when its batch starts, and its value is dropped at the end. The timeout begins
    /// then: time in the queue does not count.
    pub(super) async fn submit<T>(
        &self,
        answered: PromptCompletion,
        begin: impl FnOnce() -> T,
    ) -> Result<f32, ScoringError> {
        let ((started, has_started), (scored, score)) = (oneshot::channel(), oneshot::channel());
        let requests = self.requests.as_ref().ok_or(ScoringError::Ended)?;
        requests.send(QueuedSequence { answered, started, scored }).map_err(|_| ScoringError::Ended)?;
        has_started.await.map_err(|_| ScoringError::Ended)?;
        let _running = begin();
        match tokio::time::timeout(self.timeout, score).await {
            Ok(Ok(Ok(score))) => Ok(score),
            Ok(Ok(Err(reason))) => Err(ScoringError::Refused(reason)),
            Ok(Err(_)) => Err(ScoringError::Ended),
            Err(_) => Err(ScoringError::Timeout(self.timeout)),
        }
    }

    /// [`Self::submit`] for a waiting trajectory.
    pub(super) async fn score(
        &self,
        answered: PromptCompletion,
        waiting: WaitingTrajectory<'_>,
        input: &RewardInput<'_>,
    ) -> Result<f32, RewardError> {
        self.submit(answered, || waiting.begin()).await.map_err(|error| match error {
            ScoringError::Timeout(limit) => input.trajectory().timed_out(&self.name, limit),
            error => input.trajectory().failed(&self.name, error.to_string()),
        })
    }
}

/// Why there is no score.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScoringError {
    /// The thread has ended.
    #[error("the worker of the reward model has ended; its message is in the log")]
    Ended,
    /// The network refused the sequence.
    #[error("{0}")]
    Refused(String),
    /// It took too long.
    #[error("no score within {:.1} s", .0.as_secs_f64())]
    Timeout(Duration),
}

impl Drop for ScoringService {
    fn drop(&mut self) {
        // Without a sender the thread ends after the current batch.
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            // If it panicked, the callers have an error.
            let _ = thread.join();
        }
    }
}

fn serve(
    requests: &Receiver<QueuedSequence>,
    scorer: &SequenceScorer,
    pool: &Arc<ThreadPool>,
    batch_tokens: usize,
) {
    while let Ok(first) = requests.recv() {
        // Swapped-in weights stay until the queue is empty.
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

/// Scores a batch and answers its callers.
fn answer(
    mut batch: Vec<QueuedSequence>,
    score: impl FnOnce(&[PromptCompletion]) -> Result<Vec<f32>, String>,
) {
    // Completions of one prompt become neighbours, so that the prompt is computed once.
    batch.sort_by(|a, b| a.answered.prompt.cmp(&b.answered.prompt));
    let (answered, tell): (Vec<_>, Vec<_>) =
        batch.into_iter().map(|request| (request.answered, (request.started, request.scored))).unzip();
    let mut waiting = Vec::with_capacity(tell.len());
    for (started, scored) in tell {
        // The caller may have stopped waiting.
        let _ = started.send(());
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
