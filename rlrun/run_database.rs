//! The PostgreSQL database of a run or of a served buffer, in a program with the feature `postgres`.
//!
//! Invariant: a schema belongs to one run, which has its mark in its directory. A password comes from the environment and is
//! not shown.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use buffer::BufferError;
use buffer::database::schema_name;
use buffer::http::StorageNotice;
use buffer::postgres::{DEFAULT_OUTAGE, DatabaseCheck, PostgresConfig, check_postgres, open_postgres};
use buffer::store::OpenedStore;
use ring::rand::{SecureRandom, SystemRandom};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::words::StoreWord;
use crate::run_buffer::run_database;

/// The file of the mark in the directory of a run.
const MARK: &str = "database.id";
/// Longest mark, bytes.
const MAX_MARK: u64 = 128;
/// How long a run waits for another process that has its schema open: one that was killed on another machine loses it sooner.
const WAIT: Duration = Duration::from_secs(10);
/// The owner of a schema that servers share, one of them active.
const SERVED: &str = "a served buffer";

/// A database that a recipe or a command names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedDatabase<'a> {
    /// Its URL, without a password.
    pub(crate) url: &'a str,
    /// The schema; by default one with the name of the directory.
    pub(crate) schema: Option<&'a str>,
    /// The directory of the run or of the server.
    pub(crate) directory: &'a Path,
    /// The variables of the process.
    pub(crate) variables: &'a BTreeMap<String, String>,
}

impl NamedDatabase<'_> {
    /// The store of a run; `create`: a missing schema is made.
    ///
    /// # Errors
    /// A mark that cannot be written; those of [`open_postgres`].
    pub(crate) fn of_run(&self, create: bool, notice: StorageNotice) -> Result<OpenedStore, Failure> {
        let (mark, schema) = self.mark()?;
        let config = self.connection(schema, format!("run {mark}"), notice);
        Ok(open_postgres(PostgresConfig { create, wait: WAIT, ..config })?)
    }

    /// The configuration of a served buffer, whose standbys open the same schema. An opening does not wait for another server.
    ///
    /// # Errors
    /// A directory without a name.
    pub(crate) fn served(&self, notice: StorageNotice) -> Result<PostgresConfig, Failure> {
        let name = || self.name().map(|name| schema_name(&name));
        let schema = self.schema.map_or_else(name, |schema| Ok(schema.to_owned()))?;
        Ok(self.connection(schema, SERVED.to_owned(), notice))
    }

    fn connection(&self, schema: String, owner: String, notice: StorageNotice) -> PostgresConfig {
        const WANTED: [&str; 2] = ["HOME", "USER"];
        let of_database = |name: &&String| name.starts_with("PG") || WANTED.contains(&name.as_str());
        let variables = self.variables.iter().filter(|(name, _)| of_database(name));
        PostgresConfig {
            url: self.url.to_owned(),
            schema,
            owner,
            create: true,
            variables: variables.map(|(name, value)| (name.clone(), value.clone())).collect(),
            outage: DEFAULT_OUTAGE,
            wait: Duration::ZERO,
            notice: Some(notice),
        }
    }

    /// The last part of the path of the directory.
    fn name(&self) -> Result<String, Failure> {
        let directory = std::fs::canonicalize(self.directory).map_err(self.failed("find"))?;
        let name = directory.file_name().map(|name| name.to_string_lossy().into_owned());
        name.ok_or_else(|| {
            Failure::Argument(format!("{} has no name for a schema: name one", self.directory.display()))
        })
    }

    /// The mark of the run and its schema, made the first time. A directory that was renamed keeps its schema.
    fn mark(&self) -> Result<(String, String), Failure> {
        let path = self.directory.join(MARK);
        let name = || self.name().map(|name| schema_name(&name));
        match std::fs::File::open(&path) {
            Ok(file) => {
                let mut text = String::new();
                file.take(MAX_MARK).read_to_string(&mut text).map_err(self.failed("read database.id in"))?;
                let mut words = text.split_whitespace().map(str::to_owned);
                let Some((mark, schema)) = words.next().zip(words.next()) else {
                    let what = "it must have the mark of the run and the name of its schema: restore it";
                    return Err(Failure::Argument(format!("{} is damaged: {what}", path.display())));
                };
                return Ok((mark, self.schema.map_or(schema, str::to_owned)));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(self.failed("read database.id in")(error)),
        }
        let mut random = [0; 8];
        let failed =
            |_| self.failed("make database.id in")(io::Error::other("the system has no random numbers"));
        SystemRandom::new().fill(&mut random).map_err(failed)?;
        let mark = format!("{:016x}", u64::from_le_bytes(random));
        let schema = self.schema.map_or_else(name, |schema| Ok(schema.to_owned()))?;
        model::atomic::file(&path, |partial| {
            std::fs::write(partial, format!("{mark} {schema}\n"))
                .map_err(|source| model::ModelError::Write { path: path.clone(), source })
        })?;
        Ok((mark, schema))
    }

    fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> Failure {
        let directory = self.directory.display().to_string();
        move |source| Failure::System { what: format!("{action} {directory}"), source }
    }
}

/// The database of a recipe, or why it cannot be used.
#[derive(Debug)]
pub(crate) struct DatabaseFindings(Result<DatabaseCheck, String>);

impl DatabaseFindings {
    /// Looks at the database; `None` for a recipe without one.
    pub(crate) fn of(recipe: &Recipe, variables: &BTreeMap<String, String>) -> Option<Self> {
        if recipe.buffer.store != StoreWord::Postgres {
            return None;
        }
        // The run directory is not there yet; its name is the recipe's.
        let directory = Path::new(&recipe.name);
        let named = run_database(recipe, directory, variables);
        let schema = named.schema.map_or_else(|| schema_name(&recipe.name), str::to_owned);
        let check = named.connection(schema, String::new(), Arc::new(|_: &str| ()));
        Some(Self(check_postgres(&check).map_err(|error| error.to_string())))
    }

    /// For `--json`.
    pub(crate) fn json(&self) -> Value {
        match &self.0 {
            Err(why) => json!({ "usable": false, "why": why }),
            Ok(found) => json!({
                "usable": true,
                "name": found.name,
                "version": found.version,
                "round_trip_ms": 1e3 * found.round_trip.as_secs_f64(),
                "write_and_read_ms": 1e3 * found.write_and_read.as_secs_f64(),
                "clock_ahead_s": found.clock_ahead_s,
                "owner": found.owner,
                "advice": found.advice,
            }),
        }
    }
}

impl fmt::Display for DatabaseFindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = match &self.0 {
            Err(why) => return write!(f, "  not usable: {why}"),
            Ok(found) => found,
        };
        writeln!(f, "  {:10}  {}, version {}", "place", found.name, found.version)?;
        let schema = match &found.owner {
            Some(owner) => format!("there, of {owner}"),
            None => "not there yet; the run makes it".to_owned(),
        };
        writeln!(f, "  {:10}  {schema}", "schema")?;
        let [trip, write] = [found.round_trip, found.write_and_read]
            .map(|time| format!("{:.1} ms", 1e3 * time.as_secs_f64()));
        writeln!(f, "  {:10}  {trip} for a request, {write} to write and read a group of 4 KB", "time")?;
        write!(f, "  {:10}  {:+.2} s against this machine", "clock", found.clock_ahead_s)?;
        found.advice.iter().try_for_each(|advice| write!(f, "\n  {:10}  {advice}", "advice"))
    }
}

/// Whether another process has the store open, so that this one can be its standby.
pub(crate) fn is_in_use(error: &BufferError) -> bool {
    matches!(error, BufferError::StoreInUse { .. })
}
