//! The files that a confined program can read: system libraries, programs and its interpreter.
//!
//! Invariant: the list never has a whole file system or a home directory. Only paths are examined, not contents of files.

use std::path::{Path, PathBuf};

/// Directories and files of ordinary systems, without secrets.
const SYSTEM: [&str; 14] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/run/current-system",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
];

/// Devices that every program may use.
pub(super) const DEVICES: [&str; 4] = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"];

/// The files that a program can read, besides its own file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadableFiles {
    added: Vec<PathBuf>,
    required: Option<PathBuf>,
}

impl ReadableFiles {
    /// The system and `directories` with all that is in them, by the given path and by its canonical path. The sandbox is usable
    /// only if the file `required` can be read in it.
    ///
    /// # Errors
    /// A directory is the root, directly under it, or a home directory: the program would see files that it must not see.
    pub fn new(directories: &[PathBuf], required: Option<PathBuf>) -> Result<Self, String> {
        let mut added: Vec<PathBuf> = Vec::new();
        for directory in directories {
            let real =
                directory.canonicalize().map_err(|error| format!("{}: {error}", directory.display()))?;
            for path in [directory.clone(), real] {
                if added.contains(&path) || SYSTEM.iter().any(|system| path.starts_with(system)) {
                    continue;
                }
                let depth = path.components().count() - 1;
                let home = depth == 2 && (path.starts_with("/home") || path.starts_with("/Users"));
                if !path.is_absolute() || depth < 2 || home {
                    return Err(format!(
                        "the program would see all of {}; use an interpreter in a directory of its own",
                        path.display()
                    ));
                }
                added.push(path);
            }
        }
        // A directory comes before its contents.
        added.sort();
        Ok(Self { added, required })
    }

    /// Paths that exist: those of the system, then the added ones.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let system = SYSTEM.iter().map(PathBuf::from).filter(|path| path.exists());
        system.chain(self.added.iter().cloned()).collect()
    }

    pub(super) fn required(&self) -> Option<&Path> {
        self.required.as_deref()
    }
}

/// The first executable file `name` in a list of directories that are separated by colons.
#[must_use]
pub fn find(name: &str, path: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let executable = |file: &PathBuf| {
        file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(executable);
    }
    path.split(':')
        .filter(|directory| directory.starts_with('/'))
        .map(|directory| Path::new(directory).join(name))
        .find(executable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_and_system_directories_are_refused() {
        for path in ["/", "/etc", "relative"] {
            let error = ReadableFiles::new(&[PathBuf::from(path)], None).unwrap_err();
            assert!(error.contains(path), "{error}");
        }
        assert_eq!(ReadableFiles::new(&[PathBuf::from("/usr/bin")], None).unwrap(), ReadableFiles::default());
    }

    #[test]
    fn programs_are_found_by_name_and_by_path() {
        let shell = find("sh", "relative:/nowhere:/bin:/usr/bin").unwrap();
        assert_eq!(find(shell.to_str().unwrap(), ""), Some(shell));
        assert_eq!(find("no-such-program", "/bin"), None);
    }
}
