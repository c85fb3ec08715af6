//! Sessions: conversations of agents that bring their own loop, kept as tokens, and turned into rows for training.
//!
//! An agent gets the key of its session as its API key, and calls the policy with the messages of its conversation. The
//! session keeps what was sampled, as it was sampled, and continues it.
//!
//! # Layout
//! - `message`: messages as they are compared; `tree`: the tree of the messages of a session
//! - `tokens`: the tokens of the next prompt, and how they relate to those before
//! - `interaction`: one call of the policy, and what it is for training; `credit`: what it is worth
//! - `rows`: from interactions to rows, one for each branch
//! - `state`: one session; `call`: a call of it that is under way; `store`: all sessions by key, with limits and expiry
//! - `play`: [`SessionPlayer`], episodes of a run whose agents have sessions; `waiting`: episodes that wait for agents of others
//! - `turns`: sessions behind the protocols of the endpoint
//! - `routes`: control routes over HTTP, and exports
//! - `error`: [`SessionError`], with the status that each is answered by
//!
//! # Invariants
//! - What was sampled is never tokenised again while an agent appends to its conversation.
//! - A sampled token is trained on at most once.
//! - A session that is lost costs its episode and nothing else.

mod call;
pub mod credit;
mod error;
mod interaction;
mod message;
mod play;
mod routes;
mod rows;
mod state;
mod store;
#[cfg(test)]
mod tests;
mod tokens;
mod tree;
mod turns;
mod waiting;

pub use call::SessionCall;
pub use error::SessionError;
pub use interaction::{Interaction, InteractionRole, roles};
pub use message::SessionMessage;
pub use play::{EndpointAddress, SessionPlayer, expire_idle};
pub use routes::{SessionControl, session_routes};
pub use rows::{SessionRow, rows};
pub use state::{AgentSession, SessionPurpose, SessionRequest, SessionResponse, SessionSampler};
pub use store::{SessionCaller, SessionCounts, SessionLimits, SessionStart, SessionStore, StartedSession};
pub use tokens::{Continuation, DriftCounts, NextPrompt, PromptRenderer, REALIGN_BELOW};
pub use tree::{Located, MessageTree, NodeId};
pub use waiting::{EpisodeRequest, WaitingEpisodes};
