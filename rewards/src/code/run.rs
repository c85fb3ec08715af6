//! Tries a program with the tests of its task, in a sandbox.
//!
//! Invariant: outputs and results are compared here, outside of the sandbox, where the program cannot reach. It passes a test
//! only by what it gave for it; that it ended, or said that it passed, counts for nothing. A harness that never said that it
//! runs is a failure of the sandbox, and tests in which nothing could fail are an error.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::{Value, json};

use super::compare::{same_output, same_value};
use super::suite::{Call, Streams, Suite};
use host::sandbox::{Dialog, End, Job, Limits, Ran, Sandbox, SandboxError};

const HARNESS: &str = include_str!("harness.py");
/// Imports that tasks with a given signature take for granted.
const PRELUDE: &str = include_str!("prelude.py");

/// How much of an output or a message is shown, characters.
const SHOWN: usize = 160;

/// How much more than twice what is expected a program may write, bytes.
const MARGIN: usize = 4 << 10;

/// What a program of one language is run by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Runner {
    /// An interpreter of Python 3.
    Python(PathBuf),
    /// Words of a command, the first an absolute path, one holding `{file}`.
    Command {
        /// The words.
        argv: Vec<String>,
        /// Name of the file that the program is in.
        file: String,
    },
}

/// What came of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Tests that it passed.
    pub passed: usize,
    /// Tests that there are.
    pub tests: usize,
    /// What was wrong with the first that it did not pass.
    pub why: Option<String>,
}

impl Verdict {
    /// Ends with a failure; true if the next test is to be tried.
    fn fail(&mut self, test: usize, why: &str) {
        self.why.get_or_insert_with(|| format!("test {}: {why}", test + 1));
    }
}

/// No program is to blame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrialError {
    /// It was not run to its end.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// They say nothing about a program.
    #[error("test {test} tests nothing: {reason}")]
    Tests {
        /// Which of them, from 1 on.
        test: usize,
        /// What is wrong with it.
        reason: String,
    },
}

/// Runs programs of one language.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Where.
    pub sandbox: Sandbox,
    /// By what.
    pub runner: Runner,
    /// Bounds of each run; `wall` is for all tests together.
    pub limits: Limits,
    /// Whether tests are tried after one that failed.
    pub partial: bool,
}

impl Trial {
    /// Tries `program` until a test fails, or with `partial` until its time is over in one of them.
    ///
    /// # Errors
    /// The sandbox failed, or `cancelled` was set, or the tests need a harness that there is for Python only, or nothing in them
    /// could fail.
    pub fn run(&self, program: &str, suite: &Suite, cancelled: &AtomicBool) -> Result<Verdict, TrialError> {
        match suite {
            Suite::Streams(tests) => Ok(self.streams(program, tests, cancelled)?),
            Suite::Calls { function, calls } => {
                let opening =
                    json!({"form": "calls", "program": program, "prelude": PRELUDE, "fn_name": function});
                let questions = calls.iter().map(|call| json!({"args": call.arguments})).collect();
                let judge = |test: usize, reply: &Value| judge_call(&calls[test], reply);
                let longest = calls.iter().map(|call| call.expected.to_string().len()).max().unwrap_or(0);
                // Escapes and spaces make the same value longer.
                self.interview(&opening, questions, &judge, &self.room(2 * longest), cancelled)
            }
            Suite::Asserts { setup, tests, entry_point } => {
                let opening =
                    json!({"form": "tests", "program": program, "prelude": PRELUDE, "setup": setup});
                let nonces = tests.iter().map(|_| nonce()).collect::<Result<Vec<_>, _>>()?;
                let questions = tests
                    .iter()
                    .zip(&nonces)
                    .map(|(test, nonce)| json!({"test": test, "entry_point": entry_point, "nonce": nonce}));
                let judge = |test: usize, reply: &Value| judge_assert(&nonces[test], reply);
                self.interview(&opening, questions.collect(), &judge, &self.limits, cancelled)
            }
        }
    }

    /// Bounds in which an expected output of so many bytes can be written, and a wrong one of twice its length be seen.
    fn room(&self, expected: usize) -> Limits {
        Limits { output: self.limits.output.max(2 * expected + MARGIN), ..self.limits }
    }

    fn streams(
        &self,
        program: &str,
        tests: &[Streams],
        cancelled: &AtomicBool,
    ) -> Result<Verdict, SandboxError> {
        let mut verdict = Verdict { tests: tests.len(), ..Verdict::default() };
        let started = Instant::now();
        for (index, test) in tests.iter().enumerate() {
            let left = self.limits.wall.saturating_sub(started.elapsed());
            if left.is_zero() {
                verdict.fail(index, "out of time");
                break;
            }
            let limits = Limits { wall: left, ..self.room(test.output.len()) };
            let ran = self.once(program, &test.input, &limits, cancelled)?;
            match judge_output(&ran, &test.output) {
                Ok(()) => verdict.passed += 1,
                Err(why) => {
                    verdict.fail(index, &why);
                    if !self.partial || ran.end == End::Timeout {
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
        limits: &Limits,
        cancelled: &AtomicBool,
    ) -> Result<Ran, SandboxError> {
        match &self.runner {
            Runner::Python(interpreter) => {
                let opening = json!({"form": "script", "program": program});
                let mut interview = Interview::new(&opening, Vec::new(), &|_, _| Ok(()), false);
                self.harness(interpreter, input, &mut interview, limits, cancelled)
            }
            Runner::Command { argv, file } => {
                let job = Job {
                    argv: argv.clone(),
                    environment: environment(),
                    file: Some((file, program.as_bytes())),
                    stdin: input.as_bytes(),
                    cancelled: Some(cancelled),
                    ..Job::default()
                };
                not_cancelled(self.sandbox.run(job, limits)?)
            }
        }
    }

    fn harness(
        &self,
        interpreter: &std::path::Path,
        input: &str,
        interview: &mut Interview<'_>,
        limits: &Limits,
        cancelled: &AtomicBool,
    ) -> Result<Ran, SandboxError> {
        let interpreter = interpreter.display().to_string();
        let argv = [&interpreter, "-s", "-B", "-X", "utf8", "-c", HARNESS, "{orders}", "{report}"];
        let job = Job {
            argv: argv.map(str::to_owned).to_vec(),
            environment: environment(),
            stdin: input.as_bytes(),
            dialog: Some(&mut *interview),
            cancelled: Some(cancelled),
            ..Job::default()
        };
        let ran = not_cancelled(self.sandbox.run(job, limits)?)?;
        if interview.ready {
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

    /// Asks the harness one question after the other.
    fn interview(
        &self,
        opening: &Value,
        questions: Vec<Value>,
        judge: &Judge<'_>,
        limits: &Limits,
        cancelled: &AtomicBool,
    ) -> Result<Verdict, TrialError> {
        let Runner::Python(interpreter) = &self.runner else {
            let reason =
                "calls and asserts are for Python; for other languages give tests by input and output";
            return Err(SandboxError::Failed { reason: reason.to_owned() }.into());
        };
        let mut interview = Interview::new(opening, questions, judge, self.partial);
        let ran = self.harness(interpreter, "", &mut interview, limits, cancelled)?;
        let Interview { mut verdict, done, asked, untested, .. } = interview;
        if let Some(reason) = untested {
            return Err(TrialError::Tests { test: asked, reason });
        }
        if !done {
            let said = last_line(&ran.stderr).map(|line| format!(": {line}")).unwrap_or_default();
            verdict.fail(asked.saturating_sub(1), &format!("{} before it was over{said}", ending(&ran)));
        }
        Ok(verdict)
    }
}

/// Why a reply is no pass.
#[derive(Debug)]
enum Fault {
    /// The program is wrong.
    Program(String),
    /// The test is no test.
    Test(String),
}

/// Judges the reply to a question.
type Judge<'a> = dyn Fn(usize, &Value) -> Result<(), Fault> + Sync + 'a;

/// The side of the harness that knows what is expected.
struct Interview<'a> {
    opening: Vec<u8>,
    questions: Vec<Value>,
    judge: &'a Judge<'a>,
    partial: bool,
    /// The harness runs.
    ready: bool,
    /// The program was loaded.
    loaded: bool,
    /// Questions put so far.
    asked: usize,
    done: bool,
    verdict: Verdict,
    /// What is wrong with the last test that was asked for.
    untested: Option<String>,
}

impl<'a> Interview<'a> {
    fn new(opening: &Value, questions: Vec<Value>, judge: &'a Judge<'a>, partial: bool) -> Self {
        let verdict = Verdict { tests: questions.len(), ..Verdict::default() };
        let (ready, loaded, asked, done) = (false, false, 0, false);
        let (opening, untested) = (line(opening), None);
        Self { opening, questions, judge, partial, ready, loaded, asked, done, verdict, untested }
    }

    fn next(&mut self) -> Vec<u8> {
        match self.questions.get(self.asked) {
            Some(question) => {
                self.asked += 1;
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

impl Dialog for Interview<'_> {
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
        match (self.judge)(self.asked - 1, &reply) {
            Ok(()) => self.verdict.passed += 1,
            Err(Fault::Program(why)) => {
                self.verdict.fail(self.asked - 1, &why);
                if !self.partial {
                    return self.end();
                }
            }
            Err(Fault::Test(reason)) => {
                self.untested = Some(reason);
                return self.end();
            }
        }
        self.next()
    }
}

fn judge_output(ran: &Ran, expected: &str) -> Result<(), String> {
    if ran.end != End::Exit(0) {
        let said = last_line(&ran.stderr).map(|line| format!(": {line}")).unwrap_or_default();
        return Err(format!("{}{said}", ending(ran)));
    }
    let found = String::from_utf8_lossy(&ran.stdout);
    if same_output(&found, expected) {
        return Ok(());
    }
    Err(format!("wrote {:?} instead of {:?}", cut(&found), cut(expected)))
}

fn judge_call(call: &Call, reply: &Value) -> Result<(), Fault> {
    let Some(value) = reply.get("value") else { return Err(failure(reply)) };
    let inner = call.expected.as_array().filter(|_| call.wrapped).and_then(|items| items.first());
    if same_value(value, &call.expected) || inner.is_some_and(|expected| same_value(value, expected)) {
        return Ok(());
    }
    let (value, expected) = (value.to_string(), call.expected.to_string());
    Err(Fault::Program(format!("returned {} instead of {}", cut(&value), cut(&expected))))
}

fn judge_assert(nonce: &str, reply: &Value) -> Result<(), Fault> {
    let text = |key: &str| reply.get(key).and_then(Value::as_str);
    // A program that does not know the word cannot turn its failure into an error either.
    match (text("passed"), text("untested"), text("nonce") == Some(nonce)) {
        (None, Some(reason), true) => Err(Fault::Test(cut(reason))),
        (Some(said), ..) if said == nonce => Ok(()),
        (Some(_), ..) => Err(Fault::Program("said that it passed without having been tested".to_owned())),
        _ => Err(failure(reply)),
    }
}

fn failure(reply: &Value) -> Fault {
    let said = reply.get("failed").and_then(Value::as_str);
    Fault::Program(said.map_or_else(|| "wrote on the channel of the harness".to_owned(), cut))
}

fn not_cancelled(ran: Ran) -> Result<Ran, SandboxError> {
    if ran.end == End::Cancelled {
        return Err(SandboxError::Failed { reason: "nobody waited for it any more".to_owned() });
    }
    Ok(ran)
}

fn ending(ran: &Ran) -> String {
    match ran.end {
        End::Exit(code) => format!("ended with exit code {code}"),
        End::Signal(9) => "killed: too much processor time, or no memory left".to_owned(),
        End::Signal(number) => format!("ended by signal {number}"),
        End::Timeout => "out of time".to_owned(),
        End::Output => "wrote too much".to_owned(),
        End::Cancelled => "cancelled".to_owned(),
    }
}

/// All variables of a program.
fn environment() -> Vec<(String, String)> {
    [
        ("PATH", "/usr/local/bin:/usr/bin:/bin"),
        ("HOME", "/tmp"),
        ("LANG", "C.UTF-8"),
        // The same program gives the same output twice, and numeric libraries do not start a thread for each core.
        ("PYTHONHASHSEED", "0"),
        ("OMP_NUM_THREADS", "1"),
        ("OPENBLAS_NUM_THREADS", "1"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

/// A word that a program cannot guess, whatever words it has seen.
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
