//! Answers of the hub that change between requests, from a server in this process. What does not change is tested with the whole
//! program (`tests/huggingface.rs`).

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use serde_json::{Value, json};

use super::listing::RepositoryFile;
use super::*;

const COMMIT: &str = "1111111111111111111111111111111111111111";
const WEIGHTS: &str = "model.safetensors";

/// Status, headers and body.
type HubReply = (u16, Vec<(&'static str, String)>, Vec<u8>);

/// A server on loopback that answers method and path; dropping it ends its thread.
struct ReplyServer {
    url: String,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ReplyServer {
    fn start(reply: impl Fn(&str, &str) -> HubReply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let ended = stop.clone();
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                // A client that goes away is no failure of the server.
                let _ = stream.and_then(|stream| answer(stream, &reply));
            }
        });
        Self { url, stop, thread: Some(thread) }
    }
}

impl Drop for ReplyServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.url.trim_start_matches("http://"));
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn answer(mut stream: TcpStream, reply: &impl Fn(&str, &str) -> HubReply) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let mut words = request.split_whitespace();
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (status, headers, body) = reply(method, path);
    write!(stream, "HTTP/1.1 {status} answer\r\nConnection: close\r\nContent-Length: {}\r\n", body.len())?;
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    write!(stream, "\r\n")?;
    if method != "HEAD" {
        stream.write_all(&body)?;
    }
    stream.flush()
}

fn hub_at(url: &str, cache: &Path) -> HuggingFace {
    let variables = [("HF_ENDPOINT", url.to_owned()), ("HF_HUB_CACHE", cache.display().to_string())];
    let variables = variables.map(|(name, value)| (name.to_owned(), value));
    HuggingFace::of(&Program::new(rewards::Registry::default(), variables))
}

/// A redirect to another server, as the hub answers for large files.
fn elsewhere(url: &str) -> HubReply {
    let headers = [("Location", url), ("X-Linked-Size", "7"), ("X-Linked-ETag", "\"of-weights\"")];
    (302, headers.map(|(name, value)| (name, value.to_owned())).to_vec(), Vec::new())
}

/// The model `tiny/model`, of which nothing is in the cache.
fn repository(hub: &HuggingFace) -> PinnedRepository {
    let name = RepositoryName::parse(Path::new("hf:tiny/model"), RepositoryKind::Model).unwrap().at(COMMIT);
    let files = vec![RepositoryFile { name: WEIGHTS.to_owned(), size: None }];
    let listing = RepositoryListing { commit: COMMIT.to_owned(), files, configs: Value::Null, whole: true };
    let cached = hub.cache.as_ref().unwrap().repository(RepositoryKind::Model, "tiny/model");
    PinnedRepository { kind: RepositoryKind::Model, name, listing, cached }
}

#[test]
fn an_address_that_has_expired_is_asked_for_again() {
    let cdn = ReplyServer::start(|_, path| match path {
        "/new" => (200, Vec::new(), b"weights".to_vec()),
        _ => (403, Vec::new(), b"expired".to_vec()),
    });
    let (asked, place) = (AtomicUsize::new(0), cdn.url.clone());
    let server = ReplyServer::start(move |_, _| match asked.fetch_add(1, Ordering::Relaxed) {
        0 => elsewhere(&format!("{place}/old?Signature=secret")),
        _ => elsewhere(&format!("{place}/new")),
    });
    let directory = tempfile::tempdir().unwrap();
    let hub = hub_at(&server.url, directory.path());
    let path = hub.fetch(&repository(&hub), WEIGHTS).unwrap();
    assert_eq!(fs::read(path).unwrap(), b"weights");
}

#[test]
fn an_address_that_is_refused_is_not_shown() {
    for (status, evidence) in [(403, "was refused with status 403, 3 times in a row"), (400, "answers 400")] {
        let cdn = ReplyServer::start(move |_, _| (status, Vec::new(), Vec::new()));
        let place = cdn.url.clone();
        let server = ReplyServer::start(move |_, _| elsewhere(&format!("{place}/file?Signature=secret")));
        let directory = tempfile::tempdir().unwrap();
        let hub = hub_at(&server.url, directory.path());
        let error = hub.fetch(&repository(&hub), WEIGHTS).unwrap_err().to_string();
        assert!(error.contains(evidence) && !error.contains("secret"), "{error}");
    }
}

#[test]
fn a_hub_that_refuses_for_now_leaves_the_cache() {
    let directory = tempfile::tempdir().unwrap();
    let snapshot = directory.path().join("models--tiny--model/snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join(WEIGHTS), "weights").unwrap();
    let references = directory.path().join("models--tiny--model/refs");
    fs::create_dir_all(&references).unwrap();
    fs::write(references.join("main"), COMMIT).unwrap();
    for (status, falls_back) in [(429, true), (503, true), (404, false)] {
        let server = ReplyServer::start(move |_, _| (status, Vec::new(), Vec::new()));
        let found = hub_at(&server.url, directory.path()).model(Path::new("hf:tiny/model"));
        assert_eq!(found.ok(), falls_back.then(|| snapshot.clone()), "{status}");
    }
}

#[test]
fn a_model_that_is_not_supported_is_refused_before_its_weights() {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let received = requests.clone();
    let server = ReplyServer::start(move |_, path| {
        received.lock().unwrap().push(path.to_owned());
        if path.starts_with("/api/") {
            let siblings = ["config.json", "tokenizer.json", WEIGHTS].map(|name| json!({"rfilename": name}));
            return (200, Vec::new(), json!({"sha": COMMIT, "siblings": siblings}).to_string().into_bytes());
        }
        let name = path.rsplit('/').next().unwrap_or_default();
        (200, vec![("ETag", format!("\"of-{name}\""))], br#"{"model_type": "unheard"}"#.to_vec())
    });
    let directory = tempfile::tempdir().unwrap();
    let error = hub_at(&server.url, directory.path()).model(Path::new("hf:tiny/model")).unwrap_err();
    assert!(error.is_input() && error.to_string().contains("unheard"), "{error}");
    let requests = requests.lock().unwrap();
    assert!(requests.iter().any(|path| path.ends_with("config.json")), "{requests:?}");
    assert!(!requests.iter().any(|path| path.ends_with(WEIGHTS)), "{requests:?}");
}
