//! How a sampler asks: one request and its answer. Invariant: every request has a limit of time, and an answer one of bytes.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use trajectory::PolicyVersion;
use ureq::Agent;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};

use super::wire::WeightsProblem;
use crate::WeightsError;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an answer may take beside what the request waits.
const ANSWER: Duration = Duration::from_secs(30);
/// The slowest network that weights are sent over, bytes per second.
const SLOWEST: u64 = 1 << 20;
/// Largest answer but for weights, bytes.
const MAX_ANSWER: u64 = 64 << 10;
/// Servers close connections that are idle for ten seconds; one that may be just about to is not used.
const MAX_IDLE: Duration = Duration::from_secs(5);

/// Why there is no answer that can be used.
#[derive(Debug)]
pub(super) enum FetchError {
    /// The server is not there, or went away meanwhile: it may come back.
    Unreachable(String),
    /// It no longer has what was asked for.
    VersionGone,
    /// It sent something else than weights of the version.
    Corrupt(String),
    /// It will not answer otherwise.
    Refused(WeightsError),
}

/// The connections to a server.
pub(super) struct HubClient {
    agent: Agent,
    /// Without a slash at the end.
    url: String,
    authorization: Option<String>,
    name: String,
}

impl HubClient {
    pub(super) fn new(
        url: &str,
        token: Option<&str>,
        roots: Option<&Path>,
        name: &str,
    ) -> Result<Self, WeightsError> {
        let url = url.trim_end_matches('/').to_owned();
        let mut config = Agent::config_builder()
            .timeout_connect(Some(CONNECT))
            .max_idle_age(MAX_IDLE)
            .max_redirects(0)
            .http_status_as_error(false)
            .proxy(None);
        if let Some(roots) = roots {
            let refused = |detail| Self::refused(&url, name, "bad_certificates", detail);
            let roots = RootCerts::Specific(Arc::new(certificates(roots).map_err(refused)?));
            config = config.tls_config(TlsConfig::builder().root_certs(roots).build());
        }
        let authorization = token.map(|token| format!("Bearer {token}"));
        Ok(Self { agent: config.build().new_agent(), url, authorization, name: name.to_owned() })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Asks with the fields of `asked`, and waits for it as long as the server may.
    pub(super) fn get<T: DeserializeOwned>(
        &self,
        route: &str,
        asked: &impl Serialize,
        wait: Duration,
    ) -> Result<T, FetchError> {
        let request = self.request("GET", route, asked)?;
        let request = self.agent.configure_request(request.body(()).map_err(|e| self.hopeless(&e))?);
        self.answer(self.agent.run(request.timeout_global(Some(wait + ANSWER)).build()))
    }

    /// Leaves, if that is quick.
    pub(super) fn delete(
        &self,
        route: &str,
        asked: &impl Serialize,
        limit: Duration,
    ) -> Result<(), FetchError> {
        let request = self.request("DELETE", route, asked)?;
        let request = self.agent.configure_request(request.body(()).map_err(|e| self.hopeless(&e))?);
        self.agent.run(request.timeout_global(Some(limit)).build()).map_err(|error| self.failed(&error))?;
        Ok(())
    }

    pub(super) fn post<T: DeserializeOwned>(
        &self,
        route: &str,
        body: &impl Serialize,
        limit: Duration,
    ) -> Result<T, FetchError> {
        let body = serde_json::to_vec(body).map_err(|error| self.hopeless(&error))?;
        let request = self.request("POST", route, &())?.header("content-type", "application/json");
        let request = self.agent.configure_request(request.body(&body[..]).map_err(|e| self.hopeless(&e))?);
        self.answer(self.agent.run(request.timeout_global(Some(limit)).build()))
    }

    /// Weights, of at most so many bytes.
    pub(super) fn weights(
        &self,
        route: &str,
        asked: &impl Serialize,
        limit: u64,
    ) -> Result<ureq::BodyReader<'static>, FetchError> {
        let request = self.request("GET", route, asked)?;
        let request = self.agent.configure_request(request.body(()).map_err(|e| self.hopeless(&e))?);
        let wait = ANSWER + Duration::from_secs(limit / SLOWEST);
        let sent = self.agent.run(request.timeout_global(Some(wait)).build());
        let mut response = sent.map_err(|error| self.failed(&error))?;
        if response.status() != 200 {
            return Err(self.problem_error(&mut response));
        }
        Ok(response.into_body().into_with_config().limit(limit + 1).reader())
    }

    fn request(
        &self,
        method: &str,
        route: &str,
        asked: &impl Serialize,
    ) -> Result<ureq::http::request::Builder, FetchError> {
        let fields = serde_json::to_value(asked).map_err(|error| self.hopeless(&error))?;
        let fields = fields.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        // Names have no character but spaces that would have to be written otherwise, and numbers none.
        let text = |value: &serde_json::Value| match value.as_str() {
            Some(text) => text.replace(' ', "%20"),
            None => value.to_string(),
        };
        let query: Vec<String> = fields.map(|(name, value)| format!("{name}={}", text(value))).collect();
        let mark = if query.is_empty() { "" } else { "?" };
        let uri = format!("{}/v1/weights/{route}{mark}{}", self.url, query.join("&"));
        let builder = ureq::http::Request::builder().method(method).uri(uri);
        Ok(match &self.authorization {
            Some(authorization) => builder.header("authorization", authorization),
            None => builder,
        })
    }

    fn answer<T: DeserializeOwned>(
        &self,
        sent: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<T, FetchError> {
        let mut response = sent.map_err(|error| self.failed(&error))?;
        if response.status() != 200 {
            return Err(self.problem_error(&mut response));
        }
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let body = body.map_err(|error| FetchError::Unreachable(error.to_string()))?;
        serde_json::from_slice(&body).map_err(|error| {
            FetchError::Refused(self.refuse("bad_answer", format!("it makes no sense: {error}")))
        })
    }

    /// What an answer that is not 200 says.
    fn problem_error(&self, response: &mut ureq::http::Response<ureq::Body>) -> FetchError {
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let body = match body {
            Ok(body) => body,
            Err(error) => return FetchError::Unreachable(error.to_string()),
        };
        let Ok(problem) = serde_json::from_slice::<WeightsProblem>(&body) else {
            // Something in between, or a server that is about to start or to end.
            return if status >= 500 {
                FetchError::Unreachable(format!("status {status}"))
            } else {
                FetchError::Refused(self.refuse("bad_answer", format!("status {status} without a reason")))
            };
        };
        match &problem.code[..] {
            WeightsProblem::VERSION_GONE => FetchError::VersionGone,
            WeightsProblem::PUBLISHER_GONE => {
                FetchError::Refused(WeightsError::PublisherGone { newest: problem.newest.map(PolicyVersion) })
            }
            WeightsProblem::TAKEN_OVER => {
                FetchError::Refused(WeightsError::TakenOver { name: self.name.clone() })
            }
            _ if status == 503 => FetchError::Unreachable(problem.detail),
            _ => FetchError::Refused(self.refuse(&problem.code, problem.detail)),
        }
    }

    fn failed(&self, error: &ureq::Error) -> FetchError {
        match error {
            ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::Timeout(_)
            | ureq::Error::Io(_)
            | ureq::Error::Protocol(_)
            | ureq::Error::BodyStalled => FetchError::Unreachable(error.to_string()),
            _ => self.hopeless(error),
        }
    }

    fn hopeless(&self, error: &dyn fmt::Display) -> FetchError {
        FetchError::Refused(self.refuse("bad_request", error.to_string()))
    }

    fn refuse(&self, code: &str, detail: String) -> WeightsError {
        Self::refused(&self.url, &self.name, code, detail)
    }

    fn refused(url: &str, name: &str, code: &str, detail: String) -> WeightsError {
        WeightsError::Refused { name: name.to_owned(), url: url.to_owned(), code: code.to_owned(), detail }
    }
}

impl fmt::Debug for HubClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubClient").field("url", &self.url).field("name", &self.name).finish_non_exhaustive()
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
