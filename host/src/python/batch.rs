//! One call: a frame of items that one worker scores, and what becomes of each when the call ends badly.
//!
//! Invariant: every job that enters [`run`] leaves it answered, or in a unit to be called again, and never both. Only the
//! item that a timeout or a death is about is charged; where that cannot be told, its companions are called one by one.

use std::time::Duration;

use serde_json::{Map, Value};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::log::Tail;
use super::protocol::{Broken, Frames, Report, frame};
use super::zygote::{Exit, Forked, START_DEADLINE, Zygote, end_group};

/// Ends of a process that an item may be part of before it is charged with them.
const DEATHS: u32 = 2;
/// How long the parent may take to say how a worker ended.
const EXIT_DEADLINE: Duration = Duration::from_secs(2);
/// What a call in an event loop may take beyond its time: it stops waiting by itself, unless the loop is blocked.
const LOOP_SLACK: Duration = Duration::from_millis(300);

/// What the function said of an item: its value, if it applies, and the rest.
pub(super) type Scored = (Option<f64>, Map<String, Value>);

/// Why an item has no value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Failure {
    Timeout,
    NotFinite(f64),
    Failed(String),
}

/// One item in the queue, and who waits for it.
#[derive(Debug)]
pub(super) struct Job {
    /// The item as JSON.
    pub(super) item: String,
    pub(super) reply: oneshot::Sender<Result<Scored, Failure>>,
    /// Told when a worker gets it for the first time.
    pub(super) began: Option<oneshot::Sender<()>>,
    /// Processes that ended while they worked on it.
    pub(super) deaths: u32,
}

/// Jobs that are called together: one, or a whole group.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) jobs: Vec<Job>,
    /// Not to be called with others.
    pub(super) alone: bool,
}

/// How the function is called.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// Longest call.
    pub(super) timeout: Duration,
    /// Once for all items.
    pub(super) batch: bool,
    /// For all items at the same time.
    pub(super) concurrent: bool,
    /// Items are whole groups, which must not be taken apart.
    pub(super) group: bool,
}

/// A process that calls the function.
#[derive(Debug)]
pub(super) struct Worker {
    frames: Frames,
    pid: i32,
    exit: oneshot::Receiver<Exit>,
    /// Whether it may still be there.
    running: bool,
    tail: Tail,
}

impl Worker {
    /// Starts one and waits until it takes calls.
    pub(super) async fn start(zygote: &Zygote) -> Result<Self, String> {
        let (Forked { pid, exit }, frames, tail) = zygote.fork().await?;
        let mut worker = Self { frames, pid, exit, running: true, tail };
        match tokio::time::timeout(START_DEADLINE, worker.frames.next::<Report>()).await {
            Ok(Ok(Report::Ready)) => Ok(worker),
            Ok(_) => Err(format!("a worker ended before it was ready: {}", worker.how_it_ended().await)),
            Err(_) => Err(format!("a worker was not ready within {} s", START_DEADLINE.as_secs())),
        }
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Resolves when an idle worker is of no use any more.
    pub(super) async fn gone(&mut self) {
        // Nothing is to be said between calls.
        let _ = self.frames.next::<Report>().await;
    }

    /// Ends it if it has not ended, and says how it did.
    async fn how_it_ended(mut self) -> String {
        // What closed its socket is about to end; what did not is ended by the drop.
        let exit = tokio::time::timeout(EXIT_DEADLINE, &mut self.exit).await;
        self.running = exit.is_err();
        let how = match exit {
            Ok(Ok(Exit { signal: Some(signal), .. })) => format!("killed by {}", signal_name(signal)),
            Ok(Ok(Exit { code: Some(code), .. })) => format!("ended with exit status {code}"),
            Ok(_) => "ended together with the parent process of the workers".to_owned(),
            Err(_) => "closed its socket without ending".to_owned(),
        };
        format!("{how}{}", self.tail.told_at_end().await)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Once its end is known its number may belong to another; if the parent is gone, its mark is what counts.
        if self.running && matches!(self.exit.try_recv(), Err(oneshot::error::TryRecvError::Empty)) {
            end_group(self.pid);
        }
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
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

/// What happened next in a call.
enum Event {
    Said(Report),
    Died(Option<String>),
    Late,
    Abandoned,
}

/// Lets a worker score jobs. The worker comes back if it can take another call, or why it cannot; and units that must be
/// called again.
pub(super) async fn run(
    mut worker: Worker,
    jobs: Vec<Job>,
    rules: Rules,
) -> (Result<Worker, String>, Vec<Unit>) {
    let items: Vec<_> = jobs.iter().map(|job| job.item.as_str()).collect();
    let request = frame(format!("{{\"items\":[{}]}}", items.join(",")).as_bytes());
    let mut call = Call { jobs: jobs.into_iter().map(Some).collect(), rules, again: false };
    let limit = if rules.concurrent { rules.timeout + LOOP_SLACK } else { rules.timeout };
    let mut deadline = Instant::now() + limit;
    let late = || format!("a call took longer than {} s", rules.timeout.as_secs_f64());
    match tokio::time::timeout_at(deadline, worker.frames.send(&request)).await {
        Ok(Ok(())) => {}
        Ok(Err(_)) => return call.died(worker, None).await,
        Err(_) => return (Err(late()), call.late()),
    }
    loop {
        let event = tokio::select! {
            biased;
            report = worker.frames.next::<Report>() => match report {
                Ok(report) => Event::Said(report),
                Err(Broken::Ended) => Event::Died(None),
                Err(Broken::Garbage(what)) => Event::Died(Some(what)),
            },
            () = tokio::time::sleep_until(deadline) => Event::Late,
            () = call.abandoned() => Event::Abandoned,
        };
        match event {
            Event::Said(Report::Done { retire }) => {
                let mut left = call.left();
                if !call.again {
                    let unreported = "its worker ended the call without a word about this item";
                    left.drain(..).for_each(|job| job.fail(unreported.to_owned()));
                }
                let retired =
                    || "it asked for it, as memory was short or a call could not be given up".to_owned();
                return (if retire { Err(retired()) } else { Ok(worker) }, call.repeat(left));
            }
            Event::Said(report) => {
                if let Err(what) = call.hear(report) {
                    return call.died(worker, Some(what)).await;
                }
                if call.sequential() {
                    deadline = Instant::now() + limit;
                }
            }
            Event::Died(garbage) => return call.died(worker, garbage).await,
            Event::Late => return (Err(late()), call.late()),
            Event::Abandoned => {
                let left = call.left();
                return (Err("nobody waited for its call any more".to_owned()), call.repeat(left));
            }
        }
    }
}

struct Call {
    /// Jobs that have not been answered; `None` where they have.
    jobs: Vec<Option<Job>>,
    rules: Rules,
    /// Whether what is left when the worker is done shall be called again.
    again: bool,
}

impl Call {
    /// Whether its items are called one after the other.
    fn sequential(&self) -> bool {
        !self.rules.batch && !self.rules.concurrent
    }

    /// Resolves when nobody waits for what is running.
    async fn abandoned(&mut self) {
        let sequential = self.sequential();
        let mut running = self.jobs.iter_mut().flatten().peekable();
        if running.peek().is_none() {
            return std::future::pending().await;
        }
        for job in running {
            job.reply.closed().await;
            if sequential {
                return;
            }
        }
    }

    fn left(&mut self) -> Vec<Job> {
        self.jobs.iter_mut().filter_map(Option::take).collect()
    }

    fn take(&mut self, item: usize) -> Result<Job, String> {
        let job = self.jobs.get_mut(item).and_then(Option::take);
        job.ok_or_else(|| format!("a report on item {item}, which is not part of the call"))
    }

    /// Answers what a report is about. An error is a report that cannot be true.
    fn hear(&mut self, report: Report) -> Result<(), String> {
        match report {
            Report::Value { item, value, details } => self.take(item)?.answer(Ok((value, details))),
            Report::NotFinite { item, value } => {
                let value = value.parse().map_err(|_| format!("the value `{value}`"))?;
                self.take(item)?.answer(Err(Failure::NotFinite(value)));
            }
            Report::Error { item, reason } => self.take(item)?.fail(reason),
            Report::Timeout { item } => self.take(item)?.answer(Err(Failure::Timeout)),
            Report::Alone { item } => {
                let job = self.take(item)?;
                self.jobs[item] = Some(job);
                self.again = true;
            }
            Report::Raised { reason, repeat } => {
                self.again = repeat && !self.rules.group && self.jobs.iter().flatten().count() > 1;
                if !self.again {
                    self.left().into_iter().for_each(|job| job.fail(reason.clone()));
                }
            }
            Report::Ready | Report::Done { .. } => return Err("a report out of turn".to_owned()),
        }
        Ok(())
    }

    /// Time is over.
    fn late(&mut self) -> Vec<Unit> {
        let mut left = self.left();
        if self.sequential() && !left.is_empty() {
            left.remove(0).answer(Err(Failure::Timeout));
        } else if self.rules.group || left.len() == 1 {
            left.drain(..).for_each(|job| job.answer(Err(Failure::Timeout)));
        }
        self.repeat(left)
    }

    /// The process ended, or has to.
    async fn died(&mut self, worker: Worker, garbage: Option<String>) -> (Result<Worker, String>, Vec<Unit>) {
        let how = match garbage {
            Some(what) => {
                let tail = worker.tail.clone();
                drop(worker);
                format!(
                    "the function wrote to the socket of its worker ({what}), which was ended{}",
                    tail.told_at_end().await
                )
            }
            None => format!("its process was {}", worker.how_it_ended().await),
        };
        let mut left = self.left();
        let charged = if self.sequential() { left.len().min(1) } else { left.len() };
        left[..charged].iter_mut().for_each(|job| job.deaths += 1);
        let (dead, left): (Vec<_>, Vec<_>) = left.into_iter().partition(|job| job.deaths >= DEATHS);
        dead.into_iter().for_each(|job| job.fail(format!("{how} (the second time)")));
        (Err(how), self.repeat(left))
    }

    /// Units for what is to be called again: in order, and one by one where a culprit is among them.
    fn repeat(&self, left: Vec<Job>) -> Vec<Unit> {
        if self.rules.group {
            return if left.is_empty() { Vec::new() } else { vec![Unit { jobs: left, alone: true }] };
        }
        let alone = !self.sequential();
        left.into_iter().map(|job| Unit { jobs: vec![job], alone }).collect()
    }
}

impl Job {
    fn answer(self, result: Result<Scored, Failure>) {
        // Whoever asked may have stopped waiting.
        let _ = self.reply.send(result);
    }

    pub(super) fn fail(self, reason: String) {
        self.answer(Err(Failure::Failed(reason)));
    }
}
