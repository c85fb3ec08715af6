//! State of a hub: versions, registrations and receipts, without locks and waits.
//!
//! Invariant: a registration's receipt is `checked` if and only if its digest is that of the published version.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use super::relays::{RelayAddress, RelayFallback};
use super::tree::RelayTree;
use super::{After, Announcement, MAX_REPORTED, MAX_SUBSCRIBERS, PublishedVersion, RejectedSubscriber};
use crate::delta::{DeltaFrame, full_bytes};
use crate::{Digest, Dtype, Lag, Receipt, Snapshot, WeightsError};

/// Number of digests that are stored although no receipt can name them: a version can be published again.
const DIGESTS_KEPT: usize = 1024;
/// Bound of versions: no run has more steps, so a receipt beyond it is impossible.
const MAX_VERSION: PolicyVersion = PolicyVersion(1 << 53);

/// Identity of a subscriber: its name and the connection id of its registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SubscriberId {
    pub(crate) name: String,
    pub(crate) connection: u64,
}

/// Publication status of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PublicationStatus {
    /// Not published: it is newer than all.
    New,
    /// Published with this digest.
    Published(Digest),
}

#[derive(Debug, Default)]
pub(super) struct HubState {
    pub(super) newest: Option<PublishedVersion>,
    /// Whether the newest is digested and can be sent over the network.
    pub(super) settled: bool,
    /// Digests of published versions; `None` while one is computed.
    pub(super) digests: BTreeMap<PolicyVersion, Option<Digest>>,
    /// Deltas from one version to the next, without gaps, up to the newest.
    pub(super) chain: VecDeque<Arc<DeltaFrame>>,
    pub(super) registrations: BTreeMap<String, Registration>,
    /// Rejected subscribers that were not reported yet.
    pub(super) rejected: Vec<RejectedSubscriber>,
    /// The connection id of each rejected name.
    refused: BTreeMap<String, u64>,
    pub(super) last_connection: u64,
    pub(super) bytes_sent: u64,
    pub(super) publisher_gone: bool,
    pub(super) failure: Option<WeightsError>,
    /// The last broadcast round that an owner of a shard could not send in, and the reason.
    pub(super) failed_round: Option<(u64, String)>,
    /// Who fetches from which relay; `None` after a change of the registrations.
    pub(super) tree: Option<RelayTree>,
    /// Number of versions that were taken from the hub because a relay failed.
    pub(super) fallbacks: u64,
    /// Those of them that were not reported yet.
    pub(super) reported_fallbacks: Vec<RelayFallback>,
}

/// Whether a hub has something that can be fetched.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Availability<T> {
    /// It has.
    Ready(T),
    /// It may have later.
    NotYet,
    /// It never will.
    Gone,
}

/// A registered subscriber.
#[derive(Debug)]
pub(super) struct Registration {
    pub(super) connection: u64,
    /// It is in another process, which can end without unsubscribing.
    remote: bool,
    seen: Instant,
    /// It takes part in broadcast rounds.
    receives: bool,
    /// The newest version that it was given.
    taken: Option<PolicyVersion>,
    claim: Option<AppliedVersion>,
    /// Where it passes versions on, if it does.
    pub(super) relay: Option<RelayAddress>,
    /// Its relay has failed: until then it fetches from the hub.
    pub(super) from_hub_until: Option<Instant>,
}

/// The last receipt of a subscriber.
#[derive(Clone, Copy, Debug)]
struct AppliedVersion {
    receipt: Receipt,
    /// The digest was compared with that of the published version.
    checked: bool,
    /// The subscriber got the version from this incarnation of the hub.
    of_this_life: bool,
}

impl Registration {
    pub(super) fn new(connection: u64, remote: bool) -> Self {
        Self {
            connection,
            remote,
            seen: Instant::now(),
            receives: false,
            taken: None,
            claim: None,
            relay: None,
            from_hub_until: None,
        }
    }

    fn receipt(&self) -> Option<Receipt> {
        self.claim.map(|claim| claim.receipt)
    }

    pub(super) fn is_remote(&self) -> bool {
        self.remote
    }
}

impl HubState {
    pub(super) fn check(&self) -> Result<(), WeightsError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Registers a subscriber; replaces one of the same name.
    pub(super) fn register(&mut self, name: &str, registration: Registration) -> Result<(), WeightsError> {
        if self.registrations.len() >= MAX_SUBSCRIBERS && !self.registrations.contains_key(name) {
            return Err(WeightsError::TooMany { limit: MAX_SUBSCRIBERS });
        }
        self.registrations.insert(name.to_owned(), registration);
        self.tree = None;
        Ok(())
    }

    /// Removes a registration.
    pub(super) fn unregister(&mut self, name: &str) {
        self.registrations.remove(name);
        self.tree = None;
    }

    /// Records that `caller` polled for what follows `after`; whether it has just joined or left the broadcast
    /// rounds.
    pub(super) fn record_poll(&mut self, caller: &SubscriberId, after: After) -> Result<bool, WeightsError> {
        self.record_call(caller)?;
        let receives = matches!(after, After::Round(_));
        let registration = self.registrations.get_mut(&caller.name);
        Ok(registration
            .is_some_and(|registration| std::mem::replace(&mut registration.receives, receives) != receives))
    }

    /// Records a call (heartbeat) of `caller`, unless a later connection has its name. A subscriber that expired, or
    /// that a restarted hub does not know, is registered again.
    pub(super) fn record_call(&mut self, caller: &SubscriberId) -> Result<(), WeightsError> {
        if self.refused.get(&caller.name).is_some_and(|refused| *refused >= caller.connection) {
            return Err(WeightsError::Rejected { name: caller.name.clone() });
        }
        match self.registrations.get_mut(&caller.name) {
            Some(registration) if registration.connection == caller.connection => {
                registration.seen = Instant::now();
                Ok(())
            }
            Some(registration) if registration.connection > caller.connection || !registration.remote => {
                Err(WeightsError::TakenOver { name: caller.name.clone() })
            }
            _ => self.register(&caller.name, Registration::new(caller.connection, true)),
        }
    }

    /// Rejects the subscriber `name` if it is in another process; false if it is in this one.
    pub(super) fn reject(&mut self, name: &str, error: &WeightsError) -> bool {
        let Some(registration) = self.registrations.get(name).filter(|registration| registration.remote)
        else {
            return false;
        };
        if self.refused.len() >= MAX_SUBSCRIBERS {
            self.refused.pop_first();
        }
        self.refused.insert(name.to_owned(), registration.connection);
        self.unregister(name);
        if self.rejected.len() < MAX_REPORTED {
            self.rejected.push(RejectedSubscriber { subscriber: name.to_owned(), error: error.clone() });
        }
        true
    }

    /// Removes subscribers that were silent for longer than `hold`; the time of the next expiry.
    pub(super) fn expire_silent(&mut self, hold: Duration) -> Option<Instant> {
        let now = Instant::now();
        let silent =
            |registration: &Registration| registration.remote && now.duration_since(registration.seen) > hold;
        if self.registrations.values().any(silent) {
            self.registrations.retain(|_, registration| !silent(registration));
            self.tree = None;
        }
        // One millisecond later, so that the hold is over then.
        let over = |registration: &Registration| registration.seen + hold + Duration::from_millis(1);
        self.registrations.values().filter(|registration| registration.remote).map(over).min()
    }

    pub(super) fn newest_version(&self) -> Option<PolicyVersion> {
        self.newest.as_ref().map(PublishedVersion::version)
    }

    /// Members of broadcast rounds that called since `since`, sorted by name.
    pub(super) fn receivers(&self, since: Instant) -> Vec<SubscriberId> {
        let there = self
            .registrations
            .iter()
            .filter(|(_, registration)| registration.receives && registration.seen >= since);
        there
            .map(|(name, registration)| SubscriberId {
                name: name.clone(),
                connection: registration.connection,
            })
            .collect()
    }

    /// Why `member` departed: it unsubscribed, was replaced, or was silent since `since`.
    pub(super) fn departed(&self, member: &SubscriberId, since: Instant) -> Option<String> {
        match self.registrations.get(&member.name) {
            Some(registration)
                if registration.connection == member.connection && registration.seen >= since =>
            {
                None
            }
            Some(registration) if registration.connection == member.connection => Some(format!(
                "nothing was heard of {} for {:.1} s",
                member.name,
                registration.seen.elapsed().as_secs_f64()
            )),
            Some(_) => Some(format!("{} was started again", member.name)),
            None => Some(format!("{} has left", member.name)),
        }
    }

    /// The newest version if it is newer than `after`; from then on `caller` has taken it.
    pub(super) fn take_newer(
        &mut self,
        caller: &SubscriberId,
        after: After,
    ) -> Result<Option<Announcement>, WeightsError> {
        let newer = self.newer(after)?;
        if let Some(newer) = &newer
            && let Some(registration) = self.registrations.get_mut(&caller.name)
        {
            registration.taken = Some(newer.newest.version());
        }
        Ok(newer)
    }

    /// Moves the weights of the newest version out if all registered subscribers have taken them.
    pub(super) fn drop_taken(&mut self) -> Option<PublishedVersion> {
        let PublishedVersion::Host(snapshot, _) = self.newest.as_ref()? else { return None };
        let (version, parameters) = (snapshot.version, snapshot.values.len());
        let all = self.registrations.values().all(|registration| registration.taken == Some(version));
        if self.registrations.is_empty() || !all {
            return None;
        }
        self.newest.replace(PublishedVersion::Taken(version, parameters))
    }

    fn newer(&self, after: After) -> Result<Option<Announcement>, WeightsError> {
        let there = self.newest.as_ref().filter(|newest| !matches!(newest, PublishedVersion::Taken(..)));
        let newer = there.filter(|newest| match after {
            After::Version(version) => Some(newest.version()) > version,
            After::Round(number) => newest.direct().is_none_or(|direct| direct.round_number() > number),
        });
        if newer.is_none() && self.publisher_gone {
            return Err(WeightsError::PublisherGone { newest: self.newest_version() });
        }
        let announced = |newest: &PublishedVersion| Announcement {
            newest: newest.clone(),
            digest: self.digests.get(&newest.version()).copied().flatten().filter(|_| self.settled),
            relay: None,
        };
        Ok(newer.map(announced))
    }

    pub(super) fn known(&self, version: PolicyVersion) -> Result<PublicationStatus, WeightsError> {
        let Some(newest) = self.newest_version().filter(|newest| version <= *newest) else {
            return Ok(PublicationStatus::New);
        };
        match self.digests.get(&version) {
            Some(Some(digest)) => Ok(PublicationStatus::Published(*digest)),
            _ => Err(WeightsError::NotNewer { version, newest }),
        }
    }

    pub(super) fn announce(&mut self, newest: PublishedVersion) -> Option<PublishedVersion> {
        // A version announced again, for another transport, keeps its digest.
        if self.newest_version() != Some(newest.version()) {
            self.digests.insert(newest.version(), None);
            self.settled = false;
        }
        self.newest.replace(newest)
    }

    pub(super) fn digested(&mut self, version: PolicyVersion, digest: Digest) -> Result<(), WeightsError> {
        self.digests.insert(version, Some(digest));
        let mut wrong = Vec::new();
        for (name, registration) in &mut self.registrations {
            let claim = registration
                .claim
                .as_mut()
                .filter(|claim| claim.receipt.version == version && !claim.checked);
            let Some(claim) = claim else { continue };
            let served = claim.receipt.digest;
            claim.checked = served == digest;
            if !claim.checked {
                wrong.push((name.clone(), differs(name, claim.of_this_life, version, served, digest)));
            }
        }
        self.forget_digests();
        for (name, error) in wrong {
            if !self.reject(&name, &error) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// The newest version can be sent: after `delta`, or in full alone. Deltas that are together no smaller than all weights
    /// are dropped, the oldest first.
    pub(super) fn settle(&mut self, delta: Option<Arc<DeltaFrame>>, dtype: Dtype) {
        match delta {
            Some(delta) => self.chain.push_back(delta),
            None => self.chain.clear(),
        }
        let full = self.newest.as_ref().map_or(0, |newest| full_bytes(newest.parameters(), dtype));
        let mut bytes: u64 = self.chain.iter().map(|frame| frame.bytes().len() as u64).sum();
        while bytes >= full
            && let Some(oldest) = self.chain.pop_front()
        {
            bytes -= oldest.bytes().len() as u64;
        }
        self.settled = true;
    }

    /// The delta from `from`.
    pub(super) fn delta(&self, from: PolicyVersion) -> Availability<Arc<DeltaFrame>> {
        if !self.settled || self.newest_version() <= Some(from) {
            return Availability::NotYet;
        }
        match self.chain.iter().find(|frame| frame.base() == from) {
            Some(delta) => Availability::Ready(Arc::clone(delta)),
            None => Availability::Gone,
        }
    }

    /// The version in full.
    pub(super) fn full(&self, version: PolicyVersion) -> Availability<Arc<Snapshot>> {
        let newest = self.newest_version();
        if newest > Some(version) {
            return Availability::Gone;
        }
        let snapshot = self.newest.as_ref().and_then(PublishedVersion::snapshot);
        match snapshot.filter(|_| newest == Some(version) && self.settled) {
            Some(snapshot) => Availability::Ready(Arc::clone(snapshot)),
            None => Availability::NotYet,
        }
    }

    pub(super) fn accept(
        &mut self,
        name: &str,
        receipt: Receipt,
        of_this_life: bool,
    ) -> Result<(), WeightsError> {
        let Receipt { version, digest: served, .. } = receipt;
        let before = self.registrations.get(name).and_then(Registration::receipt);
        if let Some(from) = before.map(|before| before.version).filter(|before| version < *before) {
            return Err(WeightsError::WentBack { subscriber: name.to_owned(), from, version });
        }
        // No earlier incarnation can have got so far either.
        let of_this_life = of_this_life || version > MAX_VERSION;
        let checked = match self.digests.get(&version) {
            Some(Some(published)) if *published != served => {
                return Err(differs(name, of_this_life, version, served, *published));
            }
            Some(published) => published.is_some(),
            None if of_this_life => {
                return Err(WeightsError::NeverPublished { subscriber: name.to_owned(), version });
            }
            // A version of an earlier incarnation: older than all known ones, or to be published again.
            None => false,
        };
        if let Some(registration) = self.registrations.get_mut(name) {
            registration.claim = Some(AppliedVersion { receipt, checked, of_this_life });
        }
        self.forget_digests();
        Ok(())
    }

    pub(super) fn served(&self, name: &str) -> Option<PolicyVersion> {
        Some(self.registrations.get(name)?.receipt()?.version)
    }

    pub(super) fn lags(&self) -> Vec<Lag> {
        let newest = self.newest_version().unwrap_or_default();
        let lag = |(name, registration): (&String, &Registration)| {
            let receipt = registration.receipt();
            let served = receipt.map_or(PolicyVersion(0), |receipt| receipt.version);
            Lag { subscriber: name.clone(), receipt, versions: served.staleness_at(newest) }
        };
        self.registrations.iter().map(lag).collect()
    }

    /// The subscribers that do not serve `version` yet, for an error; empty if all do.
    pub(super) fn behind(&self, version: PolicyVersion) -> String {
        let newest = self.newest_version().unwrap_or_default();
        // A receipt ahead of everything published here cannot have been compared yet.
        let serves = |claim: &AppliedVersion| {
            claim.receipt.version >= version && (claim.checked || claim.receipt.version > newest)
        };
        let behind = self
            .registrations
            .iter()
            .filter(|(_, registration)| !registration.claim.as_ref().is_some_and(serves));
        let lines = behind.map(|(name, registration)| match registration.receipt() {
            Some(receipt) => format!("{name} is at {}", receipt.version),
            None => format!("{name} has applied none"),
        });
        lines.collect::<Vec<_>>().join(", ")
    }

    fn forget_digests(&mut self) {
        if self.digests.len() <= DIGESTS_KEPT {
            return;
        }
        let newest = self.newest_version().unwrap_or_default();
        let served = self
            .registrations
            .values()
            .map(|registration| registration.receipt().map_or(PolicyVersion(0), |r| r.version));
        let slowest = served.min().unwrap_or(newest).min(newest);
        let kept = self.digests.keys().rev().nth(DIGESTS_KEPT - 1).copied().unwrap_or_default();
        self.digests = self.digests.split_off(&slowest.min(kept));
    }
}

/// The error for two different digests of one version.
fn differs(
    name: &str,
    of_this_life: bool,
    version: PolicyVersion,
    served: Digest,
    published: Digest,
) -> WeightsError {
    if of_this_life {
        WeightsError::Mismatch { subscriber: name.to_owned(), version, served, published }
    } else {
        WeightsError::Republished { version, before: served, now: published, who: name.to_owned() }
    }
}
