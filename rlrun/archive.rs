//! The archive of a run: its checkpoints, recipe, metrics and logs in an object store or a directory (`checkpoint.url`), so
//! that the run continues on another machine.
//!
//! - `url`: where an archive is; `error`: why it cannot be used
//! - `writer`: stores checkpoints, commits them, removes what is superseded; `lead`: the object that names the current lead
//!   and the complete checkpoints; `record`: what this run directory has stored
//! - `fetch`: a run directory from an archive; `probe`: what `rlrun doctor` measures
//! - `files`: which files; `transfer`: files to objects and back; `bucket`: the operations on objects; `http`: requests
//!
//! Invariant: a checkpoint is in the archive once `lead.json` names its index, and every object that the index names was
//! complete before. `lead.json` is only replaced by conditional puts, so a lead that was superseded commits nothing, and
//! what it uploads has names of its own epoch. Secrets are read from the variables of the process and never written.
//!
//! All but `url`, `error` and the interface is built with the feature `object-store` alone.

mod error;
mod url;

#[cfg(feature = "object-store")]
mod bucket;
#[cfg(feature = "object-store")]
mod fetch;
#[cfg(feature = "object-store")]
mod files;
#[cfg(feature = "object-store")]
mod http;
#[cfg(feature = "object-store")]
mod lead;
#[cfg(feature = "object-store")]
mod probe;
#[cfg(feature = "object-store")]
mod record;
#[cfg(feature = "object-store")]
mod transfer;
#[cfg(feature = "object-store")]
mod writer;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use trainer::checkpoint::{CheckpointArchive, Retention};
use trajectory::PolicyVersion;

pub use error::ArchiveError;
pub(crate) use url::ArchiveUrl;

use crate::report::Report;

/// Whether this program has object stores.
pub(crate) const IS_BUILT: bool = cfg!(feature = "object-store");

/// The archive of a run in progress.
pub(crate) trait RunArchive: CheckpointArchive {
    /// Makes this process the lead: the next epoch. An earlier lead commits nothing from now on.
    ///
    /// # Errors
    /// Another start took the lead since the archive was opened, or the archive cannot be used.
    fn take_lead(&self) -> Result<(), ArchiveError>;

    /// Stores what the run wrote after its last checkpoint. Nothing is stored before the first one.
    ///
    /// # Errors
    /// As [`CheckpointArchive::store`].
    fn finish(&self) -> Result<(), ArchiveError>;
}

/// What an archive is opened with.
#[cfg_attr(not(feature = "object-store"), expect(dead_code, reason = "only object stores read all of it"))]
pub(crate) struct ArchiveSetup<'a> {
    pub(crate) url: &'a ArchiveUrl,
    /// Name of the run, for people.
    pub(crate) name: &'a str,
    pub(crate) run_dir: &'a Path,
    pub(crate) retention: Retention,
    /// The variables of the process: credentials and endpoints.
    pub(crate) environment: &'a BTreeMap<String, String>,
    /// How long the archive may make no progress.
    pub(crate) patience: Duration,
    pub(crate) report: &'a Arc<Report>,
}

/// What is fetched from an archive.
#[cfg_attr(not(feature = "object-store"), expect(dead_code, reason = "only object stores read all of it"))]
pub(crate) struct ArchiveRequest<'a> {
    pub(crate) url: &'a ArchiveUrl,
    /// The variables of the process: credentials and endpoints.
    pub(crate) environment: &'a BTreeMap<String, String>,
    /// How long the archive may make no progress.
    pub(crate) patience: Duration,
    /// The oldest checkpoint that is needed; by default the newest that is complete.
    pub(crate) from: Option<PolicyVersion>,
}

/// The measurements of an archive for `rlrun doctor`.
#[derive(Debug)]
pub(crate) struct ArchiveFindings {
    /// A line for people each: what was measured, and the result.
    pub(crate) lines: Vec<(&'static str, String)>,
    /// The same for programs.
    pub(crate) json: Value,
}

/// Opens the archive of a run and checks that the run may continue there. Nothing in it changes yet.
///
/// # Errors
/// An archive that cannot be used, has another run, or has steps of this run that its directory lacks.
#[cfg(feature = "object-store")]
pub(crate) fn open(setup: &ArchiveSetup<'_>) -> Result<Arc<dyn RunArchive>, ArchiveError> {
    Ok(Arc::new(writer::ObjectArchive::open(setup)?))
}

/// As with the feature; a recipe with an archive was refused.
#[cfg(not(feature = "object-store"))]
pub(crate) fn open(setup: &ArchiveSetup<'_>) -> Result<Arc<dyn RunArchive>, ArchiveError> {
    Err(ArchiveError::not_built(setup.url))
}

/// Makes the run directory `to` from an archive.
///
/// # Errors
/// An archive that cannot be used or has no intact checkpoint; a directory that is not empty.
#[cfg(feature = "object-store")]
pub(crate) fn fetch(
    request: &ArchiveRequest<'_>,
    to: &Path,
    notice: &(dyn Fn(&str) + Send + Sync),
) -> Result<(), crate::failure::Failure> {
    fetch::fetch(request, to, notice)
}

/// As with the feature.
///
/// # Errors
/// Always.
#[cfg(not(feature = "object-store"))]
pub(crate) fn fetch(
    request: &ArchiveRequest<'_>,
    _to: &Path,
    _notice: &(dyn Fn(&str) + Send + Sync),
) -> Result<(), crate::failure::Failure> {
    Err(ArchiveError::not_built(request.url).into())
}

/// Whether the archive has a checkpoint that a run can resume from.
///
/// # Errors
/// An archive that cannot be used.
#[cfg(feature = "object-store")]
pub(crate) fn has_run(request: &ArchiveRequest<'_>) -> Result<bool, ArchiveError> {
    fetch::has_run(request)
}

/// As with the feature.
///
/// # Errors
/// Always.
#[cfg(not(feature = "object-store"))]
pub(crate) fn has_run(request: &ArchiveRequest<'_>) -> Result<bool, ArchiveError> {
    Err(ArchiveError::not_built(request.url))
}

/// Tries every operation that a run needs on a key that it removes again.
#[cfg(feature = "object-store")]
pub(crate) fn examine(request: &ArchiveRequest<'_>) -> ArchiveFindings {
    probe::examine(request)
}

/// As with the feature.
#[cfg(not(feature = "object-store"))]
pub(crate) fn examine(request: &ArchiveRequest<'_>) -> ArchiveFindings {
    let reason = ArchiveError::not_built(request.url).to_string();
    ArchiveFindings {
        json: serde_json::json!({ "url": request.url.to_string(), "error": &reason }),
        lines: vec![("error", reason)],
    }
}
