//! Reads of payloads. Invariant: a payload that differs from what was written is an error, and a read has a deadline. Payloads
//! are immutable, so a read needs no transaction and no epoch.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use tokio::sync::Mutex;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use trajectory::GroupId;

use super::session::{DatabaseFailure, PostgresSession, STATEMENTS, SessionKind, within};
use super::writer::RETRY_EVERY;
use super::{StoreShared, StoredPayload, digest, lock};
use crate::BufferError;

/// Most payloads that one request reads.
const READ_TOGETHER: usize = 256;

pub(super) struct PayloadReader {
    shared: Arc<StoreShared>,
    /// Of the thread of the store.
    runtime: tokio::runtime::Handle,
    /// `None` until the first read, and after its connection was lost.
    session: Arc<Mutex<Option<PostgresSession>>>,
}

type Payloads = HashMap<GroupId, Vec<u8>>;

impl PayloadReader {
    pub(super) fn new(shared: Arc<StoreShared>, runtime: tokio::runtime::Handle) -> Self {
        Self { shared, runtime, session: Arc::default() }
    }

    /// The payloads of those groups of `ids` that are stored.
    ///
    /// # Errors
    /// A database that does not answer, a payload that is damaged.
    pub(super) fn payloads(&self, ids: &[GroupId]) -> Result<Payloads, BufferError> {
        let places: Vec<(GroupId, StoredPayload)> = {
            let payloads = lock(&self.shared.payloads);
            ids.iter().filter_map(|id| Some((*id, *payloads.places.get(id)?))).collect()
        };
        let (done, result) = sync_channel(1);
        let (shared, session) = (Arc::clone(&self.shared), Arc::clone(&self.session));
        self.runtime.spawn(async move {
            let read = read(&shared, &session, places).await;
            // The caller may have given up.
            drop(done.send(read));
        });
        let limit = self.shared.config.outage + 2 * STATEMENTS;
        result.recv_timeout(limit).unwrap_or_else(|_| {
            let cause = format!("no answer within {} s, or the store has ended", limit.as_secs());
            Err(self.shared.failure_or("read a group", cause))
        })
    }
}

impl StoreShared {
    /// Why this opening has ended, or else `cause`.
    fn failure_or(&self, action: &'static str, cause: String) -> BufferError {
        if self.is_broken() { self.stopped() } else { self.error(action, cause) }
    }
}

/// Reads within the longest outage, in new sessions if need be.
async fn read(
    shared: &StoreShared,
    session: &Mutex<Option<PostgresSession>>,
    places: Vec<(GroupId, StoredPayload)>,
) -> Result<Payloads, BufferError> {
    let deadline = Instant::now() + shared.config.outage;
    let mut session = session.lock().await;
    let mut found = Payloads::new();
    for together in in_tables(places) {
        loop {
            match read_once(shared, &mut session, &together).await {
                Ok(Some(read)) => break found.extend(verified(shared, &together, read)?),
                // The groups of a table that was dropped are gone.
                Ok(None) => break,
                Err(DatabaseFailure::Transient(_)) if Instant::now() < deadline => {
                    *session = None;
                    tokio::time::sleep(RETRY_EVERY).await;
                }
                Err(DatabaseFailure::Transient(cause) | DatabaseFailure::Permanent(cause)) => {
                    return Err(shared.failure_or("read a group", cause));
                }
                Err(DatabaseFailure::Deposed { .. }) => return Err(shared.stopped()),
            }
        }
    }
    Ok(found)
}

/// Payloads of one table.
struct TableRead {
    block: u64,
    places: Vec<(GroupId, StoredPayload)>,
}

fn in_tables(places: Vec<(GroupId, StoredPayload)>) -> Vec<TableRead> {
    let mut blocks: BTreeMap<u64, Vec<(GroupId, StoredPayload)>> = BTreeMap::new();
    places.into_iter().for_each(|place| blocks.entry(place.1.block).or_default().push(place));
    let parts = |(block, places): (u64, Vec<(GroupId, StoredPayload)>)| {
        let parts = places.chunks(READ_TOGETHER).map(<[_]>::to_vec).collect::<Vec<_>>();
        parts.into_iter().map(move |places| TableRead { block, places })
    };
    blocks.into_iter().flat_map(parts).collect()
}

/// Number and payload of each; `None` if their table was dropped.
async fn read_once(
    shared: &StoreShared,
    session: &mut Option<PostgresSession>,
    wanted: &TableRead,
) -> Result<Option<HashMap<i64, Vec<u8>>>, DatabaseFailure> {
    if session.is_none() {
        *session = Some(PostgresSession::connect(&shared.address, SessionKind::Reader, shared.epoch).await?);
    }
    let Some(session) = session else { return Ok(None) };
    let numbers: Vec<i64> = wanted.places.iter().map(|(_, place)| place.number).collect();
    let select = format!("SELECT number, body FROM payload_{} WHERE number = ANY($1)", wanted.block);
    within(shared.address.limit, "read payloads", async {
        let rows = match session.client.query_typed(&select, &[(&numbers, Type::INT8_ARRAY)]).await {
            Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => return Ok(None),
            rows => rows?,
        };
        let mut read = HashMap::with_capacity(rows.len());
        for row in rows {
            read.insert(row.try_get(0)?, row.try_get(1)?);
        }
        Ok(Some(read))
    })
    .await
}

/// The payloads by group, compared with their digests. One that is not there was removed meanwhile.
fn verified(
    shared: &StoreShared,
    wanted: &TableRead,
    mut read: HashMap<i64, Vec<u8>>,
) -> Result<Payloads, BufferError> {
    let mut found = Payloads::new();
    for (id, place) in &wanted.places {
        let Some(payload) = read.remove(&place.number) else { continue };
        if digest(&payload) != place.digest {
            return Err(shared.damaged(*id, "its checksum is wrong"));
        }
        found.insert(*id, payload);
    }
    Ok(found)
}
