//! Python functions of the user as tools, called in a pool of processes.
//!
//! Invariant: an exception, a crash or a timeout of a function is an answer to the model, and costs no other call.

use std::path::Path;
use std::sync::Arc;

use host::python::{CallError, ForkServer, MEMORY_MB, PoolOptions, ProcessPool, PythonCode};
use serde_json::{Map, Value, json};

use super::MethodAnswer;
use crate::tools::{Tool, ToolError};
use crate::{BoxFuture, EnvironmentContext, EnvironmentSpec, ToolSchema};

/// The adapter: schemas, then functions.
const ADAPTER: &str = concat!(include_str!("schema.py"), "\n\n", include_str!("functions.py"));
/// Default number of processes.
const PROCESSES: usize = 4;

/// One function.
#[derive(Debug)]
pub(crate) struct PythonFunction {
    schema: ToolSchema,
    pool: Arc<ProcessPool>,
}

impl PythonFunction {
    /// The functions of a file, or the one that `path` names. Blocks until the file is imported.
    ///
    /// # Errors
    /// Functions that cannot be used; the text has the reason and the remedy.
    pub(crate) fn all(
        path: &Path,
        spec: &EnvironmentSpec,
        context: &EnvironmentContext,
    ) -> Result<Vec<Self>, String> {
        let runtime = context.runtime.as_ref().ok_or("needs a runtime that waits for processes")?;
        let named = spec.environment.as_deref().unwrap_or_default();
        let server = ForkServer::start(PythonCode {
            interpreter: spec.python.clone().unwrap_or_else(|| "python3".to_owned()),
            adapter: ADAPTER,
            config: json!({"path": path}),
            environment: host::python::environment(&context.variables, named),
            log: context.scratch.join("tools.log"),
            timeout: spec.limits().tool_timeout,
            memory_mb: spec.memory_mb.unwrap_or(MEMORY_MB),
            runtime: runtime.clone(),
        });
        let server = server.map_err(|error| error.reason)?;
        let found = server.loaded().description.clone();
        let schemas: Vec<ToolSchema> = serde_json::from_value(found).map_err(|error| error.to_string())?;
        let workers = spec.processes.unwrap_or(PROCESSES).max(1);
        let pool = ProcessPool::start(server, PoolOptions { workers, max_batch: 1, whole_groups: false });
        let pool = Arc::new(pool);
        Ok(schemas.into_iter().map(|schema| Self { schema, pool: Arc::clone(&pool) }).collect())
    }

    async fn invoke(&self, arguments: &Map<String, Value>) -> Result<String, ToolError> {
        let call = json!({"name": self.schema.name, "arguments": arguments}).to_string();
        if call.len() > ProcessPool::MAX_ARGUMENTS {
            return Err(ToolError::Refused("the arguments are too long".to_owned()));
        }
        let Some(call) = self.pool.submit(vec![call]).pop() else {
            return Err(ToolError::Unusable("the run ended".to_owned()));
        };
        let answer = match call.result().await {
            Ok(answer) => answer,
            Err(CallError::Timeout) => {
                return Err(ToolError::Refused(format!("{} gave no answer in time", self.schema.name)));
            }
            Err(CallError::Failed { reason }) => return Err(ToolError::Refused(reason)),
        };
        MethodAnswer::of(answer)
    }
}

impl Tool for PythonFunction {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call<'a>(&'a self, arguments: &'a Map<String, Value>) -> BoxFuture<'a, Result<String, ToolError>> {
        Box::pin(self.invoke(arguments))
    }
}
