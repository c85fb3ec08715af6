//! The service over a tiny model: order, repetition, bits, users, saved weights, samplers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use model::{Prediction, PredictionGradient, SharedCores, WeightDtype};
use trainer::learner::RowLoss;
use trainer::{Learner, LearnerConfig};
use trajectory::{PolicyVersion, Sample, SampleStreams, VersionRun};

use super::*;
use crate::base::{BaseModel, optimizer};
use crate::data::{
    AdamParameters, Datum, LossTensor, LossValues, PassOutput, PassRequest, SampledSpan, SamplingOutput,
    SamplingRequest, StopForm,
};
use crate::fair_queue::FairBounds;
use crate::outcome::{FailedRequest, FailureCategory, RequestOutcome, Ticket};
use crate::sampling::HostConfig;
use crate::tiny_model::tiny_model;
use crate::trained::{SamplingWeights, TrainedModel};

const ADA: UserId = UserId([1; 16]);
const BOB: UserId = UserId([2; 16]);
/// Longest wait for an outcome.
const SOON: Duration = Duration::from_secs(60);
const ADAM: AdamParameters = AdamParameters {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.0,
    grad_clip_norm: 0.0,
};

/// A service over a tiny model, in a directory that ends with it.
struct TinyService {
    service: TrainingService,
    base: Arc<BaseModel>,
    files: tempfile::TempDir,
}

fn base_in(files: &tempfile::TempDir) -> Arc<BaseModel> {
    let path = tiny_model(files.path(), WeightDtype::F32);
    Arc::new(BaseModel::open("tiny", &path, None, (&SharedCores::new(1), 1)).unwrap())
}

fn config_of(files: &tempfile::TempDir, base: &Arc<BaseModel>, limits: ServiceLimits) -> ServiceConfig {
    ServiceConfig {
        bases: vec![Arc::clone(base)],
        dir: files.path().join("state"),
        host: HostConfig {
            max_running: 8,
            max_context: 128,
            kv_cache_tokens: 4096,
            prefill_chunk: 64,
            max_samples: 16,
            threads: 1,
            waiting: FairBounds { total: 1 << 16, per_user: 1 << 15 },
        },
        cores: SharedCores::new(1),
        limits,
    }
}

impl TinyService {
    fn with(limits: ServiceLimits) -> Self {
        let files = tempfile::tempdir().unwrap();
        let base = base_in(&files);
        let service = TrainingService::start(config_of(&files, &base, limits)).unwrap();
        Self { service, base, files }
    }

    fn new() -> Self {
        Self::with(ServiceLimits::default())
    }

    /// The same files with a new process.
    fn restarted(self) -> Self {
        let Self { service, base, files } = self;
        drop(service);
        let service = TrainingService::start(config_of(&files, &base, ServiceLimits::default())).unwrap();
        Self { service, base, files }
    }

    async fn outcome(&self, user: UserId, ticket: &Ticket) -> Result<Arc<RequestOutcome>, FailedRequest> {
        match self.service.retrieve(user, &ticket.request_id, SOON).await.unwrap() {
            FutureState::Done(outcome) => Ok(outcome),
            FutureState::Failed(failure) => Err(failure),
            FutureState::Pending { reason, .. } => panic!("{reason}"),
        }
    }

    /// A new model of a new session.
    async fn model(&self, user: UserId, lora: Option<LoraRequest>) -> String {
        let session_id = self.service.create_session(user).unwrap();
        let new = NewModel {
            session_id,
            model_seq_id: 0,
            base_model: "tiny".to_owned(),
            lora,
            optimizer: "adamw".to_owned(),
        };
        let ticket = self.service.create_model(user, new).unwrap();
        self.outcome(user, &ticket).await.unwrap();
        ticket.model_id.unwrap()
    }

    async fn pass(&self, user: UserId, model: &str, number: u64, pass: PassRequest) -> PassOutput {
        let ticket = self.service.pass(user, model, number, pass).unwrap();
        match &*self.outcome(user, &ticket).await.unwrap() {
            RequestOutcome::Passed(output) => output.clone(),
            other => panic!("{other:?}"),
        }
    }

    async fn step(&self, user: UserId, model: &str, number: u64) -> BTreeMap<String, f64> {
        let ticket = self.service.optim_step(user, model, number, ADAM).unwrap();
        match &*self.outcome(user, &ticket).await.unwrap() {
            RequestOutcome::Stepped { metrics } => metrics.clone(),
            other => panic!("{other:?}"),
        }
    }

    async fn sampler(
        &self,
        user: UserId,
        model: &str,
        number: u64,
        session_number: u64,
        inflight: bool,
    ) -> String {
        let save = SamplerSave { save: None, sampling_session_seq_id: Some(session_number), inflight };
        let ticket = self.service.save_for_sampler(user, model, number, save).unwrap();
        match &*self.outcome(user, &ticket).await.unwrap() {
            RequestOutcome::SamplerSaved { sampling_session_id: Some(id), .. } => id.clone(),
            other => panic!("{other:?}"),
        }
    }

    async fn sample(
        &self,
        user: UserId,
        sampler: &str,
        number: u64,
        request: SamplingRequest,
    ) -> SamplingOutput {
        let ticket = self.service.sample(user, sampler, number, request).unwrap();
        match &*self.outcome(user, &ticket).await.unwrap() {
            RequestOutcome::Sampled(output) => output.clone(),
            other => panic!("{other:?}"),
        }
    }
}

const LORA: LoraRequest =
    LoraRequest { rank: 4, seed: Some(7), train_unembed: true, train_mlp: true, train_attn: true };

fn floats(values: Vec<f32>) -> LossTensor {
    LossTensor { shape: vec![values.len()], values: LossValues::Float(values) }
}

fn ints(values: Vec<i64>) -> LossTensor {
    LossTensor { shape: vec![values.len()], values: LossValues::Int(values) }
}

/// Cross-entropy of `completion` after `prompt`, whose positions are padded as clients pad them.
fn demonstration(prompt: &[u32], completion: &[u32], weight: f32) -> Datum {
    let mut tokens = [prompt, completion].concat();
    tokens.pop();
    let padding = prompt.len() - 1;
    let targets =
        vec![0; padding].into_iter().chain(completion.iter().map(|token| i64::from(*token))).collect();
    let weights = [vec![0.0; padding], vec![weight; completion.len()]].concat();
    let inputs = [("target_tokens".to_owned(), ints(targets)), ("weights".to_owned(), floats(weights))];
    Datum { tokens, inputs: inputs.into(), sampled: Vec::new() }
}

fn cross_entropy(data: Vec<Datum>) -> PassRequest {
    PassRequest { loss: "cross_entropy".to_owned(), data, ..PassRequest::default() }
}

fn batch(weight: f32) -> Vec<Datum> {
    (0..6_u32).map(|n| demonstration(&[1, 5 + n], &[20 + n, 30 + 2 * n, 7], weight)).collect()
}

fn request(prompt: &[u32], samples: usize, max_tokens: usize) -> SamplingRequest {
    let stop = StopForm::Tokens(Vec::new());
    SamplingRequest { seed: Some(5), stop, ..SamplingRequest::new(prompt.to_vec(), samples, max_tokens) }
}

/// The mean of the negative log-probabilities, as a run computes it.
struct WeightedLoss(f32);

impl RowLoss for WeightedLoss {
    type Report = ();

    fn row(&self, _: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        let slope = |_: &Prediction| PredictionGradient { logprob: -self.0, ..PredictionGradient::default() };
        predictions.iter().map(slope).collect()
    }
}

fn sample_of(prompt: &[u32], completion: &[u32]) -> Sample {
    let token_ids = [prompt, completion].concat();
    let len = token_ids.len();
    let loss_mask = (0..len).map(|at| at >= prompt.len()).collect();
    let version = PolicyVersion(0);
    let streams = SampleStreams {
        behavior_logprobs: vec![0.0; len],
        versions: vec![VersionRun { version, len: len as u32 }],
        token_ids,
        loss_mask,
        temperature: 1.0,
        ..SampleStreams::default()
    };
    Sample::new(streams).unwrap()
}

#[test]
fn a_pass_and_an_update_have_the_bits_of_a_step_of_a_run() {
    let files = tempfile::tempdir().unwrap();
    let base = base_in(&files);
    let rows: Vec<Sample> = (0..6_u32).map(|n| sample_of(&[1, 5 + n], &[20 + n, 30 + 2 * n, 7])).collect();
    let weight = 1.0 / 18.0;
    let config = LearnerConfig { optimizer: optimizer(&ADAM), ..base.learner() };
    let parameters = base.parameters().unwrap();
    let mut learner = Learner::new(config, base.directory().config().clone(), parameters, None).unwrap();
    let mut model = TrainedModel::new(&base, None).unwrap();
    for _ in 0..3 {
        learner.step(&rows.iter().collect::<Vec<_>>(), &WeightedLoss(weight), ADAM.learning_rate).unwrap();
        model.pass(&cross_entropy(batch(weight))).unwrap();
        model.optim_step(&ADAM).unwrap();
    }
    let SamplingWeights::Whole(served) = model.weights().unwrap() else { panic!("all weights are trained") };
    let expected = learner.parameters().unwrap();
    let same = expected.values().iter().zip(served.values()).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same && expected.values() != base.parameters().unwrap().values());
    assert_eq!(model.version(), PolicyVersion(3));
}

#[test]
fn gradients_of_several_passes_are_summed() {
    let files = tempfile::tempdir().unwrap();
    let base = base_in(&files);
    let norm = |passes: usize| {
        let mut model = TrainedModel::new(&base, Some(&LORA)).unwrap();
        for _ in 0..passes {
            model.pass(&cross_entropy(batch(1.0))).unwrap();
        }
        // A forward pass leaves no gradient.
        model.pass(&PassRequest { forward_only: true, ..cross_entropy(batch(1.0)) }).unwrap();
        model.optim_step(&ADAM).unwrap()["grad_norm:mean"]
    };
    assert!((norm(2) / norm(1) - 2.0).abs() < 1e-5 && norm(0) == 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_learns_and_its_samplers_have_the_bits_of_its_passes() {
    for lora in [Some(LORA), None] {
        let tiny = TinyService::new();
        let model = tiny.model(ADA, lora).await;
        let mut losses = Vec::new();
        for step in 0..8 {
            let output = tiny.pass(ADA, &model, 1 + 2 * step, cross_entropy(batch(1.0))).await;
            losses.push(output.metrics["loss:sum"]);
            tiny.step(ADA, &model, 2 + 2 * step).await;
        }
        assert!(losses[7] < 0.7 * losses[0], "{losses:?}");
        let sampler = tiny.sampler(ADA, &model, 17, 0, false).await;
        let sampled = tiny.sample(ADA, &sampler, 0, request(&[1, 6], 3, 12)).await;
        assert_eq!((sampled.sequences.len(), sampled.version), (3, 8));
        let sequence = &sampled.sequences[0];
        let tokens = [&[1, 6][..], &sequence.tokens].concat();
        let scored = SamplingRequest { prompt_logprobs: true, ..request(&tokens, 1, 1) };
        let scored = tiny.sample(ADA, &sampler, 1, scored).await.prompt_logprobs.unwrap();
        assert!(scored[0].is_nan());
        assert_eq!(scored[2..], sequence.logprobs, "scored as sampled");
        let data = vec![demonstration(&[1, 6], &sequence.tokens, 1.0)];
        let pass = PassRequest { forward_only: true, ..cross_entropy(data) };
        let again = tiny.pass(ADA, &model, 18, pass).await;
        assert_eq!(again.outputs[0]["logprobs"][1..], sequence.logprobs, "trained as sampled");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_run_in_order_and_once() {
    let tiny = TinyService::new();
    let model = tiny.model(ADA, Some(LORA)).await;
    // Two steps, from the last request to the first.
    let mut tickets = Vec::new();
    for number in (1..=4).rev() {
        let ticket = match number % 2 {
            1 => tiny.service.pass(ADA, &model, number, cross_entropy(batch(1.0))).unwrap(),
            _ => tiny.service.optim_step(ADA, &model, number, ADAM).unwrap(),
        };
        tickets.push((number, ticket));
    }
    for (number, ticket) in &tickets {
        tiny.outcome(ADA, ticket).await.unwrap();
        if number % 2 == 1 {
            let again = tiny.service.pass(ADA, &model, *number, cross_entropy(batch(1.0))).unwrap();
            assert_eq!(again, *ticket, "a repeated request has the answer of the first");
        }
    }
    let metrics = tiny.step(ADA, &model, 5).await;
    assert_eq!((metrics["version:max"], metrics["grad_norm:mean"]), (2.0, 0.0));
    let other = tiny.service.pass(ADA, &model, 1, cross_entropy(batch(0.5))).unwrap_err();
    assert!(other.status == 400 && other.message.contains("two clients use one model"), "{other}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_request_does_not_hold_up_the_next_and_a_missing_one_not_for_long() {
    let tiny =
        TinyService::with(ServiceLimits { gap: Duration::from_millis(300), ..ServiceLimits::default() });
    let model = tiny.model(ADA, Some(LORA)).await;
    let mut broken = batch(1.0);
    broken[2].inputs.insert("weights".to_owned(), floats(vec![f32::NAN; 4]));
    let failed = tiny.service.pass(ADA, &model, 1, cross_entropy(broken)).unwrap();
    let failure = tiny.outcome(ADA, &failed).await.unwrap_err();
    assert!(failure.category == FailureCategory::User && failure.message.contains("datum 2"), "{failure}");
    assert_eq!(tiny.step(ADA, &model, 2).await["grad_norm:mean"], 0.0);
    let waits = tiny.service.optim_step(ADA, &model, 4, ADAM).unwrap();
    let failure = tiny.outcome(ADA, &waits).await.unwrap_err();
    assert!(failure.message.contains("request 3 of model"), "{failure}");
    // The missing one comes, and the one behind it comes again.
    tiny.pass(ADA, &model, 3, cross_entropy(batch(1.0))).await;
    assert_eq!(tiny.step(ADA, &model, 4).await["version:max"], 1.0);
    let bad = AdamParameters { learning_rate: f32::NAN, ..ADAM };
    let failed = tiny.service.optim_step(ADA, &model, 5, bad).unwrap();
    assert!(tiny.outcome(ADA, &failed).await.unwrap_err().message.contains("`learning_rate` is NaN"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_refused_for_now_is_not_missing() {
    let tiny = TinyService::with(ServiceLimits { queued_numbers: 1, ..ServiceLimits::default() });
    let model = tiny.model(ADA, Some(LORA)).await;
    tiny.service.optim_step(ADA, &model, 2, ADAM).unwrap();
    let waits = std::time::Instant::now();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(tiny.service.pass(ADA, &model, 1, cross_entropy(batch(1.0))).unwrap_err().status, 429);
    let mut registry = tiny.service.shared.registry();
    let calls = &mut registry.models.get_mut(&model).unwrap().calls;
    assert!(calls.give_up(waits.elapsed()).is_empty(), "its client sends it again");
}

#[tokio::test(flavor = "multi_thread")]
async fn saved_weights_continue_with_the_same_bits_also_in_a_new_process() {
    for lora in [Some(LORA), None] {
        let tiny = TinyService::new();
        let model = tiny.model(ADA, lora).await;
        let train = async |tiny: &TinyService, model: &str, first: u64| {
            let output = tiny.pass(ADA, model, first, cross_entropy(batch(1.0))).await;
            tiny.step(ADA, model, first + 1).await;
            output
        };
        train(&tiny, &model, 1).await;
        let save = SaveRequest { name: "st1".to_owned(), overwrite: false, ttl_s: None };
        let ticket = tiny.service.save_weights(ADA, &model, 3, save.clone()).unwrap();
        let RequestOutcome::WeightsSaved { path } = &*tiny.outcome(ADA, &ticket).await.unwrap() else {
            panic!()
        };
        assert_eq!(*path, format!("tinker://{model}/weights/st1"));
        let taken = tiny.service.save_weights(ADA, &model, 4, save).unwrap();
        assert!(tiny.outcome(ADA, &taken).await.unwrap_err().message.contains("saved already"));
        let without = [train(&tiny, &model, 5).await, train(&tiny, &model, 7).await];
        let tiny = tiny.restarted();
        let session_id = tiny.service.create_session(ADA).unwrap();
        let into = LoadInto::New { session_id: session_id.clone(), model_seq_id: 0, base_model: None };
        assert_eq!(
            tiny.service.load_weights(BOB, &into, path, true).unwrap_err().status,
            404,
            "another user's"
        );
        let ticket = tiny.service.load_weights(ADA, &into, path, true).unwrap();
        tiny.outcome(ADA, &ticket).await.unwrap();
        let loaded = ticket.model_id.unwrap();
        assert_eq!([train(&tiny, &loaded, 1).await, train(&tiny, &loaded, 3).await], without);
        // Without the optimizer the same pass, and another one after an update.
        let into = LoadInto::Model { model_id: loaded.clone(), seq_id: 5 };
        let ticket = tiny.service.load_weights(ADA, &into, path, false).unwrap();
        tiny.outcome(ADA, &ticket).await.unwrap();
        assert_eq!(train(&tiny, &loaded, 6).await, without[0]);
        assert_ne!(train(&tiny, &loaded, 8).await, without[1]);
        let from = SampleFrom::Saved(path.clone());
        let sampler = tiny.service.create_sampling_session(ADA, &session_id, 0, &from).unwrap();
        let output = tiny.sample(ADA, &sampler, 0, request(&[1, 5], 1, 4)).await;
        assert_eq!(output.version, 1);
        tiny.service.delete_saved(ADA, path).unwrap();
        assert_eq!(tiny.service.saved_at(ADA, path).unwrap_err().status, 404);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_session_forgets_its_oldest_samplers_and_requests() {
    let limits = ServiceLimits { sampling_sessions: 2, outcome: SOON, ..ServiceLimits::default() };
    let tiny = TinyService::with(limits);
    let model = tiny.model(ADA, Some(LORA)).await;
    let mut samplers = Vec::new();
    for number in 0..3 {
        samplers.push(tiny.sampler(ADA, &model, 1 + number, number, false).await);
    }
    assert_eq!(tiny.service.sampler(ADA, &samplers[0]).unwrap_err().status, 404);
    assert!(samplers[1..].iter().all(|sampler| tiny.service.sampler(ADA, sampler).is_ok()));
    // The same for one of a base model: the least recently used one goes.
    tiny.sample(ADA, &samplers[1], 0, request(&[1, 5], 1, 2)).await;
    let session = model.split(':').next().unwrap();
    let from = SampleFrom::Base("tiny".to_owned());
    let other = tiny.service.create_sampling_session(ADA, session, 1, &from).unwrap_err();
    assert_eq!(other.status, 400, "number 1 samples from the model: {other}");
    let of_base = tiny.service.create_sampling_session(ADA, session, 3, &from).unwrap();
    assert_eq!(tiny.service.create_sampling_session(ADA, session, 3, &from).unwrap(), of_base);
    assert!([&samplers[1], &of_base].iter().all(|sampler| tiny.service.sampler(ADA, sampler).is_ok()));
    assert_eq!(tiny.service.sampler(ADA, &samplers[2]).unwrap_err().status, 404);
    let of_bob = tiny.service.create_session(BOB).unwrap();
    let refused = tiny.service.create_sampling_session(BOB, &of_bob, 0, &from).unwrap_err();
    assert_eq!(refused.status, 429, "none of Bob's can go: {refused}");

    let limits = ServiceLimits { outcome: Duration::ZERO, ..ServiceLimits::default() };
    let tiny = TinyService::with(limits);
    let session = tiny.service.create_session(ADA).unwrap();
    let from = SampleFrom::Base("tiny".to_owned());
    let sampler = tiny.service.create_sampling_session(ADA, &session, 0, &from).unwrap();
    tiny.service.sample(ADA, &sampler, 0, request(&[1, 5], 1, 2)).unwrap();
    let deadline = std::time::Instant::now() + SOON;
    let is_known = || {
        let mut table = tiny.service.shared.samplers();
        table.session(ADA, &sampler).unwrap().known(0).is_some()
    };
    while is_known() {
        assert!(std::time::Instant::now() < deadline, "it cannot be retrieved any more");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_can_be_saved_again_after_its_record_or_its_old_files_failed() {
    let tiny = TinyService::new();
    let model = tiny.model(ADA, Some(LORA)).await;
    let save = async |number: u64, overwrite: bool| {
        let save = Some(SaveRequest { name: "a".to_owned(), overwrite, ttl_s: None });
        let save = SamplerSave { save, sampling_session_seq_id: None, inflight: false };
        let ticket = tiny.service.save_for_sampler(ADA, &model, number, save).unwrap();
        tiny.outcome(ADA, &ticket).await.map(drop).map_err(|failure| failure.message)
    };
    let run = saved::run_dir(&tiny.files.path().join("state"), &model);
    // No record can be written.
    let obstacle = run.join("model.json.partial");
    std::fs::create_dir_all(&obstacle).unwrap();
    let failure = save(1, false).await.unwrap_err();
    assert!(failure.contains("model.json"), "{failure}");
    assert!(!run.join("sampler_weights/a").exists());
    std::fs::remove_dir(&obstacle).unwrap();
    save(2, false).await.unwrap();
    // The files that are overwritten cannot be removed.
    std::fs::write(run.join("sampler_weights/a.deleted"), "").unwrap();
    save(3, true).await.unwrap();
    assert!(save(4, false).await.unwrap_err().contains("saved already"));
    save(5, true).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_was_deleted_and_is_saved_again_has_its_new_weights() {
    let tiny = TinyService::new();
    let model = tiny.model(ADA, Some(LORA)).await;
    let (session, path) = (model.split(':').next().unwrap(), format!("tinker://{model}/sampler_weights/a"));
    for round in 0..2 {
        tiny.pass(ADA, &model, 1 + 3 * round, cross_entropy(batch(1.0))).await;
        tiny.step(ADA, &model, 2 + 3 * round).await;
        let save = Some(SaveRequest { name: "a".to_owned(), overwrite: false, ttl_s: None });
        let save = SamplerSave { save, sampling_session_seq_id: None, inflight: false };
        let ticket = tiny.service.save_for_sampler(ADA, &model, 3 + 3 * round, save).unwrap();
        tiny.outcome(ADA, &ticket).await.unwrap();
        let from = SampleFrom::Saved(path.clone());
        let sampler = tiny.service.create_sampling_session(ADA, session, round, &from).unwrap();
        assert_eq!(tiny.sample(ADA, &sampler, 0, request(&[1, 5], 1, 4)).await.version, 1 + round);
        tiny.service.delete_saved(ADA, &path).unwrap();
    }
}

#[test]
fn requests_that_wait_for_an_engine_occupy_no_thread() {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let tiny = TinyService::new();
        let model = tiny.model(ADA, Some(LORA)).await;
        let session = tiny.service.create_session(BOB).unwrap();
        let from = SampleFrom::Base("tiny".to_owned());
        let of_base = tiny.service.create_sampling_session(BOB, &session, 0, &from).unwrap();
        tiny.sample(BOB, &of_base, 0, request(&[1, 5], 1, 2)).await;
        // As while the weights of another model are read.
        let permit = Arc::clone(&tiny.service.shared.preparing).acquire_owned().await.unwrap();
        let sampler = tiny.sampler(ADA, &model, 1, 0, false).await;
        let ask = |number| tiny.service.sample(ADA, &sampler, number, request(&[1, 5], 1, 2)).unwrap();
        let waiting: Vec<Ticket> = (0..8).map(ask).collect();
        tiny.sample(BOB, &of_base, 1, request(&[1, 5], 1, 2)).await;
        tokio::time::timeout(SOON, tokio::task::spawn_blocking(|| ())).await.unwrap().unwrap();
        drop(permit);
        for ticket in &waiting {
            tiny.outcome(ADA, ticket).await.unwrap();
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inflight_sampler_serves_newer_versions_and_staleness_is_reported() {
    let tiny = TinyService::new();
    let model = tiny.model(ADA, Some(LORA)).await;
    let inflight = tiny.sampler(ADA, &model, 1, 0, true).await;
    let first = tiny.service.sample(ADA, &inflight, 0, request(&[1, 5], 1, 6)).unwrap();
    let RequestOutcome::Sampled(before) = &*tiny.outcome(ADA, &first).await.unwrap() else { panic!() };
    tiny.pass(ADA, &model, 2, cross_entropy(batch(1.0))).await;
    tiny.step(ADA, &model, 3).await;
    let other = tiny.sampler(ADA, &model, 4, 1, true).await;
    let after = tiny.sample(ADA, &inflight, 1, request(&[1, 5], 1, 6)).await;
    assert_eq!((before.version, after.version), (0, 1));
    assert_ne!(before.sequences[0].logprobs, after.sequences[0].logprobs);
    let same = tiny.sample(ADA, &other, 0, request(&[1, 5], 1, 6)).await;
    assert_eq!(same.sequences, after.sequences, "all samplers of a model in flight serve its newest version");
    let span = SampledSpan { sequence_id: first.sequence_ids[0].clone(), offset: 0, length: 6 };
    let mut data = batch(1.0);
    data[0].sampled = vec![span];
    let output = tiny.pass(ADA, &model, 5, cross_entropy(data)).await;
    assert_eq!((output.metrics["staleness:max"], &output.outputs[0]["staleness"][..]), (1.0, &[1.0][..]));
    assert!(output.outputs[1]["staleness"].is_empty());
    let snapshot = tiny.sampler(ADA, &model, 6, 2, false).await;
    tiny.step(ADA, &model, 7).await;
    assert_eq!(tiny.service.sampler(ADA, &snapshot).unwrap().version, 1, "a snapshot stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn users_see_only_their_own_and_take_turns() {
    let tiny = TinyService::new();
    let (of_ada, of_bob) = (tiny.model(ADA, Some(LORA)).await, tiny.model(BOB, Some(LORA)).await);
    assert_eq!(tiny.service.model(BOB, &of_ada).unwrap_err().status, 404);
    assert_eq!(tiny.service.models(BOB).len(), 1);
    let refused = tiny.service.pass(BOB, &of_ada, 1, cross_entropy(batch(1.0))).unwrap_err();
    assert_eq!(refused.status, 404);
    let all: Vec<Ticket> = (1..=200)
        .map(|number| tiny.service.pass(ADA, &of_ada, number, cross_entropy(batch(1.0))).unwrap())
        .collect();
    assert_eq!(tiny.service.retrieve(BOB, &all[0].request_id, Duration::ZERO).await.unwrap_err().status, 410);
    tiny.pass(BOB, &of_bob, 1, cross_entropy(batch(1.0))).await;
    let last = tiny.service.retrieve(ADA, &all[199].request_id, Duration::ZERO).await.unwrap();
    assert!(matches!(last, FutureState::Pending { .. }), "200 passes of another user came first");
    tiny.service.unload(ADA, &of_ada).unwrap();
    let failure = tiny.outcome(ADA, &all[199]).await.unwrap_err();
    assert!(failure.message.contains("unloaded"), "{failure}");
    let gone = tiny.service.pass(ADA, &of_ada, 201, cross_entropy(batch(1.0))).unwrap_err();
    assert_eq!(gone.status, 410);
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_requests_end_or_are_refused() {
    let tiny = TinyService::with(ServiceLimits { open: 2000, ..ServiceLimits::default() });
    let session = tiny.service.create_session(ADA).unwrap();
    let from = SampleFrom::Base("tiny".to_owned());
    let sampler = tiny.service.create_sampling_session(ADA, &session, 0, &from).unwrap();
    // Some end while others are sent.
    let mut all = Vec::new();
    let refused = loop {
        match tiny.service.sample(ADA, &sampler, all.len() as u64, request(&[1, 5], 1, 2)) {
            Ok(ticket) => all.push(ticket),
            Err(refused) => break refused,
        }
        assert!(all.len() < 50_000, "requests end as fast as they come");
    };
    assert!(refused.status == 429 && all.len() >= 2000, "{refused}");
    let of_bob = tiny.service.create_session(BOB).unwrap();
    let from = SampleFrom::Base("tiny".to_owned());
    let of_bob = tiny.service.create_sampling_session(BOB, &of_bob, 0, &from).unwrap();
    tiny.sample(BOB, &of_bob, 0, request(&[1, 5], 1, 2)).await;
    for ticket in &all {
        let outcome = tiny.outcome(ADA, ticket).await.unwrap();
        let RequestOutcome::Sampled(output) = &*outcome else { panic!() };
        assert_eq!(output.sequences[0].tokens.len(), 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_vanishes_while_it_accumulates_is_forgotten() {
    let tiny =
        TinyService::with(ServiceLimits { session: Duration::from_secs(4), ..ServiceLimits::default() });
    let model = tiny.model(ADA, Some(LORA)).await;
    tiny.pass(ADA, &model, 1, cross_entropy(batch(1.0))).await;
    let deadline = std::time::Instant::now() + SOON;
    while tiny.service.model(ADA, &model).unwrap().loaded {
        assert!(std::time::Instant::now() < deadline, "its model is unloaded with its session");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let over = tiny.service.optim_step(ADA, &model, 2, ADAM).unwrap_err();
    assert_eq!(over.status, 410);
    assert!(tiny.service.metrics_text().contains("rlrun_training_models_loaded 0"));
}
