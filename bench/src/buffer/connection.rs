//! One keep-alive HTTP/1.1 connection of a load generator, over hyper.
//!
//! Invariant: one request at a time, and an answer is read whole before the next. Every request has a deadline.

use std::io::Error;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// The longest that one request may take.
const DEADLINE: Duration = Duration::from_secs(30);
/// Longest answer, bytes.
const MAX_BODY: usize = 1 << 30;

/// A connection to a served buffer.
#[derive(Debug)]
pub struct Connection {
    requests: SendRequest<Full<Bytes>>,
}

/// The response of the server.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Such as 200.
    pub status: u16,
    /// The whole body.
    pub body: Bytes,
}

impl Connection {
    /// # Errors
    /// The address refuses the connection or does not answer in time.
    pub async fn open(address: SocketAddr) -> Result<Self, Error> {
        let stream = tokio::time::timeout(DEADLINE, TcpStream::connect(address)).await??;
        stream.set_nodelay(true)?;
        let (requests, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(Error::other)?;
        // It ends when `requests` is dropped; its failure is that of the request.
        tokio::spawn(connection);
        Ok(Self { requests })
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// A connection that breaks, an answer that is invalid or does not come in time. The connection is of no use then.
    pub async fn call(&mut self, method: Method, path: &str, body: Bytes) -> Result<Answer, Error> {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(HOST, "127.0.0.1").header(CONTENT_TYPE, "application/json");
        let request = request.body(Full::new(body)).map_err(Error::other)?;
        tokio::time::timeout(DEADLINE, self.exchange(request)).await?
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> Result<Answer, Error> {
        self.requests.ready().await.map_err(Error::other)?;
        let response = self.requests.send_request(request).await.map_err(Error::other)?;
        let status = response.status().as_u16();
        let body = Limited::new(response.into_body(), MAX_BODY).collect().await.map_err(Error::other)?;
        Ok(Answer { status, body: body.to_bytes() })
    }
}
