//! A PostgreSQL server for tests: in a directory of its own, on a unix socket, ended with its owner. Invariant: it uses only
//! programs that are installed; without them there is no server, and a test says that it is skipped.

use std::collections::BTreeMap;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::postgres::PostgresConfig;

/// Where packages put the programs of PostgreSQL, a directory per version.
const INSTALLED: &str = "/usr/lib/postgresql";
/// Deadline of a start and of a stop.
const LIMIT: Duration = Duration::from_secs(60);
/// The port, which is part of the name of the socket.
const PORT: u16 = 5432;
/// The user of the database.
const USER: &str = "rlrun";

/// A server. Dropping it stops it.
#[derive(Debug)]
pub struct DatabaseServer {
    programs: PathBuf,
    directory: PathBuf,
    options: Vec<String>,
    /// User and group of the server, if it may not run as this one.
    owner: Option<(u32, u32)>,
    child: Option<Child>,
}

impl DatabaseServer {
    /// Makes and starts a server in the empty `directory`, with `options` in the form `name=value`. `None` without its programs.
    ///
    /// # Panics
    /// If the programs fail.
    #[must_use]
    pub fn start(directory: &Path, options: &[&str]) -> Option<Self> {
        let mut server = Self::prepared(directory, options)?;
        let data = server.data();
        let mut make = server.command("initdb");
        make.args(["--no-sync", "--auth", "trust", "--username", USER, "--pgdata"]).arg(data);
        run(&mut make);
        server.restart();
        Some(server)
    }

    /// A synchronous copy of `primary` in the empty `directory`, which `primary` calls `name`.
    ///
    /// # Panics
    /// If the programs fail.
    #[must_use]
    pub fn replica(primary: &Self, directory: &Path, name: &str) -> Self {
        let mut server = Self::prepared(directory, &[]).expect("the programs of the primary are there");
        let mut copy = server.command("pg_basebackup");
        copy.arg("--pgdata").arg(server.data()).args([
            "--no-sync",
            "--checkpoint",
            "fast",
            "--write-recovery-conf",
        ]);
        copy.arg("--dbname").arg(format!(
            "host={} port={PORT} user={USER} application_name={name}",
            primary.directory.display()
        ));
        run(&mut copy);
        server.restart();
        server
    }

    fn prepared(directory: &Path, options: &[&str]) -> Option<Self> {
        let Some(programs) = programs() else {
            eprintln!("SKIPPED: there is no initdb in {INSTALLED}/*/bin (postgresql)");
            return None;
        };
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut server =
            Self { programs, directory: directory.to_owned(), options, owner: None, child: None };
        // The server refuses to run as root.
        if number("id", &["-u"]) == Some(0) {
            let user =
                ["postgres", "daemon"].into_iter().find(|user| number("id", &["-u", user]).is_some())?;
            let owner = (number("id", &["-u", user])?, number("id", &["-g", user])?);
            chown(directory, Some(owner.0), Some(owner.1)).expect("root may give a directory away");
            server.owner = Some(owner);
        }
        Some(server)
    }

    /// Starts the server, which does not run, and waits until it answers.
    ///
    /// # Panics
    /// If it does not answer in time.
    pub fn restart(&mut self) {
        let log = std::fs::File::create(self.directory.join("log")).expect("the directory is writable");
        let mut start = self.command("postgres");
        start.arg("-D").arg(self.data()).args(["-c", "listen_addresses=", "-c", "max_connections=200"]);
        start.arg("-c").arg(format!("unix_socket_directories={}", self.directory.display()));
        for option in &self.options {
            start.arg("-c").arg(option);
        }
        let child = start.stdout(Stdio::null()).stderr(log).spawn();
        self.child = Some(child.expect("the program of the server can be started"));
        let deadline = Instant::now() + LIMIT;
        while !self.answers() {
            let log = || std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "the database does not answer: {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether it accepts connections.
    #[must_use]
    pub fn answers(&self) -> bool {
        let mut ask = self.command("pg_isready");
        ask.arg("--quiet").arg("--host").arg(&self.directory).args(["--port", &PORT.to_string()]);
        ask.status().is_ok_and(|status| status.success())
    }

    /// Ends it as a crash does: sessions are not closed, nothing is written.
    ///
    /// # Panics
    /// If it does not run.
    pub fn crash(&mut self) {
        let mut child = self.child.take().expect("it runs");
        let sessions = self.sessions(child.id());
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
        // Its processes notice and end; the next start needs that.
        let deadline = Instant::now() + LIMIT;
        while sessions.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
            assert!(Instant::now() < deadline, "sessions outlive their server");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Stops it; sessions are closed.
    ///
    /// # Panics
    /// If it cannot be signalled.
    pub fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // SIGINT: a fast shutdown.
        signal("INT", &[child.id()]);
        drop(child.wait());
    }

    /// Suspends all its processes, or continues them.
    ///
    /// # Panics
    /// If it does not run.
    pub fn suspend(&self, suspended: bool) {
        let server = self.child.as_ref().expect("it runs").id();
        let all: Vec<u32> = [server].into_iter().chain(self.sessions(server)).collect();
        signal(if suspended { "STOP" } else { "CONT" }, &all);
    }

    /// Reads its configuration again.
    ///
    /// # Panics
    /// If it does not run.
    pub fn reload(&self) {
        signal("HUP", &[self.child.as_ref().expect("it runs").id()]);
    }

    /// Makes a replica a primary.
    ///
    /// # Panics
    /// If it does not become one.
    pub fn promote(&self) {
        let mut promote = self.command("pg_ctl");
        promote.arg("promote").arg("--wait").arg("--pgdata").arg(self.data());
        run(&mut promote);
    }

    /// Its processes beside the first.
    fn sessions(&self, server: u32) -> Vec<u32> {
        let children = std::fs::read_to_string(format!("/proc/{server}/task/{server}/children"));
        children.unwrap_or_default().split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Runs statements; the rows that they return, with `|` between columns.
    ///
    /// # Panics
    /// If they fail.
    pub fn sql(&self, statements: &str) -> String {
        let mut psql = self.command("psql");
        psql.args(["--no-psqlrc", "-At", "-v", "ON_ERROR_STOP=1", "--host"]).arg(&self.directory);
        psql.args(["--port", &PORT.to_string(), "--username", USER, "postgres", "-c", statements]);
        run(&mut psql)
    }

    /// Its URL; with `others`, those servers are tried too.
    #[must_use]
    pub fn url(&self, others: &[&Self]) -> String {
        let host = |server: &Self| server.directory.display().to_string().replace('/', "%2F");
        let hosts: Vec<String> = [self].into_iter().chain(others.iter().copied()).map(host).collect();
        format!("postgres://{USER}@{}/postgres", hosts.join(","))
    }

    /// A store in `schema` of this server.
    #[must_use]
    pub fn config(&self, schema: &str) -> PostgresConfig {
        PostgresConfig {
            url: self.url(&[]),
            schema: schema.to_owned(),
            owner: "a test".to_owned(),
            create: true,
            variables: BTreeMap::new(),
            outage: LIMIT,
            wait: Duration::ZERO,
            notice: None,
        }
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        // The user of the server may not be allowed in the directory of the test.
        command.current_dir(&self.directory).stdin(Stdio::null()).env_remove("PGOPTIONS");
        if let Some((user, group)) = self.owner {
            command.uid(user).gid(group);
        }
        command
    }
}

impl Drop for DatabaseServer {
    fn drop(&mut self) {
        if let Some(child) = &self.child {
            // A suspended server cannot stop.
            let all: Vec<u32> = [child.id()].into_iter().chain(self.sessions(child.id())).collect();
            signal("CONT", &all);
        }
        self.stop();
    }
}

/// The programs of the newest installed version.
fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir(INSTALLED).ok()?.filter_map(Result::ok);
    let with_programs = versions.map(|version| version.path().join("bin"));
    with_programs.filter(|programs| programs.join("initdb").is_file()).max()
}

/// The number that a program prints.
fn number(program: &str, arguments: &[&str]) -> Option<u32> {
    let output = Command::new(program).args(arguments).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("the program can be started");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn signal(name: &str, pids: &[u32]) {
    let pids = pids.iter().map(u32::to_string);
    // One that has just ended is no failure.
    let status = Command::new("kill").arg(format!("-{name}")).args(pids).stderr(Stdio::null()).status();
    status.expect("the program that sends signals can be started");
}
