//! A sampler in another process than the trainer.
//!
//! Invariant: no call waits much longer than it was told, whatever the trainer's process does. While that is away, calls
//! say that there is nothing new, until the patience is over. Receipts are sent by whoever asks for versions, which a
//! sampler does beside its decoding, so that this never stands still for the network.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use trajectory::PolicyVersion;

use super::client::{FetchError, HubClient};
use super::receiver::{AnnouncedVersion, WeightReceiver};
use super::wire::{
    Acknowledged, NewestAnswer, NewestQuery, ReceiptBody, SubscribeAnswer, SubscribeRequest, UnsubscribeQuery,
};
use crate::direct::PushNotice;
use crate::hub::After;
use crate::{Receipt, Snapshot, Subscriber, WeightsError};

/// The longest wait of one request, which is how late a receipt can be sent; also a fraction of the hold, so that the
/// hub hears of us in time.
const LONGEST_ASK: Duration = Duration::from_millis(500);
/// How long sending a receipt may take.
const RECEIPT: Duration = Duration::from_secs(10);
/// How long leaving may take.
const LEAVE: Duration = Duration::from_secs(1);
/// How long joining may take, once connected.
const JOIN: Duration = Duration::from_secs(10);
/// The first pause before asking a server again that is not there; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A slot that was told of and is gone: the next is announced at once.
const OVERTAKEN: Duration = Duration::from_millis(1);
/// Pushes in a row that may come damaged.
const MAX_DAMAGED: u32 = 3;
/// Refusals that are kept for whoever asks.
const MAX_REFUSED: usize = 64;
/// Versions of which it is remembered who told of them.
const MAX_HEARD: usize = 8;

/// How weights get to a sampler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoteTransport {
    /// From shared memory if the publisher's can be opened here, over HTTP otherwise.
    #[default]
    Any,
    /// From shared memory.
    Shm,
    /// Over HTTP.
    Http,
}

/// Where a hub is served, and how to subscribe to it.
#[derive(Clone)]
pub struct RemoteConfig {
    /// Such as `http://127.0.0.1:8700`.
    pub url: String,
    /// What the server asks for.
    pub token: Option<String>,
    /// Certificates to trust instead of those that browsers trust, PEM.
    pub roots: Option<PathBuf>,
    /// Stands in receipts and errors. Whoever comes later with the same one takes its place.
    pub name: String,
    /// How long the server may be away, because it starts again or the network is down.
    pub patience: Duration,
    /// How weights get here.
    pub transport: RemoteTransport,
    /// Threads that apply changes and digest what came.
    pub threads: usize,
    /// Where publishers of this host have their directories. No other file is opened, whatever a server names.
    pub shared: PathBuf,
}

/// A subscriber to a hub in another process. Dropping it leaves.
#[derive(Debug)]
pub struct RemoteSubscriber {
    config: RemoteConfig,
    client: HubClient,
    connection: u64,
    longest_ask: Duration,
    receiver: Mutex<WeightReceiver>,
    session: Mutex<SessionState>,
    /// Held while a receipt is sent, so that they arrive in order.
    sending: Mutex<()>,
}

/// What is remembered from one call to the next.
#[derive(Debug, Default)]
struct SessionState {
    /// Since when the server is away, and why.
    away: Option<(Instant, String)>,
    pause: Duration,
    /// The lives of the hub that told of the last versions.
    heard: Vec<(PolicyVersion, u64)>,
    /// The newest that was handed out.
    top: Option<PolicyVersion>,
    /// The last receipt, with the life that told of its version.
    served: Option<(Receipt, u64)>,
    /// The hub may not know of it.
    unsent: bool,
    damaged: u32,
    refused: Vec<WeightsError>,
}

impl RemoteConfig {
    /// Two minutes of patience, any transport, one thread.
    #[must_use]
    pub fn new(url: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            token: None,
            roots: None,
            name: name.into(),
            patience: Duration::from_secs(120),
            transport: RemoteTransport::Any,
            threads: 1,
            shared: PathBuf::from("/dev/shm"),
        }
    }
}

impl fmt::Debug for RemoteConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteConfig")
            .field("url", &self.url)
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("roots", &self.roots)
            .field("name", &self.name)
            .field("patience", &self.patience)
            .field("transport", &self.transport)
            .field("threads", &self.threads)
            .field("shared", &self.shared)
            .finish()
    }
}

impl RemoteSubscriber {
    /// Takes a seat, waiting for the server for as long as the patience lasts.
    ///
    /// # Errors
    /// A URL or certificates that cannot be used, a server that refuses or does not come.
    pub fn connect(config: RemoteConfig) -> Result<Self, WeightsError> {
        let client =
            HubClient::new(&config.url, config.token.as_deref(), config.roots.as_deref(), &config.name)?;
        let (started, mut pause) = (Instant::now(), FIRST_PAUSE);
        let joined: SubscribeAnswer = loop {
            let reason =
                match client.post("subscribers", &SubscribeRequest { name: config.name.clone() }, JOIN) {
                    Ok(joined) => break joined,
                    Err(FetchError::Refused(error)) => return Err(error),
                    Err(FetchError::Unreachable(reason) | FetchError::Corrupt(reason)) => reason,
                    Err(FetchError::VersionGone) => "it answered another question".to_owned(),
                };
            let waited = started.elapsed();
            let Some(left) = config.patience.checked_sub(waited).filter(|left| !left.is_zero()) else {
                let (name, url) = (config.name.clone(), client.url().to_owned());
                return Err(WeightsError::Unreachable { name, url, waited, reason });
            };
            std::thread::sleep(pause.min(left));
            pause = (2 * pause).min(LONGEST_PAUSE);
        };
        let longest_ask = (Duration::from_millis(joined.hold_ms) / 3).min(LONGEST_ASK);
        let (receiver, session) =
            (Mutex::new(WeightReceiver::new(config.threads, config.shared.clone())), Mutex::default());
        let (connection, sending) = (joined.connection, Mutex::new(()));
        Ok(Self { config, client, connection, longest_ask, receiver, session, sending })
    }

    /// Pushes that came damaged and were refused since this was last asked; each was fetched again in full.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn take_refused(&self) -> Result<Vec<WeightsError>, WeightsError> {
        Ok(std::mem::take(&mut self.session()?.refused))
    }

    /// Sends the last receipt now if the hub may not know it; calls that ask for versions do so by themselves.
    ///
    /// # Errors
    /// As [`Subscriber::applied`]. A server that is away gets it later.
    pub fn flush(&self) -> Result<(), WeightsError> {
        self.send_receipt()
    }

    /// Asks once, or pauses while the server is away.
    fn ask(
        &self,
        after: After,
        deadline: Instant,
        shm: bool,
    ) -> Result<Option<AnnouncedVersion>, WeightsError> {
        self.send_receipt()?;
        let wait = deadline.saturating_duration_since(Instant::now()).min(self.longest_ask);
        let (name, connection) = (self.config.name.clone(), self.connection);
        let (after, round) = match after {
            After::Version(version) => (version.map(|version| version.0), None),
            After::Round(number) => (None, Some(number)),
        };
        let ask = NewestQuery { name, connection, after, wait_ms: wait.as_millis() as u64, shm, round };
        let answer: NewestAnswer = match self.client.get("newest", &ask, wait) {
            Ok(answer) => answer,
            Err(trouble) => return self.trouble(trouble, None, deadline).map(|()| None),
        };
        let mut session = self.session()?;
        session.away = None;
        session.pause = FIRST_PAUSE;
        let served = session.served.map(|(receipt, _)| receipt.version);
        // A hub that has started again, or gave us up, knows nothing of us.
        session.unsent |= served > answer.served.map(PolicyVersion);
        let top = session.top;
        let Some(news) = answer.news.filter(|news| Some(PolicyVersion(news.version)) >= top) else {
            return Ok(None);
        };
        let heard = (PolicyVersion(news.version), answer.life);
        if session.heard.last() != Some(&heard) {
            if session.heard.len() == MAX_HEARD {
                session.heard.remove(0);
            }
            session.heard.push(heard);
        }
        drop(session);
        match AnnouncedVersion::read(news) {
            Ok(wanted) => Ok(Some(wanted)),
            Err(reason) => Err(self.bad_answer(reason)),
        }
    }

    /// What there is on a device after `after`, as soon as there is something; `None` if nothing came within `wait`.
    pub(crate) fn wait_direct(
        &self,
        after: After,
        wait: Duration,
    ) -> Result<Option<PushNotice>, WeightsError> {
        let deadline = Instant::now() + wait;
        loop {
            if let Some(wanted) = self.ask(after, deadline, false)? {
                let (version, parameters) = (wanted.version(), wanted.parameters());
                let direct = wanted.direct().cloned().ok_or_else(|| WeightsError::OtherWay {
                    version,
                    transport: "a device",
                    what: "it is in memory of the host".to_owned(),
                })?;
                return Ok(Some(PushNotice { version, parameters, direct }));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
    }

    /// Which of those who went by its name it is.
    pub(crate) fn connection(&self) -> u64 {
        self.connection
    }

    /// Whether a file that the server names is one of a publisher of this host.
    pub(crate) fn is_shared(&self, file: &Path) -> bool {
        crate::shm::is_of_publisher(file, &self.config.shared)
    }

    /// As it was given.
    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }

    /// Gets the weights that were announced; `None` if the publisher has gone on or the server has gone away.
    fn get(
        &self,
        wanted: &AnnouncedVersion,
        shm: &mut bool,
        deadline: Instant,
    ) -> Result<Option<Snapshot>, WeightsError> {
        let mut receiver = self.receiver.lock().map_err(|_| WeightsError::Poisoned)?;
        if *shm {
            match receiver.shared(wanted) {
                Ok(Some(snapshot)) => return Ok(Some(snapshot)),
                Ok(None) => {
                    std::thread::sleep(OVERTAKEN);
                    return Ok(None);
                }
                Err(reason) if self.config.transport == RemoteTransport::Shm => {
                    return Err(self.bad_answer(reason));
                }
                // It is of another host.
                Err(_) => *shm = false,
            }
        }
        match receiver.fetch(&self.client, wanted) {
            Ok(snapshot) => {
                self.session()?.damaged = 0;
                Ok(Some(snapshot))
            }
            Err(trouble) => self.trouble(trouble, Some(wanted), deadline).map(|()| None),
        }
    }

    /// Sends the last receipt if the hub may not know it. A server that is away gets it later.
    fn send_receipt(&self) -> Result<(), WeightsError> {
        let _sending = self.sending.lock().map_err(|_| WeightsError::Poisoned)?;
        let session = self.session()?;
        let Some((receipt, life)) = session.served.filter(|_| session.unsent) else { return Ok(()) };
        drop(session);
        let applied = ReceiptBody {
            name: self.config.name.clone(),
            connection: self.connection,
            life,
            version: receipt.version.0,
            digest: receipt.digest.to_string(),
            took_us: receipt.took.as_micros() as u64,
            stalled_us: receipt.stalled.as_micros() as u64,
            bytes: receipt.bytes,
        };
        match self.client.post::<Acknowledged>("receipts", &applied, RECEIPT) {
            Ok(Acknowledged {}) => {
                let mut session = self.session()?;
                // One for a newer version may have come meanwhile.
                session.unsent = session.served.is_some_and(|(newest, _)| newest.version > receipt.version);
                Ok(())
            }
            Err(FetchError::Refused(error)) => Err(error),
            Err(_) => Ok(()),
        }
    }

    /// Notes what went wrong; an error if it cannot go on like this.
    fn trouble(
        &self,
        trouble: FetchError,
        wanted: Option<&AnnouncedVersion>,
        deadline: Instant,
    ) -> Result<(), WeightsError> {
        let mut session = self.session()?;
        match trouble {
            FetchError::Refused(error) => Err(error),
            FetchError::VersionGone => Ok(()),
            FetchError::Corrupt(what) => {
                let Some(wanted) = wanted else { return Err(self.bad_answer(what)) };
                let error =
                    WeightsError::Corrupt { version: wanted.version(), digest: wanted.digest(), what };
                if session.refused.len() < MAX_REFUSED {
                    session.refused.push(error.clone());
                }
                session.damaged += 1;
                if session.damaged < MAX_DAMAGED { Ok(()) } else { Err(error) }
            }
            FetchError::Unreachable(reason) => {
                let since = session.away.as_ref().map_or_else(Instant::now, |(since, _)| *since);
                let waited = since.elapsed();
                if waited > self.config.patience {
                    let (name, url) = (self.config.name.clone(), self.client.url().to_owned());
                    return Err(WeightsError::Unreachable { name, url, waited, reason });
                }
                session.away = Some((since, reason));
                let pause = session.pause.max(FIRST_PAUSE);
                session.pause = (2 * pause).min(LONGEST_PAUSE);
                drop(session);
                std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
                Ok(())
            }
        }
    }

    fn bad_answer(&self, detail: String) -> WeightsError {
        let (name, url, code) =
            (self.config.name.clone(), self.client.url().to_owned(), "bad_answer".to_owned());
        WeightsError::Refused { name, url, code, detail }
    }

    fn session(&self) -> Result<MutexGuard<'_, SessionState>, WeightsError> {
        self.session.lock().map_err(|_| WeightsError::Poisoned)
    }
}

impl Subscriber for RemoteSubscriber {
    fn newest(&self, after: Option<PolicyVersion>) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        self.wait_newer(after, Duration::ZERO)
    }

    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        let deadline = Instant::now() + wait;
        let mut shm = self.config.transport != RemoteTransport::Http;
        loop {
            let wanted = self.ask(After::Version(after), deadline, shm)?;
            if let Some(wanted) = &wanted
                && wanted.direct().is_some()
            {
                return Err(WeightsError::OnDevice { version: wanted.version() });
            }
            if let Some(wanted) = wanted
                && let Some(snapshot) = self.get(&wanted, &mut shm, deadline)?
            {
                let mut session = self.session()?;
                session.top = session.top.max(Some(snapshot.version));
                return Ok(Some(Arc::new(snapshot)));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
    }

    /// Only notes it. The next call that asks for versions sends it, and says what is wrong with it.
    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        let mut session = self.session()?;
        let life = session.heard.iter().rev().find(|(version, _)| *version == receipt.version);
        let life = life.map_or(0, |(_, life)| *life);
        session.served = Some((receipt, life));
        session.unsent = true;
        Ok(())
    }
}

impl Drop for RemoteSubscriber {
    fn drop(&mut self) {
        if self.session.lock().is_ok_and(|session| session.away.is_none()) {
            drop(self.send_receipt());
            let leave = UnsubscribeQuery { name: self.config.name.clone(), connection: self.connection };
            // A hub that does not hear it gives us up when the hold is over.
            drop(self.client.delete("subscribers", &leave, LEAVE));
        }
    }
}
