//! A server for one test: it answers each request as its script says.
//!
//! Invariant: it listens on a port that the system chose, for this machine alone, and ends with the test.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    /// Such as `POST /v1/chat/completions HTTP/1.1`.
    pub(crate) line: String,
    /// Header lines in lower case.
    pub(crate) headers: Vec<String>,
    /// The body.
    pub(crate) body: Value,
}

/// A response.
pub(crate) enum Reply {
    /// A status, header lines, and a body.
    Status(u16, Vec<String>, Vec<u8>),
    /// These bytes and the end of the connection.
    Raw(Vec<u8>),
    /// No response until the server ends.
    Silence,
}

/// 200 with JSON.
pub(crate) fn ok(body: &Value) -> Reply {
    Reply::Status(200, vec!["content-type: application/json".to_owned()], body.to_string().into_bytes())
}

type ReplyScript = dyn Fn(usize, &ReceivedRequest) -> Reply + Send + Sync;

/// State that the threads of a server share.
struct FakeServerState {
    script: Box<ReplyScript>,
    asked: Mutex<Vec<ReceivedRequest>>,
    count: AtomicUsize,
    ended: AtomicBool,
}

/// A server.
pub(crate) struct FakeServer {
    shared: Arc<FakeServerState>,
    pub(crate) port: u16,
}

impl FakeServer {
    /// `script` sees how many requests there were before, and the request.
    pub(crate) fn start(script: impl Fn(usize, &ReceivedRequest) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener.local_addr().expect("it has an address").port();
        let shared = Arc::new(FakeServerState {
            script: Box::new(script),
            asked: Mutex::default(),
            count: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        });
        let inner = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if inner.ended.load(Ordering::Relaxed) {
                    return;
                }
                let inner = Arc::clone(&inner);
                std::thread::spawn(move || serve(stream, &inner));
            }
        });
        Self { shared, port }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/get_reward", self.port)
    }

    /// All requests so far.
    pub(crate) fn asked(&self) -> Vec<ReceivedRequest> {
        self.shared.asked.lock().unwrap().clone()
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _woken = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// One connection; the client may close it at any time.
fn serve(stream: TcpStream, shared: &FakeServerState) -> Option<()> {
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let headers: Vec<_> = lines[1..].iter().map(|line| line.to_lowercase()).collect();
    let length = headers.iter().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok())?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let asked =
        ReceivedRequest { line: lines[0].clone(), headers, body: serde_json::from_slice(&body).ok()? };
    let count = shared.count.fetch_add(1, Ordering::SeqCst);
    shared.asked.lock().unwrap().push(asked.clone());
    let mut stream = reader.into_inner();
    match (shared.script)(count, &asked) {
        Reply::Status(status, headers, body) => {
            let mut head =
                format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
            for header in headers {
                head.push_str(&header);
                head.push_str("\r\n");
            }
            stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
            stream.write_all(&body).ok()?;
        }
        Reply::Raw(bytes) => stream.write_all(&bytes).ok()?,
        Reply::Silence => {
            while !shared.ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
    Some(())
}
