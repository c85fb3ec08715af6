//! Runs the tests of a task on a program, in a sandbox.
//!
//! Invariant: outputs and results are compared here, outside of the sandbox, where the program cannot reach. It passes a test
//! only by its output or result; its exit, or a message that it passed, counts for nothing. A harness that never reported that
//! it is ready is a failure of the sandbox, and tests in which nothing could fail are an error.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::{Value, json};

use super::compare::{same_output, same_value};
use super::suite::{FunctionCall, StreamTest, TestSuite};
use host::sandbox::{
    Dialog, ProgramEnd, ProgramRun, Sandbox, SandboxError, SandboxJob, SandboxLimits, program_environment,
};

const HARNESS: &str = include_str!("harness.py");
/// Imports that tasks with a given signature take for granted.
const PRELUDE: &str = include_str!("prelude.py");

/// Longest part of an output or a message that is shown, characters.
const SHOWN: usize = 160;

/// Bytes that a program may write beyond twice the expected output.
const MARGIN: usize = 4 << 10;

/// How programs of one language are run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramRunner {
    /// An interpreter of Python 3.
    Python(PathBuf),
    /// A command: an absolute path and arguments, one of them with `{file}`.
    Command {
        /// Path and arguments.
        argv: Vec<String>,
        /// Name of the program's file.
        file: String,
    },
}

/// The result of all tests of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestResult {
    /// Number of tests that it passed.
    pub passed: usize,
    /// Number of tests.
    pub tests: usize,
    /// The reason of the first failure.
    pub why: Option<String>,
}

impl TestResult {
    /// Records the failure of a test.
    fn fail(&mut self, test: usize, why: &str) {
        self.why.get_or_insert_with(|| format!("test {}: {why}", test + 1));
    }
}

/// A failure that is not the program's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TestError {
    /// The sandbox did not run the program to its end.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// A test that no program can fail.
    #[error("test {test} tests nothing: {reason}")]
    Tests {
        /// Number of the test, from 1.
        test: usize,
        /// Why nothing in it can fail.
        reason: String,
    },
}

/// Runs programs of one language.
#[derive(Clone, Debug)]
pub struct ProgramTester {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// Interpreter or command.
    pub runner: ProgramRunner,
    /// Limits of each run; `wall` is for all tests together.
    pub limits: SandboxLimits,
    /// Whether to continue after a failed test.
    pub partial: bool,
}

impl ProgramTester {
    /// Runs the tests until one fails, or with `partial` until the time is over in one of them.
    ///
    /// # Errors
    /// The sandbox failed, or `cancelled` was set, or the tests need the harness and the language is not Python, or nothing in
    /// the tests could fail.
    pub fn run(
        &self,
        program: &str,
        suite: &TestSuite,
        cancelled: &AtomicBool,
    ) -> Result<TestResult, TestError> {
        match suite {
            TestSuite::Streams(tests) => Ok(self.streams(program, tests, cancelled)?),
            TestSuite::Calls { function, calls } => {
                let opening =
                    json!({"form": "calls", "program": program, "prelude": PRELUDE, "fn_name": function});
                let questions = calls.iter().map(|call| json!({"args": call.arguments})).collect();
                let judge = |test: usize, reply: &Value| judge_call(&calls[test], reply);
                let longest = calls.iter().map(|call| call.expected.to_string().len()).max().unwrap_or(0);
                // Escapes and spaces make the same value longer.
                self.run_harness(&opening, questions, &judge, &self.limits_for(2 * longest), cancelled)
            }
            TestSuite::Asserts { setup, tests, entry_point } => {
                let opening =
                    json!({"form": "tests", "program": program, "prelude": PRELUDE, "setup": setup});
                let nonces = tests.iter().map(|_| nonce()).collect::<Result<Vec<_>, _>>()?;
                let questions = tests
                    .iter()
                    .zip(&nonces)
                    .map(|(test, nonce)| json!({"test": test, "entry_point": entry_point, "nonce": nonce}));
                let judge = |test: usize, reply: &Value| judge_assert(&nonces[test], reply);
                self.run_harness(&opening, questions.collect(), &judge, &self.limits, cancelled)
            }
        }
    }

    /// Limits that allow an output of twice the expected length, in bytes.
    fn limits_for(&self, expected: usize) -> SandboxLimits {
        SandboxLimits { output: self.limits.output.max(2 * expected + MARGIN), ..self.limits }
    }

    fn streams(
        &self,
        program: &str,
        tests: &[StreamTest],
        cancelled: &AtomicBool,
    ) -> Result<TestResult, SandboxError> {
        let mut verdict = TestResult { tests: tests.len(), ..TestResult::default() };
        let started = Instant::now();
        for (index, test) in tests.iter().enumerate() {
            let left = self.limits.wall.saturating_sub(started.elapsed());
            if left.is_zero() {
                verdict.fail(index, "out of time");
                break;
            }
            let limits = SandboxLimits { wall: left, ..self.limits_for(test.output.len()) };
            let ran = self.once(program, &test.input, &limits, cancelled)?;
            match judge_output(&ran, &test.output) {
                Ok(()) => verdict.passed += 1,
                Err(why) => {
                    verdict.fail(index, &why);
                    if !self.partial || ran.end == ProgramEnd::Timeout {
                        break;
                    }
                }
            }
        }
        Ok(verdict)
    }

    /// One run of a whole program.
    fn once(
        &self,
        program: &str,
        input: &str,
        limits: &SandboxLimits,
        cancelled: &AtomicBool,
    ) -> Result<ProgramRun, SandboxError> {
        match &self.runner {
            ProgramRunner::Python(interpreter) => {
                let opening = json!({"form": "script", "program": program});
                let mut session = HarnessSession::new(&opening, Vec::new(), &|_, _| Ok(()), false);
                self.harness(interpreter, input, &mut session, limits, cancelled)
            }
            ProgramRunner::Command { argv, file } => {
                let job = SandboxJob {
                    argv: argv.clone(),
                    environment: program_environment(),
                    file: Some((file, program.as_bytes())),
                    stdin: input.as_bytes(),
                    cancelled: Some(cancelled),
                    ..SandboxJob::default()
                };
                not_cancelled(self.sandbox.run(job, limits)?)
            }
        }
    }

    fn harness(
        &self,
        interpreter: &std::path::Path,
        input: &str,
        session: &mut HarnessSession<'_>,
        limits: &SandboxLimits,
        cancelled: &AtomicBool,
    ) -> Result<ProgramRun, SandboxError> {
        let interpreter = interpreter.display().to_string();
        let argv = [&interpreter, "-s", "-B", "-X", "utf8", "-c", HARNESS, "{orders}", "{report}"];
        let job = SandboxJob {
            argv: argv.map(str::to_owned).to_vec(),
            environment: program_environment(),
            stdin: input.as_bytes(),
            dialog: Some(&mut *session),
            cancelled: Some(cancelled),
            ..SandboxJob::default()
        };
        let ran = not_cancelled(self.sandbox.run(job, limits)?)?;
        if session.ready {
            return Ok(ran);
        }
        let said = last_line(&ran.stderr).unwrap_or_else(|| "it said nothing".to_owned());
        Err(SandboxError::Failed {
            reason: format!(
                "{interpreter} did not come to run the program ({}): {said}; is `memory_mb` or `timeout_s` too small for it, or is it older than 3.8?",
                ending(&ran)
            ),
        })
    }

    /// Sends the harness one test after the other.
    fn run_harness(
        &self,
        opening: &Value,
        questions: Vec<Value>,
        judge: &ReplyJudge<'_>,
        limits: &SandboxLimits,
        cancelled: &AtomicBool,
    ) -> Result<TestResult, TestError> {
        let ProgramRunner::Python(interpreter) = &self.runner else {
            let reason =
                "calls and asserts are for Python; for other languages give tests by input and output";
            return Err(SandboxError::Failed { reason: reason.to_owned() }.into());
        };
        let mut session = HarnessSession::new(opening, questions, judge, self.partial);
        let ran = self.harness(interpreter, "", &mut session, limits, cancelled)?;
        let HarnessSession { mut verdict, done, sent, untested, .. } = session;
        if let Some(reason) = untested {
            return Err(TestError::Tests { test: sent, reason });
        }
        if !done {
            let said = last_line(&ran.stderr).map(|line| format!(": {line}")).unwrap_or_default();
            verdict.fail(sent.saturating_sub(1), &format!("{} before it was over{said}", ending(&ran)));
        }
        Ok(verdict)
    }
}

/// Why a reply does not pass.
#[derive(Debug)]
enum ReplyFault {
    /// The program is wrong.
    Program(String),
    /// No program can fail the test.
    Test(String),
}

/// Compares the reply to a test with the expected result.
type ReplyJudge<'a> = dyn Fn(usize, &Value) -> Result<(), ReplyFault> + Sync + 'a;

/// The side of the dialog with the harness that knows the expected results.
struct HarnessSession<'a> {
    opening: Vec<u8>,
    questions: Vec<Value>,
    judge: &'a ReplyJudge<'a>,
    partial: bool,
    /// The harness has started.
    ready: bool,
    /// The program was loaded.
    loaded: bool,
    /// Tests that were sent.
    sent: usize,
    done: bool,
    verdict: TestResult,
    /// Why nothing in the last test can fail, if so.
    untested: Option<String>,
}

impl<'a> HarnessSession<'a> {
    fn new(opening: &Value, questions: Vec<Value>, judge: &'a ReplyJudge<'a>, partial: bool) -> Self {
        let verdict = TestResult { tests: questions.len(), ..TestResult::default() };
        let (ready, loaded, sent, done) = (false, false, 0, false);
        let (opening, untested) = (line(opening), None);
        Self { opening, questions, judge, partial, ready, loaded, sent, done, verdict, untested }
    }

    fn next(&mut self) -> Vec<u8> {
        match self.questions.get(self.sent) {
            Some(question) => {
                self.sent += 1;
                line(question)
            }
            None => self.end(),
        }
    }

    fn end(&mut self) -> Vec<u8> {
        self.done = true;
        line(&json!({"end": true}))
    }
}

impl Dialog for HarnessSession<'_> {
    fn opening(&mut self) -> Vec<u8> {
        self.opening.clone()
    }

    fn answer(&mut self, line: &[u8]) -> Vec<u8> {
        let reply: Value = serde_json::from_slice(line).unwrap_or_default();
        if self.done {
            return Vec::new();
        }
        if !self.ready {
            self.ready = reply.get("ready").is_some();
            return Vec::new();
        }
        if !self.loaded {
            self.loaded = true;
            if let Some(why) = reply.get("broken").and_then(Value::as_str) {
                self.verdict.fail(0, &cut(why));
                return self.end();
            }
            return self.next();
        }
        match (self.judge)(self.sent - 1, &reply) {
            Ok(()) => self.verdict.passed += 1,
            Err(ReplyFault::Program(why)) => {
                self.verdict.fail(self.sent - 1, &why);
                if !self.partial {
                    return self.end();
                }
            }
            Err(ReplyFault::Test(reason)) => {
                self.untested = Some(reason);
                return self.end();
            }
        }
        self.next()
    }
}

fn judge_output(ran: &ProgramRun, expected: &str) -> Result<(), String> {
    if ran.end != ProgramEnd::Exit(0) {
        let said = last_line(&ran.stderr).map(|line| format!(": {line}")).unwrap_or_default();
        return Err(format!("{}{said}", ending(ran)));
    }
    let found = String::from_utf8_lossy(&ran.stdout);
    if same_output(&found, expected) {
        return Ok(());
    }
    Err(format!("wrote {:?} instead of {:?}", cut(&found), cut(expected)))
}

fn judge_call(call: &FunctionCall, reply: &Value) -> Result<(), ReplyFault> {
    let Some(value) = reply.get("value") else { return Err(failure(reply)) };
    let inner = call.expected.as_array().filter(|_| call.wrapped).and_then(|items| items.first());
    if same_value(value, &call.expected) || inner.is_some_and(|expected| same_value(value, expected)) {
        return Ok(());
    }
    let (value, expected) = (value.to_string(), call.expected.to_string());
    Err(ReplyFault::Program(format!("returned {} instead of {}", cut(&value), cut(&expected))))
}

fn judge_assert(nonce: &str, reply: &Value) -> Result<(), ReplyFault> {
    let text = |key: &str| reply.get(key).and_then(Value::as_str);
    // A program that does not know the nonce cannot turn its failure into an error either.
    match (text("passed"), text("untested"), text("nonce") == Some(nonce)) {
        (None, Some(reason), true) => Err(ReplyFault::Test(cut(reason))),
        (Some(said), ..) if said == nonce => Ok(()),
        (Some(_), ..) => {
            Err(ReplyFault::Program("said that it passed without having been tested".to_owned()))
        }
        _ => Err(failure(reply)),
    }
}

fn failure(reply: &Value) -> ReplyFault {
    let said = reply.get("failed").and_then(Value::as_str);
    ReplyFault::Program(said.map_or_else(|| "wrote on the channel of the harness".to_owned(), cut))
}

fn not_cancelled(ran: ProgramRun) -> Result<ProgramRun, SandboxError> {
    if ran.end == ProgramEnd::Cancelled {
        return Err(SandboxError::Failed { reason: "the caller stopped waiting for it".to_owned() });
    }
    Ok(ran)
}

fn ending(ran: &ProgramRun) -> String {
    match ran.end {
        ProgramEnd::Exit(code) => format!("ended with exit code {code}"),
        ProgramEnd::Signal(9) => "killed: too much processor time, or no memory left".to_owned(),
        ProgramEnd::Signal(number) => format!("ended by signal {number}"),
        ProgramEnd::Timeout => "out of time".to_owned(),
        ProgramEnd::Output => "wrote too much".to_owned(),
        ProgramEnd::Cancelled => "cancelled".to_owned(),
    }
}

/// A nonce that a program cannot guess from earlier ones.
fn nonce() -> Result<String, SandboxError> {
    Ok(host::random::hex(16)?)
}

fn line(order: &Value) -> Vec<u8> {
    let mut line = order.to_string().into_bytes();
    line.push(b'\n');
    line
}

fn last_line(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    text.lines().rev().find(|line| !line.trim().is_empty()).map(cut)
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
