//! Where a subscriber fetches a version: from the hub, or from the relay that the hub assigned to it.
//!
//! Invariant: a relay has one deadline for a whole version. If it fails, the version is fetched from the hub, which is notified of
//! the reason. A relay sends bytes; what they have to be comes from the hub.

use std::fmt;
use std::path::Path;
use std::time::Instant;

use connect::{BodyReader, ServerAddress};
use trajectory::PolicyVersion;

use super::client::{FetchError, HubClient};
use super::wire::{DeltaQuery, FullQuery};
use crate::{FallbackReason, RelayAddress, WeightsError};

/// A server of versions.
#[derive(Clone, Copy)]
pub(super) struct FrameSource<'a> {
    client: &'a HubClient,
    /// Until when a relay has to have sent the version; `None`: it is the hub.
    deadline: Option<Instant>,
}

impl<'a> FrameSource<'a> {
    pub(super) fn hub(client: &'a HubClient) -> Self {
        Self { client, deadline: None }
    }

    pub(super) fn relay(client: &'a HubClient, deadline: Instant) -> Self {
        Self { client, deadline: Some(deadline) }
    }

    pub(super) fn is_relay(self) -> bool {
        self.deadline.is_some()
    }

    /// All weights of `version`, of at most `limit` bytes.
    pub(super) fn full(self, version: PolicyVersion, limit: u64) -> Result<BodyReader<'static>, FetchError> {
        let ask = FullQuery { version: version.0, wait_ms: self.wait_ms() };
        self.client.weights("full", &ask, limit, self.deadline)
    }

    /// The delta from the version `from`, of at most `limit` bytes.
    pub(super) fn delta(self, from: PolicyVersion, limit: u64) -> Result<BodyReader<'static>, FetchError> {
        let ask = DeltaQuery { from: from.0, wait_ms: self.wait_ms() };
        self.client.weights("delta", &ask, limit, self.deadline)
    }

    /// Why it failed, with the evidence; `None` if it only has another version by now.
    pub(super) fn failure(self, error: FetchError) -> Option<(FallbackReason, String)> {
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        Some(match error {
            FetchError::VersionGone => return None,
            FetchError::NotYet => (FallbackReason::Slow, "it did not receive the version in time".to_owned()),
            FetchError::Unreachable(detail) if late => (FallbackReason::Slow, detail),
            FetchError::Unreachable(detail) => (FallbackReason::Unreachable, detail),
            FetchError::Corrupt(detail) => (FallbackReason::Damaged, detail),
            FetchError::Refused(error) => (FallbackReason::Refused, error.to_string()),
        })
    }

    /// The hub has what it announced; a relay may be about to receive it.
    fn wait_ms(self) -> u64 {
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        self.deadline.map_or(0, |deadline| left(deadline).as_millis() as u64)
    }
}

/// The connections to the relay that was assigned last.
#[derive(Debug, Default)]
pub(super) struct RelayConnections {
    open: Option<(RelayAddress, HubClient)>,
}

impl RelayConnections {
    /// The client of the relay at `address`, for the subscriber `name`.
    pub(super) fn client(
        &mut self,
        address: &RelayAddress,
        roots: Option<&Path>,
        name: &str,
    ) -> Result<&HubClient, WeightsError> {
        let (known, client) = match self.open.take().filter(|(open, _)| open == address) {
            Some(open) => open,
            None => {
                let server = ServerAddress { url: &address.url, token: Some(&address.token), roots };
                (address.clone(), HubClient::new(server, name)?)
            }
        };
        Ok(&self.open.insert((known, client)).1)
    }
}

impl fmt::Debug for FrameSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameSource")
            .field("url", &self.client.url())
            .field("deadline", &self.deadline)
            .finish()
    }
}
