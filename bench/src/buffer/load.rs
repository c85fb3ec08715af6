//! The load generator: clients of a served buffer.
//!
//! Invariant: bodies are made before the clock starts; a group counts when the server has acknowledged that it is on
//! disk. All clients share one thread, so that the server has the other cores to itself.

use std::io::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hyper::Method;
use hyper::body::Bytes;
use tokio::task::JoinSet;

use super::connection::{Answer, Connection};

/// Digits of a key.
const KEY_DIGITS: usize = 16;
/// Placeholder of the key in a body that is not yet sent.
const KEY: &str = "kkkkkkkkkkkkkkkk";

/// What clients did.
#[derive(Debug, Default)]
pub struct Done {
    /// Groups that the server has taken, or handed out and taken back as trained.
    pub groups: u64,
    /// Seconds of every request.
    pub latencies: Vec<f64>,
    /// Connections that broke and requests that were not answered as they should be.
    pub errors: u64,
    /// The first of those.
    pub first_error: Option<String>,
    /// Wall time.
    pub seconds: f64,
}

impl Done {
    fn add(&mut self, other: Self) {
        self.groups += other.groups;
        self.latencies.extend(other.latencies);
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
    }

    fn refused(&mut self, answer: &Answer) {
        self.failed(format!("{}: {}", answer.status, String::from_utf8_lossy(&answer.body)));
    }

    fn failed(&mut self, what: String) {
        self.errors += 1;
        self.first_error.get_or_insert(what);
    }
}

/// Lets `clients` append for as long as `time`, each request with `groups` groups of `bytes` bytes.
pub async fn append(
    address: SocketAddr,
    clients: usize,
    time: Duration,
    groups: usize,
    bytes: usize,
) -> Done {
    // Keys of one measure differ from those of the others, so that no group is known already.
    let first_key = clock_nanos();
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for client in 0..clients as u64 {
        let key = first_key.wrapping_add(client << 32);
        tasks.spawn(append_as_one(address, started + time, AppendBody::new(groups, bytes, key)));
    }
    join(tasks, started).await
}

async fn append_as_one(address: SocketAddr, until: Instant, mut body: AppendBody) -> Done {
    let mut done = Done::default();
    let mut connection = match Connection::open(address).await {
        Ok(connection) => connection,
        Err(error) => {
            done.failed(error.to_string());
            return done;
        }
    };
    while Instant::now() < until {
        let groups = body.next();
        let asked = Instant::now();
        match connection.call(Method::POST, "/v1/groups", groups).await {
            Ok(answer) => {
                let accepted = count(&answer.body, b"\"accepted\"");
                done.latencies.push(asked.elapsed().as_secs_f64());
                done.groups += accepted;
                if answer.status != 200 || accepted != body.keys.len() as u64 {
                    done.refused(&answer);
                }
            }
            Err(error) => {
                done.failed(error.to_string());
                return done;
            }
        }
    }
    done
}

/// Lets `consumers` lease and acknowledge batches of `batch` groups for as long as `time`, or until none are left.
pub async fn lease(address: SocketAddr, consumers: usize, time: Duration, batch: usize) -> Done {
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for consumer in 0..consumers {
        tasks.spawn(async move {
            let mut done = Done::default();
            if let Err(error) = lease_as_one(address, consumer, started + time, batch, &mut done).await {
                done.failed(error.to_string());
            }
            done
        });
    }
    join(tasks, started).await
}

async fn lease_as_one(
    address: SocketAddr,
    consumer: usize,
    until: Instant,
    batch: usize,
    done: &mut Done,
) -> Result<(), Error> {
    let mut connection = Connection::open(address).await?;
    let lease = Bytes::from(format!(r#"{{"consumer":"bench-{consumer}","groups":{batch},"wait_ms":0}}"#));
    while Instant::now() < until {
        let asked = Instant::now();
        let answer = connection.call(Method::POST, "/v1/leases", lease.clone()).await?;
        let Some(id) = lease_id(&answer.body) else {
            if answer.status != 200 {
                done.refused(&answer);
            }
            return Ok(());
        };
        let ack = format!("/v1/leases/{id}/ack");
        let answer = connection.call(Method::POST, &ack, Bytes::from_static(b"{}")).await?;
        if answer.status == 200 {
            done.groups += batch as u64;
            done.latencies.push(asked.elapsed().as_secs_f64());
        } else {
            done.refused(&answer);
        }
    }
    Ok(())
}

async fn join(mut tasks: JoinSet<Done>, started: Instant) -> Done {
    let mut all = Done::default();
    while let Some(done) = tasks.join_next().await {
        match done {
            Ok(done) => all.add(done),
            Err(panic) => all.failed(panic.to_string()),
        }
    }
    all.seconds = started.elapsed().as_secs_f64();
    all
}

/// The body of a request with groups whose keys change every time.
struct AppendBody {
    text: Vec<u8>,
    /// Where the keys are.
    keys: Vec<usize>,
    next_key: u64,
}

impl AppendBody {
    fn new(groups: usize, bytes: usize, next_key: u64) -> Self {
        let groups = vec![group(bytes); groups].join(",");
        let text = format!(r#"{{"groups":[{groups}]}}"#).into_bytes();
        let keys = text.windows(KEY_DIGITS).enumerate();
        let keys = keys.filter(|(_, window)| *window == KEY.as_bytes()).map(|(at, _)| at).collect();
        Self { text, keys, next_key }
    }

    /// The body with keys that no body before it had.
    fn next(&mut self) -> Bytes {
        for &at in &self.keys {
            let key = format!("{:016x}", self.next_key);
            self.text[at..at + KEY_DIGITS].copy_from_slice(key.as_bytes());
            self.next_key = self.next_key.wrapping_add(1);
        }
        Bytes::copy_from_slice(&self.text)
    }
}

/// Tokens of a group of about `bytes` bytes in JSON.
pub(super) fn tokens(bytes: usize) -> usize {
    /// Average size of a token with its mask and log-probability.
    const TOKEN_BYTES: usize = 19;
    (bytes / TOKEN_BYTES).max(2)
}

/// A group of about `bytes` bytes in JSON: one trajectory, half of it prompt.
fn group(bytes: usize) -> String {
    let tokens = tokens(bytes);
    let join = |stream: &mut dyn Iterator<Item = String>| stream.collect::<Vec<_>>().join(",");
    let ids = join(&mut (0..tokens).map(|n| (10_000 + n * 7919 % 90_000).to_string()));
    let mask = join(&mut (0..tokens).map(|n| (n >= tokens / 2).to_string()));
    let logprob = |n: usize| if n < tokens / 2 { 0.0 } else { -((n * 37 % 9973) as f64) / 1e4 };
    let logprobs = join(&mut (0..tokens).map(|n| format!("{:.4}", logprob(n))));
    format!(
        r#"{{"key":"{KEY}","trajectories":[{{"token_ids":[{ids}],"loss_mask":[{mask}],"behavior_logprobs":[{logprobs}],"policy_version":0,"reward":1.0}}]}}"#
    )
}

/// The id of the lease that an answer begins with, if it is one.
fn lease_id(body: &[u8]) -> Option<u64> {
    let start = std::str::from_utf8(body.get(..body.len().min(64))?).ok()?;
    let digits = start.strip_prefix(r#"{"lease":{"id":"#)?;
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn count(body: &[u8], word: &[u8]) -> u64 {
    body.windows(word.len()).filter(|window| *window == word).count() as u64
}

fn clock_nanos() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_the_size_asked_for_and_keys_of_their_own() {
        for bytes in [500, 4096, 65_536] {
            let length = group(bytes).len();
            assert!(length.abs_diff(bytes) < bytes / 8 + 100, "{length} bytes for {bytes}");
        }
        let mut body = AppendBody::new(2, 100, 7);
        for keys in [["0000000000000007", "0000000000000008"], ["0000000000000009", "000000000000000a"]] {
            let text = String::from_utf8(body.next().to_vec()).unwrap();
            assert!(keys.iter().all(|key| text.contains(key)), "{text}");
        }
    }

    #[test]
    fn answers_are_understood() {
        assert_eq!(lease_id(br#"{"lease":{"id":17,"consumer":"a"}}"#), Some(17));
        assert_eq!(lease_id(br#"{"lease":null,"reason":"none"}"#), None);
        assert_eq!(
            count(br#"[{"status":"accepted"},{"status":"full"},{"status":"accepted"}]"#, b"\"accepted\""),
            2
        );
    }
}
