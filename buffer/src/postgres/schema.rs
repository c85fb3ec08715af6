//! Opening: the checks of the server, the lock, the tables, the epoch, and all records.
//!
//! Invariant: tables are made in one transaction with their format, and tables of another format are refused and never changed.
//! The order is lock, owner, epoch, records: an opening that reads the records has fenced all others.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use tokio_postgres::Row;
use trajectory::GroupId;

use super::queue::WriteQueue;
use super::session::{DatabaseFailure, PostgresSession, SessionKind, WriterSession, within};
use super::settings::DatabaseAddress;
use super::{PayloadIndex, PostgresConfig, StoreShared, StoredPayload};
use crate::store::{GroupRow, Recovered};
use crate::{BufferError, LeaseId};

/// Version of the tables.
const FORMAT: i32 = 1;
/// The oldest server with the settings that this store relies on.
const OLDEST_SERVER: i32 = 140_000;
/// Below this size of the write-ahead log between two checkpoints, MB, the server writes pages twice more often than needed.
const ADVISED_WAL_MB: i64 = 8192;
/// Interval of attempts to take the lock of the schema.
const LOCK_EVERY: Duration = Duration::from_millis(250);
/// Deadline of reading all records.
const READ_ALL: Duration = Duration::from_secs(300);

/// What an opening makes.
pub(super) struct OpenSchema {
    pub(super) shared: Arc<StoreShared>,
    /// The session that has the lock.
    pub(super) lock: PostgresSession,
    pub(super) writers: (WriterSession, WriterSession),
    /// Existing tables of payloads.
    pub(super) blocks: BTreeSet<u64>,
}

/// Opens the schema of `config`.
///
/// # Errors
/// Those of [`open_postgres`](super::open_postgres).
pub(super) async fn open(
    config: PostgresConfig,
    address: DatabaseAddress,
) -> Result<(OpenSchema, Recovered), BufferError> {
    let failed = |action: &'static str| {
        let address = &address;
        move |failure: DatabaseFailure| to_error(address, action, failure)
    };
    let lock = PostgresSession::connect(&address, SessionKind::Lock, 0).await.map_err(failed("connect"))?;
    for advice in check_server(&lock, &address).await? {
        if let Some(notice) = &config.notice {
            notice(&advice);
        }
    }
    take_lock(&lock, &address, config.wait).await?;
    make_or_check(&lock, &address, &config).await?;
    lock.end_earlier(&address).await.map_err(failed("end earlier sessions"))?;
    let epoch = next_epoch(&lock, &address).await.map_err(failed("count the opening"))?;
    lock.name(&address, epoch).await.map_err(failed("name the session"))?;
    // The session of the lock must not be silent for long, so another one reads the records.
    let reading = PostgresSession::connect(&address, SessionKind::Writer, epoch).await;
    let reading = reading.map_err(failed("connect"))?;
    let read = within(READ_ALL, "read the records", records(&reading));
    let keep = async {
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            // If it is lost, the keeper takes it again.
            let _ = lock.epoch().await;
        }
    };
    let read = tokio::select! {
        read = read => read.map_err(failed("read the records"))?,
        () = keep => return Err(failed("read the records")(DatabaseFailure::Transient("interrupted".to_owned()))),
    };
    let (recovered, payloads, blocks) = decode(read).map_err(|reason| address.setup(reason))?;
    let second = PostgresSession::connect(&address, SessionKind::Writer, epoch).await;
    let second = second.map_err(failed("connect"))?;
    let writers = (
        reading.into_writer().await.map_err(failed("prepare statements"))?,
        second.into_writer().await.map_err(failed("prepare statements"))?,
    );
    let shared = StoreShared {
        config,
        address,
        epoch,
        queue: WriteQueue::default(),
        payloads: payloads.into(),
        cache: Default::default(),
        broken: Default::default(),
    };
    Ok((OpenSchema { shared: Arc::new(shared), lock, writers, blocks }, recovered))
}

/// The error of an opening.
pub(super) fn to_error(
    address: &DatabaseAddress,
    action: &'static str,
    failure: DatabaseFailure,
) -> BufferError {
    match failure {
        DatabaseFailure::Permanent(cause) => address.setup(format!("{action}: {cause}")),
        DatabaseFailure::Transient(cause) => {
            BufferError::Store { store: address.name.clone(), action, source: cause.into() }
        }
        DatabaseFailure::Deposed { now } => {
            BufferError::Deposed { store: address.name.clone(), opening: 0, now }
        }
    }
}

/// Refuses a server that loses acknowledged writes in a crash; returns what could be set better.
pub(super) async fn check_server(
    session: &PostgresSession,
    address: &DatabaseAddress,
) -> Result<Vec<String>, BufferError> {
    let settings = within(address.limit, "read the settings", async {
        let names = "SELECT current_setting('server_version_num')::int, current_setting('fsync'), \
                     current_setting('full_page_writes'), current_setting('synchronous_commit'), \
                     (SELECT setting::bigint FROM pg_settings WHERE name = 'max_wal_size')";
        Ok(session.client.query_one(names, &[]).await?)
    });
    let row = settings.await.map_err(|failure| to_error(address, "read the settings", failure))?;
    let unreadable = |error: tokio_postgres::Error| to_error(address, "read the settings", error.into());
    let version: i32 = row.try_get(0).map_err(unreadable)?;
    if version < OLDEST_SERVER {
        return Err(address.setup(format!(
            "its server is PostgreSQL {}, and the oldest that can be used is {}: use a newer one",
            version / 10_000,
            OLDEST_SERVER / 10_000
        )));
    }
    for (column, name) in [(1, "fsync"), (2, "full_page_writes"), (3, "synchronous_commit")] {
        let value: String = row.try_get(column).map_err(unreadable)?;
        if value == "off" {
            return Err(address.setup(format!(
                "{name} is off, so a crash of the database would lose acknowledged groups: set {name} = on there"
            )));
        }
    }
    let wal_mb: i64 = row.try_get(4).map_err(unreadable)?;
    let advice = (wal_mb < ADVISED_WAL_MB).then(|| {
        format!(
            "{}: max_wal_size is {wal_mb} MB; from {ADVISED_WAL_MB} MB on the server writes less (docs/postgres.md)",
            address.name
        )
    });
    Ok(advice.into_iter().collect())
}

/// Takes the lock of the schema, within `wait`.
async fn take_lock(
    session: &PostgresSession,
    address: &DatabaseAddress,
    wait: Duration,
) -> Result<(), BufferError> {
    let deadline = Instant::now() + wait;
    let failed = |failure| to_error(address, "take the lock of the schema", failure);
    loop {
        if session.try_lock(address).await.map_err(failed)? {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let by = owner_of_lock(session, address).await.map_err(failed)?;
            return Err(BufferError::StoreInUse { store: address.name.clone(), by });
        }
        tokio::time::sleep(LOCK_EVERY).await;
    }
}

/// Describes the session that has the lock.
async fn owner_of_lock(
    session: &PostgresSession,
    address: &DatabaseAddress,
) -> Result<String, DatabaseFailure> {
    const OWNER: &str = "SELECT coalesce(host(a.client_addr), 'a local socket'), a.pid, a.backend_start::text \
                         FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
                         WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 \
                         AND ((l.classid::bigint << 32) | l.objid::bigint) = $1";
    let owner = within(address.limit, "find the owner of the lock", async {
        Ok(session.client.query_opt(OWNER, &[&address.lock]).await?)
    });
    let Some(row) = owner.await? else { return Ok("which has just ended".to_owned()) };
    let (from, pid, since): (String, i32, String) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    Ok(format!("connected from {from} since {since}, server process {pid}"))
}

/// Makes the tables of a schema that is not there, or checks format and owner of one that is.
async fn make_or_check(
    session: &PostgresSession,
    address: &DatabaseAddress,
    config: &PostgresConfig,
) -> Result<(), BufferError> {
    let schema = &address.schema;
    let failed = |action| move |failure| to_error(address, action, failure);
    let known = within(address.limit, "look for the schema", async {
        let exists = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1), \
                      EXISTS (SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = 'store')";
        let row = session.client.query_one(exists, &[schema]).await?;
        Ok((row.try_get::<_, bool>(0)?, row.try_get::<_, bool>(1)?))
    });
    match known.await.map_err(failed("look for the schema"))? {
        (false, _) if !config.create => {
            return Err(address.setup(
                "its schema is missing, and with it the groups that no checkpoint contains: restore the database, or \
                 continue without them with `rlrun resume RUN --without-journal`"
                    .to_owned(),
            ));
        }
        (false, _) => return make(session, address, config).await.map_err(failed("make its tables")),
        (true, false) => {
            let reason = "the schema exists and is no buffer of this program: name another schema";
            return Err(address.setup(reason.to_owned()));
        }
        (true, true) => {}
    }
    let row = within(address.limit, "read the format", async {
        Ok(session.client.query_one("SELECT format, owner FROM store", &[]).await?)
    });
    let row = row.await.map_err(failed("read the format"))?;
    let unreadable = |error: tokio_postgres::Error| failed("read the format")(error.into());
    let (format, owner): (i32, String) =
        (row.try_get(0).map_err(unreadable)?, row.try_get(1).map_err(unreadable)?);
    if format != FORMAT {
        return Err(address.setup(format!(
            "its tables have format {format}, and this program reads {FORMAT}: use the program that made them, or another \
             schema"
        )));
    }
    if owner != config.owner {
        return Err(address.setup(format!(
            "the schema belongs to {owner}, this is {}: name another schema, or, if its groups are not needed any more, remove \
             it with DROP SCHEMA {schema} CASCADE",
            config.owner
        )));
    }
    Ok(())
}

async fn make(
    session: &PostgresSession,
    address: &DatabaseAddress,
    config: &PostgresConfig,
) -> Result<(), DatabaseFailure> {
    let schema = &address.schema;
    // Rows are updated when their group is leased again; space for that in their pages keeps them in place.
    let tables = format!(
        "CREATE SCHEMA \"{schema}\";
         CREATE TABLE store (only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row), format integer NOT NULL,
             owner text NOT NULL, epoch bigint NOT NULL);
         CREATE TABLE watermarks (only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row), marks bytea NOT NULL)
             WITH (fillfactor = 10);
         CREATE TABLE groups (id bigint PRIMARY KEY, block bigint NOT NULL, number bigint NOT NULL, digest bigint NOT NULL,
             row bytea NOT NULL) WITH (fillfactor = 70);
         CREATE TABLE leases (id bigint PRIMARY KEY, lease bytea NOT NULL);
         CREATE TABLE keys (id bigint PRIMARY KEY, key bytea NOT NULL);"
    );
    within(address.limit, "make its tables", async {
        session.client.batch_execute(&format!("BEGIN; {tables}")).await?;
        let insert = "INSERT INTO store (format, owner, epoch) VALUES ($1, $2, 0)";
        session.client.execute(insert, &[&FORMAT, &config.owner]).await?;
        Ok(session.client.batch_execute("COMMIT").await?)
    })
    .await
}

/// Statements that make the table of a block of payloads. Payloads are compressed data already, as far as they can be.
pub(super) fn make_block(block: u64) -> String {
    format!(
        "CREATE TABLE IF NOT EXISTS payload_{block} (number bigint PRIMARY KEY, body bytea NOT NULL); \
         ALTER TABLE payload_{block} ALTER COLUMN body SET STORAGE EXTERNAL"
    )
}

/// Counts this opening. It waits for the transactions of earlier openings, which lock the row until their end.
async fn next_epoch(session: &PostgresSession, address: &DatabaseAddress) -> Result<u64, DatabaseFailure> {
    within(2 * address.limit, "count the opening", async {
        let row = session.client.query_one("UPDATE store SET epoch = epoch + 1 RETURNING epoch", &[]).await?;
        Ok(row.try_get::<_, i64>(0)?.cast_unsigned())
    })
    .await
}

/// All rows of all tables but payloads, and the names of the tables of payloads.
struct StoredRecords {
    groups: Vec<Row>,
    leases: Vec<Row>,
    keys: Vec<Row>,
    watermarks: Option<Row>,
    tables: Vec<Row>,
}

async fn records(session: &PostgresSession) -> Result<StoredRecords, DatabaseFailure> {
    let client = &session.client;
    let tables = "SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema() AND tablename LIKE 'payload\\_%'";
    Ok(StoredRecords {
        groups: client.query("SELECT id, block, number, digest, row FROM groups", &[]).await?,
        leases: client.query("SELECT id, lease FROM leases", &[]).await?,
        keys: client.query("SELECT id, key FROM keys", &[]).await?,
        watermarks: client.query_opt("SELECT marks FROM watermarks", &[]).await?,
        tables: client.query(tables, &[]).await?,
    })
}

/// The records, or what is wrong with them.
fn decode(stored: StoredRecords) -> Result<(Recovered, PayloadIndex, BTreeSet<u64>), String> {
    let StoredRecords { groups, leases, keys, watermarks, tables } = stored;
    let (mut recovered, mut payloads) = (Recovered::default(), PayloadIndex::default());
    for row in groups {
        let bytes: &[u8] = column(&row, 4)?;
        let group: GroupRow = decoded("a group", bytes)?;
        if group.id.0 != unsigned(&row, 0)? {
            return Err(format!("the row of {} is under another id: restore the database", group.id));
        }
        let place = StoredPayload {
            block: unsigned(&row, 1)?,
            number: column(&row, 2)?,
            digest: unsigned(&row, 3)?,
            bytes: group.bytes,
        };
        payloads.insert(group.id, place);
        recovered.rows.push(group);
    }
    for row in leases {
        recovered.leases.push((LeaseId(unsigned(&row, 0)?), decoded("a lease", column(&row, 1)?)?));
    }
    for row in keys {
        let key: &[u8] = column(&row, 1)?;
        let key =
            key.try_into().map_err(|_| format!("a key has {} bytes: restore the database", key.len()))?;
        recovered.keys.push((GroupId(unsigned(&row, 0)?), u128::from_be_bytes(key)));
    }
    if let Some(row) = watermarks {
        recovered.watermarks = decoded("the watermarks", column(&row, 0)?)?;
    }
    let mut blocks = BTreeSet::new();
    for row in tables {
        let name: &str = column(&row, 0)?;
        // A table that another program has made is left alone.
        blocks.extend(name.strip_prefix("payload_").and_then(|block| block.parse::<u64>().ok()));
    }
    Ok((recovered, payloads, blocks))
}

fn column<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a Row, index: usize) -> Result<T, String> {
    row.try_get(index).map_err(|error| format!("a record is damaged: {error}; restore the database"))
}

fn unsigned(row: &Row, index: usize) -> Result<u64, String> {
    column::<i64>(row, index).map(i64::cast_unsigned)
}

fn decoded<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, String> {
    rmp_serde::from_slice(bytes)
        .map_err(|error| format!("the record of {what} is damaged: {error}; restore the database"))
}
