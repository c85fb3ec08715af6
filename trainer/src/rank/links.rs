//! The links of a stage of a pipeline to the next one and the one before, and of the last to the first.
//!
//! Invariant: a stage that trains never waits for a receiver: each direction has a thread that sends what waits, in order, and a queue
//! for the micro-batches in flight. A stage that fails closes its links, so that its neighbours fail at once.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use collective::{CollectiveError, HostCollective, Position};

use super::passes::PassCollectives;
use crate::TrainerError;
use crate::parallel::ParallelConfig;
use crate::pipeline::in_flight;
use crate::rank_spans::{RankClock, RankPhase};

/// The calls of one stage.
#[derive(Clone, Debug)]
pub(super) struct StageCalls {
    /// This stage.
    pub(super) stage: Position,
    /// Of all stages.
    pub(super) all: Arc<dyn HostCollective>,
    /// Residual streams, from the stage before.
    forward_in: StagePair,
    forward_out: StagePair,
    /// Their gradients, from the stage behind.
    backward_in: StagePair,
    backward_out: StagePair,
}

/// Two stages, one of which sends.
#[derive(Clone, Debug)]
struct StagePair {
    ranks: Arc<dyn HostCollective>,
    /// The one that sends.
    sender: usize,
}

/// What sends to another stage.
struct StageSender {
    queue: SyncSender<Vec<f32>>,
    thread: JoinHandle<Result<(), CollectiveError>>,
}

/// The links of a stage while it makes passes.
pub(super) struct StageLinks<'a> {
    forward_in: StagePair,
    backward_in: StagePair,
    forward_out: SyncSender<Vec<f32>>,
    backward_out: SyncSender<Vec<f32>>,
    clock: &'a RankClock,
}

impl StageCalls {
    /// The calls of this rank of `all` to the stages of its passes. All ranks make the call.
    ///
    /// # Errors
    /// If another rank does not.
    pub(super) fn of(config: ParallelConfig, all: &dyn HostCollective) -> Result<Self, TrainerError> {
        let (rank, of_stage) = (all.rank(), config.of_stage());
        let stage = config.place(all.position()).shard.stage;
        let pipelines = all.world() / stage.world;
        let pipeline = rank / config.of_pass() * of_stage + rank % of_stage;
        let split = |color| all.split(color).map(Arc::from);
        // Of the stages `first` and the one behind it, which is the first stage after the last one.
        let pair = |first: usize| {
            let both = [first, (first + 1) % stage.world];
            split(if both.contains(&stage.rank) { pipeline } else { pipelines + rank })
        };
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        for first in 0..stage.world {
            // The ranks of a pair are in order of stage.
            let sender = usize::from(first + 1 == stage.world);
            forward.push(StagePair { ranks: pair(first)?, sender });
            backward.push(StagePair { ranks: pair(first)?, sender: 1 - sender });
        }
        let before = (stage.rank + stage.world - 1) % stage.world;
        Ok(Self {
            stage,
            all: split(pipeline)?,
            forward_in: forward[before].clone(),
            forward_out: forward.swap_remove(stage.rank),
            backward_out: backward[before].clone(),
            backward_in: backward.swap_remove(stage.rank),
        })
    }

    /// Runs `body` with the links of this stage, one of `passes`, whose calls it closes if `body` fails.
    ///
    /// # Errors
    /// Those of `body`, or of a link.
    pub(super) fn linked<R>(
        self,
        passes: &PassCollectives,
        clock: &RankClock,
        body: impl FnOnce(&StageLinks<'_>) -> Result<R, TrainerError>,
    ) -> Result<R, TrainerError> {
        let Self { stage, forward_in, forward_out, backward_in, backward_out, all } = self;
        let forward = forward_out.sender("stage forward", in_flight(stage))?;
        let backward = backward_out.sender("stage backward", in_flight(stage))?;
        let (forward_out, backward_out) = (forward.queue, backward.queue);
        let links = StageLinks { forward_in, backward_in, forward_out, backward_out, clock };
        let done = body(&links);
        drop((links, all));
        if done.is_err() {
            // The threads may be sending to a stage that waits for this one.
            passes.leave();
        }
        for thread in [forward.thread, backward.thread] {
            let sent = clock.during(RankPhase::Wait, || thread.join());
            let sent = sent.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            if done.is_ok() {
                sent?;
            }
        }
        done
    }
}

impl StagePair {
    /// A queue of at most `most` messages to the other stage, and the thread that sends them.
    fn sender(self, name: &str, most: usize) -> Result<StageSender, TrainerError> {
        let (queue, queued) = sync_channel::<Vec<f32>>(most);
        let send = move || {
            queued.into_iter().try_for_each(|mut values| self.ranks.broadcast(self.sender, &mut values))
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(send);
        Ok(StageSender { queue, thread: thread.map_err(|source| TrainerError::Thread { source })? })
    }

    /// `len` values from the other stage.
    fn receive(&self, len: usize) -> Result<Vec<f32>, TrainerError> {
        let mut values = vec![0.0; len];
        self.ranks.broadcast(self.sender, &mut values)?;
        Ok(values)
    }
}

impl StageLinks<'_> {
    /// The residual stream `[len]` that the stage before has computed.
    ///
    /// # Errors
    /// If that stage does not send it before the deadline.
    pub(super) fn receive_forward(&self, len: usize) -> Result<Vec<f32>, TrainerError> {
        self.received(&self.forward_in, len)
    }

    /// The gradient `[len]` of the residual stream that this stage has computed.
    ///
    /// # Errors
    /// If the stage behind does not send it before the deadline.
    pub(super) fn receive_backward(&self, len: usize) -> Result<Vec<f32>, TrainerError> {
        self.received(&self.backward_in, len)
    }

    /// Sends a residual stream to the stage behind.
    pub(super) fn send_forward(&self, values: Vec<f32>) {
        send(&self.forward_out, values);
    }

    /// Sends the gradient of a residual stream to the stage that computed it.
    pub(super) fn send_backward(&self, values: Vec<f32>) {
        send(&self.backward_out, values);
    }

    fn received(&self, from: &StagePair, len: usize) -> Result<Vec<f32>, TrainerError> {
        if len == 0 {
            return Ok(Vec::new());
        }
        self.clock.during(RankPhase::Wait, || from.receive(len))
    }
}

/// Nothing is sent of a micro-batch without rows.
fn send(queue: &SyncSender<Vec<f32>>, values: Vec<f32>) {
    if !values.is_empty() {
        // If the thread has ended, its error is reported.
        let _ = queue.send(values);
    }
}
