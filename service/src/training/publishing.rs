//! Weights on their way to engines: published by models, read from files, sampled from.
//!
//! Invariant: reading weights and starting engines happen outside of the lock of the table, one at a time, so that other requests are
//! served meanwhile. A request keeps the engine and the slot of its weights until it ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use model::{Layout, ModelDirectory};
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
/// What became of a request for an engine.
enum SamplingStart<F> {
    /// It waits for its turn in the engine; the future is its answer.
    Begun(F),
    /// Everything that could serve it is in use.
    Later,
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
        let sampling_session_id = format!("{session}:sample:{number}");
        self.forget_beyond_limit(user)?;
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

    /// Frees a place for another sampling session of `user`: at the limit the oldest one without a request in progress is forgotten.
    ///
    /// # Errors
    /// If the user has no such session.
    fn forget_beyond_limit(&self, user: UserId) -> Result<(), FailedRequest> {
        let most = self.config.limits.sampling_sessions;
        let forgotten = {
            let registry = self.registry();
            let mut table = self.samplers();
            if table.len() < most {
                return Ok(());
            }
            table.forget_oldest(user, |request| registry.futures.is_open(request))
        };
        // Engines end outside of the locks.
        forgotten.map(drop).ok_or_else(|| {
            FailedRequest::user(format!(
                "there are {most} sampling sessions, which is the limit; end some sessions"
            ))
        })
    }

    /// Begins a sampling session. Returns its id.
    ///
    /// # Errors
    /// A base model or saved weights that there are not.
    pub(super) fn begin_sampler(
        &self,
        user: UserId,
        session: &str,
        number: u64,
        from: &SampleFrom,
    ) -> Result<String, Refusal> {
        let id = format!("{session}:sample:{number}");
        let entry = match from {
            SampleFrom::Base(name) => {
                self.known_base(name)?;
                SamplerEntry::new(user, session, name, None, None, None)
            }
            SampleFrom::Saved(path) => {
                let (record, saved) = self.find_saved(user, path)?;
                self.known_base(&record.base)?;
                let dir = record.files(&run_dir(&self.config.dir, &record.model_id), &saved);
                let mut table = self.samplers();
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
                SamplerEntry::new(user, session, &record.base, Some(published), path, model)
            }
        };
        self.samplers().sessions.insert(id.clone(), entry);
        Ok(id)
    }

    /// Samples for a session. It may read weights and start an engine.
    ///
    /// # Errors
    /// Weights that are gone or cannot be read, an engine that cannot be started.
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
        loop {
            let (base, published) = {
                let mut table = self.samplers();
                let entry = table.session(user, sampler).map_err(refused)?;
                let (base, published) = (entry.base.clone(), entry.published);
                if let Some(ready) = ready(&mut table, &base, published) {
                    // The lock keeps the slot until the request has it.
                    let answer = ready.host.sample(ready.slot, user, request.clone());
                    drop(table);
                    let Ok(answer) = answer else { return Ok(SamplingStart::Later) };
                    return Ok(SamplingStart::Begun(async move {
                        let ReadySampler { host, in_use, .. } = ready;
                        let answer = answer.await;
                        drop(in_use);
                        // An engine that is ended with this is waited for.
                        tokio::task::spawn_blocking(move || drop(host));
                        answer
                    }));
                }
                (base, published)
            };
            let base = Arc::clone(self.known_base(&base).map_err(refused)?);
            if !self.prepare(&base, published)? {
                return Ok(SamplingStart::Later);
            }
        }
    }

    /// Reads the weights and starts the engine that a request needs. False if everything that could serve it is in use.
    fn prepare(&self, base: &Arc<BaseModel>, published: Option<u64>) -> Result<bool, FailedRequest> {
        let _one_at_a_time = self.preparing();
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
                "the weights of this sampler were evicted: newer ones took the memory; save weights under a name to keep them",
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

/// The answer to a sampling request, which waits while everything that could serve it is in use.
pub(super) async fn sampled(
    shared: &Arc<ServiceShared>,
    user: UserId,
    sampler: &str,
    request: SamplingRequest,
) -> Result<SamplingOutput, FailedRequest> {
    let (started, request) = (Instant::now(), Arc::new(request));
    loop {
        let begin = {
            let (shared, sampler, request) = (Arc::clone(shared), sampler.to_owned(), Arc::clone(&request));
            tokio::task::spawn_blocking(move || shared.begin_sampling(user, &sampler, &request))
        };
        match begin.await {
            Ok(Ok(SamplingStart::Begun(answer))) => return answer.await,
            Ok(Ok(SamplingStart::Later)) if started.elapsed() < LATER => tokio::time::sleep(LOOK_AGAIN).await,
            Ok(Ok(SamplingStart::Later)) => {
                return Err(FailedRequest::server(format!(
                    "no engine was free for the request for {} s; use fewer samplers at a time",
                    LATER.as_secs()
                )));
            }
            Ok(Err(failure)) => return Err(failure),
            Err(_) => return Err(FailedRequest::server("the sampler could not be asked")),
        }
    }
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
