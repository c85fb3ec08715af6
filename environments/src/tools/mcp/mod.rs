//! `mcp`: the tools of a server of the Model Context Protocol, by the crate `rmcp`: one that this process starts and speaks
//! to on standard input and output, or one at an address.
//!
//! # Layout
//! - `http`: messages to a server at an address
//!
//! Invariant: an error that the server answers is an answer to the model. A server that ends fails the calls that are under way,
//! and is started again, or gets a new session, for the next one. So is a program that leaves a call without an answer; it is
//! killed when no other call waits for it. A server that was started ends with this process, which closes its standard input.

mod http;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rmcp::ServiceExt;
use rmcp::model::{CallToolRequestParams, ContentBlock};
use rmcp::service::{RoleClient, RunningService, ServiceError};
use rmcp::transport::async_rw::AsyncRwTransport;
use serde_json::{Map, Value};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::{Tool, ToolError};
use crate::{BoxFuture, EnvironmentContext, EnvironmentSpec, ToolSchema};
use http::McpHttpServer;

/// Longest start of a server, with its list of tools.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// Longest message of a program, bytes. A longer one is passed over, and the call has no answer.
const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// A tool of a server.
#[derive(Debug)]
pub(crate) struct McpTool {
    schema: ToolSchema,
    server: Arc<McpServer>,
}

/// Where a server is, and the connection to it.
#[derive(Debug)]
struct McpServer {
    place: McpPlace,
    /// `None` before the first call. Calls under way share it.
    running: Mutex<Option<Arc<McpConnection>>>,
}

#[derive(Debug)]
enum McpPlace {
    /// A program that this process starts.
    Program { command: Vec<String>, variables: BTreeMap<String, String>, log: PathBuf },
    /// A server that runs somewhere.
    Address(Arc<McpHttpServer>),
}

/// A server that answers.
#[derive(Debug)]
struct McpConnection {
    client: RunningService<RoleClient, ()>,
    /// Whether the next call gets another one.
    given_up: AtomicBool,
    /// The program, which is killed when it is dropped.
    _process: Option<Child>,
}

impl McpConnection {
    fn new(client: RunningService<RoleClient, ()>, process: Option<Child>) -> Self {
        Self { client, given_up: AtomicBool::new(false), _process: process }
    }

    fn is_usable(&self) -> bool {
        !self.client.is_closed() && !self.given_up.load(Ordering::Relaxed)
    }

    fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }
}

/// A call that waits for a program. To drop it without an answer is to give the program up.
struct CallUnderWay<'a> {
    connection: &'a McpConnection,
    answered: bool,
}

impl Drop for CallUnderWay<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.connection.give_up();
        }
    }
}

impl McpTool {
    /// The tools of the server that `command` starts. Blocks until it has listed them.
    ///
    /// # Errors
    /// A server that does not start, or does not answer; the text has the reason.
    pub(crate) fn of_program(
        command: &[String],
        spec: &EnvironmentSpec,
        context: &EnvironmentContext,
    ) -> Result<Vec<Self>, String> {
        let named = spec.environment.as_deref().unwrap_or_default();
        let place = McpPlace::Program {
            command: command.to_vec(),
            variables: host::python::environment(&context.variables, named),
            log: context.scratch.join("mcp.log"),
        };
        Self::all(place, context)
    }

    /// The tools of the server at `url`, with the bearer token of the variable `token_env`. Blocks until it has listed them.
    ///
    /// # Errors
    /// A variable that is not set, a server that does not answer; the text has the reason.
    pub(crate) fn of_address(
        url: &str,
        token_env: Option<&str>,
        spec: &EnvironmentSpec,
        context: &EnvironmentContext,
    ) -> Result<Vec<Self>, String> {
        let token = token_env.map(|name| {
            let value = context.variables.get(name);
            value.map(String::as_str).ok_or_else(|| format!("needs the variable {name}, which is not set"))
        });
        let limit = spec.limits().tool_timeout;
        let server = McpHttpServer::new(url, token.transpose()?, limit)?;
        Self::all(McpPlace::Address(Arc::new(server)), context)
    }

    fn all(place: McpPlace, context: &EnvironmentContext) -> Result<Vec<Self>, String> {
        let runtime = context.runtime.as_ref().ok_or("needs a runtime that waits for servers")?;
        let server = Arc::new(McpServer { place, running: Mutex::default() });
        let listed = runtime.block_on(async {
            let listing = async {
                let connection = server.connection().await?;
                connection.client.peer().list_all_tools().await.map_err(|error| server.reason(&error))
            };
            let late = |_| format!("it lists no tools within {} s", START_DEADLINE.as_secs());
            tokio::time::timeout(START_DEADLINE, listing).await.map_err(late)?
        })?;
        let tool = |tool: rmcp::model::Tool| Self {
            schema: ToolSchema {
                name: tool.name.into_owned(),
                description: tool.description.unwrap_or_default().into_owned(),
                parameters: Value::Object((*tool.input_schema).clone()),
            },
            server: Arc::clone(&server),
        };
        Ok(listed.into_iter().map(tool).collect())
    }

    async fn invoke(&self, arguments: &Map<String, Value>) -> Result<String, ToolError> {
        let connection = self.server.connection().await.map_err(ToolError::Unusable)?;
        let call = CallToolRequestParams::new(self.schema.name.clone()).with_arguments(arguments.clone());
        // At an address one late answer says nothing about others.
        let answered = matches!(self.server.place, McpPlace::Address(_));
        let mut under_way = CallUnderWay { connection: &connection, answered };
        let result = connection.client.peer().call_tool(call).await;
        under_way.answered = true;
        match result {
            Ok(result) => {
                let parts: Vec<String> = result.content.iter().map(text).collect();
                let answer = parts.join("\n");
                if result.is_error == Some(true) { Err(ToolError::Refused(answer)) } else { Ok(answer) }
            }
            Err(ServiceError::McpError(error)) => Err(ToolError::Refused(error.message.into_owned())),
            Err(error) => {
                connection.give_up();
                let reason = self.server.reason(&error);
                Err(ToolError::Unusable(format!("the server of {} failed: {reason}", self.schema.name)))
            }
        }
    }
}

impl McpServer {
    /// Why a request failed: what is known of the transport, or else the error.
    fn reason(&self, error: &dyn std::fmt::Display) -> String {
        let known = match &self.place {
            McpPlace::Program { .. } => None,
            McpPlace::Address(server) => server.failure(),
        };
        known.unwrap_or_else(|| error.to_string())
    }

    fn name(&self) -> &str {
        match &self.place {
            McpPlace::Program { command, .. } => command.first().map_or("the server", String::as_str),
            McpPlace::Address(server) => server.url(),
        }
    }

    /// The server, which is started if it does not run.
    async fn connection(&self) -> Result<Arc<McpConnection>, String> {
        let mut running = self.running.lock().await;
        if let Some(connection) = running.as_ref().filter(|connection| connection.is_usable()) {
            return Ok(Arc::clone(connection));
        }
        let started = tokio::time::timeout(START_DEADLINE, self.start()).await;
        let late = |_| format!("{} does not answer within {} s", self.name(), START_DEADLINE.as_secs());
        let connection = Arc::new(started.map_err(late)??);
        *running = Some(Arc::clone(&connection));
        Ok(connection)
    }

    async fn start(&self) -> Result<McpConnection, String> {
        let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
        let (command, variables, log_file) = match &self.place {
            McpPlace::Program { command, variables, log } => (command, variables, log),
            McpPlace::Address(server) => {
                let client = ().serve(server.transport()).await.map_err(|error| {
                    failed("it does not speak the Model Context Protocol", &self.reason(&error))
                })?;
                return Ok(McpConnection::new(client, None));
            }
        };
        let Some((program, arguments)) = command.split_first() else {
            return Err("its `command` is empty".to_owned());
        };
        let log = OpenOptions::new().create(true).append(true).open(log_file);
        let log = log.map_err(|error| failed(&format!("cannot write {}", log_file.display()), &error))?;
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(variables);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).kill_on_drop(true);
        let mut process =
            command.spawn().map_err(|error| failed(&format!("`{program}` cannot be started"), &error))?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(format!("`{program}` has no standard input and output"));
        };
        let messages = AsyncRwTransport::new_client(output, input).with_max_line_length(MAX_MESSAGE_BYTES);
        let client = ().serve(messages).await;
        let said = format!(
            "`{program}` does not speak the Model Context Protocol ({} says more)",
            log_file.display()
        );
        let client = client.map_err(|error| failed(&said, &error))?;
        Ok(McpConnection::new(client, Some(process)))
    }
}

/// A part of an answer as text.
fn text(block: &ContentBlock) -> String {
    match block {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::Image(_) => "[an image]".to_owned(),
        ContentBlock::Audio(_) => "[a sound]".to_owned(),
        other => serde_json::to_string(other).unwrap_or_default(),
    }
}

impl Tool for McpTool {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call<'a>(&'a self, arguments: &'a Map<String, Value>) -> BoxFuture<'a, Result<String, ToolError>> {
        Box::pin(self.invoke(arguments))
    }
}
