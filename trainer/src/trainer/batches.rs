//! How a trainer gets the batch of a step: its lease, and the device if it is shared with a sampler.
//!
//! Invariant: a wait ends at the deadline, or soon after the stop flag is set.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use buffer::{BufferError, Lease, LeaseRequest};

use super::{CONSUMER, Trainer, networks};
use crate::TrainerError;
use crate::report::StepTime;

/// How often a trainer that waits for a batch checks the stop flag.
const STOP_POLL: Duration = Duration::from_millis(100);

impl Trainer {
    /// Leases the next batch and acquires the device. A sampler that shares the device has it meanwhile, unless the
    /// batch is ready.
    pub(super) fn batch(&mut self, time: &mut StepTime) -> Result<Option<Lease>, TrainerError> {
        let mut ready = None;
        if let Some(colocation) = self.colocation.as_mut().filter(|colocation| !colocation.is_resting()) {
            let request = LeaseRequest::step(CONSUMER, self.version);
            ready = match self.buffer.lease(&request, Duration::ZERO) {
                Ok(lease) => self.quarantine.pass(&*self.buffer, lease)?,
                Err(BufferError::LeaseTimeout { .. }) => None,
                Err(error) => return Err(error.into()),
            };
            if ready.is_none() {
                let clock = Instant::now();
                colocation.rest(networks(&mut self.learner, &mut self.auxiliary))?;
                time.phase_switch += clock.elapsed().as_secs_f64();
            }
        }
        let clock = Instant::now();
        let lease = match ready {
            Some(lease) => lease,
            None => match self.lease()? {
                Some(lease) => lease,
                None => return Ok(None),
            },
        };
        time.wait_for_batch = clock.elapsed().as_secs_f64();
        time.leased_at = self.time_s();
        let clock = Instant::now();
        if let Some(colocation) = &mut self.colocation {
            let networks = networks(&mut self.learner, &mut self.auxiliary);
            if !colocation.take(networks, self.config.wait, &self.stop)? {
                return Ok(None);
            }
            time.phase_switch += clock.elapsed().as_secs_f64();
        }
        Ok(Some(lease))
    }

    fn lease(&mut self) -> Result<Option<Lease>, TrainerError> {
        fail::fail_point!("before-lease");
        let begun = Instant::now();
        let deadline = begun + self.config.wait;
        let request = LeaseRequest::step(CONSUMER, self.version);
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            // The missing groups may come from a sampler that waits for the weights.
            self.publisher.resend(&self.learner)?;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.buffer.lease(&request, left.min(STOP_POLL)) {
                Ok(lease) => {
                    if let Some(lease) = self.quarantine.pass(&*self.buffer, lease)? {
                        return Ok(Some(lease));
                    }
                }
                Err(BufferError::LeaseTimeout { .. }) if left > STOP_POLL => {}
                // The last call alone waited less.
                Err(BufferError::LeaseTimeout { step, held_for_slow, stats, .. }) => {
                    let waited = begun.elapsed();
                    return Err(BufferError::LeaseTimeout { step, waited, held_for_slow, stats }.into());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
