//! Requests of clients: their own rules, the prefix cache, and a queue in front of a sampler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use model::{Decoder, Draw, Pack, Sampling};
use rollout::requests::FIRST_GROUP;
use rollout::{
    ClientQueue, ClientRequestError, Completion, Engine, EngineConfig, LocalSampler, OnUpdate, RequestBounds,
    RequestEvent, RequestHandle, RequestOptions, RequestStop, RolloutError, SampleRequest, Sampler,
    ServedSampler, request_queue,
};
use trajectory::{GroupId, PolicyVersion, StopReason};

use crate::{CONFIG, Model, complete, request, sampled};

fn with(options: RequestOptions) -> SampleRequest {
    SampleRequest { options, ..request(5, 2, Sampling::PLAIN) }
}

fn one(engine: &mut Engine, request: SampleRequest) -> Completion {
    complete(engine, vec![request]).remove(0)
}

#[test]
fn a_seed_determines_a_completion_whatever_its_group() {
    let model = Model::new();
    let mut engine = model.engine(CONFIG, &[]);
    let seeded = |seed| RequestOptions { seed: Some(seed), ..RequestOptions::default() };
    let first = complete(&mut engine, vec![with(seeded(7))]);
    let again = complete(&mut engine, vec![SampleRequest { group: GroupId(900), ..with(seeded(7)) }]);
    let other = complete(&mut engine, vec![with(seeded(8))]);
    let tokens = |completions: &[Completion]| -> Vec<Vec<u32>> {
        completions.iter().map(|completion| completion.token_ids.clone()).collect()
    };
    assert_eq!(tokens(&first), tokens(&again));
    assert_ne!(tokens(&first), tokens(&other));
    assert_ne!(first[0].token_ids, first[1].token_ids, "each completion has a stream of its own");
}

#[test]
fn stop_rules_of_a_request_are_its_own() {
    let model = Model::new();
    let mut engine = model.engine(CONFIG, &[]);
    let plain = one(&mut engine, with(RequestOptions { seed: Some(3), ..RequestOptions::default() }));
    let sampled = plain.token_ids[plain.prompt_length..].to_vec();
    let stopping = |stop| RequestOptions { seed: Some(3), stop, ..RequestOptions::default() };
    let nth = sampled[2];
    let first_at = sampled.iter().position(|id| *id == nth).unwrap();
    let stop = RequestStop { token_ids: vec![nth], ..RequestStop::default() };
    let stopped = one(&mut engine, with(stopping(stop.clone())));
    assert_eq!((stopped.stop, stopped.logprobs.len()), (StopReason::StopToken, first_at + 1));
    // Before the fewest tokens it is a token like any other.
    let late = one(&mut engine, with(stopping(RequestStop { min_tokens: first_at + 2, ..stop })));
    assert!(late.logprobs.len() > first_at + 1);
    assert_eq!(late.token_ids[late.prompt_length..][..=first_at], sampled[..=first_at]);

    let text = model.directory.tokenizer().decode(&sampled[..6]).unwrap();
    let part = text.chars().skip(2).take(2).collect::<String>();
    let cut = text.find(&part).unwrap();
    let stop = RequestStop { strings: vec![part], ..RequestStop::default() };
    let stopped = one(&mut engine, with(stopping(stop)));
    assert_eq!((stopped.stop, &stopped.text[..]), (StopReason::StopString, &text[..cut]));
}

#[test]
fn a_request_that_ignores_the_end_of_text_reaches_its_length() {
    let model = Model::new();
    let everything = (0..100).collect();
    let mut stop = model.stop(&[]);
    stop.token_ids = everything;
    let decoder = model.decoder(&model.parameters());
    let mut engine = Engine::new(CONFIG, stop, decoder, PolicyVersion(0)).unwrap();
    assert_eq!(one(&mut engine, with(RequestOptions::default())).logprobs.len(), 1);
    let stop = RequestStop { ignore_eos: true, ..RequestStop::default() };
    let ignoring = one(&mut engine, with(RequestOptions { stop, ..RequestOptions::default() }));
    assert_eq!((ignoring.stop, ignoring.logprobs.len()), (StopReason::Length, 24));
}

#[test]
fn alternatives_are_the_most_likely_tokens_of_the_distribution() {
    let model = Model::new();
    let decoder = model.decoder(&model.parameters());
    let mut engine = model.engine(CONFIG, &[]);
    let asked = RequestOptions { alternatives: 3, score_greedy: true, ..RequestOptions::default() };
    for sampling in [Sampling::PLAIN, Sampling { top_k: 2, ..Sampling::PLAIN }, Sampling::GREEDY] {
        let completion = one(&mut engine, SampleRequest { sampling, ..with(asked.clone()) });
        assert_eq!(completion.alternatives.len(), completion.logprobs.len());
        for (n, likely) in completion.alternatives.iter().enumerate() {
            let at = completion.prompt_length + n;
            let mut pack = Pack::new();
            pack.push(&completion.token_ids[..at]).unwrap();
            let logits: Vec<f32> = decoder.logits(&pack).unwrap().get(at - 1).unwrap().to_vec1().unwrap();
            assert_eq!(likely.len(), if sampling.top_k == 2 { 2 } else { 3 });
            assert_eq!(likely[0].token, Draw::new(&mut logits.clone(), Sampling::GREEDY, 0.0).token);
            let of_the_drawn = likely.iter().find(|likely| likely.token == completion.token_ids[at]);
            assert!(of_the_drawn.is_none_or(|likely| likely.logprob == completion.logprobs[n]));
        }
        let greedy = sampling == Sampling::GREEDY;
        assert!(!greedy || completion.logprobs.iter().all(|logprob| *logprob < 0.0), "{completion:?}");
    }
    assert!(one(&mut engine, with(RequestOptions::default())).alternatives.is_empty());
}

/// Requests with equal beginnings share pages, sample what they sample without them, and give all of them back.
#[test]
fn the_prefix_cache_changes_no_completion() {
    let model = Model::with_context(256);
    let config = EngineConfig { max_prompt_length: 200, max_episode_length: 256, ..CONFIG };
    let mut cached = model.engine(config, &[]);
    let mut plain = model.engine(config, &[]);
    let options = |salt| RequestOptions { prefix_cache: salt, seed: Some(1), ..RequestOptions::default() };
    let mut prompt: Vec<u32> = (0..50).map(|i| 4 + (i * 7) % 90).collect();
    for turn in 0..4 {
        let before = cached.counts().reused_tokens;
        let asked = |salt| SampleRequest {
            prompt: prompt.clone(),
            options: options(salt),
            ..request(1, 2, Sampling::PLAIN)
        };
        let ours = complete(&mut cached, vec![asked(Some(5))]);
        let theirs = complete(&mut plain, vec![asked(None)]);
        assert_eq!(sampled(ours.clone()), sampled(theirs), "turn {turn}");
        let reused = cached.counts().reused_tokens - before;
        assert_eq!(reused > 0, turn > 0, "turn {turn}: {reused} tokens were reused");
        prompt = ours[0].token_ids.clone();
        prompt.extend([9, 8, 7]);
    }
    let reused = cached.counts().reused_tokens;
    let stranger =
        SampleRequest { prompt: prompt.clone(), options: options(Some(6)), ..request(1, 1, Sampling::PLAIN) };
    complete(&mut cached, vec![stranger]);
    assert_eq!(cached.counts().reused_tokens, reused, "another salt shares nothing");
    assert!(cached.pages().0 < cached.pages().1, "pages are kept for later requests");
    assert_eq!(cached.cache_usage(), 0.0, "kept pages are not reserved");
    // Newer weights make all of them worthless.
    let newer = Decoder::new(model.directory.config(), &model.other_parameters());
    cached.apply(newer, PolicyVersion(1)).unwrap();
    assert_eq!(cached.pages().0, cached.pages().1);
    let asked = SampleRequest { prompt, options: options(Some(5)), ..request(1, 1, Sampling::PLAIN) };
    complete(&mut cached, vec![asked]);
    assert_eq!(cached.counts().reused_tokens, reused);
}

/// A cache that is full of kept pages still serves requests.
#[test]
fn kept_pages_give_way_to_requests() {
    let model = Model::new();
    let config = EngineConfig { max_running: 2, max_samples: 1, kv_cache_tokens: Some(16 * 12), ..CONFIG };
    let mut engine = model.engine(config, &[]);
    for n in 0..40 {
        let prompt = (0..30).map(|i| 4 + (i * 3 + n) % 90).collect();
        let options = RequestOptions { prefix_cache: Some(0), ..RequestOptions::default() };
        complete(
            &mut engine,
            vec![SampleRequest { prompt, options, ..request(u64::from(n), 1, Sampling::PLAIN) }],
        );
    }
}

/// A queue with a sampler behind it, on a thread of its own.
struct Served {
    handle: RequestHandle,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Result<(), RolloutError>>>,
}

impl Served {
    fn new(bounds: RequestBounds) -> Self {
        let (handle, queue) = request_queue(bounds);
        Self::start(handle, queue)
    }

    fn start(handle: RequestHandle, queue: ClientQueue) -> Self {
        let model = Model::new();
        let config = EngineConfig { kv_cache_tokens: Some(4096), ..CONFIG };
        let sampler = LocalSampler::fixed(model.engine(config, &[]));
        let stop = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stop);
        let served = ServedSampler::new(Box::new(sampler), queue);
        let thread = Some(std::thread::spawn(move || served.serve(OnUpdate::Keep, &stops)));
        Self { handle, stop, thread }
    }

    /// Waits until no request is open and nothing is reserved.
    async fn idle(&self) {
        let idle = async {
            while self.handle.open() > 0
                || self.handle.status().running > 0
                || self.handle.status().cache_usage > 0.0
            {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), idle).await.expect("nothing leaks");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

const BOUNDS: RequestBounds = RequestBounds { max_open: 64, max_running: 8 };

fn streaming(group: u64, samples: usize) -> SampleRequest {
    let stop = RequestStop { ignore_eos: true, ..RequestStop::default() };
    let options = RequestOptions { stream: true, stop, ..RequestOptions::default() };
    SampleRequest { options, ..request(group, samples, Sampling::PLAIN) }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn partial_completions_together_are_the_completion() {
    let served = Served::new(BOUNDS);
    runtime().block_on(async {
        let mut pending = served.handle.submit(streaming(3, 2)).unwrap();
        assert!(pending.group() >= FIRST_GROUP);
        let mut tokens = [Vec::new(), Vec::new()];
        let mut ended = 0;
        while let Some(event) = pending.next().await {
            match event {
                RequestEvent::Partial(partial) => {
                    assert_eq!(partial.token_ids.len(), partial.logprobs.len());
                    tokens[partial.index as usize].extend(partial.token_ids);
                }
                RequestEvent::Completed(completion) => {
                    let whole = &completion.token_ids[completion.prompt_length..];
                    assert!(whole.starts_with(&tokens[completion.index as usize]));
                    assert_eq!(whole.len(), 24);
                    ended += 1;
                }
                RequestEvent::Failed(error) => panic!("{error}"),
            }
        }
        assert_eq!(ended, 2);
        assert!(tokens.iter().any(|tokens| !tokens.is_empty()), "nothing was reported before the end");
        served.idle().await;
    });
}

#[test]
fn a_request_whose_client_left_frees_its_pages() {
    let served = Served::new(BOUNDS);
    runtime().block_on(async {
        for round in 0..20 {
            let mut pending = Vec::new();
            for n in 0..8 {
                pending.push(served.handle.submit(streaming(round * 8 + n, 2)).unwrap());
            }
            for (n, request) in pending.iter_mut().enumerate().filter(|(n, _)| n % 2 == 0) {
                let _event = request.next().await;
                assert!(n < 8);
            }
            drop(pending);
        }
        served.idle().await;
    });
}

#[test]
fn a_full_queue_refuses_and_a_request_that_never_fits_fails_alone() {
    let (handle, queue) = request_queue(RequestBounds { max_open: 3, max_running: 8 });
    runtime().block_on(async {
        // Nothing ends before the sampler starts.
        let open: Vec<_> = (0..3).map(|n| handle.submit(streaming(n, 1)).unwrap()).collect();
        assert_eq!(handle.submit(streaming(9, 1)).unwrap_err(), ClientRequestError::Busy { open: 3 });
        let served = Served::start(handle, queue);
        drop(open);
        served.idle().await;
        let long = SampleRequest { max_completion_length: 1000, ..streaming(1, 1) };
        let mut refused = served.handle.submit(long).unwrap();
        let event = refused.next().await.unwrap();
        assert!(
            matches!(&event, RequestEvent::Failed(ClientRequestError::Refused { reason }) if reason.contains("1000")),
            "{event:?}"
        );
        assert_eq!(refused.next().await, None);
        let mut fine = served.handle.submit(streaming(2, 1)).unwrap();
        while let Some(event) = fine.next().await {
            assert!(!matches!(event, RequestEvent::Failed(_)));
        }
    });
}

#[test]
fn requests_fail_when_their_sampler_stops() {
    let served = Served::new(BOUNDS);
    let handle = served.handle.clone();
    runtime().block_on(async {
        let mut pending: Vec<_> = (0..40).map(|n| handle.submit(streaming(n, 2)).unwrap()).collect();
        drop(served);
        let mut failed = 0;
        for request in &mut pending {
            while let Some(event) = request.next().await {
                failed +=
                    usize::from(matches!(event, RequestEvent::Failed(ClientRequestError::Closed { .. })));
            }
        }
        assert!(failed > 0);
        assert!(matches!(handle.submit(streaming(1, 1)), Err(ClientRequestError::Closed { .. })));
        assert_eq!(handle.open(), 0);
    });
}

/// The run's own requests and those of clients share a sampler, and each gets its completions.
#[test]
fn a_run_and_its_clients_share_a_sampler() {
    let model = Model::new();
    let config = EngineConfig { kv_cache_tokens: Some(4096), ..CONFIG };
    let expected = complete(&mut model.engine(config, &[]), vec![request(5, 3, Sampling::PLAIN)]);
    let (handle, queue) = request_queue(BOUNDS);
    let mut sampler = ServedSampler::new(Box::new(LocalSampler::fixed(model.engine(config, &[]))), queue);
    let mut client = handle.submit(streaming(1, 2)).unwrap();
    assert!(!sampler.is_idle());
    sampler.submit(request(5, 3, Sampling::PLAIN)).unwrap();
    let mut ours = Vec::new();
    while !sampler.is_idle() {
        ours.extend(sampler.poll(Duration::ZERO).unwrap());
    }
    ours.sort_by_key(|completion| completion.index);
    assert_eq!(ours, expected);
    let mut completed = 0;
    runtime().block_on(async {
        while let Some(event) = client.next().await {
            completed += usize::from(matches!(event, RequestEvent::Completed(_)));
        }
    });
    assert_eq!((completed, handle.open()), (2, 0));
}

/// While clients wait for capacity, no group of the run starts.
#[test]
fn waiting_clients_come_before_new_groups() {
    let model = Model::new();
    let config = EngineConfig { max_running: 4, max_samples: 4, kv_cache_tokens: Some(4096), ..CONFIG };
    let (handle, queue) = request_queue(BOUNDS);
    let mut sampler = ServedSampler::new(Box::new(LocalSampler::fixed(model.engine(config, &[]))), queue);
    sampler.submit(request(1, 4, Sampling::PLAIN)).unwrap();
    let client = handle.submit(streaming(2, 1)).unwrap();
    sampler.poll(Duration::ZERO).unwrap();
    assert_eq!(handle.status().waiting, 1);
    assert!(!sampler.has_capacity(1));
    while sampler.in_flight() > 3 || handle.status().running == 0 {
        sampler.poll(Duration::ZERO).unwrap();
    }
    assert_eq!(handle.status().waiting, 0);
    drop(client);
}
