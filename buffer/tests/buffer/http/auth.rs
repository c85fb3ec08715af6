//! Who may do what, under which name.

use buffer::http::{ServerConfig, ServerError, Tokens};
use buffer::{Buffer, BufferError};
use serde_json::json;

use super::super::config;
use super::super::served::{TestServer, loopback};

const WRITER: &str = "writer-0123456789";
const TRAINER: &str = "trainer-0123456789";
const ADMIN: &str = "admin-0123456789ab";

fn tokens(text: &str) -> Result<Tokens, String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tokens");
    std::fs::write(&file, text).unwrap();
    Tokens::read(&file).map_err(|error| error.to_string())
}

fn guarded() -> TestServer {
    let text = format!("# for the tests\nwriter {WRITER}\n\n trainer {TRAINER}\nadmin {ADMIN}\n");
    let tokens = Some(tokens(&text).unwrap());
    TestServer::start(Buffer::in_memory(config(1, 1)).unwrap(), ServerConfig { tokens, ..loopback() })
}

/// Every route with who may use it.
const ROUTES: [(&str, &str, &[&str]); 24] = [
    ("GET", "/healthz", &["", WRITER, TRAINER, ADMIN]),
    ("GET", "/readyz", &["", WRITER, TRAINER, ADMIN]),
    ("GET", "/metrics", &[WRITER, TRAINER, ADMIN]),
    ("GET", "/openapi.json", &[WRITER, TRAINER, ADMIN]),
    ("GET", "/docs", &[WRITER, TRAINER, ADMIN]),
    ("GET", "/v1/groups", &[WRITER, TRAINER, ADMIN]),
    ("GET", "/v1/groups/1", &[WRITER, TRAINER, ADMIN]),
    ("GET", "/v1/leases", &[WRITER, TRAINER, ADMIN]),
    ("GET", "/v1/stats", &[WRITER, TRAINER, ADMIN]),
    ("GET", "/v1/policy/version", &[WRITER, TRAINER, ADMIN]),
    ("POST", "/v1/groups", &[WRITER, ADMIN]),
    ("POST", "/v1/admissions", &[WRITER, ADMIN]),
    ("POST", "/v1/admissions/1/claim", &[WRITER, ADMIN]),
    ("POST", "/v1/admissions/1/abort", &[WRITER, ADMIN]),
    ("POST", "/v1/admissions/abandon", &[WRITER, ADMIN]),
    ("POST", "/v1/groups/1/quarantine", &[TRAINER, ADMIN]),
    ("POST", "/v1/leases", &[TRAINER, ADMIN]),
    ("POST", "/v1/leases/ack", &[TRAINER, ADMIN]),
    ("POST", "/v1/leases/1/ack", &[TRAINER, ADMIN]),
    ("POST", "/v1/leases/1/release", &[TRAINER, ADMIN]),
    ("POST", "/v1/leases/1/extend", &[TRAINER, ADMIN]),
    ("PUT", "/v1/policy/version", &[TRAINER, ADMIN]),
    ("DELETE", "/v1/groups/1", &[ADMIN]),
    ("DELETE", "/v1/groups?below_version=0", &[ADMIN]),
];

#[test]
fn a_role_may_do_what_it_is_for() {
    let served = guarded();
    for (method, path, may) in ROUTES {
        for token in ["", "writer-0123456780", WRITER, TRAINER, ADMIN] {
            let authorization = format!("Bearer {token}");
            let headers = [("authorization", &authorization[..])];
            // An empty body is invalid for every method, but the server checks the token first.
            let answer = served.ask(method, path, &headers[usize::from(token.is_empty())..], b"");
            let known = [WRITER, TRAINER, ADMIN].contains(&token);
            if may.contains(&token) || may.contains(&"") {
                assert!(![401, 403].contains(&answer.status), "{method} {path} {token}: {}", answer.text());
            } else if known {
                answer.is_problem(403, "forbidden");
            } else {
                answer.is_problem(401, "unauthorized");
                assert_eq!(answer.headers["www-authenticate"], "Bearer");
            }
        }
    }
}

/// The table above would not notice a route that it does not have.
#[test]
fn every_route_is_in_the_table() {
    let document = TestServer::memory(config(1, 1)).get("/openapi.json").json();
    let mut routes = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            let shape = |path: &str| path.split('?').next().unwrap().replace("{id}", "1");
            let listed = ROUTES
                .iter()
                .any(|(known, at, _)| known.eq_ignore_ascii_case(method) && shape(at) == shape(path));
            assert!(listed || path == "/v1/events", "{method} {path}");
            routes += 1;
        }
    }
    assert_eq!(routes, ROUTES.len() + 1, "the stream of events never ends, so it is not in the table");
}

#[test]
fn the_client_names_its_token_problem() {
    let served = guarded();
    let client = |token: Option<&str>| {
        let token = token.map(str::to_owned);
        buffer::http::Client::new(buffer::http::ClientConfig {
            token,
            ..buffer::http::ClientConfig::new(served.url())
        })
        .unwrap()
    };
    use buffer::Consumer;
    assert!(client(Some(WRITER)).stats().is_ok());
    let error = client(None).stats().unwrap_err();
    assert!(
        matches!(&error, BufferError::Refused { status: 401, code, .. } if code == "unauthorized"),
        "{error}"
    );
    let error = client(Some(WRITER)).set_version(super::super::v(1), false).unwrap_err().to_string();
    assert!(error.contains(&format!("PUT {}/v1/policy/version: 403 forbidden", served.url())), "{error}");
}

#[test]
fn a_token_file_says_which_line_is_wrong() {
    for (text, complaint) in [
        ("writer short\n", "line 1: the token has 5 bytes, at least 16 are needed"),
        ("# c\nreader 0123456789abcdef\n", "line 2: there is no role `reader`"),
        ("writer\n", "line 1: 1 words instead of two"),
        ("writer 0123456789abcdef x\n", "line 1: 3 words instead of two"),
        ("# empty\n", "it names no token"),
    ] {
        let error = tokens(text).unwrap_err();
        assert!(error.contains(complaint), "{error}");
        assert!(!error.contains("0123456789abcdef"), "a token is never shown: {error}");
    }
}

#[test]
fn a_server_answers_to_its_own_names_only() {
    let twice = TestServer::memory(config(1, 1));
    let ours = twice.address.to_string();
    for other in ["evil.example", &ours] {
        // Names that differ in no letter are two all the same.
        twice.ask("GET", "/v1/stats", &[("host", &ours), ("host", other)], b"").is_problem(400, "bad_host");
        twice.ask("GET", "/nowhere", &[("host", other), ("host", &ours)], b"").is_problem(400, "bad_host");
    }

    twice.ask("GET", "http://evil.example/v1/stats", &[("host", &ours)], b"").is_problem(400, "bad_host");
    let config = ServerConfig { allow_hosts: vec!["buffer.local".to_owned()], ..loopback() };
    let served = TestServer::start(Buffer::in_memory(super::super::config(1, 1)).unwrap(), config);
    let stats = |headers: &[(&str, &str)]| served.ask("GET", "/v1/stats", headers, b"");
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]", "[::1]:80", "buffer.local:8700"] {
        assert_eq!(stats(&[("host", host)]).status, 200, "{host}");
    }
    for host in ["evil.example", "localhost.evil.example", "", "::1", "[::2]:1"] {
        stats(&[("host", host)]).is_problem(421, "wrong_host");
    }
    assert_eq!(stats(&[("host", "localhost:1"), ("origin", "http://localhost:1")]).status, 200);
    for origin in ["http://evil.example", "http://localhost:2", "null"] {
        stats(&[("host", "localhost:1"), ("origin", origin)]).is_problem(403, "foreign_origin");
    }
}

#[test]
fn other_addresses_need_tokens_and_tls() {
    let anywhere = ServerConfig::new(([0, 0, 0, 0], 0).into());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let bind = |config: ServerConfig| {
        let buffer = std::sync::Arc::new(Buffer::in_memory(super::super::config(1, 1)).unwrap());
        runtime.block_on(buffer::http::Server::bind(config, buffer)).map(drop)
    };
    assert!(matches!(bind(anywhere.clone()), Err(ServerError::NoTokens { .. })));
    let guarded = ServerConfig { tokens: Some(tokens(&format!("admin {ADMIN}")).unwrap()), ..anywhere };
    assert!(matches!(bind(guarded.clone()), Err(ServerError::Unencrypted { .. })));
    assert!(bind(ServerConfig { insecure: true, ..guarded }).is_ok());
}

#[test]
fn unknown_paths_and_methods_are_problems() {
    let served = TestServer::memory(config(1, 1));
    served.get("/v2/groups").is_problem(404, "not_found");
    let answer = served.ask("PATCH", "/v1/groups", &[], b"");
    answer.is_problem(405, "method_not_allowed");
    assert_eq!(served.post("/v1/groups", &json!({ "groups": [] })).json()["results"], json!([]));
}
