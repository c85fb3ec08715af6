//! The buffer when a run resumes: it is rewound to an older checkpoint than its last, and what was in flight is sampled again.
//!
//! Invariant: a step that is repeated never trains on a group of a version that is repeated too, and lost groups are counted
//! in the report.

use buffer::{BufferError, Consumer, Rewound};
use serde_json::json;
use trainer::trainer::CONSUMER;
use trajectory::PolicyVersion;

use super::Run;
use super::start::StartingState;
use crate::failure::Failure;
use crate::observe::Observer;
use crate::run_buffer::{OWN_SAMPLER, RunBuffer};

impl Run<'_> {
    /// Takes over what an earlier process of this run was sampling for a buffer that is served elsewhere; it would wait for the end of
    /// its holds.
    fn take_over(&self, buffer: &RunBuffer) -> Result<(), Failure> {
        let groups = if buffer.own.is_some() { 0 } else { buffer.producer.abandon(OWN_SAMPLER)? };
        if groups > 0 {
            self.report
                .note(&format!("{groups} groups that an earlier process had in flight are sampled again"));
        }
        Ok(())
    }

    /// Takes over what was in flight, and rewinds the buffer to the version of `start`. The run's own buffer knows whether that
    /// is needed; a buffer that is served elsewhere is rewound if its version is newer, but never by a run that is new: it belongs to
    /// another one then.
    pub(super) fn rewind(
        &self,
        buffer: &RunBuffer,
        start: &StartingState,
        observer: &mut Observer<'_>,
    ) -> Result<(), Failure> {
        self.take_over(buffer)?;
        let version = start.state.version;
        let Some(own) = &buffer.own else {
            if start.resumed && rewind_served(&*buffer.consumer, version)? {
                self.report.note(&format!(
                    "the buffer is served elsewhere: it went back to version {version}, and keeps what later versions \
                     sampled"
                ));
            }
            return Ok(());
        };
        let Some(Rewound { gone, again, dropped }) = own.rewind(CONSUMER, version)? else { return Ok(()) };
        let other = if dropped > 0 { format!(", {dropped} of other senders dropped") } else { String::new() };
        self.report.note(&format!(
            "{gone} groups that later steps were trained on are gone, and other tasks take their place; of those not \
             trained on yet, {again} of later versions are sampled again{other}"
        ));
        observer.event(
            "rewind",
            &json!({
                "version": version,
                "groups_gone": gone,
                "groups_sampled_again": again,
                "groups_dropped": dropped,
            }),
        )
    }
}

/// Sets a buffer that is served elsewhere back to `version` if its version is newer: a step before its version is over there.
/// True if it was newer. Leases stay, so steps whose leases are stored get the same groups.
fn rewind_served(consumer: &dyn Consumer, version: PolicyVersion) -> Result<bool, BufferError> {
    let is_newer = consumer.stats()?.policy_version > version;
    if is_newer {
        consumer.set_version(version, true)?;
    }
    Ok(is_newer)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use buffer::{Buffer, BufferConfig, LeaseRequest};

    use super::*;

    #[test]
    fn a_served_buffer_with_a_newer_version_is_rewound_at_every_resume() {
        let buffer = Buffer::in_memory(BufferConfig::new(2, 1)).unwrap();
        buffer.set_version(PolicyVersion(3), false).unwrap();
        let lease = |step| buffer.lease(&LeaseRequest::step(CONSUMER, PolicyVersion(step)), Duration::ZERO);
        assert!(matches!(lease(1), Err(BufferError::StepPassed { .. })));

        assert!(rewind_served(&buffer, PolicyVersion(1)).unwrap());
        assert!(!rewind_served(&buffer, PolicyVersion(1)).unwrap(), "once is enough");
        assert!(matches!(lease(1), Err(BufferError::LeaseTimeout { .. })));
    }
}
