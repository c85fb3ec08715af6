//! A subscriber in another process than the trainer.
//!
//! Invariant: no call exceeds its deadline by much, whatever the trainer's process does. While that process is away,
//! calls return that there is nothing new, until the patience is over. Receipts are sent by the calls that ask for
//! versions, on another thread than decoding, so decoding never waits for the network.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use connect::ServerAddress;
use trajectory::PolicyVersion;

use super::client::{FetchError, HubClient};
use super::receiver::{AnnouncedVersion, WeightReceiver};
use super::upstream::{FrameSource, RelayConnections};
use super::wire::{
    Acknowledged, FallbackBody, NewestAnswer, NewestQuery, ReceiptAndPoll, ReceiptBody, RelayBody,
    SubscribeAnswer, SubscribeRequest, UnsubscribeQuery,
};
use crate::direct::PushNotice;
use crate::hub::{After, AssignedRelay};
use crate::{Hub, Receipt, RelayAddress, Snapshot, Subscriber, WeightsError};

/// Longest wait of one request. It bounds the delay of a receipt, and is a fraction of the hold, so a poll is also
/// the heartbeat.
const LONGEST_ASK: Duration = Duration::from_millis(500);
/// Deadline of a receipt.
const RECEIPT: Duration = Duration::from_secs(10);
/// Deadline of a message about relays.
const RELAYS: Duration = Duration::from_secs(5);
/// Deadline of unsubscribing.
const LEAVE: Duration = Duration::from_secs(1);
/// Deadline of subscribing, once connected.
const JOIN: Duration = Duration::from_secs(10);
/// First pause before an absent server is asked again; each following pause doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Pause after an announced slot was overwritten: the next version is announced at once.
const OVERTAKEN: Duration = Duration::from_millis(1);
/// Consecutive damaged pushes until the subscriber fails.
const MAX_DAMAGED: u32 = 3;
/// Maximum number of unread reports of refused pushes.
const MAX_REFUSED: usize = 64;
/// Number of versions whose hub incarnation is remembered.
const MAX_HEARD: usize = 8;

/// Transport of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoteTransport {
    /// Shared memory if the publisher's can be opened, HTTP otherwise.
    #[default]
    Any,
    /// Shared memory.
    Shm,
    /// HTTP.
    Http,
}

/// Address of a hub, and how to subscribe to it.
#[derive(Clone)]
pub struct RemoteConfig {
    /// Such as `http://127.0.0.1:8700`.
    pub url: String,
    /// Bearer token.
    pub token: Option<String>,
    /// PEM file with the TLS roots to trust instead of those of browsers.
    pub roots: Option<PathBuf>,
    /// Name in receipts and errors. A later subscriber of the same name replaces an earlier one.
    pub name: String,
    /// How long the server may be unreachable, for example during a restart.
    pub patience: Duration,
    /// Transport of the weights.
    pub transport: RemoteTransport,
    /// Threads that apply deltas and compute digests.
    pub threads: usize,
    /// Directory of the publishers of this host. No other file is opened, whatever a server names.
    pub shared: PathBuf,
}

/// A subscriber to a hub in another process. Dropping it unsubscribes.
#[derive(Debug)]
pub struct RemoteSubscriber {
    config: RemoteConfig,
    client: HubClient,
    connection: u64,
    longest_ask: Duration,
    receiver: Mutex<WeightReceiver>,
    /// The relay that it fetches from.
    relays: Mutex<RelayConnections>,
    /// Where it passes versions on, if it does.
    serves_at: Option<RelayAddress>,
    session: Mutex<SessionState>,
    /// Locked while a receipt is on its way, alone or with a poll, so receipts arrive in order.
    sending: Mutex<()>,
}

/// State between calls.
#[derive(Debug, Default)]
struct SessionState {
    /// Since when the server is unreachable, and why.
    away: Option<(Instant, String)>,
    pause: Duration,
    /// The hub incarnations that announced the last versions.
    heard: Vec<(PolicyVersion, u64)>,
    /// The newest version returned.
    top: Option<PolicyVersion>,
    /// The last receipt, with the hub incarnation that announced its version.
    served: Option<(Receipt, u64)>,
    /// Whether the hub may not have the last receipt.
    unsent: bool,
    damaged: u32,
    refused: Vec<WeightsError>,
}

/// A receipt that the hub may not have; no other one is sent while this exists.
struct UnsentReceipt<'a> {
    receipt: Receipt,
    /// Incarnation of the hub that announced its version.
    life: u64,
    _sending: MutexGuard<'a, ()>,
}

impl UnsentReceipt<'_> {
    fn body(&self, name: &str, connection: u64) -> ReceiptBody {
        let Receipt { version, digest, took, stalled, bytes, taken } = self.receipt;
        ReceiptBody {
            name: name.to_owned(),
            connection,
            life: self.life,
            version: version.0,
            digest: digest.to_string(),
            took_us: took.as_micros() as u64,
            stalled_us: stalled.as_micros() as u64,
            bytes,
            taken,
        }
    }
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
    /// Subscribes. Waits for the server up to the patience.
    ///
    /// # Errors
    /// Unusable URL or certificates, a server that refuses or does not answer.
    pub fn connect(config: RemoteConfig) -> Result<Self, WeightsError> {
        Self::connect_as(config, None)
    }

    /// Subscribes as a relay, whose hub gets every version that is received.
    pub(super) fn connect_as(
        config: RemoteConfig,
        relay: Option<(RelayAddress, Hub)>,
    ) -> Result<Self, WeightsError> {
        let (token, roots) = (config.token.as_deref(), config.roots.as_deref());
        let client = HubClient::new(ServerAddress { url: &config.url, token, roots }, &config.name)?;
        let (started, mut pause) = (Instant::now(), FIRST_PAUSE);
        let joined: SubscribeAnswer = loop {
            let reason =
                match client.post("subscribers", &SubscribeRequest { name: config.name.clone() }, JOIN) {
                    Ok(joined) => break joined,
                    Err(FetchError::Refused(error)) => return Err(error),
                    Err(FetchError::Unreachable(reason) | FetchError::Corrupt(reason)) => reason,
                    Err(FetchError::VersionGone | FetchError::NotYet) => {
                        "it answered another question".to_owned()
                    }
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
        let (serves_at, passes_on) = relay.unzip();
        let receiver = WeightReceiver::new(config.threads, config.shared.clone(), passes_on);
        let (receiver, relays, session) = (Mutex::new(receiver), Mutex::default(), Mutex::default());
        let (connection, sending) = (joined.connection, Mutex::new(()));
        let subscriber =
            Self { config, client, connection, longest_ask, receiver, relays, serves_at, session, sending };
        subscriber.offer_relay(false)?;
        Ok(subscriber)
    }

    /// Damaged pushes since the last call; each was fetched again in full.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn take_refused(&self) -> Result<Vec<WeightsError>, WeightsError> {
        Ok(std::mem::take(&mut self.session()?.refused))
    }

    /// Sends the last receipt now if the hub may not have it; polls send it otherwise.
    ///
    /// # Errors
    /// As [`Subscriber::applied`]. An unreachable server gets it later.
    pub fn flush(&self) -> Result<(), WeightsError> {
        self.send_receipt()
    }

    /// One poll, or a pause while the server is unreachable.
    fn ask(
        &self,
        after: After,
        deadline: Instant,
        shm: bool,
    ) -> Result<Option<AnnouncedVersion>, WeightsError> {
        let unsent = self.unsent()?;
        let wait = deadline.saturating_duration_since(Instant::now()).min(self.longest_ask);
        let (name, connection) = (self.config.name.clone(), self.connection);
        let (after, round) = match after {
            After::Version(version) => (version.map(|version| version.0), None),
            After::Round(number) => (None, Some(number)),
        };
        let ask = NewestQuery { name, connection, after, wait_ms: wait.as_millis() as u64, shm, round };
        let answer = match &unsent {
            Some(unsent) => {
                let both =
                    ReceiptAndPoll { receipt: unsent.body(&self.config.name, connection), newest: ask };
                self.client.post("newest", &both, wait + RECEIPT)
            }
            None => self.client.get("newest", &ask, wait),
        };
        let answer: NewestAnswer = match answer {
            Ok(answer) => answer,
            Err(error) => return self.record_failure(error, None, deadline).map(|()| None),
        };
        if let Some(unsent) = unsent {
            self.acknowledged(&unsent)?;
        }
        self.offer_relay(answer.relays)?;
        let mut session = self.session()?;
        session.away = None;
        session.pause = FIRST_PAUSE;
        let served = session.served.map(|(receipt, _)| receipt.version);
        // A restarted hub, or one where the hold expired, does not have the receipt.
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

    /// The announcement of a version on a device that is newer than `after`; `None` if none came within `wait`.
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

    /// Connection id of its registration.
    pub(crate) fn connection(&self) -> u64 {
        self.connection
    }

    /// Whether a path that the server names is a file of a publisher of this host.
    pub(crate) fn is_shared(&self, file: &Path) -> bool {
        crate::shm::is_of_publisher(file, &self.config.shared)
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }

    /// Gets the announced weights; `None` if the version was replaced or the server is unreachable.
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
                // It is a path of another host.
                Err(_) => *shm = false,
            }
        }
        if let Some(relay) = wanted.relay()
            && let Some(snapshot) = self.get_from_relay(&mut receiver, relay, wanted)?
        {
            return Ok(Some(snapshot));
        }
        match receiver.fetch(FrameSource::hub(&self.client), wanted) {
            Ok(snapshot) => {
                self.session()?.damaged = 0;
                Ok(Some(snapshot))
            }
            Err(error) => self.record_failure(error, Some(wanted), deadline).map(|()| None),
        }
    }

    /// Gets the announced weights from a relay; `None` if it fails, which the hub is notified of.
    fn get_from_relay(
        &self,
        receiver: &mut WeightReceiver,
        relay: &AssignedRelay,
        wanted: &AnnouncedVersion,
    ) -> Result<Option<Snapshot>, WeightsError> {
        let mut relays = self.relays.lock().map_err(|_| WeightsError::Poisoned)?;
        let client = relays.client(&relay.address, self.config.roots.as_deref(), &self.config.name)?;
        let source = FrameSource::relay(client, Instant::now() + relay.wait);
        let error = match receiver.fetch(source, wanted) {
            Ok(snapshot) => return Ok(Some(snapshot)),
            Err(error) => error,
        };
        let Some((reason, detail)) = source.failure(error) else { return Ok(None) };
        let report = FallbackBody {
            name: self.config.name.clone(),
            connection: self.connection,
            relay: relay.name.clone(),
            version: wanted.version().0,
            reason,
            detail,
        };
        // Without it the hub assigns the relay again.
        drop(self.client.post::<Acknowledged>("fallbacks", &report, RELAYS));
        Ok(None)
    }

    /// Registers this relay with a hub that does not know it, as after a restart.
    fn offer_relay(&self, is_known: bool) -> Result<(), WeightsError> {
        let Some(address) = self.serves_at.clone().filter(|_| !is_known) else { return Ok(()) };
        let offer = RelayBody { name: self.config.name.clone(), connection: self.connection, address };
        match self.client.post::<Acknowledged>("relays", &offer, RELAYS) {
            Err(FetchError::Refused(error)) => Err(error),
            // An unreachable hub gets it after the next poll.
            Ok(Acknowledged {}) | Err(_) => Ok(()),
        }
    }

    /// The last receipt, if the hub may not have it.
    fn unsent(&self) -> Result<Option<UnsentReceipt<'_>>, WeightsError> {
        let sending = self.sending.lock().map_err(|_| WeightsError::Poisoned)?;
        let session = self.session()?;
        let unsent = session.served.filter(|_| session.unsent);
        Ok(unsent.map(|(receipt, life)| UnsentReceipt { receipt, life, _sending: sending }))
    }

    /// The hub has the receipt.
    fn acknowledged(&self, sent: &UnsentReceipt<'_>) -> Result<(), WeightsError> {
        let mut session = self.session()?;
        // A receipt for a newer version may have come meanwhile.
        session.unsent = session.served.is_some_and(|(newest, _)| newest.version > sent.receipt.version);
        Ok(())
    }

    /// Sends the last receipt if the hub may not have it. An unreachable server gets it later.
    fn send_receipt(&self) -> Result<(), WeightsError> {
        let Some(unsent) = self.unsent()? else { return Ok(()) };
        let body = unsent.body(&self.config.name, self.connection);
        match self.client.post::<Acknowledged>("receipts", &body, RECEIPT) {
            Ok(Acknowledged {}) => self.acknowledged(&unsent),
            Err(FetchError::Refused(error)) => Err(error),
            Err(_) => Ok(()),
        }
    }

    /// Records a failed request; an error if the subscriber cannot continue.
    fn record_failure(
        &self,
        error: FetchError,
        wanted: Option<&AnnouncedVersion>,
        deadline: Instant,
    ) -> Result<(), WeightsError> {
        let mut session = self.session()?;
        match error {
            FetchError::Refused(error) => Err(error),
            FetchError::VersionGone | FetchError::NotYet => Ok(()),
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

    /// Records the receipt. The next poll sends it and reports its errors.
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
            // Otherwise the registration expires after the hold.
            drop(self.client.delete("subscribers", &leave, LEAVE));
        }
    }
}
