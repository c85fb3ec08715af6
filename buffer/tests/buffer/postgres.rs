//! The store in PostgreSQL, on a server of its own: the conformance suite, lost connections, crashes and outages of the server,
//! fencing, and everything that an opening refuses. Without the programs of PostgreSQL the tests are skipped with a message.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use buffer::conformance::database::DatabaseServer;
use buffer::conformance::{StoreUnderTest, check_store};
use buffer::database::schema_name;
use buffer::postgres::{PostgresConfig, open_postgres};
use buffer::store::{OpenedStore, Store};
use buffer::{
    AdmitRequest, Buffer, BufferConfig, BufferError, Consumer, Finalized, LeaseId, LeaseRequest, OnStale,
    Producer,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use trajectory::GroupId;

use super::{NOW, SOON, TRAINER, admit, config, generate, group, lease, leased, number, v};

/// A server and its directory.
struct Database {
    server: DatabaseServer,
    _directory: tempfile::TempDir,
}

fn database(options: &[&str]) -> Option<Database> {
    let directory = tempfile::tempdir().unwrap();
    let server = DatabaseServer::start(directory.path(), options)?;
    Some(Database { server, _directory: directory })
}

struct Schema(PostgresConfig);

impl StoreUnderTest for Schema {
    fn open(&self) -> Result<OpenedStore, BufferError> {
        open_postgres(self.0.clone())
    }
}

fn buffer(of: PostgresConfig) -> Buffer {
    Buffer::with_store(config(2, 1), open_postgres(of).unwrap()).unwrap()
}

fn refusal(of: PostgresConfig) -> String {
    match open_postgres(of) {
        Ok(_) => panic!("it must be refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_postgres_store_conforms() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    check_store(|case| Schema(server.config(&schema_name(case))));
}

#[test]
fn an_opening_refuses_what_it_cannot_use() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    let missing = PostgresConfig { create: false, ..server.config("missing") };
    let error = refusal(missing);
    assert!(error.contains("schema missing") && error.contains("--without-journal"), "{error}");

    server.sql("CREATE SCHEMA foreign_schema");
    let error = refusal(server.config("foreign_schema"));
    assert!(error.contains("is no buffer of this program: name another schema"), "{error}");

    drop(open_postgres(server.config("a")).unwrap());
    let other = PostgresConfig { owner: "run 7".to_owned(), ..server.config("a") };
    let error = refusal(other);
    assert!(error.contains("belongs to a test, this is run 7") && error.contains("DROP SCHEMA a"), "{error}");
    server.sql("UPDATE a.store SET format = 99");
    let error = refusal(server.config("a"));
    assert!(error.contains("format 99, and this program reads 1"), "{error}");
    assert_eq!(server.sql("SELECT epoch FROM a.store"), "1", "a refused opening changes nothing");

    let first = open_postgres(server.config("b")).unwrap();
    let error = refusal(server.config("b"));
    assert!(error.contains("is open in another process (connected from a local socket since"), "{error}");
    drop(first);
    open_postgres(server.config("b")).unwrap();

    let error = refusal(PostgresConfig { schema: "B c".to_owned(), ..server.config("b") });
    assert!(error.contains("such as \"rlrun_b_c\""), "{error}");
    server.sql("ALTER ROLE rlrun SET synchronous_commit = off");
    let error = refusal(server.config("b"));
    assert!(error.contains("synchronous_commit is off"), "{error}");
    server.sql("ALTER ROLE rlrun RESET synchronous_commit");
    let error =
        refusal(PostgresConfig { url: server.url(&[]).replace("/postgres", "/none"), ..server.config("b") });
    assert!(error.contains("create the database"), "{error}");
}

#[test]
fn wrong_credentials_are_named_and_the_password_is_not() {
    let Some(Database { server, _directory: directory }) = &database(&[]) else { return };
    server.sql("ALTER ROLE rlrun PASSWORD 'right'");
    let rules = directory.path().join("data/pg_hba.conf");
    std::fs::write(rules, "local all all scram-sha-256\n").unwrap();
    server.reload();
    let with = |password: &str| {
        let mut config = server.config("c");
        config.variables.insert("PGPASSWORD".to_owned(), password.to_owned());
        config
    };
    let error = refusal(with("not-the-word"));
    assert!(error.contains("password authentication failed") && error.contains("PGPASSFILE"), "{error}");
    assert!(!error.contains("not-the-word"), "{error}");
    assert!(!format!("{:?}", with("not-the-word")).contains("not-the-word"));
    open_postgres(with("right")).unwrap();
}

/// Groups that appenders have got an acknowledgement for, while `disturb` runs.
fn append_while(store: &dyn Store, count: u64, disturb: impl FnOnce()) -> Vec<GroupId> {
    const APPENDERS: u64 = 8;
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let append = || {
            let mut acknowledged = Vec::new();
            loop {
                let id = next.fetch_add(1, Ordering::Relaxed);
                if id >= count {
                    return acknowledged;
                }
                match start_append(store, id).recv_timeout(2 * SOON) {
                    Ok(Ok(())) => acknowledged.push(GroupId(id)),
                    Ok(Err(error)) => panic!("{id}: {error}"),
                    Err(error) => panic!("{id}: {error}: {:?}", store.failure()),
                }
            }
        };
        let appenders: Vec<_> = (0..APPENDERS).map(|_| scope.spawn(append)).collect();
        disturb();
        appenders.into_iter().flat_map(|appender| appender.join().unwrap()).collect()
    })
}

fn start_append(store: &dyn Store, id: u64) -> Receiver<Result<(), BufferError>> {
    let (done, pending) = channel();
    let append = buffer::conformance::fixtures::append(
        group(GroupId(id), v(id / 64)),
        Box::new(move |result| drop(done.send(result))),
    );
    store.append(append);
    pending
}

/// Every acknowledged group is recovered and can be read.
fn assert_recovered(of: PostgresConfig, acknowledged: &[GroupId]) {
    let opened = open_postgres(PostgresConfig { wait: SOON, ..of }).unwrap();
    let rows: Vec<GroupId> = opened.recovered.rows.iter().map(|row| row.id).collect();
    let lost: Vec<_> = acknowledged.iter().filter(|id| !rows.contains(id)).collect();
    assert!(lost.is_empty(), "{lost:?} were acknowledged and are lost");
    let read = opened.store.read(acknowledged, false).unwrap();
    assert!(read.iter().zip(acknowledged).all(|(read, id)| **read == group(*id, v(id.0 / 64))));
}

#[test]
fn lost_sessions_are_made_again_and_nothing_is_lost() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    let opened = open_postgres(server.config("lost")).unwrap();
    let acknowledged = append_while(&*opened.store, 2000, || {
        for _ in 0..10 {
            server.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'rlrun-%'",
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    assert_eq!(acknowledged.len(), 2000, "the store continues");
    assert!(opened.store.failure().is_none());
    drop(opened);
    assert_recovered(server.config("lost"), &acknowledged);
}

/// Number of crashes of the server: more with `tests/run --all`.
fn crashes() -> u64 {
    number("RLRUN_DATABASE_KILLS", 3)
}

#[test]
fn crashes_and_stops_of_the_server_are_survived() {
    let Some(Database { mut server, _directory }) = database(&[]) else { return };
    let of = server.config("crash");
    let opened = open_postgres(of.clone()).unwrap();
    let kills = crashes();
    let acknowledged = append_while(&*opened.store, 700 * kills, || {
        for kill in 0..kills {
            std::thread::sleep(Duration::from_millis(kill * 37 % 100));
            match kill % 3 {
                0 => server.crash(),
                1 => server.stop(),
                _ => {
                    server.suspend(true);
                    std::thread::sleep(Duration::from_secs(1));
                    server.suspend(false);
                    continue;
                }
            }
            server.restart();
        }
    });
    assert!(opened.store.failure().is_none());
    drop(opened);
    assert_recovered(of, &acknowledged);
}

/// A primary that never comes back: its synchronous replica is promoted while groups are appended.
#[test]
fn a_failover_to_a_synchronous_replica_loses_nothing() {
    let Some(Database { mut server, _directory }) = database(&[]) else { return };
    let directory = tempfile::tempdir().unwrap();
    let replica = DatabaseServer::replica(&server, directory.path(), "r1");
    server.sql("ALTER SYSTEM SET synchronous_standby_names = 'r1'");
    server.reload();
    let synchronous = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
    let deadline = Instant::now() + SOON;
    while server.sql(synchronous) != "1" {
        assert!(Instant::now() < deadline, "the replica does not follow");
        std::thread::sleep(Duration::from_millis(50));
    }
    let of = PostgresConfig { url: server.url(&[&replica]), ..server.config("failover") };
    let opened = open_postgres(of.clone()).unwrap();
    let acknowledged = append_while(&*opened.store, 1500, || {
        std::thread::sleep(Duration::from_millis(300));
        server.crash();
        std::thread::sleep(Duration::from_millis(300));
        replica.promote();
    });
    assert_eq!(acknowledged.len(), 1500);
    assert!(opened.store.failure().is_none(), "the store continues on the replica");
    drop(opened);
    assert_recovered(of, &acknowledged);
}

/// Calls of the comparison with the journal: more with `tests/run --all`.
fn calls() -> u64 {
    number("RLRUN_DATABASE_CALLS", 1600)
}

/// Random calls of samplers and trainers, and openings, get the same answers from a journal and from a database.
#[test]
fn a_buffer_in_a_database_answers_as_one_in_a_journal() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    // Four worlds differ in what they are set to.
    let per_world = (calls() / 4).min(1000);
    for world in 0..calls().div_ceil(per_world) {
        let directory = tempfile::tempdir().unwrap();
        let setup = BufferConfig {
            on_stale: OnStale::Drop,
            max_uses: 1 + u32::try_from(world % 2).unwrap(),
            dedup: world % 4 > 1,
            ..config(3, 2)
        };
        let of = server.config(&schema_name(&format!("world {world}")));
        let open = || {
            let journal = Buffer::open(directory.path().join("buffer.redb"), setup).unwrap();
            [journal, Buffer::with_store(setup, open_postgres(of.clone()).unwrap()).unwrap()]
        };
        let (mut dice, mut buffers, mut version) = (ChaCha8Rng::seed_from_u64(world), Some(open()), 0);
        for call in 0..per_world {
            let (kind, number) = (dice.next_u32() % 100, u64::from(dice.next_u32()));
            if kind == 0 {
                drop(buffers.take());
                buffers = Some(open());
            }
            if kind < 4 {
                version += 1;
            }
            let answers =
                buffers.as_ref().unwrap().each_ref().map(|buffer| ask(buffer, kind, number, version));
            assert_eq!(answers[0], answers[1], "call {call} of world {world}: {kind} {number} at {version}");
        }
    }
}

/// One call; its answer as text.
fn ask(buffer: &Buffer, kind: u32, number: u64, version: u64) -> String {
    let stats = buffer.stats().unwrap();
    let id = GroupId(number % (stats.next_id.0 + 2));
    let served = v(version.saturating_sub(number % 3));
    let step = LeaseRequest::step(TRAINER, v(version));
    match kind {
        0..4 => answer(buffer.set_version(v(version), false)),
        4..30 => answer(buffer.admit(AdmitRequest { served, limit: 2, hold: None, holder: None }, NOW)),
        30..40 => answer(buffer.claim(id, served)),
        40..65 => answer(buffer.finalize(group(id, served))),
        65..75 => answer(buffer.submit(&(number % 64).to_string(), group(id, served))),
        75..85 => answer(buffer.lease(&step, NOW)),
        85..88 => answer(buffer.lease(&LeaseRequest { step: None, groups: Some(1), ..step }, NOW)),
        88..91 => answer(buffer.release(LeaseId(number % 40))),
        91..94 => answer(buffer.ack(LeaseId(number % 40))),
        94..96 => answer(buffer.ack_through(TRAINER, v(version))),
        96 => answer(buffer.evict(id)),
        97 => answer(buffer.quarantine(id)),
        98 => answer(buffer.set_version(served, true)),
        _ => format!("{:?} {:?}", buffer.stats(), buffer.leases(None)),
    }
}

/// Without times, which differ.
fn answer<T: std::fmt::Debug>(result: Result<T, BufferError>) -> String {
    result.map_or_else(|error| error.to_string(), |answer| format!("{answer:?}"))
}

#[test]
fn a_server_that_stays_away_is_a_named_error() {
    let Some(Database { mut server, _directory }) = database(&[]) else { return };
    let of = PostgresConfig { outage: Duration::from_secs(2), ..server.config("away") };
    let opened = open_postgres(of.clone()).unwrap();
    start_append(&*opened.store, 0).recv_timeout(SOON).unwrap().unwrap();
    server.stop();
    let late = start_append(&*opened.store, 1).recv_timeout(SOON);
    assert!(!matches!(late, Ok(Ok(()))), "{late:?}");
    let error = opened.store.failure().expect("the store has failed").to_string();
    assert!(error.contains("for 2 s") || error.contains("within 2 s"), "{error}");
    assert!(error.contains("schema away") && error.contains("then resume the run"), "{error}");
    assert!(matches!(start_append(&*opened.store, 2).recv_timeout(SOON), Ok(Err(_))));
    drop(opened);
    server.restart();
    assert_recovered(of, &[GroupId(0)]);
}

#[test]
fn an_absent_synchronous_standby_is_a_named_error() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    let of = PostgresConfig { outage: Duration::from_secs(2), ..server.config("standby") };
    let opened = open_postgres(of).unwrap();
    server.sql("ALTER SYSTEM SET synchronous_standby_names = 'r1'");
    server.reload();
    // Sessions read the setting within moments; until then appends are acknowledged.
    let late = (0..1000).map(|id| start_append(&*opened.store, id).recv_timeout(SOON));
    let refused = late.into_iter().find(|late| !matches!(late, Ok(Ok(()))));
    assert!(refused.is_some(), "commits do not wait for the standby");
    let error = opened.store.failure().expect("the store has failed").to_string();
    assert!(
        error.contains("synchronous_standby_names is 'r1' and 0 synchronous standbys are connected"),
        "{error}"
    );
}

#[test]
fn a_later_opening_deposes_an_earlier_one() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    let opened = open_postgres(server.config("two")).unwrap();
    start_append(&*opened.store, 0).recv_timeout(SOON).unwrap().unwrap();
    // What an opening on another machine does once the server has ended the session of the lock.
    server.sql("UPDATE two.store SET epoch = epoch + 1");
    let late = start_append(&*opened.store, 1).recv_timeout(SOON);
    assert!(!matches!(late, Ok(Ok(()))), "a deposed store acknowledged a write");
    let failure = opened.store.failure().expect("a deposed store says so");
    assert!(matches!(failure, BufferError::Deposed { opening: 1, now: 2, .. }), "{failure}");
    assert_eq!(server.sql("SELECT count(*) FROM two.groups"), "1");
    assert!(matches!(
        start_append(&*opened.store, 2).recv_timeout(SOON),
        Ok(Err(BufferError::Deposed { .. }))
    ));
    let buffer = buffer(server.config("three"));
    server.sql("UPDATE three.store SET epoch = epoch + 1");
    assert!(matches!(buffer.confirm(), Err(BufferError::Deposed { .. })), "its trainer must not publish");
    assert!(lease(&buffer, 0, NOW).is_err());
}

#[test]
fn an_idle_store_learns_that_it_was_deposed() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    let opened = open_postgres(server.config("idle")).unwrap();
    server.sql("UPDATE idle.store SET epoch = epoch + 1");
    let deadline = Instant::now() + SOON;
    while opened.store.failure().is_none() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(matches!(opened.store.failure(), Some(BufferError::Deposed { now: 2, .. })));
}

#[test]
fn tables_of_payloads_are_dropped_with_their_last_group() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    let of = server.config("blocks");
    let tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'blocks' AND tablename LIKE 'payload%'";
    let buffer = buffer(of.clone());
    for step in 0..200 {
        buffer.set_version(v(step), false).unwrap();
        generate(&buffer, v(step), 2);
        leased(&buffer, step);
        buffer.ack_through(TRAINER, v(step + 1)).unwrap();
    }
    assert_eq!(server.sql(tables), "1", "those of blocks 0 to 2 are gone");
    drop(buffer);
    let buffer = self::buffer(of);
    assert_eq!(generate(&buffer, v(200), 2).len(), 2);
    let request = LeaseRequest::step(TRAINER, v(200));
    assert_eq!(buffer.lease(&request, NOW).unwrap().groups.len(), 2);
}

#[test]
fn a_buffer_continues_where_another_process_left_it() {
    let Some(Database { server, .. }) = &database(&[]) else { return };
    let first = buffer(server.config("run"));
    let ids = generate(&first, v(0), 4);
    let batch = leased(&first, 0);
    drop(first);
    let second = buffer(server.config("run"));
    assert_eq!(leased(&second, 0), batch, "a repeated request gets the same groups");
    assert_eq!(second.finalize(group(ids[3], v(0))).unwrap(), Finalized::Duplicate);
    assert!(admit(&second, v(0), 1).is_empty(), "all slots are taken");
    second.ack_through(TRAINER, v(1)).unwrap();
    assert_eq!(second.stats().unwrap().finalized, 2);
}
