//! A small server that speaks the routes of the Hugging Face Hub, with the faults that networks have.
//!
//! ```text
//!   GET  /api/models/OWNER/NAME/revision/REV           commit and files; /tree/REV: the files alone, for Python
//!   HEAD, GET  /OWNER/NAME/resolve/REV/FILE            a small file, or a redirect to the other port for a large one
//!   GET  /OWNER/NAME/resolve/REV/FILE on that port     the bytes, also a range of them
//! ```
//! Invariant: one request per connection, on loopback alone; every request is kept for the tests. Datasets have the prefix
//! `datasets`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};

/// Files from this length on are on the other port, bytes.
const LARGE_BYTES: usize = 4096;

/// What goes wrong with the bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// The connection ends after so many bytes.
    BreaksOff(usize),
    /// No byte of the file after this one ever comes.
    EndsAt(usize),
    /// Nothing comes after so many bytes, and the connection stays open.
    Stalls(usize),
    /// The answer is whole and has fewer bytes than were announced.
    Short(usize),
    /// One byte is another.
    Damaged,
}

/// A repository at one commit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Repository {
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    pub(crate) configs: Value,
    pub(crate) gated: bool,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
    pub(crate) range: Option<String>,
    /// Whether it came to the port of large files.
    pub(crate) elsewhere: bool,
}

#[derive(Default)]
struct Served {
    /// By `models/OWNER/NAME` or `datasets/OWNER/NAME`.
    repositories: BTreeMap<String, Repository>,
    faults: BTreeMap<String, Fault>,
    received: Vec<Received>,
}

/// A running server; dropping it closes its ports.
pub(crate) struct HubServer {
    pub(crate) url: String,
    elsewhere: String,
    served: Arc<Mutex<Served>>,
    stop: Arc<AtomicBool>,
}

/// Contents of an answer.
#[derive(Default)]
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    fault: Option<Fault>,
}

impl HubServer {
    pub(crate) fn start() -> Self {
        let (own, other) =
            (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let server =
            Self { url: url(&own), elsewhere: url(&other), served: Arc::default(), stop: Arc::default() };
        for (listener, elsewhere) in [(own, false), (other, true)] {
            let (served, stop, cdn) = (server.served.clone(), server.stop.clone(), server.elsewhere.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let (served, stop, cdn) = (served.clone(), stop.clone(), cdn.clone());
                    // A client that goes away is part of the tests.
                    std::thread::spawn(move || {
                        stream.map(|stream| answer(stream, &served, &stop, &cdn, elsewhere))
                    });
                }
            });
        }
        server
    }

    pub(crate) fn put(&self, path: &str, repository: Repository) {
        self.served.lock().unwrap().repositories.insert(path.to_owned(), repository);
    }

    /// Lets `fault` happen to every request for the bytes of this file.
    pub(crate) fn fail(&self, file: &str, fault: Option<Fault>) {
        let faults = &mut self.served.lock().unwrap().faults;
        match fault {
            Some(fault) => faults.insert(file.to_owned(), fault),
            None => faults.remove(file),
        };
    }

    /// The requests since the last call.
    pub(crate) fn received(&self) -> Vec<Received> {
        std::mem::take(&mut self.served.lock().unwrap().received)
    }
}

impl Drop for HubServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for url in [&self.url, &self.elsewhere] {
            // Wakes the thread that accepts.
            let _ = TcpStream::connect(url.trim_start_matches("http://"));
        }
    }
}

fn answer(
    mut stream: TcpStream,
    served: &Mutex<Served>,
    stop: &AtomicBool,
    cdn: &str,
    elsewhere: bool,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let header = |name: &str| headers.get(name).cloned();
    let (authorization, range) = (header("authorization"), header("range"));
    let received = Received { method: method.clone(), path, authorization, range, elsewhere };
    let answer = {
        let mut served = served.lock().unwrap();
        served.received.push(received.clone());
        route(&served, &received, cdn)
    };
    let Answer { status, headers, body, fault } = answer;
    let (mut announced, mut sent) = (body.len(), body.len());
    let mut body = body;
    match fault {
        Some(Fault::BreaksOff(count) | Fault::Stalls(count)) => sent = sent.min(count),
        Some(Fault::Short(count)) => (announced, sent) = (announced.min(count), sent.min(count)),
        Some(Fault::EndsAt(_)) => {}
        Some(Fault::Damaged) => body.iter_mut().take(1).for_each(|byte| *byte ^= 1),
        None => {}
    }
    write!(stream, "HTTP/1.1 {status} answer\r\nConnection: close\r\n")?;
    if !headers.iter().any(|(name, _)| *name == "Content-Length") {
        write!(stream, "Content-Length: {announced}\r\n")?;
    }
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    write!(stream, "\r\n")?;
    if method != "HEAD" {
        stream.write_all(&body[..sent])?;
    }
    stream.flush()?;
    while matches!(fault, Some(Fault::Stalls(_))) && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn route(served: &Served, received: &Received, cdn: &str) -> Answer {
    let path = received.path.split('?').next().unwrap_or_default().trim_start_matches('/');
    let error = |status, code: &str| Answer {
        status,
        headers: vec![("X-Error-Code", code.to_owned()), ("X-Error-Message", "as the test wants".to_owned())],
        ..Answer::default()
    };
    let (key, revision, file) = if let Some(rest) = path.strip_prefix("api/") {
        let named = rest.split_once("/revision/").or_else(|| rest.split_once("/tree/"));
        let (key, revision) = named.unwrap_or((rest, "main"));
        (key.to_owned(), revision.to_owned(), None)
    } else {
        let (name, rest) = path.split_once("/resolve/").unwrap_or((path, ""));
        let (revision, file) = rest.split_once('/').unwrap_or((rest, ""));
        let key = if name.starts_with("datasets/") { name.to_owned() } else { format!("models/{name}") };
        (key, revision.to_owned(), Some(file.to_owned()))
    };
    let Some(repository) = served.repositories.get(&key) else {
        return error(if received.authorization.is_some() { 404 } else { 401 }, "RepoNotFound");
    };
    if revision != "main" && revision != repository.commit {
        return error(404, "RevisionNotFound");
    }
    let Some(file) = file else {
        return listing(repository, &key, path.contains("/tree/"));
    };
    if repository.gated && !received.elsewhere && received.authorization.as_deref() != Some("Bearer granted")
    {
        return error(if received.authorization.is_some() { 403 } else { 401 }, "GatedRepo");
    }
    let Some(bytes) = repository.files.get(&file) else { return error(404, "EntryNotFound") };
    let large = bytes.len() >= LARGE_BYTES;
    let mut headers =
        vec![("X-Repo-Commit", repository.commit.clone()), ("Accept-Ranges", "bytes".to_owned())];
    if large && !received.elsewhere {
        headers.push(("Location", format!("{cdn}/{path}")));
        headers.push(("X-Linked-Size", bytes.len().to_string()));
        headers.push(("X-Linked-ETag", format!("\"{}\"", hexadecimal(digest(&SHA256, bytes).as_ref()))));
        headers.push(("ETag", "\"of the pointer\"".to_owned()));
        return Answer { status: 302, headers, ..Answer::default() };
    }
    let git = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    headers.push(("ETag", format!("\"{}\"", hexadecimal(digest(&SHA1_FOR_LEGACY_USE_ONLY, &git).as_ref()))));
    if received.method == "HEAD" {
        headers.push(("Content-Length", bytes.len().to_string()));
        return Answer { status: 200, headers, ..Answer::default() };
    }
    let fault = served.faults.get(&file).copied();
    let from: Option<usize> = received
        .range
        .as_ref()
        .and_then(|range| range.strip_prefix("bytes=")?.split('-').next()?.parse().ok());
    let fault = match fault {
        Some(Fault::EndsAt(end)) => Some(Fault::BreaksOff(end.saturating_sub(from.unwrap_or(0)))),
        fault => fault,
    };
    match from {
        Some(from) if from < bytes.len() => {
            headers.push(("Content-Range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len())));
            Answer { status: 206, headers, body: bytes[from..].to_vec(), fault }
        }
        Some(_) => error(416, ""),
        None => Answer { status: 200, headers, body: bytes.clone(), fault },
    }
}

/// What the hub says of a repository: the files of a commit, or with `tree` the entries of its folder.
fn listing(repository: &Repository, key: &str, tree: bool) -> Answer {
    let files = repository.files.iter();
    let body = if tree {
        let entry = |(name, bytes): (&String, &Vec<u8>)| json!({"type": "file", "path": name, "size": bytes.len(), "oid": "of git"});
        Value::from_iter(files.map(entry))
    } else {
        let siblings: Vec<Value> =
            files.map(|(name, bytes)| json!({"rfilename": name, "size": bytes.len()})).collect();
        let id = key.split_once('/').unwrap_or_default().1;
        json!({"id": id, "modelId": id, "sha": repository.commit, "siblings": siblings, "private": false,
            "gated": repository.gated, "downloads": 0, "likes": 0, "tags": [], "cardData": {"configs": repository.configs}})
    };
    Answer { status: 200, body: body.to_string().into_bytes(), ..Answer::default() }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
