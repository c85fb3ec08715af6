//! The session that has the lock of the schema. Invariant: while it lives, no other process opens the schema; once the lock is
//! lost and another process has opened the schema, this opening ends. Safety does not depend on it: the epoch in every
//! transaction does that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::StoreShared;
use super::session::{DatabaseFailure, PostgresSession, SessionKind};

/// Interval of its requests: far below the silence after which the server ends the session.
const PING: Duration = Duration::from_millis(500);

pub(super) struct LockKeeper {
    shared: Arc<StoreShared>,
    /// `None` after its connection was lost.
    session: Option<PostgresSession>,
}

impl LockKeeper {
    pub(super) fn new(shared: Arc<StoreShared>, session: PostgresSession) -> Self {
        Self { shared, session: Some(session) }
    }

    /// Keeps the lock until this opening has failed.
    pub(super) async fn run(&mut self) {
        let mut alone_since: Option<Instant> = None;
        while !self.shared.is_broken() {
            tokio::time::sleep(PING).await;
            let failure = match self.look().await {
                Ok(()) => {
                    alone_since = None;
                    continue;
                }
                Err(DatabaseFailure::Transient(cause)) => {
                    self.session = None;
                    let since = *alone_since.get_or_insert_with(Instant::now);
                    let outage = self.shared.config.outage;
                    if since.elapsed() < outage {
                        continue;
                    }
                    let cause = format!(
                        "its lock was lost and not taken again within {} s: {cause}",
                        outage.as_secs()
                    );
                    DatabaseFailure::Permanent(cause)
                }
                Err(failure) => failure,
            };
            self.shared.fail("keep the lock of the schema", failure);
        }
    }

    /// Checks that no later opening exists; takes the lock again if it was lost.
    async fn look(&mut self) -> Result<(), DatabaseFailure> {
        let shared = &self.shared;
        let (address, epoch) = (&shared.address, shared.epoch);
        let session = match self.session.take() {
            Some(session) => session,
            None => {
                let session = PostgresSession::connect(address, SessionKind::Lock, epoch).await?;
                session.end_lost(address, SessionKind::Lock, epoch).await?;
                if !session.try_lock(address).await? {
                    self.unchanged(&session).await?;
                    return Err(DatabaseFailure::Transient("another process has it".to_owned()));
                }
                session
            }
        };
        self.unchanged(&session).await?;
        self.session = Some(session);
        Ok(())
    }

    async fn unchanged(&self, session: &PostgresSession) -> Result<(), DatabaseFailure> {
        match session.epoch().await? {
            now if now == self.shared.epoch => Ok(()),
            now => Err(DatabaseFailure::Deposed { now }),
        }
    }

    /// Gives the lock back, so that another opening need not wait until the server finds the session closed.
    pub(super) async fn release(self) {
        let Some(session) = self.session else { return };
        let release = session.client.batch_execute("SELECT pg_advisory_unlock_all()");
        // Otherwise the end of the session releases it.
        let _ = tokio::time::timeout(Duration::from_secs(1), release).await;
    }
}
