//! What a run directory knows of its archive: under which names its processes have been the lead, and which files of a commit
//! in progress are stored already.
//!
//! Invariant: it is a hint that is compared with `lead.json` before it is used. The name of a lead is written here before it
//! is written there, so a process that dies in between still knows its own lead.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ArchiveError;
use super::lead::{ArchiveLead, IndexedFile};
use crate::run_dir;

/// Name of the file in a run directory.
pub(super) const RECORD: &str = "archive.json";
/// Longest record, bytes.
const MAX_RECORD_BYTES: u64 = 16 << 20;
/// Names of leads that are remembered.
const MAX_WRITERS: usize = 4;

/// The content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArchiveRecord {
    /// The archive.
    pub(super) url: String,
    /// Names under which processes of this directory have been the lead, the newest last.
    pub(super) writers: Vec<String>,
    /// Files of a commit in progress that are stored, by path in the run directory.
    pub(super) stored: Vec<(String, IndexedFile)>,
}

impl ArchiveRecord {
    /// The record of this archive in `run_dir`; an empty one if there is none.
    pub(super) fn read(run_dir: &Path, url: &str) -> Self {
        let bytes = model::files::read(&run_dir.join(RECORD), MAX_RECORD_BYTES);
        let record: Option<Self> = bytes.ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        record
            .filter(|record| record.url == url)
            .unwrap_or_else(|| Self { url: url.to_owned(), ..Self::default() })
    }

    pub(super) fn write(&self, run_dir: &Path) -> Result<(), ArchiveError> {
        let bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        run_dir::write_atomic(&run_dir.join(RECORD), &bytes).map_err(|error| {
            let path: PathBuf = run_dir.join(RECORD);
            ArchiveError::Local { verb: "write", path, source: std::io::Error::other(error) }
        })
    }

    /// Whether the directory has everything that `lead` has committed.
    pub(super) fn is_of(&self, lead: &ArchiveLead) -> bool {
        self.writers.contains(&lead.writer)
    }

    /// Adds the name of a lead to be.
    pub(super) fn add_writer(&mut self, writer: &str) {
        self.writers.push(writer.to_owned());
        let excess = self.writers.len().saturating_sub(MAX_WRITERS);
        self.writers.drain(..excess);
    }
}
