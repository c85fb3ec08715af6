//! A broadcast round: its members, its groups, and the shards that are sent.
//!
//! Invariant: the number of a round increases with every attempt, and the epoch with every change of the members.
//! Members of one epoch keep their groups.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use device::{DeviceGroup, DeviceGroupId, Storage};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use super::{WeightsLocation, dtype};
use crate::hub::SubscriberId;
use crate::{Digest, WeightsError};

/// One attempt to send a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BroadcastRound {
    pub(super) number: u64,
    pub(super) epoch: u64,
    /// Ids of the groups as hexadecimal digits. Each owner has one, and is its member 0.
    pub(super) ids: Vec<String>,
    /// Start and end of every owner's shard.
    pub(super) cuts: Vec<(usize, usize)>,
    /// The samplers, members 1 and up of every group. A restarted sampler is another member.
    pub(super) members: Vec<SubscriberId>,
    /// Weights per broadcast.
    pub(super) bucket: usize,
    pub(super) deadline_ms: u64,
}

/// The plan that every shard owner gets, over the channel of the trainer's ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushPlan {
    pub(super) version: u64,
    pub(super) dtype: String,
    pub(super) round: BroadcastRound,
}

impl BroadcastRound {
    pub(super) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// Members of each group: an owner, and all samplers.
    pub(super) fn world(&self) -> usize {
        self.members.len() + 1
    }

    pub(super) fn id(&self, owner: usize) -> Result<DeviceGroupId, String> {
        let id = self.ids.get(owner).ok_or_else(|| format!("there is no owner {owner}"))?;
        Ok(DeviceGroupId::from_bytes(&from_hex(id)?))
    }

    /// The buckets of an owner's shard, in order.
    pub(super) fn buckets(&self, owner: usize) -> impl Iterator<Item = Range<usize>> {
        let (start, end) = self.cuts.get(owner).copied().unwrap_or_default();
        let bucket = self.bucket.max(1);
        (start..end).step_by(bucket).map(move |from| from..(from + bucket).min(end))
    }

    /// Checks that the shards cover `parameters` weights consecutively, with a group each.
    pub(super) fn check(&self, parameters: usize) -> Result<(), String> {
        let mut end = 0;
        for cut in &self.cuts {
            if cut.0 != end || cut.1 < cut.0 {
                return Err(format!("the shards {:?} do not follow each other", self.cuts));
            }
            end = cut.1;
        }
        if end != parameters {
            return Err(format!("the shards {:?} do not make up {parameters} weights", self.cuts));
        }
        if self.ids.len() != self.cuts.len() && !self.members.is_empty() {
            return Err(format!("there are {} groups for {} shards", self.ids.len(), self.cuts.len()));
        }
        Ok(())
    }
}

impl PushPlan {
    /// The version that is sent.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        PolicyVersion(self.version)
    }

    /// Names of the samplers, in order.
    #[must_use]
    pub fn members(&self) -> Vec<&str> {
        self.round.members.iter().map(|member| &member.name[..]).collect()
    }

    /// Encodes it for the other owners.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes it.
    ///
    /// # Errors
    /// Bytes that are no plan.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, WeightsError> {
        let what = "read what is to be sent";
        serde_json::from_slice(bytes)
            .map_err(|error| WeightsError::Device { what, reason: error.to_string() })
    }

    /// The shard of an owner; empty for an unknown owner.
    #[must_use]
    pub fn cut(&self, owner: usize) -> Range<usize> {
        self.round.cuts.get(owner).map_or(0..0, |(start, end)| *start..*end)
    }

    /// Number of weights.
    pub(super) fn parameters(&self) -> usize {
        self.round.cuts.last().map_or(0, |cut| cut.1)
    }

    pub(super) fn direct<T: Storage>(&self) -> WeightsLocation {
        WeightsLocation { round: Some(self.round.clone()), ..WeightsLocation::within::<T>() }
    }

    pub(super) fn is_of<T: Storage>(&self) -> bool {
        self.dtype == dtype::<T>().as_str()
    }
}

/// Groups of one epoch.
#[derive(Debug)]
pub(super) struct EpochGroups {
    pub(super) epoch: u64,
    pub(super) groups: Vec<DeviceGroup>,
}

impl EpochGroups {
    /// Leaves the groups at once, also during a broadcast.
    pub(super) fn abort(self) {
        self.groups.iter().for_each(DeviceGroup::abort);
    }
}

/// The combined digest of shards: that of a single shard, or BLAKE3 over those of several.
pub(super) fn combined(shards: &[Digest]) -> Digest {
    if let [one] = shards {
        return *one;
    }
    let mut hasher = blake3::Hasher::new();
    for shard in shards {
        hasher.update(shard.as_bytes());
    }
    Digest::from_bytes(*hasher.finalize().as_bytes())
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    struct Hex<'a>(&'a [u8]);
    impl fmt::Display for Hex<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
        }
    }
    Hex(bytes).to_string()
}

fn from_hex(text: &str) -> Result<Vec<u8>, String> {
    let digit = |digit: u8| (digit as char).to_digit(16).map(|value| value as u8);
    let byte = |pair: &[u8]| Some(digit(pair[0])? << 4 | digit(pair[1])?);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> = pairs.iter().map(|pair| byte(pair)).collect();
    bytes.filter(|_| rest.is_empty()).ok_or_else(|| format!("{text:?} is no identifier of a group"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(cuts: &[(usize, usize)], bucket: usize) -> BroadcastRound {
        let member = SubscriberId { name: "sampler".to_owned(), connection: 1 };
        let (ids, members) = (vec![String::new(); cuts.len()], vec![member]);
        BroadcastRound { number: 1, epoch: 1, ids, cuts: cuts.to_vec(), members, bucket, deadline_ms: 1 }
    }

    #[test]
    fn buckets_make_up_the_shards() {
        let round = round(&[(0, 7), (7, 7), (7, 10)], 2);
        let buckets = |owner| round.buckets(owner).collect::<Vec<_>>();
        assert_eq!(buckets(0), [0..2, 2..4, 4..6, 6..7]);
        assert_eq!(buckets(1), []);
        assert_eq!(buckets(2), [7..9, 9..10]);
        assert_eq!(buckets(3), []);
    }

    #[test]
    fn shards_that_do_not_make_up_the_weights_are_refused() {
        assert_eq!(round(&[(0, 4), (4, 4), (4, 9)], 1).check(9), Ok(()));
        for (cuts, len) in [(&[(0, 4), (5, 9)][..], 9), (&[(0, 4)], 9), (&[(0, 4), (4, 3)], 3), (&[], 1)] {
            assert!(round(cuts, 1).check(len).is_err(), "{cuts:?}");
        }
    }

    #[test]
    fn bytes_are_read_as_they_are_written() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&hex(&bytes)), Ok(bytes));
        assert!(from_hex("0").is_err() && from_hex("0g").is_err() && from_hex("\u{e4}").is_err());
    }
}
