//! Recipes to start from.
//!
//! Invariant: a template is a recipe of the repository, comments included; nothing that exists is overwritten.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A recipe to start from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Template {
    /// Additions, from nothing, on a laptop CPU.
    #[default]
    GrpoMath,
    /// Arithmetic questions in words with SmolLM2-135M-Instruct, on a laptop CPU.
    GrpoSmollm,
    /// Grade School Math 8K with an instruction-tuned model.
    GrpoGsm8k,
}

/// Why a template cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// The file exists.
    #[error("`{path}` exists and is left as it is; name another file: `rlrun init FILE`")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The file system refused.
    #[error("cannot write `{path}`: {source}; name another file: `rlrun init FILE`")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl Template {
    /// File name that the template is written to if none is given.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Self::GrpoMath => "grpo_math.toml",
            Self::GrpoSmollm => "grpo_smollm.toml",
            Self::GrpoGsm8k => "grpo_gsm8k.toml",
        }
    }

    /// The recipe with its comments.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::GrpoMath => include_str!("../recipes/grpo_math.toml"),
            Self::GrpoSmollm => include_str!("../recipes/grpo_smollm.toml"),
            Self::GrpoGsm8k => include_str!("../recipes/grpo_gsm8k.toml"),
        }
    }
}

/// Writes a template to a new file.
///
/// # Errors
/// The file exists or cannot be written.
pub fn init(template: Template, path: &Path) -> Result<(), InitError> {
    let io = |source| InitError::Io { path: path.to_path_buf(), source };
    let opened = OpenOptions::new().write(true).create_new(true).open(path);
    let mut file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => InitError::Exists { path: path.to_path_buf() },
        _ => io(error),
    })?;
    file.write_all(template.text().as_bytes()).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_written_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(Template::GrpoGsm8k.file_name());
        init(Template::GrpoGsm8k, &path).unwrap();
        let error = init(Template::GrpoMath, &path).unwrap_err().to_string();
        assert!(error.contains("exists and is left as it is"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), Template::GrpoGsm8k.text());
        let nowhere = directory.path().join("missing/r.toml");
        assert!(init(Template::GrpoMath, &nowhere).unwrap_err().to_string().starts_with("cannot write"));
    }
}
