//! A client of HTTP with one socket per request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use serde_json::Value;

use crate::{SOON, ServedPage};

/// An answer.
#[derive(Debug)]
pub(crate) struct PageReply {
    pub(crate) status: u16,
    /// Names in lower case.
    headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl PageReply {
    /// The JSON of a success.
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        serde_json::from_str(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
    }
}

impl ServedPage {
    pub(crate) fn get(&self, path: &str) -> PageReply {
        self.request(path, &[("host", "localhost")])
    }

    pub(crate) fn request(&self, path: &str, headers: &[(&str, &str)]) -> PageReply {
        let mut reader = BufReader::new(self.send(path, headers, "close"));
        let (status, headers) = read_head(&mut reader);
        let mut body = String::new();
        reader.read_to_string(&mut body).unwrap();
        PageReply { status, headers, body }
    }

    /// Opens `/api/events`; the reader is behind the head of the answer.
    pub(crate) fn stream(&self) -> BufReader<TcpStream> {
        let mut reader = BufReader::new(self.send("/api/events", &[("host", "localhost")], "keep-alive"));
        let (status, _) = read_head(&mut reader);
        assert_eq!(status, 200);
        reader
    }

    fn send(&self, path: &str, headers: &[(&str, &str)], connection: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        write!(stream, "GET {path} HTTP/1.1\r\n{headers}connection: {connection}\r\n\r\n").unwrap();
        stream
    }
}

fn read_head(reader: &mut BufReader<TcpStream>) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap().parse().unwrap();
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(':') else { return (status, headers) };
        headers.push((name.to_lowercase(), value.trim().to_owned()));
    }
}

/// The next event of a stream.
pub(crate) fn next_event(reader: &mut BufReader<TcpStream>) -> Value {
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended");
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str(data).unwrap();
        }
    }
}
