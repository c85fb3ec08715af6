//! Who may ask, and the headers of every response.
//!
//! Invariant: without the token no file of a run is read. A server without a token answers only to names of this machine,
//! so that no foreign page reaches it by a name that resolves to loopback. The page runs no script but its own files.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Headers of every response.
const HEADERS: [(HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// What a request needs.
#[derive(Clone)]
pub(crate) struct PageAccess {
    /// `None`: the server listens on loopback, and names of this machine suffice.
    token: Option<String>,
}

impl PageAccess {
    pub(crate) fn new(token: Option<String>) -> Self {
        Self { token }
    }

    /// Whether a request may read runs: `Authorization: Bearer TOKEN`, or `?token=TOKEN` as it is or percent-encoded.
    fn allows(&self, request: &Request) -> bool {
        let Some(token) = self.token.as_deref().map(str::as_bytes) else { return true };
        let bearer = text(request.headers(), &header::AUTHORIZATION).and_then(|v| v.strip_prefix("Bearer "));
        let pairs = request.uri().query().unwrap_or_default().split('&');
        let query = pairs.filter_map(|pair| pair.strip_prefix("token=")).next();
        match (bearer, query) {
            (Some(given), _) => equal(token, given.trim().as_bytes()),
            (None, Some(given)) => equal(token, given.as_bytes()) || equal(token, &percent_decoded(given)),
            (None, None) => false,
        }
    }
}

impl std::fmt::Debug for PageAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageAccess").field("token", &self.token.is_some()).finish()
    }
}

/// Refuses requests without the token or with a foreign host name, and adds the headers.
pub(crate) async fn guard(State(access): State<PageAccess>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_api = path.starts_with("/api/") || path == "/metrics";
    let mut response = if access.token.is_none() && !is_local_host(request.headers()) {
        let why = "this server answers to localhost and to loopback addresses; use one of them in the URL";
        (StatusCode::MISDIRECTED_REQUEST, why).into_response()
    } else if is_api && !access.allows(&request) {
        (StatusCode::UNAUTHORIZED, "the token is missing or wrong; open the page with ?token=TOKEN")
            .into_response()
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, axum::http::HeaderValue::from_static(value));
    }
    // Pages and responses change with the program and the run.
    let cache = if is_api { "no-store" } else { "no-cache" };
    headers.insert(header::CACHE_CONTROL, axum::http::HeaderValue::from_static(cache));
    response
}

/// Whether the host of a request is this machine: `localhost`, or a loopback address.
fn is_local_host(headers: &HeaderMap) -> bool {
    let Some(host) = text(headers, &header::HOST) else { return false };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// The bytes of a value of a query; a `%` that begins no escape stands for itself.
fn percent_decoded(text: &str) -> Vec<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, tail @ ..] = rest {
        let escaped = match (first, tail) {
            (b'%', [high, low, after @ ..]) => {
                digit(*high).zip(digit(*low)).map(|(high, low)| (high * 16 + low, after))
            }
            _ => None,
        };
        let (byte, after) = escaped.unwrap_or((*first, tail));
        bytes.push(byte);
        rest = after;
    }
    bytes
}

/// Compares in a time that depends on the lengths alone.
fn equal(token: &[u8], given: &[u8]) -> bool {
    let differs = token.iter().zip(given).fold(0_u8, |differs, (a, b)| differs | (a ^ b));
    differs == 0 && token.len() == given.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_local() {
        for (host, expected) in [
            ("localhost:80", true),
            ("LOCALHOST", true),
            ("127.0.0.1:1234", true),
            ("127.8.0.1", true),
            ("[::1]:80", true),
            ("evil.example:80", false),
            ("localhost.evil.example", false),
            ("10.0.0.1:80", false),
            ("", false),
        ] {
            let headers = HeaderMap::from_iter([(header::HOST, host.parse().unwrap())]);
            assert_eq!(is_local_host(&headers), expected, "{host}");
        }
        assert!(!is_local_host(&HeaderMap::new()));
    }

    fn request(uri: &str, bearer: Option<&str>) -> Request {
        let mut builder = Request::builder().uri(uri);
        if let Some(bearer) = bearer {
            builder = builder.header("authorization", format!("Bearer {bearer}"));
        }
        builder.body(axum::body::Body::empty()).unwrap()
    }

    #[test]
    fn a_token_comes_in_a_header_or_in_the_query() {
        let access = PageAccess::new(Some("secret".to_owned()));
        assert!(access.allows(&request("/api/runs", Some("secret"))));
        assert!(access.allows(&request("/api/runs?a=b&token=secret", None)));
        for (uri, bearer) in
            [("/", None), ("/?token=secre", None), ("/?token=secrets", None), ("/?token=secret", Some("x"))]
        {
            assert!(!access.allows(&request(uri, bearer)), "{uri}");
        }
        assert!(!format!("{access:?}").contains("secret"));
    }

    #[test]
    fn a_token_in_the_query_may_be_percent_encoded() {
        let access = PageAccess::new(Some("a+b/c=%2d".to_owned()));
        for value in ["a+b/c=%2d", "a%2Bb%2fc%3D%252d", "a+b/c=%252d"] {
            assert!(access.allows(&request(&format!("/api/events?token={value}"), None)), "{value}");
        }
        for value in ["a%20b/c=%252d", "a+b/c=-", "%", "%2", "a+b/c=%2d%"] {
            assert!(!access.allows(&request(&format!("/api/events?token={value}"), None)), "{value}");
        }
        // A header is not encoded.
        assert!(access.allows(&request("/api/runs", Some("a+b/c=%2d"))));
        assert!(!access.allows(&request("/api/runs", Some("a%2Bb%2fc%3D%252d"))));
    }
}
