//! What a confined program can read: system libraries, programs and its interpreter.
//!
//! Invariant: a view never holds a whole file system or somebody's home. It looks at paths only, not into files.

use std::path::{Path, PathBuf};

/// Directories and files that are there on ordinary systems and hold no secrets.
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

/// The files that a program can read, beside its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    added: Vec<PathBuf>,
    witness: Option<PathBuf>,
}

impl View {
    /// The system and `directories` with all that is in them, by the path given and by the one it leads to. The file `witness`
    /// must be readable in the sandbox, or the sandbox is of no use.
    ///
    /// # Errors
    /// A directory that is the root, directly under it, or a home, as that would show the program what it must not see.
    pub fn new(directories: &[PathBuf], witness: Option<PathBuf>) -> Result<Self, String> {
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
                        "the program would see all of {}; use an interpreter that lies in a directory of its own",
                        path.display()
                    ));
                }
                added.push(path);
            }
        }
        // A directory comes before what is in it.
        added.sort();
        Ok(Self { added, witness })
    }

    /// Paths that exist: those of the system, then the added ones.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let system = SYSTEM.iter().map(PathBuf::from).filter(|path| path.exists());
        system.chain(self.added.iter().cloned()).collect()
    }

    pub(super) fn witness(&self) -> Option<&Path> {
        self.witness.as_deref()
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
    fn a_view_holds_no_whole_system() {
        for path in ["/", "/etc", "relative"] {
            let error = View::new(&[PathBuf::from(path)], None).unwrap_err();
            assert!(error.contains(path), "{error}");
        }
        assert_eq!(View::new(&[PathBuf::from("/usr/bin")], None).unwrap(), View::default());
    }

    #[test]
    fn programs_are_found_by_name_and_by_path() {
        let shell = find("sh", "relative:/nowhere:/bin:/usr/bin").unwrap();
        assert_eq!(find(shell.to_str().unwrap(), ""), Some(shell));
        assert_eq!(find("no-such-program", "/bin"), None);
    }
}
