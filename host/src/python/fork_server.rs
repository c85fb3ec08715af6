//! The fork server: a process that has imported the user's code and forks workers in milliseconds.
//!
//! Invariant: no process outlives its [`ForkServer`]. When this process ends, however it does, the fork server sees its socket
//! close and kills every worker and all processes that they started. When the fork server dies, this process kills them; when
//! both are killed at once, the reaper does. A process that left its session and its parent is found by the tag in its
//! environment.

use std::collections::HashMap;
use std::io::{self, IoSlice, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as Socket;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::log::{OutputLog, OutputTail};
use super::protocol::{
    FrameError, FrameStream, LoadedCode, PythonWorkerConfig, ServerMessage, StartReport, frame, framed, parse,
};
use super::{MAX_TIMEOUT, PythonCode, StartError};
use crate::reaper::{PoolTag, Reaper, ReaperRegistration, TAG_VARIABLE};

/// Longest import, by the fork server or by a worker that is a new process.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(60);
/// Longest fork.
const FORK_DEADLINE: Duration = Duration::from_secs(20);
/// How long the fork server may clean up before this process kills everything.
const END_DEADLINE: Duration = Duration::from_secs(2);

/// The parts of the Python side before and after the adapter; all three run as one module.
const SOURCE: [&str; 2] = [include_str!("user_code.py"), include_str!("worker.py")];

/// Program of an interpreter: reads the module as a frame from its standard input, then its configuration.
pub(super) const BOOTSTRAP: &str = "\
import os, sys, types, json
if sys.version_info < (3, 9):
    sys.exit('Python 3.9 or newer is needed, this is ' + sys.version)
def read(size):
    data = b''
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            sys.exit('the start was cut off')
        data += part
    return data
def frame():
    return read(int.from_bytes(read(4), 'little')).decode()
source = frame()
module = types.ModuleType('rlrun_worker')
module.SOURCE = source
sys.modules['rlrun_worker'] = module
exec(compile(source, '<rlrun>', 'exec'), module.__dict__)
module.main(json.loads(frame()))
";

/// How a worker ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerExit {
    /// The signal that ended it.
    pub(super) signal: Option<i32>,
    /// Its exit status otherwise.
    pub(super) code: Option<i32>,
}

/// A worker that was just started.
#[derive(Debug)]
pub(super) struct ForkedWorker {
    pub(super) pid: i32,
    /// Sent once; closed without a value if the fork server ends first.
    pub(super) exit: oneshot::Receiver<WorkerExit>,
}

/// A worker that was just started, with its channels.
#[derive(Debug)]
pub(super) struct StartedWorker {
    pub(super) process: ForkedWorker,
    /// This end of its socket.
    pub(super) frames: FrameStream,
    /// Its last output.
    pub(super) tail: OutputTail,
}

/// Everything to start a fork server, and to restart it after it died.
#[derive(Debug)]
pub(super) struct ServerSetup {
    code: PythonCode,
    pub(super) log: Arc<OutputLog>,
    reaper: Arc<Reaper>,
    /// Set when the pool is dropped: a start that is under way is given up.
    pub(super) closed: AtomicBool,
}

impl ServerSetup {
    pub(super) fn runtime(&self) -> &Handle {
        &self.code.runtime
    }

    /// Longest call.
    pub(super) fn timeout(&self) -> Duration {
        self.code.timeout
    }
}

/// A process that has imported the user's code, and the socket that controls it.
#[derive(Debug)]
pub struct ForkServer {
    loaded: LoadedCode,
    setup: Arc<ServerSetup>,
    process: Arc<ServerProcess>,
    control: Arc<UnixStream>,
    /// The same socket, to be shut down without a runtime.
    shutdown: Socket,
    pending: Arc<Mutex<PendingReplies>>,
    /// Locked while a fork is requested: descriptors must arrive with their own frame.
    requests: tokio::sync::Mutex<()>,
    next: AtomicU64,
}

/// Channels for what the fork server will report.
#[derive(Debug, Default)]
struct PendingReplies {
    fork: Option<(u64, oneshot::Sender<Result<ForkedWorker, String>>)>,
    /// By process id. The reaper knows the process group of each: programs that user code started may have lost the tag.
    exits: HashMap<i32, (oneshot::Sender<WorkerExit>, Option<ReaperRegistration>)>,
    ended: bool,
}

#[derive(Debug)]
struct ServerProcess {
    child: Mutex<Child>,
    tag: PoolTag,
    /// Dropped when the process has ended, and all others with the tag.
    _registration: ReaperRegistration,
}

impl ForkServer {
    /// Starts the interpreter and waits until the code is imported. Blocks, and the thread must last until then: until the
    /// import is over, the process dies with the thread that started it.
    ///
    /// # Errors
    /// Why the code cannot be used, and what to do.
    pub fn start(mut code: PythonCode) -> Result<Self, StartError> {
        code.timeout = code.timeout.min(MAX_TIMEOUT);
        let log = OutputLog::open(&code.log)
            .map_err(|error| format!("cannot write {}: {error}", code.log.display()))?;
        let reaper = Arc::new(Reaper::start().map_err(|error| error.to_string())?);
        let setup = ServerSetup { code, log: Arc::new(log), reaper, closed: AtomicBool::new(false) };
        let server = Self::start_process(&Arc::new(setup))?;
        if let Some(why) = &server.loaded.spawn {
            let warning = format!("rlrun: workers are new processes, which start slowly: {why}\n");
            server.setup.log.append(warning.as_bytes());
        }
        Ok(server)
    }

    /// The code as its adapter found it.
    #[must_use]
    pub fn loaded(&self) -> &LoadedCode {
        &self.loaded
    }

    pub(super) fn setup(&self) -> &Arc<ServerSetup> {
        &self.setup
    }

    /// [`Self::start`] with a setup that is there.
    pub(super) fn start_process(setup: &Arc<ServerSetup>) -> Result<Self, String> {
        let failed = |error: io::Error| format!("its parent process cannot be started: {error}");
        let (ours, theirs) = Socket::pair().map_err(failed)?;
        let (output, input) = io::pipe().map_err(failed)?;
        let tag = PoolTag::new().map_err(failed)?;
        let registration = setup.reaper.register().map_err(failed)?;
        registration.add_tag(&tag).map_err(failed)?;
        let python = &setup.code.interpreter;
        let mut command = Command::new(python);
        command.args(["-c", BOOTSTRAP]).env_clear();
        command.envs(&setup.code.environment).env(TAG_VARIABLE, tag.as_str());
        command.stdin(OwnedFd::from(theirs)).stdout(input.try_clone().map_err(failed)?).stderr(input);
        let child = command.spawn().map_err(|error| {
            format!("`{python}` cannot be started: {error}; name an interpreter of Python 3.9 or newer in `python`")
        })?;
        // The command owns the other ends of the socket and the pipe.
        drop(command);
        let process = Arc::new(ServerProcess { child: Mutex::new(child), tag, _registration: registration });
        let tail = OutputTail::default();
        let followed = tail.follow(output, Arc::clone(&setup.log)).map_err(failed);
        let loaded = match followed.and_then(|()| load(&ours, setup)) {
            Ok(StartReport::Loaded(loaded)) => loaded,
            Ok(StartReport::Failed { reason }) => {
                process.end(Duration::ZERO);
                return Err(reason);
            }
            Err(reason) => {
                process.end(Duration::ZERO);
                return Err(format!("{reason}{}", tail.text()));
            }
        };
        let shutdown = ours.try_clone().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let _entered = setup.runtime().enter();
        let control = Arc::new(UnixStream::from_std(ours).map_err(failed)?);
        let pending = Arc::new(Mutex::new(PendingReplies::default()));
        let reaper = Arc::clone(&setup.reaper);
        let frames = FrameStream::new(Arc::clone(&control));
        let listening = listen(frames, reaper, Arc::clone(&pending), Arc::clone(&process));
        setup.runtime().spawn(listening);
        let (requests, next) = (tokio::sync::Mutex::new(()), AtomicU64::new(0));
        Ok(Self { loaded, setup: Arc::clone(setup), process, control, shutdown, pending, requests, next })
    }

    /// Whether it can still fork.
    pub(super) fn alive(&self) -> bool {
        !lock(&self.pending).ended
    }

    /// Process id.
    pub(super) fn pid(&self) -> u32 {
        lock(&self.process.child).id()
    }

    /// Starts a worker.
    ///
    /// # Errors
    /// Why it cannot be started.
    pub(super) async fn fork(&self) -> Result<StartedWorker, String> {
        let failed = |error: io::Error| format!("a worker cannot be started: {error}");
        let (ours, theirs) = Socket::pair().map_err(failed)?;
        let (output, input) = io::pipe().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let stream = Arc::new(UnixStream::from_std(ours).map_err(failed)?);
        let tail = OutputTail::default();
        tail.follow(output, Arc::clone(&self.setup.log)).map_err(failed)?;
        let ended = || "the parent process of the workers ended".to_owned();
        let _request = self.requests.lock().await;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        {
            let mut pending = lock(&self.pending);
            if pending.ended {
                return Err(ended());
            }
            pending.fork = Some((id, reply));
        }
        // `theirs` and `input` stay open until the answer: macOS may close descriptors that are only in flight.
        if self.request(id, &theirs, &input).await.is_err() {
            // It has ended, and the end of its socket has not been read yet.
            lock(&self.pending).ended = true;
            return Err(ended());
        }
        let forked = match tokio::time::timeout(FORK_DEADLINE, answer).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(ended()))?,
            Err(_) => {
                self.end();
                return Err(format!("the parent process did not fork within {} s", FORK_DEADLINE.as_secs()));
            }
        };
        Ok(StartedWorker { process: forked, frames: FrameStream::new(stream), tail })
    }

    /// Sends the two descriptors of a worker with the request to start it.
    async fn request(&self, id: u64, channel: &Socket, output: &PipeWriter) -> io::Result<()> {
        let message = framed(&serde_json::json!({ "id": id }));
        let fds: [BorrowedFd<'_>; 2] = [channel.as_fd(), output.as_fd()];
        let send = || {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
            let flags = SendFlags::empty();
            Ok(sendmsg(&self.control, &[IoSlice::new(&message)], &mut ancillary, flags)?)
        };
        // A few bytes on a socket with an empty buffer: they are sent whole or not at all.
        self.control.async_io(Interest::WRITABLE, send).await.map(drop)
    }

    /// Ends the fork server, the workers and all processes that they started, and waits for it. May be called again.
    pub(super) fn end(&self) {
        let _ = self.shutdown.shutdown(std::net::Shutdown::Both);
        lock(&self.pending).ended = true;
        self.process.end(END_DEADLINE);
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        self.end();
    }
}

impl ServerProcess {
    /// Waits for the fork server up to `patience`, then kills it, and every process with its tag.
    fn end(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut child = lock(&self.child);
        while !matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
            if Instant::now() >= deadline {
                // An error means that it has ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        end_tagged(&self.tag);
    }
}

/// Kills the process group of a worker.
pub(super) fn end_group(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        // It may have ended meanwhile.
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

/// Kills every process with the tag in its environment. Repeats until it finds none: processes fork while the list is read.
fn end_tagged(tag: &PoolTag) {
    let wanted = format!("{TAG_VARIABLE}={}", tag.as_str());
    for _ in 0..100 {
        let mut found = false;
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            // Empty for a zombie.
            let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            if environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
                && let Some(pid) = Pid::from_raw(pid)
            {
                found = true;
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
        if !found {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends the module and its configuration, and waits for the report on the import.
fn load(socket: &Socket, setup: &ServerSetup) -> Result<StartReport, String> {
    let deadline = Instant::now() + START_DEADLINE;
    let ended = |_| "its interpreter ended before the file was imported".to_owned();
    let code = &setup.code;
    let module = [SOURCE[0], code.adapter, SOURCE[1]].join("\n\n");
    let config = PythonWorkerConfig {
        adapter: &code.config,
        timeout_s: code.timeout.as_secs_f64(),
        memory_mb: code.memory_mb,
        bootstrap: BOOTSTRAP,
    };
    let mut socket = socket;
    socket.set_write_timeout(Some(START_DEADLINE)).map_err(ended)?;
    socket.write_all(&[frame(module.as_bytes()), framed(&config)].concat()).map_err(ended)?;
    // Short, to notice that the pool was dropped.
    socket.set_read_timeout(Some(Duration::from_millis(100))).map_err(ended)?;
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    loop {
        match socket.read(&mut part) {
            Ok(0) => return Err(ended(io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => bytes.extend_from_slice(&part[..read]),
            Err(error)
                if !matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) =>
            {
                return Err(ended(error));
            }
            Err(_) => {}
        }
        match parse(&bytes) {
            Ok(Some((report, _))) => return Ok(report),
            Ok(None) => {}
            Err(FrameError::Invalid(what)) => {
                return Err(format!("importing it wrote to the socket of its process: {what}"));
            }
            Err(FrameError::Closed) => return Err(ended(io::ErrorKind::UnexpectedEof.into())),
        }
        if setup.closed.load(Ordering::Relaxed) {
            return Err("the run ended".to_owned());
        }
        if Instant::now() >= deadline {
            let seconds = START_DEADLINE.as_secs();
            return Err(format!(
                "the file was not imported within {seconds} s; what takes long belongs into the first call"
            ));
        }
    }
}

/// Passes on the messages of the fork server until it ends; then kills the processes that it left.
async fn listen(
    mut control: FrameStream,
    reaper: Arc<Reaper>,
    pending: Arc<Mutex<PendingReplies>>,
    process: Arc<ServerProcess>,
) {
    while let Ok(message) = control.next::<ServerMessage>().await {
        let mut pending = lock(&pending);
        match message {
            ServerMessage::Forked { id, pid } => {
                let (sender, exit) = oneshot::channel();
                // If this fails, the tag still finds all processes that kept their environment.
                let registration = reaper.register().and_then(|it| it.add_process(pid).map(|()| it)).ok();
                pending.exits.insert(pid, (sender, registration));
                pending.answer(id, Ok(ForkedWorker { pid, exit }));
            }
            ServerMessage::Refused { id, reason } => pending.answer(id, Err(reason)),
            ServerMessage::Exited { pid, signal, code } => {
                if let Some((sender, _registration)) = pending.exits.remove(&pid) {
                    // The receiver of a worker that was given up is closed.
                    let _ = sender.send(WorkerExit { signal, code });
                }
            }
        }
    }
    {
        let mut pending = lock(&pending);
        pending.ended = true;
        pending.fork = None;
        if cfg!(not(target_os = "linux")) {
            // There the tag finds nothing: a process does not see the environment of others.
            pending.exits.keys().copied().for_each(end_group);
        }
        pending.exits.clear();
    }
    // The fork server may be cleaning up: it closes its socket only by ending.
    let _ = tokio::task::spawn_blocking(move || process.end(END_DEADLINE)).await;
}

impl PendingReplies {
    /// Answers the request `id`, if the caller still waits for it; otherwise the worker is killed.
    fn answer(&mut self, id: u64, result: Result<ForkedWorker, String>) {
        if let Some((_, reply)) = self.fork.take_if(|(pending, _)| *pending == id)
            && let Err(Ok(unwanted)) = reply.send(result)
        {
            end_group(unwanted.pid);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
