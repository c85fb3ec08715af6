//! A client of HTTP over one socket per request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::{Endpoint, SOON};

/// An answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) text: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The JSON of a success.
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// Name and JSON of every event of a stream; comments and `[DONE]` left out.
    pub(crate) fn events(&self) -> Vec<(String, Value)> {
        assert_eq!(self.status, 200, "{self:?}");
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let blocks = self.text.split("\n\n").filter(|block| !block.trim().is_empty());
        let event = |block: &str| {
            let field = |name: &str| {
                block.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
            };
            let data = field("data:").filter(|data| data != "[DONE]")?;
            Some((field("event:").unwrap_or_default(), serde_json::from_str(&data).unwrap()))
        };
        blocks.filter_map(event).collect()
    }

    /// The JSON of every chunk of one of OpenAI's streams, whose end is checked.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        assert!(self.text.ends_with("data: [DONE]\n\n"), "{self:?}");
        self.events().into_iter().map(|(_, chunk)| chunk).collect()
    }
}

impl Endpoint {
    /// Sends a request and leaves its answer to be read.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        stream
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        read(self.send(method, path, headers, body))
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.request("GET", path, &[], "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        self.request("POST", path, &[], &body.to_string())
    }

    /// The same with more fields.
    pub(crate) fn post_with(&self, path: &str, body: &Value, more: &Value) -> Reply {
        let mut body = body.clone();
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        self.post(path, &body)
    }
}

/// The whole answer.
pub(crate) fn read(stream: TcpStream) -> Reply {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no status in {line:?}"));
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_lowercase(), value.trim().to_owned()));
    }
    let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let mut text = Vec::new();
    if chunked {
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            let length = usize::from_str_radix(line.trim_end(), 16).unwrap_or(0);
            if length == 0 {
                break;
            }
            let mut chunk = vec![0; length + 2];
            reader.read_exact(&mut chunk).unwrap();
            text.extend(&chunk[..length]);
        }
    } else {
        reader.read_to_end(&mut text).unwrap();
    }
    Reply { status, headers, text: String::from_utf8(text).unwrap() }
}

/// A chat of one message.
pub(crate) fn hello() -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8})
}
