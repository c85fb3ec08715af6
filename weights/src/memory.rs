//! Weights within one process: subscribers share the published memory.
//!
//! Invariant: publisher and subscriber share the weights without a copy.

use std::sync::Arc;
use std::time::Duration;

use trajectory::PolicyVersion;

use crate::hub::{After, Announcement, HubConfig, SubscriberId};
use crate::{Hub, HubPublisher, PublishConfig, Receipt, Snapshot, Subscriber, WeightsError};

/// A hub and its publisher, for subscribers within this process only.
#[must_use]
pub fn hub() -> (HubPublisher, Hub) {
    let hub = Hub::new(HubConfig::default());
    (HubPublisher::in_memory(hub.clone(), PublishConfig::default().threads), hub)
}

/// A subscriber within the publisher's process.
#[derive(Debug)]
pub struct MemorySubscriber {
    hub: Hub,
    caller: SubscriberId,
}

impl MemorySubscriber {
    pub(crate) fn new(hub: Hub, caller: SubscriberId) -> Self {
        Self { hub, caller }
    }
}

impl Subscriber for MemorySubscriber {
    fn newest(&self, after: Option<PolicyVersion>) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        self.hub.newest(&self.caller, After::Version(after))?.map(snapshot).transpose()
    }

    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        self.hub.wait_newer(&self.caller, After::Version(after), wait)?.map(snapshot).transpose()
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        self.hub.accept(&self.caller, self.hub.life(), receipt)
    }
}

impl Drop for MemorySubscriber {
    fn drop(&mut self) {
        self.hub.leave(&self.caller);
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is made for `map`")]
fn snapshot(announced: Announcement) -> Result<Arc<Snapshot>, WeightsError> {
    let version = announced.newest.version();
    announced.newest.snapshot().cloned().ok_or(WeightsError::OnDevice { version })
}
