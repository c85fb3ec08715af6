//! Why an archive cannot be used.
//!
//! Invariant: each message names the archive, shows what was found, and says what to do. No message has a credential.

use std::io;
use std::path::PathBuf;

#[cfg(not(feature = "object-store"))]
use super::ArchiveUrl;

/// Why an archive cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// This program has no object stores.
    #[error(
        "{url}: this program was built without object stores; build it from source (`cargo install --path . \
         --features object-store`)"
    )]
    NotBuilt {
        /// The archive.
        url: String,
    },
    /// It is no address.
    #[error("`{text}` is no archive: {reason}; write an address such as s3://BUCKET/RUN")]
    Address {
        /// What was written.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The store cannot be opened with the variables of this process.
    #[error("{url}: {reason}; check the variables of the store, docs/object_storage.md has them")]
    Settings {
        /// The archive.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The store refuses this user.
    #[error(
        "{url}: the store refuses to {what}: {reason}; check the credentials of this process and the rights of its user with \
         `rlrun doctor RECIPE`"
    )]
    Refused {
        /// The archive.
        url: String,
        /// What was tried.
        what: String,
        /// The answer of the store.
        reason: String,
    },
    /// The bucket does not exist.
    #[error("{url}: there is no such bucket ({reason}); create it, or correct `checkpoint.url`")]
    NoBucket {
        /// The archive.
        url: String,
        /// The answer of the store.
        reason: String,
    },
    /// The store does not compare before it replaces.
    #[error(
        "{url}: the store has no conditional put: it {found}; without it two leads of a run could overwrite each other, so use \
         a store with If-None-Match and If-Match, or an update of this one"
    )]
    Unconditional {
        /// The archive.
        url: String,
        /// What it did instead.
        found: &'static str,
    },
    /// A new run was to start where one has been.
    #[error(
        "{url} has the run `{name}` at step {step}; continue it with `rlrun resume {url} --run-dir DIR`, or name another \
         `checkpoint.url`"
    )]
    Occupied {
        /// The archive.
        url: String,
        /// Name of the run in it.
        name: String,
        /// Step of its newest checkpoint.
        step: u64,
    },
    /// Another machine has continued the run since this run directory was used.
    #[error(
        "{url}: another start of this run, on `{host}`, has taken the lead (epoch {epoch}, step {step}), and {run_dir} does not \
         have its steps; continue them with `rlrun resume {url} --run-dir DIR` in another directory"
    )]
    Stale {
        /// The archive.
        url: String,
        /// Machine of the current lead.
        host: String,
        /// Its epoch.
        epoch: u64,
        /// Step of the newest checkpoint in the archive.
        step: u64,
        /// The run directory that was to be continued.
        run_dir: PathBuf,
    },
    /// Another start of the run has taken the lead while this one was running.
    #[error(
        "{url}: this process is no longer the lead of the run: a start on `{host}` has taken epoch {epoch}, after epoch {own} of \
         this process; nothing of this process was committed since, let the other one continue"
    )]
    Fenced {
        /// The archive.
        url: String,
        /// Machine of the current lead.
        host: String,
        /// Its epoch.
        epoch: u64,
        /// Epoch of this process.
        own: u64,
    },
    /// The store does not answer, or only with errors.
    #[error(
        "{url}: cannot {what}: {reason}; no progress for {waited_s:.0} s; nothing that was acknowledged is lost: check the \
         network and the store, or raise `deadlines.wait_s`, and continue with `rlrun resume`"
    )]
    Unavailable {
        /// The archive.
        url: String,
        /// What was tried.
        what: String,
        /// The last answer or failure.
        reason: String,
        /// Time without progress, seconds.
        waited_s: f64,
    },
    /// There is no checkpoint to resume from.
    #[error("{url} has no checkpoint yet; start a run with this `checkpoint.url`")]
    Empty {
        /// The archive.
        url: String,
    },
    /// No checkpoint is intact.
    #[error("{url}: no checkpoint can be resumed from:{}", .reasons.iter().map(|reason| format!("\n  {reason}")).collect::<String>())]
    NoneIntact {
        /// The archive.
        url: String,
        /// What is wrong with each.
        reasons: Vec<String>,
    },
    /// An object is not what was written.
    #[error("{url}: {object} is damaged: {reason}; restore it from a copy, or use another archive")]
    Damaged {
        /// The archive.
        url: String,
        /// Name of the object.
        object: String,
        /// What is wrong.
        reason: String,
    },
    /// A local file changes while it is stored, or does not match its manifest.
    #[error("{path}: {reason}; check the disk, and continue with `rlrun resume`")]
    Changed {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// A local file cannot be read or written.
    #[error("cannot {verb} `{path}`: {source}; check the disk and the permissions")]
    Local {
        /// What was tried.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl ArchiveError {
    /// This program was built without the feature.
    #[cfg(not(feature = "object-store"))]
    pub(super) fn not_built(url: &ArchiveUrl) -> Self {
        Self::NotBuilt { url: url.to_string() }
    }

    /// Whether the input was wrong: the address, the credentials, or the state of the archive.
    #[must_use]
    pub fn is_input(&self) -> bool {
        !matches!(
            self,
            Self::Fenced { .. } | Self::Unavailable { .. } | Self::Changed { .. } | Self::Local { .. }
        )
    }
}

impl From<ArchiveError> for trainer::TrainerError {
    fn from(error: ArchiveError) -> Self {
        Self::Archive(Box::new(error))
    }
}
