//! Where an archive is.
//!
//! Invariant: an address has no user name, password or query, so it can be shown and written down. Nothing is opened here.

use std::fmt;
use std::path::Path;
#[cfg(any(feature = "object-store", test))]
use std::path::PathBuf;
use std::str::FromStr;

/// Kind of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArchiveScheme {
    /// Amazon S3, or a server with its protocol.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
    /// A directory, such as one of a shared file system.
    Directory,
}

const SCHEMES: [(&str, ArchiveScheme); 4] = [
    ("s3://", ArchiveScheme::S3),
    ("gs://", ArchiveScheme::Google),
    ("az://", ArchiveScheme::Azure),
    ("file://", ArchiveScheme::Directory),
];

/// The address of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ArchiveUrl {
    scheme: ArchiveScheme,
    /// The bucket or container; empty for a directory.
    bucket: String,
    /// Path of the archive in the bucket without slashes at its ends, or an absolute directory.
    path: String,
}

impl ArchiveUrl {
    /// Whether an argument that may also be a path is an address.
    pub(crate) fn is_one(argument: &Path) -> bool {
        argument.to_str().is_some_and(|text| text.contains("://"))
    }
}

#[cfg(any(feature = "object-store", test))]
impl ArchiveUrl {
    #[cfg(feature = "object-store")]
    pub(crate) fn scheme(&self) -> ArchiveScheme {
        self.scheme
    }

    pub(crate) fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The prefix of all names in the bucket; empty for a directory, which is the archive itself.
    pub(crate) fn prefix(&self) -> &str {
        if self.directory().is_some() { "" } else { &self.path }
    }

    /// The directory, if it is one.
    pub(crate) fn directory(&self) -> Option<PathBuf> {
        (self.scheme == ArchiveScheme::Directory).then(|| PathBuf::from(&self.path))
    }
}

impl fmt::Display for ArchiveUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = SCHEMES.iter().find(|(_, scheme)| *scheme == self.scheme);
        f.write_str(scheme.map_or("", |(text, _)| text))?;
        match self.scheme {
            ArchiveScheme::Directory => f.write_str(&self.path),
            _ => write!(f, "{}/{}", self.bucket, self.path),
        }
    }
}

impl FromStr for ArchiveUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((start, scheme)) = SCHEMES.into_iter().find(|(start, _)| text.starts_with(start)) else {
            return Err("it does not begin with `s3://`, `gs://`, `az://` or `file:///`".to_owned());
        };
        let rest = &text[start.len()..];
        if let Some(refused) =
            rest.chars().find(|c| "@?#%\\*\"".contains(*c) || c.is_whitespace() || c.is_control())
        {
            return Err(format!(
                "it contains {refused:?}; credentials and endpoints belong into variables such as AWS_ENDPOINT_URL"
            ));
        }
        let (bucket, path) = match scheme {
            ArchiveScheme::Directory if !rest.starts_with('/') => {
                return Err("the directory behind `file://` is not absolute".to_owned());
            }
            ArchiveScheme::Directory => ("", rest.trim_end_matches('/')),
            _ => {
                rest.split_once('/').map_or((rest, ""), |(bucket, path)| (bucket, path.trim_end_matches('/')))
            }
        };
        let named = scheme == ArchiveScheme::Directory || !bucket.is_empty();
        let mut segments = path.strip_prefix('/').unwrap_or(path).split('/');
        if !named || path.is_empty() || segments.any(|part| part.is_empty() || part == "." || part == "..") {
            return Err(
                "it needs a bucket and a path in it, one for each run, without empty parts".to_owned()
            );
        }
        Ok(Self { scheme, bucket: bucket.to_owned(), path: path.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_shown() {
        for (text, bucket, prefix) in [
            ("s3://models/runs/a", "models", "runs/a"),
            ("gs://b/a", "b", "a"),
            ("az://container/x/y", "container", "x/y"),
        ] {
            let url: ArchiveUrl = text.parse().unwrap();
            assert_eq!((url.bucket(), url.prefix(), url.directory()), (bucket, prefix, None));
            assert_eq!(url.to_string(), text);
        }
        let url: ArchiveUrl = "file:///var/archive/".parse().unwrap();
        assert_eq!(url.directory().unwrap(), Path::new("/var/archive"));
        assert_eq!((url.prefix(), url.to_string()), ("", "file:///var/archive".to_owned()));
        assert!(ArchiveUrl::is_one(Path::new("s3://b/a")) && !ArchiveUrl::is_one(Path::new("outputs/a")));
    }

    #[test]
    fn addresses_with_secrets_or_without_a_path_are_refused() {
        for (text, reason) in [
            ("http://b/a", "does not begin with"),
            ("s3://key:secret@b/a", "contains '@'"),
            ("az://b/a?sig=x", "contains '?'"),
            ("s3://b", "one for each run"),
            ("s3:///a", "one for each run"),
            ("s3://b/a//c", "without empty parts"),
            ("s3://b/../c", "without empty parts"),
            ("file://a", "not absolute"),
            ("file:///", "one for each run"),
        ] {
            let error = text.parse::<ArchiveUrl>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
