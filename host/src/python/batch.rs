//! A batch: the calls that one worker makes, and what becomes of each when the batch ends badly.
//!
//! Invariant: every call that enters [`run`] leaves it answered, or in a group to be called again, and never both. Only the
//! call that a timeout or a death is about is charged. If that is unknown, the calls of the batch are repeated one by one.

use std::time::Duration;

use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::CallError;
use super::fork_server::{ForkServer, ForkedWorker, START_DEADLINE, StartedWorker, WorkerExit, end_group};
use super::log::OutputTail;
use super::protocol::{FrameError, FrameStream, WorkerMessage, frame};

/// Deaths of a process that a call may be part of before it is charged with them.
const DEATHS: u32 = 2;
/// How long the fork server may take to report how a worker ended.
const EXIT_DEADLINE: Duration = Duration::from_secs(2);
/// Extra time for an event loop: it stops waiting at the timeout, unless a call blocks it.
const LOOP_SLACK: Duration = Duration::from_millis(300);

/// A call in the queue, and the channels to its caller.
#[derive(Debug)]
pub(super) struct QueuedCall {
    /// Arguments as JSON.
    pub(super) arguments: String,
    pub(super) reply: oneshot::Sender<Result<Value, CallError>>,
    /// Notified when a worker gets it for the first time.
    pub(super) started: Option<oneshot::Sender<()>>,
    /// Processes that died while they made it.
    pub(super) deaths: u32,
}

/// Calls that are made together: one, or a whole group.
#[derive(Debug)]
pub(super) struct CallGroup {
    pub(super) calls: Vec<QueuedCall>,
    /// Not to be joined with other groups in one batch.
    pub(super) alone: bool,
}

/// How the calls of a batch are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchMode {
    /// Longest call.
    pub(super) timeout: Duration,
    /// One call of the user's code for the whole batch.
    pub(super) batch: bool,
    /// All calls at the same time in an event loop.
    pub(super) concurrent: bool,
    /// A batch is one whole group, which must not be split.
    pub(super) whole_groups: bool,
}

/// A process that makes calls.
#[derive(Debug)]
pub(super) struct PythonWorker {
    frames: FrameStream,
    pid: i32,
    exit: oneshot::Receiver<WorkerExit>,
    /// False once its end was reported.
    running: bool,
    tail: OutputTail,
}

impl PythonWorker {
    /// Starts a worker and waits until it takes calls.
    pub(super) async fn start(server: &ForkServer) -> Result<Self, String> {
        let StartedWorker { process, frames, tail } = server.fork().await?;
        let ForkedWorker { pid, exit } = process;
        let mut worker = Self { frames, pid, exit, running: true, tail };
        match tokio::time::timeout(START_DEADLINE, worker.frames.next::<WorkerMessage>()).await {
            Ok(Ok(WorkerMessage::Ready)) => Ok(worker),
            Ok(_) => Err(format!("a worker ended before it was ready: {}", worker.end().await)),
            Err(_) => Err(format!("a worker was not ready within {} s", START_DEADLINE.as_secs())),
        }
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Resolves when an idle worker has ended, or sends a message out of turn.
    pub(super) async fn unusable(&mut self) {
        let _ = self.frames.next::<WorkerMessage>().await;
    }

    /// Waits for the end of the worker, kills it if it does not end, and returns how it ended.
    async fn end(mut self) -> String {
        // A worker that closed its socket is about to end; any other is killed by the drop.
        let exit = tokio::time::timeout(EXIT_DEADLINE, &mut self.exit).await;
        self.running = exit.is_err();
        let how = match exit {
            Ok(Ok(WorkerExit { signal: Some(signal), .. })) => format!("killed by {}", signal_name(signal)),
            Ok(Ok(WorkerExit { code: Some(code), .. })) => format!("ended with exit status {code}"),
            Ok(_) => "ended together with the parent process of the workers".to_owned(),
            Err(_) => "closed its socket without ending".to_owned(),
        };
        format!("{how}{}", self.tail.text_at_end().await)
    }
}

impl Drop for PythonWorker {
    fn drop(&mut self) {
        // After its end another process may have its id. If the fork server has ended, the tag finds its processes.
        if self.running && matches!(self.exit.try_recv(), Err(oneshot::error::TryRecvError::Empty)) {
            end_group(self.pid);
        }
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        4 => "SIGILL",
        6 => "SIGABRT",
        7 if cfg!(target_os = "linux") => "SIGBUS",
        10 if cfg!(target_vendor = "apple") => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL, as when memory is short",
        11 => "SIGSEGV",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU, as its processor time was over",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}

/// The next event of a batch.
enum BatchEvent {
    Message(WorkerMessage),
    /// The worker died, or sent these invalid bytes.
    Died(Option<String>),
    Late,
    Abandoned,
}

/// Has a worker make calls. Returns the worker if it can take another batch, or why it cannot, and the groups that must be
/// called again.
pub(super) async fn run(
    mut worker: PythonWorker,
    calls: Vec<QueuedCall>,
    mode: BatchMode,
) -> (Result<PythonWorker, String>, Vec<CallGroup>) {
    let arguments: Vec<_> = calls.iter().map(|call| call.arguments.as_str()).collect();
    let request = frame(format!("{{\"calls\":[{}]}}", arguments.join(",")).as_bytes());
    let mut batch = RunningBatch { calls: calls.into_iter().map(Some).collect(), mode, repeat: false };
    let limit = if mode.concurrent { mode.timeout + LOOP_SLACK } else { mode.timeout };
    let mut deadline = Instant::now() + limit;
    let late = || format!("a call took longer than {} s", mode.timeout.as_secs_f64());
    match tokio::time::timeout_at(deadline, worker.frames.send(&request)).await {
        Ok(Ok(())) => {}
        Ok(Err(_)) => return batch.died(worker, None).await,
        Err(_) => return (Err(late()), batch.late()),
    }
    loop {
        let event = tokio::select! {
            biased;
            message = worker.frames.next::<WorkerMessage>() => match message {
                Ok(message) => BatchEvent::Message(message),
                Err(FrameError::Closed) => BatchEvent::Died(None),
                Err(FrameError::Invalid(what)) => BatchEvent::Died(Some(what)),
            },
            () = tokio::time::sleep_until(deadline) => BatchEvent::Late,
            () = batch.abandoned() => BatchEvent::Abandoned,
        };
        match event {
            BatchEvent::Message(WorkerMessage::Done { retire }) => {
                let mut left = batch.unanswered();
                if !batch.repeat {
                    let unreported = "its worker ended the batch without a report on this call";
                    left.drain(..).for_each(|call| call.fail(unreported.to_owned()));
                }
                let retired =
                    || "it asked for it: its memory was short, or a call could not be cancelled".to_owned();
                return (if retire { Err(retired()) } else { Ok(worker) }, batch.regroup(left));
            }
            BatchEvent::Message(message) => {
                if let Err(what) = batch.apply(message) {
                    return batch.died(worker, Some(what)).await;
                }
                if batch.sequential() {
                    deadline = Instant::now() + limit;
                }
            }
            BatchEvent::Died(invalid) => return batch.died(worker, invalid).await,
            BatchEvent::Late => return (Err(late()), batch.late()),
            BatchEvent::Abandoned => {
                let left = batch.unanswered();
                return (Err("the callers stopped waiting".to_owned()), batch.regroup(left));
            }
        }
    }
}

struct RunningBatch {
    /// Calls without an answer; `None` where one was sent.
    calls: Vec<Option<QueuedCall>>,
    mode: BatchMode,
    /// Whether calls without an answer at the end of the batch are called again.
    repeat: bool,
}

impl RunningBatch {
    /// Whether the calls are made one after the other.
    fn sequential(&self) -> bool {
        !self.mode.batch && !self.mode.concurrent
    }

    /// Resolves when all callers of the running calls have stopped waiting.
    async fn abandoned(&mut self) {
        let sequential = self.sequential();
        let mut running = self.calls.iter_mut().flatten().peekable();
        if running.peek().is_none() {
            return std::future::pending().await;
        }
        for call in running {
            call.reply.closed().await;
            if sequential {
                return;
            }
        }
    }

    fn unanswered(&mut self) -> Vec<QueuedCall> {
        self.calls.iter_mut().filter_map(Option::take).collect()
    }

    fn take(&mut self, call: usize) -> Result<QueuedCall, String> {
        let found = self.calls.get_mut(call).and_then(Option::take);
        found.ok_or_else(|| format!("a report on call {call}, which is not part of the batch"))
    }

    /// Answers the call of a message. The error is a message that cannot be true.
    fn apply(&mut self, message: WorkerMessage) -> Result<(), String> {
        match message {
            WorkerMessage::Result { call, result } => self.take(call)?.answer(Ok(result)),
            WorkerMessage::Error { call, reason } => self.take(call)?.fail(reason),
            WorkerMessage::Timeout { call } => self.take(call)?.answer(Err(CallError::Timeout)),
            WorkerMessage::Alone { call } => {
                let found = self.take(call)?;
                self.calls[call] = Some(found);
                self.repeat = true;
            }
            WorkerMessage::Raised { reason, repeat } => {
                self.repeat = repeat && !self.mode.whole_groups && self.calls.iter().flatten().count() > 1;
                if !self.repeat {
                    self.unanswered().into_iter().for_each(|call| call.fail(reason.clone()));
                }
            }
            WorkerMessage::Ready | WorkerMessage::Done { .. } => {
                return Err("a message out of turn".to_owned());
            }
        }
        Ok(())
    }

    /// The timeout is over.
    fn late(&mut self) -> Vec<CallGroup> {
        let mut left = self.unanswered();
        if self.sequential() && !left.is_empty() {
            left.remove(0).answer(Err(CallError::Timeout));
        } else if self.mode.whole_groups || left.len() == 1 {
            left.drain(..).for_each(|call| call.answer(Err(CallError::Timeout)));
        }
        self.regroup(left)
    }

    /// The process died, or sent `invalid` bytes and is killed.
    async fn died(
        &mut self,
        worker: PythonWorker,
        invalid: Option<String>,
    ) -> (Result<PythonWorker, String>, Vec<CallGroup>) {
        let how = match invalid {
            Some(what) => {
                let tail = worker.tail.clone();
                drop(worker);
                format!(
                    "the function wrote to the socket of its worker ({what}), which was ended{}",
                    tail.text_at_end().await
                )
            }
            None => format!("its process was {}", worker.end().await),
        };
        let mut left = self.unanswered();
        let charged = if self.sequential() { left.len().min(1) } else { left.len() };
        left[..charged].iter_mut().for_each(|call| call.deaths += 1);
        let (dead, left): (Vec<_>, Vec<_>) = left.into_iter().partition(|call| call.deaths >= DEATHS);
        dead.into_iter().for_each(|call| call.fail(format!("{how} (the second time)")));
        (Err(how), self.regroup(left))
    }

    /// Groups of the calls that are repeated: in order, and one by one if one of them may be the cause.
    fn regroup(&self, left: Vec<QueuedCall>) -> Vec<CallGroup> {
        if self.mode.whole_groups {
            return if left.is_empty() { Vec::new() } else { vec![CallGroup { calls: left, alone: true }] };
        }
        let alone = !self.sequential();
        left.into_iter().map(|call| CallGroup { calls: vec![call], alone }).collect()
    }
}

impl QueuedCall {
    fn answer(self, result: Result<Value, CallError>) {
        // The caller may have stopped waiting.
        let _ = self.reply.send(result);
    }

    pub(super) fn fail(self, reason: String) {
        self.answer(Err(CallError::Failed { reason }));
    }
}
