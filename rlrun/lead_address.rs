//! The address of a run: written by the run into its directory, and found by its workers.
//!
//! Invariant: a worker looks again before every attempt to join, so that it finds a run that was started again elsewhere.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use dashboard::{LastEvent, RunGlance};
use serde::{Deserialize, Serialize};

use crate::args::JoinArgs;
use crate::credentials::Credentials;
use crate::failure::Failure;
use crate::launchers::{self, network, variables};
use crate::run_dir::{self, ADDRESS_FILE};

/// Largest file of that kind, bytes.
const MAX_FILE: u64 = 1 << 16;

/// Where a run is, and how to authenticate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeadAddress {
    /// Such as `https://10.0.0.1:8700`.
    pub(crate) url: String,
    /// The file with the run's tokens.
    pub(crate) token_file: Option<PathBuf>,
    /// The certificate to trust instead of those of browsers, PEM.
    pub(crate) tls_ca: Option<PathBuf>,
}

impl LeadAddress {
    /// Writes the address of the run in `run_dir`, which listens on `address`. Files inside the directory are written relative
    /// to it, since other machines may have it elsewhere.
    ///
    /// # Errors
    /// A directory that cannot be written.
    pub(crate) fn announce(self, run_dir: &Path) -> Result<AnnouncedAddress, Failure> {
        let inside = |path: PathBuf| match path.strip_prefix(run_dir) {
            Ok(inside) => inside.to_path_buf(),
            Err(_) => std::path::absolute(&path).unwrap_or(path),
        };
        let written =
            Self { url: self.url, token_file: self.token_file.map(inside), tls_ca: self.tls_ca.map(inside) };
        let path = run_dir.join(ADDRESS_FILE);
        let text = format!("{:#}\n", serde_json::json!(written));
        run_dir::write_atomic(&path, text.as_bytes())?;
        Ok(AnnouncedAddress { path })
    }

    /// The address of the run in `run_dir`; `None` if it is not served.
    ///
    /// # Errors
    /// A file that cannot be read or is none of that kind.
    fn of_run(run_dir: &Path) -> Result<Option<Self>, Failure> {
        let path = run_dir.join(ADDRESS_FILE);
        let text = model::files::read_text_if_there(&path, MAX_FILE)
            .map_err(|source| Failure::System { what: format!("read {}", path.display()), source })?;
        let Some(text) = text else { return Ok(None) };
        let read: Self = serde_json::from_str(&text).map_err(|error| {
            Failure::Argument(format!(
                "{}: it is no address of a run ({error}); name the run's URL instead of its directory",
                path.display()
            ))
        })?;
        let found = |path: PathBuf| run_dir.join(path);
        Ok(Some(Self {
            url: read.url,
            token_file: read.token_file.map(found),
            tls_ca: read.tls_ca.map(found),
        }))
    }
}

/// The URL of a server that listens on `address`, for other machines.
pub(crate) fn url(address: SocketAddr, encrypted: bool) -> String {
    let scheme = if encrypted { "https" } else { "http" };
    format!("{scheme}://{}", network::reachable_from_outside(address))
}

/// The URL of a run on `host`, a name or an address.
pub(crate) fn url_of(host: &str, port: u16) -> String {
    if host.contains(':') { format!("https://[{host}]:{port}") } else { format!("https://{host}:{port}") }
}

/// The file of an address. It disappears when this is dropped: the run ends.
#[derive(Debug)]
pub(crate) struct AnnouncedAddress {
    path: PathBuf,
}

impl Drop for AnnouncedAddress {
    fn drop(&mut self) {
        // Workers that find an old address try it until their patience ends.
        drop(std::fs::remove_file(&self.path));
    }
}

/// How a worker finds its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JoinTarget {
    place: RunPlace,
    token_file: Option<PathBuf>,
    tls_ca: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum RunPlace {
    Url(String),
    RunDirectory(PathBuf),
}

impl JoinTarget {
    /// What `args` name, or else the variables of `environment`: `RLRUN_JOIN`, or the first host of a launcher.
    ///
    /// # Errors
    /// Neither names a run.
    pub(crate) fn of(args: &JoinArgs, environment: &BTreeMap<String, String>) -> Result<Self, Failure> {
        let named = args.join.clone().or_else(|| environment.get(variables::JOIN).cloned());
        let place = match named.filter(|named| !named.trim().is_empty()) {
            Some(url) if url.contains("://") => RunPlace::Url(url),
            Some(directory) => RunPlace::RunDirectory(directory.into()),
            None => {
                let Some(head) = variables::head(environment) else {
                    return Err(Failure::Argument(format!(
                        "where is the run? Name its URL or its directory with --join or in {}; no launcher names the first host \
                         (SLURM_JOB_NODELIST, SKYPILOT_NODE_IPS, MASTER_ADDR)",
                        variables::JOIN
                    )));
                };
                RunPlace::Url(url_of(&head, launchers::PORT))
            }
        };
        let own = args.credentials.as_ref().map(Credentials::new);
        Ok(Self {
            place,
            token_file: args.token_file.clone().or_else(|| Some(own.as_ref()?.token_file())),
            tls_ca: args.tls_ca.clone().or_else(|| Some(own.as_ref()?.ca_file())),
        })
    }

    /// The address; `None` if the run has not written it yet.
    ///
    /// # Errors
    /// A file that is no address.
    pub(crate) fn address(&self) -> Result<Option<LeadAddress>, Failure> {
        let found = match &self.place {
            RunPlace::Url(url) => LeadAddress { url: url.clone(), token_file: None, tls_ca: None },
            RunPlace::RunDirectory(directory) => match LeadAddress::of_run(directory)? {
                Some(found) => found,
                None => return Ok(None),
            },
        };
        Ok(Some(LeadAddress {
            url: found.url,
            token_file: self.token_file.clone().or(found.token_file),
            tls_ca: self.tls_ca.clone().or(found.tls_ca),
        }))
    }

    /// Whether its directory says that the run has reached its last step, and no process has it open.
    pub(crate) fn is_done(&self) -> bool {
        match &self.place {
            RunPlace::Url(_) => false,
            RunPlace::RunDirectory(directory) => {
                RunGlance::read(directory).last == LastEvent::Done && !run_dir::is_in_use(directory)
            }
        }
    }
}

impl std::fmt::Display for JoinTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.place {
            RunPlace::Url(url) => f.write_str(url),
            RunPlace::RunDirectory(directory) => write!(f, "the run in {}", directory.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        join: JoinArgs,
    }

    fn target(flags: &[&str], variables: &[(&str, &str)]) -> Result<JoinTarget, String> {
        let args = Line::try_parse_from(["rlrun"].iter().chain(flags)).map_err(|error| error.to_string())?;
        let environment = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        JoinTarget::of(&args.join, &environment.collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_address_of_a_run_is_found_in_its_directory_wherever_that_is() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let moved = there.path().join("run");
        let target = target(&["--join", moved.to_str().unwrap()], &[]).unwrap();
        assert_eq!(target.address().unwrap(), None);
        let run = here.path().join("run");
        std::fs::create_dir(&run).unwrap();
        let written = LeadAddress {
            url: "https://10.0.0.1:8700".to_owned(),
            token_file: Some("/etc/tokens".into()),
            tls_ca: Some(run.join("credentials/ca.pem")),
        };
        let announced = written.clone().announce(&run).unwrap();
        assert_eq!(LeadAddress::of_run(&run).unwrap(), Some(written.clone()));
        std::os::unix::fs::symlink(&run, &moved).unwrap();
        let found = target.address().unwrap().unwrap();
        assert_eq!(found.tls_ca, Some(moved.join("credentials/ca.pem")));
        assert_eq!((found.url, found.token_file), (written.url, written.token_file));
        drop(announced);
        assert_eq!(target.address().unwrap(), None);
        std::fs::write(run.join(ADDRESS_FILE), "{}").unwrap();
        assert!(target.address().unwrap_err().to_string().contains("address.json"));
    }

    #[test]
    fn a_directory_says_that_its_run_is_done() {
        let run = tempfile::tempdir().unwrap();
        let target = target(&["--join", run.path().to_str().unwrap()], &[]).unwrap();
        let write = |lines: &str| std::fs::write(run.path().join("events.jsonl"), lines).unwrap();
        let (started, stopped) =
            ("{\"event\":\"start\"}\n", "{\"event\":\"end\",\"fields\":{\"done\":false}}\n");
        let done = stopped.replace("false", "true");
        assert!(!target.is_done());
        for (lines, is_done) in [
            (started.to_owned(), false),
            (format!("{started}{stopped}"), false),
            (format!("{started}{done}"), true),
            (format!("{started}{done}{{\"event\":\"resume\"}}\n"), false),
        ] {
            write(&lines);
            assert_eq!(target.is_done(), is_done, "{lines}");
        }
        write(&done);
        let lock = run_dir::Lock::take(run.path()).unwrap();
        assert!(!target.is_done());
        drop(lock);
        assert!(target.is_done());
        let url = self::target(&["--join", "http://b:2"], &[]).unwrap();
        assert!(!url.is_done());
    }

    #[test]
    fn a_run_is_named_by_a_flag_a_variable_or_a_launcher() {
        let url = |flags: &[&str], variables: &[(&str, &str)]| {
            target(flags, variables).map(|target| target.address().unwrap().unwrap())
        };
        let slurm = ("SLURM_JOB_NODELIST", "n[3-4]");
        let variable = (variables::JOIN, "http://a:1");
        assert_eq!(url(&["--join", "http://b:2"], &[slurm, variable]).unwrap().url, "http://b:2");
        assert_eq!(url(&[], &[slurm, variable]).unwrap().url, "http://a:1");
        let found = url(&["--credentials", "/c"], &[slurm]).unwrap();
        assert_eq!(
            (found.url.as_str(), found.token_file, found.tls_ca),
            ("https://n3:8700", Some("/c/tokens".into()), Some("/c/ca.pem".into()))
        );
        assert_eq!(url(&[], &[("MASTER_ADDR", "fd00::1")]).unwrap().url, "https://[fd00::1]:8700");
        let none = target(&[], &[(variables::JOIN, " ")]).unwrap_err();
        assert!(none.contains("--join") && none.contains("RLRUN_JOIN"), "{none}");
    }
}
