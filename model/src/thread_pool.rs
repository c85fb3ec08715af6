//! Thread pools over the cores of a process, which all roles share.
//!
//! A role (sampler, trainer) computes through its [`ThreadPool`]: the calling thread and one worker thread per idle core.
//! While sampler and trainer are both busy, each uses one core; while one is idle, the other uses all cores. A core runs
//! one thread at a time, so the process is never oversubscribed.
//!
//! # Invariants
//! - Results do not depend on the number of threads: the caller cuts the parts, and results come back in their order.
//! - A caller never waits for a worker that has not started: the caller computes the remaining parts itself. A worker that
//!   the system does not schedule slows a computation down and never blocks it.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Time that a thread spins, for a job or for the end of one, before it sleeps: about the cost of waking it up.
const SPIN: Duration = Duration::from_micros(30);

/// The cores of a process, with one worker thread for each but the first. The threads end with the last clone of the `Arc`.
#[derive(Debug)]
pub struct SharedCores {
    total: usize,
    /// Cores in use.
    busy: AtomicUsize,
    queue: Arc<JobQueue>,
}

/// Jobs that are offered to the workers.
#[derive(Debug, Default)]
struct JobQueue {
    jobs: Mutex<VecDeque<Arc<PoolJob>>>,
    /// Length of `jobs`, readable without the lock.
    waiting: AtomicUsize,
    changed: Condvar,
    closed: AtomicBool,
}

impl SharedCores {
    /// `total` cores, at least 1: the callers' threads and `total - 1` workers.
    #[must_use]
    pub fn new(total: usize) -> Arc<Self> {
        let queue = Arc::new(JobQueue::default());
        for index in 1..total {
            let queue = Arc::clone(&queue);
            // Without the thread the callers compute its share.
            let worker = std::thread::Builder::new().name(format!("compute-{index}"));
            drop(worker.spawn(move || queue.serve()));
        }
        Arc::new(Self { total: total.max(1), busy: AtomicUsize::new(0), queue })
    }

    /// All cores that the system lets this process use.
    #[must_use]
    pub fn all() -> Arc<Self> {
        Self::new(available_cores())
    }

    /// Number of cores.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// Marks the caller's `own` cores and up to `wanted` idle ones as in use.
    fn claim(&self, own: usize, wanted: usize) -> ClaimedCores<'_> {
        let mut extra = 0;
        let update = |busy: usize| {
            extra = wanted.min(self.total.saturating_sub(busy + own));
            Some(busy + own + extra)
        };
        // The closure never refuses.
        let _before = self.busy.fetch_update(Ordering::AcqRel, Ordering::Acquire, update);
        ClaimedCores { cores: self, taken: own + extra, extra }
    }
}

impl Drop for SharedCores {
    fn drop(&mut self) {
        self.queue.closed.store(true, Ordering::Release);
        let _jobs = self.queue.lock();
        self.queue.changed.notify_all();
    }
}

/// Number of cores that the system lets this process use; of an Apple processor the fast ones, since work is divided into equal parts.
#[must_use]
pub fn available_cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| {
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if !cfg!(target_os = "macos") {
            return all;
        }
        let asked = Command::new("/usr/sbin/sysctl").args(["-n", "hw.perflevel0.logicalcpu"]).output();
        let fast = asked.ok().and_then(|asked| String::from_utf8(asked.stdout).ok()?.trim().parse().ok());
        fast.map_or(all, |fast: usize| fast.clamp(1, all))
    })
}

/// Cores in use until this is dropped.
#[derive(Debug)]
struct ClaimedCores<'a> {
    cores: &'a SharedCores,
    taken: usize,
    extra: usize,
}

impl Drop for ClaimedCores<'_> {
    fn drop(&mut self) {
        self.cores.busy.fetch_sub(self.taken, Ordering::AcqRel);
    }
}

/// The thread pool of one role: the calling thread and workers on idle cores.
#[derive(Debug)]
pub struct ThreadPool {
    /// `None` for the calling thread alone.
    cores: Option<Arc<SharedCores>>,
    max_threads: usize,
    /// Whether one core stays in use between two computations.
    reserved: AtomicBool,
}

/// Keeps one core in use for a role until it is dropped.
#[derive(Debug)]
pub struct CoreReservation {
    pool: Arc<ThreadPool>,
    /// Whether this is the outermost reservation; nested ones have no effect.
    outermost: bool,
}

impl Drop for CoreReservation {
    fn drop(&mut self) {
        if self.outermost {
            self.pool.reserved.store(false, Ordering::Release);
            if let Some(cores) = &self.pool.cores {
                cores.busy.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

impl ThreadPool {
    /// A pool of the calling thread alone.
    #[must_use]
    pub fn single() -> Self {
        Self { cores: None, max_threads: 1, reserved: AtomicBool::new(false) }
    }

    /// A pool of at most `max_threads` threads at a time, on idle cores of `cores`.
    #[must_use]
    pub fn new(cores: &Arc<SharedCores>, max_threads: usize) -> Self {
        let max_threads = max_threads.max(1);
        Self { cores: Some(Arc::clone(cores)), max_threads, reserved: AtomicBool::new(false) }
    }

    /// Most threads that compute at a time.
    #[must_use]
    pub fn max_threads(&self) -> usize {
        self.max_threads
    }

    /// Keeps one core in use until the guard is dropped, so that another role does not take it between two computations
    /// that follow each other closely.
    #[must_use]
    pub fn reserve_core(self: &Arc<Self>) -> CoreReservation {
        let outermost = !self.reserved.swap(true, Ordering::AcqRel);
        if let Some(cores) = self.cores.as_ref().filter(|_| outermost) {
            cores.busy.fetch_add(1, Ordering::AcqRel);
        }
        CoreReservation { pool: Arc::clone(self), outermost }
    }

    /// Threads that a computation would use now, at least 1: the number of parts to cut it into.
    #[must_use]
    pub fn threads(&self) -> usize {
        let Some(cores) = &self.cores else { return 1 };
        let own = usize::from(self.reserved.load(Ordering::Acquire));
        let others = cores.busy.load(Ordering::Acquire).saturating_sub(own);
        self.max_threads.min(cores.total.saturating_sub(others)).max(1)
    }

    /// Parallel map: runs `work` on every part, on this thread and on idle cores. Results are in the order of the parts.
    ///
    /// # Panics
    /// If `work` panics.
    pub fn map<P: Send, R: Send>(&self, parts: Vec<P>, work: impl Fn(P) -> R + Sync) -> Vec<R> {
        let Some(cores) = self.cores.as_ref().filter(|_| self.max_threads > 1 && parts.len() > 1) else {
            return parts.into_iter().map(work).collect();
        };
        let own = usize::from(!self.reserved.load(Ordering::Acquire));
        let claim = cores.claim(own, (self.max_threads - 1).min(parts.len() - 1));
        if claim.extra == 0 {
            return parts.into_iter().map(work).collect();
        }
        let results = Mutex::new(Vec::with_capacity(parts.len()));
        let parts = Mutex::new(parts.into_iter().enumerate());
        // The lock is free while a part is computed.
        let next = || lock(&parts).next();
        let take_parts = || {
            while let Some((index, part)) = next() {
                let result = work(part);
                lock(&results).push((index, result));
            }
        };
        cores.queue.run(&take_parts, claim.extra);
        let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.sort_unstable_by_key(|(index, _)| *index);
        results.into_iter().map(|(_, result)| result).collect()
    }
}

/// A closure that several threads run at the same time.
struct PoolJob {
    /// The caller's closure. The caller returns after `state` is closed and no worker is active.
    work: *const (dyn Fn() + Sync),
    state: Mutex<JobState>,
    /// Workers that run the closure, readable without the lock.
    active: AtomicUsize,
    done: Condvar,
}

#[derive(Default)]
struct JobState {
    closed: bool,
    active: usize,
    panic: Option<Box<dyn Any + Send>>,
}

#[expect(unsafe_code, reason = "`work` points to a Sync closure and is called only while the caller waits")]
unsafe impl Send for PoolJob {}
#[expect(unsafe_code, reason = "`work` points to a Sync closure and is called only while the caller waits")]
unsafe impl Sync for PoolJob {}

impl std::fmt::Debug for PoolJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolJob").field("active", &self.active).finish_non_exhaustive()
    }
}

impl PoolJob {
    /// Runs the closure on a worker, if the job is not closed.
    fn help(&self) {
        {
            let mut state = lock(&self.state);
            if state.closed {
                return;
            }
            state.active += 1;
            self.active.store(state.active, Ordering::Release);
        }
        #[expect(unsafe_code, reason = "the job is not closed, so the caller waits for this thread")]
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*self.work)() }));
        let mut state = lock(&self.state);
        if let Err(panic) = result {
            state.panic = Some(panic);
        }
        state.active -= 1;
        self.active.store(state.active, Ordering::Release);
        self.done.notify_one();
    }

    /// Closes the job to workers that have not started it and joins those that have.
    fn close(&self) -> Option<Box<dyn Any + Send>> {
        lock(&self.state).closed = true;
        let start = Instant::now();
        while self.active.load(Ordering::Acquire) > 0 && start.elapsed() < SPIN {
            std::hint::spin_loop();
        }
        let mut state = lock(&self.state);
        // No deadline is needed: a worker runs a finite computation that waits for nothing.
        while state.active > 0 {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.panic.take()
    }
}

impl JobQueue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<PoolJob>>> {
        lock(&self.jobs)
    }

    /// Runs `work` on this thread and offers it to `workers` others.
    fn run(&self, work: &(dyn Fn() + Sync), workers: usize) {
        #[expect(unsafe_code, reason = "only the lifetime changes, and `close` returns after the last use")]
        let work_of_job: *const (dyn Fn() + Sync) =
            unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(work) };
        let job = Arc::new(PoolJob {
            work: work_of_job,
            state: Mutex::default(),
            active: AtomicUsize::new(0),
            done: Condvar::new(),
        });
        {
            let mut jobs = self.lock();
            jobs.extend(std::iter::repeat_n(&job, workers).cloned());
            self.waiting.store(jobs.len(), Ordering::Release);
            self.changed.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(work));
        let others = job.close();
        self.withdraw(&job);
        if let Some(panic) = own.err().or(others) {
            resume_unwind(panic);
        }
    }

    /// Removes the offers that no worker has accepted.
    fn withdraw(&self, job: &Arc<PoolJob>) {
        let mut jobs = self.lock();
        jobs.retain(|other| !Arc::ptr_eq(other, job));
        self.waiting.store(jobs.len(), Ordering::Release);
    }

    /// The main loop of a worker.
    fn serve(&self) {
        let mut since = Instant::now();
        while !self.closed.load(Ordering::Acquire) {
            if self.waiting.load(Ordering::Acquire) == 0 && since.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            let mut jobs = self.lock();
            let Some(job) = jobs.pop_front() else {
                if !self.closed.load(Ordering::Acquire) {
                    drop(self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner));
                }
                continue;
            };
            self.waiting.store(jobs.len(), Ordering::Release);
            drop(jobs);
            job.help();
            since = Instant::now();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread::ThreadId;

    use super::*;

    fn threads_of(pool: &ThreadPool, parts: usize) -> HashSet<ThreadId> {
        // Parts are long enough for every worker to take one.
        let seen = pool.map((0..parts).collect(), |_| {
            std::thread::sleep(Duration::from_millis(20));
            std::thread::current().id()
        });
        seen.into_iter().collect()
    }

    #[test]
    fn every_part_has_one_result_in_order() {
        let cores = SharedCores::new(4);
        for max_threads in 1..6 {
            let pool = ThreadPool::new(&cores, max_threads);
            for n in 0..50 {
                let squares = pool.map((0..n).collect(), |i: usize| i * i);
                assert_eq!(squares, (0..n).map(|i| i * i).collect::<Vec<_>>());
            }
        }
        assert_eq!(cores.busy.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_core_in_use_is_not_given_to_another_pool() {
        let cores = SharedCores::new(3);
        let (sampler, trainer) = (Arc::new(ThreadPool::new(&cores, 3)), Arc::new(ThreadPool::new(&cores, 2)));
        assert_eq!((sampler.threads(), trainer.threads()), (3, 2));
        assert_eq!(threads_of(&sampler, 6).len(), 3);
        assert_eq!(threads_of(&trainer, 6).len(), 2);
        let sampling = sampler.reserve_core();
        assert_eq!((sampler.threads(), trainer.threads()), (3, 2));
        let training = trainer.reserve_core();
        assert_eq!((sampler.threads(), trainer.threads()), (2, 2));
        assert_eq!(threads_of(&sampler, 6).len(), 2);
        drop(training);
        assert_eq!(threads_of(&sampler, 6).len(), 3);
        drop(sampling);
        assert_eq!(cores.busy.load(Ordering::Relaxed), 0);
        assert_eq!(threads_of(&ThreadPool::single(), 6).len(), 1);
    }

    #[test]
    fn two_roles_at_once_finish() {
        let cores = SharedCores::new(3);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let pool = ThreadPool::new(&cores, 3);
                    for n in 0..200 {
                        let sum: usize = pool.map((0..n).collect(), |i: usize| i).into_iter().sum();
                        assert_eq!(sum, (0..n).sum::<usize>());
                    }
                });
            }
        });
        assert_eq!(cores.busy.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_frees_all_cores() {
        let cores = SharedCores::new(2);
        let pool = ThreadPool::new(&cores, 2);
        for bad in [0, 7] {
            let run = || pool.map((0..8).collect(), |i: usize| assert_ne!(i, bad, "part {i}"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            assert_eq!(cores.busy.load(Ordering::Relaxed), 0);
            assert_eq!(pool.map(vec![1, 2, 3], |i: usize| i + 1), [2, 3, 4]);
        }
    }
}
