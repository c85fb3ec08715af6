//! `code`: runs a Python program of the model in the sandbox of `code` rewards.
//!
//! Invariant: every call is a new process without network, files of the user and environment. A program that crashes, loops or
//! floods its output is an answer; only a sandbox that fails is an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use host::sandbox::{
    Interpreter, ProgramEnd, ProgramRun, ReadableFiles, Sandbox, SandboxChoice, SandboxJob, SandboxLimits,
    program_environment,
};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use super::{Tool, ToolError};
use crate::{BoxFuture, EnvironmentContext, EnvironmentSpec, ToolSchema};

/// Address space of a program, bytes.
const MEMORY: u64 = 512 << 20;
/// Output of a program, bytes; more ends it.
const OUTPUT: usize = 1 << 20;
/// Processes and threads of a program at the same time.
const PROCESSES: u64 = 16;

/// An interpreter of Python in a sandbox.
#[derive(Debug)]
pub struct CodeInterpreter {
    schema: ToolSchema,
    sandbox: Sandbox,
    interpreter: String,
    limits: SandboxLimits,
    /// Programs compute: with more of them than cores, each would exceed its time.
    running: Semaphore,
}

impl CodeInterpreter {
    /// Finds the interpreter and a sandbox that works.
    ///
    /// # Errors
    /// No interpreter, or no sandbox that works on this machine; the text has the reason and the remedy.
    pub(crate) fn new(spec: &EnvironmentSpec, context: &EnvironmentContext) -> Result<Self, String> {
        let python = spec.python.as_deref().unwrap_or("python3");
        let Interpreter { executable, directories } =
            Interpreter::find(python, &context.variables, &context.scratch)?;
        let readable = ReadableFiles::new(&directories, Some(executable.clone()))?;
        let path = context.variables.get("PATH").map_or("", String::as_str);
        let sandbox = Sandbox::open(SandboxChoice::Auto, &readable, path, &context.scratch);
        let time = spec.limits().tool_timeout;
        let schema = ToolSchema {
            name: "python".to_owned(),
            description: "Runs a Python program and gives what it prints. Every call begins anew.".to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {"code": {"type": "string", "description": "the program"}},
                "required": ["code"],
            }),
        };
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Ok(Self {
            schema,
            sandbox: sandbox.map_err(|error| error.to_string())?,
            interpreter: executable.display().to_string(),
            limits: SandboxLimits {
                wall: time,
                cpu: time,
                memory: spec.memory_mb.map_or(MEMORY, |mib| mib.saturating_mul(1 << 20)),
                output: OUTPUT,
                processes: PROCESSES,
            },
            running: Semaphore::new(cores),
        })
    }

    async fn run(&self, code: &str) -> Result<String, ToolError> {
        // The semaphore is never closed, so a permit always comes.
        let _permit = self.running.acquire().await;
        let cancelled = CancelOnDrop(Arc::default());
        let (flag, sandbox, limits) = (Arc::clone(&cancelled.0), self.sandbox.clone(), self.limits);
        let (interpreter, code) = (self.interpreter.clone(), code.to_owned());
        let run = tokio::task::spawn_blocking(move || {
            let argv = [&interpreter, "-s", "-B", "-X", "utf8", "{file}"].map(str::to_owned).to_vec();
            let job = SandboxJob {
                argv,
                environment: program_environment(),
                file: Some(("program.py", code.as_bytes())),
                cancelled: Some(&flag),
                ..SandboxJob::default()
            };
            sandbox.run(job, &limits)
        });
        match run.await {
            Ok(Ok(ran)) => Ok(answer(&ran)),
            Ok(Err(error)) => Err(ToolError::Unusable(error.to_string())),
            Err(_) => Err(ToolError::Unusable("the sandbox panicked; its message is in the log".to_owned())),
        }
    }
}

/// Cancels a program when the call that waits for it is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What the program printed, and how it ended if that was not well.
fn answer(ran: &ProgramRun) -> String {
    let (printed, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    let end = match ran.end {
        ProgramEnd::Exit(0) => String::new(),
        ProgramEnd::Exit(code) => format!("it ended with exit code {code}"),
        ProgramEnd::Signal(9) => "it was killed: too much processor time, or no memory left".to_owned(),
        ProgramEnd::Signal(signal) => format!("it was ended by signal {signal}"),
        ProgramEnd::Timeout => "it took too long".to_owned(),
        ProgramEnd::Output => "it printed too much".to_owned(),
        ProgramEnd::Cancelled => "it was cancelled".to_owned(),
    };
    let parts = [printed.trim_end(), errors.trim_end(), &end];
    let said: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    if said.is_empty() { "it printed nothing".to_owned() } else { said.join("\n") }
}

impl Tool for CodeInterpreter {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call<'a>(&'a self, arguments: &'a Map<String, Value>) -> BoxFuture<'a, Result<String, ToolError>> {
        Box::pin(self.run(arguments.get("code").and_then(Value::as_str).unwrap_or_default()))
    }
}
