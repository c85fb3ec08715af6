//! Weights within one process: subscribers share the published allocation.
//!
//! Invariant: `newest` and what each subscriber serves only go up. Of older versions only digests are kept, and only
//! those that a receipt may still name: of versions since the slowest subscriber's.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use trajectory::PolicyVersion;

use crate::{Digest, Lag, Publisher, Receipt, Snapshot, Subscriber, WeightsError};

/// The longest that any call waits, whatever it was told.
const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// A hub's one publisher, and the hub to subscribe to.
#[must_use]
pub fn hub() -> (MemoryPublisher, Hub) {
    let hub = Hub { shared: Arc::default() };
    (MemoryPublisher { shared: Arc::clone(&hub.shared) }, hub)
}

/// Where samplers subscribe.
#[derive(Clone, Debug)]
pub struct Hub {
    shared: Arc<Shared>,
}

/// The side of the trainer.
#[derive(Debug)]
pub struct MemoryPublisher {
    shared: Arc<Shared>,
}

/// The side of one sampler.
#[derive(Debug)]
pub struct MemorySubscriber {
    shared: Arc<Shared>,
    name: String,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    newest: Option<Arc<Snapshot>>,
    digests: BTreeMap<PolicyVersion, Digest>,
    receipts: BTreeMap<String, Option<Receipt>>,
    publisher_gone: bool,
    failure: Option<WeightsError>,
}

impl Hub {
    /// Adds a subscriber; `name` stands in receipts and errors.
    ///
    /// # Errors
    /// [`WeightsError::NameTaken`] if the name is in use.
    pub fn subscribe(&self, name: impl Into<String>) -> Result<MemorySubscriber, WeightsError> {
        let name = name.into();
        let mut state = self.shared.state()?;
        if state.receipts.contains_key(&name) {
            return Err(WeightsError::NameTaken { name });
        }
        state.receipts.insert(name.clone(), None);
        Ok(MemorySubscriber { shared: Arc::clone(&self.shared), name })
    }
}

impl Publisher for MemoryPublisher {
    fn publish(&self, snapshot: Snapshot) -> Result<(), WeightsError> {
        let mut state = self.shared.healthy()?;
        let version = snapshot.version;
        if let Some(newest) = state.newest_version().filter(|newest| version <= *newest) {
            return Err(WeightsError::NotNewer { version, newest });
        }
        state.digests.insert(version, snapshot.digest);
        state.newest = Some(Arc::new(snapshot));
        state.forget_digests();
        self.shared.changed.notify_all();
        Ok(())
    }

    fn wait_applied(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError> {
        let started = Instant::now();
        let deadline = started + wait.min(MAX_WAIT);
        let mut state = self.shared.healthy()?;
        loop {
            let behind = state.behind(version);
            if behind.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(WeightsError::NotApplied { version, waited: started.elapsed(), behind });
            }
            state = self.shared.wait(state, deadline)?;
            state.check()?;
        }
    }

    fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        let state = self.shared.healthy()?;
        let newest = state.newest_version().unwrap_or_default();
        let lag = |(name, receipt): (&String, &Option<Receipt>)| {
            let served = receipt.map_or(PolicyVersion(0), |receipt| receipt.version);
            Lag { subscriber: name.clone(), receipt: *receipt, versions: served.staleness_at(newest) }
        };
        Ok(state.receipts.iter().map(lag).collect())
    }
}

impl Subscriber for MemorySubscriber {
    fn newest(&self, after: Option<PolicyVersion>) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        self.shared.healthy()?.newer(after)
    }

    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        let deadline = Instant::now() + wait.min(MAX_WAIT);
        let mut state = self.shared.healthy()?;
        loop {
            let newer = state.newer(after)?;
            if newer.is_some() || Instant::now() >= deadline {
                return Ok(newer);
            }
            state = self.shared.wait(state, deadline)?;
            state.check()?;
        }
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        let mut state = self.shared.healthy()?;
        let result = state.accept(&self.name, receipt);
        if let Err(error) = &result {
            state.failure = Some(error.clone());
        }
        self.shared.changed.notify_all();
        result
    }
}

impl Drop for MemoryPublisher {
    fn drop(&mut self) {
        if let Ok(mut state) = self.shared.state() {
            state.publisher_gone = true;
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for MemorySubscriber {
    fn drop(&mut self) {
        if let Ok(mut state) = self.shared.state() {
            state.receipts.remove(&self.name);
        }
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn state(&self) -> Result<MutexGuard<'_, State>, WeightsError> {
        self.state.lock().map_err(|_| WeightsError::Poisoned)
    }

    fn healthy(&self) -> Result<MutexGuard<'_, State>, WeightsError> {
        let state = self.state()?;
        state.check()?;
        Ok(state)
    }

    /// Waits until something changed or the deadline is over.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        deadline: Instant,
    ) -> Result<MutexGuard<'a, State>, WeightsError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let (state, _) = self.changed.wait_timeout(state, left).map_err(|_| WeightsError::Poisoned)?;
        Ok(state)
    }
}

impl State {
    fn check(&self) -> Result<(), WeightsError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn newest_version(&self) -> Option<PolicyVersion> {
        self.newest.as_ref().map(|snapshot| snapshot.version)
    }

    fn newer(&self, after: Option<PolicyVersion>) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        let newer = self.newest.as_ref().filter(|snapshot| Some(snapshot.version) > after);
        if newer.is_none() && self.publisher_gone {
            return Err(WeightsError::PublisherGone { newest: self.newest_version() });
        }
        Ok(newer.cloned())
    }

    fn accept(&mut self, name: &str, receipt: Receipt) -> Result<(), WeightsError> {
        let Receipt { version, digest: served, .. } = receipt;
        let subscriber = || name.to_owned();
        let before = self.receipts.get(name).copied().flatten();
        if let Some(before) = before.filter(|before| version < before.version) {
            return Err(WeightsError::WentBack { subscriber: subscriber(), from: before.version, version });
        }
        match self.digests.get(&version) {
            None => return Err(WeightsError::NeverPublished { subscriber: subscriber(), version }),
            Some(published) if *published != served => {
                let published = *published;
                return Err(WeightsError::Mismatch { subscriber: subscriber(), version, served, published });
            }
            Some(_) => {}
        }
        self.receipts.insert(subscriber(), Some(receipt));
        self.forget_digests();
        Ok(())
    }

    /// Who does not yet serve `version`, for an error; empty if all do.
    fn behind(&self, version: PolicyVersion) -> String {
        let behind = self.receipts.iter().filter(|(_, receipt)| receipt.is_none_or(|r| r.version < version));
        let lines = behind.map(|(name, receipt)| match receipt {
            Some(receipt) => format!("{name} is at {}", receipt.version),
            None => format!("{name} has applied none"),
        });
        lines.collect::<Vec<_>>().join(", ")
    }

    fn forget_digests(&mut self) {
        let newest = self.newest_version().unwrap_or_default();
        let served = self.receipts.values().map(|receipt| receipt.map_or(PolicyVersion(0), |r| r.version));
        let slowest = served.min().unwrap_or(newest).min(newest);
        self.digests = self.digests.split_off(&slowest);
    }
}

#[cfg(test)]
mod tests;
