//! The queue of a process pool and the workers that empty it.
//!
//! Invariant: a call that was submitted is answered, whatever the processes do meanwhile, unless its caller stopped waiting.
//! The queue has no bound of its own: each call in it has a caller that waits, so the limit on callers bounds it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::CallError;
use super::batch::{BatchMode, CallGroup, PythonWorker, QueuedCall, run};
use super::fork_server::{ForkServer, lock};
use super::protocol::MAX_ARGUMENTS;
use super::spawner::WorkerSpawner;

/// Most bytes of arguments in a batch of several calls.
const BATCH_BYTES: usize = 8 << 20;
/// Nanoseconds that a batch of several calls, one after the other, should take.
const BATCH_NS: u64 = 100_000_000;

/// Sizes of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Worker processes.
    pub workers: usize,
    /// Most calls that a worker gets at once; groups may have more.
    pub max_batch: usize,
    /// Calls that are submitted together are one batch, whatever their number: user code sees the whole group.
    pub whole_groups: bool,
}

/// Processes that call Python code, and the queue of their calls.
#[derive(Debug)]
pub struct ProcessPool {
    state: Arc<PoolState>,
    slots: Vec<JoinHandle<()>>,
}

/// A call that was submitted. To drop it is to give the call up: if it is running, its worker is killed.
#[derive(Debug)]
pub struct PendingCall {
    started: oneshot::Receiver<()>,
    reply: oneshot::Receiver<Result<Value, CallError>>,
}

#[derive(Debug)]
struct PoolState {
    spawner: WorkerSpawner,
    mode: BatchMode,
    workers: usize,
    max_batch: usize,
    queue: Mutex<VecDeque<CallGroup>>,
    filled: Notify,
    /// Process ids of the workers; 0 for none.
    pids: Mutex<Vec<i32>>,
    /// Workers that ended in a batch.
    replaced: AtomicU64,
    /// Nanoseconds that a call took lately, where calls are made one after the other.
    call_ns: AtomicU64,
}

impl ProcessPool {
    /// Longest arguments of a call, bytes of JSON.
    pub const MAX_ARGUMENTS: usize = MAX_ARGUMENTS;

    /// Starts the workers.
    #[must_use]
    pub fn start(server: ForkServer, options: PoolOptions) -> Self {
        let PoolOptions { workers, max_batch, whole_groups } = options;
        let (batch, concurrent) = (server.loaded().batch, server.loaded().concurrent);
        let (runtime, timeout) = (server.setup().runtime().clone(), server.setup().timeout());
        let state = Arc::new(PoolState {
            mode: BatchMode { timeout, batch, concurrent, whole_groups },
            spawner: WorkerSpawner::new(server),
            workers,
            max_batch,
            queue: Mutex::default(),
            filled: Notify::new(),
            pids: Mutex::new(vec![0; workers]),
            replaced: AtomicU64::new(0),
            call_ns: AtomicU64::new(0),
        });
        let slots = (0..workers).map(|number| runtime.spawn(slot(Arc::clone(&state), number))).collect();
        Self { state, slots }
    }

    /// Appends calls to the queue, each with its arguments as JSON. They may run in any order and share batches with others;
    /// with [`PoolOptions::whole_groups`] they are one batch.
    #[must_use]
    pub fn submit(&self, calls: Vec<String>) -> Vec<PendingCall> {
        let (queued, pending): (Vec<_>, Vec<_>) = calls.into_iter().map(queued).unzip();
        if self.state.mode.whole_groups {
            let group = CallGroup { calls: queued, alone: true };
            self.enqueue((!group.calls.is_empty()).then_some(group));
        } else {
            self.enqueue(queued.into_iter().map(|call| CallGroup { calls: vec![call], alone: false }));
        }
        pending
    }

    fn enqueue(&self, groups: impl IntoIterator<Item = CallGroup>) {
        let mut queue = lock(&self.state.queue);
        let before = queue.len();
        queue.extend(groups);
        let added = queue.len() - before;
        drop(queue);
        for _ in 0..added.min(self.state.workers) {
            self.state.filled.notify_one();
        }
    }

    /// How many workers ended in a batch and were replaced: killed, crashed, or out of memory.
    #[must_use]
    pub fn replaced(&self) -> u64 {
        self.state.replaced.load(Ordering::Relaxed)
    }

    /// Process ids now: of the fork server, then of the workers.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let workers = lock(&self.state.pids);
        let workers = workers.iter().filter_map(|pid| u32::try_from(*pid).ok().filter(|pid| *pid != 0));
        std::iter::once(self.state.spawner.pid()).chain(workers).collect()
    }
}

/// A call for the queue, and its other half for the caller.
pub(super) fn queued(arguments: String) -> (QueuedCall, PendingCall) {
    let ((send_reply, reply), (send_started, started)) = (oneshot::channel(), oneshot::channel());
    let call = QueuedCall { arguments, reply: send_reply, started: Some(send_started), deaths: 0 };
    (call, PendingCall { started, reply })
}

impl PendingCall {
    /// Waits until a worker has the call, or the call has failed before.
    pub async fn started(&mut self) {
        // An error means that no worker got the call; its result is the reason.
        let _ = (&mut self.started).await;
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// The call failed, or the pool was dropped.
    pub async fn result(self) -> Result<Value, CallError> {
        let dropped = || CallError::Failed { reason: "the run ended".to_owned() };
        self.reply.await.unwrap_or_else(|_| Err(dropped()))
    }
}

impl Drop for ProcessPool {
    fn drop(&mut self) {
        self.slots.iter().for_each(JoinHandle::abort);
        self.state.spawner.end();
        // The callers learn of it by the closed channels.
        lock(&self.state.queue).clear();
    }
}

/// Keeps one worker alive and busy.
async fn slot(state: Arc<PoolState>, number: usize) {
    let mut idle: Option<PythonWorker> = None;
    loop {
        if idle.is_none() {
            // Before there are calls, so that they need not wait. If it fails, it is tried again when there are.
            idle = state.worker(number).await.ok();
        }
        let calls = match &mut idle {
            Some(worker) => tokio::select! {
                calls = state.take() => calls,
                () = worker.unusable() => {
                    idle = None;
                    lock(&state.pids)[number] = 0;
                    continue;
                }
            },
            None => state.take().await,
        };
        let worker = match idle.take() {
            Some(worker) => worker,
            None => match state.worker(number).await {
                Ok(worker) => worker,
                Err(reason) => {
                    calls.into_iter().for_each(|call| call.fail(reason.clone()));
                    continue;
                }
            },
        };
        let (pid, count, started) = (worker.pid(), calls.len(), Instant::now());
        let (kept, repeated) = run(worker, calls, state.mode).await;
        state.record_time(started.elapsed(), count);
        state.requeue(repeated);
        match kept {
            Ok(worker) => idle = Some(worker),
            Err(why) => {
                lock(&state.pids)[number] = 0;
                state.replaced.fetch_add(1, Ordering::Relaxed);
                let line = format!("rlrun: worker {pid} is replaced: {why}\n");
                state.spawner.setup().log.append(line.as_bytes());
            }
        }
    }
}

impl PoolState {
    /// Waits for calls that fit into one batch, and takes them. Nothing is taken if the future is dropped.
    async fn take(&self) -> Vec<QueuedCall> {
        loop {
            let filled = self.filled.notified();
            if let Some(calls) = self.pop() {
                return calls;
            }
            filled.await;
        }
    }

    fn pop(&self) -> Option<Vec<QueuedCall>> {
        let mut queue = lock(&self.queue);
        // Calls whose callers have stopped waiting are dropped.
        queue.retain(|group| group.calls.iter().any(|call| !call.reply.is_closed()));
        // The workers share the queue.
        let share = queue.len().div_ceil(self.workers).min(self.max_batch).min(self.short_batch());
        let first = queue.pop_front()?;
        let together = !first.alone && !self.mode.whole_groups;
        let mut calls = first.calls;
        let mut bytes: usize = calls.iter().map(|call| call.arguments.len()).sum();
        while together && calls.len() < share {
            let fits =
                |group: &CallGroup| !group.alone && bytes + group.calls[0].arguments.len() <= BATCH_BYTES;
            let Some(mut group) = queue.pop_front_if(|group| fits(group)) else { break };
            bytes += group.calls[0].arguments.len();
            calls.append(&mut group.calls);
        }
        drop(queue);
        for started in calls.iter_mut().filter_map(|call| call.started.take()) {
            // The caller may have stopped waiting.
            let _ = started.send(());
        }
        Some(calls)
    }

    /// Most calls of a batch that ends soon: another worker may be idle before a long one ends.
    fn short_batch(&self) -> usize {
        if self.mode.concurrent {
            return usize::MAX;
        }
        let call_ns = self.call_ns.load(Ordering::Relaxed).max(1);
        // One call for a whole batch has one timeout: the batch should take half of it.
        let half = u64::try_from(self.mode.timeout.as_nanos() / 2).unwrap_or(u64::MAX);
        let time = if self.mode.batch { half } else { BATCH_NS };
        usize::try_from(time / call_ns).unwrap_or(usize::MAX).max(1)
    }

    /// Updates the moving average of the time of a call; the newest batch counts half.
    fn record_time(&self, time: Duration, calls: usize) {
        let each = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) / calls.max(1) as u64;
        let known = self.call_ns.load(Ordering::Relaxed);
        self.call_ns.store(known / 2 + each / 2, Ordering::Relaxed);
    }

    /// Puts calls at the front of the queue, in their order.
    fn requeue(&self, groups: Vec<CallGroup>) {
        for group in groups.into_iter().rev() {
            lock(&self.queue).push_front(group);
            self.filled.notify_one();
        }
    }

    /// A new worker, and a new fork server if there is none.
    async fn worker(&self, number: usize) -> Result<PythonWorker, String> {
        let worker = self.spawner.worker().await?;
        lock(&self.pids)[number] = worker.pid();
        Ok(worker)
    }
}
