//! An archive of a directory in the form ustar, with the extension of GNU for large files.
//!
//! Invariant: an archive has as many bytes as was announced, or ends with an error. It contains regular files alone: links are not
//! followed and not stored.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// Unit of an archive, bytes.
const BLOCK: usize = 512;
/// Most files of an archive.
const MAX_FILES: usize = 10_000;
/// Deepest directory below that of the archive.
const MAX_DEPTH: usize = 8;
/// Longest name of a file in an archive, bytes.
const MAX_NAME_BYTES: usize = 100;
/// Unit of reads, bytes.
const READ_BYTES: usize = 256 << 10;
/// An empty file that tools of tinker look for: everything is there.
const COMPLETE: &str = "checkpoint_complete";

/// The files of an archive, listed but not read.
#[derive(Debug)]
pub(super) struct TarListing {
    files: Vec<TarFile>,
}

#[derive(Debug)]
struct TarFile {
    /// `None` for an empty file.
    path: Option<PathBuf>,
    name: String,
    bytes: u64,
}

impl TarListing {
    /// Lists the files below `directory`, by name.
    pub(super) fn of(directory: &Path) -> io::Result<Self> {
        let mut files = Vec::new();
        list(directory, "", 0, &mut files)?;
        if !files.iter().any(|file| file.name == COMPLETE) {
            files.push(TarFile { path: None, name: COMPLETE.to_owned(), bytes: 0 });
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { files })
    }

    /// The whole archive, bytes.
    pub(super) fn bytes(&self) -> u64 {
        let block = BLOCK as u64;
        let file = |file: &TarFile| block + file.bytes.div_ceil(block) * block;
        self.files.iter().map(file).sum::<u64>() + 2 * block
    }

    /// Gives the archive to `send` piece by piece, until that returns false.
    pub(super) fn write(&self, mut send: impl FnMut(Vec<u8>) -> bool) -> io::Result<()> {
        for file in &self.files {
            if !send(header(&file.name, file.bytes).to_vec()) {
                return Ok(());
            }
            let Some(path) = &file.path else { continue };
            let mut left = file.bytes;
            let mut source = File::open(path)?;
            while left > 0 {
                let take = left.min(READ_BYTES as u64) as usize;
                let mut piece = vec![0; take];
                source.read_exact(&mut piece)?;
                left -= take as u64;
                if left == 0 {
                    piece.resize(take.next_multiple_of(BLOCK), 0);
                }
                if !send(piece) {
                    return Ok(());
                }
            }
        }
        send(vec![0; 2 * BLOCK]);
        Ok(())
    }
}

fn list(directory: &Path, prefix: &str, depth: usize, files: &mut Vec<TarFile>) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(io::Error::other("its directories are too deep for an archive"));
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if kind.is_dir() {
            list(&entry.path(), &format!("{name}/"), depth + 1, files)?;
        } else if kind.is_file() {
            if name.len() > MAX_NAME_BYTES || files.len() == MAX_FILES {
                return Err(io::Error::other("it has more files or longer names than an archive may have"));
            }
            files.push(TarFile { path: Some(entry.path()), name, bytes: entry.metadata()?.len() });
        }
    }
    Ok(())
}

fn header(name: &str, bytes: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, field: &[u8]| block[at..at + field.len()].copy_from_slice(field);
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    match bytes {
        0..=0o777_7777_7777 => put(124, format!("{bytes:011o}\0").as_bytes()),
        // Binary, marked by its highest bit.
        _ => {
            put(124, &[0x80, 0, 0, 0]);
            put(128, &bytes.to_be_bytes());
        }
    }
    put(136, b"00000000000\0");
    // The sum is made with blanks in its place.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(directory: &Path) -> (TarListing, Vec<u8>) {
        let listing = TarListing::of(directory).unwrap();
        let mut bytes = Vec::new();
        let taken = listing.write(|piece| {
            bytes.extend(piece);
            true
        });
        taken.unwrap();
        (listing, bytes)
    }

    #[test]
    fn an_archive_has_the_files_and_the_announced_size() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("optimizer")).unwrap();
        fs::write(directory.path().join("adapter_config.json"), b"{}").unwrap();
        let large = vec![7; READ_BYTES + 1000];
        fs::write(directory.path().join("optimizer/state"), &large).unwrap();
        let (listing, bytes) = whole(directory.path());
        assert_eq!(bytes.len() as u64, listing.bytes());
        let names: Vec<&str> = listing.files.iter().map(|file| &file.name[..]).collect();
        assert_eq!(names, ["adapter_config.json", COMPLETE, "optimizer/state"]);
        assert_eq!(&bytes[..19], b"adapter_config.json");
        assert_eq!(&bytes[BLOCK..BLOCK + 2], b"{}");
        let state = 4 * BLOCK;
        assert_eq!(&bytes[state - BLOCK..state - BLOCK + 15], b"optimizer/state");
        assert_eq!(&bytes[state..state + large.len()], &large[..]);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/passwd", directory.path().join("adapter_model.safetensors"))
            .unwrap();
        let (listing, _) = whole(directory.path());
        assert_eq!(listing.files.len(), 1, "{listing:?}");
    }

    /// The sums of a header, as Python's `tarfile` reads it.
    #[test]
    fn a_header_has_its_sum_and_its_size() {
        let small = header("a", 0o1234);
        assert_eq!(&small[124..136], b"00000001234\0");
        let sum: u32 = small
            .iter()
            .enumerate()
            .map(|(at, byte)| match at {
                148..156 => 32,
                _ => u32::from(*byte),
            })
            .sum();
        assert_eq!(&small[148..156], format!("{sum:06o}\0 ").as_bytes());
        let large = header("a", 1 << 40);
        assert_eq!(large[124], 0x80);
        assert_eq!(large[128..136], (1_u64 << 40).to_be_bytes());
    }
}
