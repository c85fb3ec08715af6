//! Relays: subscribers that pass versions on, as the hub assigns them, and what subscribers report about them.
//!
//! Invariant: a subscriber gets the digest of a version from the hub alone, whichever relay sends the bytes. Reports of
//! subscribers change only where they fetch themselves, so no subscriber can take a relay from the others.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use super::state::HubState;
use super::tree::RelayTree;
use super::{Hub, HubConfig, MAX_REPORTED, PublishedVersion, SubscriberId};
use crate::delta::{DeltaFrame, full_bytes};
use crate::{Snapshot, WeightsError};

/// The slowest relay that is waited for, bytes per second; 32 Mbit/s.
const SLOWEST_RELAY: u64 = 4 << 20;
/// Longest time that a subscriber waits for its relay.
pub(crate) const MAX_RELAY_WAIT: Duration = Duration::from_secs(600);
/// Longest URL and token of a relay, bytes.
const MAX_ADDRESS: usize = 512;
/// Longest text of a report, characters.
const MAX_DETAIL: usize = 400;

/// Where a relay serves versions.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayAddress {
    /// Such as `http://10.0.0.7:8701`.
    pub url: String,
    /// The bearer token that it asks for.
    pub token: String,
}

impl fmt::Debug for RelayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayAddress").field("url", &self.url).finish_non_exhaustive()
    }
}

/// The relay that a subscriber is to fetch a version from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AssignedRelay {
    /// Its name.
    pub(crate) name: String,
    pub(crate) address: RelayAddress,
    /// How long to wait for the whole version before the hub is asked.
    pub(crate) wait: Duration,
}

/// Why a subscriber took a version from the hub instead of its relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FallbackReason {
    /// It did not answer, or the connection broke.
    Unreachable,
    /// It did not send the version in time.
    Slow,
    /// It sent something else than the version.
    Damaged,
    /// It refused the request.
    Refused,
}

impl fmt::Display for FallbackReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unreachable => "it could not be reached",
            Self::Slow => "it was too slow",
            Self::Damaged => "it sent damaged weights, which were not applied",
            Self::Refused => "it refused the request",
        })
    }
}

/// A subscriber that took a version from the hub because its relay failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayFallback {
    /// Its name.
    pub subscriber: String,
    /// The relay.
    pub relay: String,
    /// The version.
    pub version: PolicyVersion,
    /// The reason.
    pub reason: FallbackReason,
    /// The evidence.
    pub detail: String,
}

/// How versions have been distributed so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// Bytes of weights that the hub itself has sent over the network.
    pub bytes_sent: u64,
    /// Number of relays now.
    pub relays: usize,
    /// How often a subscriber took a version from the hub because its relay failed.
    pub fallbacks: u64,
}

impl Hub {
    /// How versions have been distributed so far.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn distribution(&self) -> Result<Distribution, WeightsError> {
        let state = self.state()?;
        let relays = state.registrations.values().filter(|registration| registration.relay.is_some()).count();
        Ok(Distribution { bytes_sent: state.bytes_sent, relays, fallbacks: state.fallbacks })
    }

    /// Relays that failed a subscriber since the last call, at most a few hundred.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn take_fallbacks(&self) -> Result<Vec<RelayFallback>, WeightsError> {
        Ok(std::mem::take(&mut self.state()?.reported_fallbacks))
    }

    /// Registers `caller` as a relay.
    pub(crate) fn register_relay(
        &self,
        caller: &SubscriberId,
        address: RelayAddress,
    ) -> Result<(), WeightsError> {
        let RelayAddress { url, token } = &address;
        let http = url.starts_with("http://") || url.starts_with("https://");
        let plain = |text: &str| text.len() <= MAX_ADDRESS && text.chars().all(|c| c.is_ascii_graphic());
        if !http || !plain(url) || !plain(token) {
            let url = url.chars().take(MAX_ADDRESS).collect();
            return Err(WeightsError::BadRelay { name: caller.name.clone(), url });
        }
        let mut state = self.healthy()?;
        state.record_call(caller)?;
        if let Some(registration) = state.registrations.get_mut(&caller.name) {
            registration.relay = Some(address);
        }
        state.tree = None;
        Ok(())
    }

    /// Whether `caller` is registered as a relay.
    pub(crate) fn is_relay(&self, caller: &SubscriberId) -> Result<bool, WeightsError> {
        let state = self.state()?;
        Ok(state.registrations.get(&caller.name).is_some_and(|registration| registration.relay.is_some()))
    }

    /// Records that `caller` takes a version from the hub because its relay failed. It fetches from the hub for a while.
    pub(crate) fn fall_back(&self, caller: &SubscriberId, report: RelayFallback) -> Result<(), WeightsError> {
        let until = Instant::now() + self.hold();
        let mut state = self.healthy()?;
        state.record_call(caller)?;
        if let Some(registration) = state.registrations.get_mut(&caller.name) {
            registration.from_hub_until = Some(until);
        }
        state.fallbacks += 1;
        if state.reported_fallbacks.len() < MAX_REPORTED {
            let detail = report.detail.chars().take(MAX_DETAIL).collect();
            state.reported_fallbacks.push(RelayFallback { detail, ..report });
        }
        Ok(())
    }

    /// Makes a received version the newest of this hub, that of a relay. `frames` are the deltas that led to it, none if it came
    /// in full.
    pub(crate) fn relay(
        &self,
        snapshot: &Arc<Snapshot>,
        frames: Vec<DeltaFrame>,
    ) -> Result<(), WeightsError> {
        let mut state = self.healthy()?;
        let before = state.announce(PublishedVersion::Host(Arc::clone(snapshot), None));
        state.digested(snapshot.version, snapshot.digest())?;
        let base = before.as_ref().map(PublishedVersion::version);
        if frames.first().is_none_or(|first| Some(first.base()) != base) {
            state.settle(None, self.dtype());
        }
        frames.into_iter().for_each(|frame| state.settle(Some(Arc::new(frame)), self.dtype()));
        drop(state);
        // Memory is freed without the lock.
        drop(before);
        self.wake();
        Ok(())
    }
}

impl HubState {
    /// The relay that the subscriber `name` is to fetch the newest version from; `None`: from the hub.
    pub(super) fn assigned_relay(&mut self, name: &str, config: &HubConfig) -> Option<AssignedRelay> {
        if self.tree.is_none() {
            self.tree = Some(self.arrange(config.fanout));
        }
        let place = self.tree.as_ref()?.place(name)?;
        let registration = self.registrations.get(name)?;
        if registration.from_hub_until.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let address = self.registrations.get(&place.relay)?.relay.clone()?;
        let bytes = match self.chain.back() {
            Some(delta) => delta.bytes().len() as u64,
            None => full_bytes(self.newest.as_ref()?.parameters(), config.dtype),
        };
        let transfer = Duration::from_secs_f64(bytes as f64 / SLOWEST_RELAY as f64);
        let wait = (config.relay_wait + transfer) * place.level;
        Some(AssignedRelay { name: place.relay.clone(), address, wait: wait.min(MAX_RELAY_WAIT) })
    }

    fn arrange(&self, fanout: usize) -> RelayTree {
        let remote = self.registrations.iter().filter(|(_, registration)| registration.is_remote());
        let (mut relays, leaves): (Vec<_>, Vec<_>) =
            remote.partition(|(_, registration)| registration.relay.is_some());
        relays.sort_by_key(|(_, registration)| registration.connection);
        let relays: Vec<&str> = relays.iter().map(|(name, _)| name.as_str()).collect();
        let leaves: Vec<&str> = leaves.iter().map(|(name, _)| name.as_str()).collect();
        RelayTree::new(&relays, &leaves, fanout)
    }
}
