//! HTTP connections of the crates. The blocking client, over ureq: one connection pool per server, TLS roots from a PEM file, a
//! filter of addresses, and a classification of failures by what may be repeated. And the [`listener`] of servers, with [`tls`].
//!
//! Invariant: every request has a deadline, an answer that has begun progresses, no redirect is followed, and no environment
//! variable configures a proxy. The crate knows no protocol: paths, bodies, error documents and retry policies belong to its
//! users, such as `buffer`, `weights` and `rewards`.

pub mod listener;
mod progress;
pub mod tls;
mod write_deadline;

use std::fmt;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ureq::config::Config;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;
use ureq::{Agent, AsSendBody, Timeout};

use self::progress::ProgressConnector;

pub use ureq::http::request::Builder as RequestBuilder;
pub use ureq::http::{Error as RequestError, HeaderValue, Request, Response, Uri};
pub use ureq::{Body, BodyReader, Error as BodyError};

/// Deadline of a TCP connection and its TLS handshake.
const CONNECT: Duration = Duration::from_secs(10);
/// Longest time without a byte of an answer that has begun.
const PROGRESS: Duration = Duration::from_secs(60);
/// Servers close idle connections after a few seconds; a connection that is idle for longer than this is not reused.
const MAX_IDLE: Duration = Duration::from_secs(4);
/// Maximum number of idle connections: one for each thread that may call at the same time.
const IDLE_CONNECTIONS: usize = 64;

/// Where a server is, and how to authenticate.
#[derive(Clone, Copy)]
pub struct ServerAddress<'a> {
    /// Such as `http://127.0.0.1:8700`.
    pub url: &'a str,
    /// Bearer token, if the server wants one.
    pub token: Option<&'a str>,
    /// PEM file with the TLS roots to trust instead of those of browsers.
    pub roots: Option<&'a Path>,
}

/// Whether connections to an address that a host name resolved to are allowed; else the reason why they are not.
pub type AddressFilter = Box<dyn Fn(&str, IpAddr) -> Result<(), String> + Send + Sync>;

/// A pool of connections.
pub struct HttpAgent {
    agent: Agent,
    /// Whether answers may pause for as long as their request may take.
    pauses: bool,
}

/// The connections to one server.
pub struct HttpClient {
    agent: HttpAgent,
    /// Without a slash at the end.
    url: String,
    authorization: Option<String>,
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The server has not seen the request: it can be repeated.
    #[error("{0}")]
    NotSent(String),
    /// The server may have processed the request: only an idempotent one can be repeated.
    #[error("{0}")]
    Unclear(String),
    /// No repetition will succeed.
    #[error("{0}")]
    Permanent(String),
}

impl HttpAgent {
    /// An agent that keeps at most `connections` idle connections. With `filter`, the checked address is the one that is
    /// connected to, so a name that resolves differently a moment later has no effect.
    ///
    /// # Errors
    /// Certificates in `roots`, a PEM file, that cannot be read.
    pub fn new(
        roots: Option<&Path>,
        connections: usize,
        filter: Option<AddressFilter>,
    ) -> Result<Self, String> {
        Self::with_progress(roots, connections, filter, PROGRESS)
    }

    /// [`Self::new`], with the longest time `progress` without a byte of an answer that has begun.
    fn with_progress(
        roots: Option<&Path>,
        connections: usize,
        filter: Option<AddressFilter>,
        progress: Duration,
    ) -> Result<Self, String> {
        let tls = match roots {
            None => TlsConfig::builder(),
            Some(path) => TlsConfig::builder().root_certs(RootCerts::Specific(Arc::new(certificates(path)?))),
        };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(progress))
            .max_idle_age(MAX_IDLE)
            .max_idle_connections(connections)
            .max_idle_connections_per_host(connections)
            .tls_config(tls.build())
            .build();
        let resolver = FilteringResolver { filter, inner: DefaultResolver::default() };
        let agent = Agent::with_parts(config, ProgressConnector::default(), resolver);
        Ok(Self { agent, pauses: false })
    }

    /// The same agent for servers that send the head of an answer before they compute the rest: only the limit of a request ends it.
    #[must_use]
    pub fn with_pauses(self) -> Self {
        Self { pauses: true, ..self }
    }

    /// Sends a request and reads the head of its answer, whatever its status, within `limit`. Reading the body counts
    /// too. [`Duration::MAX`] is no limit. An answer that sends nothing for a minute after it has begun is an error, unless the
    /// agent allows pauses ([`Self::with_pauses`]) or the request accepts a stream of events, which come at any time.
    ///
    /// # Errors
    /// A request without an answer.
    pub fn send(
        &self,
        request: Request<impl AsSendBody>,
        limit: Duration,
    ) -> Result<Response<Body>, SendError> {
        let limit = Some(limit).filter(|limit| *limit < Duration::MAX);
        let accepted = request.headers().get("accept").and_then(|accepted| accepted.to_str().ok());
        let events = accepted.is_some_and(|accepted| accepted.contains("text/event-stream"));
        let mut config = self.agent.configure_request(request).timeout_global(limit);
        if events || self.pauses {
            config = config.timeout_per_read(None);
        }
        Ok(self.agent.run(config.build())?)
    }
}

impl HttpClient {
    /// Connects with the first request.
    ///
    /// # Errors
    /// Certificates that cannot be read.
    pub fn new(server: ServerAddress<'_>) -> Result<Self, String> {
        let agent = HttpAgent::new(server.roots, IDLE_CONNECTIONS, None)?;
        let authorization = server.token.map(|token| format!("Bearer {token}"));
        Ok(Self { agent, url: server.url.trim_end_matches('/').to_owned(), authorization })
    }

    /// The URL of the server, without a slash at the end.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A request to `path`, which begins with a slash, with the token.
    #[must_use]
    pub fn request(&self, method: &str, path: &str) -> RequestBuilder {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        match &self.authorization {
            Some(authorization) => request.header("authorization", authorization),
            None => request,
        }
    }

    /// [`HttpAgent::send`].
    ///
    /// # Errors
    /// A request without an answer.
    pub fn send(
        &self,
        request: Request<impl AsSendBody>,
        limit: Duration,
    ) -> Result<Response<Body>, SendError> {
        self.agent.send(request, limit)
    }
}

/// A resolver that returns only the addresses that its filter allows.
struct FilteringResolver {
    filter: Option<AddressFilter>,
    inner: DefaultResolver,
}

impl Resolver for FilteringResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.inner.resolve(uri, config, timeout)?;
        let Some(filter) = &self.filter else { return Ok(found) };
        let host = uri.host().unwrap_or_default();
        let (mut allowed, mut refused) = (self.empty(), None);
        for address in found.iter() {
            match filter(host, address.ip()) {
                Ok(()) => allowed.push(*address),
                Err(reason) => refused = Some(reason),
            }
        }
        match refused {
            Some(reason) if allowed.is_empty() => Err(ureq::Error::Other(reason.into())),
            _ => Ok(allowed),
        }
    }
}

impl fmt::Debug for FilteringResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FilteringResolver").field("filters", &self.filter.is_some()).finish_non_exhaustive()
    }
}

impl fmt::Debug for HttpAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpAgent").finish_non_exhaustive()
    }
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClient").field("url", &self.url).finish_non_exhaustive()
    }
}

impl fmt::Debug for ServerAddress<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerAddress").field("url", &self.url).finish_non_exhaustive()
    }
}

impl From<ureq::Error> for SendError {
    fn from(error: ureq::Error) -> Self {
        let reason = error.to_string();
        match error {
            ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => Self::NotSent(reason),
            // No address of the host can be connected to.
            ureq::Error::Io(error)
                if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::AddrNotAvailable) =>
            {
                Self::NotSent(reason)
            }
            ureq::Error::Io(_)
            | ureq::Error::Timeout(_)
            | ureq::Error::Protocol(_)
            | ureq::Error::BodyStalled => Self::Unclear(reason),
            _ => Self::Permanent(reason),
        }
    }
}

/// The certificates in a PEM file; at least one.
fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, String> {
    let failed = |reason: String| format!("{}: {reason}; name a PEM file with certificates", path.display());
    let pem = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let mut found = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| failed(error.to_string()))? {
            found.push(certificate);
        }
    }
    if found.is_empty() { Err(failed("it has no certificate".to_owned())) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_that_are_no_certificates_are_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let server = |roots| ServerAddress { url: "https://127.0.0.1:1", token: None, roots: Some(roots) };
        let error = HttpClient::new(server(file.path())).unwrap_err();
        assert!(error.contains("it has no certificate; name a PEM file"), "{error}");
        let error = HttpClient::new(server(Path::new("/nowhere/roots.pem"))).unwrap_err();
        assert!(error.starts_with("/nowhere/roots.pem: "), "{error}");
    }

    #[test]
    fn a_refused_connection_can_be_repeated() {
        // A port that was free a moment ago.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let url = format!("http://127.0.0.1:{port}/");
        let client = HttpClient::new(ServerAddress { url: &url, token: Some("t"), roots: None }).unwrap();
        let request = client.request("GET", "/healthz").body(()).unwrap();
        assert_eq!(request.headers()["authorization"], "Bearer t");
        let error = client.send(request, Duration::from_secs(10)).unwrap_err();
        assert!(matches!(error, SendError::NotSent(_)), "{error:?}");
    }
}
