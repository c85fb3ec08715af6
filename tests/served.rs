//! A buffer served by `rlrun serve buffer`, and a client that survives restarts of its server.
//!
//! Invariant: this uses only the HTTP API of the buffer. Dropping a server kills it with SIGKILL.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::signal;

/// Deadline of everything that must happen; far longer than needed.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// A served buffer.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Server {
    /// Starts `command` and waits until it listens; `Err` with its output if it does not.
    pub(crate) fn start(command: &mut Command) -> Result<Self, String> {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.trim_end().strip_prefix("listening on http://").map(|address| address.parse().unwrap());
        if let Some(address) = address {
            return Ok(Self { child, address });
        }
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        Err(format!("{:?}: {line}{said}", child.wait().unwrap()))
    }
}

impl Server {
    /// Number of its process.
    #[cfg(feature = "postgres")]
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends the signal `name`, and returns the exit status.
    pub(crate) fn signalled(mut self, name: &str) -> Option<i32> {
        signal(&self.child, name);
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The current address of the server; the port changes with every restart.
#[derive(Default)]
pub(crate) struct Place(Mutex<Option<SocketAddr>>);

impl Place {
    pub(crate) fn at(address: SocketAddr) -> Self {
        Self(Mutex::new(Some(address)))
    }

    pub(crate) fn set(&self, address: SocketAddr) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(address);
    }

    fn get(&self) -> Option<SocketAddr> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client with one connection.
pub(crate) struct Client<'a> {
    place: &'a Place,
    /// What it sends as `x-api-key`, if that is not empty.
    key: String,
    connection: Option<(SocketAddr, BufReader<TcpStream>)>,
}

impl<'a> Client<'a> {
    pub(crate) fn new(place: &'a Place) -> Self {
        Self { place, key: String::new(), connection: None }
    }

    /// The same with a key.
    pub(crate) fn with_key(self, key: &str) -> Self {
        Self { key: key.to_owned(), ..self }
    }

    /// Repeats a request until any server answers it. Returns status and body, and whether it was repeated.
    pub(crate) fn ask(&mut self, method: &str, path: &str, body: &Value) -> (u16, Value, bool) {
        let started = Instant::now();
        let mut again = false;
        loop {
            match self.ask_once(method, path, body) {
                Ok((status, answer)) if status != 503 => return (status, answer, again),
                Ok(_) | Err(_) => again = true,
            }
            assert!(started.elapsed() < SOON, "{method} {path} was not answered in {SOON:?}");
            std::thread::yield_now();
        }
    }

    /// Sends a request once.
    pub(crate) fn ask_once(&mut self, method: &str, path: &str, body: &Value) -> Result<(u16, Value), Error> {
        let result = self.exchange(method, path, body);
        if result.is_err() {
            self.connection = None;
        }
        result
    }

    fn exchange(&mut self, method: &str, path: &str, body: &Value) -> Result<(u16, Value), Error> {
        let address = self.place.get().ok_or(ErrorKind::NotConnected)?;
        if self.connection.as_ref().is_none_or(|(connected_to, _)| *connected_to != address) {
            let stream = TcpStream::connect_timeout(&address, SOON)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(SOON))?;
            self.connection = Some((address, BufReader::new(stream)));
        }
        let (_, connection) = self.connection.as_mut().expect("it has just been made");
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (length, key) = (body.len(), &self.key);
        let key = if key.is_empty() { String::new() } else { format!("x-api-key: {key}\r\n") };
        write!(
            connection.get_mut(),
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{key}\
             content-length: {length}\r\n\r\n{body}"
        )?;
        read_answer(connection)
    }
}

fn read_answer(connection: &mut BufReader<TcpStream>) -> Result<(u16, Value), Error> {
    let mut line = String::new();
    connection.read_line(&mut line)?;
    let status =
        line.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or(ErrorKind::UnexpectedEof)?;
    let mut length = 0;
    loop {
        line.clear();
        if connection.read_line(&mut line)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.parse().map_err(|_| ErrorKind::InvalidData)?;
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body)?;
    let answer = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body)? };
    Ok((status, answer))
}
