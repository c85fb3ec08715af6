//! The section `[endpoint]`.
//!
//! Invariant: without the section nothing is served, but to the agents that the run itself starts, on a loopback address.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[endpoint]`: the policy as an endpoint while it is trained, in the protocols of OpenAI and Anthropic, and sessions of agents.
///
/// Agents of `environment.kind = "agent"` or `"sessions"` play their episodes over it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EndpointSection {
    /// Address on which the policy is served, such as `127.0.0.1:8800`. Default: none; for agents that the run starts a free port
    /// of 127.0.0.1. An address that other machines can reach needs `token_file` and `insecure`.
    // resume = changes, worker = ignored
    pub listen: Option<SocketAddr>,
    /// For `listen`: a file with the admin key, in a line `admin KEY` or alone, which starts sessions and may ask the policy without
    /// one. Without the file a loopback address accepts every request.
    // resume = changes, worker = ignored
    pub token_file: Option<PathBuf>,
    /// For `listen`: whether keys may cross the network without TLS.
    // resume = changes, worker = ignored
    pub insecure: bool,
    /// Most sessions at a time.
    // resume = changes, worker = ignored
    pub max_sessions: usize,
    /// Most messages that the conversations of a session have together.
    // resume = changes, worker = ignored
    pub max_messages: usize,
    /// A session that is not used for this long is lost, and costs its episode, seconds.
    // resume = changes, worker = ignored
    pub idle_s: f64,
    /// Most requests that wait or are sampled at a time; further ones are answered by 429.
    // resume = changes, worker = ignored
    pub max_requests: usize,
}

impl Default for EndpointSection {
    fn default() -> Self {
        Self {
            listen: None,
            token_file: None,
            insecure: false,
            max_sessions: 4096,
            max_messages: 1024,
            idle_s: 3600.0,
            max_requests: 1024,
        }
    }
}
