//! Where the database is: the URL, then the variables of libpq, then defaults. Invariant: a password comes from a variable or
//! from the password file and is never shown; a connection over a network is encrypted and the server verified unless
//! `sslmode=disable` says otherwise.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use super::PostgresConfig;
use super::session::STATEMENTS;
use super::tls::DatabaseTls;
use crate::BufferError;
use crate::database::{MAX_SCHEMA, has_password, schema_name};

/// Deadline of a connection to one host.
const CONNECT_ONE: Duration = Duration::from_secs(2);
/// Longest silence of a server before its connection counts as lost.
const SILENCE: Duration = Duration::from_secs(5);
/// Largest password file, bytes.
const MAX_PASSWORD_FILE_BYTES: u64 = 1 << 20;

/// How to connect, without a session yet.
#[derive(Clone)]
pub(super) struct DatabaseAddress {
    /// Hosts, database and schema, for messages.
    pub(super) name: String,
    pub(super) schema: String,
    /// The advisory lock of the schema.
    pub(super) lock: i64,
    pub(super) config: Config,
    pub(super) tls: DatabaseTls,
    /// Deadline of a request.
    pub(super) limit: Duration,
}

/// A schema has a name that needs no quotes, and that PostgreSQL does not use itself.
pub(super) fn check_schema_name(name: &str) -> Result<(), String> {
    let first = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let plain = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let reserved = name.starts_with("pg_") || ["public", "information_schema"].contains(&name);
    if first && plain && !reserved && name.len() <= MAX_SCHEMA {
        return Ok(());
    }
    Err(format!(
        "{name:?} is no name for its schema: use up to {MAX_SCHEMA} lower-case letters, digits and underscores, a letter \
         first, such as {:?}",
        schema_name(name)
    ))
}

impl DatabaseAddress {
    /// # Errors
    /// [`BufferError::StoreSetup`] for a URL or variables that cannot be used.
    pub(super) fn new(given: &PostgresConfig) -> Result<Self, BufferError> {
        let PostgresConfig { url, schema, variables, outage, .. } = given;
        let unusable = |reason: String| BufferError::StoreSetup {
            store: format!("PostgreSQL, schema {schema}"),
            reason,
        };
        if has_password(url) {
            let reason = "its URL has a password, which would be shown with it: take it out, and set PGPASSWORD or PGPASSFILE";
            return Err(unusable(reason.to_owned()));
        }
        let (url, own) = without_tls_words(url).map_err(unusable)?;
        let mut config: Config = url.parse().map_err(|error| {
            unusable(format!(
                "its URL cannot be read: {}; write postgres://user@host:5432/database",
                chain(&error)
            ))
        })?;
        complete(&mut config, variables).map_err(unusable)?;
        let setting = |word: &str, variable: &str| own.get(word).or_else(|| variables.get(variable)).cloned();
        let mode = setting("sslmode", "PGSSLMODE");
        config.ssl_mode(ssl_mode(mode.as_deref(), &config).map_err(unusable)?);
        let roots =
            setting("sslrootcert", "PGSSLROOTCERT").filter(|roots| roots != "system").map(PathBuf::from);
        let tls = DatabaseTls::new(roots.as_deref()).map_err(unusable)?;
        config
            .target_session_attrs(TargetSessionAttrs::ReadWrite)
            .connect_timeout(CONNECT_ONE)
            .keepalives_idle(SILENCE / 2)
            .keepalives_interval(Duration::from_secs(1))
            .keepalives_retries(3)
            .tcp_user_timeout(SILENCE);
        let name = format!("{}, schema {schema}", place(&config));
        Ok(Self {
            name,
            schema: schema.clone(),
            lock: lock_of(schema),
            config,
            tls,
            limit: STATEMENTS.min(*outage),
        })
    }

    pub(super) fn setup(&self, reason: String) -> BufferError {
        BufferError::StoreSetup { store: self.name.clone(), reason }
    }
}

/// The URL without the words of TLS, which the client library knows in part only, and those words.
fn without_tls_words(url: &str) -> Result<(String, BTreeMap<&str, String>), String> {
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Err(
            "its URL does not begin with postgres://: write postgres://user@host:5432/database".to_owned()
        );
    }
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let (own, rest): (Vec<&str>, Vec<&str>) =
        pairs.partition(|pair| pair.starts_with("sslmode=") || pair.starts_with("sslrootcert="));
    let own = own.into_iter().filter_map(|pair| pair.split_once('='));
    let own = own.map(|(word, value)| (word, value.replace("%2F", "/"))).collect();
    let url = if rest.is_empty() { address.to_owned() } else { format!("{address}?{}", rest.join("&")) };
    Ok((url, own))
}

/// Adds what the URL does not say from the variables.
fn complete(config: &mut Config, variables: &BTreeMap<String, String>) -> Result<(), String> {
    let given = |name: &str| variables.get(name).filter(|value| !value.is_empty());
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        let hosts = given("PGHOST").map_or("/var/run/postgresql", String::as_str);
        for host in hosts.split(',') {
            config.host(host);
        }
    }
    if config.get_ports().is_empty() {
        for port in given("PGPORT").map_or("5432", String::as_str).split(',') {
            config.port(port.parse().map_err(|_| format!("PGPORT is {port:?}, which is no port"))?);
        }
    }
    if let (None, Some(user)) = (config.get_user(), given("PGUSER").or_else(|| given("USER"))) {
        config.user(user);
    }
    let user = config.get_user().ok_or("it has no user: write it into the URL, or set PGUSER")?.to_owned();
    if config.get_dbname().is_none() {
        let name = given("PGDATABASE").unwrap_or(&user).clone();
        config.dbname(name);
    }
    let password = match given("PGPASSWORD") {
        Some(password) => Some(password.clone()),
        None => from_password_file(config, variables)?,
    };
    if let Some(password) = password {
        config.password(password);
    }
    Ok(())
}

/// The password in the file of libpq for the first host of `config`: lines `host:port:database:user:password`.
fn from_password_file(
    config: &Config,
    variables: &BTreeMap<String, String>,
) -> Result<Option<String>, String> {
    let (path, named) = match (variables.get("PGPASSFILE"), variables.get("HOME")) {
        (Some(path), _) => (PathBuf::from(path), true),
        (None, Some(home)) => (PathBuf::from(home).join(".pgpass"), false),
        (None, None) => return Ok(None),
    };
    let length = match std::fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(_) if !named => return Ok(None),
        Err(error) => return Err(format!("the password file {}: {error}", path.display())),
    };
    if length > MAX_PASSWORD_FILE_BYTES {
        return Err(format!(
            "the password file {} has {length} bytes, more than {MAX_PASSWORD_FILE_BYTES}",
            path.display()
        ));
    }
    let text = std::fs::read_to_string(&path)
        .map_err(|error| format!("the password file {}: {error}", path.display()))?;
    let host = config.get_hosts().first().map_or_else(|| "localhost".to_owned(), host_name);
    let port = config.get_ports().first().map_or_else(|| "5432".to_owned(), u16::to_string);
    let (database, user) = (config.get_dbname().unwrap_or_default(), config.get_user().unwrap_or_default());
    let wanted = [&host[..], &port[..], database, user];
    let found = text.lines().filter(|line| !line.starts_with('#')).map(fields).find(|fields| {
        fields.len() == 5 && fields.iter().zip(wanted).all(|(field, wanted)| field == "*" || field == wanted)
    });
    Ok(found.and_then(|mut fields| fields.pop()))
}

/// The fields of a line of the password file, where a backslash makes the next character a plain one.
fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut characters) = (vec![String::new()], line.chars());
    while let Some(character) = characters.next() {
        let plain = if character == '\\' { characters.next() } else { None };
        match (plain, character) {
            (None, ':') if fields.len() < 5 => fields.push(String::new()),
            (plain, character) => {
                if let Some(field) = fields.last_mut() {
                    field.push(plain.unwrap_or(character));
                }
            }
        }
    }
    fields
}

/// Without a word, connections within a machine are plain and all others encrypted.
fn ssl_mode(word: Option<&str>, config: &Config) -> Result<SslMode, String> {
    match word {
        Some("disable") => Ok(SslMode::Disable),
        Some("require" | "verify-ca" | "verify-full") => Ok(SslMode::Require),
        None if config.get_hosts().iter().all(is_local) => Ok(SslMode::Disable),
        None => Ok(SslMode::Require),
        Some(other) => Err(format!(
            "sslmode {other:?} leaves open whether the connection is encrypted: use \"verify-full\", or \"disable\" in a network \
             that is safe"
        )),
    }
}

fn is_local(host: &Host) -> bool {
    match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => {
            name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        }
    }
}

fn host_name(host: &Host) -> String {
    match host {
        Host::Unix(path) => path.display().to_string(),
        Host::Tcp(name) => name.clone(),
    }
}

/// Hosts and database, without user and password.
fn place(config: &Config) -> String {
    let hosts: Vec<String> = config.get_hosts().iter().map(host_name).collect();
    let ports: Vec<String> = config.get_ports().iter().map(u16::to_string).collect();
    let database = config.get_dbname().unwrap_or_default();
    format!("PostgreSQL at {} port {}, database {database}", hosts.join(","), ports.join(","))
}

/// The number of the advisory lock: half of a digest of the name, so schemas of one database have different ones.
fn lock_of(schema: &str) -> i64 {
    let digest = blake3::hash(schema.as_bytes());
    digest.as_bytes().first_chunk().map_or(0, |bytes| i64::from_le_bytes(*bytes))
}

fn chain(error: &tokio_postgres::Error) -> String {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}"));
    format!("{error}{}", cause.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(url: &str, variables: &[(&str, &str)]) -> Result<DatabaseAddress, BufferError> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        DatabaseAddress::new(&PostgresConfig {
            url: url.to_owned(),
            schema: "rlrun_test".to_owned(),
            owner: String::new(),
            create: true,
            variables: variables.collect(),
            outage: super::super::DEFAULT_OUTAGE,
            wait: Duration::ZERO,
            notice: None,
        })
    }

    #[test]
    fn a_url_comes_before_variables_and_these_before_defaults() {
        let variables = [("PGHOST", "b"), ("PGPORT", "7"), ("PGUSER", "u"), ("PGDATABASE", "d")];
        let url = address("postgres://v@a:5/c", &variables).unwrap();
        assert_eq!(place(&url.config), "PostgreSQL at a port 5, database c");
        assert_eq!(url.config.get_user(), Some("v"));
        let variable = address("postgres://", &variables).unwrap();
        assert_eq!(place(&variable.config), "PostgreSQL at b port 7, database d");
        let default = address("postgres://", &[("USER", "me")]).unwrap();
        assert_eq!(place(&default.config), "PostgreSQL at /var/run/postgresql port 5432, database me");
        assert_eq!(default.config.get_ssl_mode(), SslMode::Disable);
    }

    #[test]
    fn a_password_in_a_url_is_refused_and_not_shown() {
        for url in ["postgres://u:secret@h/d", "postgres://u@h/d?password=secret"] {
            let error = address(url, &[]).err().unwrap().to_string();
            assert!(error.contains("PGPASSFILE") && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn the_password_file_has_the_password_of_the_first_line_that_fits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pgpass");
        std::fs::write(&path, "# c\nother:*:*:*:no\nh:5432:d:u:a\\:b\\\\c\n*:*:*:*:last\n").unwrap();
        let variables = [("PGPASSFILE", path.to_str().unwrap())];
        let found = |url: &str| address(url, &variables).unwrap().config.get_password().map(<[u8]>::to_vec);
        assert_eq!(found("postgres://u@h/d").as_deref(), Some(&b"a:b\\c"[..]));
        assert_eq!(found("postgres://u@g/d").as_deref(), Some(&b"last"[..]));
        let missing = [("PGPASSFILE", "/nowhere/pgpass")];
        let error = address("postgres://u@h/d", &missing).err().unwrap().to_string();
        assert!(error.contains("/nowhere/pgpass"), "{error}");
    }

    #[test]
    fn networks_are_encrypted_unless_the_user_says_otherwise() {
        let mode =
            |url: &str, variables: &[(&str, &str)]| address(url, variables).unwrap().config.get_ssl_mode();
        assert_eq!(mode("postgres://u@127.0.0.1/d", &[]), SslMode::Disable);
        assert_eq!(mode("postgres://u@db.example/d", &[]), SslMode::Require);
        assert_eq!(mode("postgres://u@db.example/d?sslmode=disable", &[]), SslMode::Disable);
        assert_eq!(mode("postgres://u@localhost/d?sslmode=verify-full", &[]), SslMode::Require);
        assert_eq!(mode("postgres://u@db.example/d", &[("PGSSLMODE", "disable")]), SslMode::Disable);
        let error = address("postgres://u@h/d?sslmode=prefer", &[]).err().unwrap().to_string();
        assert!(error.contains("verify-full"), "{error}");
        let error = address("postgres://u@h/d?sslrootcert=/nowhere.pem", &[]).err().unwrap().to_string();
        assert!(error.contains("/nowhere.pem") && error.contains("PGSSLROOTCERT"), "{error}");
    }

    #[test]
    fn names_of_schemas_are_identifiers() {
        check_schema_name(&schema_name(&"x".repeat(99))).unwrap();
        for wrong in ["", "a b", "Upper", "pg_catalog", "public", "a\"b", &"x".repeat(64)] {
            let reason = check_schema_name(wrong).unwrap_err();
            assert!(reason.contains("lower-case"), "{reason}");
        }
    }
}
