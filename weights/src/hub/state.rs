//! What a hub knows: versions, seats and receipts, without locks and waits.
//!
//! Invariant: a seat's receipt is `checked` if and only if its digest is that of the published version.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use super::{After, Announced, LeftOut, Lost, MAX_LOST, MAX_SEATS, Newest};
use crate::delta::{Frame, full_bytes};
use crate::{Digest, Dtype, Lag, Receipt, WeightsError};

/// Digests that are kept even if no receipt can name them any more: a version can be published again.
const DIGESTS_KEPT: usize = 1024;
/// No run has so many steps: a receipt for a version beyond is of none.
const MAX_VERSION: PolicyVersion = PolicyVersion(1 << 53);

/// Who calls: a name, and which of those who went by it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Caller {
    pub(crate) name: String,
    pub(crate) connection: u64,
}

/// What is known of a version before it is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Nothing: it is newer than all.
    New,
    /// It was published with this digest.
    As(Digest),
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) newest: Option<Newest>,
    /// Whether the newest is digested and can be sent over the network.
    pub(super) settled: bool,
    /// Digests of published versions; `None` while one is computed.
    pub(super) digests: BTreeMap<PolicyVersion, Option<Digest>>,
    /// Deltas from one version to the next, without gaps, up to the newest.
    chain: VecDeque<Arc<Frame>>,
    pub(super) seats: BTreeMap<String, Seat>,
    pub(super) lost: Vec<Lost>,
    /// Who was left out and not yet asked for.
    pub(super) left_out: Vec<LeftOut>,
    /// The last connection of each name that was left out.
    refused: BTreeMap<String, u64>,
    pub(super) last_connection: u64,
    pub(super) bytes_sent: u64,
    pub(super) publisher_gone: bool,
    pub(super) failure: Option<WeightsError>,
    /// The last round that an owner of a shard could not send in, and why.
    pub(super) failed_round: Option<(u64, String)>,
}

/// A subscriber.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) connection: u64,
    /// It can die without telling.
    remote: bool,
    seen: Instant,
    /// It takes part in rounds.
    receives: bool,
    claim: Option<Claim>,
}

/// What a subscriber says that it serves.
#[derive(Clone, Copy, Debug)]
struct Claim {
    receipt: Receipt,
    /// The digest was compared with that of the published version.
    checked: bool,
    /// It heard of the version from this hub, not from one before a restart.
    of_this_life: bool,
}

impl Seat {
    pub(super) fn new(connection: u64, remote: bool) -> Self {
        Self { connection, remote, seen: Instant::now(), receives: false, claim: None }
    }

    fn receipt(&self) -> Option<Receipt> {
        self.claim.map(|claim| claim.receipt)
    }

    pub(super) fn is_remote(&self) -> bool {
        self.remote
    }
}

impl State {
    pub(super) fn check(&self) -> Result<(), WeightsError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Gives a seat to a name, whoever had it.
    pub(super) fn seat(&mut self, name: &str, seat: Seat) -> Result<(), WeightsError> {
        if self.seats.len() >= MAX_SEATS && !self.seats.contains_key(name) {
            return Err(WeightsError::TooMany { limit: MAX_SEATS });
        }
        self.seats.insert(name.to_owned(), seat);
        Ok(())
    }

    /// Notes that `caller` asked for what comes after `after`; whether that makes it one who takes part in rounds.
    pub(super) fn seated(&mut self, caller: &Caller, after: After) -> Result<bool, WeightsError> {
        self.known_caller(caller)?;
        let receives = matches!(after, After::Round(_));
        let seat = self.seats.get_mut(&caller.name);
        Ok(seat.is_some_and(|seat| std::mem::replace(&mut seat.receives, receives) != receives))
    }

    /// Notes that `caller` called, if no later one goes by its name. One that was given up, or that this hub does not know
    /// because it has just started, is seated again.
    pub(super) fn known_caller(&mut self, caller: &Caller) -> Result<(), WeightsError> {
        if self.refused.get(&caller.name).is_some_and(|refused| *refused >= caller.connection) {
            return Err(WeightsError::LeftOut { name: caller.name.clone() });
        }
        match self.seats.get_mut(&caller.name) {
            Some(seat) if seat.connection == caller.connection => {
                seat.seen = Instant::now();
                Ok(())
            }
            Some(seat) if seat.connection > caller.connection || !seat.remote => {
                Err(WeightsError::TakenOver { name: caller.name.clone() })
            }
            _ => self.seat(&caller.name, Seat::new(caller.connection, true)),
        }
    }

    /// Leaves out the subscriber `name` for what it said, if it is in another process; false if it is in this one.
    pub(super) fn leave_out(&mut self, name: &str, error: &WeightsError) -> bool {
        let Some(seat) = self.seats.get(name).filter(|seat| seat.remote) else { return false };
        if self.refused.len() >= MAX_SEATS {
            self.refused.pop_first();
        }
        self.refused.insert(name.to_owned(), seat.connection);
        self.seats.remove(name);
        if self.left_out.len() < MAX_LOST {
            self.left_out.push(LeftOut { subscriber: name.to_owned(), error: error.clone() });
        }
        true
    }

    /// Removes who was silent for longer than `hold`; when the next one will be.
    pub(super) fn give_up_silent(&mut self, hold: Duration) -> Option<Instant> {
        let now = Instant::now();
        let silent = |seat: &Seat| seat.remote && now.duration_since(seat.seen) > hold;
        for (name, seat) in self.seats.extract_if(.., |_, seat| silent(seat)) {
            if self.lost.len() == MAX_LOST {
                self.lost.remove(0);
            }
            let served = seat.receipt().map(|receipt| receipt.version);
            self.lost.push(Lost { subscriber: name, served, silent: now.duration_since(seat.seen) });
        }
        // A little later, so that the hold is over then.
        let over = |seat: &Seat| seat.seen + hold + Duration::from_millis(1);
        self.seats.values().filter(|seat| seat.remote).map(over).min()
    }

    pub(super) fn newest_version(&self) -> Option<PolicyVersion> {
        self.newest.as_ref().map(Newest::version)
    }

    /// Who takes part in rounds and was heard of since `since`, in the order of their names.
    pub(super) fn receivers(&self, since: Instant) -> Vec<Caller> {
        let there = self.seats.iter().filter(|(_, seat)| seat.receives && seat.seen >= since);
        there.map(|(name, seat)| Caller { name: name.clone(), connection: seat.connection }).collect()
    }

    /// Why `member` does not call any more, if so: it has left, another has its name, or it was silent since `since`.
    pub(super) fn gone(&self, member: &Caller, since: Instant) -> Option<String> {
        match self.seats.get(&member.name) {
            Some(seat) if seat.connection == member.connection && seat.seen >= since => None,
            Some(seat) if seat.connection == member.connection => Some(format!(
                "nothing was heard of {} for {:.1} s",
                member.name,
                seat.seen.elapsed().as_secs_f64()
            )),
            Some(_) => Some(format!("{} was started again", member.name)),
            None => Some(format!("{} has left", member.name)),
        }
    }

    pub(super) fn newer(&self, after: After) -> Result<Option<Announced>, WeightsError> {
        let newer = self.newest.as_ref().filter(|newest| match after {
            After::Version(version) => Some(newest.version()) > version,
            After::Round(number) => newest.direct().is_none_or(|direct| direct.round_number() > number),
        });
        if newer.is_none() && self.publisher_gone {
            return Err(WeightsError::PublisherGone { newest: self.newest_version() });
        }
        let announced = |newest: &Newest| Announced {
            newest: newest.clone(),
            digest: self.digests.get(&newest.version()).copied().flatten().filter(|_| self.settled),
        };
        Ok(newer.map(announced))
    }

    pub(super) fn known(&self, version: PolicyVersion) -> Result<Known, WeightsError> {
        let Some(newest) = self.newest_version().filter(|newest| version <= *newest) else {
            return Ok(Known::New);
        };
        match self.digests.get(&version) {
            Some(Some(digest)) => Ok(Known::As(*digest)),
            _ => Err(WeightsError::NotNewer { version, newest }),
        }
    }

    pub(super) fn announce(&mut self, newest: Newest) -> Option<Newest> {
        // What is announced again, because it goes another way, stays what it was.
        if self.newest_version() != Some(newest.version()) {
            self.digests.insert(newest.version(), None);
            self.settled = false;
        }
        self.newest.replace(newest)
    }

    pub(super) fn digested(&mut self, version: PolicyVersion, digest: Digest) -> Result<(), WeightsError> {
        self.digests.insert(version, Some(digest));
        let mut wrong = Vec::new();
        for (name, seat) in &mut self.seats {
            let claim =
                seat.claim.as_mut().filter(|claim| claim.receipt.version == version && !claim.checked);
            let Some(claim) = claim else { continue };
            let served = claim.receipt.digest;
            claim.checked = served == digest;
            if !claim.checked {
                wrong.push((name.clone(), differs(name, claim.of_this_life, version, served, digest)));
            }
        }
        self.forget_digests();
        for (name, error) in wrong {
            if !self.leave_out(&name, &error) {
                return Err(error);
            }
        }
        Ok(())
    }

    pub(super) fn settle(&mut self, delta: Option<Arc<Frame>>) {
        match delta {
            Some(delta) => self.chain.push_back(delta),
            None => self.chain.clear(),
        }
        self.settled = true;
    }

    pub(super) fn delta(&self, from: PolicyVersion, dtype: Dtype) -> Option<Arc<Frame>> {
        let first = self.chain.iter().position(|frame| frame.base() == from)?;
        let bytes: u64 = self.chain.iter().skip(first).map(|frame| frame.bytes().len() as u64).sum();
        let full = full_bytes(self.newest.as_ref()?.snapshot()?.values.len(), dtype);
        (self.settled && bytes < full).then(|| Arc::clone(&self.chain[first]))
    }

    pub(super) fn accept(
        &mut self,
        name: &str,
        receipt: Receipt,
        of_this_life: bool,
    ) -> Result<(), WeightsError> {
        let Receipt { version, digest: served, .. } = receipt;
        let before = self.seats.get(name).and_then(Seat::receipt);
        if let Some(from) = before.map(|before| before.version).filter(|before| version < *before) {
            return Err(WeightsError::WentBack { subscriber: name.to_owned(), from, version });
        }
        // No former life can have got so far either.
        let of_this_life = of_this_life || version > MAX_VERSION;
        let checked = match self.digests.get(&version) {
            Some(Some(published)) if *published != served => {
                return Err(differs(name, of_this_life, version, served, *published));
            }
            Some(published) => published.is_some(),
            None if of_this_life => {
                return Err(WeightsError::NeverPublished { subscriber: name.to_owned(), version });
            }
            // It is of a former life: older than all that is known here, or to be published again.
            None => false,
        };
        if let Some(seat) = self.seats.get_mut(name) {
            seat.claim = Some(Claim { receipt, checked, of_this_life });
        }
        self.forget_digests();
        Ok(())
    }

    pub(super) fn served(&self, name: &str) -> Option<PolicyVersion> {
        Some(self.seats.get(name)?.receipt()?.version)
    }

    pub(super) fn lags(&self) -> Vec<Lag> {
        let newest = self.newest_version().unwrap_or_default();
        let lag = |(name, seat): (&String, &Seat)| {
            let receipt = seat.receipt();
            let served = receipt.map_or(PolicyVersion(0), |receipt| receipt.version);
            Lag { subscriber: name.clone(), receipt, versions: served.staleness_at(newest) }
        };
        self.seats.iter().map(lag).collect()
    }

    /// Who does not yet serve `version`, for an error; empty if all do.
    pub(super) fn behind(&self, version: PolicyVersion) -> String {
        let newest = self.newest_version().unwrap_or_default();
        // What is ahead of everything published here cannot have been compared yet.
        let serves = |claim: &Claim| {
            claim.receipt.version >= version && (claim.checked || claim.receipt.version > newest)
        };
        let behind = self.seats.iter().filter(|(_, seat)| !seat.claim.as_ref().is_some_and(serves));
        let lines = behind.map(|(name, seat)| match seat.receipt() {
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
        let served = self.seats.values().map(|seat| seat.receipt().map_or(PolicyVersion(0), |r| r.version));
        let slowest = served.min().unwrap_or(newest).min(newest);
        let kept = self.digests.keys().rev().nth(DIGESTS_KEPT - 1).copied().unwrap_or_default();
        self.digests = self.digests.split_off(&slowest.min(kept));
    }
}

/// Two digests of one version that are not the same.
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
