//! What the policy acts in.
//!
//! An [`Environment`] opens an episode with messages, answers every completion of the policy with messages and a reward,
//! and says when the episode is done. The episode driver of the rollout worker keeps the tokens; an environment sees text.
//!
//! # Layout
//! - [`environment`]: the traits [`Environment`] and [`EnvironmentFactory`], and what they exchange
//! - [`single_turn`]: one completion per task, judged by the rewards of the recipe
//! - [`spec`]: `[environment]` of a recipe; [`registry`]: the kinds that it can name
//! - [`retry`]: one more attempt after a wrong answer, with a reward per turn
//! - [`games`]: games that need no data and no file
//! - [`openenv`]: environments of an OpenEnv server
//! - [`python`]: environments of the user in Python
//! - [`agents`]: agents of the user, whose loop is their own
//! - [`tools`]: tools that the policy may call until it answers
//! - [`tool_calls`]: calls of tools in the text of a completion, by model family
//!
//! # Invariants
//! - An environment never sees nor changes tokens.
//! - It fails with an [`EnvironmentError`], never with a reward of 0.
//!
//! ```
//! use environments::{Action, BoxFuture, Environment, EnvironmentFactory, Retry};
//! use trajectory::{Prompt, StopReason, Task, TaskId};
//!
//! # fn now<T>(mut future: BoxFuture<'_, T>) -> T {
//! #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
//! #     match future.as_mut().poll(&mut context) {
//! #         std::task::Poll::Ready(output) => output,
//! #         std::task::Poll::Pending => panic!("this environment waits for nothing"),
//! #     }
//! # }
//! let (prompt, answer) = (Prompt::Text("2+3=".into()), Some("5".into()));
//! let task = Task { id: TaskId(0), prompt, answer, columns: serde_json::Map::new() };
//! let mut environment = Retry::attempts(2, "no, again: ").create();
//! assert_eq!(now(environment.reset(&task))?, []);
//! let step = now(environment.step(Action { turn: 0, role: 0, text: "4", stop: StopReason::StopToken, last: false }))?;
//! assert_eq!((&step.messages[0].content[..], step.reward, step.done), ("no, again: ", Some(0.0), false));
//! let step = now(environment.step(Action { turn: 1, role: 0, text: "5", stop: StopReason::StopToken, last: false }))?;
//! assert_eq!((step.reward, step.done), (Some(1.0), true));
//! # Ok::<(), environments::EnvironmentError>(())
//! ```

pub mod agents;
pub mod environment;
pub mod games;
pub mod openenv;
pub mod python;
pub mod registry;
pub mod retry;
pub mod single_turn;
pub mod spec;
pub mod tool_calls;
pub mod tools;

pub use agents::{Agents, AwaitedAgents};
pub use environment::{
    Action, AgentCall, AgentRunner, AgentSource, BoxFuture, Demonstration, Environment, EnvironmentError,
    EnvironmentFactory, EnvironmentLimits, MAX_ROLES, Observation,
};
pub use games::{GuessNumber, Opponent, TicTacToe};
pub use openenv::OpenEnv;
pub use python::PythonEnvironments;
pub use registry::{EnvironmentContext, EnvironmentKind, EnvironmentRegistry, EnvironmentSpecError, Made};
pub use retry::Retry;
pub use single_turn::SingleTurn;
pub use spec::{EnvironmentSpec, ToolSpec};
pub use tool_calls::{BadCall, ToolCall, ToolCallFormat, ToolSchema};
pub use tools::{Calculator, Search, Tool, ToolError, ToolSet, Tools};
