//! How much may be in the buffer, how old it may be, and what is handed out first.

use serde::{Deserialize, Serialize};

use crate::BufferError;

/// How much may be in the buffer, how old it may be, and what is handed out first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BufferConfig {
    /// Groups per training step, at least 1.
    pub batch_groups: usize,
    /// How many versions the oldest token of a group may be behind the version that a step starts from; 0 is
    /// synchronous training.
    pub max_staleness: u64,
    /// What becomes of groups that are too slow. Only [`Order::Fifo`] with `max_uses` 1 can wait for them.
    pub on_stale: OnStale,
    /// Which groups a lease takes first.
    pub order: Order,
    /// How often a group is handed out before it is forgotten, each time for another step; at least 1.
    pub max_uses: u32,
    /// Whether a trajectory is left out if the buffer holds one of the same task with the same tokens.
    pub dedup: bool,
    /// Most bytes of groups, as encoded, that are kept at the same time.
    pub max_bytes: u64,
    /// Bytes of groups from which on a journal gives disk space back: when three quarters of the largest number of bytes
    /// it held, and at least so much, are no longer needed.
    pub compact_above: u64,
    /// Seed of the orders that draw.
    pub seed: u64,
}

impl BufferConfig {
    /// Most slots that a buffer can have.
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

    /// Groups that can be outstanding.
    #[must_use]
    pub fn slots(&self) -> usize {
        let versions = usize::try_from(self.max_staleness).unwrap_or(usize::MAX).saturating_add(1);
        versions.saturating_mul(self.batch_groups)
    }

    /// Whether groups are replayed: drawn out of order or handed out more than once.
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

/// What becomes of groups that are too slow for the bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnStale {
    /// The trainer does not wait for them: over the bound they are dropped, counted and generated afresh.
    Drop,
    /// The trainer waits for them in time, so that none is ever over the bound. Only after a crash or a change of the
    /// configuration can there be groups that no waiting saves; those are dropped and counted.
    #[default]
    Wait,
}

/// Which groups a lease takes first. Within a lease groups are always ordered by id.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Order {
    /// The oldest version first, so that none has to be thrown away.
    #[default]
    Fifo,
    /// The newest version first (TBA's recency sampling).
    Recency,
    /// Drawn without replacement with weights `exp(mean reward / temperature)` (TBA's reward-prioritised sampling);
    /// a group without rewards counts as 0.
    Reward {
        /// Above 0; the smaller, the greedier.
        temperature: f64,
    },
    /// Drawn without replacement, all alike.
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
