//! The routes. Invariant: a handler maps a request to a call of the buffer and its answer. Authorization is decided
//! by the group of routes, and bodies are decoded and encoded in one place.

mod admissions;
mod groups;
mod health;
mod leases;
mod policy;

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::{Router, middleware};
use serde::de::DeserializeOwned;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{self, Permission, Role};
use super::body;
use super::events;
use super::metrics;
use super::openapi::{self, OpenApiDocument};
use super::problem::{Problem, ProblemCode};
use super::state::ServerState;

/// All routes over the state of the server, merged with `extra_routes`.
pub(crate) fn router(shared: &Arc<ServerState>, extra_routes: Vec<(Role, Router)>) -> Router {
    let needing = |need: Permission, routes: OpenApiRouter<Arc<ServerState>>| {
        routes.route_layer(middleware::from_fn_with_state((Arc::clone(shared), need), auth::allow))
    };
    let open = OpenApiRouter::new().routes(routes!(health::healthz)).routes(routes!(health::readyz));
    let read = OpenApiRouter::new()
        .routes(routes!(groups::list))
        .routes(routes!(groups::get))
        .routes(routes!(leases::list))
        .routes(routes!(policy::stats))
        .routes(routes!(policy::version))
        .routes(routes!(events::events))
        .routes(routes!(health::metrics))
        .routes(routes!(openapi::document))
        .routes(routes!(openapi::docs));
    let write = OpenApiRouter::new()
        .routes(routes!(groups::append))
        .routes(routes!(admissions::admit))
        .routes(routes!(admissions::claim))
        .routes(routes!(admissions::abort))
        .routes(routes!(admissions::abandon));
    let train = OpenApiRouter::new()
        .routes(routes!(leases::lease))
        .routes(routes!(leases::ack_through))
        .routes(routes!(leases::ack))
        .routes(routes!(leases::release))
        .routes(routes!(leases::extend))
        .routes(routes!(groups::quarantine))
        .routes(routes!(policy::set_version));
    let administer = OpenApiRouter::new().routes(routes!(groups::evict)).routes(routes!(groups::evict_below));
    let (router, document) = OpenApiRouter::with_openapi(OpenApiDocument::openapi())
        .merge(open)
        .merge(needing(Permission::Read, read))
        .merge(needing(Permission::Write, write))
        .merge(needing(Permission::Train, train))
        .merge(needing(Permission::Administer, administer))
        .split_for_parts();
    // The routes are fixed, so the document is too.
    let _ = shared.openapi.set(Bytes::from(openapi::complete(document)));
    // The last layer is the first to see a request.
    let allowed = |(role, routes): (Role, Router)| {
        routes
            .route_layer(middleware::from_fn_with_state(Arc::clone(shared), body::arrives_in_time))
            .route_layer(middleware::from_fn_with_state((Arc::clone(shared), role.need()), auth::allow))
    };
    let router = router.with_state(Arc::clone(shared));
    let router = extra_routes.into_iter().map(allowed).fold(router, Router::merge);
    router
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn_with_state(Arc::clone(shared), auth::allow_host))
        .layer(middleware::from_fn_with_state(Arc::clone(shared), metrics::count))
}

async fn no_route() -> Response {
    Problem::new(ProblemCode::NotFound, "there is no such route; /docs lists them").into_response()
}

async fn no_method() -> Response {
    Problem::new(ProblemCode::MethodNotAllowed, "see the header `Allow`, or /docs").into_response()
}

/// Query parameters, with problem documents as errors.
#[derive(Debug)]
pub(super) struct QueryParameters<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParameters<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Query::from_request_parts(parts, state).await {
            Ok(Query(parameters)) => Ok(Self(parameters)),
            Err(rejection) => Err(Problem::new(ProblemCode::BadQuery, rejection.body_text())),
        }
    }
}

/// A number in a path, with problem documents as errors.
#[derive(Debug)]
pub(super) struct PathNumber(pub(super) u64);

impl<S: Send + Sync> FromRequestParts<S> for PathNumber {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::<u64>::from_request_parts(parts, state).await {
            Ok(Path(number)) => Ok(Self(number)),
            Err(rejection) => Err(Problem::new(ProblemCode::BadPath, rejection.body_text())),
        }
    }
}
