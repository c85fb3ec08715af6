//! A look at a database, for `rlrun doctor`. Invariant: it leaves nothing behind, and does not disturb a process that has the
//! schema open.

use std::time::{Duration, Instant, SystemTime};

use super::schema::{check_server, to_error};
use super::session::{DatabaseFailure, PostgresSession, SessionKind, within};
use super::settings::{DatabaseAddress, check_schema_name};
use super::{PostgresConfig, batch::number};
use crate::BufferError;

/// Bytes of the group that is written and read.
const GROUP_BYTES: usize = 4096;

/// A database that can be used.
#[derive(Clone, Debug)]
pub struct DatabaseCheck {
    /// Hosts, database and schema.
    pub name: String,
    /// Version of the server.
    pub version: String,
    /// Time of one request.
    pub round_trip: Duration,
    /// Time to write a group of 4 KB and to read it again, in a transaction that is rolled back.
    pub write_and_read: Duration,
    /// How far the clock of the server is ahead of the clock here, seconds.
    pub clock_ahead_s: f64,
    /// The owner of the schema; `None`: there is no such schema yet.
    pub owner: Option<String>,
    /// Settings that could be better.
    pub advice: Vec<String>,
}

/// Connects, checks settings and rights, and writes and reads a group.
///
/// # Errors
/// Those of [`open_postgres`](super::open_postgres), but for a schema of another owner and one that is open.
pub fn check_postgres(config: &PostgresConfig) -> Result<DatabaseCheck, BufferError> {
    let address = DatabaseAddress::new(config)?;
    check_schema_name(&config.schema).map_err(|reason| address.setup(reason))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| address.setup(format!("no thread for it: {error}")))?;
    runtime.block_on(check(&address))
}

async fn check(address: &DatabaseAddress) -> Result<DatabaseCheck, BufferError> {
    let failed = |action| move |failure| to_error(address, action, failure);
    let session = PostgresSession::connect(address, SessionKind::Lock, 0).await.map_err(failed("connect"))?;
    let advice = check_server(&session, address).await?;
    let look = within(address.limit, "look at the schema", schema(&session, address));
    let owner = look.await.map_err(failed("look at the schema"))?;
    let (started, local) = (Instant::now(), SystemTime::now());
    let clock = within(address.limit, "read the clock", async {
        let now = "SELECT extract(epoch FROM clock_timestamp())::float8, current_setting('server_version')";
        let row = session.client.query_one(now, &[]).await?;
        Ok((row.try_get::<_, f64>(0)?, row.try_get::<_, String>(1)?))
    });
    let (server_s, version) = clock.await.map_err(failed("read the clock"))?;
    // The statement is prepared first: two round trips, the answer in the middle of the second.
    let elapsed = started.elapsed();
    let local_s = local.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default() + elapsed.mul_f64(0.75);
    let write = Instant::now();
    within(address.limit, "write and read a group", write_and_read(&session))
        .await
        .map_err(failed("write and read a group"))?;
    Ok(DatabaseCheck {
        name: address.name.clone(),
        version,
        round_trip: elapsed / 2,
        write_and_read: write.elapsed(),
        clock_ahead_s: server_s - local_s.as_secs_f64(),
        owner,
        advice,
    })
}

/// The owner of the schema. Refuses a schema that cannot be made or written.
async fn schema(
    session: &PostgresSession,
    address: &DatabaseAddress,
) -> Result<Option<String>, DatabaseFailure> {
    const RIGHTS: &str = "SELECT has_database_privilege(current_database(), 'CREATE'), \
                          (SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = $1), \
                          EXISTS (SELECT FROM pg_tables WHERE schemaname = $1 AND tablename = 'store')";
    let row = session.client.query_one(RIGHTS, &[&address.schema]).await?;
    let (may_make, may_write, is_ours): (bool, Option<bool>, bool) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    let lacks =
        |what: &str| DatabaseFailure::Permanent(format!("the role may not {what}; grant it CREATE there"));
    match (may_write, is_ours) {
        (None, _) if !may_make => Err(lacks("make a schema in the database")),
        (None, _) => Ok(None),
        (Some(false), _) => Err(lacks("write the schema")),
        (Some(true), false) => Err(DatabaseFailure::Permanent(
            "the schema exists and is no buffer of this program; name another schema".to_owned(),
        )),
        (Some(true), true) => {
            let row = session.client.query_one("SELECT owner FROM store", &[]).await?;
            Ok(Some(row.try_get(0)?))
        }
    }
}

async fn write_and_read(session: &PostgresSession) -> Result<(), DatabaseFailure> {
    let client = &session.client;
    let payload = vec![7_u8; GROUP_BYTES];
    client
        .batch_execute("BEGIN; CREATE TEMPORARY TABLE rlrun_check (number bigint, body bytea) ON COMMIT DROP")
        .await?;
    client.execute("INSERT INTO rlrun_check VALUES ($1, $2)", &[&number(1), &payload]).await?;
    let row = client.query_one("SELECT body FROM rlrun_check", &[]).await?;
    let read: Vec<u8> = row.try_get(0)?;
    client.batch_execute("ROLLBACK").await?;
    if read == payload {
        Ok(())
    } else {
        Err(DatabaseFailure::Permanent("it reads other bytes than it wrote".to_owned()))
    }
}
