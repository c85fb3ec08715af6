//! `rlrun serve policy`: a model, or the newest checkpoint of a run, as an endpoint.
//!
//! Invariant: the sampler has a thread of its own, and ends after the server: requests that have begun are finished within
//! the limit for it. The process ends with an error if the sampler fails.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device::Device;
use endpoint::session::{SessionControl, SessionLimits, SessionStore, expire_idle, session_routes};
use endpoint::{
    EndpointConfig, EndpointError, EndpointLimits, EndpointServer, ServedAdapter, ServedPolicy, Service,
};
use model::{KvCache, Layout, LowRank, ModelDirectory, Quantization, SharedCores, ThreadPool};
use rollout::{
    Engine, EngineConfig, LocalSampler, OnUpdate, RequestBounds, RolloutError, ServeOn, ServedSampler,
    StopRules, request_queue,
};
use trajectory::PolicyVersion;

use super::checkpoint_paths::{checkpoint_of, model_of, network_of};
use crate::args::{AdapterArg, ServePolicyArgs};
use crate::failure::Failure;
use crate::huggingface::HuggingFace;
use crate::program::Program;
use crate::serve::{MAX_CONTEXT, ServerSignals, cache_tokens, name_of, runtime, say, token};

/// The KV cache takes at most this part of the free memory, or one sequence.
const CACHE_PART: usize = 4;

/// Serves a policy until a signal stops it.
pub(super) fn serve(args: &ServePolicyArgs, program: &Program) -> Result<String, Failure> {
    let key = args.token_file.as_deref().map(token).transpose()?;
    if !args.listen.ip().is_loopback() && key.is_none() {
        return Err(Failure::Argument(EndpointError::NoToken { address: args.listen }.to_string()));
    }
    let target = HuggingFace::of(program).model(&args.target)?;
    let path = model_of(&target, None)?;
    let directory = Arc::new(ModelDirectory::open(&path)?);
    let max_context = context(args, &directory)?;
    let name = args.name.clone().unwrap_or_else(|| name_of(&args.target));
    let (adapters, factors) = adapters(args, program, &name, &directory)?;
    let engine = engine(args, &directory, max_context, version_of(&target))?.with_adapters(factors)?;
    let limits = EndpointLimits {
        max_open: args.max_open,
        max_open_per_key: args.max_open,
        max_connections: 2 * args.max_open + EndpointLimits::default().max_connections,
        ..EndpointLimits::default()
    };
    let (handle, queue) =
        request_queue(RequestBounds { max_open: args.max_open, max_running: args.max_running });
    let policy = ServedPolicy {
        name,
        root: args.target.display().to_string(),
        directory,
        max_context,
        stop_strings: Vec::new(),
        adapters,
    };
    let store = SessionStore::new(SessionLimits::default());
    let admin_key = key.as_deref().map(Into::into);
    let control = SessionControl { store: store.clone(), waiting: None, admin_key };
    let config = EndpointConfig { policy, limits, token: key, sessions: Some(Arc::new(store)) };
    let service = Service::new(config, handle);
    let sampler = ServedSampler::new(Box::new(LocalSampler::fixed(engine)), queue);
    runtime()?.block_on(serve_until_stopped(args, service, control, sampler))
}

/// Serves with the sampler on its own thread.
async fn serve_until_stopped(
    args: &ServePolicyArgs,
    service: Service,
    control: SessionControl,
    sampler: ServedSampler,
) -> Result<String, Failure> {
    let expiry = tokio::spawn(expire_idle(control.store.clone()));
    let routes = session_routes(control, &service);
    let signals = ServerSignals::listen()?;
    let server = EndpointServer::bind(service, args.listen).await.map_err(|error| match error {
        EndpointError::Listen { address, source } => {
            Failure::System { what: format!("listen on {address}"), source }
        }
        other => Failure::Argument(other.to_string()),
    })?;
    let stop = Arc::new(AtomicBool::new(false));
    let (ended, failed) = tokio::sync::oneshot::channel();
    let stops = Arc::clone(&stop);
    let thread = std::thread::Builder::new().name("sampler 0".to_owned()).spawn(move || {
        let served: Result<(), RolloutError> = sampler.serve(OnUpdate::Keep, &stops);
        // The receiver is gone once the server has stopped.
        let _ = ended.send(());
        served
    });
    let thread = thread.map_err(|source| Failure::System { what: "start the sampler".to_owned(), source })?;
    say(&format!("listening on http://{}", server.local_addr()));
    let end = async {
        tokio::select! {
            () = signals.stop() => {}
            _ = failed => {}
        }
    };
    server.with_routes(routes).serve(end).await;
    expiry.abort();
    stop.store(true, Ordering::Relaxed);
    let joined = tokio::task::spawn_blocking(move || thread.join()).await;
    match joined {
        Ok(Ok(served)) => {
            served?;
            Ok(String::new())
        }
        _ => Err(RolloutError::Ended { who: "the sampler" }.into()),
    }
}

/// The longest sequence that is served.
fn context(args: &ServePolicyArgs, directory: &ModelDirectory) -> Result<usize, Failure> {
    let of_model = directory.config().max_context();
    match args.max_context {
        Some(asked) if asked > of_model => Err(Failure::Argument(format!(
            "--max-context {asked} is more than the {}; lower it",
            directory.config().context_limit()
        ))),
        Some(asked) => Ok(asked),
        None => Ok(of_model.min(MAX_CONTEXT)),
    }
}

/// The adapters of the arguments, and the factors of each.
fn adapters(
    args: &ServePolicyArgs,
    program: &Program,
    model: &str,
    directory: &ModelDirectory,
) -> Result<(Vec<ServedAdapter>, Vec<Arc<LowRank>>), Failure> {
    let layout = Layout::new(directory.config());
    let (mut served, mut all): (Vec<ServedAdapter>, Vec<_>) = (Vec::new(), Vec::new());
    for AdapterArg { name, path } in &args.adapters {
        if name == model || served.iter().any(|other| other.name == *name) {
            let help = "give each adapter a name of its own";
            return Err(Failure::Argument(format!("--adapter {name}: the name is taken; {help}")));
        }
        let found = HuggingFace::of(program).adapter(path)?;
        let dir = match trainer::lora::is_adapter(&found) {
            true => found,
            false => {
                let adapter = trainer::checkpoint::adapter_path(&checkpoint_of(&found, None)?);
                if !trainer::lora::is_adapter(&adapter) {
                    let reason = "is a run without [lora]";
                    return Err(Failure::NotThere(format!("--adapter {name}: {} {reason}", path.display())));
                }
                adapter
            }
        };
        all.push(trainer::lora::load_factors(&dir, &layout)?);
        served.push(ServedAdapter { name: name.clone(), root: path.display().to_string() });
    }
    Ok((served, all))
}

fn engine(
    args: &ServePolicyArgs,
    directory: &ModelDirectory,
    max_context: usize,
    version: PolicyVersion,
) -> Result<Engine, Failure> {
    let on = match args.on.device()? {
        None => ServeOn::Host(args.quantization),
        Some(_) if args.quantization != Quantization::None => {
            return Err(Failure::Argument(
                "--quantization is for the processor; use --dtype on a device".to_owned(),
            ));
        }
        Some((place, dtype)) => ServeOn::Device(Device::open(place)?, dtype),
    };
    let longest = max_context + 3 * KvCache::PAGE;
    let kv_cache_tokens = match args.kv_cache_tokens {
        Some(asked) => asked.max(longest),
        None => cache_tokens(directory.config(), args.max_running, max_context, CACHE_PART),
    };
    let config = EngineConfig {
        max_running: args.max_running,
        prefill_chunk: EngineConfig::default_prefill_chunk(matches!(on, ServeOn::Device(..))),
        kv_cache_tokens: Some(kv_cache_tokens),
        // Requests are admitted by their own lengths.
        max_prompt_length: max_context,
        max_completion_length: 1,
        max_episode_length: max_context,
        max_samples: 1,
        seed: random_seed(),
    };
    let stop = StopRules {
        token_ids: directory.stop_token_ids().to_vec(),
        strings: Vec::new(),
        tokenizer: directory.tokenizer().clone(),
    };
    let network = network_of(directory, &on)?;
    let cores = SharedCores::all();
    let threads = args.threads.unwrap_or(cores.total());
    Ok(Engine::new(config, stop, network, version)?.on(Arc::new(ThreadPool::new(&cores, threads))))
}

/// A request without a seed gets random numbers that no other process has drawn.
fn random_seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// The version of a run's newest checkpoint; 0 for a model.
fn version_of(target: &Path) -> PolicyVersion {
    if ModelDirectory::is_model(target) {
        return PolicyVersion::default();
    }
    trainer::checkpoint::list(&target.join("checkpoints")).last().copied().unwrap_or_default()
}
