//! The files of a coordinator.
//!
//! ```text
//! DIR/lock                          locked by the process that serves the directory
//! DIR/state.bin                     round, terms, outer weights, momentum, residual, and the last outer updates
//! DIR/members.json                  the live islands
//! DIR/contributions/ROUND-RUN-NAME.bin  outer gradients of the open round
//! DIR/contributions/N.partial       outer gradients that are in no round yet
//! ```
//!
//! `state.bin` is the digest of what follows, the length of a header, the header as JSON, and the values.
//!
//! Invariant: a file is replaced by a rename after its successor is on disk, so a crash leaves the old one or the new one. A damaged
//! file is an error and never a state.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::IslandError;
use crate::coordinator::{ClosedRound, Contributor, OuterState};
use crate::frame::{FRAME_HEAD, RoundMessage};
use crate::refusal::check_magnitudes;
use crate::terms::{IslandTerms, is_name};

/// Version of the layout of the files.
const FORMAT: u32 = 1;
/// Length of the id of a run, bytes.
pub(crate) const RUN_ID: usize = 32;

/// The files of a coordinator, which this process alone may write.
#[derive(Debug)]
pub(crate) struct CoordinatorFiles {
    dir: PathBuf,
    _lock: File,
    /// Number of contributions that were written.
    staged: AtomicU64,
}

/// A contribution on disk that is in no round yet. Its file is removed, unless [`CoordinatorFiles::admit`] has renamed it.
#[derive(Debug)]
pub(crate) struct StagedContribution {
    partial: PathBuf,
    path: PathBuf,
}

impl Drop for StagedContribution {
    fn drop(&mut self) {
        // There is none after a rename; another is removed at the next start.
        let _ = fs::remove_file(&self.partial);
    }
}

#[derive(Serialize, Deserialize)]
struct StateHeader {
    format: u32,
    id: String,
    round: u64,
    terms: IslandTerms,
    recent: Vec<RecentRound>,
    #[serde(default)]
    counted: BTreeMap<String, u64>,
}

#[derive(Serialize, Deserialize)]
struct RecentRound {
    round: u64,
    /// The contributors in files whose rounds have one run of each name.
    #[serde(default, skip_serializing)]
    islands: BTreeMap<String, String>,
    #[serde(default)]
    contributors: BTreeSet<Contributor>,
    bytes: usize,
}

impl CoordinatorFiles {
    /// Opens the directory `dir`, which is made if it does not exist.
    ///
    /// # Errors
    /// One that another coordinator has open, or that cannot be written.
    pub(crate) fn open(dir: &Path) -> Result<Self, IslandError> {
        let contributions = dir.join("contributions");
        fs::create_dir_all(&contributions).map_err(IslandError::file("make", &contributions))?;
        let path = dir.join("lock");
        let lock = File::create(&path).map_err(IslandError::file("open", &path))?;
        match lock.try_lock() {
            Ok(()) => {
                let files = Self { dir: dir.to_owned(), _lock: lock, staged: AtomicU64::new(0) };
                files.remove_staged()?;
                Ok(files)
            }
            Err(TryLockError::WouldBlock) => {
                let reason = "another coordinator has it open; end that one, or name another directory";
                Err(IslandError::Directory { path: dir.to_owned(), reason: reason.to_owned() })
            }
            Err(TryLockError::Error(source)) => Err(IslandError::file("lock", &path)(source)),
        }
    }

    /// The state on disk; `None` if no island has joined yet.
    ///
    /// # Errors
    /// A file that cannot be read, or is damaged or of another rlrun.
    pub(crate) fn load(&self) -> Result<Option<OuterState>, IslandError> {
        let path = self.state();
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(IslandError::file("read", &path)(source)),
        };
        let mut state = parse(&bytes)
            .ok_or_else(|| IslandError::Damaged { what: path.display().to_string(), bytes: bytes.len() })?;
        state.members = self.members()?;
        self.load_contributions(&mut state)?;
        Ok(Some(state))
    }

    /// Replaces the state, and removes the contributions of earlier rounds.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn save(&self, state: &OuterState) -> Result<(), IslandError> {
        let recent = |closed: &ClosedRound| RecentRound {
            round: closed.round,
            islands: BTreeMap::new(),
            contributors: closed.islands.clone(),
            bytes: closed.frame.len() - FRAME_HEAD,
        };
        let header = StateHeader {
            format: FORMAT,
            id: state.id.clone(),
            round: state.round,
            terms: state.terms.clone(),
            recent: state.recent.iter().map(recent).collect(),
            counted: state.counted.clone(),
        };
        let header = serde_json::to_vec(&header).unwrap_or_default();
        let length = (header.len() as u64).to_le_bytes();
        let values =
            [&state.weights, &state.momentum, &state.residual].map(|values| bytemuck::cast_slice(values));
        let payloads = state.recent.iter().map(|closed| &closed.frame[FRAME_HEAD..]);
        let parts: Vec<&[u8]> = [&length[..], &header].into_iter().chain(values).chain(payloads).collect();
        let mut hasher = blake3::Hasher::new();
        for part in &parts {
            hasher.update(part);
        }
        let digest = hasher.finalize();
        replace(&self.state(), &[&[&digest.as_bytes()[..]], &parts[..]].concat())?;
        self.remove_contributions_before(state.round)
    }

    /// Replaces the list of members.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn save_members(&self, members: &BTreeMap<String, String>) -> Result<(), IslandError> {
        let json = serde_json::to_vec(members).unwrap_or_default();
        replace(&self.dir.join("members.json"), &[&json])
    }

    /// Writes a contribution to round `round`, which is not in it before [`Self::admit`].
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn stage_contribution(
        &self,
        round: u64,
        contributor: &Contributor,
        bytes: &[u8],
    ) -> Result<StagedContribution, IslandError> {
        // Requests that repeat one another write at the same time.
        let number = self.staged.fetch_add(1, Ordering::Relaxed);
        let partial = self.contributions().join(format!("{number}.partial"));
        let staged = StagedContribution { partial, path: self.contribution_path(round, contributor) };
        let payload = [contributor.1.as_bytes(), bytes].concat();
        let frame = RoundMessage { round, islands: 1, payload }.to_frame();
        write_synced(&staged.partial, &[&frame]).map_err(IslandError::file("write", &staged.partial))?;
        Ok(staged)
    }

    /// Puts a contribution in its round.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn admit(&self, staged: &StagedContribution) -> Result<(), IslandError> {
        let StagedContribution { partial, path } = staged;
        rename_synced(partial, path).map_err(IslandError::file("write", path))
    }

    /// The bytes of a contribution to round `round`.
    ///
    /// # Errors
    /// A file that cannot be read, or is damaged.
    pub(crate) fn contribution(&self, round: u64, contributor: &Contributor) -> Result<Vec<u8>, IslandError> {
        read_contribution(&self.contribution_path(round, contributor)).map(|(_, bytes)| bytes)
    }

    fn state(&self) -> PathBuf {
        self.dir.join("state.bin")
    }

    fn contributions(&self) -> PathBuf {
        self.dir.join("contributions")
    }

    fn contribution_path(&self, round: u64, (name, run): &Contributor) -> PathBuf {
        self.contributions().join(format!("{round}-{run}-{name}.bin"))
    }

    fn members(&self) -> Result<BTreeMap<String, String>, IslandError> {
        let path = self.dir.join("members.json");
        match fs::read(&path) {
            Ok(json) => serde_json::from_slice(&json)
                .map_err(|_| IslandError::Damaged { what: path.display().to_string(), bytes: json.len() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(source) => Err(IslandError::file("read", &path)(source)),
        }
    }

    /// Files of contributions with their rounds, and the rest of their names without the ending.
    fn listed(&self) -> Result<Vec<(PathBuf, u64, String)>, IslandError> {
        let dir = self.contributions();
        let entries = fs::read_dir(&dir).map_err(IslandError::file("list", &dir))?;
        let entry = |entry: io::Result<fs::DirEntry>| {
            let path = entry.ok()?.path();
            let (round, rest) = path.file_name()?.to_str()?.strip_suffix(".bin")?.split_once('-')?;
            let (round, rest) = (round.parse().ok()?, rest.to_owned());
            Some((path, round, rest))
        };
        Ok(entries.filter_map(entry).collect())
    }

    fn load_contributions(&self, state: &mut OuterState) -> Result<(), IslandError> {
        for (path, round, rest) in self.listed()? {
            if round != state.round {
                continue;
            }
            let (run, bytes) = read_contribution(&path)?;
            // Files of a version that had one run of a name in a round are called without it.
            let name = rest.strip_prefix(&run).and_then(|rest| rest.strip_prefix('-')).unwrap_or(&rest);
            let values = state.terms.compression.decode(&bytes, state.terms.fragment(round).len())?;
            // And of one that did not refuse such values.
            if !is_name(name) || check_magnitudes(name, &values).is_err() {
                continue;
            }
            let contributor = (name.to_owned(), run);
            let expected = self.contribution_path(round, &contributor);
            if path != expected {
                fs::rename(&path, &expected).map_err(IslandError::file("rename", &path))?;
            }
            state.contributions.insert(contributor);
        }
        Ok(())
    }

    /// Removes what a crash has left of contributions that were in no round.
    fn remove_staged(&self) -> Result<(), IslandError> {
        let dir = self.contributions();
        let entries = fs::read_dir(&dir).map_err(IslandError::file("list", &dir))?;
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.extension().is_some_and(|end| end == "partial") {
                fs::remove_file(&path).map_err(IslandError::file("remove", &path))?;
            }
        }
        Ok(())
    }

    fn remove_contributions_before(&self, round: u64) -> Result<(), IslandError> {
        for (path, of, _) in self.listed()? {
            if of < round {
                fs::remove_file(&path).map_err(IslandError::file("remove", &path))?;
            }
        }
        Ok(())
    }
}

/// The state in the bytes of a file; `None` if they are damaged or of another format.
fn parse(bytes: &[u8]) -> Option<OuterState> {
    let (digest, rest) = bytes.split_at_checked(32)?;
    if blake3::hash(rest).as_bytes()[..] != *digest {
        return None;
    }
    let (length, rest) = rest.split_at_checked(8)?;
    let length = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
    let (header, mut rest) = rest.split_at_checked(length)?;
    let header: StateHeader = serde_json::from_slice(header).ok()?;
    if header.format != FORMAT {
        return None;
    }
    let count = header.terms.values();
    let mut take = |bytes: usize| {
        let (taken, others) = rest.split_at_checked(bytes)?;
        rest = others;
        Some(taken)
    };
    let mut values = || {
        let bytes = take(count.checked_mul(4)?)?;
        Some(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<_>>())
    };
    let (weights, momentum, residual) = (values()?, values()?, values()?);
    let recent = header.recent.into_iter().map(|RecentRound { round, islands, contributors, bytes }| {
        let islands: BTreeSet<Contributor> = islands.into_iter().chain(contributors).collect();
        let message = RoundMessage { round, islands: islands.len() as u64, payload: take(bytes)?.to_vec() };
        Some(ClosedRound { round, islands, frame: message.to_frame().into() })
    });
    let mut recent = recent.collect::<Option<VecDeque<_>>>()?;
    let StateHeader { id, round, terms, mut counted, .. } = StateHeader { recent: Vec::new(), ..header };
    // Files of a version that did not write it.
    for closed in &recent {
        counted.extend(closed.islands.iter().map(|(_, run)| (run.clone(), closed.round)));
    }
    // Outer updates of a version without the digest of the outer weights: islands take the newest ones instead.
    recent.retain(|closed| closed.frame.len() == FRAME_HEAD + terms.update_bytes(closed.round));
    Some(OuterState {
        id,
        terms,
        round,
        weights,
        momentum,
        residual,
        recent,
        members: BTreeMap::new(),
        joined: BTreeSet::new(),
        contributions: BTreeSet::new(),
        counted,
        first: None,
        frame: None,
    })
}

/// The id of the run and the bytes in the file of a contribution.
fn read_contribution(path: &Path) -> Result<(String, Vec<u8>), IslandError> {
    let frame = fs::read(path).map_err(IslandError::file("read", path))?;
    let bytes = frame.len();
    let damaged = |_| IslandError::Damaged { what: path.display().to_string(), bytes };
    let mut run = RoundMessage::from_frame(frame).map_err(damaged)?.payload;
    let values = run.split_off(RUN_ID.min(run.len()));
    Ok((String::from_utf8_lossy(&run).into_owned(), values))
}

/// Writes `parts` to a file beside `path`, which is then renamed to it.
pub(crate) fn replace(path: &Path, parts: &[&[u8]]) -> Result<(), IslandError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let written = write_synced(&partial, parts).and_then(|()| rename_synced(&partial, path));
    written.map_err(IslandError::file("write", path))
}

/// Writes `parts` to the new file `path`, and waits until they are on disk.
fn write_synced(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let mut file = File::create(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.sync_all()
}

/// Renames `from` to `to` in the same directory, and waits until that is on disk.
fn rename_synced(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    to.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}
