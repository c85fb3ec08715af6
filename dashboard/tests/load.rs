//! Ten viewers of a timeline of 200 MB, in a process of its own.
//!
//! Invariant: the memory of the process does not depend on the length of the file.

#![cfg(target_os = "linux")] // it asks `/proc` for its memory

use std::io::{BufWriter, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use dashboard::{DashboardConfig, DashboardServer};
use serde_json::Value;

/// Size of the timeline, bytes.
const FILE_BYTES: usize = 200 << 20;
/// Viewers at the same time.
const VIEWERS: usize = 10;
/// Most memory of the process, MiB: a fifth of the file and what ten answers need.
const MAX_MEMORY_MIB: u64 = 160;
/// Longest time of an answer, also on a loaded machine, seconds.
const MAX_ANSWER_S: u64 = 20;

/// A line of the file, 200 bytes; every line is a millisecond.
fn write_file(path: &std::path::Path) -> usize {
    let mut file = BufWriter::new(std::fs::File::create(path).unwrap());
    let (mut bytes, mut lines) = (0, 0);
    let pad = "x".repeat(60);
    while bytes < FILE_BYTES {
        let (start, end) = (lines as f64 / 1000.0, (lines + 1) as f64 / 1000.0);
        let line = match lines % 4 {
            0 => format!(
                r#"{{"lane":"trainer","kind":"wait_for_batch","start":{start},"end":{end},"step":{},"note":"{pad}"}}"#,
                lines / 400
            ),
            1 => format!(
                r#"{{"lane":"sampler 0","kind":"sample","start":{start},"end":{end},"version":1,"note":"{pad}"}}"#
            ),
            2 => format!(
                r#"{{"lane":"trajectory","kind":"trajectory","group":1,"index":2,"step":3,"lag":1,"start":{start},"end":{end},"note":"{pad}"}}"#
            ),
            _ => format!(
                r#"{{"lane":"reward math","kind":"score","start":{start},"end":{end},"count":8,"note":"{pad}"}}"#
            ),
        };
        writeln!(file, "{line}").unwrap();
        bytes += line.len() + 1;
        lines += 1;
    }
    lines
}

fn get(address: SocketAddr, path: &str) -> Value {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(3 * MAX_ANSWER_S))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    // An answer has at most 16,000 spans and 300 trajectories.
    assert!(body.len() < 4_000_000, "{} bytes", body.len());
    serde_json::from_str(body).unwrap()
}

/// The most memory that the process had, MiB.
fn peak_memory_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

#[test]
fn ten_viewers_of_a_long_timeline_need_little_memory() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("metrics.jsonl"), "{\"step\":1}\n").unwrap();
    let lines = write_file(&directory.path().join("timeline.jsonl"));
    let seconds = lines as f64 / 1000.0;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let begin = Instant::now();
    let config = DashboardConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        token: None,
        runs: vec![directory.path().to_owned()],
        advisor: None,
    };
    let server = runtime.block_on(DashboardServer::bind(config)).unwrap();
    let opened = begin.elapsed();
    let address = server.local_addr();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let served = runtime.spawn(server.serve(async { drop(stopped.await) }));
    let name = directory.path().file_name().unwrap().to_str().unwrap();
    let timeline = |query: &str| get(address, &format!("/api/timeline?run={name}&pixels=1000{query}"));
    // The page answers while the file is still being read.
    let first = timeline("");
    assert!(first["indexed"].as_f64().unwrap() <= 1.0 && first["exact"] == true);
    while timeline("&from=0&to=1")["indexed"] != 1.0 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let indexed = begin.elapsed();
    let slowest = std::thread::scope(|scope| {
        let viewers: Vec<_> = (0..VIEWERS)
            .map(|viewer| {
                let timeline = &timeline;
                scope.spawn(move || {
                    let from = seconds * viewer as f64 / VIEWERS as f64;
                    let mut slowest = Duration::ZERO;
                    for length in [1.0, 30.0, seconds] {
                        let begin = Instant::now();
                        let answer = timeline(&format!("&from={from}&to={}", from + length));
                        slowest = slowest.max(begin.elapsed());
                        assert_eq!(answer["exact"], length < seconds, "{from} {length}");
                        let spans = answer["lanes"][0]["spans"].as_array().unwrap().len();
                        assert!(spans > 20 && spans <= 2000, "{spans} spans");
                    }
                    slowest
                })
            })
            .collect();
        viewers.into_iter().map(|viewer| viewer.join().unwrap()).max().unwrap()
    });
    let memory = peak_memory_mib();
    assert!(
        slowest < Duration::from_secs(MAX_ANSWER_S) && memory < MAX_MEMORY_MIB,
        "opened in {opened:?}, indexed in {indexed:?}, slowest answer {slowest:?}, peak memory {memory} MiB"
    );
    drop(stop);
    runtime.block_on(served).unwrap();
}
