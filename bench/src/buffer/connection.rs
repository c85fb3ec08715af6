//! One keep-alive HTTP/1.1 connection of a load generator, as light as it can be.
//!
//! Invariant: one request at a time, and an answer is read whole before the next. It speaks what a served buffer speaks and
//! no more: every answer must say its length.

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;

/// The longest that one request may take.
const DEADLINE: Duration = Duration::from_secs(30);
/// Longest head of an answer, bytes.
const MAX_HEAD: usize = 16 << 10;
/// Bytes that are read at once.
const READ_BYTES: usize = 16 << 10;
/// Longest answer, bytes.
const MAX_BODY: usize = 1 << 30;

/// A connection to a served buffer.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    received: Vec<u8>,
}

/// What the server said.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Such as 200.
    pub status: u16,
    /// As long as it said.
    pub body: &'a [u8],
}

/// Where the parts of an answer are in what was received.
struct ResponseHead {
    status: u16,
    length: usize,
    body: usize,
}

/// A whole request: head and body in one piece, so that it leaves in one write.
#[must_use]
pub fn request(method: &str, path: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
    .into_bytes();
    request.extend_from_slice(body);
    request
}

impl Connection {
    /// # Errors
    /// The address refuses the connection or does not answer in time.
    pub async fn open(address: SocketAddr) -> Result<Self, Error> {
        let stream = tokio::time::timeout(DEADLINE, TcpStream::connect(address)).await??;
        stream.set_nodelay(true)?;
        Ok(Self { stream, received: Vec::with_capacity(4096) })
    }

    /// Sends a request that [`request`] made and waits for its answer.
    ///
    /// # Errors
    /// A connection that breaks, an answer that is none or does not come in time. The connection is of no use then.
    pub async fn call(&mut self, request: &[u8]) -> Result<Answer<'_>, Error> {
        tokio::time::timeout(DEADLINE, self.exchange(request)).await?
    }

    async fn exchange(&mut self, request: &[u8]) -> Result<Answer<'_>, Error> {
        self.received.clear();
        let mut left = request;
        while !left.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(left) {
                Ok(sent) => left = &left[sent..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        let head = loop {
            if let Some(head) = ResponseHead::parse(&self.received)? {
                break head;
            }
            self.receive().await?;
        };
        let end = head.body + head.length;
        while self.received.len() < end {
            self.receive().await?;
        }
        Ok(Answer { status: head.status, body: &self.received[head.body..end] })
    }

    async fn receive(&mut self) -> Result<(), Error> {
        let mut read = [0; READ_BYTES];
        loop {
            self.stream.readable().await?;
            match self.stream.try_read(&mut read) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(length) => {
                    self.received.extend_from_slice(&read[..length]);
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl ResponseHead {
    /// `None` while it has not arrived.
    fn parse(received: &[u8]) -> Result<Option<Self>, Error> {
        let Some(end) = received.windows(4).position(|bytes| bytes == b"\r\n\r\n") else {
            let too_long = received.len() > MAX_HEAD;
            return if too_long { Err(invalid("an answer with an endless head")) } else { Ok(None) };
        };
        let head =
            std::str::from_utf8(&received[..end]).map_err(|_| invalid("an answer that is not text"))?;
        let (line, headers) = head.split_once("\r\n").unwrap_or((head, ""));
        let status = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        let mut lengths = headers.lines().filter_map(|header| {
            let (name, value) = header.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        });
        let (Some(status), Some(length)) = (status, lengths.next_back()) else {
            return Err(invalid("an answer without status or length"));
        };
        if length > MAX_BODY {
            return Err(invalid("an answer that is too long"));
        }
        Ok(Some(Self { status, length, body: end + 4 }))
    }
}

fn invalid(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_when_they_are_whole() {
        let answer = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}";
        for end in 0..answer.len() - 2 {
            assert!(ResponseHead::parse(&answer[..end]).unwrap().is_none(), "{end} bytes");
        }
        let head = ResponseHead::parse(answer).unwrap().unwrap();
        assert_eq!((head.status, head.length, head.body), (429, 2, answer.len() - 2));
        assert!(ResponseHead::parse(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(ResponseHead::parse(b"SSH-2.0\r\ncontent-length: 1\r\n\r\n").is_err());
    }
}
