//! Chat templates in a child process with limits on time and memory.
//!
//! A template is an untrusted program: nested loops can run for years, and forty doublings of a string take all memory of the
//! machine. Neither can be stopped from within the process, so a child process renders templates and is killed at a limit.
//!
//! ```text
//! frame    length u32, little endian; JSON
//! parent   {"key", "sources" (only the first time), "render": {"messages", "tools", "open"} or null}
//! child    {"Text"} | {"Raised"} | {"Compile"} | {"Render"}
//! ```
//!
//! Invariant: [`Renderer::ask`] returns within twice [`TIME`] for every template, and takes at most the memory of a text of
//! [`MAX_TEXT_BYTES`] in this process. A failed child is not used again.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ChatMessage, Compiled, TemplateFailure, TemplateSources};

/// Longest time for one text.
pub(super) const TIME: Duration = Duration::from_secs(10);
/// Memory that the process may allocate after its start, bytes.
const MEMORY: u64 = 256 << 20;
/// Longest text that a template may give, bytes.
const MAX_TEXT_BYTES: usize = 16 << 20;
/// Longest conversation, bytes as JSON.
const MAX_REQUEST_BYTES: usize = 64 << 20;
/// Stack of the thread that renders, bytes: calls nest up to a depth that the engine limits.
const STACK_BYTES: usize = 64 << 20;
/// Exit status of a process whose template took too long.
const TOO_LONG: i32 = 124;

/// The renderer of this process, if it has one.
static RENDERER: OnceLock<Renderer> = OnceLock::new();

/// Renders templates in a child process from now on: `program` with `arguments`, which has to call [`serve`]. Without this
/// call templates run in this process, without limits. Only the first call has an effect.
pub fn render_apart(program: PathBuf, arguments: &[&str]) {
    let arguments = arguments.iter().map(OsString::from).collect();
    drop(RENDERER.set(Renderer { program, arguments, process: Mutex::default() }));
}

/// The renderer of this process, if it has one.
pub(super) fn renderer() -> Option<&'static Renderer> {
    RENDERER.get()
}

/// A request to the child process.
#[derive(Serialize, Deserialize)]
struct RenderRequest {
    /// Digest of the sources.
    key: String,
    /// If the process does not have them yet.
    sources: Option<TemplateSources>,
    /// `None` only compiles.
    render: Option<TemplateInput>,
}

/// What a template renders.
#[derive(Serialize, Deserialize)]
pub(super) struct TemplateInput {
    pub(super) messages: Vec<ChatMessage>,
    /// What the template is given as `tools`.
    #[serde(default)]
    pub(super) tools: Vec<Value>,
    /// Whether the assistant's turn is opened at the end.
    pub(super) open: bool,
    /// Further variables of the template.
    #[serde(default)]
    pub(super) variables: Map<String, Value>,
}

/// Renders templates in another process.
#[derive(Debug)]
pub(super) struct Renderer {
    program: PathBuf,
    arguments: Vec<OsString>,
    process: Mutex<Option<RenderProcess>>,
}

#[derive(Debug)]
struct RenderProcess {
    child: Child,
    stream: UnixStream,
    /// Sources that the process has, by key.
    known: HashSet<String>,
}

impl Renderer {
    /// The text of a conversation; empty for `None`, if the template compiles.
    pub(super) fn ask(
        &self,
        key: &str,
        sources: &TemplateSources,
        render: Option<TemplateInput>,
    ) -> Result<String, TemplateFailure> {
        let mut slot = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let mut process = match slot.take() {
            Some(process) => process,
            None => self.start().map_err(|error| {
                TemplateFailure::Render(format!("the process that renders templates does not start: {error}"))
            })?,
        };
        let sources = (!process.known.contains(key)).then(|| sources.clone());
        let request = RenderRequest { key: key.to_owned(), sources, render };
        let deadline = Instant::now() + 2 * TIME;
        let answered = match send(&mut process.stream, &request, MAX_REQUEST_BYTES, deadline) {
            // Nothing was written, and another conversation may be shorter.
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                *slot = Some(process);
                return Err(TemplateFailure::Render(format!("the conversation is too long: {error}")));
            }
            sent => sent.and_then(|()| receive(&mut process.stream, MAX_TEXT_BYTES + 1024, deadline)),
        };
        match answered {
            Ok(answer) => {
                if !matches!(answer, Err(TemplateFailure::Compile(_))) {
                    process.known.insert(request.key);
                }
                *slot = Some(process);
                answer
            }
            Err(error) => Err(TemplateFailure::Render(process.last_words(&error))),
        }
    }

    fn start(&self) -> io::Result<RenderProcess> {
        let (stream, theirs) = UnixStream::pair()?;
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(RenderProcess { child, stream, known: HashSet::new() })
    }
}

impl RenderProcess {
    /// The reason for a missing answer. The process is killed.
    fn last_words(mut self, error: &io::Error) -> String {
        let slow = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let ended = if slow { None } else { self.child.wait().ok() };
        match ended {
            None => format!("it gave no text within {} s", TIME.as_secs()),
            Some(status) if status.code() == Some(TOO_LONG) => {
                format!("it gave no text within {} s", TIME.as_secs())
            }
            Some(status) if status.signal().is_some() => {
                format!("it needs more than {} MiB of memory, or nests too deeply", MEMORY >> 20)
            }
            Some(status) => format!("the process that renders it ended with {status}"),
        }
    }
}

impl Drop for RenderProcess {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Renders templates for the process at the other end of standard input until that closes it.
///
/// # Errors
/// If standard input is not the socket of [`render_apart`], or the limits cannot be set.
pub fn serve() -> io::Result<()> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    #[cfg(target_os = "linux")]
    limit_memory()?;
    #[cfg(not(target_os = "linux"))]
    watch_memory()?;
    render_all(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
}

/// Renders what is asked for on `stream` until it is closed.
fn render_all(mut stream: UnixStream) -> io::Result<()> {
    let (asks, asked) = sync_channel::<RenderRequest>(0);
    let (answers, answered) = sync_channel(0);
    let render = move || {
        let mut templates = std::collections::HashMap::new();
        while let Ok(RenderRequest { key, sources, render }) = asked.recv() {
            let answer = match sources {
                Some(sources) => Compiled::new(&sources).map(|compiled| {
                    templates.insert(key.clone(), compiled);
                }),
                None => Ok(()),
            };
            let answer = answer.and_then(|()| match (templates.get(&key), render) {
                (Some(template), Some(conversation)) => template.render(conversation),
                (Some(_), None) => Ok(String::new()),
                (None, _) => Err(TemplateFailure::Render("its sources were not sent".to_owned())),
            });
            if answers.send(answer).is_err() {
                break;
            }
        }
    };
    thread::Builder::new().stack_size(STACK_BYTES).spawn(render)?;
    loop {
        // No deadline: the parent sends requests whenever it needs a text.
        stream.set_read_timeout(None)?;
        let mut first = [0; 4];
        match stream.read_exact(&mut first) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
        let deadline = Instant::now() + TIME;
        let request = body(&mut stream, first, MAX_REQUEST_BYTES, deadline)?;
        asks.send(request).map_err(io::Error::other)?;
        let answer = match answered.recv_timeout(TIME) {
            Ok(Ok(text)) if text.len() > MAX_TEXT_BYTES => Err(TemplateFailure::Render(format!(
                "it gives more than {} MiB of text",
                MAX_TEXT_BYTES >> 20
            ))),
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => std::process::exit(TOO_LONG),
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("the renderer panicked")),
        };
        send(&mut stream, &answer, usize::MAX, Instant::now() + TIME)?;
    }
}

/// Ends this process when it takes [`MEMORY`] beyond what it has: a limit of its address space.
#[cfg(target_os = "linux")]
fn limit_memory() -> io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB"));
    let size = size.and_then(|kib| kib.parse::<u64>().ok());
    let taken = size.ok_or_else(|| io::Error::other("/proc/self/status has no VmSize"))? << 10;
    let most = Some(taken + STACK_BYTES as u64 + MEMORY);
    Ok(setrlimit(Resource::As, Rlimit { current: most, maximum: most })?)
}

/// The same for the resident memory, where the system refuses a limit of the address space, as macOS does.
#[cfg(any(test, not(target_os = "linux")))]
fn watch_memory() -> io::Result<()> {
    /// Between two looks. A process takes some MiB in a millisecond.
    const LOOK: Duration = Duration::from_millis(5);
    let most = crate::machine::peak_memory() + MEMORY;
    let watch = move || {
        while crate::machine::peak_memory() <= most {
            thread::sleep(LOOK);
        }
        // A signal, as of a system with limits: an exit would wait for the thread that renders.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    };
    thread::Builder::new().spawn(watch).map(drop)
}

fn send(
    stream: &mut UnixStream,
    message: &impl Serialize,
    limit: usize,
    deadline: Instant,
) -> io::Result<()> {
    let json = serde_json::to_vec(message)?;
    if json.len() > limit {
        let text = format!("{} bytes, and at most {limit} are sent", json.len());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    let length = u32::try_from(json.len()).map_err(io::Error::other)?;
    let frame = [&length.to_le_bytes()[..], &json].concat();
    let mut rest = frame.as_slice();
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(rest) {
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn receive<T: DeserializeOwned>(stream: &mut UnixStream, limit: usize, deadline: Instant) -> io::Result<T> {
    let mut first = [0; 4];
    fill(stream, &mut first, deadline)?;
    body(stream, first, limit, deadline)
}

fn body<T: DeserializeOwned>(
    stream: &mut UnixStream,
    length: [u8; 4],
    limit: usize,
    deadline: Instant,
) -> io::Result<T> {
    let length = u32::from_le_bytes(length) as usize;
    // Every byte of a text takes up to six in JSON.
    if length > limit.saturating_mul(6) {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("a frame of {length} bytes")));
    }
    let mut json = vec![0; length];
    fill(stream, &mut json, deadline)?;
    Ok(serde_json::from_slice(&json)?)
}

fn fill(stream: &mut UnixStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use trajectory::Message;

    use super::*;

    /// The process of the tests below: this binary with this test alone.
    #[test]
    #[ignore = "started by other tests, with a socket as standard input"]
    fn rendering_process() {
        serve().unwrap();
    }

    /// The same as on a system that refuses a limit of the address space.
    #[test]
    #[ignore = "started by other tests, with a socket as standard input"]
    fn watched_process() {
        watch_memory().unwrap();
        render_all(UnixStream::from(io::stdin().as_fd().try_clone_to_owned().unwrap())).unwrap();
    }

    fn renderer(process: &str) -> Renderer {
        let test = format!("chat::apart::tests::{process}");
        let arguments = ["--exact", &test, "--ignored"].map(OsString::from).into();
        Renderer { program: std::env::current_exe().unwrap(), arguments, process: Mutex::default() }
    }

    fn render(renderer: &Renderer, template: &str) -> Result<String, TemplateFailure> {
        let sources = TemplateSources { template: Some(template.to_owned()), config: None };
        let messages = vec![ChatMessage::from(&Message::new("user", "hi"))];
        let variables = Map::new();
        let conversation = TemplateInput { messages, tools: Vec::new(), open: true, variables };
        renderer.ask(&sources.key(), &sources, Some(conversation))
    }

    fn failure(renderer: &Renderer, template: &str) -> String {
        let Err(TemplateFailure::Render(reason)) = render(renderer, template) else {
            panic!("{template} is rendered")
        };
        reason
    }

    fn takes_too_much(renderer: &Renderer) {
        let doubling = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(28) %}{% set ns.s = ns.s ~ ns.s %}\
                        {% endfor %}{{ ns.s | length }}";
        let ended = failure(renderer, doubling);
        // On a machine that is very busy the time may be over first.
        assert!(ended.contains("256 MiB of memory") || ended.contains("within 10 s"), "{ended}");
    }

    #[test]
    fn templates_that_take_all_memory_or_time_are_ended_and_others_go_on() {
        let renderer = renderer("rendering_process");
        let plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
        assert_eq!(render(&renderer, plain), Ok("[user]hi".to_owned()));
        assert_eq!(render(&renderer, plain), Ok("[user]hi".to_owned()));
        takes_too_much(&renderer);
        let lists = "{% set ns = namespace(s=[1, 2]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}\
                     {% endfor %}{{ ns.s | list | length }}";
        failure(&renderer, lists);
        assert!(failure(&renderer, "{{ 'a' * 30000000 }}").contains("more than 16 MiB of text"));
        let range = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}\
                     {% endfor %}{% endfor %}";
        assert!(failure(&renderer, range).contains("no text within 10 s"));
        assert_eq!(render(&renderer, plain), Ok("[user]hi".to_owned()));
    }

    #[test]
    fn memory_is_limited_where_address_space_is_not() {
        let renderer = renderer("watched_process");
        takes_too_much(&renderer);
        assert_eq!(render(&renderer, "{{ 1 }}"), Ok("1".to_owned()));
    }

    #[test]
    fn errors_of_a_template_are_returned() {
        let renderer = renderer("rendering_process");
        let raised = render(&renderer, "{{ raise_exception('roles must alternate') }}");
        assert_eq!(raised, Err(TemplateFailure::Raised("roles must alternate".to_owned())));
        assert!(matches!(render(&renderer, "{% for %}"), Err(TemplateFailure::Compile(_))));
        let deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}";
        failure(&renderer, deep);
        let nested = format!("{}x{}", "{% if true %}".repeat(5000), "{% endif %}".repeat(5000));
        assert!(matches!(render(&renderer, &nested), Err(TemplateFailure::Compile(_))));
    }
}
