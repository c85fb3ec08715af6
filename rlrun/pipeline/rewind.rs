//! What the buffer of a run does when the run goes on from an older checkpoint than its last.
//!
//! Invariant: a step that is done again never trains on a group whose versions are made anew, and what is gone is
//! counted aloud.

use std::sync::Arc;

use buffer::{Buffer, Consumer, Rewound};
use serde_json::json;
use trainer::trainer::CONSUMER;
use trajectory::PolicyVersion;

use super::Run;
use crate::failure::Failure;
use crate::observe::Observer;

impl Run<'_> {
    /// Takes the run's buffer back to `version`. Its own finds out by itself whether that is needed; of one that is
    /// served elsewhere only `went_back` says so.
    pub(super) fn rewind(
        &self,
        (own, consumer): (Option<&Arc<Buffer>>, &Arc<dyn Consumer>),
        (version, went_back): (PolicyVersion, bool),
        observer: &mut Observer<'_>,
    ) -> Result<(), Failure> {
        let Some(own) = own else {
            if went_back {
                consumer.set_version(version, true)?;
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
