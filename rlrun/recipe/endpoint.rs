//! Rules of `[endpoint]`, and of the environments whose agents use it.
//!
//! Invariant: an address that other machines can reach has a key.

use std::time::Duration;

use endpoint::session::SessionLimits;

use super::Recipe;
use super::checks::existing;
use super::ranges::{Checker, POSITIVE};
use super::schema::RawRecipe;

/// Kinds of environments whose loop is an agent's.
pub(crate) const AGENT_KINDS: [&str; 2] = ["agent", "sessions"];

/// Checks the section; makes its path absolute.
pub(super) fn check(raw: &mut RawRecipe, checker: &mut Checker<'_>) {
    let endpoint = &mut raw.endpoint;
    checker.number("endpoint.idle_s", endpoint.idle_s, POSITIVE);
    checker.at_least_one("endpoint.max_sessions", endpoint.max_sessions);
    checker.at_least_one("endpoint.max_messages", endpoint.max_messages);
    checker.at_least_one("endpoint.max_requests", endpoint.max_requests);
    if let Some(file) = endpoint.token_file.take() {
        endpoint.token_file = existing(&file, "endpoint.token_file", "write the key into it", checker);
    }
    if let Some(listen) = endpoint.listen.filter(|listen| !listen.ip().is_loopback()) {
        if endpoint.token_file.is_none() {
            let message =
                format!("`endpoint.listen` is {listen}, which other machines can reach without a key");
            checker.report(
                "endpoint.listen",
                message,
                "name an `endpoint.token_file`, or listen on 127.0.0.1",
            );
        } else if !endpoint.insecure {
            let message =
                format!("`endpoint.listen` is {listen}, and clients would send API keys to it unencrypted");
            let help = "put a proxy with TLS in front of 127.0.0.1, or set `endpoint.insecure` if the network is safe";
            checker.report("endpoint.listen", message, help);
        }
    }
    let kinds: Vec<&str> = raw.environment.iter().flat_map(|environment| environment.kinds()).collect();
    if kinds.contains(&"sessions") && raw.endpoint.listen.is_none() {
        let message = "`environment.kind` is \"sessions\", and there is no `endpoint.listen` where agents could start one";
        checker.report(
            "environment.kind",
            message,
            "write a section `[endpoint]` with `listen = \"127.0.0.1:8800\"`",
        );
    }
    let truncated = raw.rollout.top_p < 1.0 || raw.rollout.top_k > 0 || raw.rollout.min_p > 0.0;
    if truncated && kinds.iter().any(|kind| AGENT_KINDS.contains(kind)) {
        let message = "the distribution of agents' turns is not truncated; `rollout.top_p`, `top_k` and `min_p` have no effect";
        let paths = ["rollout.top_p", "rollout.top_k", "rollout.min_p", "environment.kind"];
        checker.report_latest(&paths, message, "leave them at their defaults");
    }
    if raw.rollout.interrupt_text.is_some() && kinds.iter().any(|kind| AGENT_KINDS.contains(kind)) {
        let message = "agents' turns are not interrupted; `rollout.interrupt_text` has no effect";
        let paths = ["rollout.interrupt_text", "environment.kind"];
        checker.report_latest(&paths, message, "remove the keys of the interruption");
    }
}

impl Recipe {
    /// Limits of sessions.
    #[must_use]
    pub(crate) fn session_limits(&self) -> SessionLimits {
        // Longer than any run, and no sum of times overflows.
        const LONGEST_S: f64 = 1e9;
        SessionLimits {
            max_sessions: self.endpoint.max_sessions,
            max_messages: self.endpoint.max_messages,
            idle: Duration::from_secs_f64(self.endpoint.idle_s.clamp(0.0, LONGEST_S)),
            ..SessionLimits::default()
        }
    }
}
