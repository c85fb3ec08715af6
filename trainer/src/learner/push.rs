//! How weights go from the ranks to where samplers read them: from the device of each, or into memory of the host.

use std::borrow::Cow;
use std::ops::Range;

use collective::HostCollective;
use serde::Serialize;
use serde::de::DeserializeOwned;
use trajectory::PolicyVersion;
use weights::direct::round::PushPlan;
use weights::{Digest, Hub, Publisher, ShardOwner, WeightsError, WritableSlot};

use super::Learner;
use crate::TrainerError;
use crate::lead::{RankCommand, decode, encode};
use crate::ranks::on_each;

impl Learner {
    /// Sends the weights to all samplers of `plan`: every rank sends its shard from its device. Returns the digests of the
    /// shards, or the error of a rank. `hub` is the hub of the samplers.
    ///
    /// # Errors
    /// If another rank does not take part.
    pub(crate) fn send(
        &self,
        plan: &PushPlan,
        hub: &Hub,
    ) -> Result<Result<Vec<Digest>, WeightsError>, TrainerError> {
        if self.send_command(|network| RankCommand::Send { network, plan: plan.to_bytes() })? {
            return self.send_own(plan, Some(hub));
        }
        let sent = on_each(self.ranks().collect(), |rank| Ok(rank.send(plan, Some(hub))))?;
        Ok(sent.into_iter().collect())
    }

    /// This process's part of [`Self::send`].
    pub(crate) fn send_own(
        &self,
        plan: &PushPlan,
        hub: Option<&Hub>,
    ) -> Result<Result<Vec<Digest>, WeightsError>, TrainerError> {
        let sent = self.first.send(plan, hub).map(|digest| *digest.as_bytes());
        let sent = of_all(&*self.first.collective()?, &sent.map_err(|error| error.to_string()))?;
        Ok(match sent {
            Ok(digests) => Ok(digests.into_iter().map(Digest::from_bytes).collect()),
            Err(reason) => Err(WeightsError::Device { what: "send weights", reason }),
        })
    }

    /// Ranks that are processes of this host write `version` into the memory that samplers read, each its own. Returns whether all did;
    /// if one cannot, this is not tried again.
    ///
    /// # Errors
    /// If another process does not take part; if the transport fails.
    pub(crate) fn write_shards(
        &self,
        publisher: &dyn Publisher,
        version: PolicyVersion,
    ) -> Result<bool, TrainerError> {
        let Some(followers) = self.remote().filter(|followers| followers.write_error().is_none()) else {
            return Ok(false);
        };
        let Some(place) = publisher.begin(version, self.first.layout().len())? else { return Ok(false) };
        let (network, borrowed) = (followers.network, Cow::Borrowed(&place));
        followers.send_command(&RankCommand::Write { network, version, place: borrowed })?;
        match self.write_own(version, &place)? {
            Ok(()) => Ok(true),
            Err(reason) => {
                followers.cannot_write(reason);
                Ok(false)
            }
        }
    }

    /// Why a rank could not write its shard of a version to the memory that samplers read, so that the first rank gathers all; `None`
    /// if each has written its own, or if samplers read no such memory.
    #[must_use]
    pub fn gather_reason(&self) -> Option<&str> {
        self.remote()?.write_error()
    }

    /// This process's part of [`Self::write_shards`]. Returns the error of the first rank that could not write.
    pub(crate) fn write_own(
        &self,
        version: PolicyVersion,
        place: &WritableSlot,
    ) -> Result<Result<(), String>, TrainerError> {
        let collective = &self.spread.as_ref().ok_or(TrainerError::RanksEnded)?.collective;
        let owned = self.owned()?;
        let written = ShardOwner::open(place, self.pool.threads()).and_then(|owner| {
            owned.into_iter().try_for_each(|(range, values)| owner.write(version, range.start, values))
        });
        Ok(of_all(&**collective, &written.map_err(|error| error.to_string()))?.map(drop))
    }

    /// Shards of the weights for [`Self::send`]: of equal length, in whole chunks of a digest.
    pub(crate) fn push_cuts(&self) -> Vec<Range<usize>> {
        const CHUNK: usize = 1024;
        let (len, world) = (self.first.layout().len(), self.config.world);
        let end = |rank: usize| if rank == world { len } else { len * rank / world / CHUNK * CHUNK };
        (0..world).map(|rank| end(rank)..end(rank + 1)).collect()
    }
}

/// What every process has from its part, in the order of the ranks, or the first error.
fn of_all<T: Serialize + DeserializeOwned>(
    collective: &dyn HostCollective,
    own: &Result<T, String>,
) -> Result<Result<Vec<T>, String>, TrainerError> {
    let all = collective.all_gather_bytes(encode(own)?)?;
    let mut parts = Vec::with_capacity(all.len());
    for (rank, bytes) in all.iter().enumerate() {
        match decode::<Result<T, String>>(bytes)? {
            Ok(part) => parts.push(part),
            Err(reason) => return Ok(Err(format!("rank {rank}: {reason}"))),
        }
    }
    Ok(Ok(parts))
}
