//! Configuration of a buffer: capacity, staleness bound, order of leases.

use serde::{Deserialize, Serialize};

use crate::BufferError;

/// Configuration of a buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BufferConfig {
    /// Groups per training step, at least 1.
    pub batch_groups: usize,
    /// Maximum number of versions between the oldest token of a group and the version that a step starts from; 0 is
    /// synchronous training.
    pub max_staleness: u64,
    /// What happens to groups that are too slow. Only [`Order::Fifo`] with `max_uses` 1 can wait for them.
    pub on_stale: OnStale,
    /// Which groups a lease takes first.
    pub order: Order,
    /// Number of times a group is leased before it is removed, each time for another step; at least 1.
    pub max_uses: u32,
    /// Whether the buffer drops a trajectory with the same task and the same tokens as a stored one.
    pub dedup: bool,
    /// Maximum number of bytes of encoded groups that are stored at a time.
    pub max_bytes: u64,
    /// A journal is compacted when three quarters of its peak size, and at least this number of bytes, are unused.
    pub compact_above: u64,
    /// Seed of the randomized orders.
    pub seed: u64,
}

impl BufferConfig {
    /// Maximum number of slots of a buffer.
    pub const MAX_SLOTS: usize = 1 << 24;

    /// First in, first out; waits for slow groups; up to 16 GiB.
    #[must_use]
    pub fn new(batch_groups: usize, max_staleness: u64) -> Self {
        Self {
            batch_groups,
            max_staleness,
            on_stale: OnStale::Wait,
            order: Order::Fifo,
            max_uses: 1,
            dedup: false,
            max_bytes: 16 << 30,
            compact_above: 64 << 20,
            seed: 0,
        }
    }

    /// Number of slots: groups admitted, claimed or finalized at a time.
    #[must_use]
    pub fn slots(&self) -> usize {
        let versions = usize::try_from(self.max_staleness).unwrap_or(usize::MAX).saturating_add(1);
        versions.saturating_mul(self.batch_groups)
    }

    /// Whether groups are replayed: leased out of order or more than once.
    #[must_use]
    pub fn replays(&self) -> bool {
        self.order != Order::Fifo || self.max_uses > 1
    }

    pub(crate) fn checked(self) -> Result<Self, BufferError> {
        let fits = self
            .max_staleness
            .checked_add(1)
            .and_then(|versions| usize::try_from(versions).ok()?.checked_mul(self.batch_groups))
            .is_some_and(|slots| (1..=Self::MAX_SLOTS).contains(&slots));
        if !fits {
            let Self { batch_groups, max_staleness, .. } = self;
            return Err(BufferError::Config { batch_groups, max_staleness, limit: Self::MAX_SLOTS });
        }
        if self.replays() && self.on_stale == OnStale::Wait {
            return Err(BufferError::ReplayWaits { order: self.order, max_uses: self.max_uses });
        }
        match self.order {
            Order::Reward { temperature } if !(temperature.is_finite() && temperature > 0.0) => {
                Err(BufferError::Unusable { key: "reward_temperature", value: temperature.to_string() })
            }
            _ if self.max_uses == 0 => Err(BufferError::Unusable { key: "max_uses", value: "0".to_owned() }),
            _ if self.max_bytes == 0 => {
                Err(BufferError::Unusable { key: "max_bytes", value: "0".to_owned() })
            }
            _ => Ok(self),
        }
    }
}

/// What happens to groups that are too slow for the staleness bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnStale {
    /// The trainer does not wait. Groups over the bound are dropped, counted and generated again.
    Drop,
    /// The trainer waits for slow groups early enough, so that none exceeds the bound. Only after a crash or a change
    /// of the configuration can groups exceed it; those are dropped and counted.
    #[default]
    Wait,
}

/// Order in which a lease takes groups. Within a lease, groups are always sorted by id.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Order {
    /// Earliest deadline first: the oldest version first, so that no group becomes stale.
    #[default]
    Fifo,
    /// The newest version first (TBA's recency sampling).
    Recency,
    /// Drawn without replacement with weights `exp(mean reward / temperature)` (TBA's reward-prioritised sampling);
    /// a group without rewards counts as 0.
    Reward {
        /// Above 0; a smaller value prefers high rewards more strongly.
        temperature: f64,
    },
    /// Drawn without replacement, uniformly.
    Uniform,
}

impl std::fmt::Display for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Fifo => "fifo",
            Self::Recency => "recency",
            Self::Reward { .. } => "reward",
            Self::Uniform => "uniform",
        })
    }
}
