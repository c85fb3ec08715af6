//! Messages between this process, the fork server and the workers: a 4-byte little-endian length, then JSON.
//!
//! Invariant: nothing that arrives is trusted. A length above [`MAX_FRAME`] is an error before anything is allocated, and
//! any other unknown message is [`FrameError::Invalid`].

use std::io;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::net::UnixStream;

/// Longest frame in bytes; worker.py has the same number.
pub(super) const MAX_FRAME: usize = 64 << 20;
/// Longest arguments of a call in bytes of JSON: a frame without what surrounds them.
pub(super) const MAX_ARGUMENTS: usize = MAX_FRAME - 1024;
/// Bytes of one read.
const READ: usize = 64 << 10;

/// Configuration that the fork server gets before it imports anything.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PythonWorkerConfig<'a> {
    /// Argument of the adapter's `load`.
    pub(super) adapter: &'a Value,
    /// Seconds that a call may take.
    pub(super) timeout_s: f64,
    /// MiB that a worker may allocate beyond what it shares with the fork server.
    pub(super) memory_mb: u64,
    /// Program of a new interpreter.
    pub(super) bootstrap: &'static str,
}

/// The first message of the fork server.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum StartReport {
    Loaded(LoadedCode),
    Failed { reason: String },
}

/// The code as its adapter found it.
#[derive(Clone, Debug, Deserialize)]
pub struct LoadedCode {
    /// The adapter's own description.
    pub description: Value,
    /// One call of the code takes the arguments of many.
    pub batch: bool,
    /// Calls run together in one event loop.
    pub concurrent: bool,
    /// Why workers are new processes instead of forks, if they are.
    pub spawn: Option<String>,
}

/// A message of the fork server about its workers.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum ServerMessage {
    Forked { id: u64, pid: i32 },
    Refused { id: u64, reason: String },
    Exited { pid: i32, signal: Option<i32>, code: Option<i32> },
}

/// A message of a worker. `call` is the index of a call in its batch.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum WorkerMessage {
    /// It can take a batch.
    Ready,
    /// A call returned.
    Result { call: usize, result: Value },
    /// A call raised an exception, or returned what its adapter does not allow.
    Error { call: usize, reason: String },
    /// The one call for the whole batch raised an exception; `repeat` if calls one by one may succeed.
    Raised { reason: String, repeat: bool },
    /// A call was still waiting when its time was over.
    Timeout { call: usize },
    /// Other calls blocked this one; it has to be called again alone.
    Alone { call: usize },
    /// The batch is over; with `retire` the process asks to be replaced.
    Done { retire: bool },
}

/// Why nothing more can be read or written.
#[derive(Debug)]
pub(super) enum FrameError {
    /// The other side has closed the socket.
    Closed,
    /// The bytes are not a message.
    Invalid(String),
}

impl From<io::Error> for FrameError {
    fn from(_: io::Error) -> Self {
        Self::Closed
    }
}

/// A frame around a body.
pub(super) fn frame(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    [&length.to_le_bytes(), body].concat()
}

/// A message as a frame.
pub(super) fn framed(message: &impl Serialize) -> Vec<u8> {
    frame(&serde_json::to_vec(message).expect("messages have string keys"))
}

/// The message at the start of `bytes` and its length with its header in bytes, or `None` if it is not complete.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<Option<(T, usize)>, FrameError> {
    let Some((header, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*header) as usize;
    if length > MAX_FRAME {
        return Err(FrameError::Invalid(format!("a frame of {length} bytes; the longest has {MAX_FRAME}")));
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    match serde_json::from_slice(body) {
        Ok(message) => Ok(Some((message, 4 + length))),
        Err(error) => {
            let start: String = String::from_utf8_lossy(body).chars().take(80).collect();
            Err(FrameError::Invalid(format!("`{start}`: {error}")))
        }
    }
}

/// Both directions of a socket.
#[derive(Debug)]
pub(super) struct FrameStream {
    stream: Arc<UnixStream>,
    buffer: Vec<u8>,
    /// Bytes at the start of `buffer` that have been returned.
    used: usize,
}

impl FrameStream {
    pub(super) fn new(stream: Arc<UnixStream>) -> Self {
        Self { stream, buffer: Vec::new(), used: 0 }
    }

    /// The next message. Nothing is lost if the future is dropped.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<T, FrameError> {
        loop {
            if let Some((message, length)) = parse(&self.buffer[self.used..])? {
                self.used += length;
                return Ok(message);
            }
            self.buffer.drain(..self.used);
            self.used = 0;
            self.stream.readable().await?;
            let filled = self.buffer.len();
            self.buffer.resize(filled + READ, 0);
            let read = self.stream.try_read(&mut self.buffer[filled..]);
            self.buffer.truncate(filled + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(FrameError::Closed),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(FrameError::Closed),
                _ => {}
            }
        }
    }

    /// Writes complete frames.
    pub(super) async fn send(&self, mut bytes: &[u8]) -> Result<(), FrameError> {
        while !bytes.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(FrameError::Closed),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_are_found_one_after_the_other() {
        let bytes = [
            framed(&serde_json::json!({"kind": "timeout", "call": 3})),
            frame(br#"{"kind":"done","retire":false}"#),
        ]
        .concat();
        let (first, length) = parse::<WorkerMessage>(&bytes).unwrap().unwrap();
        assert!(matches!(first, WorkerMessage::Timeout { call: 3 }));
        let (second, rest) = parse::<WorkerMessage>(&bytes[length..]).unwrap().unwrap();
        assert!(matches!(second, WorkerMessage::Done { retire: false }));
        assert_eq!(length + rest, bytes.len());
        for cut in 0..length {
            assert!(parse::<WorkerMessage>(&bytes[..cut]).unwrap().is_none());
        }
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_its_body_is_there() {
        let header = u32::try_from(MAX_FRAME + 1).unwrap().to_le_bytes();
        let Err(FrameError::Invalid(reason)) = parse::<WorkerMessage>(&header) else {
            panic!("it was accepted")
        };
        assert!(reason.contains("67108865 bytes"), "{reason}");
    }

    proptest! {
        #[test]
        fn no_input_panics(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = parse::<WorkerMessage>(&bytes);
            let _ = parse::<ServerMessage>(&frame(&bytes));
        }
    }
}
