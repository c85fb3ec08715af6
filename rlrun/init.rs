//! Recipes to start from.
//!
//! Invariant: a template has files of the repository as they are, comments included; nothing that exists is overwritten.

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
    /// A directory with data and a reward function to replace by your own; runs as it is, on a laptop CPU.
    OwnData,
}

/// A file of a template.
#[derive(Clone, Copy, Debug)]
pub struct TemplateFile {
    /// Name in the directory of the template; empty if the template is one file.
    pub name: &'static str,
    /// What it holds.
    pub text: &'static str,
}

const GRPO_MATH: &[TemplateFile] = &[file("", include_str!("../recipes/grpo_math.toml"))];
const GRPO_SMOLLM: &[TemplateFile] = &[file("", include_str!("../recipes/grpo_smollm.toml"))];
const GRPO_GSM8K: &[TemplateFile] = &[file("", include_str!("../recipes/grpo_gsm8k.toml"))];
const OWN_DATA: &[TemplateFile] = &[
    file("my_task.toml", include_str!("../examples/own_data/my_task.toml")),
    file("my_reward.py", include_str!("../examples/own_data/my_reward.py")),
    file("train.jsonl", include_str!("../examples/own_data/train.jsonl")),
    file("test.jsonl", include_str!("../examples/own_data/test.jsonl")),
];

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
    /// File or directory that the template is written to if none is given.
    #[must_use]
    pub fn default_path(self) -> &'static str {
        match self {
            Self::GrpoMath => "grpo_math.toml",
            Self::GrpoSmollm => "grpo_smollm.toml",
            Self::GrpoGsm8k => "grpo_gsm8k.toml",
            Self::OwnData => "my_task",
        }
    }

    /// Its files, the recipe first.
    #[must_use]
    pub fn files(self) -> &'static [TemplateFile] {
        match self {
            Self::GrpoMath => GRPO_MATH,
            Self::GrpoSmollm => GRPO_SMOLLM,
            Self::GrpoGsm8k => GRPO_GSM8K,
            Self::OwnData => OWN_DATA,
        }
    }

    /// Where `file` of this template is if the template is at `path`.
    #[must_use]
    pub fn place(path: &Path, file: &TemplateFile) -> PathBuf {
        if file.name.is_empty() { path.to_path_buf() } else { path.join(file.name) }
    }
}

const fn file(name: &'static str, text: &'static str) -> TemplateFile {
    TemplateFile { name, text }
}

/// Writes the files of a template; the directory of several is made if there is none. Returns the recipe.
///
/// # Errors
/// A file exists or cannot be written; the files before it are written then.
pub fn init(template: Template, path: &Path) -> Result<PathBuf, InitError> {
    let files = template.files();
    let places: Vec<PathBuf> = files.iter().map(|file| Template::place(path, file)).collect();
    if let Some(there) = places.iter().find(|place| place.exists()) {
        return Err(InitError::Exists { path: there.clone() });
    }
    if files.len() > 1 {
        std::fs::create_dir_all(path).map_err(|source| InitError::Io { path: path.to_path_buf(), source })?;
    }
    for (file, place) in files.iter().zip(&places) {
        write(place, file.text)?;
    }
    Ok(Template::place(path, &files[0]))
}

fn write(path: &Path, text: &str) -> Result<(), InitError> {
    let io = |source| InitError::Io { path: path.to_path_buf(), source };
    let opened = OpenOptions::new().write(true).create_new(true).open(path);
    let mut file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => InitError::Exists { path: path.to_path_buf() },
        _ => io(error),
    })?;
    file.write_all(text.as_bytes()).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_written_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(Template::GrpoGsm8k.default_path());
        init(Template::GrpoGsm8k, &path).unwrap();
        let error = init(Template::GrpoMath, &path).unwrap_err().to_string();
        assert!(error.contains("exists and is left as it is"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), Template::GrpoGsm8k.files()[0].text);
        let own = directory.path().join("a/b");
        assert_eq!(init(Template::OwnData, &own).unwrap(), own.join("my_task.toml"));
        std::fs::remove_file(own.join("my_task.toml")).unwrap();
        let error = init(Template::OwnData, &own).unwrap_err().to_string();
        assert!(error.contains("my_reward.py` exists") && !own.join("my_task.toml").exists(), "{error}");
        let nowhere = directory.path().join("missing/r.toml");
        assert!(init(Template::GrpoMath, &nowhere).unwrap_err().to_string().starts_with("cannot write"));
    }
}
