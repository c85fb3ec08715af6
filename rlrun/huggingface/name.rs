//! The name of a model or a dataset on the Hugging Face Hub, as recipes and the command line write it.
//!
//! ```text
//!   hf:OWNER/NAME                          a model; of a dataset the default configuration
//!   hf:OWNER/NAME/FILE                     one file, such as one quantisation of a GGUF repository
//!   hf:OWNER/NAME:CONFIG[:SPLIT]           a configuration of a dataset, and its split; hf:OWNER/NAME::SPLIT of the default one
//!   ..@REVISION                            behind each of these: a branch, a tag or a commit; `main` by default
//! ```
//! Invariant: a name that was parsed is safe as a part of paths and addresses, and is written as it was read.

use std::fmt;
use std::path::Path;

/// How every name begins.
const PREFIX: &str = "hf:";
/// Revision where none is named.
const MAIN: &str = "main";
/// Most characters of a repository, a file or a revision.
const MOST_CHARACTERS: usize = 256;

/// What a repository holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RepositoryKind {
    /// A model, or an adapter of one.
    Model,
    /// A dataset.
    Dataset,
}

/// A parsed name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RepositoryName {
    /// `OWNER/NAME`, or `NAME` alone for the oldest models.
    pub(crate) repository: String,
    /// One file of it.
    pub(crate) file: Option<String>,
    /// Configuration of a dataset.
    pub(crate) config: Option<String>,
    /// Split of a dataset.
    pub(crate) split: Option<String>,
    /// Branch, tag or commit.
    pub(crate) revision: Option<String>,
}

impl RepositoryKind {
    /// The word for it in addresses and in the cache.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }
}

impl fmt::Display for RepositoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        })
    }
}

impl RepositoryName {
    /// Whether a path of a recipe is a name on the hub. A file that is called so is written `./hf:..`.
    #[must_use]
    pub(crate) fn is_name(path: &Path) -> bool {
        path.to_str().is_some_and(|text| text.starts_with(PREFIX))
    }

    /// Parses the name of a model or a dataset.
    ///
    /// # Errors
    /// What is wrong with it, and how it is written.
    pub(crate) fn parse(path: &Path, kind: RepositoryKind) -> Result<Self, String> {
        let text = path.to_str().and_then(|text| text.strip_prefix(PREFIX)).unwrap_or_default();
        let (named, revision) = match text.split_once('@') {
            Some((named, revision)) => (named, Some(revision.to_owned())),
            None => (text, None),
        };
        let mut parts = named.split(':');
        let path = parts.next().unwrap_or_default();
        let chosen = |part: Option<&str>| part.filter(|part| !part.is_empty()).map(str::to_owned);
        let (config, split) = (chosen(parts.next()), chosen(parts.next()));
        let mut segments = path.splitn(3, '/');
        let (first, second) = (segments.next().unwrap_or_default(), segments.next());
        let repository = second.map_or(first.to_owned(), |second| format!("{first}/{second}"));
        let name = Self { repository, file: segments.next().map(str::to_owned), config, split, revision };
        let of_dataset = name.config.is_some() || name.split.is_some() || parts.next().is_some();
        if !name.repository.split('/').all(is_plain) {
            return Err(format!("`{}` is no name of a repository; write {}", name.repository, usage(kind)));
        }
        if let Some(file) = name.file.as_ref().filter(|file| !is_file(file)) {
            return Err(format!("`{file}` is no name of a file in a repository; write {}", usage(kind)));
        }
        if let Some(revision) = name.revision.as_ref().filter(|revision| !is_revision(revision)) {
            return Err(format!("`{revision}` is no branch, tag or commit; write {}", usage(kind)));
        }
        let plain = |part: &&String| is_file(part) && !part.contains('/');
        if let Some(part) = name.config.iter().chain(&name.split).find(|part| !plain(part)) {
            return Err(format!("`{part}` is no configuration or split; write {}", usage(kind)));
        }
        if of_dataset
            && (kind == RepositoryKind::Model || name.file.is_some() || named.split(':').count() > 3)
        {
            return Err(format!("`:` names configuration and split of a dataset; write {}", usage(kind)));
        }
        Ok(name)
    }

    /// The revision, `main` by default.
    #[must_use]
    pub(crate) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// The commit, if the revision is one.
    #[must_use]
    pub(crate) fn commit(&self) -> Option<&str> {
        self.revision.as_deref().filter(|revision| is_commit(revision))
    }

    /// The same name at `commit`.
    #[must_use]
    pub(crate) fn at(&self, commit: &str) -> Self {
        Self { revision: Some(commit.to_owned()), ..self.clone() }
    }
}

impl fmt::Display for RepositoryName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.repository)?;
        if let Some(file) = &self.file {
            write!(f, "/{file}")?;
        }
        if self.config.is_some() || self.split.is_some() {
            write!(f, ":{}", self.config.as_deref().unwrap_or_default())?;
        }
        if let Some(split) = &self.split {
            write!(f, ":{split}")?;
        }
        self.revision.as_ref().map_or(Ok(()), |revision| write!(f, "@{revision}"))
    }
}

/// How a name is written.
fn usage(kind: RepositoryKind) -> &'static str {
    match kind {
        RepositoryKind::Model => "hf:OWNER/NAME[/FILE][@REVISION]",
        RepositoryKind::Dataset => {
            "hf:OWNER/NAME[:CONFIG[:SPLIT]][@REVISION] or hf:OWNER/NAME/FILE[@REVISION]"
        }
    }
}

/// Whether a text is a commit as the hub writes it.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Whether a text is the path of a file within a repository, and of none outside.
pub(super) fn is_file(text: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    text.split('/').all(plain)
        && text.chars().count() <= MOST_CHARACTERS
        && !text.contains(|c: char| c.is_control() || "\\:@".contains(c))
}

/// Whether a text is the owner or the name of a repository. The hub refuses `--` and `..`, and the cache relies on it.
fn is_plain(text: &str) -> bool {
    let usual = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let edge = |c: char| c == '-' || c == '.';
    !text.is_empty()
        && text.len() <= MOST_CHARACTERS
        && text.chars().all(usual)
        && !text.starts_with(edge)
        && !text.ends_with(edge)
        && !text.contains("--")
        && !text.contains("..")
}

fn is_revision(text: &str) -> bool {
    let usual = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
    is_file(text) && text.chars().all(usual) && !text.starts_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_as_they_are_read() {
        use RepositoryKind::{Dataset, Model};
        for (text, kind) in [
            ("hf:HuggingFaceTB/SmolLM2-135M-Instruct", Model),
            ("hf:gpt2@refs/pr/5", Model),
            ("hf:owner/name/folder/model-Q4_0.gguf@v1.0", Model),
            ("hf:openai/gsm8k", Dataset),
            ("hf:openai/gsm8k:main", Dataset),
            ("hf:openai/gsm8k:main:test@e53f048856ff4f594e959d75785d2c2d37b678ee", Dataset),
            ("hf:openai/gsm8k::test", Dataset),
            ("hf:owner/name/data/a b.parquet", Dataset),
        ] {
            let name = RepositoryName::parse(Path::new(text), kind).unwrap();
            assert_eq!(name.to_string(), text);
        }
        let name = RepositoryName::parse(Path::new("hf:openai/gsm8k::test"), Dataset).unwrap();
        assert_eq!((name.config, name.split.as_deref()), (None, Some("test")));
        assert_eq!((name.revision.as_deref(), name.repository.as_str()), (None, "openai/gsm8k"));
    }

    #[test]
    fn what_is_no_name_is_refused_with_the_form() {
        use RepositoryKind::{Dataset, Model};
        for (text, kind) in [
            ("hf:", Model),
            ("hf:owner/", Model),
            ("hf:/name", Model),
            ("hf:../../etc", Model),
            ("hf:a--b/c", Model),
            ("hf:owner/name/../../x", Model),
            ("hf:owner/name/", Model),
            ("hf:owner/name@", Model),
            ("hf:owner/name@../x", Model),
            ("hf:owner/name@a b", Model),
            ("hf:owner/name:main", Model),
            ("hf:owner/name:a:b:c", Dataset),
            ("hf:owner/name/file.json:main", Dataset),
            ("hf:own er/name", Dataset),
            ("hf:https://huggingface.co/owner/name", Dataset),
        ] {
            let reason = RepositoryName::parse(Path::new(text), kind).unwrap_err();
            assert!(reason.contains("write hf:OWNER/NAME"), "{text}: {reason}");
        }
        assert!(!RepositoryName::is_name(Path::new("./hf:a/b")) && !RepositoryName::is_name(Path::new("a")));
    }
}
