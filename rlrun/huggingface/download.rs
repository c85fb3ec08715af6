//! One file from the hub into the cache.
//!
//! ```text
//!   HEAD: content, length -> lock -> resume ETAG.incomplete in requests of one wait each -> length, digest -> rename -> link
//! ```
//! Invariant: a blob gets its name when its length and, where the hub names one, its digest are right. A request ends after one
//! wait whatever has arrived, and the next resumes there, at a new address if the old one has expired; several in a row without a
//! byte are an error. What has arrived is kept for the next start, unless it is wrong.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use connect::{Body, Response};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

use super::cache::{CachedRepository, LockFailure};
use super::client::{Asked, RemoteFile, RepositoryClient};
use super::error::RepositoryError;
use super::listing::RepositoryListing;
use super::progress::FetchProgress;

/// Attempts in a row that bring no byte.
const MOST_ATTEMPTS: u32 = 3;
/// Pause after the first attempt without a byte; the second is followed by twice as long.
const PAUSE: Duration = Duration::from_millis(500);
/// Bytes that are read at a time.
const PIECE_BYTES: usize = 1 << 16;
/// A server that cannot resume has to send at least this many bytes per second.
const SLOWEST_BYTES_PER_S: u64 = 1 << 16;

/// What is fetched, from where to where.
pub(super) struct Download<'a> {
    pub(super) client: &'a RepositoryClient,
    pub(super) repository: &'a CachedRepository,
    pub(super) asked: Asked<'a>,
    pub(super) listing: &'a RepositoryListing,
    pub(super) file: &'a str,
}

impl Download<'_> {
    /// Fetches the file; its path in the snapshot.
    pub(super) fn run(&self) -> Result<PathBuf, RepositoryError> {
        let mut remote = self.client.file(self.asked, self.listing, self.file)?;
        let (blob, partial) = self.repository.blob(&remote.etag);
        let lock = self.repository.lock(&remote.etag, self.client.wait() * 2);
        let _lock = lock.map_err(|failure| match failure {
            LockFailure::Write(path, source) => self.write(&path, source),
            LockFailure::Busy(lock) => RepositoryError::Locked {
                name: self.asked.name.to_string(),
                file: self.file.to_owned(),
                seconds: self.client.wait().as_secs() * 2,
                lock,
            },
        })?;
        if !blob.is_file() {
            self.receive(&mut remote, &partial)?;
            self.check(&remote, &partial)?;
            fs::rename(&partial, &blob).map_err(|source| self.write(&blob, source))?;
        }
        let linked = self.repository.link(&self.listing.commit, self.file, &remote.etag);
        linked.map_err(|source| self.write(&blob, source))
    }

    /// Appends to the partial file until it is whole.
    fn receive(&self, remote: &mut RemoteFile, partial: &Path) -> Result<(), RepositoryError> {
        let opened = File::options().create(true).read(true).write(true).truncate(false).open(partial);
        let mut file = opened.map_err(|source| self.write(partial, source))?;
        let mut have = file.seek(SeekFrom::End(0)).map_err(|source| self.write(partial, source))?;
        if have > remote.size {
            have = self.restart(&mut file, partial)?;
        }
        let mut progress = FetchProgress::new(self.file, remote.size, have);
        let (mut fruitless, mut furthest) = (0, have);
        // Without resuming, a request has to bring the whole file.
        let mut resumes = true;
        while have < remote.size {
            let reason = match self.attempt(remote, &mut file, &mut have, &mut resumes, &mut progress) {
                Ok(()) if have < remote.size => "ended before all bytes were there".to_owned(),
                Ok(()) => break,
                Err(Attempt::Fatal(error)) => return Err(error),
                Err(Attempt::Disk(source)) => return Err(self.write(partial, source)),
                Err(Attempt::Again(reason)) => reason,
                Err(Attempt::Expired(status)) => {
                    self.renew(remote)?;
                    format!("was refused with status {status}")
                }
            };
            fruitless = if have > furthest { 0 } else { fruitless + 1 };
            furthest = furthest.max(have);
            if fruitless >= MOST_ATTEMPTS {
                return Err(RepositoryError::BrokenOff {
                    name: self.asked.name.to_string(),
                    file: self.file.to_owned(),
                    reason,
                    attempts: MOST_ATTEMPTS,
                    have,
                    size: remote.size,
                });
            }
            std::thread::sleep(PAUSE * fruitless);
        }
        file.sync_all().map_err(|source| self.write(partial, source))?;
        progress.finish();
        Ok(())
    }

    /// Asks the hub for the address of the file again.
    fn renew(&self, remote: &mut RemoteFile) -> Result<(), RepositoryError> {
        match self.client.file_again(self.asked, self.listing, self.file, remote) {
            Ok(found) => *remote = found,
            Err(error) => {
                // After any other error the next attempt fails as this one, and asks again.
                if let Attempt::Fatal(error) = Attempt::of(error) {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// One request.
    fn attempt(
        &self,
        remote: &RemoteFile,
        file: &mut File,
        have: &mut u64,
        resumes: &mut bool,
        progress: &mut FetchProgress,
    ) -> Result<(), Attempt> {
        let whole = Duration::from_secs(remote.size / SLOWEST_BYTES_PER_S);
        let limit = if *resumes { self.client.wait() } else { self.client.wait() + whole };
        let answer = self.client.download(self.asked, remote, *have, limit).map_err(Attempt::of)?;
        if *have > 0 && !continues(&answer, *have) {
            *resumes = false;
            *have = 0;
            file.set_len(0).map_err(Attempt::Disk)?;
        }
        file.seek(SeekFrom::Start(*have)).map_err(Attempt::Disk)?;
        progress.reach(*have);
        let mut body = answer.into_body().into_reader();
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let count = match body.read(&mut piece) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let stalled =
                        error.kind() == io::ErrorKind::TimedOut || error.to_string().contains("timeout");
                    let seconds = limit.as_secs_f64();
                    return Err(Attempt::Again(match stalled {
                        true => format!("received no byte for up to {seconds} s"),
                        false => format!("broke off ({error})"),
                    }));
                }
            };
            if *have + count as u64 > remote.size {
                return Err(Attempt::Fatal(
                    self.damaged(format!("more than its {} bytes arrived", remote.size)),
                ));
            }
            file.write_all(&piece[..count]).map_err(Attempt::Disk)?;
            *have += count as u64;
            progress.reach(*have);
        }
    }

    /// Compares the whole file with the digest that the hub calls it by, if it is one.
    fn check(&self, remote: &RemoteFile, partial: &Path) -> Result<(), RepositoryError> {
        let hexadecimal = remote.etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut context = match (hexadecimal, remote.etag.len()) {
            (true, 64) => Context::new(&SHA256),
            // The digest of git, which precedes the content with its length.
            (true, 40) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {}\0", remote.size).as_bytes());
                context
            }
            _ => return Ok(()),
        };
        let digest = File::open(partial).and_then(|mut file| {
            let mut piece = vec![0; PIECE_BYTES];
            loop {
                match file.read(&mut piece)? {
                    0 => return Ok(context.finish()),
                    count => context.update(&piece[..count]),
                }
            }
        });
        let digest = digest.map_err(|source| self.write(partial, source))?;
        let found: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        if found.eq_ignore_ascii_case(&remote.etag) {
            return Ok(());
        }
        // It would never become right.
        let _ = fs::remove_file(partial);
        Err(self.damaged(format!("its digest is {found}, and the hub says {}", remote.etag)))
    }

    fn restart(&self, file: &mut File, partial: &Path) -> Result<u64, RepositoryError> {
        file.set_len(0).map_err(|source| self.write(partial, source))?;
        Ok(0)
    }

    fn damaged(&self, reason: String) -> RepositoryError {
        RepositoryError::Damaged { name: self.asked.name.to_string(), file: self.file.to_owned(), reason }
    }

    fn write(&self, path: &Path, source: io::Error) -> RepositoryError {
        RepositoryError::Write { name: self.asked.name.to_string(), path: path.to_owned(), source }
    }
}

/// Why a request did not bring the rest of the file.
enum Attempt {
    /// Another request may.
    Again(String),
    /// One to another address may: this one is refused with this HTTP status.
    Expired(u16),
    /// None will.
    Fatal(RepositoryError),
    /// The disk refuses the bytes.
    Disk(io::Error),
}

impl Attempt {
    /// What an error of the client means for the next request.
    fn of(error: RepositoryError) -> Self {
        match error {
            RepositoryError::Unreachable { reason, .. } => Self::Again(format!("broke off ({reason})")),
            RepositoryError::Refused { status, .. } if status >= 500 || status == 429 => {
                Self::Again(format!("was refused with status {status}"))
            }
            RepositoryError::Refused { status: status @ (401 | 403 | 404 | 410), .. } => {
                Self::Expired(status)
            }
            error => Self::Fatal(error),
        }
    }
}

/// Whether an answer begins at byte `from`.
fn continues(answer: &Response<Body>, from: u64) -> bool {
    let range = answer.headers().get("content-range").and_then(|range| range.to_str().ok());
    answer.status().as_u16() == 206
        && range.is_some_and(|range| {
            range.strip_prefix("bytes ").is_some_and(|range| range.starts_with(&format!("{from}-")))
        })
}
