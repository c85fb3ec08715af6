//! What the parent process, the workers and this side say to each other: a 4-byte little-endian length, then JSON.
//!
//! Invariant: nothing that arrives is trusted. A length above [`MAX_FRAME`] is an error before anything is allocated, and
//! what is not one of the messages below is [`Broken::Garbage`].

use std::io;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::net::UnixStream;

/// Longest frame in bytes; the same number stands in worker.py.
pub(super) const MAX_FRAME: usize = 64 << 20;
/// Bytes read at once.
const READ: usize = 64 << 10;

/// What the parent process is told before it imports anything.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Config {
    /// File, module, or either with `:function`.
    pub(super) path: Option<String>,
    /// Text of the file instead of `path`.
    pub(super) source: Option<String>,
    /// Name of the function.
    pub(super) function: Option<String>,
    /// Name of the dialect, or `auto`.
    pub(super) dialect: String,
    /// Keyword arguments for the function.
    pub(super) parameters: Map<String, Value>,
    /// Seconds that a call may take.
    pub(super) timeout_s: f64,
    /// MiB that a worker may allocate beyond what it shares with the parent.
    pub(super) memory_mb: u64,
    /// Program of a new interpreter.
    pub(super) bootstrap: &'static str,
}

/// The first message of the parent process.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Greeting {
    Hello(Hello),
    Failed { reason: String },
}

/// What was found in the file.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Hello {
    /// Dialect of the function.
    pub(super) dialect: String,
    /// Its name.
    pub(super) function: String,
    /// What items must contain beside what all contain.
    pub(super) needs: Vec<String>,
    /// Called once for many items.
    pub(super) batch: bool,
    /// Called with whole groups.
    pub(super) group: bool,
    /// Called for many items in one event loop.
    pub(super) concurrent: bool,
    /// Why workers are new processes instead of forks, if they are.
    pub(super) spawn: Option<String>,
}

/// What the parent process says of its workers.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Notice {
    Forked { id: u64, pid: i32 },
    Refused { id: u64, reason: String },
    Exited { pid: i32, signal: Option<i32>, code: Option<i32> },
}

/// What a worker says.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Report {
    /// It takes calls.
    Ready,
    /// An item ended with a value; without one the reward does not apply.
    Value { item: usize, value: Option<f64>, details: Map<String, Value> },
    /// An item ended with NaN or an infinity, as text.
    NotFinite { item: usize, value: String },
    /// An item ended with an exception or a value that is none.
    Error { item: usize, reason: String },
    /// The call of a batch ended with an exception; `repeat` if single items may do better.
    Raised { reason: String, repeat: bool },
    /// An item was still waiting when its time was over.
    Timeout { item: usize },
    /// An item was held up by others and shall be called again by itself.
    Alone { item: usize },
    /// The call is over; with `retire` the process wants to be replaced.
    Done { retire: bool },
}

/// Why nothing more can be read or written.
#[derive(Debug)]
pub(super) enum Broken {
    /// The other side is gone.
    Ended,
    /// It said something that is no message.
    Garbage(String),
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self::Ended
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

/// The message at the start of `bytes` and the bytes that it takes, or `None` if it is not there completely.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<Option<(T, usize)>, Broken> {
    let Some((header, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*header) as usize;
    if length > MAX_FRAME {
        return Err(Broken::Garbage(format!(
            "a frame of {length} bytes, where {MAX_FRAME} are the most there can be"
        )));
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    match serde_json::from_slice(body) {
        Ok(message) => Ok(Some((message, 4 + length))),
        Err(error) => {
            let start: String = String::from_utf8_lossy(body).chars().take(80).collect();
            Err(Broken::Garbage(format!("`{start}`: {error}")))
        }
    }
}

/// Both directions of a socket.
#[derive(Debug)]
pub(super) struct Frames {
    stream: Arc<UnixStream>,
    buffer: Vec<u8>,
    /// Bytes at the start of `buffer` that have been handed out.
    used: usize,
}

impl Frames {
    pub(super) fn new(stream: Arc<UnixStream>) -> Self {
        Self { stream, buffer: Vec::new(), used: 0 }
    }

    /// The next message. Nothing is lost if the future is dropped.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<T, Broken> {
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
                Ok(0) => return Err(Broken::Ended),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(Broken::Ended),
                _ => {}
            }
        }
    }

    /// Writes bytes that are frames already.
    pub(super) async fn send(&self, mut bytes: &[u8]) -> Result<(), Broken> {
        while !bytes.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(Broken::Ended),
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
            framed(&serde_json::json!({"kind": "timeout", "item": 3})),
            frame(br#"{"kind":"done","retire":false}"#),
        ]
        .concat();
        let (first, length) = parse::<Report>(&bytes).unwrap().unwrap();
        assert!(matches!(first, Report::Timeout { item: 3 }));
        let (second, rest) = parse::<Report>(&bytes[length..]).unwrap().unwrap();
        assert!(matches!(second, Report::Done { retire: false }));
        assert_eq!(length + rest, bytes.len());
        for cut in 0..length {
            assert!(parse::<Report>(&bytes[..cut]).unwrap().is_none());
        }
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_its_body_is_there() {
        let header = u32::try_from(MAX_FRAME + 1).unwrap().to_le_bytes();
        let Err(Broken::Garbage(reason)) = parse::<Report>(&header) else { panic!("it was accepted") };
        assert!(reason.contains("67108865 bytes"), "{reason}");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = parse::<Report>(&bytes);
            let _ = parse::<Notice>(&frame(&bytes));
        }
    }
}
