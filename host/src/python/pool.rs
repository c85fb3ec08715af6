//! The queue of a reward and the workers that empty it.
//!
//! Invariant: a job that was put in is answered, whatever processes do meanwhile, or its asker is gone. The queue has no
//! bound of its own: its jobs are those of askers that wait, so whoever limits them bounds it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::call::{Job, Rules, Unit, Worker, run};
use super::zygote::{Setup, Zygote, lock};

/// Parents that may be started in [`RESTART_WINDOW`] after one died.
const RESTARTS: usize = 5;
/// Time over which they are counted.
const RESTART_WINDOW: Duration = Duration::from_secs(60);
/// Workers that may fail to start before those who wait for one are told.
const STARTS: u32 = 3;
/// Items of one call are together this long, in bytes, if they are several.
const CALL_BYTES: usize = 8 << 20;

/// Nanoseconds that a call of several items one after the other should take.
const CALL_NS: u64 = 100_000_000;

/// Workers of one reward.
#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    slots: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    setup: Arc<Setup>,
    rules: Rules,
    workers: usize,
    /// Most items of a call.
    batch: usize,
    queue: Mutex<VecDeque<Unit>>,
    filled: Notify,
    parent: Mutex<Arc<Zygote>>,
    /// When parents were started again. Held while one is: everybody waits for the same one.
    restarts: tokio::sync::Mutex<VecDeque<Instant>>,
    /// Process ids of the workers, 0 for none; for tests and for people.
    pids: Mutex<Vec<i32>>,
    /// Workers that ended in a call.
    replaced: AtomicU64,
    /// Nanoseconds that an item took lately, where they are called one after the other.
    item_ns: AtomicU64,
    closed: AtomicBool,
}

impl Pool {
    /// Starts `workers` processes under a parent that is there already.
    pub(super) fn start(
        setup: Arc<Setup>,
        parent: Zygote,
        rules: Rules,
        workers: usize,
        batch: usize,
    ) -> Self {
        let runtime = setup.runtime.clone();
        let shared = Arc::new(Shared {
            setup,
            rules,
            workers,
            batch,
            queue: Mutex::default(),
            filled: Notify::new(),
            parent: Mutex::new(Arc::new(parent)),
            restarts: tokio::sync::Mutex::default(),
            pids: Mutex::new(vec![0; workers]),
            replaced: AtomicU64::new(0),
            item_ns: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        let slots = (0..workers).map(|number| runtime.spawn(slot(Arc::clone(&shared), number))).collect();
        Self { shared, slots }
    }

    /// Puts jobs last in line.
    pub(super) fn enqueue(&self, units: impl IntoIterator<Item = Unit>) {
        let mut queue = lock(&self.shared.queue);
        let before = queue.len();
        queue.extend(units);
        let added = queue.len() - before;
        drop(queue);
        for _ in 0..added.min(self.shared.workers) {
            self.shared.filled.notify_one();
        }
    }

    /// Workers that ended in a call, by themselves or because they had to.
    pub(super) fn replaced(&self) -> u64 {
        self.shared.replaced.load(Ordering::Relaxed)
    }

    /// Process ids: the parent first, then the workers that are there now.
    pub(super) fn processes(&self) -> Vec<u32> {
        let workers = lock(&self.shared.pids);
        let workers = workers.iter().filter_map(|pid| u32::try_from(*pid).ok().filter(|pid| *pid != 0));
        std::iter::once(lock(&self.shared.parent).pid()).chain(workers).collect()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        self.shared.setup.closed.store(true, Ordering::Relaxed);
        self.slots.iter().for_each(JoinHandle::abort);
        let parent = Arc::clone(&lock(&self.shared.parent));
        parent.end();
        // Their askers learn of it by the closed channels.
        lock(&self.shared.queue).clear();
    }
}

/// Keeps one worker alive and busy.
async fn slot(shared: Arc<Shared>, number: usize) {
    let mut held: Option<Worker> = None;
    loop {
        if held.is_none() {
            // Before there is work, so that the work need not wait. If that fails, it is tried again when there is.
            held = shared.worker(number).await.ok();
        }
        let jobs = match &mut held {
            Some(worker) => tokio::select! {
                jobs = shared.take() => jobs,
                () = worker.gone() => {
                    held = None;
                    lock(&shared.pids)[number] = 0;
                    continue;
                }
            },
            None => shared.take().await,
        };
        let worker = match held.take() {
            Some(worker) => worker,
            None => match shared.worker(number).await {
                Ok(worker) => worker,
                Err(reason) => {
                    jobs.into_iter().for_each(|job| job.fail(reason.clone()));
                    continue;
                }
            },
        };
        let (pid, count, begun) = (worker.pid(), jobs.len(), Instant::now());
        let (kept, again) = run(worker, jobs, shared.rules).await;
        shared.took(begun.elapsed(), count);
        shared.put_back(again);
        match kept {
            Ok(worker) => held = Some(worker),
            Err(why) => {
                lock(&shared.pids)[number] = 0;
                shared.replaced.fetch_add(1, Ordering::Relaxed);
                let line = format!("rlrun: worker {pid} is replaced: {why}\n");
                shared.setup.log.append(line.as_bytes());
            }
        }
    }
}

impl Shared {
    /// Waits for jobs that fit into one call, and takes them. Nothing is taken if the future is dropped.
    async fn take(&self) -> Vec<Job> {
        loop {
            let filled = self.filled.notified();
            if let Some(jobs) = self.pop() {
                return jobs;
            }
            filled.await;
        }
    }

    fn pop(&self) -> Option<Vec<Job>> {
        let mut queue = lock(&self.queue);
        // Nobody waits for them any more.
        queue.retain(|unit| unit.jobs.iter().any(|job| !job.reply.is_closed()));
        // What waits is shared among the workers.
        let share = queue.len().div_ceil(self.workers).min(self.batch).min(self.at_once());
        let first = queue.pop_front()?;
        let together = !first.alone && !self.rules.group;
        let mut jobs = first.jobs;
        let mut bytes: usize = jobs.iter().map(|job| job.item.len()).sum();
        while together && jobs.len() < share {
            let fits = |unit: &Unit| !unit.alone && bytes + unit.jobs[0].item.len() <= CALL_BYTES;
            let Some(mut unit) = queue.pop_front_if(|unit| fits(unit)) else { break };
            bytes += unit.jobs[0].item.len();
            jobs.append(&mut unit.jobs);
        }
        drop(queue);
        for began in jobs.iter_mut().filter_map(|job| job.began.take()) {
            // Whoever asked may have stopped waiting.
            let _ = began.send(());
        }
        Some(jobs)
    }

    /// Items of a call that will be over soon: another worker may be idle before a long one is.
    fn at_once(&self) -> usize {
        if self.rules.concurrent {
            return usize::MAX;
        }
        let item_ns = self.item_ns.load(Ordering::Relaxed).max(1);
        // A batch has one timeout for all of its items: as many as take half of it.
        let half = u64::try_from(self.rules.timeout.as_nanos() / 2).unwrap_or(u64::MAX);
        let time = if self.rules.batch { half } else { CALL_NS };
        usize::try_from(time / item_ns).unwrap_or(usize::MAX).max(1)
    }

    /// Remembers how long items take: a mean that halves what it knew before.
    fn took(&self, time: Duration, items: usize) {
        let each = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) / items.max(1) as u64;
        let known = self.item_ns.load(Ordering::Relaxed);
        self.item_ns.store(known / 2 + each / 2, Ordering::Relaxed);
    }

    /// Puts jobs first in line, in their order.
    fn put_back(&self, units: Vec<Unit>) {
        for unit in units.into_iter().rev() {
            lock(&self.queue).push_front(unit);
            self.filled.notify_one();
        }
    }

    /// A new worker; a new parent too, if there is none to fork it.
    async fn worker(&self, number: usize) -> Result<Worker, String> {
        let mut failures = 0;
        loop {
            let parent = self.parent().await?;
            match Worker::start(&parent).await {
                Ok(worker) => {
                    lock(&self.pids)[number] = worker.pid();
                    return Ok(worker);
                }
                Err(reason) if parent.alive() => {
                    failures += 1;
                    if failures == STARTS {
                        return Err(reason);
                    }
                }
                // Bounded by the restarts.
                Err(_) => {}
            }
        }
    }

    async fn parent(&self) -> Result<Arc<Zygote>, String> {
        let mut restarts = self.restarts.lock().await;
        let parent = Arc::clone(&lock(&self.parent));
        if parent.alive() {
            return Ok(parent);
        }
        drop(parent);
        let now = Instant::now();
        restarts.retain(|then| now.duration_since(*then) < RESTART_WINDOW);
        if restarts.len() >= RESTARTS {
            return Err(format!(
                "the parent process of its workers died {} times within {} s; {} says more",
                RESTARTS + 1,
                RESTART_WINDOW.as_secs(),
                self.setup.log.path().display()
            ));
        }
        restarts.push_back(now);
        let setup = Arc::clone(&self.setup);
        let started = tokio::task::spawn_blocking(move || Zygote::start(&setup)).await;
        let parent = Arc::new(started.map_err(|_| "the run ended".to_owned())??);
        // What was not seen by the drop of the pool is ended by the drop of the parent.
        if self.closed.load(Ordering::Relaxed) {
            return Err("the run ended".to_owned());
        }
        *lock(&self.parent) = Arc::clone(&parent);
        Ok(parent)
    }
}
