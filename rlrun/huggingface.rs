//! Models and datasets of the Hugging Face Hub: from names to files in the user's cache.
//!
//! ```text
//!   recipe: hf:OWNER/NAME --pinned--> hf:OWNER/NAME@COMMIT --fetched--> paths in the cache
//!                                     written to the run
//! ```
//! - `name`: what a recipe writes; `listing`: which files of a repository are meant
//! - `cache`: the directory that transformers and other tools share; `client`, `download`: what is not there yet
//! - `progress`, `error`: what the user sees
//!
//! Invariant: names become paths here alone, before a model or a dataset is opened. A name with a commit means the same bytes
//! for ever, and needs no request if they are in the cache. No other crate knows the hub.
//!
//! The crate `hf-hub` is not used: release 0.5 has requests without a deadline, does not compare the length of what it
//! received, and needs a package under the MPL; release 1.0 needs 120 packages more.

mod cache;
mod client;
mod download;
mod error;
mod listing;
mod name;
mod progress;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use model::{Config, ModelError, SequenceScorer};
use rollout::tasks::TaskSplit;
use trainer::ParallelConfig;

use self::cache::{CachedRepository, RepositoryCache, set};
use self::client::{Asked, RepositoryClient};
use self::download::Download;
pub use self::error::RepositoryError;
use self::listing::{ADAPTER, INDEX, RepositoryListing};
pub(crate) use self::name::{RepositoryKind, RepositoryName};
use crate::program::Program;
use crate::recipe::{DataSource, Model, Recipe};

/// Address of the hub.
const ENDPOINT: &str = "https://huggingface.co";
/// How long a request may take, and a download be without a byte; `HF_HUB_DOWNLOAD_TIMEOUT` changes it.
const WAIT: Duration = Duration::from_secs(30);
/// Shortest and longest wait, seconds.
const WAITS_S: (f64, f64) = (0.1, 3600.0);

/// Which of the names of a recipe are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FetchScope {
    /// All.
    Everything,
    /// All but the policy and its adapter, which a checkpoint has.
    Resumed,
    /// All but weights of the policy, the reference, and the adapter.
    WithoutWeights,
    /// Datasets and reward models.
    Data,
    /// The files that describe models.
    Description,
}

/// The hub as the variables of the process describe it.
pub(crate) struct HuggingFace {
    endpoint: String,
    token: Option<String>,
    offline: bool,
    wait: Duration,
    cache: Option<RepositoryCache>,
    /// The commits of branches and tags that were looked up, so that all uses of one are of the same commit.
    commits: Mutex<BTreeMap<(RepositoryKind, String, String), String>>,
}

/// The policy, another model that is read whole, or an adapter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ModelRole {
    Policy,
    Reference,
    Reward,
    Adapter,
}

/// A repository at a commit.
struct PinnedRepository {
    kind: RepositoryKind,
    /// With the commit as its revision.
    name: RepositoryName,
    listing: RepositoryListing,
    cached: CachedRepository,
}

impl HuggingFace {
    /// Reads the variables of the hub's tools: `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`,
    /// `HF_HUB_DOWNLOAD_TIMEOUT`.
    pub(crate) fn of(program: &Program) -> Self {
        let environment = program.environment();
        let yes = |value: String| ["1", "ON", "YES", "TRUE"].contains(&&value.to_uppercase()[..]);
        let seconds =
            set(environment, &["HF_HUB_DOWNLOAD_TIMEOUT"]).and_then(|value| value.parse::<f64>().ok());
        let seconds = seconds.filter(|seconds| seconds.is_finite());
        let token = set(environment, &["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]).or_else(|| {
            let file = set(environment, &["HF_TOKEN_PATH"]).map(PathBuf::from);
            let file = file.or_else(|| Some(cache::home(environment)?.join("token")))?;
            model::files::read_text(&file, 1 << 12).ok()
        });
        Self {
            endpoint: set(environment, &["HF_ENDPOINT"]).unwrap_or_else(|| ENDPOINT.to_owned()),
            // A control character would be no header.
            token: token
                .map(|token| token.trim().to_owned())
                .filter(|token| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic())),
            offline: set(environment, &["HF_HUB_OFFLINE"]).is_some_and(yes),
            wait: seconds
                .map_or(WAIT, |seconds| Duration::from_secs_f64(seconds.clamp(WAITS_S.0, WAITS_S.1))),
            cache: RepositoryCache::of(environment),
            commits: Mutex::default(),
        }
    }

    /// The recipe with the commit in every name, as a run records it.
    ///
    /// # Errors
    /// A repository or a revision that is not there.
    pub(crate) fn pinned(&self, recipe: &Recipe) -> Result<Recipe, RepositoryError> {
        let mut recipe = recipe.clone();
        for (_, path) in models(&mut recipe) {
            self.pin(path, RepositoryKind::Model)?;
        }
        for (_, paths) in datasets(&mut recipe) {
            for path in paths {
                self.pin(path, RepositoryKind::Dataset)?;
            }
        }
        Ok(recipe)
    }

    /// The recipe with files of the cache in the place of names, those that `scope` needs.
    ///
    /// # Errors
    /// A repository, a revision or a file that is not there or cannot be fetched.
    pub(crate) fn fetched(&self, recipe: &Recipe, scope: FetchScope) -> Result<Recipe, RepositoryError> {
        let mut recipe = recipe.clone();
        for (role, path) in models(&mut recipe) {
            let needed = match scope {
                FetchScope::Everything | FetchScope::Description => true,
                FetchScope::Resumed => matches!(role, ModelRole::Reference | ModelRole::Reward),
                FetchScope::WithoutWeights => matches!(role, ModelRole::Policy | ModelRole::Reward),
                FetchScope::Data => role == ModelRole::Reward,
            };
            if needed && RepositoryName::is_name(path) {
                let described = role == ModelRole::Policy && scope == FetchScope::WithoutWeights;
                let whole = !described && scope != FetchScope::Description;
                *path = self.model_files(path, role, whole)?;
            }
        }
        for (split, paths) in datasets(&mut recipe).into_iter().filter(|_| scope != FetchScope::Description) {
            let mut files = Vec::new();
            for path in std::mem::take(paths) {
                match RepositoryName::is_name(&path) {
                    true => files.extend(self.dataset_files(&path, split)?),
                    false => files.push(path),
                }
            }
            *paths = files;
        }
        Ok(recipe)
    }

    /// [`Self::fetched`] for a run with these checkpoints: the policy is in one of them, if there is any.
    ///
    /// # Errors
    /// Those of [`Self::fetched`].
    pub(crate) fn fetched_for(&self, recipe: &Recipe, checkpoints: &Path) -> Result<Recipe, RepositoryError> {
        // What fits on a device, or on ranks that share passes, is computed from the policy's description.
        let described = recipe.devices().any() || recipe.trainer.parallel.config() != ParallelConfig::DATA;
        let begins = trainer::checkpoint::list(checkpoints).is_empty();
        self.fetched(recipe, if begins || described { FetchScope::Everything } else { FetchScope::Resumed })
    }

    /// The directory or file of a model that is named on the command line; another path as it is.
    ///
    /// # Errors
    /// Those of [`Self::fetched`].
    pub(crate) fn model(&self, path: &Path) -> Result<PathBuf, RepositoryError> {
        match RepositoryName::is_name(path) {
            true => self.model_files(path, ModelRole::Reference, true),
            false => Ok(path.to_path_buf()),
        }
    }

    /// The directory of an adapter of PEFT, or of the files of a repository with one.
    ///
    /// # Errors
    /// As [`Self::model`].
    pub(crate) fn adapter(&self, path: &Path) -> Result<PathBuf, RepositoryError> {
        match RepositoryName::is_name(path) {
            true => self.model_files(path, ModelRole::Adapter, true),
            false => Ok(path.to_path_buf()),
        }
    }

    /// One line for each name of a pinned recipe: what it consists of, and how much of it is in the cache.
    ///
    /// # Errors
    /// A repository without a model or a dataset that can be read.
    pub(crate) fn described(&self, recipe: &Recipe) -> Result<Vec<String>, RepositoryError> {
        let mut recipe = recipe.clone();
        let mut lines = Vec::new();
        for (role, path) in models(&mut recipe) {
            if RepositoryName::is_name(path) {
                let repository = self.repository(path, RepositoryKind::Model)?;
                let mut files = repository.description(role)?;
                let weights: Vec<String> = match repository.listing.weights(&repository.name) {
                    Ok(INDEX) => {
                        let shards = repository.listing.files.iter().map(|file| file.name.clone());
                        shards.filter(|name| !name.contains('/') && name.ends_with(".safetensors")).collect()
                    }
                    Ok(single) => vec![single.to_owned()],
                    Err(_) => Vec::new(),
                };
                if role != ModelRole::Adapter && repository.name.file.is_none() {
                    files.extend(weights);
                }
                lines.push(repository.line(&files));
            }
        }
        for (split, paths) in datasets(&mut recipe) {
            for path in paths.iter().filter(|path| RepositoryName::is_name(path)) {
                let repository = self.repository(path, RepositoryKind::Dataset)?;
                lines.push(repository.line(&repository.rows(split)?));
            }
        }
        Ok(lines)
    }

    fn pin(&self, path: &mut PathBuf, kind: RepositoryKind) -> Result<(), RepositoryError> {
        if RepositoryName::is_name(path) {
            *path = self.repository(path, kind)?.name.to_string().into();
        }
        Ok(())
    }

    fn model_files(&self, path: &Path, role: ModelRole, whole: bool) -> Result<PathBuf, RepositoryError> {
        let repository = self.repository(path, RepositoryKind::Model)?;
        if let Some(file) = &repository.name.file {
            return self.fetch(&repository, file);
        }
        for file in repository.description(role)? {
            self.fetch(&repository, &file)?;
        }
        let directory = repository.cached.snapshot(&repository.listing.commit);
        // A model that cannot be read is refused before its weights are fetched.
        check_config(&directory, role).map_err(|error| repository.unusable(error.to_string()))?;
        if whole && role != ModelRole::Adapter {
            let weights = repository.listing.weights(&repository.name);
            let weights = weights.map_err(|reason| self.contents(&repository, reason))?;
            let path = self.fetch(&repository, weights)?;
            if weights == INDEX {
                for shard in shards(&path).map_err(|reason| repository.unusable(reason))? {
                    self.fetch(&repository, &shard)?;
                }
            }
        }
        Ok(directory)
    }

    fn dataset_files(&self, path: &Path, split: TaskSplit) -> Result<Vec<PathBuf>, RepositoryError> {
        let repository = self.repository(path, RepositoryKind::Dataset)?;
        let rows = repository.rows(split)?;
        rows.iter().map(|file| self.fetch(&repository, file)).collect()
    }

    /// The repository of a name at its commit, which is looked up once.
    fn repository(&self, path: &Path, kind: RepositoryKind) -> Result<PinnedRepository, RepositoryError> {
        let name = RepositoryName::parse(path, kind)
            .map_err(|reason| RepositoryError::Name { text: path.display().to_string(), reason })?;
        let asked = (kind, name.repository.clone(), name.revision().to_owned());
        let seen = self.commits.lock().unwrap_or_else(PoisonError::into_inner).get(&asked).cloned();
        let found = self.found(&seen.map_or(name.clone(), |commit| name.at(&commit)), kind)?;
        let commit = found.listing.commit.clone();
        self.commits.lock().unwrap_or_else(PoisonError::into_inner).insert(asked, commit);
        Ok(found)
    }

    /// The repository of a name at its commit: of a branch the one that the hub says now, or that of the cache where the hub
    /// cannot be asked.
    fn found(
        &self,
        name: &RepositoryName,
        kind: RepositoryKind,
    ) -> Result<PinnedRepository, RepositoryError> {
        let cache = self.cache.as_ref().ok_or_else(|| RepositoryError::NoCache { name: name.to_string() })?;
        let cached = cache.repository(kind, &name.repository);
        let of_cache = |commit: &str| {
            let (name, cached) = (name.at(commit), cached.clone());
            PinnedRepository { kind, name, listing: cached.listing(commit), cached }
        };
        if let Some(commit) = name.commit() {
            let pinned = of_cache(commit);
            if pinned.listing.whole || self.offline && !pinned.listing.files.is_empty() {
                return Ok(pinned);
            }
        }
        let known = name.commit().map(str::to_owned).or_else(|| cached.commit(name.revision()));
        let known = known.map(|commit| of_cache(&commit)).filter(|known| !known.listing.files.is_empty());
        if self.offline {
            return known.ok_or_else(|| self.missing(name, format!("the revision `{}`", name.revision())));
        }
        let listing = match (self.client(name)?.listing(Asked { kind, name }), known) {
            (Ok(listing), _) => listing,
            (Err(error), Some(known)) => {
                let (url, reason) = no_answer(error)?;
                eprintln!("{url} cannot be reached ({reason}); using {} of the cache", known.name);
                return Ok(known);
            }
            (Err(error), None) => return Err(error),
        };
        let write =
            |source| RepositoryError::Write { name: name.to_string(), path: cache.path().to_owned(), source };
        cached.record(&listing).map_err(write)?;
        if name.commit().is_none() {
            cached.refer(name.revision(), &listing.commit).map_err(write)?;
        }
        Ok(PinnedRepository { kind, name: name.at(&listing.commit), listing, cached })
    }

    /// The path of a file in the cache, which is fetched if it is not there.
    fn fetch(&self, repository: &PinnedRepository, file: &str) -> Result<PathBuf, RepositoryError> {
        let PinnedRepository { kind, name, listing, cached } = repository;
        if let Some(path) = cached.file(&listing.commit, file) {
            return Ok(path);
        }
        if self.offline {
            return Err(self.missing(name, format!("its file {file}")));
        }
        let (client, asked) = (self.client(name)?, Asked { kind: *kind, name });
        Download { client: &client, repository: cached, asked, listing, file }.run()
    }

    fn client(&self, name: &RepositoryName) -> Result<RepositoryClient, RepositoryError> {
        RepositoryClient::new(&self.endpoint, self.token.clone(), self.wait).map_err(|reason| {
            RepositoryError::Answer { name: name.to_string(), url: self.endpoint.clone(), reason }
        })
    }

    /// A repository without weights; those that only part of the cache has are missing there.
    fn contents(&self, repository: &PinnedRepository, reason: String) -> RepositoryError {
        match repository.listing.whole {
            true => repository.unusable(reason),
            false => self.missing(&repository.name, "its weights".to_owned()),
        }
    }

    fn missing(&self, name: &RepositoryName, missing: String) -> RepositoryError {
        let cache = self.cache.as_ref().map(|cache| cache.path().to_owned()).unwrap_or_default();
        RepositoryError::Offline { name: name.to_string(), missing, cache }
    }
}

impl PinnedRepository {
    /// The files that are fetched in any case.
    fn description(&self, role: ModelRole) -> Result<Vec<String>, RepositoryError> {
        match (&self.name.file, role) {
            (Some(file), _) => Ok(vec![file.clone()]),
            (None, ModelRole::Adapter) => {
                let lacks = ADAPTER.iter().find(|file| !self.listing.has(file));
                match lacks {
                    Some(file) => {
                        Err(self
                            .unusable(format!("the repository has no `{file}`, so it is no adapter of PEFT")))
                    }
                    None => Ok(ADAPTER.map(str::to_owned).to_vec()),
                }
            }
            (None, _) => {
                // Of a part of the files it is unknown what the repository has instead.
                if self.listing.whole {
                    let weights = self.listing.weights(&self.name);
                    let checked = weights.and_then(|_| self.listing.check_description(&self.name));
                    checked.map_err(|reason| self.unusable(reason))?;
                }
                Ok(self.listing.description())
            }
        }
    }

    fn rows(&self, split: TaskSplit) -> Result<Vec<String>, RepositoryError> {
        match &self.name.file {
            Some(file) => Ok(vec![file.clone()]),
            None => self.listing.rows(&self.name, split).map_err(|reason| self.unusable(reason)),
        }
    }

    fn unusable(&self, reason: String) -> RepositoryError {
        RepositoryError::Contents { name: self.name.to_string(), reason }
    }

    fn line(&self, files: &[String]) -> String {
        let size = |file: &String| self.listing.size_bytes(file).unwrap_or(0);
        let missing = files.iter().filter(|file| self.cached.file(&self.listing.commit, file).is_none());
        let (all, missing) = (files.iter().map(size).sum::<u64>(), missing.map(size).sum::<u64>());
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let (count, kind) = (files.len(), self.kind);
        format!(
            "{kind} {}: {count} files, {:.1} MB, of which {:.1} MB are fetched",
            self.name,
            mb(all),
            mb(missing)
        )
    }
}

/// Refuses a model by its `config.json`, if that is there.
fn check_config(directory: &Path, role: ModelRole) -> Result<(), ModelError> {
    if role == ModelRole::Adapter || !directory.join("config.json").is_file() {
        return Ok(());
    }
    match role {
        ModelRole::Policy => Config::load(directory).map(drop),
        // Of a model on the command line it is not known whether it is a reward model.
        _ => SequenceScorer::check_config(directory),
    }
}

/// Address and reason, if the hub does not answer now, or says that it cannot; any other error as it is.
fn no_answer(error: RepositoryError) -> Result<(String, String), RepositoryError> {
    match error {
        RepositoryError::Unreachable { url, reason, .. } => Ok((url, reason)),
        RepositoryError::Refused { url, status, .. } if status == 429 || status >= 500 => {
            Ok((url, format!("it answers {status}")))
        }
        error => Err(error),
    }
}

/// The files that an index of weights names.
fn shards(index: &Path) -> Result<Vec<String>, String> {
    let wrong = |reason: String| format!("{INDEX} is no index of weights: {reason}");
    let text = model::files::read_text(index, model::files::MAX_JSON_BYTES)
        .map_err(|error| wrong(error.to_string()))?;
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let map = json.get("weight_map").and_then(serde_json::Value::as_object);
    let files = map.into_iter().flat_map(|map| map.values()).filter_map(serde_json::Value::as_str);
    let files: std::collections::BTreeSet<String> = files.map(str::to_owned).collect();
    match files.iter().find(|file| !name::is_file(file)) {
        Some(file) => Err(wrong(format!("it names `{file}`"))),
        None if files.is_empty() => Err(wrong("it names no file".to_owned())),
        None => Ok(files.into_iter().collect()),
    }
}

/// The paths of a recipe that name models.
fn models(recipe: &mut Recipe) -> Vec<(ModelRole, &mut PathBuf)> {
    let mut found = Vec::new();
    if let Model::Path(path) = &mut recipe.model {
        found.push((ModelRole::Policy, path));
    }
    found.extend(recipe.algorithm.reference.as_mut().map(|path| (ModelRole::Reference, path)));
    let adapter = recipe.lora.as_mut().and_then(|lora| lora.path.as_mut());
    found.extend(adapter.map(|path| (ModelRole::Adapter, path)));
    let rewards = recipe.rewards.iter_mut().filter(|reward| reward.kind == "model");
    found.extend(rewards.filter_map(|reward| reward.path.as_mut()).map(|path| (ModelRole::Reward, path)));
    found
}

/// The paths of a recipe that name datasets, with the split that each reads.
fn datasets(recipe: &mut Recipe) -> Vec<(TaskSplit, &mut Vec<PathBuf>)> {
    let mut found = Vec::new();
    if let DataSource::Files(files) = &mut recipe.data.source {
        found.push((TaskSplit::Train, &mut files.train));
        found.push((TaskSplit::HeldOut, &mut files.eval));
    }
    found.extend(recipe.eval.sets.iter_mut().map(|set| (TaskSplit::HeldOut, &mut set.path)));
    found
}
