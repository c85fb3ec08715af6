//! Engines of others: a server that answers as vLLM and SGLang do, with a real model that it loads from the pushed directory.

mod fake_engine;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use model::{
    Architecture, Decoder, ModelDirectory, Parameters, Sampling, SharedCores, ThreadPool, WeightDtype,
};
use rollout::remote::{EngineKind, PushConfig, RemoteEnginesConfig, RemoteSampler};
use rollout::{Completion, OnUpdate, RolloutError, SampleRequest, Sampler, StopRules};
use trajectory::{GroupId, PolicyVersion, StopReason};
use weights::{HubPublisher, Publisher, Snapshot, WeightAdapter};

use self::fake_engine::{EngineScript, FakeEngine, routed};
use crate::Model;

/// A request of `samples` completions of at most 12 tokens.
fn request(group: u64, prompt: &[u32], samples: usize) -> SampleRequest {
    let prompt = prompt.to_vec();
    SampleRequest { prompt, max_completion_length: 12, ..crate::request(group, samples, Sampling::PLAIN) }
}

const SOON: Duration = Duration::from_secs(30);
const QUIET: Duration = Duration::from_millis(300);

/// A sampler with the engines of `engines`, and what publishes its weights.
struct Bench {
    sampler: RemoteSampler,
    publisher: HubPublisher,
    notices: Arc<Mutex<Vec<String>>>,
    model: Model,
    files: tempfile::TempDir,
}

impl Bench {
    fn new(kind: EngineKind, engines: &[&FakeEngine], temperature: f32) -> Self {
        Self::with(kind, engines, temperature, false)
    }

    fn with(kind: EngineKind, engines: &[&FakeEngine], temperature: f32, adapter: bool) -> Self {
        Self::of(Model::new(), kind, engines, temperature, adapter)
    }

    fn of(model: Model, kind: EngineKind, engines: &[&FakeEngine], temperature: f32, adapter: bool) -> Self {
        let files = tempfile::tempdir().unwrap();
        let (publisher, hub) = weights::memory::hub();
        let notices = Arc::new(Mutex::new(Vec::new()));
        let said = Arc::clone(&notices);
        let tokenizer = model.directory.tokenizer().clone();
        let push = PushConfig {
            directory: files.path().join("weights"),
            dtype: WeightDtype::F32,
            adapter,
            probes: vec![vec![5, 6, 7], vec![8]],
            probe_tokens: 8,
            bound: 1e-3,
            wait: SOON,
        };
        let config = RemoteEnginesConfig {
            kind,
            urls: engines.iter().map(|engine| format!("http://{}", engine.address)).collect(),
            max_running: 8,
            max_length: 64,
            seed: 3,
            temperature,
            experts: model.directory.config().experts().is_some(),
            stop_rules: StopRules { token_ids: vec![2], strings: Vec::new(), tokenizer },
            push,
            wait: SOON,
            quiet: QUIET,
            notice: Box::new(move |text| said.lock().unwrap().push(text.to_owned())),
        };
        let directory = Arc::new(ModelDirectory::open(model.directory.path()).unwrap());
        let subscriber = Arc::new(hub.subscribe("sampler").unwrap());
        let pool = Arc::new(ThreadPool::new(&SharedCores::new(1), 1));
        let sampler = RemoteSampler::new(config, directory, subscriber, pool).unwrap();
        Self { sampler, publisher, notices, model, files }
    }

    fn publish(&self, version: u64, parameters: &Parameters) {
        self.publisher.publish_values(PolicyVersion(version), parameters.values()).unwrap();
    }

    /// Publishes the weights and waits until they are served.
    fn serve(&mut self, version: u64, parameters: &Parameters) -> Result<(), RolloutError> {
        self.publish(version, parameters);
        self.waits_for(version)
    }

    fn waits_for(&mut self, version: u64) -> Result<(), RolloutError> {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < SOON, "{:?}", self.notices.lock().unwrap());
            if self.sampler.newer_weights(Duration::from_millis(5))?.is_some()
                && let Some(applied) = self.sampler.apply_weights(OnUpdate::Keep)?
            {
                assert_eq!(applied.version, PolicyVersion(version));
                return Ok(());
            }
        }
    }

    fn served(kind: EngineKind, engines: &[&FakeEngine]) -> Self {
        let mut bench = Self::new(kind, engines, 1.0);
        let parameters = bench.model.parameters();
        bench.serve(0, &parameters).unwrap();
        bench
    }

    fn submit(&mut self, group: u64, samples: usize) {
        self.sampler.submit(request(group, &[5, 6, 7], samples)).unwrap();
    }

    fn ended(&mut self, count: usize) -> Vec<Completion> {
        let (mut ended, begun) = (Vec::new(), Instant::now());
        while ended.len() < count {
            assert!(begun.elapsed() < SOON, "{} of {count}: {:?}", ended.len(), self.notices.lock().unwrap());
            ended.extend(self.sampler.poll(Duration::from_millis(5)).unwrap());
        }
        ended.sort_by_key(|completion| (completion.group, completion.index));
        ended
    }

    fn waits_for_notice(&mut self, part: &str) {
        let begun = Instant::now();
        while !self.notices.lock().unwrap().iter().any(|notice| notice.contains(part)) {
            assert!(begun.elapsed() < SOON, "{part}: {:?}", self.notices.lock().unwrap());
            drop(self.sampler.poll(Duration::from_millis(5)).unwrap());
        }
    }
}

#[test]
fn completions_have_the_versions_of_the_weights_that_were_pushed() {
    for kind in [EngineKind::Vllm, EngineKind::Sglang] {
        let engine = FakeEngine::new(kind);
        let mut bench = Bench::served(kind, &[&engine]);
        bench.sampler.submit(SampleRequest { baseline: true, ..request(4, &[5, 6, 7], 3) }).unwrap();
        assert_eq!(bench.sampler.in_flight(), 4);
        let ended = bench.ended(4);
        for (index, one) in ended.iter().enumerate() {
            assert_eq!((one.group, one.index as usize, one.baseline), (GroupId(4), index, index == 3));
            assert_eq!((one.versions[0].version, one.prompt_version), (PolicyVersion(0), PolicyVersion(0)));
            assert_eq!(&one.token_ids[..3], &[5, 6, 7]);
            let sample = one.sample().unwrap();
            assert_eq!(sample.trained_tokens(), if one.baseline { 0 } else { one.logprobs.len() });
            assert_eq!(one.stop == StopReason::StopToken, one.token_ids.last() == Some(&2));
        }
        let other = bench.model.other_parameters();
        bench.serve(1, &other).unwrap();
        assert_eq!(bench.sampler.version(), PolicyVersion(1));
        bench.submit(5, 2);
        assert!(bench.ended(2).iter().all(|one| one.versions[0].version == PolicyVersion(1)));
        bench.serve(2, &other).unwrap();
        let kept: Vec<String> = std::fs::read_dir(bench.files.path().join("weights"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(kept.len(), 2, "the version and the one before: {kept:?}");
        assert_eq!(bench.publisher.lags().unwrap()[0].receipt.unwrap().version, PolicyVersion(2));
    }
}

/// The experts of prompt and completion are those that the engine reports, ascending in each layer, also where it was stopped in
/// between; an engine that does not report them is refused.
#[test]
fn completions_have_the_experts_that_the_engine_reports() {
    for kind in [EngineKind::Vllm, EngineKind::Sglang] {
        let engine = FakeEngine::new(kind);
        engine.script().experts = true;
        let mut bench =
            Bench::of(Model::of_family(Architecture::Qwen3Moe, 128), kind, &[&engine], 1.0, false);
        let parameters = bench.model.parameters();
        bench.serve(0, &parameters).unwrap();
        bench.submit(1, 2);
        let mut ended = bench.ended(2);
        engine.script().abort_after = Some(2);
        bench.submit(2, 1);
        ended.extend(bench.ended(1));
        for one in &ended {
            let mut expected = routed(&one.token_ids);
            expected.chunks_exact_mut(2).for_each(<[u16]>::sort_unstable);
            let experts = one.experts.as_ref().unwrap();
            assert_eq!((experts.per_token, &experts.ids), (2, &expected));
            assert!(one.sample().unwrap().experts().is_some());
        }
        engine.script().experts = false;
        bench.submit(3, 1);
        let begun = Instant::now();
        let error = loop {
            assert!(begun.elapsed() < SOON);
            match bench.sampler.poll(Duration::from_millis(5)) {
                Ok(_) => {}
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("--enable-return-routed-experts"), "{error}");
    }
}

/// Stands for an adapter: its directory has all weights, which the engine of these tests loads.
#[derive(Debug)]
struct MergedAdapter(Arc<ModelDirectory>, Parameters);

impl WeightAdapter for MergedAdapter {
    fn write(&self, directory: &Path) -> std::io::Result<()> {
        self.0.export(directory, &self.1, WeightDtype::F32).map_err(std::io::Error::other)
    }
}

#[test]
fn an_adapter_is_loaded_in_place_of_weights_and_sampled_from_by_its_name() {
    let engine = FakeEngine::new(EngineKind::Vllm);
    let mut bench = Bench::with(EngineKind::Vllm, &[&engine], 1.0, true);
    let directory = Arc::new(ModelDirectory::open(bench.model.directory.path()).unwrap());
    for version in 0..2 {
        let parameters = if version == 0 { bench.model.parameters() } else { bench.model.other_parameters() };
        let values: Arc<[f32]> = parameters.values().into();
        let adapter = MergedAdapter(Arc::clone(&directory), parameters);
        let snapshot = Snapshot::new(PolicyVersion(version), values.into());
        bench.publisher.publish(snapshot.with_adapter(Some(Arc::new(adapter)))).unwrap();
        bench.waits_for(version).unwrap();
        bench.submit(version, 2);
        assert!(bench.ended(2).iter().all(|one| one.versions[0].version == PolicyVersion(version)));
    }
    let calls = engine.script().calls.clone();
    let loads = |path: &str| calls.iter().filter(|call| *call == path).count();
    assert_eq!((loads("/v1/load_lora_adapter"), loads("/collective_rpc")), (2, 0));
    // Weights that come without their adapter are not pushed in its place.
    let parameters = bench.model.parameters();
    let error = bench.serve(2, &parameters).unwrap_err().to_string();
    assert!(error.contains("version_000002") && error.contains("no adapter"), "{error}");
}

#[test]
fn an_engine_in_which_requests_wait_gets_no_more_until_they_run() {
    let (busy, idle) = (FakeEngine::new(EngineKind::Vllm), FakeEngine::new(EngineKind::Vllm));
    let mut bench = Bench::served(EngineKind::Vllm, &[&busy, &idle]);
    bench.waits_for_notice(&format!("{} serves v0", busy.address));
    bench.waits_for_notice(&format!("{} serves v0", idle.address));
    let asked = |engine: &FakeEngine| engine.script().calls.iter().filter(|path| *path == "/metrics").count();
    let measured = |bench: &mut Bench, engine: &FakeEngine, times: usize| {
        let (before, begun) = (asked(engine), Instant::now());
        while asked(engine) < before + times {
            assert!(begun.elapsed() < SOON, "it is not asked for its queue");
            drop(bench.sampler.poll(Duration::from_millis(5)).unwrap());
        }
    };
    // Both have a request that does not end, and other programs fill the queue of one.
    busy.script().stuck = true;
    idle.script().stuck = true;
    busy.script().queued = 5;
    bench.submit(1, 1);
    bench.submit(2, 1);
    measured(&mut bench, &busy, 3);
    assert!(bench.sampler.has_capacity(7) && !bench.sampler.has_capacity(8), "the other one has space for 7");
    idle.script().queued = 1;
    measured(&mut bench, &idle, 3);
    assert!(!bench.sampler.has_capacity(1));
    busy.script().queued = 0;
    measured(&mut bench, &busy, 2);
    assert!(bench.sampler.has_capacity(7));
    busy.script().stuck = false;
    idle.script().stuck = false;
    assert_eq!(bench.ended(2).len(), 2);
}

#[test]
fn an_aborted_completion_goes_on_where_it_was() {
    let engine = FakeEngine::new(EngineKind::Vllm);
    let mut bench = Bench::served(EngineKind::Vllm, &[&engine]);
    engine.script().abort_after = Some(4);
    let mut asked = request(1, &[5, 6, 7], 2);
    asked.options.stop.ignore_eos = true;
    bench.sampler.submit(asked).unwrap();
    let ended = bench.ended(2);
    let generated = engine.script().calls.iter().filter(|path| path.ends_with("/generate")).count();
    assert_eq!(generated, 2 + 1 + 2, "two probes, the group, and the rest of both");
    for one in ended {
        assert_eq!((one.logprobs.len(), one.token_ids.len(), one.stop), (12, 15, StopReason::Length));
        assert_eq!(one.versions.iter().map(|run| run.len).sum::<u32>(), 12);
    }
}

#[test]
fn tokens_without_a_version_have_the_one_of_the_engine_when_their_request_was_sent() {
    for kind in [EngineKind::Vllm, EngineKind::Sglang] {
        let engine = FakeEngine::new(kind);
        engine.script().unversioned = true;
        let mut bench = Bench::served(kind, &[&engine]);
        engine.script().stuck = true;
        bench.submit(1, 2);
        let other = bench.model.other_parameters();
        bench.publish(1, &other);
        let begun = Instant::now();
        while bench.sampler.version() != PolicyVersion(1) {
            assert!(begun.elapsed() < SOON, "{:?}", bench.notices.lock().unwrap());
            assert!(bench.sampler.poll(Duration::from_millis(5)).unwrap().is_empty());
            if bench.sampler.newer_weights(Duration::ZERO).unwrap().is_some() {
                let _ = bench.sampler.apply_weights(OnUpdate::Keep).unwrap();
            }
        }
        engine.script().stuck = false;
        let of =
            |one: &Completion, version: PolicyVersion| one.versions.iter().all(|run| run.version == version);
        assert!(bench.ended(2).iter().all(|one| of(one, PolicyVersion(0))));
        bench.submit(2, 1);
        assert!(bench.ended(1).iter().all(|one| of(one, PolicyVersion(1))));
    }
}

#[test]
fn requests_of_a_killed_engine_begin_again_elsewhere_and_it_comes_back_with_the_weights() {
    let (mut first, second) = (FakeEngine::new(EngineKind::Vllm), FakeEngine::new(EngineKind::Vllm));
    let mut bench = Bench::served(EngineKind::Vllm, &[&first, &second]);
    bench.waits_for_notice(&format!("{} serves v0", first.address));
    bench.waits_for_notice(&format!("{} serves v0", second.address));
    // Requests stay in both.
    first.script().paused = true;
    second.script().paused = true;
    (1..=4).for_each(|group| bench.submit(group, 2));
    first.kill();
    bench.waits_for_notice("is left out until it answers again");
    second.script().paused = false;
    let ended = bench.ended(8);
    let groups: Vec<u64> = ended.iter().map(|one| one.group.0).collect();
    assert_eq!(groups, [1, 1, 2, 2, 3, 3, 4, 4], "none is missing and none came twice");
    let other = bench.model.other_parameters();
    bench.serve(1, &other).unwrap();
    first.start_again();
    bench.waits_for_notice(&format!("{} serves v1", first.address));
    assert!(first.script().calls.contains(&"/collective_rpc".to_owned()));
}

/// Nothing was in flight, so only the version of its next answer shows it.
#[test]
fn an_engine_that_was_started_again_unseen_gets_the_weights_before_it_is_used() {
    let mut engine = FakeEngine::new(EngineKind::Vllm);
    let mut bench = Bench::served(EngineKind::Vllm, &[&engine]);
    let base = bench.model.other_parameters();
    engine.kill();
    engine.start_again();
    engine.script().decoder = Some(Decoder::new(bench.model.directory.config(), &base));
    bench.submit(1, 2);
    let ended = bench.ended(2);
    assert!(ended.iter().all(|one| one.versions[0].version == PolicyVersion(0)));
    bench.waits_for_notice("has weights of the version \"default\"; it is left out");
    assert!(engine.script().calls.contains(&"/collective_rpc".to_owned()));
}

#[test]
fn an_engine_that_another_program_has_paused_is_resumed() {
    let engine = FakeEngine::new(EngineKind::Vllm);
    let mut bench = Bench::served(EngineKind::Vllm, &[&engine]);
    engine.script().paused = true;
    bench.submit(1, 1);
    assert_eq!(bench.ended(1).len(), 1);
    bench.waits_for_notice("was paused by another program, and is resumed");
    // Also while it proves which weights it has.
    bench.notices.lock().unwrap().clear();
    engine.script().paused_before = true;
    let other = bench.model.other_parameters();
    bench.serve(1, &other).unwrap();
    bench.waits_for_notice("was paused by another program, and is resumed");
}

#[test]
fn aborted_groups_give_no_completion() {
    let engine = FakeEngine::new(EngineKind::Sglang);
    let mut bench = Bench::served(EngineKind::Sglang, &[&engine]);
    engine.script().paused = true;
    bench.submit(1, 2);
    bench.submit(2, 2);
    assert_eq!(bench.sampler.abort(GroupId(1)).unwrap(), 2);
    assert_eq!(bench.sampler.in_flight(), 2);
    engine.script().paused = false;
    assert!(bench.ended(2).iter().all(|one| one.group == GroupId(2)));
}

#[test]
fn engines_that_would_train_wrong_are_refused() {
    let refused = |change: &dyn Fn(&mut EngineScript), temperature: f32, part: &str| {
        let engine = FakeEngine::new(EngineKind::Vllm);
        change(&mut engine.script());
        let mut bench = Bench::new(EngineKind::Vllm, &[&engine], temperature);
        let parameters = bench.model.parameters();
        let error = bench.serve(0, &parameters).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("--enable-scale-out"), "{error}");
    };
    refused(&|script| script.shift = -0.01, 1.0, "more than 0.001 apart, so it serves other weights");
    refused(&|script| script.context = 32, 1.0, "serves a context of 32 tokens");
    // It reports log-probabilities of temperature 1.
    refused(&|script| script.shift = 0.5, 0.5, "log-probabilities of another temperature");
    let engine = FakeEngine::new(EngineKind::Vllm);
    let mut bench = Bench::served(EngineKind::Vllm, &[&engine]);
    let mut stops = request(1, &[5], 1);
    stops.options.stop.strings = vec!["x".to_owned()];
    assert!(bench.sampler.submit(stops).unwrap_err().to_string().contains("neither finds stop strings"));
}
