//! Samplers on a tiny random model: the bits of trainer, engine and scores; adapters in flight; turns; bad input.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use model::{
    Config, FrozenParameters, LowRank, ModelDirectory, Parameters, Recompute, SharedCores, WeightDtype,
};
use rollout::RolloutError;
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::optimizer::{OptimizerConfig, OptimizerKind};
use trainer::{Learner, LearnerConfig, ParallelConfig};
use trajectory::{PolicyVersion, Sample, SampleStreams, VersionRun};
use weights::Digest;

use super::{CloseScores, HostConfig, HostedNetwork, SamplerHost};
use crate::data::{SampledTokens, SamplingOutput, SamplingRequest, StopForm};
use crate::fair_queue::FairBounds;
use crate::outcome::{FailedRequest, FailureCategory};
use crate::tiny_model::tiny_model;
use crate::training::UserId;

const A: UserId = UserId([1; 16]);
const B: UserId = UserId([2; 16]);
/// Longest wait for a receipt.
const SOON: Duration = Duration::from_secs(20);

const CONFIG: HostConfig = HostConfig {
    max_running: 8,
    max_context: 512,
    kv_cache_tokens: 8 * 560,
    prefill_chunk: 7,
    max_samples: 16,
    threads: 1,
    waiting: FairBounds { total: 400, per_user: 300 },
};

const LEARNER: LearnerConfig = LearnerConfig {
    optimizer: OptimizerConfig {
        kind: OptimizerKind::Adamw,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        momentum: 0.95,
        dion_rank_fraction: 0.5,
    },
    max_grad_norm: 1.0,
    router_correction_rate: 0.0,
    recompute: Recompute::None,
    microbatch_tokens: 512,
    world: 1,
    parallel: ParallelConfig::DATA,
    leaves: 1,
    zero: 1,
    wait: Duration::from_secs(60),
    device: None,
};

/// A model in a directory.
struct TinyModelFiles {
    directory: ModelDirectory,
    root: tempfile::TempDir,
}

impl TinyModelFiles {
    fn new(dtype: WeightDtype) -> Self {
        let root = tempfile::tempdir().unwrap();
        let directory = ModelDirectory::open(&tiny_model(root.path(), dtype)).unwrap();
        Self { directory, root }
    }

    fn base(&self) -> Arc<FrozenParameters> {
        let (path, config) = (self.root.path().join("model"), self.directory.config());
        Arc::new(FrozenParameters::load(&path, config).unwrap())
    }

    fn host(&self, network: HostedNetwork, config: HostConfig) -> SamplerHost {
        SamplerHost::start("tiny", &self.directory, network, config, &SharedCores::new(1)).unwrap()
    }

    /// A host of the base.
    fn adapted(&self, config: HostConfig) -> SamplerHost {
        self.host(HostedNetwork::Base(self.base()), config)
    }
}

/// An adapter that changes what is sampled; of zeros for a seed of 0.
fn adapter(base: &FrozenParameters, seed: f32) -> Adapter {
    let lora = LoraConfig { rank: 3, alpha: 3.0, target_modules: TargetModule::BLOCK.to_vec() };
    let mut adapter = Adapter::over(lora, base, 1);
    adapter.values_mut().iter_mut().enumerate().for_each(|(i, value)| *value = 0.2 * (i as f32 * seed).sin());
    adapter
}

fn factors(files: &TinyModelFiles, seed: f32) -> Arc<LowRank> {
    Arc::clone(adapter(&files.base(), seed).factors())
}

fn prompt(length: usize, seed: usize) -> Vec<u32> {
    (0..length).map(|i| 4 + ((i * 13 + seed * 5) % 90) as u32).collect()
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> SamplingRequest {
    let stop = StopForm::Tokens(Vec::new());
    SamplingRequest { seed: Some(3), stop, ..SamplingRequest::new(prompt, 1, max_tokens) }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work)
}

async fn sampled(
    host: &SamplerHost,
    slot: Option<usize>,
    request: SamplingRequest,
) -> Result<SamplingOutput, FailedRequest> {
    host.sample(slot, A, request).unwrap().await
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What the trainer computes of the tokens after the first.
fn trained(learner: &Learner, tokens: &[u32]) -> Vec<f32> {
    let length = tokens.len();
    let sample = Sample::new(SampleStreams {
        token_ids: tokens.to_vec(),
        loss_mask: (0..length).map(|at| at > 0).collect(),
        behavior_logprobs: vec![-1.0; length],
        versions: vec![VersionRun { version: PolicyVersion(0), len: length as u32 }],
        kept: None,
        experts: None,
        temperature: 1.0,
    });
    let scored = learner.score(&[&sample.unwrap()]).unwrap().remove(0);
    scored.into_iter().map(|prediction| prediction.logprob).collect()
}

/// Checks that samples of `slot` have the log-probabilities of the scored prompt and of `learner`.
async fn check_bits(
    host: &SamplerHost,
    learner: &Learner,
    slot: Option<usize>,
    prompt: &[u32],
    samples: &[SampledTokens],
) {
    for SampledTokens { tokens, logprobs, .. } in samples {
        let whole = [prompt, tokens].concat();
        let asked = SamplingRequest { prompt_logprobs: true, ..request(whole.clone(), 1) };
        let scored = sampled(host, slot, asked).await.unwrap().prompt_logprobs.unwrap();
        assert!(scored[0].is_nan());
        assert_eq!(scored.len(), whole.len());
        assert_eq!(bits(&scored[prompt.len()..]), bits(logprobs), "slot {slot:?}: sampled and scored");
        assert_eq!(bits(&scored[1..]), bits(&trained(learner, &whole)), "slot {slot:?}: scored and trained");
    }
}

/// Two adapters and the bare base are sampled in one batch with the bits of the trainer of each.
#[test]
fn sampled_scored_and_trained_tokens_have_the_same_bits() {
    for dtype in [WeightDtype::F32, WeightDtype::Bf16] {
        let files = TinyModelFiles::new(dtype);
        let (base, host) = (files.base(), files.adapted(CONFIG));
        run(async {
            let mut receipts = Vec::new();
            for (slot, seed) in [(0, 0.7), (5, 1.3)] {
                receipts.push(host.set_adapter(slot, factors(&files, seed), PolicyVersion(4)).unwrap());
            }
            let prompts = [prompt(40, 1), prompt(9, 2), prompt(40, 1)];
            let slots = [(Some(0), 0.7), (Some(5), 1.3), (None, 0.0)];
            let asked = |prompt: &Vec<u32>| SamplingRequest { samples: 2, ..request(prompt.clone(), 30) };
            let begun = slots.iter().zip(&prompts);
            let begun: Vec<_> =
                begun.map(|((slot, _), prompt)| host.sample(*slot, A, asked(prompt)).unwrap()).collect();
            let mut outputs = Vec::new();
            for answer in begun {
                outputs.push(answer.await.unwrap());
            }
            for (receipt, seed) in receipts.into_iter().zip([0.7, 1.3]) {
                let receipt = receipt.served(SOON).await.unwrap();
                assert_eq!(receipt.digest, Digest::of(factors(&files, seed).values()));
            }
            for (((slot, seed), prompt), output) in slots.into_iter().zip(&prompts).zip(&outputs) {
                let over = adapter(&base, seed);
                let learner = Learner::over(LEARNER, Arc::clone(&base), over, None).unwrap();
                assert_eq!(output.sequences.len(), 2);
                assert_ne!(output.sequences[0].tokens, output.sequences[1].tokens);
                assert_eq!(output.version, if slot.is_some() { 4 } else { 0 });
                check_bits(&host, &learner, slot, prompt, &output.sequences).await;
            }
            assert_ne!(outputs[0].sequences, outputs[2].sequences, "the adapter changes what is sampled");
        });
    }
}

#[test]
fn whole_weights_are_sampled_with_the_bits_of_their_trainer_and_are_replaced() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let config = files.directory.config().clone();
    let learner = |parameters: &Arc<Parameters>| {
        Learner::new(LEARNER, config.clone(), Parameters::clone(parameters), None).unwrap()
    };
    let first = Arc::new(files.directory.load_parameters().unwrap());
    let second = Arc::new(Parameters::random(&config, 77));
    let host = files.host(HostedNetwork::Whole(Arc::clone(&first), PolicyVersion(1)), CONFIG);
    run(async {
        let prompt = prompt(20, 1);
        let old = sampled(&host, None, request(prompt.clone(), 20)).await.unwrap();
        assert_eq!(old.version, 1);
        check_bits(&host, &learner(&first), None, &prompt, &old.sequences).await;
        let receipt = host.set_weights(Arc::clone(&second), PolicyVersion(2)).unwrap();
        assert_eq!(receipt.served(SOON).await.unwrap().digest, Digest::of(second.values()));
        let new = sampled(&host, None, request(prompt.clone(), 20)).await.unwrap();
        assert_eq!(new.version, 2);
        check_bits(&host, &learner(&second), None, &prompt, &new.sequences).await;
        let older = host.set_weights(Arc::clone(&first), PolicyVersion(1)).unwrap_err();
        assert!(matches!(older, RolloutError::OlderVersion { .. }), "{older}");
        let misplaced = host.set_adapter(0, factors(&files, 0.7), PolicyVersion(1)).unwrap_err();
        assert!(matches!(misplaced, RolloutError::Misplaced { .. }), "{misplaced}");
        let failure = sampled(&host, Some(0), request(prompt, 1)).await.unwrap_err();
        assert_eq!(failure.category, FailureCategory::User);
    });
}

/// Waits until the engine has sampled `tokens` in all.
async fn until_sampled(host: &SamplerHost, tokens: u64) {
    let start = Instant::now();
    while host.status().counts.sampled_tokens < tokens {
        assert!(start.elapsed() < SOON, "{:?}", host.status());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_request_in_flight_continues_with_a_newer_version_of_its_adapter() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let host = files.adapted(CONFIG);
    run(async {
        let [old, new] = [0.7, 1.3].map(|seed| factors(&files, seed));
        let long = request(prompt(12, 1), 500);
        host.set_adapter(2, Arc::clone(&old), PolicyVersion(1)).unwrap();
        let alone = sampled(&host, Some(2), long.clone()).await.unwrap();
        let mixed = host.sample(Some(2), A, long).unwrap();
        until_sampled(&host, 505).await;
        let receipt = host.set_adapter(2, Arc::clone(&new), PolicyVersion(2)).unwrap();
        let mixed = mixed.await.unwrap();
        assert_eq!(receipt.served(SOON).await.unwrap().digest, Digest::of(new.values()));
        assert_eq!((alone.version, mixed.version), (1, 2));
        let [alone, mixed] = [alone, mixed].map(|mut output| output.sequences.remove(0));
        assert_eq!((alone.tokens.len(), mixed.tokens.len()), (500, 500));
        let pairs = alone.logprobs.iter().zip(&mixed.logprobs);
        let same = pairs.take_while(|(a, b)| a.to_bits() == b.to_bits()).count();
        assert!((5..500).contains(&same), "{same} tokens of the first version");
        let older = host.set_adapter(2, old, PolicyVersion(1)).unwrap_err();
        assert!(matches!(older, RolloutError::OlderVersion { .. }), "{older}");
    });
}

#[test]
fn a_slot_is_freed_while_its_sequences_run() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let host = files.adapted(CONFIG);
    run(async {
        let [old, new] = [0.7, 1.3].map(|seed| factors(&files, seed));
        let long = request(prompt(12, 1), 300);
        host.set_adapter(0, Arc::clone(&old), PolicyVersion(8)).unwrap();
        let expected = sampled(&host, Some(0), long.clone()).await.unwrap();
        let begun = host.sample(Some(0), A, long.clone()).unwrap();
        until_sampled(&host, 305).await;
        host.free_adapter(0).unwrap();
        let failure = sampled(&host, Some(0), long.clone()).await.unwrap_err();
        assert_eq!(failure.category, FailureCategory::User);
        assert!(failure.message.contains("slot 0"), "{failure}");
        host.set_adapter(0, Arc::clone(&new), PolicyVersion(1)).unwrap();
        let other = host.sample(Some(0), A, long).unwrap();
        let found = begun.await.unwrap();
        assert_eq!(found.sequences, expected.sequences);
        assert_eq!(found.version, 8);
        let other = other.await.unwrap();
        assert_ne!(other.sequences, expected.sequences);
        assert_eq!(other.version, 1);
        assert_eq!(host.status().adapters, 1);
        host.free_adapter(0).unwrap();
        host.free_adapter(9).unwrap();
        assert_eq!(host.status().adapters, 0);
    });
}

/// A request that waits is never sampled with the adapter that its slot gets meanwhile.
#[test]
fn a_request_that_waits_while_its_slot_is_freed_fails() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let host = files.adapted(HostConfig { max_running: 1, ..CONFIG });
    run(async {
        let [old, new] = [0.7, 1.3].map(|seed| factors(&files, seed));
        host.set_adapter(0, old, PolicyVersion(1)).unwrap();
        let running = host.sample(Some(0), A, request(prompt(12, 1), 400)).unwrap();
        until_sampled(&host, 1).await;
        let [second, third] =
            [B, A].map(|user| host.sample(Some(0), user, request(prompt(12, 1), 4)).unwrap());
        host.free_adapter(0).unwrap();
        host.set_adapter(0, new, PolicyVersion(2)).unwrap();
        let fourth = host.sample(Some(0), A, request(prompt(12, 1), 4)).unwrap();
        assert_eq!(running.await.unwrap().version, 1);
        for waited in [second, third] {
            let failure = waited.await.unwrap_err();
            assert_eq!(failure.category, FailureCategory::User);
            assert!(failure.message.contains("publish them again"), "{failure}");
        }
        assert_eq!(fourth.await.unwrap().version, 2);
    });
}

#[test]
fn a_user_with_many_requests_delays_another_by_about_one_turn() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let host = files.adapted(HostConfig { max_running: 4, ..CONFIG });
    run(async {
        let ended = Arc::new(AtomicUsize::new(0));
        let mut tasks = Vec::new();
        for seed in 0..250 {
            let (answer, ended) =
                (host.sample(None, A, request(prompt(8, seed), 16)).unwrap(), Arc::clone(&ended));
            tasks.push(tokio::spawn(async move {
                answer.await.unwrap();
                ended.fetch_add(1, Ordering::Relaxed);
            }));
        }
        until_sampled(&host, 40).await;
        let before = host.status().waiting;
        assert!(before > 100, "{:?}", host.status());
        host.sample(None, B, request(prompt(8, 1), 16)).unwrap().await.unwrap();
        let passed = before - host.status().waiting.min(before);
        assert!(passed < 40, "{passed} requests of the other user began before it ended");
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(ended.load(Ordering::Relaxed), 250);
    });
}

#[test]
fn what_waits_is_bounded_and_what_is_given_up_makes_space() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let waiting = FairBounds { total: 12, per_user: 10 };
    let host = files.adapted(HostConfig { max_running: 1, waiting, ..CONFIG });
    run(async {
        let long = || request(prompt(8, 1), 500);
        let mut begun = vec![host.sample(None, A, long()).unwrap()];
        until_sampled(&host, 1).await;
        // One more may have been taken from the queue and wait for capacity.
        let refused = loop {
            match host.sample(None, A, long()) {
                Ok(answer) => begun.push(answer),
                Err(refused) => break refused,
            }
        };
        assert!((11..=12).contains(&begun.len()), "{}", begun.len());
        assert_eq!(refused.status, 429);
        let many = SamplingRequest { samples: 4, ..long() };
        assert_eq!(host.sample(None, B, many).err().map(|refused| refused.status), Some(429));
        drop(begun);
        let answer = host.sample(None, A, request(prompt(8, 1), 4)).unwrap().await.unwrap();
        assert_eq!(answer.sequences[0].tokens.len(), 4);
        let pending = host.sample(None, A, long()).unwrap();
        drop(host);
        let failure = pending.await.unwrap_err();
        assert_eq!(failure.category, FailureCategory::Server);
        assert!(failure.message.contains("stopped"), "{failure}");
    });
}

/// A request for more completions than the engine samples together has those of one that samples all of them together.
#[test]
fn many_samples_are_those_of_one_prefill() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let many = SamplingRequest { samples: 7, ..request(prompt(40, 1), 12) };
    let outputs = [8, 2].map(|max_running| {
        let host = files.adapted(HostConfig { max_running, ..CONFIG });
        run(async {
            let first = sampled(&host, None, many.clone()).await.unwrap();
            let again = sampled(&host, None, many.clone()).await.unwrap();
            assert_eq!(again.sequences, first.sequences, "a seed determines them");
            assert_eq!((first.cached_tokens, again.cached_tokens > 16), (0, true));
            if max_running == 8 {
                assert_eq!(host.status().counts.prefilled_tokens, 40 + 40 - again.cached_tokens as u64);
            }
            // Another user does not see what is in the cache.
            let other = host.sample(None, B, many.clone()).unwrap().await.unwrap();
            assert_eq!((other.cached_tokens, other.sequences), (0, first.sequences.clone()));
            let unseeded = SamplingRequest { seed: None, ..many.clone() };
            let [a, b] = [many.clone(), unseeded].map(|request| sampled(&host, None, request));
            assert_ne!(a.await.unwrap().sequences, b.await.unwrap().sequences);
            first.sequences
        })
    });
    assert_eq!(outputs[0], outputs[1]);
}

#[test]
fn stops_temperatures_and_alternatives_are_as_asked_for() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let host = files.adapted(CONFIG);
    run(async {
        let plain = request(prompt(9, 1), 40);
        let free = sampled(&host, None, plain.clone()).await.unwrap().sequences.remove(0);
        assert_eq!((free.stopped, free.tokens.len(), free.alternatives.len()), (false, 40, 0));
        let token = free.tokens[5];
        let at = free.tokens.iter().position(|other| *other == token).unwrap();
        let stop = StopForm::Tokens(vec![token]);
        let stopped = sampled(&host, None, SamplingRequest { stop, ..plain.clone() }).await.unwrap();
        assert!(stopped.sequences[0].stopped);
        assert_eq!(stopped.sequences[0].tokens, free.tokens[..=at]);
        let ends = files.directory.stop_token_ids();
        let is_end = |token: &u32| ends.contains(token);
        let until_end = free.tokens.iter().position(is_end).map_or(40, |at| at + 1);
        let model =
            sampled(&host, None, SamplingRequest { stop: StopForm::Model, ..plain.clone() }).await.unwrap();
        assert_eq!(model.sequences[0].tokens, free.tokens[..until_end]);
        let seen = until_end.min(6);
        let text = files.directory.tokenizer().decode(&free.tokens[..seen]).unwrap();
        let string: String = text.chars().skip(1).take(2).collect();
        assert!(!string.is_empty(), "{text:?}");
        let stop = StopForm::Strings(vec![string]);
        let stopped = sampled(&host, None, SamplingRequest { stop, ..plain.clone() }).await.unwrap();
        assert!(stopped.sequences[0].stopped && stopped.sequences[0].tokens.len() <= seen);

        let asked =
            SamplingRequest { alternatives: 3, temperature: 0.0, prompt_logprobs: true, ..plain.clone() };
        let greedy = sampled(&host, None, asked).await.unwrap().sequences.remove(0);
        for (likely, (token, logprob)) in
            greedy.alternatives.iter().zip(greedy.tokens.iter().zip(&greedy.logprobs))
        {
            assert_eq!((likely.len(), likely[0]), (3, (*token, *logprob)), "scored at temperature 1");
        }
        let rest = SamplingRequest { max_tokens: None, ..request(prompt(500, 1), 1) };
        assert_eq!(sampled(&host, None, rest).await.unwrap().sequences[0].tokens.len(), 12);
    });
}

#[test]
fn prompts_are_scored_where_it_was_asked_for() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let host = files.adapted(CONFIG);
    run(async {
        let prompt = prompt(70, 1);
        let all = SamplingRequest {
            prompt_logprobs: true,
            prompt_alternatives: 2,
            prompt_targets: Some((prompt[1..].iter().flat_map(|id| [i64::from(*id), -1]).collect(), 2)),
            ..request(prompt.clone(), 1)
        };
        let whole = sampled(&host, None, all.clone()).await.unwrap();
        let logprobs = whole.prompt_logprobs.unwrap();
        let (targets, width) = whole.prompt_targets.unwrap();
        assert_eq!((targets.len(), width), (138, 2));
        let alternatives = whole.prompt_alternatives.unwrap();
        assert!(alternatives[0].is_empty() && logprobs[0].is_nan());
        for at in 1..70 {
            assert_eq!(targets[2 * (at - 1)..2 * at], [logprobs[at], 0.0]);
            let [(first, most), (_, second)] = alternatives[at][..] else { panic!("{alternatives:?}") };
            assert!(most >= second && most >= logprobs[at]);
            assert!(first != prompt[at] || most == logprobs[at]);
        }
        let last =
            sampled(&host, None, SamplingRequest { prompt_last: Some(40), ..all.clone() }).await.unwrap();
        let scored = last.prompt_logprobs.unwrap();
        assert!(scored[..30].iter().all(|logprob| logprob.is_nan()));
        assert_eq!(bits(&scored[30..]), bits(&logprobs[30..]));
        let (of_last, _) = last.prompt_targets.unwrap();
        assert!(of_last[0].is_nan() && of_last[58..] == targets[58..]);
        assert!(last.prompt_alternatives.unwrap()[29].is_empty());
        let none = SamplingRequest { prompt_last: Some(0), ..all };
        assert!(
            sampled(&host, None, none).await.unwrap().prompt_logprobs.unwrap().iter().all(|x| x.is_nan())
        );
        let one = SamplingRequest { prompt_logprobs: true, ..request(vec![5], 1) };
        assert_eq!(sampled(&host, None, one).await.unwrap().prompt_logprobs.unwrap().len(), 1);

        // A prompt that leaves no place for a completion is scored all the same.
        let scores = |prompt: Vec<u32>| SamplingRequest { prompt_logprobs: true, ..request(prompt, 1) };
        let longest = self::prompt(512, 1);
        let full = sampled(&host, None, SamplingRequest { samples: 2, ..scores(longest.clone()) });
        let full = full.await.unwrap();
        assert_eq!((full.sequences, full.cached_tokens), (vec![SampledTokens::default(); 2], 0));
        let shorter = sampled(&host, None, scores(longest[..511].to_vec())).await.unwrap();
        assert_eq!(shorter.sequences[0].tokens.len(), 1);
        let (full, shorter) = (full.prompt_logprobs.unwrap(), shorter.prompt_logprobs.unwrap());
        assert_eq!((full.len(), bits(&full[..511])), (512, bits(&shorter)));
        let two = SamplingRequest { max_tokens: Some(2), ..scores(longest) };
        let failure = sampled(&host, None, two).await.unwrap_err();
        assert!(failure.message.contains("shorten the prompt"), "{failure}");
    });
}

/// What a request has that cannot be carried out.
type RequestMistake = fn(&mut SamplingRequest);

#[test]
fn mistakes_are_of_their_users_and_have_a_remedy() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let host = files.adapted(CONFIG);
    let mistakes: [(RequestMistake, &str); 18] = [
        (|r| r.prompt.clear(), "at least one"),
        (|r| r.prompt[3] = 100, "use its tokenizer"),
        (|r| r.prompt = prompt(512, 1), "shorten the prompt"),
        (|r| r.max_tokens = Some(504), "lower max_tokens to 503"),
        (|r| r.max_tokens = Some(usize::MAX), "lower max_tokens to 503"),
        (|r| r.max_tokens = Some(0), "at least 1"),
        (|r| r.samples = 0, "ask for 1 to 16"),
        (|r| r.samples = usize::MAX, "ask for 1 to 16"),
        (|r| r.temperature = f32::NAN, "use 0"),
        (|r| r.temperature = 1e-30, "use 0"),
        (|r| r.top_p = 0.0, "top_p"),
        (|r| r.top_k = Some(0), "top_k"),
        (|r| r.alternatives = 21, "at most 20"),
        (|r| r.prompt_alternatives = 21, "at most 20"),
        (|r| r.stop = StopForm::Tokens(vec![100]), "use its tokenizer"),
        (|r| r.stop = StopForm::Strings(vec![String::new()]), "leave it out"),
        (|r| r.prompt_targets = Some((vec![1; 9], 1)), "8 positions"),
        (|r| r.prompt_targets = Some((vec![100; 8], 1)), "use its tokenizer"),
    ];
    run(async {
        for (mistake, remedy) in mistakes {
            let mut asked = request(prompt(9, 1), 4);
            mistake(&mut asked);
            let failure = sampled(&host, None, asked).await.unwrap_err();
            assert_eq!(failure.category, FailureCategory::User, "{failure}");
            assert!(failure.message.contains(remedy), "{failure}");
        }
        let smaller = Config { vocab_size: 90, ..files.directory.config().clone() };
        let network = HostedNetwork::Whole(Arc::new(Parameters::random(&smaller, 1)), PolicyVersion(0));
        let cores = SharedCores::new(1);
        let other = SamplerHost::start("other", &files.directory, network, CONFIG, &cores).unwrap_err();
        assert!(matches!(other, RolloutError::Model(_)), "{other}");
        let other = Arc::new(Parameters::random(files.directory.config(), 1));
        let misplaced = host.set_weights(other, PolicyVersion(1)).unwrap_err();
        assert!(matches!(misplaced, RolloutError::Misplaced { .. }), "{misplaced}");
        let status = host.status();
        assert_eq!((status.counts.steps, status.ended), (0, None), "the engine saw none of them");
        assert_eq!(sampled(&host, None, request(prompt(9, 1), 4)).await.unwrap().sequences.len(), 1);
    });
}

#[test]
fn a_host_without_its_scorer_has_ended() {
    let files = TinyModelFiles::new(WeightDtype::F32);
    let host = files.adapted(CONFIG);
    assert_eq!(host.status().ended, None);
    // As after a panic of its thread.
    drop(CloseScores(Arc::clone(&host.scores)));
    let ended = host.status().ended.unwrap();
    assert!(ended.contains("scores prompts"), "{ended}");
}
