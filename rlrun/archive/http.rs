//! The requests of object stores and of the services that give credentials, over the client of [`connect`].
//!
//! Invariant: a request has a deadline that its size determines, and an answer a bound in memory. Of an answer that refuses
//! only its code and its message are kept: others of its fields repeat parts of the signed request.

use std::future::Future;
use std::io::Read;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use connect::{HttpAgent, Request, Response, SendError};
use http_body_util::BodyExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};

/// Time of an answer to a request without a body, seconds.
const ANSWER_S: u64 = 30;
/// Slowest transfer that is waited for, bytes per second.
const SLOWEST_RATE: u64 = 128 << 10;
/// Longest answer, bytes: pages of lists, and ranges of objects.
pub(super) const MAX_ANSWER_BYTES: u64 = 16 << 20;
/// Longest code or message of a refusal that is shown, characters.
const MAX_SHOWN: usize = 300;
/// Idle connections that are kept.
const CONNECTIONS: usize = 8;

/// The clock of the server: what its last answer said, and when it came.
pub(super) type ServerClock = Arc<Mutex<Option<(SystemTime, SystemTime)>>>;

/// Opens connections; one for all requests of a store.
#[derive(Clone, Debug)]
pub(super) struct BucketHttp {
    agent: Arc<HttpAgent>,
    clock: ServerClock,
    /// Whether requests without TLS are allowed.
    plain: bool,
}

impl BucketHttp {
    pub(super) fn new(clock: ServerClock) -> Result<Self, String> {
        let agent = Arc::new(HttpAgent::new(None, CONNECTIONS, None)?);
        Ok(Self { agent, clock, plain: false })
    }
}

impl HttpConnector for BucketHttp {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let plain =
            options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(|value| value == "true");
        Ok(HttpClient::new(Self { plain, ..self.clone() }))
    }
}

impl HttpService for BucketHttp {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        let client = self.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            let send = move || client.send(Request::from_parts(parts, ()), &body);
            let sent = tokio::task::spawn_blocking(send).await;
            sent.unwrap_or_else(|error| Err(HttpError::new(HttpErrorKind::Unknown, error)))
        })
    }
}

impl BucketHttp {
    /// Sends a request and reads its whole answer.
    fn send(&self, request: Request<()>, body: &[u8]) -> Result<HttpResponse, HttpError> {
        if !self.plain && request.uri().scheme_str() != Some("https") {
            let refused = "requests without TLS are not allowed; use https, or set AWS_ALLOW_HTTP=true (AZURE_ALLOW_HTTP, \
                           GOOGLE_ALLOW_HTTP)";
            return Err(HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(refused)));
        }
        let bytes = if request.method() == "GET" { MAX_ANSWER_BYTES } else { body.len() as u64 };
        let limit = Duration::from_secs(ANSWER_S + bytes / SLOWEST_RATE);
        let answer = match request.method().as_str() {
            "PUT" | "POST" => self.agent.send(request.map(|()| body), limit),
            _ => self.agent.send(request, limit),
        };
        let answer = answer.map_err(|error| {
            let kind = match &error {
                SendError::NotSent(_) => HttpErrorKind::Connect,
                SendError::Unclear(_) => HttpErrorKind::Interrupted,
                SendError::Permanent(_) => HttpErrorKind::Unknown,
            };
            HttpError::new(kind, error)
        })?;
        let (parts, body) = answer.into_parts();
        let mut read = Vec::new();
        let mut reader = body.into_reader().take(MAX_ANSWER_BYTES + 1);
        reader.read_to_end(&mut read).map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error))?;
        if read.len() as u64 > MAX_ANSWER_BYTES {
            let error = std::io::Error::other(format!("an answer of more than {MAX_ANSWER_BYTES} bytes"));
            return Err(HttpError::new(HttpErrorKind::Decode, error));
        }
        if let Some(date) =
            parts.headers.get("date").and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok())
        {
            *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some((date, SystemTime::now()));
        }
        if parts.status.is_client_error() || parts.status.is_server_error() {
            read = refusal(&read).into_bytes();
        }
        Ok(Response::from_parts(parts, read.into()))
    }
}

/// Code and message of an answer that refuses, in XML or JSON.
fn refusal(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let element = |name: &str| {
        let inside = text.split_once(&format!("<{name}>"))?.1.split_once(&format!("</{name}>"))?.0;
        Some(inside.chars().take(MAX_SHOWN).collect::<String>())
    };
    if let Some(code) = element("Code") {
        let message = element("Message").unwrap_or_default();
        return format!("{code}: {}", message.lines().next().unwrap_or_default());
    }
    let json: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &json["error"];
    let shown = error.as_str().or_else(|| error["message"].as_str()).unwrap_or_default();
    shown.chars().take(MAX_SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_refusal_only_code_and_message_are_kept() {
        let xml = b"<?xml version=\"1.0\"?><Error><Code>SignatureDoesNotMatch</Code><Message>The signature\nmore</Message>\
                    <AWSAccessKeyId>AKIA</AWSAccessKeyId><CanonicalRequest>x-amz-security-token:secret</CanonicalRequest></Error>";
        assert_eq!(refusal(xml), "SignatureDoesNotMatch: The signature");
        assert_eq!(refusal(br#"{"error":{"message":"no such bucket","code":404}}"#), "no such bucket");
        assert_eq!(refusal(br#"{"error":"invalid_grant","token":"secret"}"#), "invalid_grant");
        assert_eq!(refusal(b"<html>secret</html>"), "");
    }
}
