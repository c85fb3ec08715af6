//! A buffer that is really served, on a port of its own, for as long as a test wants it; and requests to it, byte by byte.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use buffer::http::{Client, ClientConfig, Server, ServerConfig};
use buffer::{Buffer, BufferConfig};
use serde_json::Value;
use tokio::sync::oneshot;

use super::SOON;

/// A server on a thread; it stops, and is waited for, at the end of the test.
pub struct Served {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// Serves a journal in `directory`.
    pub fn journal(directory: &tempfile::TempDir, config: BufferConfig) -> Self {
        let path = directory.path().join("buffer.redb");
        let buffer = Buffer::open(&path, config).unwrap();
        let reopen = Arc::new(move || Buffer::open(&path, config));
        Self::start(buffer, ServerConfig { reopen: Some(reopen), ..loopback() })
    }

    /// Serves a buffer in memory.
    pub fn memory(config: BufferConfig) -> Self {
        Self::start(Buffer::in_memory(config).unwrap(), loopback())
    }

    pub fn start(buffer: Buffer, config: ServerConfig) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (stop, stopped) = oneshot::channel();
        let server = runtime.block_on(Server::bind(config, Arc::new(buffer))).unwrap();
        let address = server.local_addr();
        let serve = move || {
            runtime.block_on(server.serve(async {
                let _ = stopped.await;
            }));
        };
        Self { address, stop: Some(stop), thread: Some(std::thread::spawn(serve)) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn client(&self) -> Client {
        Client::new(ClientConfig { patience: SOON, ..ClientConfig::new(self.url()) }).unwrap()
    }

    /// Asks it to stop, without waiting.
    pub fn begin_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until it has stopped.
    pub fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    /// One request on a connection of its own.
    pub fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.connect();
        stream.write_all(&head(method, path, self.address, headers, Some(body.len()))).unwrap();
        // A server that refuses early does not read the rest.
        let _ = stream.write_all(body);
        Answer::read(&mut BufReader::new(stream))
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.begin_stop();
        self.wait();
    }
}

/// On a free port of this machine, for everybody.
pub fn loopback() -> ServerConfig {
    ServerConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)))
}

/// The head of a request; `headers` may replace the host.
pub fn head(
    method: &str,
    path: &str,
    host: SocketAddr,
    headers: &[(&str, &str)],
    length: Option<usize>,
) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        head.push_str(&format!("host: {host}\r\n"));
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if let Some(length) = length {
        head.push_str(&format!("content-length: {length}\r\n"));
    }
    head.push_str("\r\n");
    head.into_bytes()
}

/// What a server said.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Answer {
    /// Reads up to the end of the connection.
    pub fn read(stream: &mut impl BufRead) -> Self {
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("`{line}` is no status"));
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let mut body = Vec::new();
        // Of a body that was refused the connection may be reset behind the answer.
        let _ = stream.read_to_end(&mut body);
        Self { status, headers, body }
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Holds the answer to be a problem.
    pub fn is_problem(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.headers["content-type"], "application/problem+json", "{}", self.text());
        let problem = self.json();
        assert_eq!((&problem["code"], &problem["status"]), (&code.into(), &status.into()), "{problem}");
        assert_eq!(problem["type"], "about:blank");
        assert!(!problem["title"].as_str().unwrap().is_empty());
        assert!(!problem["detail"].as_str().unwrap().is_empty());
        problem
    }
}
