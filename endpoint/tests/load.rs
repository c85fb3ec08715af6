//! Many clients, and clients that leave.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use endpoint::EndpointLimits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::client::{hello, read};
use crate::{Endpoint, THREADS};

/// A stream that would take long.
fn long(n: usize) -> Value {
    json!({"model": "tiny", "prompt": [4 + n % 90, 5, 6], "max_tokens": 1000, "ignore_eos": true, "stream": true})
}

/// Lets this process have open the sockets of a thousand clients and of their server.
fn allow_sockets() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

/// Threads of the runtime of `endpoint`, by their name.
fn threads(endpoint: &Endpoint) -> usize {
    let name = endpoint.thread_name();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let of = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.map(of).filter(|comm| comm.trim_end() == name).count()
}

#[test]
fn a_client_that_leaves_frees_its_pages() {
    let endpoint = Endpoint::new();
    for stream in [true, false] {
        let mut body = long(1);
        body["stream"] = stream.into();
        let mut socket = endpoint.send("POST", "/v1/completions", &[], &body.to_string());
        if stream {
            socket.read_exact(&mut [0; 64]).unwrap();
        }
        while endpoint.service.queue().status().cache_usage == 0.0 {
            std::thread::yield_now();
        }
        drop(socket);
        endpoint.wait_until_idle();
    }
    assert_eq!(endpoint.metric("rlrun:requests_disconnected_total"), 2.0);
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "the system allows fewer sockets")]
fn a_thousand_streams_are_open_and_one_above_the_limit_is_refused() {
    allow_sockets();
    let endpoint = Endpoint::silent(EndpointLimits { max_open: 1000, ..EndpointLimits::default() });
    let open: Vec<TcpStream> =
        (0..1000).map(|n| endpoint.send("POST", "/v1/completions", &[], &long(n).to_string())).collect();
    // An answer is open before its request is read.
    while endpoint.service.queue().open() < 1000 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let refused = endpoint.post("/v1/chat/completions", &hello());
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert!(refused.text.contains("1000 answers are open"), "{refused:?}");
    drop(open);
    endpoint.wait_until_idle();
    assert_eq!(endpoint.metric("rlrun:requests_disconnected_total"), 1000.0);
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "counts threads in `/proc`")]
fn random_disconnects_leak_nothing() {
    let endpoint = Endpoint::new();
    let mut random = 12345_u64;
    let mut draw = |most: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % most
    };
    let mut finished = 0;
    let mut open: Vec<TcpStream> = Vec::new();
    for n in 0..1000 {
        let mut body = long(n);
        body["max_tokens"] = (1 + draw(12)).into();
        body["stream"] = (draw(2) == 0).into();
        open.push(endpoint.send("POST", "/v1/completions", &[], &body.to_string()));
        while open.len() > 40 || (n == 999 && !open.is_empty()) {
            let socket = open.swap_remove(draw(open.len() as u64) as usize);
            match draw(3) {
                // It leaves at once.
                0 => drop(socket),
                // It leaves after some bytes.
                1 => {
                    let mut socket = socket;
                    let _ = socket.read(&mut [0; 16]);
                }
                _ => {
                    assert_eq!(read(socket).status, 200);
                    finished += 1;
                }
            }
        }
    }
    assert!(finished > 200, "{finished} of 1000 requests were read to the end");
    endpoint.wait_until_idle();
    assert!(threads(&endpoint) <= THREADS, "{} threads are left", threads(&endpoint));
    assert_eq!(endpoint.metric("vllm:num_requests_running"), 0.0);
    assert_eq!(endpoint.metric("vllm:kv_cache_usage_perc"), 0.0);
}

#[test]
fn a_stop_finishes_open_answers() {
    let mut endpoint = Endpoint::new();
    let mut body = long(3);
    body["max_tokens"] = 200.into();
    let socket = endpoint.send("POST", "/v1/completions", &[], &body.to_string());
    while endpoint.service.queue().status().running == 0 {
        std::thread::yield_now();
    }
    drop(endpoint.shutdown.take());
    let chunks = read(socket).chunks();
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[test]
fn a_body_above_the_limit_is_refused() {
    let endpoint =
        Endpoint::limited(EndpointLimits { max_body_bytes: 1000, ..EndpointLimits::default() }, None);
    let body = json!({"model": "tiny", "prompt": "x".repeat(2000)});
    let reply = endpoint.post("/v1/completions", &body);
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (413, &json!(413)));
}
