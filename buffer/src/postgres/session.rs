//! Sessions of the database. Invariant: every request has a deadline of our own; a session that missed one is not used again.

use std::error::Error;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Statement};

use super::batch::number;
use super::settings::DatabaseAddress;

/// Deadline of a connection with its login.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest deadline of a request: a transaction up to its `COMMIT`, the `COMMIT`, a read.
pub(super) const STATEMENTS: Duration = Duration::from_secs(10);
/// The server ends a session whose client is silent within a transaction for longer than this; it then blocks no other.
const IDLE_IN_TRANSACTION_MS: u32 = 10_000;
/// The server ends the session of the lock if its client is silent for longer than this, milliseconds, so a process that is
/// stopped or out of reach loses the lock.
const LOCK_IDLE_MS: u32 = 3_000;
/// Prefix of the names of all sessions.
const SESSION_NAME: &str = "rlrun";

/// Why the database did not do something.
#[derive(Clone, Debug)]
pub(super) enum DatabaseFailure {
    /// The same may succeed in a new session: a lost connection, a server that starts or stops.
    Transient(String),
    /// The same will fail again.
    Permanent(String),
    /// Another opening has taken over; `now` is its number.
    Deposed { now: u64 },
}

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionKind {
    Lock,
    Writer,
    Reader,
}

/// A session. Dropping it closes the connection.
pub(super) struct PostgresSession {
    pub(super) client: Client,
    /// Deadline of a request.
    limit: Duration,
    connection: AbortOnDrop,
}

/// A session with the statements of a writer.
pub(super) struct WriterSession {
    pub(super) client: Client,
    pub(super) statements: WriterStatements,
    /// Deadline of a request.
    limit: Duration,
    _connection: AbortOnDrop,
}

struct AbortOnDrop(JoinHandle<()>);

pub(super) struct WriterStatements {
    fence: Statement,
    epoch: Statement,
    pub(super) put_groups: Statement,
    pub(super) put_keys: Statement,
    pub(super) update_rows: Statement,
    pub(super) forget: Statement,
    pub(super) put_leases: Statement,
    pub(super) remove_leases: Statement,
    pub(super) remove_keys: Statement,
    pub(super) remove_keys_below: Statement,
    pub(super) put_watermarks: Statement,
}

impl PostgresSession {
    /// Connects to the first host that accepts writes. `epoch` is part of its name, by which a later opening ends it.
    pub(super) async fn connect(
        address: &DatabaseAddress,
        kind: SessionKind,
        epoch: u64,
    ) -> Result<Self, DatabaseFailure> {
        let mut config = address.config.clone();
        config.application_name(session_name(address, kind, epoch));
        let connecting = async {
            let (client, connection) = config.connect(address.tls.clone()).await?;
            // It ends with the client; its failure is that of the next request.
            let connection = AbortOnDrop(tokio::spawn(async { drop(connection.await) }));
            let session = Self { client, limit: address.limit, connection };
            session.client.batch_execute(&settings(address, kind)).await?;
            Ok(session)
        };
        within(CONNECT, "connect", connecting).await
    }

    /// Ends other sessions of this kind and epoch: those that this process has lost, which may still block this one.
    pub(super) async fn end_lost(
        &self,
        address: &DatabaseAddress,
        kind: SessionKind,
        epoch: u64,
    ) -> Result<(), DatabaseFailure> {
        self.end_others(&session_name(address, kind, epoch)).await
    }

    /// Ends all sessions of earlier openings of the schema.
    pub(super) async fn end_earlier(&self, address: &DatabaseAddress) -> Result<(), DatabaseFailure> {
        self.end_others(&format!("{SESSION_NAME}-{:016x}-%", address.lock.cast_unsigned())).await
    }

    /// A role may end its own sessions; those of another role are left to their deadlines.
    async fn end_others(&self, name: &str) -> Result<(), DatabaseFailure> {
        const END: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                           WHERE application_name LIKE $1 AND usename = current_user AND pid <> pg_backend_pid()";
        within(self.limit, "end lost sessions", async {
            self.client.query(END, &[&name]).await?;
            Ok(())
        })
        .await
    }

    /// Names the session of the lock, so that a later opening can end it.
    pub(super) async fn name(&self, address: &DatabaseAddress, epoch: u64) -> Result<(), DatabaseFailure> {
        let name = session_name(address, SessionKind::Lock, epoch);
        let set = format!("SET application_name = '{name}'");
        within(self.limit, "name the session", async { Ok(self.client.batch_execute(&set).await?) }).await
    }

    /// The number of the newest opening.
    pub(super) async fn epoch(&self) -> Result<u64, DatabaseFailure> {
        within(self.limit, "read the epoch", async {
            let row = self.client.query_one("SELECT epoch FROM store", &[]).await?;
            Ok(row.try_get::<_, i64>(0)?.cast_unsigned())
        })
        .await
    }

    /// Whether this session has the lock of the schema now.
    pub(super) async fn try_lock(&self, address: &DatabaseAddress) -> Result<bool, DatabaseFailure> {
        within(self.limit, "take the lock of the schema", async {
            let row = self.client.query_one("SELECT pg_try_advisory_lock($1)", &[&address.lock]).await?;
            Ok(row.try_get(0)?)
        })
        .await
    }

    /// Prepares it for writing.
    pub(super) async fn into_writer(self) -> Result<WriterSession, DatabaseFailure> {
        let Self { client, limit, connection } = self;
        let prepare = WriterStatements::prepare(&client);
        let statements = within(limit, "prepare statements", prepare).await?;
        Ok(WriterSession { client, statements, limit, _connection: connection })
    }
}

impl WriterSession {
    /// Begins a transaction that no later opening precedes: it locks the row of the epoch until its end.
    pub(super) async fn begin(&self, epoch: u64) -> Result<(), DatabaseFailure> {
        let parameters = [&number(epoch) as &(dyn tokio_postgres::types::ToSql + Sync)];
        // Both are sent together; the first is sent first.
        let begin = self.client.batch_execute("BEGIN");
        let fence = self.client.query(&self.statements.fence, &parameters);
        let ((), fence) = futures_util::future::try_join(begin, fence).await?;
        if !fence.is_empty() {
            return Ok(());
        }
        let row = self.client.query_one(&self.statements.epoch, &[]).await?;
        Err(DatabaseFailure::Deposed { now: row.try_get::<_, i64>(0)?.cast_unsigned() })
    }

    pub(super) async fn commit(&self) -> Result<(), DatabaseFailure> {
        within(self.limit, "COMMIT", async { Ok(self.client.batch_execute("COMMIT").await?) }).await
    }

    /// A transaction of `statements` alone.
    pub(super) async fn transaction(&self, epoch: u64, statements: &str) -> Result<(), DatabaseFailure> {
        let run = async {
            self.begin(epoch).await?;
            Ok(self.client.batch_execute(statements).await?)
        };
        match within(self.limit, "change a table", run).await {
            Ok(()) => self.commit().await,
            Err(failure) => {
                // The failure is reported; a session that cannot roll back fails at its next use.
                let _ = within(self.limit, "ROLLBACK", async {
                    Ok(self.client.batch_execute("ROLLBACK").await?)
                })
                .await;
                Err(failure)
            }
        }
    }
}

impl WriterStatements {
    async fn prepare(client: &Client) -> Result<Self, DatabaseFailure> {
        Ok(Self {
            fence: client.prepare("SELECT 1 FROM store WHERE epoch = $1 FOR SHARE").await?,
            epoch: client.prepare("SELECT epoch FROM store").await?,
            put_groups: client
                .prepare(
                    "INSERT INTO groups (id, block, number, digest, row) \
                     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[]) \
                     ON CONFLICT (id) DO UPDATE SET block = excluded.block, number = excluded.number, \
                     digest = excluded.digest, row = excluded.row",
                )
                .await?,
            put_keys: client
                .prepare(
                    "INSERT INTO keys (id, key) SELECT * FROM unnest($1::bigint[], $2::bytea[]) \
                     ON CONFLICT (id) DO UPDATE SET key = excluded.key",
                )
                .await?,
            update_rows: client
                .prepare(
                    "UPDATE groups SET row = new.row FROM unnest($1::bigint[], $2::bytea[]) AS new (id, row) \
                     WHERE groups.id = new.id",
                )
                .await?,
            forget: client.prepare("DELETE FROM groups WHERE id = ANY($1::bigint[])").await?,
            put_leases: client
                .prepare(
                    "INSERT INTO leases (id, lease) SELECT * FROM unnest($1::bigint[], $2::bytea[]) \
                     ON CONFLICT (id) DO UPDATE SET lease = excluded.lease",
                )
                .await?,
            remove_leases: client.prepare("DELETE FROM leases WHERE id = ANY($1::bigint[])").await?,
            remove_keys: client.prepare("DELETE FROM keys WHERE id = ANY($1::bigint[])").await?,
            remove_keys_below: client.prepare("DELETE FROM keys WHERE id < $1").await?,
            put_watermarks: client
                .prepare(
                    "INSERT INTO watermarks (marks) VALUES ($1) \
                     ON CONFLICT (only_row) DO UPDATE SET marks = excluded.marks",
                )
                .await?,
        })
    }
}

impl From<tokio_postgres::Error> for DatabaseFailure {
    fn from(error: tokio_postgres::Error) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !text.contains(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
            source = cause.source();
        }
        let Some(code) = error.code() else { return Self::Transient(text) };
        if let Some(remedy) = remedy(code) {
            return Self::Permanent(format!("{text}; {remedy}"));
        }
        if is_transient(code) { Self::Transient(text) } else { Self::Permanent(text) }
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What helps against errors of the server that a user can do something about.
fn remedy(code: &SqlState) -> Option<&'static str> {
    match code.code() {
        "28000" | "28P01" => {
            Some("see user and password (PGUSER, PGPASSWORD, PGPASSFILE) and pg_hba.conf of the server")
        }
        "3D000" => Some("create the database, or name another one in the URL"),
        "42501" => Some("grant the role CREATE on the database, or let it own the schema"),
        "53100" => Some("free disk space at the database server, then resume the run"),
        _ => None,
    }
}

/// Whether a new session may do better: the classes of connections, rollbacks and operator intervention, a full server, a server
/// that only reads, and locks that were not free in time.
fn is_transient(code: &SqlState) -> bool {
    let code = code.code();
    ["08", "40", "57"].iter().any(|class| code.starts_with(class))
        || ["25006", "25P02", "25P03", "53300", "55P03"].contains(&code)
}

/// Runs `request` within `limit`.
pub(super) async fn within<T>(
    limit: Duration,
    action: &str,
    request: impl Future<Output = Result<T, DatabaseFailure>>,
) -> Result<T, DatabaseFailure> {
    tokio::time::timeout(limit, request).await.unwrap_or_else(|_| {
        Err(DatabaseFailure::Transient(format!("{action} was not answered within {} s", limit.as_secs())))
    })
}

fn session_name(address: &DatabaseAddress, kind: SessionKind, epoch: u64) -> String {
    let lock = address.lock.cast_unsigned();
    match kind {
        // A process that waits for the lock has no epoch, and is not ended by the one that has it.
        SessionKind::Lock if epoch == 0 => format!("{SESSION_NAME}-waiting-{lock:016x}"),
        SessionKind::Lock => format!("{SESSION_NAME}-{lock:016x}-{epoch}-lock"),
        SessionKind::Writer => format!("{SESSION_NAME}-{lock:016x}-{epoch}-writer"),
        SessionKind::Reader => format!("{SESSION_NAME}-{lock:016x}-{epoch}-reader"),
    }
}

/// The settings of a session. The server finds a client that is gone by keepalives, by what it does not acknowledge, and for the
/// lock by its silence.
fn settings(address: &DatabaseAddress, kind: SessionKind) -> String {
    let schema = &address.schema;
    let mut settings = format!(
        "SET search_path = \"{schema}\"; SET jit = off; SET idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_MS}; \
         SET tcp_keepalives_idle = 2; SET tcp_keepalives_interval = 1; SET tcp_keepalives_count = 3; \
         SET tcp_user_timeout = 5000"
    );
    if kind == SessionKind::Lock {
        settings.push_str(&format!("; SET idle_session_timeout = {LOCK_IDLE_MS}"));
    }
    settings
}
