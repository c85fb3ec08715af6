//! Authorization: tokens with roles, and the host names and origins that this server accepts.
//!
//! Invariant: a token is compared in constant time, by its digest, and never shown. Without tokens every client is
//! admin, which is for loopback only; the check of the host name then protects against web pages of other sites.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::problem::{Problem, ProblemCode};
use super::state::ServerState;

/// Minimum length of a token, bytes: a shorter one can be guessed.
const MIN_TOKEN: usize = 16;

/// Role of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A sampler: admissions and groups, and all that can be read.
    Writer,
    /// A trainer: leases and the policy version, and all that can be read.
    Trainer,
    /// Everything.
    Admin,
}

impl Role {
    /// Its name in a token file.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Writer => "writer",
            Self::Trainer => "trainer",
            Self::Admin => "admin",
        }
    }

    /// The permission of this role.
    pub(crate) fn need(self) -> Permission {
        match self {
            Self::Writer => Permission::Write,
            Self::Trainer => Permission::Train,
            Self::Admin => Permission::Administer,
        }
    }

    fn may(self, need: Permission) -> bool {
        match need {
            Permission::Read => true,
            Permission::Write => matches!(self, Self::Writer | Self::Admin),
            Permission::Train => matches!(self, Self::Trainer | Self::Admin),
            Permission::Administer => self == Self::Admin,
        }
    }
}

/// The permission that a route needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permission {
    Read,
    Write,
    Train,
    Administer,
}

/// The tokens of a server.
#[derive(Clone, Default)]
pub struct Tokens(Vec<(blake3::Hash, Role)>);

/// Why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// It cannot be read.
    #[error("token file {}: {source}; name a file that can be read", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A line is not a role and a token.
    #[error("token file {}, line {line}: {reason}; write `writer TOKEN`, `trainer TOKEN` or `admin TOKEN`", .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The file has no token.
    #[error("token file {}: it names no token; write lines such as `writer TOKEN`", .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

impl Tokens {
    /// Reads a file of lines `ROLE TOKEN`; `#` begins a comment.
    ///
    /// # Errors
    /// A file that cannot be read, has another line, a short token, or none.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| TokenError::Unreadable { path: path.to_owned(), source })?;
        let mut tokens = Vec::new();
        for (line, text) in (1..).zip(text.lines()) {
            let text = text.trim();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let token = parse_line(text).map_err(|reason| TokenError::Line {
                path: path.to_owned(),
                line,
                reason,
            })?;
            tokens.push(token);
        }
        if tokens.is_empty() {
            return Err(TokenError::Empty { path: path.to_owned() });
        }
        Ok(Self(tokens))
    }

    /// The role of a token. Compares all tokens, so its time does not depend on the match.
    fn role(&self, token: &str) -> Option<Role> {
        let digest = blake3::hash(token.as_bytes());
        self.0.iter().fold(None, |found, (known, role)| if *known == digest { Some(*role) } else { found })
    }
}

fn parse_line(text: &str) -> Result<(blake3::Hash, Role), String> {
    let mut words = text.split_whitespace();
    let (Some(word), Some(token), None) = (words.next(), words.next(), words.next()) else {
        return Err(format!("{} words instead of two", text.split_whitespace().count()));
    };
    let roles = [Role::Writer, Role::Trainer, Role::Admin];
    let role = roles.into_iter().find(|role| role.as_str() == word);
    let role = role.ok_or_else(|| format!("there is no role `{word}`"))?;
    if token.len() < MIN_TOKEN {
        return Err(format!("the token has {} bytes, at least {MIN_TOKEN} are needed", token.len()));
    }
    Ok((blake3::hash(token.as_bytes()), role))
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tokens").field(&self.0.len()).finish()
    }
}

/// The access rules of a server.
#[derive(Clone, Debug)]
pub(crate) struct AccessControl {
    /// `None`: every client may do everything.
    pub(super) tokens: Option<Tokens>,
    /// Accepted names in the header `Host`; `None`: any.
    pub(super) hosts: Option<Vec<String>>,
    /// Whether the serving process is the only trainer.
    pub(super) own_trainer: bool,
}

impl AccessControl {
    fn check(&self, parts: &Parts, need: Permission) -> Result<(), Problem> {
        self.check_role(parts, need)?;
        if self.own_trainer && need == Permission::Train {
            let detail = "this run leases, acknowledges and counts its versions itself, since a second trainer would take \
                          its groups away: serve a buffer of its own with `rlrun serve buffer`";
            return Err(Problem::new(ProblemCode::OwnTrainer, detail));
        }
        Ok(())
    }

    fn check_role(&self, parts: &Parts, need: Permission) -> Result<(), Problem> {
        let Some(tokens) = &self.tokens else { return Ok(()) };
        let Some(token) = bearer(parts) else {
            return Err(Problem::new(
                ProblemCode::Unauthorized,
                "send the header `Authorization: Bearer TOKEN`",
            ));
        };
        let Some(role) = tokens.role(token) else {
            return Err(Problem::new(
                ProblemCode::Unauthorized,
                "the token is not in the token file of this server",
            ));
        };
        if role.may(need) {
            return Ok(());
        }
        let needed = match need {
            Permission::Read => "reads",
            Permission::Write => "writes",
            Permission::Train => "trains",
            Permission::Administer => "administers",
        };
        let detail =
            format!("the token is one of a {}, the route is for a role that {needed}", role.as_str());
        Err(Problem::new(ProblemCode::Forbidden, detail))
    }

    fn check_names(&self, parts: &Parts) -> Result<(), Problem> {
        let text = |name| parts.headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        let target = parts.uri.authority().map(|authority| authority.as_str());
        let differs = target.zip(text(HOST)).is_some_and(|(target, host)| !target.eq_ignore_ascii_case(host));
        if differs || parts.headers.get_all(HOST).iter().nth(1).is_some() {
            // A proxy and this server would understand such a request differently.
            return Err(Problem::new(
                ProblemCode::BadHost,
                "send one header `Host`, with the host of the request",
            ));
        }
        let host = text(HOST).or(target).unwrap_or_default();
        if let Some(hosts) = &self.hosts
            && !hosts.iter().any(|ours| ours.eq_ignore_ascii_case(without_port(host)))
        {
            let detail = format!(
                "`Host: {host}` is not a name of this server; use {}, or allow the name",
                hosts.join(" or ")
            );
            return Err(Problem::new(ProblemCode::WrongHost, detail));
        }
        let Some(origin) = text(ORIGIN) else { return Ok(()) };
        let site = origin.split_once("://").map(|(_, site)| site);
        if site.is_some_and(|site| site.eq_ignore_ascii_case(host)) {
            return Ok(());
        }
        let detail = format!("a page of {origin} asks for {host}; only pages of this server may");
        Err(Problem::new(ProblemCode::ForeignOrigin, detail))
    }
}

fn bearer(parts: &Parts) -> Option<&str> {
    let (scheme, token) = parts.headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// The name of a host: `a:1` and `a` are `a`, `[::1]:1` is `[::1]`.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => name,
        _ => host,
    }
}

/// Middleware of the routes that need a permission.
pub(crate) async fn allow(
    State((shared, need)): State<(Arc<ServerState>, Permission)>,
    request: Request,
    next: Next,
) -> Response {
    let (parts, body) = request.into_parts();
    match shared.access.check(&parts, need) {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(problem) => problem.into_response(),
    }
}

/// Middleware of all routes.
pub(crate) async fn allow_host(
    State(shared): State<Arc<ServerState>>,
    request: Request,
    next: Next,
) -> Response {
    let (parts, body) = request.into_parts();
    match shared.access.check_names(&parts) {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(problem) => problem.into_response(),
    }
}
