//! The manifest of a directory that rlrun wrote for itself: a blake3 digest of every file.
//!
//! ```text
//! manifest.json   { "rlrun_manifest": 1, "files": { "model.safetensors": { "bytes": 6256, "blake3": "..." } } }
//! ```
//!
//! A subdirectory with a manifest of its own is listed by that manifest, so that it can be checked, and copied, alone.
//!
//! Invariant: a directory passes its check if and only if every file that was there when the manifest was written has
//! the same bytes. Later files are ignored, and so is a `manifest.json` that rlrun did not write.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{ModelError, atomic, files};

/// Name of the file.
pub const MANIFEST: &str = "manifest.json";
/// Version of its layout.
const FORMAT: u64 = 1;
/// Bytes that are digested at a time.
const CHUNK: usize = 1 << 20;
/// Deepest directory under one with a manifest; a checkpoint has two levels.
const MAX_DEPTH: usize = 8;

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    /// Marks the file as rlrun's; its format version.
    rlrun_manifest: u64,
    /// By path from the directory, with slashes.
    files: BTreeMap<String, ManifestEntry>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ManifestEntry {
    bytes: u64,
    blake3: String,
}

/// Writes the manifest of all files in `dir`.
///
/// # Errors
/// If a file cannot be read, or the manifest cannot be written.
pub fn write(dir: &Path) -> Result<(), ModelError> {
    let mut files = BTreeMap::new();
    collect(dir, "", 0, &mut files)?;
    let path = dir.join(MANIFEST);
    let text = serde_json::to_string_pretty(&Manifest { rlrun_manifest: FORMAT, files });
    let text = text.map_err(io::Error::other).map(|text| text + "\n");
    let text = text.map_err(|source| ModelError::Write { path: path.clone(), source })?;
    atomic::file(&path, |temporary| {
        std::fs::write(temporary, text)
            .map_err(|source| ModelError::Write { path: temporary.to_owned(), source })
    })
}

/// Checks every file that the manifest of `dir` names; false if there is no manifest.
///
/// # Errors
/// [`ModelError::Damaged`] for a file that is missing or has other bytes, and for a manifest that is no JSON or of a
/// newer layout; [`ModelError::Read`].
pub fn check(dir: &Path) -> Result<bool, ModelError> {
    let Some(manifest) = open(dir)? else { return Ok(false) };
    for (name, expected) in &manifest.files {
        let path = dir.join(name);
        let found = match entry(&path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(damaged(dir, path, "it is missing".to_owned()));
            }
            Err(source) => return Err(ModelError::Read { path, source }),
        };
        if found != *expected {
            let reason = if found.bytes == expected.bytes {
                format!("its blake3 digest is {}, and {} was written", found.blake3, expected.blake3)
            } else {
                format!("it has {} bytes, and {} were written", found.bytes, expected.bytes)
            };
            return Err(damaged(dir, path, reason));
        }
        if let Some(inner) = path.parent().filter(|_| name.contains('/') && name.ends_with(MANIFEST)) {
            check(inner)?;
        }
    }
    Ok(true)
}

fn open(dir: &Path) -> Result<Option<Manifest>, ModelError> {
    let path = dir.join(MANIFEST);
    let text = match files::read(&path, files::MAX_JSON_BYTES) {
        Ok(text) => text,
        // A model in one file is no directory, and has none.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(source) => return Err(ModelError::Read { path, source }),
    };
    let value: serde_json::Value = serde_json::from_slice(&text)
        .map_err(|error| damaged(dir, path.clone(), format!("it is not JSON: {error}")))?;
    let Some(format) = value.get("rlrun_manifest") else { return Ok(None) };
    if format.as_u64() != Some(FORMAT) {
        let reason =
            format!("it has format {format}, and this rlrun reads {FORMAT}; use the rlrun that wrote it");
        return Err(damaged(dir, path, reason));
    }
    let manifest: Manifest = serde_json::from_value(value)
        .map_err(|error| damaged(dir, path.clone(), format!("it is no manifest: {error}")))?;
    let outside = |name: &&String| Path::new(name).components().any(|part| !is_plain(part));
    if let Some(name) = manifest.files.keys().find(outside) {
        return Err(damaged(dir, path, format!("it names `{name}`, which is not in the directory")));
    }
    Ok(Some(manifest))
}

fn is_plain(part: std::path::Component<'_>) -> bool {
    matches!(part, std::path::Component::Normal(_))
}

/// Adds all files under `dir`, whose path from the top is `prefix`.
fn collect(
    dir: &Path,
    prefix: &str,
    depth: usize,
    found: &mut BTreeMap<String, ManifestEntry>,
) -> Result<(), ModelError> {
    let read = |path: &Path, source| ModelError::Read { path: path.to_owned(), source };
    if depth > MAX_DEPTH {
        return Err(read(dir, io::Error::other("it is too deep for a manifest")));
    }
    let own = dir.join(MANIFEST);
    if depth > 0 && own.is_file() {
        found.insert(format!("{prefix}{MANIFEST}"), entry(&own).map_err(|error| read(&own, error))?);
        return Ok(());
    }
    for listed in std::fs::read_dir(dir).map_err(|error| read(dir, error))? {
        let listed = listed.map_err(|error| read(dir, error))?;
        let (path, name) = (listed.path(), listed.file_name().to_string_lossy().into_owned());
        if path.is_dir() {
            collect(&path, &format!("{prefix}{name}/"), depth + 1, found)?;
        } else if path != own {
            found.insert(format!("{prefix}{name}"), entry(&path).map_err(|error| read(&path, error))?);
        }
    }
    Ok(())
}

fn entry(path: &Path) -> io::Result<ManifestEntry> {
    let mut file = files::open(path)?;
    let (mut hasher, mut chunk, mut bytes) = (blake3::Hasher::new(), vec![0; CHUNK], 0);
    loop {
        let read = match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hasher.update(&chunk[..read]);
        bytes += read as u64;
    }
    Ok(ManifestEntry { bytes, blake3: hasher.finalize().to_hex().to_string() })
}

fn damaged(dir: &Path, path: PathBuf, reason: String) -> ModelError {
    ModelError::Damaged { path, reason, manifest: dir.join(MANIFEST) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A directory with a file, a plain subdirectory and one with a manifest of its own.
    fn written() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, content) in [("a", "one"), ("plain/b", "two"), ("own/c", "three")] {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        write(&root.path().join("own")).unwrap();
        write(root.path()).unwrap();
        root
    }

    #[test]
    fn every_file_is_digested_and_later_ones_are_not_looked_at() {
        let root = written();
        assert!(check(root.path()).unwrap());
        let text = fs::read_to_string(root.path().join(MANIFEST)).unwrap();
        for name in ["\"a\"", "\"plain/b\"", "\"own/manifest.json\""] {
            assert!(text.contains(name), "{text}");
        }
        assert!(
            !text.contains("own/c") && text.contains(&blake3::hash(b"two").to_hex().to_string()),
            "{text}"
        );
        fs::write(root.path().join("notes"), "mine").unwrap();
        assert!(check(root.path()).unwrap());
        assert!(!check(&root.path().join("plain")).unwrap());
    }

    #[test]
    fn a_changed_a_cut_and_a_missing_file_are_named() {
        for (name, content, reason) in [
            ("a", Some("onf"), "its blake3 digest is"),
            ("plain/b", Some("tw"), "it has 2 bytes, and 3 were written"),
            ("own/c", Some("thref"), "its blake3 digest is"),
            ("own/manifest.json", Some("{}"), "it has 2 bytes"),
            ("own/c", None, "it is missing"),
            ("own/manifest.json", None, "it is missing"),
        ] {
            let root = written();
            let path = root.path().join(name);
            match content {
                Some(content) => fs::write(&path, content).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            let error = check(root.path()).unwrap_err();
            let ModelError::Damaged { path: named, .. } = &error else { panic!("{error}") };
            assert_eq!(*named, path);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn a_manifest_of_others_is_left_alone_and_a_broken_one_is_refused() {
        let root = written();
        let path = root.path().join(MANIFEST);
        fs::write(&path, r#"{"name": "a web app"}"#).unwrap();
        assert!(!check(root.path()).unwrap());
        for (content, reason) in [
            ("{", "it is not JSON"),
            (r#"{"rlrun_manifest": 2, "files": {}}"#, "it has format 2, and this rlrun reads 1"),
            (r#"{"rlrun_manifest": 1, "files": 3}"#, "it is no manifest"),
            (
                r#"{"rlrun_manifest": 1, "files": {"../a": {"bytes": 1, "blake3": ""}}}"#,
                "which is not in the directory",
            ),
        ] {
            fs::write(&path, content).unwrap();
            let error = check(root.path()).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
