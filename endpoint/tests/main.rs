//! The endpoint over raw HTTP: a tiny random model, and a scripted sampler where the text matters.
//!
//! Invariant: tests see what a client sees, and the metrics; servers listen on loopback and end with their test.

mod client;
mod load;
mod protocols;
mod replay;
mod sampling;
mod scripted;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use endpoint::{EndpointConfig, EndpointLimits, EndpointServer, ServedPolicy, Service};
use model::{Config, Decoder, ModelDirectory, Sizes};
use rollout::{
    Engine, EngineConfig, LocalSampler, OnUpdate, RequestBounds, RolloutError, Sampler, ServedSampler,
    StopRules, request_queue,
};
use trajectory::PolicyVersion;

/// Deadline of everything that must happen; far longer than needed.
const SOON: Duration = Duration::from_secs(120);

/// Most threads of an endpoint.
const THREADS: usize = 4;

/// A chat template with tools and calls, in characters of the tokenizer.
const TEMPLATE: &str = include_str!("chat_template.jinja");

/// A fresh character-level model in a directory that goes with it.
struct Model {
    directory: Arc<ModelDirectory>,
    _files: tempfile::TempDir,
}

impl Model {
    fn new() -> Self {
        let files = tempfile::tempdir().unwrap();
        let path = files.path().join("model");
        let mut config = Config::fresh(&Sizes {
            vocab_size: 100,
            hidden_size: 32,
            intermediate_size: 48,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 1024,
        });
        config.initializer_range = 0.3;
        ModelDirectory::fresh(&path, &config, 11).unwrap();
        std::fs::write(path.join("chat_template.jinja"), TEMPLATE).unwrap();
        let directory = Arc::new(ModelDirectory::open(&path).unwrap());
        Self { directory, _files: files }
    }

    fn decoder(&self) -> Decoder {
        Decoder::new(self.directory.config(), &self.directory.load_parameters().unwrap())
    }

    fn engine(&self) -> Engine {
        let config = EngineConfig {
            max_running: 32,
            prefill_chunk: 128,
            kv_cache_tokens: Some(16_384),
            max_prompt_length: 1024,
            max_completion_length: 1,
            max_episode_length: 1024,
            max_samples: 1,
            seed: 3,
        };
        let stop = StopRules {
            token_ids: self.directory.stop_token_ids().to_vec(),
            strings: Vec::new(),
            tokenizer: self.directory.tokenizer().clone(),
        };
        Engine::new(config, stop, self.decoder(), PolicyVersion(7)).unwrap()
    }
}

/// An endpoint that listens, with its sampler on a thread.
struct Endpoint {
    address: SocketAddr,
    service: Service,
    runtime: Option<tokio::runtime::Runtime>,
    server: Option<tokio::task::JoinHandle<()>>,
    shutdown: Option<tokio::sync::oneshot::Sender<()>>,
    stop: Arc<AtomicBool>,
    sampler: Option<JoinHandle<Result<(), RolloutError>>>,
    model: Model,
    name: String,
}

impl Endpoint {
    fn new() -> Self {
        Self::limited(EndpointLimits::default(), None)
    }

    fn limited(limits: EndpointLimits, token: Option<&str>) -> Self {
        let model = Model::new();
        let sampler = Box::new(LocalSampler::fixed(model.engine()));
        Self::serving(model, sampler, limits, token)
    }

    fn serving(model: Model, sampler: Box<dyn Sampler>, limits: EndpointLimits, token: Option<&str>) -> Self {
        let (handle, queue) = request_queue(RequestBounds { max_open: limits.max_open, max_running: 32 });
        let policy = ServedPolicy {
            name: "tiny".to_owned(),
            root: Path::new("tiny").display().to_string(),
            directory: Arc::clone(&model.directory),
            max_context: 1024,
            stop_strings: Vec::new(),
            adapters: Vec::new(),
        };
        let config = EndpointConfig { policy, limits, token: token.map(str::to_owned), sessions: None };
        let service = Service::new(config, handle);
        let (stop, sampler) = (Arc::new(AtomicBool::new(false)), ServedSampler::new(sampler, queue));
        let stops = Arc::clone(&stop);
        let thread = std::thread::spawn(move || sampler.serve(OnUpdate::Keep, &stops));
        static ENDPOINTS: AtomicUsize = AtomicUsize::new(0);
        let name = format!("endpoint {}", ENDPOINTS.fetch_add(1, Ordering::Relaxed));
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(THREADS / 2).max_blocking_threads(THREADS / 2);
        let runtime = runtime.thread_name(&name).enable_all().build().unwrap();
        let bound = EndpointServer::bind(service.clone(), "127.0.0.1:0".parse().unwrap());
        let server = runtime.block_on(bound).unwrap();
        let address = server.local_addr();
        let (shutdown, stopped) = tokio::sync::oneshot::channel::<()>();
        let server = runtime.spawn(server.serve(async move {
            // A sender that is dropped stops the server too.
            let _ = stopped.await;
        }));
        Self {
            address,
            service,
            runtime: Some(runtime),
            server: Some(server),
            shutdown: Some(shutdown),
            stop,
            sampler: Some(thread),
            model,
            name,
        }
    }

    /// The name of its threads.
    fn thread_name(&self) -> &str {
        &self.name
    }

    /// Waits until no answer is open and nothing is reserved in the sampler.
    fn wait_until_idle(&self) {
        let start = Instant::now();
        loop {
            let (status, open) = (self.service.queue().status(), self.service.queue().open());
            let idle = status.running == 0 && status.waiting == 0 && status.cache_usage == 0.0;
            if idle && open == 0 && self.service.open_answers() == 0 {
                return;
            }
            assert!(
                start.elapsed() < SOON,
                "{open} requests and {} answers are left: {status:?}",
                self.service.open_answers()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// A value of `/metrics`.
    fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text;
        let line = text.lines().find(|line| line.split(['{', ' ']).next() == Some(name));
        let line = line.unwrap_or_else(|| panic!("{name} is missing in\n{text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        drop(self.shutdown.take());
        if let (Some(runtime), Some(server)) = (self.runtime.take(), self.server.take()) {
            let _ = runtime.block_on(server);
        }
        self.stop.store(true, Ordering::Relaxed);
        let served = self.sampler.take().unwrap().join();
        if !std::thread::panicking() {
            served.unwrap().unwrap();
        }
    }
}
