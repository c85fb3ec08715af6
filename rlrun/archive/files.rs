//! The files of a run directory that an archive has.
//!
//! Invariant: files with secrets (`credentials/`), of this machine (`lock`, `address.json`, `status.json`) and the journal of the
//! buffer are not among them. Nothing is stored or fetched that is not named here.

use std::io;
use std::path::{Path, PathBuf};

use super::bucket::BucketError;

/// Files beside the checkpoints.
const FILES: [&str; 9] = [
    "run.json",
    // The mark by which a database knows the run.
    "database.id",
    "recipe.toml",
    "resolved.toml",
    "metrics.jsonl",
    "events.jsonl",
    "curation.jsonl",
    "timeline.jsonl",
    crate::schedule::FILE,
];
/// Directories beside the checkpoints: `model` and `reference` are what a run compares with and was made from.
const DIRECTORIES: [&str; 5] = ["samples", "logs", "model", "reference", "tensorboard"];
/// The directory of checkpoints.
pub(super) const CHECKPOINTS: &str = "checkpoints/";
/// The file that makes a directory a run.
pub(super) const RESOLVED: &str = "resolved.toml";
/// Deepest directory.
const MAX_DEPTH: usize = 8;

/// Whether a path in a run directory is one that an archive may have.
pub(super) fn is_known(path: &str) -> bool {
    let first = path.split('/').next().unwrap_or_default();
    FILES.contains(&path) || path.starts_with(CHECKPOINTS) || (first != path && DIRECTORIES.contains(&first))
}

/// Paths of the files beside the checkpoints, relative to the run directory, with slashes.
pub(super) fn beside_checkpoints(run_dir: &Path) -> Result<Vec<String>, BucketError> {
    let mut found: Vec<String> =
        FILES.iter().filter(|name| run_dir.join(name).is_file()).map(|name| (*name).to_owned()).collect();
    for name in DIRECTORIES {
        collect(&run_dir.join(name), name, 0, &mut found)?;
    }
    Ok(found)
}

/// Paths of the files under `directory`, which lies in the run directory; the manifest of a checkpoint is the last.
pub(super) fn under(run_dir: &Path, directory: &Path) -> Result<Vec<String>, BucketError> {
    let relative = directory.strip_prefix(run_dir).map_err(|_| {
        let reason = format!("it is not in the run directory {}", run_dir.display());
        BucketError::Changed(directory.to_owned(), reason)
    })?;
    let mut found = Vec::new();
    let name = relative.to_string_lossy().into_owned();
    collect(directory, &name, 0, &mut found)?;
    let manifest = format!("{name}/{}", model::manifest::MANIFEST);
    found.sort_by_key(|path| *path == manifest);
    Ok(found)
}

/// Adds the regular files under a directory, which may be absent, in the order of their names.
fn collect(directory: &Path, name: &str, depth: usize, found: &mut Vec<String>) -> Result<(), BucketError> {
    let failed = |source| BucketError::Local("read", directory.to_owned(), source);
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if depth > MAX_DEPTH {
        return Err(failed(io::Error::other("it is too deep")));
    }
    let mut entries = entries.collect::<io::Result<Vec<_>>>().map_err(failed)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type().map_err(failed)?;
        let path = format!("{name}/{}", entry.file_name().to_string_lossy());
        if kind.is_dir() {
            collect(&entry.path(), &path, depth + 1, found)?;
        } else if kind.is_file() {
            found.push(path);
        }
    }
    Ok(())
}

/// The name of the object of a path, of letters that every store and every listing leaves as they are.
pub(super) fn object_name(path: &str) -> String {
    let letter = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'/' => char::from(byte).to_string(),
        other => format!("={other:02x}"),
    };
    path.bytes().map(letter).collect()
}

/// The local path of a path with slashes.
pub(super) fn local(run_dir: &Path, path: &str) -> PathBuf {
    path.split('/').fold(run_dir.to_owned(), |directory, part| directory.join(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_objects_are_plain_and_of_one_path_each() {
        assert_eq!(object_name("samples/step_000001.jsonl"), "samples/step_000001.jsonl");
        assert_eq!(object_name("logs/reward_a~b #1.log"), "logs/reward_a=7eb=20=231.log");
        assert_eq!(object_name("a=7e"), "a=3d7e");
    }

    #[test]
    fn secrets_and_files_of_the_machine_are_left_out_and_the_manifest_comes_last() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str| {
            let path = local(root.path(), path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        };
        for path in [
            "resolved.toml",
            "credentials/token",
            "address.json",
            "lock",
            "buffer.redb",
            "samples/step_000001.jsonl",
            "checkpoints/step_000001/manifest.json",
            "checkpoints/step_000001/model/config.json",
            "checkpoints/step_000001/optimizer.safetensors",
        ] {
            write(path);
        }
        assert_eq!(beside_checkpoints(root.path()).unwrap(), ["resolved.toml", "samples/step_000001.jsonl"]);
        let checkpoint = under(root.path(), &root.path().join("checkpoints/step_000001")).unwrap();
        assert_eq!(checkpoint.last().unwrap(), "checkpoints/step_000001/manifest.json");
        assert_eq!(checkpoint.len(), 3);
        assert!(checkpoint.iter().all(|path| is_known(path)) && is_known("logs/attempt_1.log"));
        for path in ["credentials/token", "lock", "samples", "buffer.redb", "resolved.toml/x"] {
            assert!(!is_known(path), "{path}");
        }
    }
}
