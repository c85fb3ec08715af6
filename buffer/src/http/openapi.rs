//! The OpenAPI document, made from the routes, and a page that shows it.
//!
//! Invariant: an operation is documented where it is routed, so document and routes agree. The errors are added here,
//! from the codes of each operation; the tests compare every answer with the document.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi as Whole, Ref, RefOr, ResponseBuilder};
use utoipa::{Modify, OpenApi, ToSchema};

use super::body::WireFormat;
use super::problem::{Problem, ProblemCode};
use super::state::ServerState;

const PAGE: &str = include_str!("docs.html");

/// The page runs its own script and reads this server only.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src \
                           'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// Description of the whole API.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "rlrun buffer",
        description = "Groups of trajectories between samplers and trainers: admission control, staleness, leases and a \
                       durable journal.\n\nBodies are JSON, or MessagePack with the same field names; answers follow \
                       `Accept`. Request bodies may be compressed with gzip or zstd. Errors are \
                       `application/problem+json` with a stable `code`. Requests are idempotent; `429` and `503` say \
                       with `Retry-After` when.",
        license(name = "MIT OR Apache-2.0")
    ),
    components(schemas(Problem, ProblemCode)),
    modifiers(&TokenSecurity),
    security(("token" = [])),
    tags(
        (name = "groups", description = "Store, list, show and remove groups. Role: writer; any may read; admin removes."),
        (name = "admissions", description = "Slots for groups that are to be generated. Role: writer."),
        (name = "leases", description = "Groups to train on. Role: trainer; any may read."),
        (name = "policy", description = "The version of the trainer. Role: trainer; any may read."),
        (name = "buffer", description = "State and events of the buffer. Role: any."),
        (name = "health", description = "The server itself; its health needs no token."),
    )
)]
pub(super) struct OpenApiDocument;

struct TokenSecurity;

impl Modify for TokenSecurity {
    fn modify(&self, document: &mut Whole) {
        let bearer = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("A line of the token file; a server on loopback may do without."))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
    }
}

/// Errors of every request.
const ALWAYS: &[ProblemCode] =
    &[ProblemCode::BadHost, ProblemCode::ForeignOrigin, ProblemCode::WrongHost, ProblemCode::Internal];
/// Errors of routes that need a token.
const WITH_TOKEN: &[ProblemCode] = &[ProblemCode::Unauthorized, ProblemCode::Forbidden];
/// Errors of routes with parameters.
const WITH_PARAMETERS: &[ProblemCode] = &[ProblemCode::BadQuery, ProblemCode::BadPath];
/// Errors of routes with two encodings.
const WITH_FORMATS: &[ProblemCode] = &[ProblemCode::NotAcceptable];
/// Errors of routes with a body.
const WITH_BODY: &[ProblemCode] = &[
    ProblemCode::BadEncoding,
    ProblemCode::Incomplete,
    ProblemCode::BodyTimeout,
    ProblemCode::BodyTooLarge,
    ProblemCode::DecodedTooLarge,
    ProblemCode::UnsupportedMediaType,
    ProblemCode::UnsupportedEncoding,
    ProblemCode::BadBody,
    ProblemCode::Busy,
];
/// Errors of routes that use the buffer.
const OF_BUFFER: &[ProblemCode] = &[ProblemCode::StorageFailed];

/// Further errors of an operation.
fn codes_of(operation: &str) -> &'static [ProblemCode] {
    match operation {
        "append_groups" => &[ProblemCode::Full, ProblemCode::Preparing],
        "list_groups" => &[ProblemCode::OutOfRange],
        "get_group" => &[ProblemCode::UnknownGroup, ProblemCode::DamagedGroup],
        "admit" => &[ProblemCode::OutOfRange, ProblemCode::FutureVersion, ProblemCode::Stopping],
        "claim" => &[ProblemCode::WrongState, ProblemCode::UnknownGroup, ProblemCode::FutureVersion],
        "abort" => &[ProblemCode::WrongState, ProblemCode::UnknownGroup],
        "lease" => &[
            ProblemCode::OutOfRange,
            ProblemCode::BadConsumer,
            ProblemCode::OwnTrainer,
            ProblemCode::StepPassed,
            ProblemCode::FutureVersion,
            ProblemCode::UnknownGroup,
            ProblemCode::DamagedGroup,
            ProblemCode::Stopping,
        ],
        "ack" | "release" => &[
            ProblemCode::OwnTrainer,
            ProblemCode::UnknownLease,
            ProblemCode::LeaseLost,
            ProblemCode::LeaseOver,
        ],
        "extend" => &[
            ProblemCode::OwnTrainer,
            ProblemCode::UnknownLease,
            ProblemCode::LeaseLost,
            ProblemCode::LeaseOver,
            ProblemCode::OutOfRange,
        ],
        "ack_through" => &[
            ProblemCode::OwnTrainer,
            ProblemCode::LeaseLost,
            ProblemCode::BadConsumer,
            ProblemCode::FutureVersion,
        ],
        "set_version" => &[ProblemCode::OwnTrainer, ProblemCode::VersionBehind, ProblemCode::VersionJump],
        _ => &[],
    }
}

/// The document of the routes, with all errors and both encodings.
pub(super) fn complete(mut document: Whole) -> String {
    document.info.version = "1".to_owned();
    for (path, item) in &mut document.paths.paths {
        for operation in
            [&mut item.get, &mut item.put, &mut item.post, &mut item.delete].into_iter().flatten()
        {
            complete_operation(operation, path);
        }
    }
    // Plain data always encodes.
    document.to_json().unwrap_or_default()
}

fn complete_operation(operation: &mut Operation, path: &str) {
    let is_open = operation.security.is_some();
    let asks_buffer = path.starts_with("/v1/") || path == "/readyz";
    let has_formats = asks_buffer || path == "/healthz";
    let in_two_formats = has_formats && operation.responses.responses.values_mut().any(in_both_formats);
    // Operations without fields accept an empty body too.
    let reads_body = path.starts_with("/v1/")
        && operation.operation_id.as_deref().is_some_and(|id| {
            operation.request_body.is_some() || matches!(id, "ack" | "release" | "quarantine")
        });
    let mut codes = ALWAYS.to_vec();
    for (applies, more) in [
        (!is_open, WITH_TOKEN),
        (operation.parameters.is_some(), WITH_PARAMETERS),
        (in_two_formats, WITH_FORMATS),
        (reads_body, WITH_BODY),
        (asks_buffer, OF_BUFFER),
        (true, codes_of(operation.operation_id.as_deref().unwrap_or_default())),
    ] {
        codes.extend(more.iter().filter(|_| applies));
    }
    let mut by_status: BTreeMap<u16, Vec<ProblemCode>> = BTreeMap::new();
    for code in codes {
        by_status.entry(code.status().as_u16()).or_default().push(code);
    }
    for (status, codes) in by_status {
        operation.responses.responses.entry(status.to_string()).or_insert_with(|| problems(&codes));
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body
        && let Some(json) = body.content.get(WireFormat::JSON).cloned()
    {
        body.content.insert(WireFormat::MESSAGE_PACK.to_owned(), json);
    }
}

/// Whether the answer is JSON, and so available as MessagePack.
fn in_both_formats(response: &mut RefOr<utoipa::openapi::Response>) -> bool {
    let RefOr::T(response) = response else { return false };
    let Some(json) = response.content.get(WireFormat::JSON).cloned() else { return false };
    response.content.insert(WireFormat::MESSAGE_PACK.to_owned(), json);
    true
}

fn problems(codes: &[ProblemCode]) -> RefOr<utoipa::openapi::Response> {
    let lines: Vec<String> =
        codes.iter().map(|code| format!("`{}`: {}", code.as_str(), code.title())).collect();
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name(Problem::name()))).build();
    RefOr::T(
        ResponseBuilder::new().description(lines.join("; ")).content(Problem::MEDIA_TYPE, content).build(),
    )
}

/// This document.
#[utoipa::path(
    get, path = "/openapi.json", operation_id = "openapi", tag = "health",
    responses((status = 200, content_type = "application/json", body = Object, description = "OpenAPI 3.1"))
)]
pub(super) async fn document(State(shared): State<Arc<ServerState>>) -> Response {
    let document = shared.openapi.get().cloned().unwrap_or_else(Bytes::new);
    ([(CONTENT_TYPE, WireFormat::JSON)], document).into_response()
}

/// This document for people.
#[utoipa::path(
    get, path = "/docs", operation_id = "docs", tag = "health",
    responses((status = 200, content_type = "text/html", body = String, description = "A page without anything from elsewhere"))
)]
pub(super) async fn docs() -> Response {
    ([(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, PAGE_POLICY)], PAGE)
        .into_response()
}
