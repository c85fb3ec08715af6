//! A buffer that is really served, on a port of its own, for as long as a test wants it; and requests to it, byte by byte.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use buffer::http::{Client, ClientConfig, ServedBuffer, Server, ServerConfig};
use buffer::{Buffer, BufferConfig};
use serde_json::Value;
use tokio::sync::oneshot;

use super::SOON;

/// A server on a thread; it stops, and is waited for, at the end of the test.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    /// Serves a journal in `directory`.
    pub(crate) fn journal(directory: &tempfile::TempDir, config: BufferConfig) -> Self {
        let path = directory.path().join("buffer.redb");
        let buffer = Buffer::open(&path, config).unwrap();
        let reopen = buffer.reopen();
        Self::start(buffer, ServerConfig { reopen, ..loopback() })
    }

    /// Serves a buffer in memory.
    pub(crate) fn memory(config: BufferConfig) -> Self {
        Self::start(Buffer::in_memory(config).unwrap(), loopback())
    }

    pub(crate) fn start(buffer: Buffer, config: ServerConfig) -> Self {
        Self::start_observed(buffer, config).0
    }

    /// The same, and the buffer that it serves at a time.
    pub(crate) fn start_observed(buffer: Buffer, config: ServerConfig) -> (Self, ServedBuffer) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (stop, stopped) = oneshot::channel();
        let server = runtime.block_on(Server::bind(config, Arc::new(buffer))).unwrap();
        let (address, buffer) = (server.local_addr(), server.served());
        let serve = move || {
            runtime.block_on(server.serve(async {
                let _ = stopped.await;
            }));
        };
        (Self { address, stop: Some(stop), thread: Some(std::thread::spawn(serve)) }, buffer)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(ClientConfig { patience: SOON, ..ClientConfig::new(self.url()) }).unwrap()
    }

    /// Asks it to stop, without waiting.
    pub(crate) fn begin_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until it has stopped.
    pub(crate) fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub(crate) fn get(&self, path: &str) -> HttpAnswer {
        self.ask("GET", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> HttpAnswer {
        self.ask("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    /// One request on a connection of its own; its answer is one that the OpenAPI document knows.
    pub(crate) fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> HttpAnswer {
        static DOCUMENT: OnceLock<Value> = OnceLock::new();
        let answer = self.ask_anything(method, path, headers, body);
        let document = DOCUMENT.get_or_init(|| {
            let other = Self::memory(BufferConfig::new(1, 0));
            other.ask_anything("GET", "/openapi.json", &[], b"").json()
        });
        answer.is_documented(document, method, path);
        answer
    }

    fn ask_anything(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> HttpAnswer {
        let mut stream = self.connect();
        stream.write_all(&head(method, path, self.address, headers, Some(body.len()))).unwrap();
        // A server that refuses early does not read the rest.
        let _ = stream.write_all(body);
        HttpAnswer::read(&mut BufReader::new(stream))
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.begin_stop();
        self.wait();
    }
}

/// On a free port of this machine, for everybody.
pub(crate) fn loopback() -> ServerConfig {
    ServerConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)))
}

/// The head of a request; `headers` may replace the host.
pub(crate) fn head(
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
pub(crate) struct HttpAnswer {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl HttpAnswer {
    /// Reads up to the end of the connection.
    pub(crate) fn read(stream: &mut impl BufRead) -> Self {
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

    fn is_documented(&self, document: &Value, method: &str, path: &str) {
        let path = path.split('?').next().unwrap();
        let is_it = |template: &str| {
            let (asked, known) = (path.split('/'), template.split('/'));
            asked.clone().count() == known.clone().count()
                && asked.zip(known).all(|(asked, known)| asked == known || known == "{id}")
        };
        // `/v1/leases/ack` is a path of its own, not a lease with the id `ack`.
        let paths = document["paths"].as_object().unwrap();
        let exact = paths.get(path);
        let item = exact.or_else(|| paths.iter().find(|(template, _)| is_it(template)).map(|(_, item)| item));
        let operation = item.and_then(|item| item.get(method.to_ascii_lowercase()));
        // What is no operation is answered 404 or 405, and documented nowhere.
        let Some(operation) = operation else {
            return assert!([400, 404, 405, 421, 403].contains(&self.status));
        };
        let response = &operation["responses"][self.status.to_string()];
        assert!(response.is_object(), "{method} {path} may not answer {}: {}", self.status, self.text());
        if self.headers.get("content-type").is_some_and(|media_type| media_type == "application/problem+json")
        {
            let code = self.json()["code"].as_str().unwrap().to_owned();
            let text = response["description"].as_str().unwrap();
            assert!(text.contains(&format!("`{code}`")), "{method} {path} may not answer {code}: {text}");
        }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Holds the answer to be a problem.
    pub(crate) fn is_problem(&self, status: u16, code: &str) -> Value {
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
