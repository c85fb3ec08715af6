//! The cores that computation may use, shared by all roles of a process.
//!
//! A role (sampler, trainer) computes through its [`Team`]: its own thread, and helper threads for as many cores as
//! nobody else is using at that moment. While sampler and trainer are both busy each has its own core; while one waits,
//! the other has them all. No core is promised to anybody twice, so nothing is oversubscribed.
//!
//! # Invariants
//! - Results do not depend on how many threads took part: parts are cut by the caller and come back in their order.
//! - A caller never waits for a helper that has not begun: parts that nobody took are its own. A helper that the system
//!   does not let run costs its share and no more.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a thread looks for work, or for the end of it, before it sleeps: about what waking it up would cost.
const SPIN: Duration = Duration::from_micros(30);

/// A number of cores and the helper threads for them. The threads end with the last clone of the `Arc`.
#[derive(Debug)]
pub struct Cores {
    total: usize,
    /// Cores that somebody is using.
    busy: AtomicUsize,
    queue: Arc<Queue>,
}

/// What helpers wait at.
#[derive(Debug, Default)]
struct Queue {
    jobs: Mutex<VecDeque<Arc<Job>>>,
    /// Length of `jobs`, to look at without the lock.
    waiting: AtomicUsize,
    changed: Condvar,
    closed: AtomicBool,
}

impl Cores {
    /// `total` cores, at least 1: the callers' own threads and `total - 1` helpers.
    #[must_use]
    pub fn new(total: usize) -> Arc<Self> {
        let queue = Arc::new(Queue::default());
        for index in 1..total {
            let queue = Arc::clone(&queue);
            // A system that gives no thread leaves the work to the callers.
            let helper = std::thread::Builder::new().name(format!("compute-{index}"));
            drop(helper.spawn(move || queue.serve()));
        }
        Arc::new(Self { total: total.max(1), busy: AtomicUsize::new(0), queue })
    }

    /// As many as the system lets this process use.
    #[must_use]
    pub fn all() -> Arc<Self> {
        Self::new(available())
    }

    /// Number of cores.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// Takes up to `wanted` cores that nobody uses beside the `own` of the caller, which are taken in any case.
    fn claim(&self, own: usize, wanted: usize) -> Claim<'_> {
        let mut extra = 0;
        let update = |busy: usize| {
            extra = wanted.min(self.total.saturating_sub(busy + own));
            Some(busy + own + extra)
        };
        // The closure never refuses.
        let _before = self.busy.fetch_update(Ordering::AcqRel, Ordering::Acquire, update);
        Claim { cores: self, taken: own + extra, extra }
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        self.queue.closed.store(true, Ordering::Release);
        let _jobs = self.queue.lock();
        self.queue.changed.notify_all();
    }
}

/// Number of cores that the system lets this process use.
#[must_use]
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Cores in use until it is dropped.
#[derive(Debug)]
struct Claim<'a> {
    cores: &'a Cores,
    taken: usize,
    extra: usize,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.cores.busy.fetch_sub(self.taken, Ordering::AcqRel);
    }
}

/// The share of one role: its own thread and helpers.
#[derive(Debug)]
pub struct Team {
    /// `None` for the calling thread alone.
    cores: Option<Arc<Cores>>,
    most: usize,
    /// Whether the role counts as using a core all the time.
    present: AtomicBool,
}

/// A role's own core, in use until this is dropped.
#[derive(Debug)]
pub struct Presence {
    team: Arc<Team>,
    /// Whether this one marked it; another that is inside of it changes nothing.
    first: bool,
}

impl Drop for Presence {
    fn drop(&mut self) {
        if self.first {
            self.team.present.store(false, Ordering::Release);
            if let Some(cores) = &self.team.cores {
                cores.busy.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

impl Team {
    /// The calling thread and nobody else.
    #[must_use]
    pub fn alone() -> Self {
        Self { cores: None, most: 1, present: AtomicBool::new(false) }
    }

    /// A role that uses at most `most` of `cores` at a time.
    #[must_use]
    pub fn new(cores: &Arc<Cores>, most: usize) -> Self {
        Self { cores: Some(Arc::clone(cores)), most: most.max(1), present: AtomicBool::new(false) }
    }

    /// Most threads that work at a time.
    #[must_use]
    pub fn most(&self) -> usize {
        self.most
    }

    /// Marks the role's own core as in use until the guard is dropped: between two pieces of work that follow each other
    /// closely, nobody else should begin to use it.
    #[must_use]
    pub fn present(self: &Arc<Self>) -> Presence {
        let first = !self.present.swap(true, Ordering::AcqRel);
        if let Some(cores) = self.cores.as_ref().filter(|_| first) {
            cores.busy.fetch_add(1, Ordering::AcqRel);
        }
        Presence { team: Arc::clone(self), first }
    }

    /// Threads that would work now, at least 1: into how many parts it pays to cut.
    #[must_use]
    pub fn threads(&self) -> usize {
        let Some(cores) = &self.cores else { return 1 };
        let own = usize::from(self.present.load(Ordering::Acquire));
        let others = cores.busy.load(Ordering::Acquire).saturating_sub(own);
        self.most.min(cores.total.saturating_sub(others)).max(1)
    }

    /// Runs `work` on every part, on this thread and on free cores. Results are in the order of the parts.
    ///
    /// # Panics
    /// If `work` does.
    pub fn map<P: Send, R: Send>(&self, parts: Vec<P>, work: impl Fn(P) -> R + Sync) -> Vec<R> {
        let Some(cores) = self.cores.as_ref().filter(|_| self.most > 1 && parts.len() > 1) else {
            return parts.into_iter().map(work).collect();
        };
        let own = usize::from(!self.present.load(Ordering::Acquire));
        let claim = cores.claim(own, (self.most - 1).min(parts.len() - 1));
        if claim.extra == 0 {
            return parts.into_iter().map(work).collect();
        }
        let slots: Vec<Mutex<Slot<P, R>>> = parts.into_iter().map(|p| Mutex::new(Slot::Waiting(p))).collect();
        let next = AtomicUsize::new(0);
        let take_parts = || {
            while let Some(slot) = slots.get(next.fetch_add(1, Ordering::Relaxed)) {
                let taken = std::mem::replace(&mut *lock(slot), Slot::Taken);
                if let Slot::Waiting(part) = taken {
                    let result = work(part);
                    *lock(slot) = Slot::Done(result);
                }
            }
        };
        cores.queue.run(&take_parts, claim.extra);
        let done = slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner));
        done.map(|slot| match slot {
            Slot::Done(result) => result,
            Slot::Waiting(_) | Slot::Taken => unreachable!("every part was taken and a panic was passed on"),
        })
        .collect()
    }
}

/// A part on its way to its result.
enum Slot<P, R> {
    Waiting(P),
    Taken,
    Done(R),
}

/// Work that several threads do together.
struct Job {
    /// The closure of the caller, who does not return before `state` is closed and nobody is active.
    work: *const (dyn Fn() + Sync),
    state: Mutex<JobState>,
    /// Helpers at work, to look at without the lock.
    active: AtomicUsize,
    done: Condvar,
}

#[derive(Default)]
struct JobState {
    closed: bool,
    active: usize,
    panic: Option<Box<dyn Any + Send>>,
}

#[expect(unsafe_code, reason = "`work` points to a Sync closure and is called only while its owner waits")]
unsafe impl Send for Job {}
#[expect(unsafe_code, reason = "`work` points to a Sync closure and is called only while its owner waits")]
unsafe impl Sync for Job {}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("active", &self.active).finish_non_exhaustive()
    }
}

impl Job {
    /// A helper's turn.
    fn help(&self) {
        {
            let mut state = lock(&self.state);
            if state.closed {
                return;
            }
            state.active += 1;
            self.active.store(state.active, Ordering::Release);
        }
        #[expect(unsafe_code, reason = "the job is not closed, so its owner waits for this thread")]
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*self.work)() }));
        let mut state = lock(&self.state);
        if let Err(panic) = result {
            state.panic = Some(panic);
        }
        state.active -= 1;
        self.active.store(state.active, Ordering::Release);
        self.done.notify_one();
    }

    /// Lets nobody begin any more, and waits for those who have.
    fn close(&self) -> Option<Box<dyn Any + Send>> {
        lock(&self.state).closed = true;
        let start = Instant::now();
        while self.active.load(Ordering::Acquire) > 0 && start.elapsed() < SPIN {
            std::hint::spin_loop();
        }
        let mut state = lock(&self.state);
        // Deadline and name: a helper runs a finite part of a computation and nothing that waits for anybody.
        while state.active > 0 {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.panic.take()
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Job>>> {
        lock(&self.jobs)
    }

    /// Calls `work` on this thread and offers it to `helpers` others.
    fn run(&self, work: &(dyn Fn() + Sync), helpers: usize) {
        #[expect(unsafe_code, reason = "only the lifetime changes, and `close` outwaits every use")]
        let work_of_job: *const (dyn Fn() + Sync) =
            unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(work) };
        let job = Arc::new(Job {
            work: work_of_job,
            state: Mutex::default(),
            active: AtomicUsize::new(0),
            done: Condvar::new(),
        });
        {
            let mut jobs = self.lock();
            jobs.extend(std::iter::repeat_n(&job, helpers).cloned());
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

    /// Takes back offers that nobody has taken up.
    fn withdraw(&self, job: &Arc<Job>) {
        let mut jobs = self.lock();
        jobs.retain(|other| !Arc::ptr_eq(other, job));
        self.waiting.store(jobs.len(), Ordering::Release);
    }

    /// The life of a helper.
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

    fn threads_of(team: &Team, parts: usize) -> HashSet<ThreadId> {
        // Parts long enough that every thread that may help does.
        let seen = team.map((0..parts).collect(), |_| {
            std::thread::sleep(Duration::from_millis(20));
            std::thread::current().id()
        });
        seen.into_iter().collect()
    }

    #[test]
    fn results_come_in_order_and_once() {
        let cores = Cores::new(4);
        for most in 1..6 {
            let team = Team::new(&cores, most);
            for n in 0..50 {
                let squares = team.map((0..n).collect(), |i: usize| i * i);
                assert_eq!(squares, (0..n).map(|i| i * i).collect::<Vec<_>>());
            }
        }
        assert_eq!(cores.busy.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_core_in_use_is_nobody_elses() {
        let cores = Cores::new(3);
        let (sampler, trainer) = (Arc::new(Team::new(&cores, 3)), Arc::new(Team::new(&cores, 2)));
        assert_eq!((sampler.threads(), trainer.threads()), (3, 2));
        assert_eq!(threads_of(&sampler, 6).len(), 3);
        assert_eq!(threads_of(&trainer, 6).len(), 2);
        let sampling = sampler.present();
        assert_eq!((sampler.threads(), trainer.threads()), (3, 2));
        let training = trainer.present();
        assert_eq!((sampler.threads(), trainer.threads()), (2, 2));
        assert_eq!(threads_of(&sampler, 6).len(), 2);
        drop(training);
        assert_eq!(threads_of(&sampler, 6).len(), 3);
        drop(sampling);
        assert_eq!(cores.busy.load(Ordering::Relaxed), 0);
        assert_eq!(threads_of(&Team::alone(), 6).len(), 1);
    }

    #[test]
    fn two_roles_at_once_finish() {
        let cores = Cores::new(3);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let team = Team::new(&cores, 3);
                    for n in 0..200 {
                        let sum: usize = team.map((0..n).collect(), |i: usize| i).into_iter().sum();
                        assert_eq!(sum, (0..n).sum::<usize>());
                    }
                });
            }
        });
        assert_eq!(cores.busy.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_panic_is_passed_on_and_leaves_nothing_behind() {
        let cores = Cores::new(2);
        let team = Team::new(&cores, 2);
        for bad in [0, 7] {
            let run = || team.map((0..8).collect(), |i: usize| assert_ne!(i, bad, "part {i}"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            assert_eq!(cores.busy.load(Ordering::Relaxed), 0);
            assert_eq!(team.map(vec![1, 2, 3], |i: usize| i + 1), [2, 3, 4]);
        }
    }
}
