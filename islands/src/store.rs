//! The files of a coordinator.
//!
//! ```text
//! DIR/lock                          locked by the process that serves the directory
//! DIR/state.bin                     round, terms, outer weights, momentum, residual, and the last outer updates
//! DIR/members.json                  the live islands
//! DIR/contributions/ROUND-NAME.bin  outer gradients of the open round
//! ```
//!
//! `state.bin` is the digest of what follows, the length of a header, the header as JSON, and the values.
//!
//! Invariant: a file is replaced by a rename after its successor is on disk, so a crash leaves the old one or the new one. A damaged
//! file is an error and never a state.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::IslandError;
use crate::coordinator::{ClosedRound, OuterState};
use crate::frame::RoundMessage;
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
}

#[derive(Serialize, Deserialize)]
struct StateHeader {
    format: u32,
    id: String,
    round: u64,
    terms: IslandTerms,
    recent: Vec<RecentRound>,
}

#[derive(Serialize, Deserialize)]
struct RecentRound {
    round: u64,
    islands: BTreeMap<String, String>,
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
            Ok(()) => Ok(Self { dir: dir.to_owned(), _lock: lock }),
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
            islands: closed.islands.clone(),
            bytes: closed.payload.len(),
        };
        let header = StateHeader {
            format: FORMAT,
            id: state.id.clone(),
            round: state.round,
            terms: state.terms.clone(),
            recent: state.recent.iter().map(recent).collect(),
        };
        let header = serde_json::to_vec(&header).unwrap_or_default();
        let length = (header.len() as u64).to_le_bytes();
        let values =
            [&state.weights, &state.momentum, &state.residual].map(|values| bytemuck::cast_slice(values));
        let payloads = state.recent.iter().map(|closed| &closed.payload[..]);
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

    /// Writes a contribution to round `round`.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn save_contribution(
        &self,
        round: u64,
        name: &str,
        run: &str,
        bytes: &[u8],
    ) -> Result<(), IslandError> {
        let payload = [run.as_bytes(), bytes].concat();
        let frame = RoundMessage { round, islands: 1, payload }.to_frame();
        replace(&self.contributions().join(format!("{round}-{name}.bin")), &[&frame])
    }

    fn state(&self) -> PathBuf {
        self.dir.join("state.bin")
    }

    fn contributions(&self) -> PathBuf {
        self.dir.join("contributions")
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

    /// Files of contributions with their rounds and names.
    fn listed(&self) -> Result<Vec<(PathBuf, u64, String)>, IslandError> {
        let dir = self.contributions();
        let entries = fs::read_dir(&dir).map_err(IslandError::file("list", &dir))?;
        let entry = |entry: io::Result<fs::DirEntry>| {
            let path = entry.ok()?.path();
            let (round, name) = path.file_name()?.to_str()?.strip_suffix(".bin")?.split_once('-')?;
            let (round, name) = (round.parse().ok()?, name.to_owned());
            is_name(&name).then_some((path, round, name))
        };
        Ok(entries.filter_map(entry).collect())
    }

    fn load_contributions(&self, state: &mut OuterState) -> Result<(), IslandError> {
        for (path, round, name) in self.listed()? {
            if round != state.round {
                continue;
            }
            let frame = fs::read(&path).map_err(IslandError::file("read", &path))?;
            let damaged = |_| IslandError::Damaged { what: path.display().to_string(), bytes: 0 };
            let message = RoundMessage::from_frame(frame).map_err(damaged)?;
            let (run, bytes) = message.payload.split_at_checked(RUN_ID).unwrap_or_default();
            let values = state.terms.compression.decode(bytes, state.terms.fragment(round).len())?;
            let run = String::from_utf8_lossy(run).into_owned();
            state.contributions.insert(name, (run, values));
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
    let recent = header.recent.into_iter().map(|RecentRound { round, islands, bytes }| {
        Some(ClosedRound { round, islands, payload: take(bytes)?.into() })
    });
    let recent = recent.collect::<Option<VecDeque<_>>>()?;
    let (members, contributions, first) = (BTreeMap::new(), BTreeMap::new(), None);
    let StateHeader { id, round, terms, .. } = StateHeader { recent: Vec::new(), ..header };
    Some(OuterState { id, terms, round, weights, momentum, residual, recent, members, contributions, first })
}

/// Writes `parts` to a file beside `path`, which is then renamed to it.
pub(crate) fn replace(path: &Path, parts: &[&[u8]]) -> Result<(), IslandError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let write = || -> io::Result<()> {
        let mut file = File::create(&partial)?;
        parts.iter().try_for_each(|part| file.write_all(part))?;
        file.sync_all()?;
        fs::rename(&partial, path)?;
        path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    };
    write().map_err(IslandError::file("write", path))
}
