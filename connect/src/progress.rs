//! Connections whose answers have to progress. Invariant: once an answer has begun, the time without a byte of it has the limit
//! that ureq calls per read. The time to its first byte is that of the server's work, and has the deadline of the request alone.

use std::io;
use std::time::Duration;

use ureq::Timeout;
use ureq::http::Uri;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, DefaultConnector, NextTimeout, Transport,
};

/// Opens the connections of an agent.
#[derive(Debug, Default)]
pub(crate) struct ProgressConnector(DefaultConnector);

impl Connector for ProgressConnector {
    type Out = ProgressTransport;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<()>,
    ) -> Result<Option<ProgressTransport>, ureq::Error> {
        let server = origin(details.uri);
        let inner = self.0.connect(details, chained)?;
        Ok(inner.map(|inner| ProgressTransport { inner, server, received: 0 }))
    }
}

/// A connection to a server.
#[derive(Debug)]
pub(crate) struct ProgressTransport {
    inner: Box<dyn Transport>,
    /// Its scheme, host and port, for messages: the rest of an address may be a secret.
    server: String,
    /// Bytes of the answer so far.
    received: usize,
}

impl Transport for ProgressTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.inner.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.received = 0;
        self.inner.transmit_output(amount, timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        let limit = timeout.per_read.filter(|_| self.received > 0);
        let before = self.inner.buffers().input().len();
        let waited = self.inner.await_input(NextTimeout { per_read: limit, ..timeout });
        self.received += self.inner.buffers().input().len().saturating_sub(before);
        match (waited, limit) {
            (Err(ureq::Error::Timeout(Timeout::PerRead)), Some(limit)) => Err(self.stalled(*limit)),
            (waited, _) => waited,
        }
    }

    fn is_open(&mut self) -> bool {
        self.inner.is_open()
    }

    fn is_tls(&self) -> bool {
        self.inner.is_tls()
    }
}

impl ProgressTransport {
    fn stalled(&self, limit: Duration) -> ureq::Error {
        let (server, received) = (&self.server, self.received);
        let seconds = limit.as_secs_f64();
        ureq::Error::Io(io::Error::other(format!(
            "{server} sent no byte for {seconds} s after {received} bytes of its answer; see whether it still runs and is \
             reached over the network, and try again"
        )))
    }
}

/// Scheme, host and port of an address.
fn origin(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let (_, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    format!("{}://{host}", uri.scheme_str().unwrap_or("http"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use crate::{HttpAgent, Request};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(50);
    const PAUSE: Duration = Duration::from_millis(250);
    const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n";

    /// The URL of a server that answers one request with `parts`, each after `pause`, and keeps the connection open.
    fn serve(parts: Vec<String>, pause: Duration) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") {
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            for part in parts {
                std::thread::sleep(pause);
                // The client may have closed the connection.
                let _ = stream.write_all(part.as_bytes());
            }
            let _ = stream.read_to_end(&mut head);
        });
        url
    }

    fn agent() -> HttpAgent {
        HttpAgent::with_progress(None, 1, None, LIMIT).unwrap()
    }

    /// The body of the answer to a request of `agent` that accepts `accept`, without a deadline.
    fn body(agent: &HttpAgent, url: &str, accept: &str) -> Result<String, String> {
        let request = Request::builder().uri(format!("{url}/weights?token=secret")).header("accept", accept);
        let answer = agent.send(request.body(()).unwrap(), Duration::MAX);
        let answer = answer.map_err(|error| error.to_string())?;
        let mut text = String::new();
        let read = answer.into_body().into_reader().read_to_string(&mut text);
        read.map(|_| text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_that_stops_within_its_body_is_an_error_with_what_has_come() {
        for answer in [format!("{HEAD}abc"), HEAD.to_owned()] {
            let received = answer.len();
            let url = serve(vec![answer], Duration::ZERO);
            let error = body(&agent(), &url, "*/*").unwrap_err();
            let expected = format!("{url} sent no byte for 0.05 s after {received} bytes of its answer; see");
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    #[test]
    fn an_answer_may_begin_late_and_pause_where_pauses_are_expected() {
        let late = serve(vec![format!("{HEAD}abcdef")], PAUSE);
        assert_eq!(body(&agent(), &late, "*/*").unwrap(), "abcdef");
        let events = serve(vec![format!("{HEAD}abc"), "def".to_owned()], PAUSE);
        assert_eq!(body(&agent(), &events, "application/json, text/event-stream").unwrap(), "abcdef");
        let computed = serve(vec![HEAD.to_owned(), "abcdef".to_owned()], PAUSE);
        assert_eq!(body(&agent().with_pauses(), &computed, "*/*").unwrap(), "abcdef");
    }

    #[test]
    fn a_server_is_named_without_what_may_be_secret() {
        let uri: Uri = "https://name:word@host:8700/file?signature=x".parse().unwrap();
        assert_eq!(origin(&uri), "https://host:8700");
    }
}
