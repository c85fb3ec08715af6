//! A sampler's connection to the hub, in its process or another. Invariant: both variants behave alike.

use std::time::{Duration, Instant};

use trajectory::PolicyVersion;

use super::PushNotice;
use crate::http::{RemoteConfig, RemoteSubscriber};
use crate::hub::{After, SubscriberId};
use crate::{Hub, Receipt, WeightsError};

/// Longest wait of one poll, which is also the heartbeat.
const LONGEST_ASK: Duration = Duration::from_millis(500);

/// A registration at a hub. Dropping it unregisters.
#[derive(Debug)]
pub(super) enum HubConnection {
    Here { hub: Hub, caller: SubscriberId },
    There(Box<RemoteSubscriber>),
}

impl HubConnection {
    /// Registers at a hub of this process; the name must be free.
    pub(super) fn here(hub: &Hub, name: &str) -> Result<Self, WeightsError> {
        Ok(Self::Here { hub: hub.clone(), caller: hub.connect(name.to_owned(), false)? })
    }

    /// Registers at a hub of another process.
    pub(super) fn there(config: RemoteConfig) -> Result<Self, WeightsError> {
        Ok(Self::There(Box::new(RemoteSubscriber::connect(config)?)))
    }

    pub(super) fn name(&self) -> &str {
        match self {
            Self::Here { caller, .. } => &caller.name,
            Self::There(remote) => remote.name(),
        }
    }

    /// Whether a path that the hub names may be opened; paths of another process are checked.
    pub(super) fn is_shared(&self, file: &std::path::Path) -> bool {
        match self {
            Self::Here { .. } => true,
            Self::There(remote) => remote.is_shared(file),
        }
    }

    /// Whether it is the registration of `member`.
    pub(super) fn is(&self, member: &SubscriberId) -> bool {
        match self {
            Self::Here { caller, .. } => caller == member,
            Self::There(remote) => (remote.name(), remote.connection()) == (&member.name, member.connection),
        }
    }

    /// The next push notice after `after`; `None` if none came before the deadline.
    pub(super) fn next_notice(
        &self,
        after: After,
        deadline: Instant,
    ) -> Result<Option<PushNotice>, WeightsError> {
        let left = || deadline.saturating_duration_since(Instant::now());
        match self {
            Self::There(remote) => remote.wait_direct(after, left()),
            Self::Here { hub, caller } => {
                let announced = loop {
                    match hub.wait_newer(caller, after, left().min(LONGEST_ASK))? {
                        Some(announced) => break announced,
                        None if left().is_zero() => return Ok(None),
                        None => {}
                    }
                };
                let (version, parameters) = (announced.newest.version(), announced.newest.parameters());
                let direct = announced.newest.direct().cloned().ok_or_else(|| not_on_a_device(version))?;
                Ok(Some(PushNotice { version, parameters, direct }))
            }
        }
    }

    pub(super) fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        match self {
            Self::Here { hub, caller } => hub.accept(caller, hub.life(), receipt),
            Self::There(remote) => crate::Subscriber::applied(&**remote, receipt),
        }
    }

    /// Sends the last receipt now; polls send it otherwise.
    pub(super) fn flush(&self) -> Result<(), WeightsError> {
        match self {
            Self::Here { .. } => Ok(()),
            Self::There(remote) => remote.flush(),
        }
    }
}

impl Drop for HubConnection {
    fn drop(&mut self) {
        if let Self::Here { hub, caller } = self {
            hub.leave(caller);
        }
    }
}

/// The error for weights in host memory.
pub(super) fn not_on_a_device(version: PolicyVersion) -> WeightsError {
    let what = "it is in memory of the host".to_owned();
    WeightsError::OtherWay { version, transport: "a device", what }
}

/// Pause after an announced version was replaced: the next is announced at once.
pub(super) const OVERTAKEN: Duration = Duration::from_millis(1);
