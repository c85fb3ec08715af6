//! The warm parent process of a reward: it has imported the file of the user, and forks workers in milliseconds.
//!
//! Invariant: no process outlives its [`Zygote`]. When this side ends, for whatever reason, the parent sees its socket
//! close and ends every worker and all that they started; when the parent dies, this side does; when both are killed at
//! once, the reaper does. Whatever left its session and its parent is found by the mark in its environment.

use std::collections::{BTreeMap, HashMap};
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

use super::log::{Log, Tail};
use super::protocol::{Broken, Config, Frames, Greeting, Hello, Notice, frame, framed, parse};
use crate::reaper::{MARK, Mark, Reaper, Ticket};

/// How long the parent may import, and a worker that is a new process.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(60);
/// How long the parent may take to fork.
const FORK_DEADLINE: Duration = Duration::from_secs(20);
/// How long the parent may clean up before everything is ended from here.
const END_DEADLINE: Duration = Duration::from_secs(2);

/// Both halves of the Python side, run as one module.
const SOURCE: &str = concat!(
    include_str!("../../../rewards/src/python/dialects.py"),
    "\n\n",
    include_str!("../../../rewards/src/python/worker.py")
);

/// Program of an interpreter: reads the module as a frame from its standard input, then the configuration.
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
pub(super) struct Exit {
    /// The signal that ended it.
    pub(super) signal: Option<i32>,
    /// Its exit status otherwise.
    pub(super) code: Option<i32>,
}

/// A worker that was just started.
#[derive(Debug)]
pub(super) struct Forked {
    pub(super) pid: i32,
    /// Told once; closed without a word if the parent ends first.
    pub(super) exit: oneshot::Receiver<Exit>,
}

/// How to start a parent.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) python: String,
    pub(super) config: Config,
    pub(super) environment: BTreeMap<String, String>,
    pub(super) log: Arc<Log>,
    pub(super) runtime: Handle,
    pub(super) reaper: Arc<Reaper>,
    /// Set when nobody waits for a start any more.
    pub(super) closed: AtomicBool,
}

/// The parent process and the socket that controls it.
#[derive(Debug)]
pub(super) struct Zygote {
    pub(super) hello: Hello,
    process: Arc<Process>,
    control: Arc<UnixStream>,
    /// Same socket, to be shut down without a runtime.
    plug: Socket,
    links: Arc<Mutex<Links>>,
    /// Held while a request is under way: descriptors must arrive with their own frame.
    turn: tokio::sync::Mutex<()>,
    next: AtomicU64,
    log: Arc<Log>,
}

/// Who waits for what the parent will say.
#[derive(Debug, Default)]
struct Links {
    pending: Option<(u64, oneshot::Sender<Result<Forked, String>>)>,
    /// The group of each is known to the reaper: what a function started may have another environment.
    exits: HashMap<i32, (oneshot::Sender<Exit>, Option<Ticket>)>,
    ended: bool,
}

#[derive(Debug)]
struct Process {
    child: Mutex<Child>,
    mark: Mark,
    /// Until it is gone, with all that has the mark.
    _ticket: Ticket,
}

impl Zygote {
    /// Starts the interpreter and waits until the file is imported. Blocks, and the thread must last until then: the
    /// parent dies with it as long as it cannot see its socket close.
    ///
    /// # Errors
    /// What keeps the file from being used, and what to do.
    pub(super) fn start(setup: &Setup) -> Result<Self, String> {
        let failed = |error: io::Error| format!("its parent process cannot be started: {error}");
        let (ours, theirs) = Socket::pair().map_err(failed)?;
        let (output, input) = io::pipe().map_err(failed)?;
        let (mark, ticket) = (Mark::new().map_err(failed)?, setup.reaper.ticket().map_err(failed)?);
        ticket.add_mark(&mark).map_err(failed)?;
        let mut command = Command::new(&setup.python);
        command.args(["-c", BOOTSTRAP]).env_clear().envs(&setup.environment).env(MARK, mark.as_str());
        command.stdin(OwnedFd::from(theirs)).stdout(input.try_clone().map_err(failed)?).stderr(input);
        let child = command.spawn().map_err(|error| {
            let python = &setup.python;
            format!("`{python}` cannot be started: {error}; name an interpreter of Python 3.9 or newer in `python`")
        })?;
        // The command holds the other ends of the socket and the pipe.
        drop(command);
        let process = Arc::new(Process { child: Mutex::new(child), mark, _ticket: ticket });
        let tail = Tail::default();
        let followed = tail.follow(output, Arc::clone(&setup.log)).map_err(failed);
        let hello = match followed.and_then(|()| greet(&ours, setup)) {
            Ok(Greeting::Hello(hello)) => hello,
            Ok(Greeting::Failed { reason }) => {
                process.end(Duration::ZERO);
                return Err(reason);
            }
            Err(reason) => {
                process.end(Duration::ZERO);
                return Err(format!("{reason}{}", tail.told()));
            }
        };
        let plug = ours.try_clone().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let _entered = setup.runtime.enter();
        let control = Arc::new(UnixStream::from_std(ours).map_err(failed)?);
        let links = Arc::new(Mutex::new(Links::default()));
        let reaper = Arc::clone(&setup.reaper);
        let frames = Frames::new(Arc::clone(&control));
        let listening = listen(frames, reaper, Arc::clone(&links), Arc::clone(&process));
        setup.runtime.spawn(listening);
        let (turn, next) = (tokio::sync::Mutex::new(()), AtomicU64::new(0));
        Ok(Self { hello, process, control, plug, links, turn, next, log: Arc::clone(&setup.log) })
    }

    /// Whether it can still fork.
    pub(super) fn alive(&self) -> bool {
        !lock(&self.links).ended
    }

    /// Process id, for tests and for people.
    pub(super) fn pid(&self) -> u32 {
        lock(&self.process.child).id()
    }

    /// Starts a worker: its process, our end of its socket, and its last output.
    ///
    /// # Errors
    /// What keeps it from being started.
    pub(super) async fn fork(&self) -> Result<(Forked, Frames, Tail), String> {
        let failed = |error: io::Error| format!("a worker cannot be started: {error}");
        let (ours, theirs) = Socket::pair().map_err(failed)?;
        let (output, input) = io::pipe().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let stream = Arc::new(UnixStream::from_std(ours).map_err(failed)?);
        let tail = Tail::default();
        tail.follow(output, Arc::clone(&self.log)).map_err(failed)?;
        let ended = || "the parent process of the workers ended".to_owned();
        let _turn = self.turn.lock().await;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        {
            let mut links = lock(&self.links);
            if links.ended {
                return Err(ended());
            }
            links.pending = Some((id, reply));
        }
        if self.request(id, theirs, input).await.is_err() {
            // It is gone, and the end of its socket has not been read yet.
            lock(&self.links).ended = true;
            return Err(ended());
        }
        let forked = match tokio::time::timeout(FORK_DEADLINE, answer).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(ended()))?,
            Err(_) => {
                self.end();
                return Err(format!("the parent process did not fork within {} s", FORK_DEADLINE.as_secs()));
            }
        };
        Ok((forked, Frames::new(stream), tail))
    }

    /// Sends the two descriptors of a worker with the request to start it.
    async fn request(&self, id: u64, channel: Socket, output: PipeWriter) -> io::Result<()> {
        let message = framed(&serde_json::json!({ "id": id }));
        let fds: [BorrowedFd<'_>; 2] = [channel.as_fd(), output.as_fd()];
        let send = || {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
            let flags = SendFlags::empty();
            Ok(sendmsg(&self.control, &[IoSlice::new(&message)], &mut ancillary, flags)?)
        };
        // A few bytes that nothing is in line before: they go out whole or not at all.
        self.control.async_io(Interest::WRITABLE, send).await.map(drop)
    }

    /// Ends the parent, the workers and all that they started, and waits for it. May be called again.
    pub(super) fn end(&self) {
        let _ = self.plug.shutdown(std::net::Shutdown::Both);
        lock(&self.links).ended = true;
        self.process.end(END_DEADLINE);
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        self.end();
    }
}

impl Process {
    /// Waits for the parent up to `patience`, then ends it, and whatever bears its mark.
    fn end(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut child = lock(&self.child);
        while !matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
            if Instant::now() >= deadline {
                // An error says that it has ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        end_marked(&self.mark);
    }
}

/// Ends the process group of a worker.
pub(super) fn end_group(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        // It may have ended by itself.
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

/// Ends every process with the mark in its environment; more may have been forked while the list was read.
fn end_marked(mark: &Mark) {
    let wanted = format!("{MARK}={}", mark.as_str());
    for _ in 0..100 {
        let mut found = false;
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            // Empty for a process that has ended and not been waited for.
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

/// Sends the module and the configuration and waits for the greeting.
fn greet(socket: &Socket, setup: &Setup) -> Result<Greeting, String> {
    let deadline = Instant::now() + START_DEADLINE;
    let ended = |_| "its interpreter ended before the file was imported".to_owned();
    let mut socket = socket;
    socket.set_write_timeout(Some(START_DEADLINE)).map_err(ended)?;
    socket.write_all(&[frame(SOURCE.as_bytes()), framed(&setup.config)].concat()).map_err(ended)?;
    // Short, to see that nobody waits any more.
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
            Ok(Some((greeting, _))) => return Ok(greeting),
            Ok(None) => {}
            Err(Broken::Garbage(what)) => return Err(format!("importing it wrote to our socket: {what}")),
            Err(Broken::Ended) => return Err(ended(io::ErrorKind::UnexpectedEof.into())),
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

/// Hands on what the parent says, until it is gone; then ends what it left.
async fn listen(mut control: Frames, reaper: Arc<Reaper>, links: Arc<Mutex<Links>>, process: Arc<Process>) {
    while let Ok(notice) = control.next::<Notice>().await {
        let mut links = lock(&links);
        match notice {
            Notice::Forked { id, pid } => {
                let (tell, exit) = oneshot::channel();
                // Without it the mark still finds all that kept its environment.
                let ticket = reaper.ticket().and_then(|ticket| ticket.add(pid).map(|()| ticket)).ok();
                links.exits.insert(pid, (tell, ticket));
                answer(&mut links, id, Ok(Forked { pid, exit }));
            }
            Notice::Refused { id, reason } => answer(&mut links, id, Err(reason)),
            Notice::Exited { pid, signal, code } => {
                if let Some((tell, _ticket)) = links.exits.remove(&pid) {
                    // Nobody listens to the end of a worker that was given up.
                    let _ = tell.send(Exit { signal, code });
                }
            }
        }
    }
    {
        let mut links = lock(&links);
        links.ended = true;
        links.pending = None;
        links.exits.clear();
    }
    // The parent may be cleaning up: it closes its socket only by ending.
    let _ = tokio::task::spawn_blocking(move || process.end(END_DEADLINE)).await;
}

fn answer(links: &mut Links, id: u64, result: Result<Forked, String>) {
    if let Some((_, reply)) = links.pending.take_if(|(pending, _)| *pending == id)
        && let Err(Ok(unwanted)) = reply.send(result)
    {
        end_group(unwanted.pid);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
