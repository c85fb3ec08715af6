//! The side of a sampler as a separate process: this program again, which reports when it has received a version.
//!
//! Invariant: both processes read the same clock of the system, which is what makes their times comparable.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use device::device::DeviceLocation;
use device::{Device, bf16};
use rlrun::failure::Failure;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use weights::direct::ipc::IpcSubscriber;
use weights::http::remote::RemoteTransport;
use weights::http::{RemoteConfig, RemoteSubscriber, router};
use weights::{DeviceSubscriber, Digest, Hub, Receipt, Subscriber, WeightsError};

use super::SOON;

/// A process that receives.
#[derive(Debug)]
pub struct Receiver {
    child: Child,
    said: BufReader<ChildStdout>,
    /// Serves the hub for as long as this lives.
    _server: Runtime,
}

/// When a version was there.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ReceivedVersion {
    /// Which.
    pub version: u64,
    /// When, nanoseconds since 1970.
    pub at_ns: u64,
    /// Bytes moved for it.
    pub bytes: u64,
}

impl Receiver {
    /// Serves `hub` on loopback, and starts a process that subscribes to it and finds its weights in `shm`, with these
    /// arguments more.
    ///
    /// # Errors
    /// A system without a free port, a process that does not start.
    pub fn start(hub: Hub, shm: &Path, arguments: &[&str]) -> Result<Self, Failure> {
        let system = |source| Failure::System { what: "start a process that receives".to_owned(), source };
        let server = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let server = server.map_err(system)?;
        let listener = server.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).map_err(system)?;
        let url = format!("http://{}", listener.local_addr().map_err(system)?);
        // It ends with the runtime.
        server.spawn(async move { drop(axum::serve(listener, router(hub)).await) });
        let program = std::env::current_exe().map_err(system)?;
        let mut command = Command::new(program);
        command.args(["weights", "--receive-from", &url]).arg("--shm").arg(shm).args(arguments);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(system)?;
        let Some(stdout) = child.stdout.take() else {
            return Err(Failure::Internal("a child has no output".to_owned()));
        };
        Ok(Self { child, said: BufReader::new(stdout), _server: server })
    }

    /// Waits until the process reports `version`; it reports every version.
    ///
    /// # Errors
    /// A process that ended; its reason is on standard error.
    pub fn wait(&mut self, version: u64) -> Result<ReceivedVersion, Failure> {
        let mut line = String::new();
        let system =
            |source| Failure::System { what: "hear from a process that receives".to_owned(), source };
        self.said.read_line(&mut line).map_err(system)?;
        let received = serde_json::from_str(&line).ok().filter(|it: &ReceivedVersion| it.version == version);
        received.ok_or_else(|| {
            Failure::NotThere(format!(
                "the process that receives did not get version {version}; it said: {line:?}"
            ))
        })
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // A process that has already ended cannot be killed; that is no error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Receives every version from `url` until the publisher ends, and reports each on `out`.
///
/// # Errors
/// A server that does not answer, weights that are not what they should be.
pub fn receive(url: &str, over_http: bool, shm: &Path, out: &mut dyn Write) -> Result<(), Failure> {
    let transport = if over_http { RemoteTransport::Http } else { RemoteTransport::Shm };
    let threads = weights::PublishConfig::default().threads;
    let patience = Duration::from_secs(5);
    let shared = shm.to_owned();
    let config = RemoteConfig { transport, threads, patience, shared, ..RemoteConfig::new(url, "receiver") };
    let subscriber = RemoteSubscriber::connect(config)?;
    let mut after = None;
    loop {
        let new = match subscriber.wait_newer(after, SOON) {
            Ok(Some(new)) => new,
            Ok(None) | Err(WeightsError::PublisherGone { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let received = ReceivedVersion { version: new.version.0, at_ns: now_ns(), bytes: new.received.bytes };
        after = Some(new.version);
        let (version, digest, bytes) = (new.version, Digest::of(&new.values), received.bytes);
        subscriber.applied(Receipt {
            version,
            digest,
            took: new.received.took,
            stalled: Duration::ZERO,
            bytes,
            taken: 0,
        })?;
        subscriber.flush()?;
        // The report comes last, so that the next push begins when this process is idle.
        say(received, out)?;
    }
}

/// The same into memory of a device, where it is digested before it counts as received.
///
/// # Errors
/// A device that cannot be used, a server that does not answer, weights that are not what they should be.
pub fn receive_on_device(
    url: &str,
    place: DeviceLocation,
    shm: &Path,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let device = Device::open(place)?;
    let (patience, shared) = (Duration::from_secs(5), shm.to_owned());
    let config = RemoteConfig { patience, shared, ..RemoteConfig::new(url, "receiver") };
    let subscriber = IpcSubscriber::<bf16>::connect(config, &device)?;
    let mut after = None;
    loop {
        let new = match subscriber.wait_newer(after, SOON) {
            Ok(Some(new)) => new,
            Ok(None) | Err(WeightsError::PublisherGone { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let received = ReceivedVersion { version: new.version.0, at_ns: now_ns(), bytes: new.received.bytes };
        after = Some(new.version);
        subscriber.applied(new.receipt(Duration::ZERO))?;
        subscriber.flush()?;
        subscriber.give_back(new.values);
        say(received, out)?;
    }
}

fn say(received: ReceivedVersion, out: &mut dyn Write) -> Result<(), Failure> {
    let line = serde_json::to_string(&received).map_err(|error| Failure::Internal(error.to_string()))?;
    let system = |source| Failure::System { what: "say what was received".to_owned(), source };
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(system)
}

/// Nanoseconds since 1970.
#[must_use]
pub fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
