//! The sections `[log]` and `[dashboard]`.
//!
//! Invariant: what they choose changes no weight: the files of a run are complete without them.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::recipe::words::WandbLog;

/// `[log]`: logs in addition to the metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Groups written to `samples/` per step.
    // resume = changes, worker = ignored
    pub samples: usize,
    /// Whether these groups are also written token by token: ids, texts, log-probabilities of sampler and trainer, advantages,
    /// versions.
    // resume = changes, worker = ignored
    pub tokens: bool,
    /// Trajectories of a step whose way from slot to training is written to `timeline.jsonl`, beside what every role did; 0 writes no
    /// timeline. `rlrun why` reads it.
    // resume = changes, worker = ignored
    pub timeline: usize,
    /// Whether `tensorboard/` has event files: all metrics, distributions of a batch, and the beginning of its first group as text if
    /// `samples` is above 0. TRL `report_to = "tensorboard"`.
    // resume = changes, worker = ignored
    pub tensorboard: bool,
    /// Logs of Weights & Biases: `offline` writes them to `wandb/`, from where `wandb sync` uploads them; `online` also runs that
    /// program beside the training.
    // resume = changes, worker = ignored
    pub wandb: WandbLog,
    /// Whether `schedule.bin` records what the run did in which order, with all groups that it was trained on, so that `rlrun replay`
    /// repeats it bit for bit.
    // resume = changes, worker = ignored
    pub schedule: bool,
    /// Address of an OpenTelemetry collector that gets the timeline as traces, over HTTP: `http://127.0.0.1:4318`. Default: none.
    // resume = changes, worker = ignored
    pub otlp: Option<String>,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            samples: 2,
            tokens: true,
            timeline: 16,
            tensorboard: true,
            wandb: WandbLog::Off,
            schedule: false,
            otlp: None,
        }
    }
}

/// `[dashboard]`: the live page, served by the run itself. `rlrun view` serves the same page from outside.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DashboardSection {
    /// Address on which the page is served while the run goes on, such as `127.0.0.1:8704`; port 0 takes a free one. Default: none.
    /// An address that other machines can reach needs `token_file`.
    // resume = changes, worker = ignored
    pub listen: Option<SocketAddr>,
    /// A file with the token that the page needs. Default: none.
    // resume = changes, worker = ignored
    pub token_file: Option<PathBuf>,
}
