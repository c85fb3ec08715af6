//! Writes: transactions in the order of the queue, on two sessions in turns.
//!
//! Invariant: transactions commit in the order in which they were taken from the queue, so after a crash the database has a
//! prefix of them; each is acknowledged after its commit and before that of the next.
//!
//! # Why two sessions keep the order
//! While one transaction commits, which is a wait for the disk, the next one executes its statements on the other session. Its
//! `COMMIT` is sent only after that of the one before was answered. So there are never two commits on their way, and the only
//! question is whether a transaction may execute while the one before is not yet visible to it.
//!
//! - Rows that both change: the statements of the first are all answered before those of the second are sent, so the second waits
//!   for the row locks of the first and never the other way round, and then sees what it committed (READ COMMITTED evaluates
//!   the row again).
//! - Rows that only the first inserts: the second does not see them. That is an append and a later change. No change concerns a
//!   group before its append was acknowledged, which happens after its commit; a range of keys to remove may span an append that
//!   is not acknowledged yet, and such an append may take effect after the change (the store's guarantee).
//! - A group that the first removes and the second appends again: the insertion waits for the deletion.
//! - The row of the epoch is only locked, by both (`FOR SHARE`).
//!
//! # Lost connections
//! If either session fails, both are closed, which rolls back what was not committed. The one or two batches are then repeated
//! in order, one after the other, on new sessions: executing a batch twice changes nothing. After
//! [`PostgresConfig::outage`](super::PostgresConfig::outage) this opening has failed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::WriteBatch;
use super::keeper::LockKeeper;
use super::schema::make_block;
use super::session::{DatabaseFailure, PostgresSession, STATEMENTS, SessionKind, WriterSession, within};
use super::{StoreShared, lock};

/// Pause between two attempts to reach the database.
pub(super) const RETRY_EVERY: Duration = Duration::from_millis(200);
/// While a transaction commits, the next one starts once this number of writes wait; fewer wait for that commit, so that small
/// transactions do not delay large ones.
const OVERLAP_WRITES: usize = 32;
/// Pause before another attempt to drop tables of payloads that are in use.
const DROP_AGAIN: Duration = Duration::from_secs(30);
/// Bits of the number of a payload that count within an opening.
const NUMBER_BITS: u32 = 40;

pub(super) struct DatabaseWriter {
    shared: Arc<StoreShared>,
    /// The session of the transaction that commits, and that of the next.
    sessions: (WriterSession, WriterSession),
    /// The transaction that is executed and not yet committed, on the first session.
    executed: Option<WriteBatch>,
    /// The one after it, on the second session.
    next: Option<WriteBatch>,
    /// Existing tables of payloads.
    blocks: BTreeSet<u64>,
    /// The next number of a payload.
    numbers: i64,
    drop_after: Instant,
}

impl DatabaseWriter {
    pub(super) fn new(
        shared: Arc<StoreShared>,
        sessions: (WriterSession, WriterSession),
        blocks: BTreeSet<u64>,
    ) -> Self {
        // No other opening has these numbers.
        let numbers = (shared.epoch << NUMBER_BITS).cast_signed();
        let drop_after = Instant::now();
        Self { shared, sessions, executed: None, next: None, blocks, numbers, drop_after }
    }

    /// Writes until the store is dropped or has failed, while `keeper` keeps the lock.
    pub(super) async fn run(mut self, mut keeper: LockKeeper) {
        let shared = Arc::clone(&self.shared);
        let written = tokio::select! {
            written = self.write_until_closed() => written,
            // It has failed the store.
            () = keeper.run() => Ok(()),
        };
        if let Err(failure) = written {
            shared.fail("write", failure);
        }
        // The reason is known; now the callers of what was not written learn it.
        drop(self);
        keeper.release().await;
    }

    async fn write_until_closed(&mut self) -> Result<(), DatabaseFailure> {
        loop {
            match self.overlap().await {
                Ok(()) => {}
                Err(DatabaseFailure::Transient(cause)) => self.repeat(cause).await?,
                Err(failure) => return Err(failure),
            }
            if self.next.is_none() && self.executed.is_none() && self.shared.queue.is_done() {
                return Ok(());
            }
            std::mem::swap(&mut self.sessions.0, &mut self.sessions.1);
            self.executed = self.next.take();
            self.drop_empty_blocks().await?;
        }
    }

    /// Commits the executed transaction and executes the next one meanwhile.
    async fn overlap(&mut self) -> Result<(), DatabaseFailure> {
        let Self { shared, sessions: (first, second), executed, next, blocks, numbers, .. } = self;
        shared.queue.set_enough(if executed.is_some() { OVERLAP_WRITES } else { 1 });
        let commit = async {
            if executed.is_some() {
                first.commit().await?;
                executed.take().into_iter().for_each(|batch| shared.acknowledge(batch));
                shared.queue.set_enough(1);
            }
            Ok(())
        };
        let execute = async {
            let Some(writes) = shared.queue.take().await else { return Ok(()) };
            let batch = next.insert(WriteBatch::new(writes));
            execute(shared, second, batch, blocks, numbers).await
        };
        futures_util::future::try_join(commit, execute).await.map(drop)
    }

    /// Repeats on new sessions what was not committed, until the outage has lasted too long.
    async fn repeat(&mut self, first: String) -> Result<(), DatabaseFailure> {
        let outage = self.shared.config.outage;
        let deadline = Instant::now() + outage;
        loop {
            let cause = match self.repeat_once().await {
                Ok(()) => return Ok(()),
                Err(DatabaseFailure::Transient(cause)) => cause,
                Err(failure) => return Err(failure),
            };
            if Instant::now() >= deadline {
                let evidence = self.evidence().await;
                let seconds = outage.as_secs();
                let again = if cause == first { String::new() } else { format!(", then {cause}") };
                let text = format!("no commit for {seconds} s: {first}{again}{evidence}");
                return Err(DatabaseFailure::Permanent(text));
            }
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    async fn repeat_once(&mut self) -> Result<(), DatabaseFailure> {
        let (address, epoch) = (&self.shared.address, self.shared.epoch);
        let first = PostgresSession::connect(address, SessionKind::Writer, epoch).await?;
        // A session that only this process has lost may still have locks.
        first.end_lost(address, SessionKind::Writer, epoch).await?;
        let second = PostgresSession::connect(address, SessionKind::Writer, epoch).await?;
        self.sessions = (first.into_writer().await?, second.into_writer().await?);
        for unfinished in [&mut self.executed, &mut self.next] {
            let Some(batch) = unfinished.as_mut() else { continue };
            let session = &self.sessions.0;
            execute(&self.shared, session, batch, &mut self.blocks, &mut self.numbers).await?;
            session.commit().await?;
            unfinished.take().into_iter().for_each(|batch| self.shared.acknowledge(batch));
        }
        Ok(())
    }

    /// What the database says about its synchronous standbys, the usual reason for a commit without an answer.
    async fn evidence(&self) -> String {
        let (address, epoch) = (&self.shared.address, self.shared.epoch);
        let ask = async {
            let session = PostgresSession::connect(address, SessionKind::Reader, epoch).await?;
            let standbys = "SELECT current_setting('synchronous_standby_names'), \
                            (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))";
            let row = session.client.query_one(standbys, &[]).await?;
            Ok::<(String, i64), DatabaseFailure>((row.try_get(0)?, row.try_get(1)?))
        };
        match within(STATEMENTS, "read the standbys", ask).await {
            Ok((names, count)) if !names.is_empty() => format!(
                "; synchronous_standby_names is '{names}' and {count} synchronous standbys are connected: start the standby, or \
                 change the setting"
            ),
            _ => String::new(),
        }
    }

    /// Drops tables of payloads whose groups are all gone.
    async fn drop_empty_blocks(&mut self) -> Result<(), DatabaseFailure> {
        if Instant::now() < self.drop_after {
            return Ok(());
        }
        let needed = self.executed.as_ref().map(WriteBatch::blocks).unwrap_or_default();
        let empty = lock(&self.shared.payloads).empty_blocks(&self.blocks);
        for block in empty.into_iter().filter(|block| !needed.contains(block)) {
            // A reader may have the table open.
            let statements = format!("SET LOCAL lock_timeout = 200; DROP TABLE IF EXISTS payload_{block}");
            match self.sessions.1.transaction(self.shared.epoch, &statements).await {
                Ok(()) => drop(self.blocks.remove(&block)),
                Err(failure @ DatabaseFailure::Deposed { .. }) => return Err(failure),
                // It only takes space until the next attempt; a lost session fails at its next use.
                Err(_) => {
                    self.drop_after = Instant::now() + DROP_AGAIN;
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Executes the statements of `batch` in a transaction of `session`, and makes the tables of payloads that it needs.
async fn execute(
    shared: &StoreShared,
    session: &WriterSession,
    batch: &mut WriteBatch,
    blocks: &mut BTreeSet<u64>,
    numbers: &mut i64,
) -> Result<(), DatabaseFailure> {
    // In transactions of their own: the one before does not make any, so no two make the same at once.
    for block in batch.blocks() {
        if !blocks.contains(&block) {
            session.transaction(shared.epoch, &make_block(block)).await?;
            blocks.insert(block);
        }
    }
    batch.number(numbers);
    let large = batch.large_payloads(&lock(&shared.payloads));
    within(shared.address.limit, "write", async {
        session.begin(shared.epoch).await?;
        batch.execute(session, large).await
    })
    .await
}
