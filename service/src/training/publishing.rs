//! Weights on their way to engines: published by models, read from files, sampled from.
//!
//! Invariant: reading weights and starting engines happen outside of the lock of the table, one at a time, so that other requests are
//! served meanwhile: those that wait for it occupy no thread. A request keeps the engine and the slot of its weights until it ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::{Layout, ModelDirectory};
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use trainer::checkpoint::adapter_path;
use trajectory::PolicyVersion;
use weights::Digest;

use super::samplers::{BaseHost, PublishedWeights, SamplerEntry, SamplerTable};
use super::saved::{ModelRecord, SavedPath, SavedRecord, run_dir};
use super::{SampleFrom, ServiceShared, UserId};
use crate::base::BaseModel;
use crate::data::{SamplingOutput, SamplingRequest};
use crate::outcome::{FailedRequest, Refusal};
use crate::sampling::{HostConfig, HostedNetwork, SamplerHost};
use crate::trained::{SamplingWeights, TrainedModel};

/// Longest wait for an engine to serve weights that were published in flight.
const RECEIPT: Duration = Duration::from_secs(60);

/// Longest wait of a sampling request for an engine that can take it.
const LATER: Duration = Duration::from_secs(600);
/// Time between two attempts.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// What a request reads whose preparation panicked.
const BUG: &str = "the request met a bug in rlrun, please report it";

/// What became of a request for an engine.
enum SamplingStart<F> {
    /// It waits for its turn in the engine; the future is its answer.
    Begun(F),
    /// The engine has too many requests.
    Later,
    /// No engine of this base model serves these weights.
    Unprepared(Arc<BaseModel>, Option<u64>),
}

/// The engine of a request that waits for its answer. If the last use of it ends, a thread that may block waits for its end.
struct HostInUse(Option<Arc<SamplerHost>>);

impl Drop for HostInUse {
    fn drop(&mut self) {
        let last = self.0.take().and_then(Arc::into_inner);
        if let (Some(host), Ok(runtime)) = (last, Handle::try_current()) {
            runtime.spawn_blocking(move || drop(host));
        }
    }
}

/// An engine and a slot for a request.
struct ReadySampler {
    host: Arc<SamplerHost>,
    slot: Option<usize>,
    /// Keeps the weights in their engine.
    in_use: Option<Arc<()>>,
}

impl ServiceShared {
    /// Publishes `weights` of `model`, the model `id`, for a sampling session with this number in its session. Returns its id.
    ///
    /// # Errors
    /// If the session has ended, or an engine does not serve the weights in time.
    pub(super) fn publish(
        &self,
        id: &str,
        model: &TrainedModel,
        weights: &SamplingWeights,
        number: u64,
        inflight: bool,
    ) -> Result<String, FailedRequest> {
        let gone = || FailedRequest::user("the session of the model has ended");
        let (user, session) = {
            let registry = self.registry();
            let entry = registry.models.get(id);
            entry.and_then(|entry| Some((entry.record.owner(), entry.session.clone()?))).ok_or_else(gone)?
        };
        let sampling_session_id = sampler_id(&session, number);
        self.forget_beyond_limit(user).map_err(|refusal| FailedRequest::user(refusal.message))?;
        let (version, base) = (model.version(), model.base().info().name.clone());
        let (mut receipt, mut whole) = (None, None);
        let mut table = self.samplers();
        let served = table.inflight.get(id).copied().filter(|_| inflight);
        let published = match served.filter(|served| table.published.contains_key(served)) {
            Some(served) => {
                if let Some(published) = table.published.get_mut(&served) {
                    published.weights = Some(weights.clone());
                    published.version = version;
                }
                (receipt, whole) = serve_newer(&table, served, weights, version)?;
                served
            }
            None => {
                let used = table.next_use();
                let new = PublishedWeights {
                    weights: Some(weights.clone()),
                    used,
                    inflight,
                    ..PublishedWeights::new(&base, version)
                };
                let added = table.add(new);
                if inflight {
                    table.inflight.insert(id.to_owned(), added);
                }
                added
            }
        };
        let entry = SamplerEntry::new(user, &session, &base, Some(published), None, Some(id.to_owned()));
        table.sessions.insert(sampling_session_id.clone(), entry);
        let ended = table.evict(self.config.limits.sampler_bytes, published);
        drop(table);
        drop(ended);
        if let (Some(host), SamplingWeights::Whole(parameters)) = (whole, weights) {
            let set = host.set_weights(Arc::clone(parameters), version);
            receipt = Some(set.map_err(|error| FailedRequest::server(error.to_string()))?);
        }
        if let Some(receipt) = receipt {
            check_receipt(receipt, weights, version)?;
        }
        // It may have ended meanwhile.
        if !self.registry().sessions.contains_key(&session) {
            let ended = self.samplers().end_sessions(&[session]);
            drop(ended);
            return Err(gone());
        }
        Ok(sampling_session_id)
    }

    /// Frees a place for another sampling session of `user`: at the limit the least recently used one without a request in progress
    /// is forgotten, since clients of tinker begin them and end none.
    ///
    /// # Errors
    /// 429 if the user has no such session.
    fn forget_beyond_limit(&self, user: UserId) -> Result<(), Refusal> {
        let most = self.config.limits.sampling_sessions;
        let forgotten = {
            let registry = self.registry();
            let mut table = self.samplers();
            if table.len() < most {
                return Ok(());
            }
            table.forget_least_used(user, |request| registry.futures.is_open(request))
        };
        // Engines end outside of the locks.
        forgotten.map(drop).ok_or_else(|| {
            Refusal::new(
                429,
                format!(
                    "there are {most} sampling sessions, which is the limit; wait for requests of yours, or end some sessions"
                ),
            )
        })
    }

    /// Begins the sampling session `id` of `session`.
    ///
    /// # Errors
    /// A base model or saved weights that there are not; 429 at the limit.
    pub(super) fn begin_sampler(
        &self,
        user: UserId,
        session: &str,
        id: &str,
        from: &SampleFrom,
    ) -> Result<(), Refusal> {
        let (base, saved) = match from {
            SampleFrom::Base(name) => (name.clone(), None),
            SampleFrom::Saved(path) => {
                let (record, saved) = self.find_saved(user, path)?;
                (record.base.clone(), Some((path, record, saved)))
            }
        };
        self.known_base(&base)?;
        self.forget_beyond_limit(user)?;
        // Weights without a sampling session are dropped as soon as the lock is free.
        let mut table = self.samplers();
        let entry = match saved {
            None => SamplerEntry::new(user, session, &base, None, None, None),
            Some((path, record, saved)) => {
                let dir = record.files(&run_dir(&self.config.dir, &record.model_id), &saved);
                let published = match table.by_files.get(&dir) {
                    Some(published) => *published,
                    None => {
                        let files = match (saved.is_state, record.lora) {
                            (true, Some(_)) => adapter_path(&dir),
                            (true, None) => dir.join("model"),
                            (false, _) => dir.clone(),
                        };
                        let added = table.add(PublishedWeights {
                            files: Some(files),
                            base_digest: record.base_digest.clone(),
                            ..PublishedWeights::new(&record.base, PolicyVersion(saved.version))
                        });
                        table.by_files.insert(dir, added);
                        added
                    }
                };
                let (path, model) = (Some(path.clone()), Some(record.model_id));
                SamplerEntry::new(user, session, &base, Some(published), path, model)
            }
        };
        // A repeated request may have begun it.
        table.sessions.entry(id.to_owned()).or_insert(entry);
        Ok(())
    }

    /// Gives a request of a sampling session to the engine that serves its weights. It never waits.
    ///
    /// # Errors
    /// A sampling session or a base model that there is not.
    fn begin_sampling(
        &self,
        user: UserId,
        sampler: &str,
        request: &SamplingRequest,
    ) -> Result<
        SamplingStart<impl Future<Output = Result<SamplingOutput, FailedRequest>> + Send + use<>>,
        FailedRequest,
    > {
        let refused = |refusal: Refusal| FailedRequest::user(refusal.message);
        let mut table = self.samplers();
        let entry = table.session(user, sampler).map_err(refused)?;
        let (base, published) = (entry.base.clone(), entry.published);
        let Some(ReadySampler { host, slot, in_use }) = ready(&mut table, &base, published) else {
            drop(table);
            let base = Arc::clone(self.known_base(&base).map_err(refused)?);
            return Ok(SamplingStart::Unprepared(base, published));
        };
        // The lock keeps the slot until the request has it.
        let answer = host.sample(slot, user, request.clone());
        drop(table);
        let used = (HostInUse(Some(host)), in_use);
        let Ok(answer) = answer else { return Ok(SamplingStart::Later) };
        Ok(SamplingStart::Begun(async move {
            let _used = used;
            answer.await
        }))
    }

    /// Reads the weights and starts the engine that a request needs, with the permit to do so. False if everything that could serve it
    /// is in use.
    fn prepare(&self, base: &Arc<BaseModel>, published: Option<u64>) -> Result<bool, FailedRequest> {
        let ended = self.samplers().drop_ended_hosts();
        drop(ended);
        if let Some(id) = published {
            self.read_again(id, base)?;
        }
        let weights = match published {
            None => None,
            Some(id) => match self.samplers().published.get(&id) {
                Some(PublishedWeights { weights: Some(weights), .. }) => Some(weights.clone()),
                // They were evicted again, and are read again.
                _ => return Ok(true),
            },
        };
        match (weights, published) {
            (Some(SamplingWeights::Whole(parameters)), Some(id)) => self.prepare_whole(base, id, parameters),
            (Some(SamplingWeights::Factors(_)), Some(id)) => {
                self.prepare_base(base)?;
                self.samplers().take_slot(&base.info().name, id, self.config.limits.adapters)
            }
            _ => self.prepare_base(base).map(|()| true),
        }
    }

    /// Starts the engine of a base model, if it does not run.
    fn prepare_base(&self, base: &Arc<BaseModel>) -> Result<(), FailedRequest> {
        let name = &base.info().name;
        if self.samplers().hosts.contains_key(name) {
            return Ok(());
        }
        let frozen = base.frozen().map_err(|error| FailedRequest::server(error.to_string()))?;
        let host = self.start(base, HostedNetwork::Base(frozen))?;
        self.samplers().hosts.insert(name.clone(), BaseHost { host, slots: Vec::new() });
        Ok(())
    }

    /// Starts the engine of whole weights, if it does not run. False if too many are in use.
    fn prepare_whole(
        &self,
        base: &BaseModel,
        id: u64,
        parameters: Arc<model::Parameters>,
    ) -> Result<bool, FailedRequest> {
        let mut ended = Vec::new();
        let version = {
            let mut table = self.samplers();
            let Some(published) = table.published.get(&id) else { return Ok(true) };
            let version = published.version;
            if published.host.is_some() {
                return Ok(true);
            }
            if !table.end_whole(self.config.limits.whole_samplers, &mut ended) {
                return Ok(false);
            }
            version
        };
        drop(ended);
        let host = self.start(base, HostedNetwork::Whole(parameters, version))?;
        let mut table = self.samplers();
        let unused = match table.published.get_mut(&id) {
            // Newer weights in flight are taken by the next request.
            Some(published) if published.version == version => published.host.replace(host),
            _ => Some(host),
        };
        drop(table);
        drop(unused);
        Ok(true)
    }

    /// Reads saved weights that are not in memory.
    fn read_again(&self, id: u64, base: &BaseModel) -> Result<(), FailedRequest> {
        let (files, base_digest) = match self.samplers().published.get(&id) {
            Some(PublishedWeights { weights: None, files, base_digest, .. }) => {
                (files.clone(), base_digest.clone())
            }
            _ => return Ok(()),
        };
        let Some(files) = files else {
            return Err(FailedRequest::user(
                "the weights of this sampler were evicted, as newer ones took the memory, and are not saved; save weights under a \
                 name to keep them",
            ));
        };
        let failed = |error: &dyn std::fmt::Display| {
            FailedRequest::user(format!("the saved weights cannot be read: {error}"))
        };
        base.check_digest(&base_digest)?;
        let config = base.directory().config();
        let weights = if trainer::lora::is_adapter(&files) {
            let factors =
                trainer::lora::load_factors(&files, &Layout::new(config)).map_err(|error| failed(&error))?;
            SamplingWeights::Factors(factors)
        } else {
            let directory = ModelDirectory::open(&files).map_err(|error| failed(&error))?;
            SamplingWeights::Whole(Arc::new(directory.load_parameters().map_err(|error| failed(&error))?))
        };
        let mut table = self.samplers();
        if let Some(published) = table.published.get_mut(&id) {
            published.weights.get_or_insert(weights);
        }
        let ended = table.evict(self.config.limits.sampler_bytes, id);
        drop(table);
        drop(ended);
        Ok(())
    }

    fn start(&self, base: &BaseModel, network: HostedNetwork) -> Result<Arc<SamplerHost>, FailedRequest> {
        let config = HostConfig { max_context: base.info().max_context, ..self.config.host };
        let host =
            SamplerHost::start(&base.info().name, base.directory(), network, config, &self.config.cores);
        host.map(Arc::new).map_err(|error| FailedRequest::server(error.to_string()))
    }

    /// The record and the entry of saved weights of a user.
    ///
    /// # Errors
    /// 404 if there are none.
    pub(super) fn find_saved(&self, user: UserId, path: &str) -> Result<(ModelRecord, SavedRecord), Refusal> {
        let unknown = || {
            let path: String = path.chars().take(400).collect();
            Refusal::new(404, format!("there are no saved weights `{path}`"))
        };
        let parsed = SavedPath::parse(path).ok_or_else(unknown)?;
        let mut registry = self.registry();
        let record = registry.model(user, &parsed.model_id).map_err(|_| unknown())?.record.clone();
        let saved = record.find(parsed.is_state, &parsed.name).cloned().ok_or_else(unknown)?;
        Ok((record, saved))
    }

    /// Deletes saved weights. Whether there were any.
    ///
    /// # Errors
    /// If files cannot be removed.
    pub(super) fn delete(&self, model_id: &str, is_state: bool, name: &str) -> Result<bool, String> {
        let run = run_dir(&self.config.dir, model_id);
        let _one_at_a_time = self.saving();
        let Some(mut record) = self.registry().models.get(model_id).map(|entry| entry.record.clone()) else {
            return Ok(false);
        };
        let removed = record.remove(&run, is_state, name)?;
        if let Some(entry) = self.registry().models.get_mut(model_id) {
            entry.record = record;
        }
        Ok(removed)
    }
}

/// The id of the sampling session with this number in `session`.
pub(super) fn sampler_id(session: &str, number: u64) -> String {
    format!("{session}:sample:{number}")
}

/// The answer to a sampling request, which waits while everything that could serve it is in use or prepared for another.
pub(super) async fn sampled(
    shared: &Arc<ServiceShared>,
    user: UserId,
    sampler: &str,
    request: SamplingRequest,
) -> Result<SamplingOutput, FailedRequest> {
    let started = Instant::now();
    let mut permit: Option<OwnedSemaphorePermit> = None;
    loop {
        // A panic would leave the request without an end.
        let begin = catch_unwind(AssertUnwindSafe(|| shared.begin_sampling(user, sampler, &request)));
        let waits = match begin.unwrap_or_else(|_| Err(FailedRequest::server(BUG)))? {
            SamplingStart::Begun(answer) => {
                drop(permit);
                return answer.await;
            }
            SamplingStart::Later => true,
            SamplingStart::Unprepared(base, published) => match permit.take() {
                Some(permit) => !prepared(shared, permit, base, published).await?,
                None => {
                    // Another request may prepare the same meanwhile.
                    let next = Arc::clone(&shared.preparing).acquire_owned();
                    permit = tokio::time::timeout(LOOK_AGAIN, next).await.ok().and_then(Result::ok);
                    false
                }
            },
        };
        if started.elapsed() >= LATER {
            return Err(FailedRequest::server(format!(
                "no engine was free for the request for {} s; use fewer samplers at a time, or try again once the weights are read",
                LATER.as_secs()
            )));
        }
        if waits {
            permit = None;
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// Prepares what a request needs, on a thread that may block. The permit is kept until that ends, also if the request is given up.
async fn prepared(
    shared: &Arc<ServiceShared>,
    permit: OwnedSemaphorePermit,
    base: Arc<BaseModel>,
    published: Option<u64>,
) -> Result<bool, FailedRequest> {
    let shared = Arc::clone(shared);
    let prepared = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        shared.prepare(&base, published)
    });
    prepared.await.unwrap_or_else(|_| Err(FailedRequest::server(BUG)))
}

/// The engine and the slot that serve these weights, if they do.
fn ready(table: &mut SamplerTable, base: &str, published: Option<u64>) -> Option<ReadySampler> {
    let running = |host: &Arc<SamplerHost>| host.status().ended.is_none().then(|| Arc::clone(host));
    let of_base = table.hosts.get(base).and_then(|of_base| running(&of_base.host));
    let Some(id) = published else { return Some(ReadySampler { host: of_base?, slot: None, in_use: None }) };
    let used = table.next_use();
    let of = table.published.get_mut(&id)?;
    of.used = used;
    let (host, slot) = match (of.slot, &of.host) {
        (Some(slot), _) => (of_base?, Some(slot)),
        (None, Some(host)) => (running(host)?, None),
        (None, None) => return None,
    };
    Some(ReadySampler { host, slot, in_use: Some(Arc::clone(&of.in_use)) })
}

/// What serves newer weights: a receipt of an adapter, or the engine that is to take all weights.
type Newer = (Option<rollout::PendingReceipt>, Option<Arc<SamplerHost>>);

/// Gives newer weights to the engine that serves older ones of them.
fn serve_newer(
    table: &SamplerTable,
    id: u64,
    weights: &SamplingWeights,
    version: PolicyVersion,
) -> Result<Newer, FailedRequest> {
    let Some(published) = table.published.get(&id) else { return Ok((None, None)) };
    match (weights, published.slot, &published.host) {
        (SamplingWeights::Factors(factors), Some(slot), _) => {
            let Some(of_base) = table.hosts.get(&published.base) else { return Ok((None, None)) };
            let set = of_base.host.set_adapter(slot, Arc::clone(factors), version);
            set.map(|receipt| (Some(receipt), None)).map_err(|error| FailedRequest::server(error.to_string()))
        }
        (SamplingWeights::Whole(_), _, Some(host)) => Ok((None, Some(Arc::clone(host)))),
        // No engine serves them at the moment.
        _ => Ok((None, None)),
    }
}

/// Waits until the engine serves `weights`, and compares digests.
fn check_receipt(
    receipt: rollout::PendingReceipt,
    weights: &SamplingWeights,
    version: PolicyVersion,
) -> Result<(), FailedRequest> {
    let receipt = receipt.wait(RECEIPT).map_err(|error| FailedRequest::server(error.to_string()))?;
    let sent = match weights {
        SamplingWeights::Factors(factors) => Digest::of(factors.values()),
        SamplingWeights::Whole(parameters) => Digest::of(parameters.values()),
    };
    match receipt.digest == sent {
        true => Ok(()),
        false => Err(FailedRequest::server(format!(
            "the sampler serves weights with the digest {:?}, and those of version {version} have {sent:?}",
            receipt.digest
        ))),
    }
}
