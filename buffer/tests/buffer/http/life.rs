//! A server from its first connection to its end: slow and many clients, stopping, and a disk that fails.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::routing::post;
use buffer::http::{Role, ServerConfig, ServerError, ServerLimits};
use buffer::{Buffer, Consumer, LeaseRequest, Producer};
use serde_json::json;
use trajectory::GroupId;

use super::super::served::{HttpAnswer, TestServer, head, loopback};
use super::super::{NOW, SOON, TRAINER, config, generate, group, v};
use super::{keyed, statuses, store};

const SHORT: Duration = Duration::from_millis(200);

fn limited(limits: ServerLimits) -> TestServer {
    TestServer::start(Buffer::in_memory(config(8, 1)).unwrap(), ServerConfig { limits, ..loopback() })
}

#[test]
fn a_slow_head_is_cut_off_and_a_slow_body_is_answered() {
    let served = limited(ServerLimits { head_read: SHORT, body_read: SHORT, ..ServerLimits::default() });
    let mut slow = served.connect();
    slow.write_all(b"GET /healthz HTTP/1.1\r\nhost: local").unwrap();
    let mut rest = Vec::new();
    // Closed, with or without a word.
    let _ = slow.read_to_end(&mut rest);
    assert!(!rest.starts_with(b"HTTP/1.1 200"));

    let mut slow = served.connect();
    slow.write_all(&head("POST", "/v1/groups", served.address, &[], Some(1000))).unwrap();
    slow.write_all(b"{").unwrap();
    HttpAnswer::read(&mut BufReader::new(slow)).is_problem(408, "body_timeout");
    assert_eq!(served.get("/healthz").status, 200);
}

/// Routes beside the buffer's limit the size of their bodies themselves.
#[test]
fn a_slow_body_of_another_route_is_answered_too() {
    async fn echo(body: Bytes) -> Bytes {
        body
    }
    let routes = Router::new().route("/other", post(echo)).layer(DefaultBodyLimit::max(8));
    let limits = ServerLimits { body_read: SHORT, ..ServerLimits::default() };
    let config = ServerConfig { limits, routes: vec![(Role::Writer, routes)], ..loopback() };
    let served = TestServer::start(Buffer::in_memory(super::super::config(8, 1)).unwrap(), config);
    let ask = |length: usize, body: &[u8]| {
        let mut stream = served.connect();
        stream.write_all(&head("POST", "/other", served.address, &[], Some(length))).unwrap();
        stream.write_all(body).unwrap();
        HttpAnswer::read(&mut BufReader::new(stream))
    };
    assert_eq!(ask(4, b"here").text(), "here");
    assert_eq!(ask(9, b"too large").status, 413);
    ask(4, b"h").is_problem(408, "body_timeout");
}

#[test]
fn too_many_connections_are_closed_and_counted() {
    let served = limited(ServerLimits { connections: 2, ..ServerLimits::default() });
    let mut kept: Vec<_> = (0..2).map(|_| served.connect()).collect();
    // An answer shows that the server has taken both.
    for stream in &mut kept {
        let request = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n\r\n", served.address);
        stream.write_all(request.as_bytes()).unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
    }
    let mut third = served.connect();
    let mut nothing = Vec::new();
    let _ = third.read_to_end(&mut nothing);
    assert_eq!(nothing, b"");
    drop(kept);
    // A connection is free as soon as the server has seen the others close.
    let metrics = loop {
        let mut stream = served.connect();
        stream.write_all(&head("GET", "/metrics", served.address, &[], None)).unwrap();
        let mut answer = Vec::new();
        if stream.read_to_end(&mut answer).is_ok() && !answer.is_empty() {
            break String::from_utf8(answer).unwrap();
        }
    };
    let refused =
        metrics.lines().find_map(|line| line.strip_prefix("rlrun_buffer_connections_refused_total "));
    assert!(refused.unwrap().parse::<u64>().unwrap() >= 1, "{metrics}");
}

#[test]
fn a_server_whose_journal_was_removed_accepts_nothing_and_makes_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let served = TestServer::journal(&directory, config(8, 1));
    assert_eq!(statuses(&store(&served, &[keyed("before")])), ["accepted"]);
    std::fs::remove_file(directory.path().join("buffer.redb")).unwrap();
    // Longer than it waits before it tries to open a journal again.
    let end = std::time::Instant::now() + Duration::from_millis(1500);
    while std::time::Instant::now() < end {
        let problem = store(&served, &[keyed("after")]).is_problem(503, "storage_failed");
        assert!(problem["detail"].as_str().unwrap().contains("was removed while it was open"), "{problem}");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_run_with_its_own_trainer_refuses_leases_and_acknowledgements() {
    let config = ServerConfig { own_trainer: true, ..loopback() };
    let served = TestServer::start(Buffer::in_memory(super::super::config(2, 1)).unwrap(), config);
    assert_eq!(statuses(&store(&served, &[keyed("a")])), ["accepted"]);
    for (path, body) in [
        ("/v1/leases", json!({ "consumer": TRAINER, "step": 0, "groups": 1 })),
        ("/v1/leases/ack", json!({ "consumer": TRAINER, "through": 99_999 })),
        ("/v1/leases/0/ack", json!({})),
        ("/v1/leases/0/release", json!({})),
        ("/v1/leases/0/extend", json!({ "hold_ms": 100 })),
    ] {
        served.post(path, &body).is_problem(403, "own_trainer");
    }
    let version = json!({ "version": u64::MAX }).to_string();
    let put = served.ask("PUT", "/v1/policy/version", &[], version.as_bytes());
    put.is_problem(403, "own_trainer");
    assert_eq!(served.get("/v1/stats").json()["finalized"], 1);
}

#[test]
fn a_stop_finishes_requests_in_progress() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = TestServer::journal(&directory, config(8, 1));
    let body = json!({ "groups": [keyed("under way")] }).to_string();
    let mut underway = begin(&served, "/v1/groups", &body);
    let lease = json!({ "consumer": "t", "groups": 9, "wait_ms": 30_000 }).to_string();
    let mut waiting = begin(&served, "/v1/leases", &lease);
    waiting.write_all(lease.as_bytes()).unwrap();
    served.begin_stop();
    underway.write_all(body.as_bytes()).unwrap();
    assert_eq!(statuses(&HttpAnswer::read(&mut BufReader::new(underway))), ["accepted"]);
    HttpAnswer::read(&mut BufReader::new(waiting)).is_problem(503, "stopping");
    let address = served.address;
    served.wait();
    assert!(TcpStream::connect(address).is_err(), "the server listens no more");

    let served = TestServer::journal(&directory, config(8, 1));
    assert_eq!(statuses(&store(&served, &[keyed("under way")])), ["duplicate"]);
}

/// A request whose head is in, so that it has begun; its body is to come.
fn begin(served: &TestServer, path: &str, body: &str) -> TcpStream {
    let mut stream = served.connect();
    let expect = [("expect", "100-continue")];
    stream.write_all(&head("POST", path, served.address, &expect, Some(body.len()))).unwrap();
    let mut go_on = [0; 25];
    stream.read_exact(&mut go_on).unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream
}

#[test]
fn a_stop_has_a_deadline() {
    let mut served = limited(ServerLimits { stop: SHORT, ..ServerLimits::default() });
    let mut stuck = served.connect();
    stuck
        .write_all(&head("POST", "/v1/groups", served.address, &[("expect", "100-continue")], Some(10)))
        .unwrap();
    stuck.read_exact(&mut [0; 25]).unwrap();
    served.begin_stop();
    served.wait();
    let mut rest = Vec::new();
    let _ = stuck.read_to_end(&mut rest);
    assert_eq!(rest, b"");
}

#[test]
fn a_client_continues_after_an_outage_of_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = TestServer::journal(&directory, config(2, 1));
    let client = served.client();
    generate(&client, v(0), 2);
    let lease = client.lease(&LeaseRequest::step(TRAINER, v(0)), NOW).unwrap();
    let address = served.address;
    served.begin_stop();
    served.wait();
    std::thread::scope(|scope| {
        let away = scope.spawn(|| client.submit("meanwhile", group(GroupId(0), v(0))).unwrap().group);
        let path = directory.path().join("buffer.redb");
        let buffer = Buffer::open(&path, config(2, 1)).unwrap();
        let back = TestServer::start(buffer, ServerConfig { listen: address, ..loopback() });
        let group = away.join().unwrap();
        assert!(group.is_some());
        assert_eq!(client.lease(&LeaseRequest::step(TRAINER, v(0)), NOW).unwrap(), lease);
        client.ack(lease.id).unwrap();
        assert_eq!(client.stats().unwrap().finalized, 1);
        drop(back);
    });
}

#[test]
fn an_address_is_listened_on_once() {
    let served = TestServer::memory(config(1, 1));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let buffer = Arc::new(Buffer::in_memory(config(1, 1)).unwrap());
    let again = ServerConfig { listen: served.address, ..loopback() };
    let error = runtime.block_on(buffer::http::Server::bind(again, buffer)).unwrap_err();
    assert!(matches!(error, ServerError::Listen { .. }), "{error}");
    assert!(error.to_string().contains("choose another address"), "{error}");
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let address = TestServer::memory(config(1, 1)).address;
    let patience = Duration::from_millis(100);
    let config = buffer::http::ClientConfig {
        patience,
        ..buffer::http::ClientConfig::new(format!("http://{address}"))
    };
    let error = buffer::http::Client::new(config).unwrap().stats().unwrap_err();
    assert!(matches!(error, buffer::BufferError::Unreachable { attempts: 2.., .. }), "{error}");
    assert!(error.to_string().starts_with(&format!("GET http://{address}/v1/stats: no answer")), "{error}");
    assert!(buffer::http::Client::new(buffer::http::ClientConfig::new("localhost:1")).is_err());
}

/// A disk that the test can let fail, and work again.
#[derive(Clone, Debug)]
struct FailingDisk {
    memory: Arc<redb::backends::InMemoryBackend>,
    fails: Arc<AtomicBool>,
}

impl FailingDisk {
    fn check(&self) -> std::io::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(std::io::Error::from(std::io::ErrorKind::StorageFull));
        }
        Ok(())
    }
}

impl redb::StorageBackend for FailingDisk {
    fn len(&self) -> std::io::Result<u64> {
        self.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.memory.read(offset, out)
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.check()?;
        self.memory.set_len(len)
    }

    fn sync_data(&self) -> std::io::Result<()> {
        self.check()?;
        self.memory.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.check()?;
        self.memory.write(offset, data)
    }
}

#[test]
fn a_disk_failure_is_reported_and_the_server_recovers() {
    let disk = FailingDisk { memory: Arc::default(), fails: Arc::default() };
    let on = disk.clone();
    let open = move || Buffer::open_on(on.clone(), config(8, 1));
    let buffer = open().unwrap();
    let config = ServerConfig { reopen: Some(Arc::new(open)), ..loopback() };
    let (served, current) = TestServer::start_observed(buffer, config);
    assert_eq!(statuses(&store(&served, &[keyed("before")])), ["accepted"]);
    disk.fails.store(true, Ordering::Relaxed);
    let failed = store(&served, &[keyed("lost")]);
    failed.is_problem(503, "storage_failed");
    assert_eq!(failed.headers["retry-after"], "1");
    assert!(current().is_none(), "the journal can only be opened again once it is dropped");
    served.get("/readyz").is_problem(503, "storage_failed");
    assert_eq!(served.get("/healthz").status, 200, "the process lives");
    assert!(served.get("/metrics").text().contains("\nrlrun_buffer_up 0\n"));
    disk.fails.store(false, Ordering::Relaxed);
    // The client has patience.
    let client = served.client();
    assert!(client.submit("lost", group(GroupId(0), v(0))).unwrap().group.is_some());
    assert_eq!(statuses(&store(&served, &[keyed("before")])), ["duplicate"]);
    assert_eq!(served.get("/readyz").status, 200);
    assert!(current().is_some());
}

#[test]
fn a_lease_without_a_hold_is_named_and_kept() {
    let served = TestServer::memory(config(1, 1));
    let client = served.client();
    generate(&client, v(0), 1);
    let lease =
        client.lease(&LeaseRequest { step: None, ..LeaseRequest::step(TRAINER, v(0)) }, SOON).unwrap();
    assert_eq!(lease.hold, None);
    let listed = served.get("/v1/leases").json();
    assert!(
        listed["leases"][0]["expires_in_ms"].as_u64().is_some(),
        "the server misses a client that is gone"
    );
    assert!(format!("{client:?}").contains("LeaseId(0)"), "{client:?}");
    client.release(lease.id).unwrap();
    assert!(!format!("{client:?}").contains("LeaseId"), "{client:?}");
}

#[test]
fn the_openapi_documents_name_every_error() {
    let served = TestServer::memory(config(1, 1));
    let document = served.get("/openapi.json").json();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    let append = &document["paths"]["/v1/groups"]["post"];
    for status in ["200", "400", "401", "403", "406", "408", "413", "415", "421", "422", "429", "500", "503"]
    {
        assert!(append["responses"][status].is_object(), "{status}");
    }
    assert!(append["requestBody"]["content"]["application/msgpack"].is_object());
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap();
        assert!(document["components"]["schemas"][name].is_object(), "{name} is not there");
    }
    let docs = served.get("/docs");
    assert!(docs.headers["content-type"].starts_with("text/html"));
    assert!(docs.headers["content-security-policy"].starts_with("default-src 'none'"));
    assert!(!docs.text().contains("://"), "nothing from elsewhere");
    store(&served, &[keyed("k")]);
    let metrics = served.get("/metrics").text();
    for line in [
        "rlrun_buffer_requests_total{method=\"POST\",route=\"/v1/groups\",status=\"200\"} 1",
        "rlrun_buffer_append_seconds_count 1",
        "rlrun_buffer_finalized_groups 1",
        "rlrun_buffer_up 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} in {metrics}");
    }
}
