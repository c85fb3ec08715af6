//! The thread of passes and updates, which also ends sessions and requests whose time is over.

use std::fs::File;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;
use trainer::TrainerError;

use super::calls::{ModelCall, NumberedCall};
use super::registry::{ModelState, ServiceRegistry};
use super::saved::{ModelRecord, SavedPath, SavedRecord, bytes_of, checkpoints, run_dir};
use super::{LoraRequest, SamplerSave, SaveRequest, ServiceShared};
use crate::clock::now_s;
use crate::data::{AdamParameters, PassRequest};
use crate::outcome::{FailedRequest, RequestOutcome};
use crate::trained::TrainedModel;

/// Longest time between two looks at sessions and requests that have expired.
const LOOK: Duration = Duration::from_millis(500);
/// Time between two looks at saved weights that are deleted some day.
const LOOK_AT_FILES: Duration = Duration::from_secs(30);

/// Carries out requests, one at a time.
#[derive(Debug)]
pub(super) struct ModelWorker {
    shared: Arc<ServiceShared>,
}

/// What a request has done, and its model.
type CarriedOut = (Option<Box<TrainedModel>>, Result<RequestOutcome, FailedRequest>);

impl ModelWorker {
    pub(super) fn new(shared: Arc<ServiceShared>) -> Self {
        Self { shared }
    }

    /// Carries out requests until the service stops.
    pub(super) fn run(&self) {
        let (mut looked, mut looked_at_files) = (Instant::now(), Instant::now());
        while !self.shared.stop.load(Ordering::Acquire) {
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                self.end_expired();
            }
            if looked_at_files.elapsed() >= LOOK_AT_FILES {
                looked_at_files = Instant::now();
                self.delete_expired();
            }
            let work = {
                let mut registry = self.shared.registry();
                registry.take_work().or_else(|| {
                    let (mut registry, _) =
                        self.shared.work.wait_timeout(registry, LOOK).unwrap_or_else(PoisonError::into_inner);
                    registry.take_work()
                })
            };
            let Some((id, model, queued)) = work else { continue };
            let NumberedCall { request_id, call } = queued;
            // A panic would leave the request without an end. The model is lost with it, and its other requests fail.
            let carried_out = catch_unwind(AssertUnwindSafe(|| self.carry_out(&id, model, call)));
            let (model, done) = carried_out.unwrap_or_else(|_| {
                let failure = FailedRequest::server(
                    "the request met a bug in rlrun, please report it; the model is lost",
                );
                (None, Err(failure))
            });
            let mut registry = self.shared.registry();
            registry.give_back(&id, model);
            registry.futures.end(&request_id, done.map(Arc::new));
        }
        let mut registry = self.shared.registry();
        let stopped = FailedRequest::server("the service stops; continue from saved weights");
        let ids: Vec<String> = registry.models.keys().cloned().collect();
        ids.iter().for_each(|id| registry.unload(id, &stopped));
    }

    /// Carries out `call` on the model `id`.
    fn carry_out(&self, id: &str, model: Option<Box<TrainedModel>>, call: ModelCall) -> CarriedOut {
        match (model, call) {
            (None, ModelCall::Create { base, lora }) => {
                let model = self.make(id, &base, lora);
                let outcome = RequestOutcome::ModelCreated { model_id: id.to_owned() };
                match model {
                    Ok(model) => (Some(model), Ok(outcome)),
                    Err(failure) => (None, Err(failure)),
                }
            }
            (None, ModelCall::Load { path, optimizer }) => {
                let made = self.record(id).and_then(|record| self.make(id, &record.base, record.lora));
                let loaded = made.and_then(|mut model| {
                    let outcome = self.load(id, &mut model, path, optimizer)?;
                    Ok((model, outcome))
                });
                match loaded {
                    Ok((model, outcome)) => (Some(model), Ok(outcome)),
                    Err(failure) => (None, Err(failure)),
                }
            }
            (model, ModelCall::Reject(failure)) => (model, Err(failure)),
            (None, _) => {
                (None, Err(FailedRequest::user("the model is not made; its first request makes it")))
            }
            (Some(mut model), call) => {
                let outcome = match call {
                    ModelCall::Pass(pass) => self.pass(id, &mut model, &pass),
                    ModelCall::Step(adam) => self.step(id, &mut model, &adam),
                    ModelCall::Save(save) => self.save(id, &model, &save),
                    ModelCall::SaveForSampler(save) => self.save_for_sampler(id, &model, &save),
                    ModelCall::Load { path, optimizer } => self.load(id, &mut model, path, optimizer),
                    ModelCall::Create { .. } => Ok(RequestOutcome::ModelCreated { model_id: id.to_owned() }),
                    ModelCall::Reject(failure) => Err(failure),
                };
                (Some(model), outcome)
            }
        }
    }

    fn record(&self, id: &str) -> Result<ModelRecord, FailedRequest> {
        let registry = self.shared.registry();
        let record = registry.models.get(id).map(|entry| entry.record.clone());
        record.ok_or_else(|| FailedRequest::user(format!("there is no model {id}")))
    }

    fn make(
        &self,
        id: &str,
        base: &str,
        lora: Option<LoraRequest>,
    ) -> Result<Box<TrainedModel>, FailedRequest> {
        let base = self
            .shared
            .base(base)
            .ok_or_else(|| FailedRequest::user(format!("there is no base model {base}")))?;
        let model = TrainedModel::new(base, lora.as_ref()).map(Box::new)?;
        if lora.is_some() {
            let digest = base.digest()?.to_owned();
            if let Some(entry) = self.shared.registry().models.get_mut(id) {
                entry.record.base_digest = digest;
            }
        }
        Ok(model)
    }

    /// A pass, with the staleness of data that say which sequences they are.
    fn pass(
        &self,
        id: &str,
        model: &mut TrainedModel,
        pass: &PassRequest,
    ) -> Result<RequestOutcome, FailedRequest> {
        let version = model.version().0;
        let staleness: Vec<Vec<f32>> = {
            let registry = self.shared.registry();
            let of = |sequence: &str| {
                registry.version_of(sequence, id).map(|sampled| version.saturating_sub(sampled) as f32)
            };
            let of_datum = |datum: &crate::data::Datum| {
                let known = datum.sampled.iter().filter_map(|span| of(&span.sequence_id));
                known.reduce(f32::max).into_iter().collect()
            };
            pass.data.iter().map(of_datum).collect()
        };
        let mut output = model.pass(pass)?;
        let known: Vec<f32> = staleness.iter().flatten().copied().collect();
        if !known.is_empty() {
            let mean = known.iter().map(|staleness| f64::from(*staleness)).sum::<f64>() / known.len() as f64;
            let most = known.iter().copied().fold(0.0, f32::max);
            output.metrics.insert("staleness:mean".to_owned(), mean);
            output.metrics.insert("staleness:max".to_owned(), f64::from(most));
            for (of_datum, staleness) in output.outputs.iter_mut().zip(staleness) {
                of_datum.insert("staleness".to_owned(), staleness);
            }
        }
        Ok(RequestOutcome::Passed(output))
    }

    /// An update, whose metrics are a line of the model's `metrics.jsonl` too.
    fn step(
        &self,
        id: &str,
        model: &mut TrainedModel,
        adam: &AdamParameters,
    ) -> Result<RequestOutcome, FailedRequest> {
        let before = model.version();
        let metrics = model.optim_step(adam)?;
        if model.version() != before {
            let of = |name: &str| metrics.get(name).copied().unwrap_or_default();
            let line = json!({
                "step": model.version().0,
                "time_s": now_s().saturating_sub(self.record(id)?.created),
                "loss/sum": of("loss:sum"),
                "loss/tokens": of("tokens:sum"),
                "optim/grad_norm": of("grad_norm:mean"),
                "optim/lr": adam.learning_rate,
            });
            // A disk that is full costs the line alone.
            let _ = append(&run_dir(&self.shared.config.dir, id), &line);
        }
        Ok(RequestOutcome::Stepped { metrics })
    }

    fn save(
        &self,
        id: &str,
        model: &TrainedModel,
        save: &SaveRequest,
    ) -> Result<RequestOutcome, FailedRequest> {
        let run = run_dir(&self.shared.config.dir, id);
        self.named(id, true, save, model.version().0, |_| model.save(&checkpoints(&run)).map(drop))
            .map(|path| RequestOutcome::WeightsSaved { path })
    }

    /// Writes weights with `write` under the name of `save`, of which it gets the directory. Returns the path.
    fn named(
        &self,
        id: &str,
        is_state: bool,
        save: &SaveRequest,
        version: u64,
        write: impl FnOnce(&PathBuf) -> Result<(), TrainerError>,
    ) -> Result<String, FailedRequest> {
        let run = run_dir(&self.shared.config.dir, id);
        let _one_at_a_time = self.shared.saving();
        let mut record = self.record(id)?;
        let failed = |error: String| FailedRequest::server(format!("weights cannot be saved: {error}"));
        let before = record.find(is_state, &save.name).cloned();
        if before.is_some() && !save.overwrite {
            return Err(FailedRequest::user(format!(
                "`{}` is saved already; choose another name, or overwrite it",
                save.name
            )));
        }
        let saved = now_s();
        let mut new = SavedRecord {
            name: save.name.clone(),
            is_state,
            version,
            saved,
            expires: save.ttl_s.map(|ttl| saved.saturating_add(ttl)),
            bytes: 0,
            copy: before.as_ref().map_or(0, |before| before.copy + 1),
        };
        let dir = record.files(&run, &new);
        if let Some(parent) = dir.parent() {
            std::fs::create_dir_all(parent).map_err(|error| failed(error.to_string()))?;
        }
        // Files without a record: a process ended between the two.
        record.remove_files(&run, &new).map_err(failed)?;
        // What was overwritten goes when the new files are whole.
        write(&dir).map_err(|error| failed(error.to_string()))?;
        new.bytes = bytes_of(&dir);
        let previous = record.clone();
        record.saved.retain(|other| other.is_state != is_state || other.name != save.name);
        record.saved.push(new.clone());
        if let Err(error) = record.write(&run) {
            // The first error is the one to report; what may be left is removed by the next attempt.
            let _ = previous.remove_files(&run, &new);
            return Err(failed(error));
        }
        if let Some(entry) = self.shared.registry().models.get_mut(id) {
            entry.record = record.clone();
        }
        if let Some(before) = before {
            // The weights are saved; files that cannot be removed cost space alone.
            let _ = record.remove_files(&run, &before);
        }
        Ok(SavedPath { model_id: id.to_owned(), is_state, name: save.name.clone() }.to_string())
    }

    fn save_for_sampler(
        &self,
        id: &str,
        model: &TrainedModel,
        save: &SamplerSave,
    ) -> Result<RequestOutcome, FailedRequest> {
        let path = match &save.save {
            Some(named) => {
                let export = |dir: &PathBuf| {
                    // The files of a name that was deleted may have been there.
                    self.shared.samplers().forget_files(dir);
                    model.export(dir)
                };
                Some(self.named(id, false, named, model.version().0, export)?)
            }
            None => None,
        };
        let sampling_session_id = match save.sampling_session_seq_id {
            None => None,
            Some(number) => {
                let weights = model.weights()?;
                Some(self.shared.publish(id, model, &weights, number, save.inflight)?)
            }
        };
        Ok(RequestOutcome::SamplerSaved { path, sampling_session_id })
    }

    fn load(
        &self,
        id: &str,
        model: &mut TrainedModel,
        path: String,
        optimizer: bool,
    ) -> Result<RequestOutcome, FailedRequest> {
        let unknown = || FailedRequest::user(format!("there are no saved weights {path}"));
        let parsed = SavedPath::parse(&path).filter(|path| path.is_state).ok_or_else(unknown)?;
        let owner = self.record(id)?.owner();
        let source = self
            .record(&parsed.model_id)
            .ok()
            .filter(|source| source.owner() == owner)
            .ok_or_else(unknown)?;
        let saved = source.find(true, &parsed.name).ok_or_else(unknown)?;
        let own = self.record(id)?;
        let shape = |record: &ModelRecord| {
            (record.base.clone(), record.lora.map(|lora| LoraRequest { seed: None, ..lora }))
        };
        if shape(&source) != shape(&own) {
            return Err(FailedRequest::user(format!(
                "{path} is of {:?} and the model is of {:?}; load it into a new model",
                shape(&source),
                shape(&own)
            )));
        }
        model.base().check_digest(&source.base_digest)?;
        let dir = source.files(&run_dir(&self.shared.config.dir, &parsed.model_id), saved);
        model.load(&dir, optimizer).map_err(|error| FailedRequest::server(format!("{path}: {error}")))?;
        Ok(RequestOutcome::WeightsLoaded { path, model_id: id.to_owned() })
    }

    /// Ends sessions without a heartbeat and requests behind one that never came, and forgets outcomes, sampling requests and models
    /// that were kept long enough.
    fn end_expired(&self) {
        let limits = self.shared.config.limits;
        let mut registry = self.shared.registry();
        registry.futures.expire(limits.outcome);
        registry.forget_models(limits.outcome);
        let over: Vec<String> = registry
            .sessions
            .iter()
            .filter(|(_, session)| session.seen.elapsed() > limits.session)
            .map(|(id, _)| id.clone())
            .collect();
        for session in &over {
            end_session(&mut registry, session);
        }
        registry.forget_turns();
        for sampler in self.shared.samplers().sessions.values_mut() {
            sampler.forget_requests(|request| registry.futures.has(request));
        }
        let ids: Vec<String> = registry.models.keys().cloned().collect();
        for id in ids {
            let Some(entry) = registry.models.get_mut(&id) else { continue };
            let next = entry.calls.next();
            let given_up = entry.calls.give_up(limits.gap);
            let failure = FailedRequest::user(format!(
                "request {next} of model {id} never came, and this one waited {} s for it; make a new training client",
                limits.gap.as_secs()
            ));
            registry.fail(given_up, &failure);
        }
        drop(registry);
        if !over.is_empty() {
            let ended = self.shared.samplers().end_sessions(&over);
            // Their threads end outside of the lock.
            drop(ended);
        }
    }

    /// Deletes saved weights whose time is over.
    fn delete_expired(&self) {
        let now = now_s();
        let mut expired = Vec::new();
        for entry in self.shared.registry().models.values() {
            let record = &entry.record;
            let over = record.saved.iter().filter(|saved| saved.expires.is_some_and(|at| at <= now));
            expired.extend(over.map(|saved| (record.model_id.clone(), saved.is_state, saved.name.clone())));
        }
        for (model_id, is_state, name) in expired {
            // What cannot be removed is tried again.
            let _ = self.shared.delete(&model_id, is_state, &name);
        }
    }
}

/// Ends a session: its models are unloaded.
pub(super) fn end_session(registry: &mut ServiceRegistry, session: &str) {
    registry.sessions.remove(session);
    registry.futures.cancel_session(session, &FailedRequest::user("the session has ended"));
    let of_session = registry.models.iter().filter(|(_, entry)| entry.session.as_deref() == Some(session));
    let ids: Vec<String> = of_session.map(|(id, _)| id.clone()).collect();
    let over = FailedRequest::user(
        "the session has ended: its client sent no heartbeat; load saved weights into a new one",
    );
    for id in ids {
        registry.unload(&id, &over);
        debug_assert!(
            matches!(registry.models[&id].state, ModelState::Unloaded),
            "an unloaded model stays so"
        );
    }
}

/// Appends a line to the metrics of the run directory `run`.
fn append(run: &Path, line: &serde_json::Value) -> std::io::Result<()> {
    std::fs::create_dir_all(run)?;
    let mut file = File::options().create(true).append(true).open(run.join("metrics.jsonl"))?;
    file.write_all(format!("{line}\n").as_bytes())
}
