//! Requests as they come: checked, numbered, queued.
//!
//! Invariant: a request that is accepted has a future, which ends. What is wrong with the content of a request of a model ends its
//! future and not the connection: its number counts as done, and the requests behind it run.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::calls::{CallQueue, ModelCall, NumberedCall};
use super::publishing::{sampled, sampler_id};
use super::registry::{ClientSession, ModelEntry, ModelState};
use super::samplers::KnownSample;
use super::saved::{ModelRecord, check_name, run_dir};
use super::worker::end_session;
use super::{
    LoadInto, ModelInfo, NewModel, SampleFrom, SamplerInfo, SamplerSave, SaveRequest, SavedInfo,
    TrainingService, UserId,
};
use crate::clock::now_s;
use crate::data::{AdamParameters, PassRequest, SamplingRequest};
use crate::outcome::{FailedRequest, Refusal, RequestOutcome, Ticket};

/// Name of the optimizer of the service.
const OPTIMIZER: &str = "adamw";

impl TrainingService {
    /// Begins a session. Returns its id.
    ///
    /// # Errors
    /// 429 if the user has too many.
    pub fn create_session(&self, user: UserId) -> Result<String, Refusal> {
        let id = self.shared.id("s");
        let mut registry = self.shared.registry();
        let most = self.shared.config.limits.sessions;
        if registry.sessions.values().filter(|session| session.user == user).count() >= most {
            return Err(Refusal::new(
                429,
                format!(
                    "you have {most} sessions, which is the limit; end some, or wait until they have ended"
                ),
            ));
        }
        let session = ClientSession { user, seen: Instant::now() };
        registry.sessions.insert(id.clone(), session);
        Ok(id)
    }

    /// A heartbeat of a session's client.
    ///
    /// # Errors
    /// 410 if the session has ended.
    pub fn heartbeat(&self, user: UserId, session_id: &str) -> Result<(), Refusal> {
        self.shared.registry().session(user, session_id)?.seen = Instant::now();
        Ok(())
    }

    /// Ends a session: its models are unloaded.
    ///
    /// # Errors
    /// 410 if it has ended.
    pub fn end_session(&self, user: UserId, session_id: &str) -> Result<(), Refusal> {
        let mut registry = self.shared.registry();
        registry.session(user, session_id)?;
        end_session(&mut registry, session_id);
        drop(registry);
        let ended = self.shared.samplers().end_sessions(&[session_id.to_owned()]);
        drop(ended);
        Ok(())
    }

    /// Makes a model.
    ///
    /// # Errors
    /// 404 for an unknown base model, 400 for another optimizer than AdamW, 410 without a session, 429 if too many are loaded.
    pub fn create_model(&self, user: UserId, new: NewModel) -> Result<Ticket, Refusal> {
        self.shared.known_base(&new.base_model)?;
        if new.optimizer != OPTIMIZER {
            return Err(Refusal::new(
                400,
                "the optimizer of this service is `adamw`; leave out optimizer_config",
            ));
        }
        let NewModel { session_id, model_seq_id, base_model, lora, .. } = new;
        let record = |model_id: &str| ModelRecord {
            model_id: model_id.to_owned(),
            base: base_model.clone(),
            lora,
            owner: user.0,
            created: now_s(),
            base_digest: String::new(),
            saved: Vec::new(),
        };
        let call = ModelCall::Create { base: base_model.clone(), lora };
        self.begin_model(user, &session_id, model_seq_id, record, call)
    }

    /// Makes a model by `call`, its request number 0.
    fn begin_model(
        &self,
        user: UserId,
        session_id: &str,
        number: u64,
        record: impl FnOnce(&str) -> ModelRecord,
        call: ModelCall,
    ) -> Result<Ticket, Refusal> {
        let model_id = format!("{session_id}:train:{number}");
        let limits = self.shared.config.limits;
        {
            let mut registry = self.shared.registry();
            registry.session(user, session_id)?.seen = Instant::now();
            if !registry.models.contains_key(&model_id) {
                if registry.loaded() >= limits.models {
                    return Err(Refusal::new(
                        429,
                        format!(
                            "{} models are loaded, which is the limit (--max-models); unload one, or wait",
                            limits.models
                        ),
                    ));
                }
                let record = record(&model_id);
                let base = self.shared.known_base(&record.base)?;
                // What cannot be made fails when it is made.
                let bytes = base.training_bytes(record.lora.as_ref()).unwrap_or(0);
                let loaded = registry.loaded_bytes();
                if loaded.saturating_add(bytes) > limits.model_bytes {
                    return Err(Refusal::new(
                        429,
                        format!(
                            "the model takes {bytes} bytes, and loaded models take {loaded} of {}; unload one, or wait",
                            limits.model_bytes
                        ),
                    ));
                }
                let entry = ModelEntry {
                    record,
                    session: Some(session_id.to_owned()),
                    calls: CallQueue::starting_at(0),
                    state: ModelState::New,
                    last_request: now_s(),
                    bytes,
                    unloaded: None,
                };
                registry.models.insert(model_id.clone(), entry);
            }
        }
        let accepted = self.call(user, &model_id, 0, call);
        if accepted.is_err() {
            let mut registry = self.shared.registry();
            let is_new =
                |entry: &ModelEntry| matches!(entry.state, ModelState::New) && entry.calls.waiting() == 0;
            if registry.models.get(&model_id).is_some_and(is_new) {
                registry.models.remove(&model_id);
            }
        }
        accepted
    }

    /// Queues request `number` of a model.
    fn call(&self, user: UserId, model_id: &str, number: u64, call: ModelCall) -> Result<Ticket, Refusal> {
        let (digest, numbers) = (call.digest(), call.numbers());
        let limits = self.shared.config.limits;
        let mut registry = self.shared.registry();
        let queued = registry.queued_numbers;
        let entry = registry.model(user, model_id)?;
        let ticket = |request_id: String| Ticket {
            request_id,
            model_id: Some(model_id.to_owned()),
            sequence_ids: Vec::new(),
        };
        if matches!(entry.state, ModelState::Unloaded) {
            return Err(Refusal::new(
                410,
                format!("model {model_id} is unloaded; load saved weights into a new one"),
            ));
        }
        if let Some(known) = entry.calls.known(number).cloned() {
            if known.digest != digest {
                return Err(Refusal::new(
                    400,
                    format!(
                        "request {number} of model {model_id} came before and asked for something else; two clients use one model"
                    ),
                ));
            }
            if !registry.futures.has(&known.request_id) {
                let gone =
                    FailedRequest::user("the request was carried out, and its outcome is no longer kept");
                registry.futures.begin(&known.request_id, user, Some(model_id), None);
                registry.futures.end(&known.request_id, Err(gone));
            }
            return Ok(ticket(known.request_id));
        }
        if entry.calls.is_past(number) {
            return Err(Refusal::new(
                400,
                format!("request {number} of model {model_id} was answered long ago"),
            ));
        }
        if numbers > 0 && queued + numbers > limits.queued_numbers {
            entry.calls.postpone(number);
            return Err(Refusal::new(
                429,
                format!("data of {queued} numbers wait for their pass; try again later"),
            ));
        }
        let admitted = registry.futures.admit(user, &limits);
        let entry = registry.model(user, model_id)?;
        if admitted.is_err() {
            entry.calls.postpone(number);
        }
        admitted?;
        let request_id = self.shared.id("req-");
        entry.last_request = now_s();
        entry.calls.add(number, NumberedCall { request_id: request_id.clone(), call }, digest);
        if let Some(session) = entry.session.clone().and_then(|session| registry.sessions.get_mut(&session)) {
            session.seen = Instant::now();
        }
        registry.queued_numbers += numbers;
        registry.futures.begin(&request_id, user, Some(model_id), None);
        drop(registry);
        self.shared.work.notify_all();
        Ok(ticket(request_id))
    }

    /// A request of a model that cannot be carried out: its future fails in its turn. Clients count the number as used, also where
    /// the content is wrong.
    ///
    /// # Errors
    /// As [`Self::pass`].
    pub fn reject(
        &self,
        user: UserId,
        model_id: &str,
        seq_id: u64,
        failure: FailedRequest,
    ) -> Result<Ticket, Refusal> {
        self.call(user, model_id, seq_id, ModelCall::Reject(failure))
    }

    /// A pass over data.
    ///
    /// # Errors
    /// 404 for an unknown model, 410 for one that is unloaded, 429 if too much waits, 400 for a number that asked for something else.
    pub fn pass(
        &self,
        user: UserId,
        model_id: &str,
        seq_id: u64,
        pass: PassRequest,
    ) -> Result<Ticket, Refusal> {
        self.call(user, model_id, seq_id, ModelCall::Pass(pass))
    }

    /// An update of the weights with the gradients since the last one.
    ///
    /// # Errors
    /// As [`Self::pass`].
    pub fn optim_step(
        &self,
        user: UserId,
        model_id: &str,
        seq_id: u64,
        adam: AdamParameters,
    ) -> Result<Ticket, Refusal> {
        self.call(user, model_id, seq_id, ModelCall::Step(adam))
    }

    /// Saves weights and optimizer.
    ///
    /// # Errors
    /// As [`Self::pass`]. A name that cannot be one fails the future.
    pub fn save_weights(
        &self,
        user: UserId,
        model_id: &str,
        seq_id: u64,
        save: SaveRequest,
    ) -> Result<Ticket, Refusal> {
        match check_name(&save.name) {
            Ok(()) => self.call(user, model_id, seq_id, ModelCall::Save(save)),
            Err(reason) => self.reject(user, model_id, seq_id, FailedRequest::user(reason)),
        }
    }

    /// Loads weights, and the state of the optimizer if `optimizer`.
    ///
    /// # Errors
    /// As [`Self::pass`]; for a new model as [`Self::create_model`], and 404 without the saved weights.
    pub fn load_weights(
        &self,
        user: UserId,
        into: &LoadInto,
        path: &str,
        optimizer: bool,
    ) -> Result<Ticket, Refusal> {
        let call = ModelCall::Load { path: path.to_owned(), optimizer };
        match into {
            LoadInto::Model { model_id, .. } => self.call(user, model_id, into.number(), call),
            LoadInto::New { session_id, model_seq_id, base_model } => {
                let (source, _) = self.shared.find_saved(user, path)?;
                if let Some(other) = base_model.as_ref().filter(|name| **name != source.base) {
                    return Err(Refusal::new(
                        400,
                        format!("{path} is of base model {}, not {other}", source.base),
                    ));
                }
                self.shared.known_base(&source.base)?;
                let record = |model_id: &str| ModelRecord {
                    model_id: model_id.to_owned(),
                    created: now_s(),
                    saved: Vec::new(),
                    ..source
                };
                self.begin_model(user, session_id, *model_seq_id, record, call)
            }
        }
    }

    /// Saves or publishes weights for sampling.
    ///
    /// # Errors
    /// As [`Self::save_weights`]. If neither is asked for, the future fails.
    pub fn save_for_sampler(
        &self,
        user: UserId,
        model_id: &str,
        seq_id: u64,
        save: SamplerSave,
    ) -> Result<Ticket, Refusal> {
        let wrong = match &save.save {
            Some(named) => check_name(&named.name).err(),
            None if save.sampling_session_seq_id.is_none() => Some(
                "give a path to save the weights, or sampling_session_seq_id to sample from them".to_owned(),
            ),
            None => None,
        };
        if let Some(reason) = wrong {
            return self.reject(user, model_id, seq_id, FailedRequest::user(reason));
        }
        self.call(user, model_id, seq_id, ModelCall::SaveForSampler(save))
    }

    /// Unloads a model; its requests that wait fail.
    ///
    /// # Errors
    /// 404 for an unknown model, 429 if too many requests of the user are in progress.
    pub fn unload(&self, user: UserId, model_id: &str) -> Result<Ticket, Refusal> {
        let mut registry = self.shared.registry();
        registry.model(user, model_id)?;
        registry.futures.admit(user, &self.shared.config.limits)?;
        registry.unload(model_id, &FailedRequest::user("the model was unloaded"));
        let request_id = self.shared.id("req-");
        registry.futures.begin(&request_id, user, None, None);
        let model_id = model_id.to_owned();
        registry
            .futures
            .end(&request_id, Ok(Arc::new(RequestOutcome::Unloaded { model_id: model_id.clone() })));
        Ok(Ticket { request_id, model_id: Some(model_id), sequence_ids: Vec::new() })
    }

    /// Begins a sampling session. Returns its id. At the limit the least recently used one of the user without a request in progress is
    /// forgotten.
    ///
    /// # Errors
    /// 410 without a session, 404 for a base model or saved weights that there are not, 400 for a number that samples from something
    /// else, 429 at the limit if none can be forgotten.
    pub fn create_sampling_session(
        &self,
        user: UserId,
        session_id: &str,
        sampling_session_seq_id: u64,
        from: &SampleFrom,
    ) -> Result<String, Refusal> {
        self.shared.registry().session(user, session_id)?.seen = Instant::now();
        let id = sampler_id(session_id, sampling_session_seq_id);
        let same = self.shared.samplers().session(user, &id).ok().map(|entry| entry.samples_from(from));
        match same {
            Some(true) => return Ok(id),
            Some(false) => {
                return Err(Refusal::new(
                    400,
                    format!("sampling session {id} samples from something else; use another number"),
                ));
            }
            None => self.shared.begin_sampler(user, session_id, &id, from)?,
        }
        let gone = self.shared.registry().session(user, session_id).err();
        // It has ended meanwhile.
        if let Some(refusal) = gone {
            let ended = self.shared.samplers().end_sessions(&[session_id.to_owned()]);
            drop(ended);
            return Err(refusal);
        }
        Ok(id)
    }

    /// A sampling session of the user.
    ///
    /// # Errors
    /// 404 if there is none.
    pub fn sampler(&self, user: UserId, sampling_session_id: &str) -> Result<SamplerInfo, Refusal> {
        let mut table = self.shared.samplers();
        let entry = table.session(user, sampling_session_id)?;
        let (base, path, published) = (entry.base.clone(), entry.path.clone(), entry.published);
        let version = table.version_of(published);
        let base = self.shared.known_base(&base)?.info().clone();
        Ok(SamplerInfo { sampling_session_id: sampling_session_id.to_owned(), base, path, version })
    }

    /// Samples completions. The request is carried out on the runtime that this is called on.
    ///
    /// # Errors
    /// 404 for an unknown session, 429 if too many requests of the user are in progress, 400 for a number that asked for something
    /// else.
    pub fn sample(
        &self,
        user: UserId,
        sampling_session_id: &str,
        seq_id: u64,
        request: SamplingRequest,
    ) -> Result<Ticket, Refusal> {
        let digest = digest_of(&request);
        let (request_id, sequence_ids, model) = {
            let mut registry = self.shared.registry();
            let mut table = self.shared.samplers();
            let entry = table.session(user, sampling_session_id)?;
            if let Some(known) = entry.known(seq_id).filter(|known| registry.futures.has(&known.request_id)) {
                return match known.digest == digest {
                    true => Ok(Ticket {
                        request_id: known.request_id.clone(),
                        model_id: None,
                        sequence_ids: known.sequence_ids.clone(),
                    }),
                    false => Err(Refusal::new(
                        400,
                        format!("request {seq_id} of this sampling session asked for something else"),
                    )),
                };
            }
            registry.futures.admit(user, &self.shared.config.limits)?;
            let request_id = self.shared.id("req-");
            let count = request.samples.min(self.shared.config.host.max_samples);
            let sequence_ids: Vec<_> = (0..count).map(|index| format!("{request_id}-{index}")).collect();
            let known =
                KnownSample { request_id: request_id.clone(), sequence_ids: sequence_ids.clone(), digest };
            entry.remember(seq_id, known);
            let (model, session) = (entry.model.clone(), entry.session.clone());
            registry.futures.begin(&request_id, user, None, Some(&session));
            if let Some(session) = registry.sessions.get_mut(&session) {
                session.seen = Instant::now();
            }
            (request_id, sequence_ids, model)
        };
        let shared = Arc::clone(&self.shared);
        let (sampler, id, ids) = (sampling_session_id.to_owned(), request_id.clone(), sequence_ids.clone());
        let task = tokio::spawn(async move {
            let sampled = sampled(&shared, user, &sampler, request).await;
            let mut registry = shared.registry();
            if let (Ok(output), Some(model)) = (&sampled, &model) {
                let sampled =
                    ids.iter().zip(&output.sequences).filter(|(_, sequence)| !sequence.tokens.is_empty());
                sampled.for_each(|(id, _)| registry.sampled(id, model, output.version));
            }
            registry.futures.end(&id, sampled.map(|output| Arc::new(RequestOutcome::Sampled(output))));
        });
        self.shared.registry().futures.carried_out_by(&request_id, task.abort_handle());
        Ok(Ticket { request_id, model_id: None, sequence_ids })
    }

    /// Cancels a sampling request: what of it is in an engine is dropped at the next step.
    ///
    /// # Errors
    /// 410 for an unknown request, 400 for one of a model: the requests behind it count on it.
    pub fn cancel(&self, user: UserId, request_id: &str) -> Result<(), Refusal> {
        let mut registry = self.shared.registry();
        let request = registry.futures.get(request_id, user);
        let ended = request.ok_or_else(|| Refusal::new(410, "the request is not known"))?.ended.is_some();
        if ended || registry.futures.cancel(request_id, FailedRequest::user("the request was cancelled")) {
            return Ok(());
        }
        Err(Refusal::new(
            400,
            "requests of a model run in order and cannot be cancelled; unload the model to end them",
        ))
    }

    /// A model of the user.
    ///
    /// # Errors
    /// 404 if there is none.
    pub fn model(&self, user: UserId, model_id: &str) -> Result<ModelInfo, Refusal> {
        let mut registry = self.shared.registry();
        let entry = registry.model(user, model_id)?;
        Ok(entry.info(self.shared.known_base(&entry.record.base)?))
    }

    /// All models of the user, newest first. Those whose base model the service does not have are missing.
    #[must_use]
    pub fn models(&self, user: UserId) -> Vec<ModelInfo> {
        let registry = self.shared.registry();
        let own = registry.models.values().filter(|entry| entry.record.owner() == user);
        let info = |entry: &ModelEntry| {
            Some((entry.record.created, entry.info(self.shared.base(&entry.record.base)?)))
        };
        let mut models: Vec<_> = own.filter_map(info).collect();
        models.sort_by(|(a, of_a), (b, of_b)| (b, &of_a.model_id).cmp(&(a, &of_b.model_id)));
        models.into_iter().map(|(_, info)| info).collect()
    }

    /// What was saved of a model, oldest first.
    ///
    /// # Errors
    /// 404 if there is no such model.
    pub fn saved(&self, user: UserId, model_id: &str) -> Result<Vec<SavedInfo>, Refusal> {
        let mut registry = self.shared.registry();
        let record = &registry.model(user, model_id)?.record;
        Ok(record.saved.iter().map(|saved| record.info(saved)).collect())
    }

    /// The model, the entry and the files of saved weights.
    ///
    /// # Errors
    /// 404 if there are none.
    pub fn saved_at(&self, user: UserId, path: &str) -> Result<(ModelInfo, SavedInfo, PathBuf), Refusal> {
        let (record, saved) = self.shared.find_saved(user, path)?;
        let files = record.files(&run_dir(&self.shared.config.dir, &record.model_id), &saved);
        Ok((self.model(user, &record.model_id)?, record.info(&saved), files))
    }

    /// Deletes saved weights.
    ///
    /// # Errors
    /// 404 if there are none, 500 if files cannot be removed.
    pub fn delete_saved(&self, user: UserId, path: &str) -> Result<(), Refusal> {
        let (record, saved) = self.shared.find_saved(user, path)?;
        let deleted = self.shared.delete(&record.model_id, saved.is_state, &saved.name);
        deleted.map(drop).map_err(|reason| Refusal::new(500, reason))
    }

    /// Metrics in the text format of Prometheus.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        super::metrics::text(&self.shared)
    }
}

/// What tells a sampling request from another.
fn digest_of(request: &SamplingRequest) -> u64 {
    let hash = blake3::hash(format!("{request:?}").as_bytes());
    let (words, _) = hash.as_bytes().as_chunks::<8>();
    u64::from_le_bytes(words[0])
}
