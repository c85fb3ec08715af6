//! A buffer in a separate process, as samplers and trainers on other machines see it.
//!
//! - [`served`]: the process; [`load`]: its clients; [`connection`]: how they talk
//!
//! Invariant: what is timed is `rlrun serve buffer` as users start it, on a real disk; every group that is counted was
//! acknowledged after its fsync. Server and clients share this machine, so that the clients take a part of what is measured.
//!
//! # Fields of the objects
//! | field | is |
//! |---|---|
//! | `measure` | `buffer` |
//! | `of` | `append`, `lease`, `reopen` or `in_process` |
//! | `store` | `redb` or `postgres` |
//! | `clients`, `batch`, `group_bytes` | connections, groups of one request, bytes of a group in JSON |
//! | `groups`, `seconds`, `groups_per_s` | what was done, wall time, and their ratio |
//! | `p50_ms`, `p99_ms`, `max_ms` | time from a request to its answer (with `lease`: of lease and acknowledgement together) |
//! | `errors` | requests that were not answered as they should be |
//! | `stored_gib`, `open_s`, `first_answer_s` | size of the journal; from the start of the process until it listens, and until it says what it holds |
//! | `memory_mib`, `peak_memory_mib` | resident memory of the server |
//! | `cpu_us_per_group` | processor time of this process, which an fsync does not take |

pub mod connection;
pub mod load;
pub mod served;

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use buffer::{Buffer, BufferConfig, Producer};
use hyper::Method;
use hyper::body::Bytes;
use rlrun::failure::Failure;
use serde_json::{Map, Value, json};
use trajectory::{
    Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, Task, TaskId, Trajectory, VersionRun,
};

use crate::args::BufferBenchArgs;
use connection::Connection;
use load::Done;
use served::Served;

/// Groups of one lease.
const BATCH: usize = 64;
/// Connections that fill the journal before it is opened again.
const FILL_CLIENTS: usize = 8;
/// Groups of one request that fills the journal.
const FILL_GROUPS: usize = 128;
/// Consumers that lease at the same time.
const CONSUMERS: [usize; 2] = [1, 4];
/// Threads that append in this process.
const THREADS: usize = 64;

/// Measures what `args` ask for and writes every result to `out` as soon as it is there.
///
/// # Errors
/// A server that does not start, a directory that cannot be written.
pub fn run(args: &BufferBenchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let scratch = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir(),
    };
    let scratch = scratch.map_err(system("make a directory for the journal"))?;
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let tokio = tokio.map_err(system("start the clients"))?;
    let mut bench = BufferBench { args, out, tokio };
    bench.appends(&scratch.path().join("appends"), None)?;
    if let Some(url) = &args.postgres {
        bench.appends(&scratch.path().join("database"), Some(url))?;
    }
    if args.reopen_gib > 0.0 {
        bench.reopen(&scratch.path().join("reopen"))?;
    }
    bench.in_process(&scratch.path().join("in_process"))
}

struct BufferBench<'a> {
    args: &'a BufferBenchArgs,
    out: &'a mut dyn Write,
    tokio: tokio::runtime::Runtime,
}

impl BufferBench<'_> {
    /// Appends of single groups by each number of clients, then leases of what they left.
    fn appends(&mut self, directory: &Path, database: Option<&str>) -> Result<(), Failure> {
        let served = Served::start(directory, database)?;
        let store = json!(if database.is_some() { "postgres" } else { "redb" });
        let time = self.time();
        for &clients in &self.args.clients {
            let done =
                self.tokio.block_on(load::append(served.address, clients, time, 1, self.args.group_bytes));
            let mut fields = self.fields("append");
            fields.extend([("store".to_owned(), store.clone()), ("clients".to_owned(), json!(clients))]);
            self.report(fields, done)?;
        }
        for consumers in CONSUMERS {
            // Enough groups for the leases, however few the appends left.
            self.fill(&served, time);
            let done = self.tokio.block_on(load::lease(served.address, consumers, time, BATCH));
            let mut fields = self.fields("lease");
            fields.extend([("store".to_owned(), store.clone()), ("clients".to_owned(), json!(consumers))]);
            fields.insert("batch".to_owned(), json!(BATCH));
            self.report(fields, done)?;
        }
        Ok(())
    }

    /// Fills a journal, kills its server, and starts another.
    fn reopen(&mut self, directory: &Path) -> Result<(), Failure> {
        let served = Served::start(directory, None)?;
        let bytes = (self.args.reopen_gib * f64::from(1 << 30)) as u64;
        let mut filled = Done::default();
        let stored = loop {
            let stored = self.stats(&served)?["bytes"].as_u64().unwrap_or(0);
            if stored >= bytes {
                break stored;
            }
            let more = self.fill(&served, Duration::from_secs(1));
            if more.groups == 0 {
                let why = more.first_error.unwrap_or_default();
                return Err(Failure::NotThere(format!("the journal could not be filled: {why}")));
            }
            filled.groups += more.groups;
            filled.seconds += more.seconds;
        };
        let memory = served.memory_mib();
        drop(served);
        let started = Instant::now();
        let served = Served::start(directory, None)?;
        let stats = self.stats(&served)?;
        let first_answer = started.elapsed().as_secs_f64();
        let mut fields = self.fields("reopen");
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        set("stored_gib", json!(stored as f64 / f64::from(1 << 30)));
        set("groups", stats["finalized"].clone());
        set("open_s", json!(served.opened_in.as_secs_f64()));
        set("first_answer_s", json!(first_answer));
        set("fill_groups_per_s", json!(filled.groups as f64 / filled.seconds));
        if let Some((now, most)) = memory {
            set("memory_mib", json!(now));
            set("peak_memory_mib", json!(most));
        }
        if let Some((now, _)) = served.memory_mib() {
            set("memory_after_reopen_mib", json!(now));
        }
        self.write(&fields)
    }

    /// Appends by threads of this process, for what the buffer itself costs.
    fn in_process(&mut self, directory: &Path) -> Result<(), Failure> {
        std::fs::create_dir(directory).map_err(system("make a directory for the journal"))?;
        let config = BufferConfig { max_bytes: 64 << 30, ..BufferConfig::new(1 << 16, 255) };
        let journal = Buffer::open(directory.join("buffer.redb"), config)?;
        let group = plain_group(self.args.group_bytes);
        let (next, until) = (AtomicU64::new(0), Instant::now() + self.time());
        let (cpu, started) = (cpu_seconds(), Instant::now());
        let append = || -> Result<(), Failure> {
            while Instant::now() < until {
                let n = next.fetch_add(1, Ordering::Relaxed);
                journal.submit(&n.to_string(), group.clone())?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(append)).collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        let (seconds, groups) = (started.elapsed().as_secs_f64(), next.into_inner());
        let mut fields = self.fields("in_process");
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        set("clients", json!(THREADS));
        set("groups", json!(groups));
        set("seconds", json!(seconds));
        set("groups_per_s", json!(groups as f64 / seconds));
        if let (Some(before), Some(after)) = (cpu, cpu_seconds()) {
            set("cpu_us_per_group", json!(1e6 * (after - before) / groups as f64));
        }
        self.write(&fields)
    }

    fn fill(&self, served: &Served, time: Duration) -> Done {
        let bytes = self.args.group_bytes;
        self.tokio.block_on(load::append(served.address, FILL_CLIENTS, time, FILL_GROUPS, bytes))
    }

    fn stats(&self, served: &Served) -> Result<Value, Failure> {
        let ask = async {
            let mut connection = Connection::open(served.address).await?;
            let answer = connection.call(Method::GET, "/v1/stats", Bytes::new()).await?;
            Ok(serde_json::from_slice(&answer.body)?)
        };
        self.tokio.block_on(ask).map_err(system("ask the served buffer what it holds"))
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.args.seconds)
    }

    fn fields(&self, of: &str) -> Map<String, Value> {
        let fields =
            [("measure", json!("buffer")), ("of", json!(of)), ("group_bytes", json!(self.args.group_bytes))];
        fields.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
    }

    fn report(&mut self, mut fields: Map<String, Value>, mut done: Done) -> Result<(), Failure> {
        done.latencies.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            let last = done.latencies.len().saturating_sub(1);
            done.latencies.get((share * last as f64).round() as usize).map(|seconds| 1e3 * seconds)
        };
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        set("groups", json!(done.groups));
        set("seconds", json!(done.seconds));
        set("groups_per_s", json!(done.groups as f64 / done.seconds));
        for (name, share) in [("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0)] {
            if let Some(milliseconds) = at(share) {
                set(name, json!(milliseconds));
            }
        }
        set("errors", json!(done.errors));
        if let Some(error) = done.first_error {
            set("first_error", json!(error));
        }
        self.write(&fields)
    }

    fn write(&mut self, fields: &Map<String, Value>) -> Result<(), Failure> {
        let written = if self.args.json {
            writeln!(self.out, "{}", Value::Object(fields.clone()))
        } else {
            writeln!(self.out, "{}", line(fields))
        };
        written.and_then(|()| self.out.flush()).map_err(system("write a result"))
    }
}

/// A result for people: its kind, then what belongs to it.
fn line(fields: &Map<String, Value>) -> String {
    let kind = fields.get("of").and_then(Value::as_str).unwrap_or_default();
    let rest = fields.iter().filter(|(name, _)| !["measure", "of"].contains(&&name[..]));
    let rest = rest.map(|(name, value)| match value {
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap_or(f64::NAN);
            if number >= 100.0 { format!("{name} {number:.0}") } else { format!("{name} {number:.3}") }
        }
        other => format!("{name} {other}"),
    });
    format!("{kind:>10}  {}", rest.collect::<Vec<_>>().join(", "))
}

/// A group that is as large as those of the clients.
fn plain_group(bytes: usize) -> Group {
    let tokens = load::tokens(bytes);
    let trained = |n: usize| n >= tokens / 2;
    let streams = SampleStreams {
        token_ids: (0..tokens).map(|n| 10_000 + (n * 7919 % 90_000) as u32).collect(),
        loss_mask: (0..tokens).map(trained).collect(),
        behavior_logprobs: (0..tokens)
            .map(|n| if trained(n) { -((n % 97) as f32) / 7.0 } else { 0.0 })
            .collect(),
        versions: vec![VersionRun { version: PolicyVersion(0), len: tokens as u32 }],
        kept: None,
        experts: None,
        temperature: 1.0,
    };
    let sample = Sample::new(streams).expect("all streams are made for the same tokens");
    let prompt = Prompt::Text(String::new());
    let task = Task { id: TaskId(0), prompt, answer: None, columns: Map::new() };
    let score = Score { total: Some(1.0), ..Score::default() };
    let (turns, text) = (Vec::new(), String::new());
    let trajectory =
        Trajectory { index: 0, sample, turns, branches: vec![], text, score, baseline: false, role: None };
    Group { id: GroupId(0), task, trajectories: vec![trajectory] }
}

/// Processor time of this process so far, seconds; `None` on a system that does not say.
fn cpu_seconds() -> Option<f64> {
    /// Ticks of `/proc` in a second (proc(5)), the same on every Linux that users have.
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program comes before and may hold blanks; user and system time are fields 14 and 15.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS)
}

fn system(what: &'static str) -> impl Fn(std::io::Error) -> Failure {
    move |source| Failure::System { what: what.to_owned(), source }
}
