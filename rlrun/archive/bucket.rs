//! The operations on the objects of an archive, by name within it.
//!
//! Invariant: an operation ends: requests have deadlines, and are repeated a few times with growing pauses if the server fails,
//! limits the rate or does not answer. A conditional put happens once or not at all, or reports that it is not known.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{
    BackoffConfig, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig, UpdateVersion,
};
use tokio::runtime::Runtime;

use super::http::{BucketHttp, MAX_ANSWER_BYTES, ServerClock};
use super::url::ArchiveScheme;
use super::{ArchiveError, ArchiveUrl};

/// Requests at the same time.
pub(super) const PARALLEL: usize = 4;
/// Threads for requests: those in parallel, and those for credentials.
const THREADS: usize = PARALLEL * 2;
/// Repetitions of a request.
const RETRIES: usize = 4;
/// Time after which a request is not repeated.
const RETRY_FOR: Duration = Duration::from_secs(30);
/// Longest pause before a repetition.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Time for the lock of a directory, seconds.
const LOCK_WAIT_S: u64 = 30;
/// Pause between two attempts at the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// Most objects of an archive that are listed.
const MAX_LISTED: usize = 1 << 20;
/// Longest reason that is shown, characters.
const MAX_REASON: usize = 600;

/// Why an operation failed.
#[derive(Debug)]
pub(super) enum BucketError {
    /// There is no such object.
    Missing(String),
    /// The object is not the expected version.
    Conflict,
    /// The user may not.
    Refused(String),
    /// The server fails, limits the rate or does not answer; whether it has done it is not known.
    Unavailable(String),
    /// An object is not what was written.
    Damaged(String),
    /// A local file changed.
    Changed(PathBuf, String),
    /// A local file cannot be used.
    Local(&'static str, PathBuf, std::io::Error),
}

impl From<object_store::Error> for BucketError {
    fn from(error: object_store::Error) -> Self {
        let reason = reason(&error.to_string());
        match error {
            object_store::Error::NotFound { .. } => Self::Missing(reason),
            object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. } => {
                Self::Conflict
            }
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. }
            | object_store::Error::InvalidPath { .. }
            | object_store::Error::NotSupported { .. }
            | object_store::Error::NotImplemented { .. } => Self::Refused(reason),
            _ => Self::Unavailable(reason),
        }
    }
}

/// What an error says, without the queries of addresses, which may have signatures.
fn reason(text: &str) -> String {
    // The cause stands behind the description of the request.
    let cause = text.rsplit_once(" - ").map_or(text, |(_, cause)| cause);
    let words = cause.split_whitespace().map(|word| match word.split_once('?') {
        Some((address, _)) if address.contains("://") => address,
        _ => word,
    });
    let words: Vec<&str> = words.collect();
    words.join(" ").trim_end_matches([':', ' ']).chars().take(MAX_REASON).collect()
}

impl BucketError {
    /// The error of an archive at `url` that could not `what`.
    pub(super) fn into_error(self, url: &ArchiveUrl, what: &str) -> ArchiveError {
        let (url, what) = (url.to_string(), what.to_owned());
        match self {
            Self::Missing(reason)
                if reason.contains("NoSuchBucket") || reason.contains("bucket does not exist") =>
            {
                ArchiveError::NoBucket { url, reason }
            }
            Self::Missing(reason) => ArchiveError::Damaged { url, object: what, reason },
            Self::Conflict => ArchiveError::Unavailable {
                url,
                what,
                reason: "another process wrote at the same time".to_owned(),
                waited_s: 0.0,
            },
            Self::Refused(reason) => ArchiveError::Refused { url, what, reason },
            Self::Unavailable(reason) => ArchiveError::Unavailable { url, what, reason, waited_s: 0.0 },
            Self::Damaged(reason) => ArchiveError::Damaged { url, object: what, reason },
            Self::Changed(path, reason) => ArchiveError::Changed { path, reason },
            Self::Local(verb, path, source) => ArchiveError::Local { verb, path, source },
        }
    }
}

/// An open archive.
pub(super) struct Bucket {
    url: ArchiveUrl,
    store: Arc<dyn ObjectStore>,
    runtime: Runtime,
    clock: ServerClock,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Bucket {
    /// Opens the store of `url` with the credentials of `environment`. Nothing is requested yet.
    ///
    /// # Errors
    /// Variables of the store that make no sense; a directory that cannot be made.
    pub(super) fn open(
        url: &ArchiveUrl,
        environment: &BTreeMap<String, String>,
    ) -> Result<Self, ArchiveError> {
        let clock = ServerClock::default();
        let settings = |reason| ArchiveError::Settings { url: url.to_string(), reason };
        let http = BucketHttp::new(Arc::clone(&clock)).map_err(settings)?;
        let store = store(url, environment, http).map_err(|error| match error {
            BucketError::Local(verb, path, source) => ArchiveError::Local { verb, path, source },
            BucketError::Missing(reason)
            | BucketError::Refused(reason)
            | BucketError::Unavailable(reason) => settings(reason),
            other => other.into_error(url, "open the store"),
        })?;
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime =
            builder.enable_time().max_blocking_threads(THREADS).thread_name("archive-request").build();
        let runtime = runtime.map_err(|error| settings(format!("no threads for requests: {error}")))?;
        Ok(Self { url: url.clone(), store, runtime, clock })
    }

    pub(super) fn url(&self) -> &ArchiveUrl {
        &self.url
    }

    pub(super) fn store(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.store)
    }

    pub(super) fn wait_for<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// The clock of the server as of its last answer minus that of this machine, seconds; `None` for directories.
    pub(super) fn clock_difference(&self) -> Option<f64> {
        let (server, here) = (*self.clock.lock().unwrap_or_else(std::sync::PoisonError::into_inner))?;
        Some(match server.duration_since(here) {
            Ok(ahead) => ahead.as_secs_f64(),
            Err(behind) => -behind.duration().as_secs_f64(),
        })
    }

    /// The name of an object in the store.
    pub(super) fn path(&self, name: &str) -> ObjectPath {
        let parts = self.url.prefix().split('/').chain(name.split('/'));
        parts.filter(|part| !part.is_empty()).collect()
    }

    /// Reads an object of at most `limit` bytes, and its version; `None` if there is none.
    pub(super) fn get(
        &self,
        name: &str,
        limit: u64,
    ) -> Result<Option<(Vec<u8>, UpdateVersion)>, BucketError> {
        let path = self.path(name);
        let limit = limit.min(MAX_ANSWER_BYTES);
        self.wait_for(async {
            let found = match self.store.get(&path).await {
                Ok(found) => found,
                // A missing bucket is an error, a missing object is not.
                Err(error @ object_store::Error::NotFound { .. }) => {
                    return match BucketError::from(error) {
                        BucketError::Missing(reason) if reason.contains("NoSuchBucket") => {
                            Err(BucketError::Missing(reason))
                        }
                        _ => Ok(None),
                    };
                }
                Err(error) => return Err(error.into()),
            };
            let version =
                UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
            let size = found.meta.size;
            if size > limit {
                return Err(BucketError::Damaged(format!("it has {size} bytes, more than {limit}")));
            }
            let bytes = found.bytes().await?;
            Ok(Some((bytes.to_vec(), version)))
        })
    }

    /// Writes an object of a name that no other process writes.
    pub(super) fn put(&self, name: &str, bytes: Vec<u8>) -> Result<UpdateVersion, BucketError> {
        let path = self.path(name);
        Ok(self.wait_for(self.store.put(&path, PutPayload::from(bytes)))?.into())
    }

    /// Replaces an object if it is still of the version `expected`; creates it, if there is none, for `None`.
    pub(super) fn put_if(
        &self,
        name: &str,
        bytes: Vec<u8>,
        expected: Option<&UpdateVersion>,
    ) -> Result<UpdateVersion, BucketError> {
        if let Some(directory) = self.url.directory() {
            return self.put_locked(&directory, name, bytes, expected);
        }
        let mode = expected.map_or(PutMode::Create, |version| PutMode::Update(version.clone()));
        let options = PutOptions { mode, ..PutOptions::default() };
        let path = self.path(name);
        Ok(self.wait_for(self.store.put_opts(&path, PutPayload::from(bytes), options))?.into())
    }

    /// [`Self::put_if`] in a directory: a lock makes comparing and replacing one operation.
    fn put_locked(
        &self,
        directory: &Path,
        name: &str,
        bytes: Vec<u8>,
        expected: Option<&UpdateVersion>,
    ) -> Result<UpdateVersion, BucketError> {
        let path = directory.join("lock");
        let failed = |verb| {
            let path = path.clone();
            move |source| BucketError::Local(verb, path, source)
        };
        let lock = std::fs::File::create(&path).map_err(failed("create"))?;
        let begun = Instant::now();
        while let Err(error) = lock.try_lock() {
            match error {
                std::fs::TryLockError::Error(source) => return Err(failed("lock")(source)),
                std::fs::TryLockError::WouldBlock if begun.elapsed() > Duration::from_secs(LOCK_WAIT_S) => {
                    let reason =
                        format!("{} is locked by another process for {LOCK_WAIT_S} s", path.display());
                    return Err(BucketError::Unavailable(reason));
                }
                std::fs::TryLockError::WouldBlock => std::thread::sleep(LOCK_PAUSE),
            }
        }
        let found = self.get(name, MAX_ANSWER_BYTES)?.map(|(_, version)| version);
        if found.as_ref() != expected {
            return Err(BucketError::Conflict);
        }
        self.put(name, bytes)?;
        // The etag of a file is known once it has its name.
        let written = self.get(name, MAX_ANSWER_BYTES)?.map(|(_, version)| version);
        written.ok_or_else(|| BucketError::Missing(format!("{name} was removed")))
    }

    /// Size of an object, bytes; `None` if there is none.
    pub(super) fn size(&self, name: &str) -> Result<Option<u64>, BucketError> {
        let path = self.path(name);
        match self.wait_for(self.store.head(&path)) {
            Ok(found) => Ok(Some(found.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Names of all objects of the archive.
    pub(super) fn list(&self) -> Result<Vec<String>, BucketError> {
        let root = self.path("");
        let prefix = (!root.as_ref().is_empty()).then_some(&root);
        self.wait_for(async {
            let mut names = Vec::new();
            let mut found = self.store.list(prefix);
            while let Some(object) = found.try_next().await? {
                let parts = object.location.prefix_match(&root).into_iter().flatten();
                let parts: Vec<String> = parts.map(|part| part.as_ref().to_owned()).collect();
                names.push(parts.join("/"));
                if names.len() > MAX_LISTED {
                    let reason =
                        format!("it has more than {MAX_LISTED} objects; give each run an archive of its own");
                    return Err(BucketError::Damaged(reason));
                }
            }
            Ok(names)
        })
    }

    /// Removes an object; one that is gone already is no error.
    pub(super) fn delete(&self, name: &str) -> Result<(), BucketError> {
        let path = self.path(name);
        match self.wait_for(self.store.delete(&path)) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// The store of `url`.
fn store(
    url: &ArchiveUrl,
    environment: &BTreeMap<String, String>,
    http: BucketHttp,
) -> Result<Arc<dyn ObjectStore>, BucketError> {
    let backoff = BackoffConfig { max_backoff: LONGEST_PAUSE, ..BackoffConfig::default() };
    let retry = RetryConfig { backoff, max_retries: RETRIES, retry_timeout: RETRY_FOR };
    let of = |prefix: &'static str| {
        let named =
            environment.iter().filter(move |(name, value)| name.starts_with(prefix) && !value.is_empty());
        named.map(|(name, value)| (name.to_ascii_lowercase(), value.clone()))
    };
    let bucket = url.bucket();
    Ok(match url.scheme() {
        ArchiveScheme::Directory => {
            let path = url.directory().unwrap_or_default();
            let local = |source| BucketError::Local("create", path.clone(), source);
            std::fs::create_dir_all(&path).map_err(local)?;
            Arc::new(LocalFileSystem::new_with_prefix(&path)?.with_fsync(true))
        }
        ArchiveScheme::S3 => {
            let keys = of("AWS_").filter_map(|(name, value)| Some((name.parse().ok()?, value)));
            let builder =
                keys.fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value));
            let builder = builder.with_bucket_name(bucket).with_retry(retry).with_http_connector(http);
            Arc::new(builder.build()?)
        }
        ArchiveScheme::Google => {
            let keys = of("GOOGLE_").filter_map(|(name, value)| Some((name.parse().ok()?, value)));
            let builder = keys.fold(GoogleCloudStorageBuilder::new(), |builder, (key, value)| {
                builder.with_config(key, value)
            });
            let builder = builder.with_bucket_name(bucket).with_retry(retry).with_http_connector(http);
            Arc::new(builder.build()?)
        }
        ArchiveScheme::Azure => {
            let keys = of("AZURE_").filter_map(|(name, value)| Some((name.parse().ok()?, value)));
            let mut builder = keys
                .fold(MicrosoftAzureBuilder::new(), |builder, (key, value)| builder.with_config(key, value));
            if let Some(endpoint) = environment.get("IDENTITY_ENDPOINT") {
                builder = builder.with_msi_endpoint(endpoint);
            }
            let builder = builder.with_container_name(bucket).with_retry(retry).with_http_connector(http);
            Arc::new(builder.build()?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(directory: &Path) -> Bucket {
        let url = format!("file://{}", directory.display()).parse().unwrap();
        Bucket::open(&url, &BTreeMap::new()).unwrap()
    }

    #[test]
    fn a_conditional_put_in_a_directory_compares_before_it_replaces() {
        let directory = tempfile::tempdir().unwrap();
        let bucket = open(directory.path());
        assert!(bucket.get("lead.json", 100).unwrap().is_none());
        let first = bucket.put_if("lead.json", b"1".to_vec(), None).unwrap();
        assert!(matches!(bucket.put_if("lead.json", b"2".to_vec(), None), Err(BucketError::Conflict)));
        let second = bucket.put_if("lead.json", b"2".to_vec(), Some(&first)).unwrap();
        assert!(matches!(
            bucket.put_if("lead.json", b"3".to_vec(), Some(&first)),
            Err(BucketError::Conflict)
        ));
        assert_eq!(bucket.get("lead.json", 100).unwrap().unwrap(), (b"2".to_vec(), second));
        bucket.delete("lead.json").unwrap();
        bucket.delete("lead.json").unwrap();
        assert!(matches!(
            bucket.put_if("lead.json", b"4".to_vec(), Some(&first)),
            Err(BucketError::Conflict)
        ));
    }

    #[test]
    fn objects_are_listed_measured_and_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let bucket = open(directory.path());
        bucket.put("e000001/000001/a b", vec![0; 200]).unwrap();
        assert_eq!(bucket.list().unwrap(), ["e000001/000001/a b"]);
        assert_eq!(bucket.size("e000001/000001/a b").unwrap(), Some(200));
        assert_eq!(bucket.size("nothing").unwrap(), None);
        assert!(matches!(bucket.get("e000001/000001/a b", 100), Err(BucketError::Damaged(_))));
    }

    #[test]
    fn reasons_have_no_signatures() {
        let text = "Generic MicrosoftAzure error: Error performing PUT https://a/b?sig=secret in 1s, after 2 retries - \
                    Server returned non-2xx status code: 503 Service Unavailable: see https://a/b?sig=secret";
        let shown = reason(text);
        assert_eq!(shown, "Server returned non-2xx status code: 503 Service Unavailable: see https://a/b");
    }
}
