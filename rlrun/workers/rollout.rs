//! `rlrun worker rollout`: samples for a run that is served elsewhere.
//!
//! Invariant: the run chooses what is sampled: its tasks, tokenizer and weights arrive as data. The operator of this machine
//! allows what is read and executed here: see [`permissions`](super::permissions).

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::rewards::reward_model::ModelServer;
use ::rewards::{LoadCounts, RewardSet};
use ::rollout::applier::WeightSource;
use ::rollout::scoring::Scorer;
use ::rollout::{Activity, ActivityLog, Network, Progress, Worker, WorkerConfig};
use buffer::Producer;
use buffer::http::ClientConfig;
use device::device::DeviceLocation;
use device::{Device, DeviceBuffer, Storage};
use model::on_device::{DeviceDtype, DeviceSampler, StagedWeights};
use model::{AdaptedBase, Config, FrozenParameters, Head, Quantization, SharedCores};
use trainer::lora::Adapter;
use weights::http::{RelayConfig, RelaySubscriber, RemoteConfig, RemoteSubscriber};
use weights::{DeviceSubscriber, Subscriber};

use super::membership::{Membership, WorkerReport};
use super::permissions::Permissions;
use super::registry::WorkerRole;
use crate::args::RolloutArgs;
use crate::engines::{self, EngineSetup};
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace};
use crate::pipeline::remote_subscriber;
use crate::prepare::{Prepared, RewardRuntime};
use crate::program::Program;
use crate::recipe::Recipe;
use crate::recipe::words::{DeviceWord, Speculation};
use crate::sampler::{SamplerSetup, SamplerWeights};
use crate::signals::{Signals, end_with_parent};

/// Longest wait for the first weights between two looks at the stop flag.
const LOOK_UP: Duration = Duration::from_millis(100);

/// Samples until the run ends or the process is stopped.
///
/// # Errors
/// The run cannot be reached, data or rewards are missing, or sampling failed.
pub(crate) fn run(args: &RolloutArgs, program: &Program) -> Result<(), Failure> {
    if let Some(parent) = args.join.parent {
        end_with_parent(parent)?;
    }
    if args.relay.is_some_and(|address| address.ip().is_unspecified()) && args.relay_url.is_none() {
        return Err(Failure::Argument(
            "--relay listens on every address of this machine: say with --relay-url at which one others reach it"
                .to_owned(),
        ));
    }
    let permissions = Permissions::new(&args.allow, &args.code, program)?;
    let signals = Signals::listen()?;
    let stop = signals.stop_flag();
    let Some(mut membership) = Membership::join(WorkerRole::Rollout, &args.join, program, &stop)? else {
        return Ok(());
    };
    eprintln!("joined {} as {}", membership.url(), membership.joined.name);
    let status = Arc::new(SamplerStatus::default());
    membership.start_heartbeat(SamplerReport(Arc::clone(&status)), Arc::clone(&stop))?;
    let work = sample(args, &permissions, program, &membership, &status, &stop);
    status.enter("is leaving");
    membership.leave(work)
}

fn sample(
    args: &RolloutArgs,
    permissions: &Permissions,
    program: &Program,
    membership: &Membership,
    status: &SamplerStatus,
    stop: &Arc<AtomicBool>,
) -> Result<(), Failure> {
    status.enter("reads recipe, model and data");
    let scratch = tempfile::tempdir()
        .map_err(|source| Failure::System { what: "make a temporary directory".to_owned(), source })?;
    let (recipe, directory) = membership.unpack(permissions, scratch.path())?;
    // The run has resolved the recipe; environment variables of this machine do not change it.
    let (mut recipe, _) =
        Recipe::load(&recipe, &[], &program.without_overrides()).map_err(Failure::Recipe)?;
    recipe = HuggingFace::of(program).fetched(&recipe, FetchScope::Everything)?;
    settle_device(&mut recipe, args.device)?;
    if let Some(engine) = args.engine {
        let engines = recipe.with_engines(engine, &args.engine_urls, args.weights_dir.as_deref());
        recipe = engines.map_err(Failure::Argument)?;
    }
    let directory = recipe.opened(&directory)?;
    let directory = Arc::new(match membership.joined.model.value_head {
        true => directory.with_head(Head::LanguageAndValue),
        false => directory,
    });
    let cores = args.threads.map_or_else(SharedCores::all, SharedCores::new);
    let mut runtime = RewardRuntime::new(program, &cores)?;
    if permissions.allow_servers() {
        runtime.ask(membership.joined.servers.clone());
    }
    let prepared = Prepared::new(&recipe, &directory, &runtime, scratch.path())?;
    let prepared = prepared.serving_agents(&recipe, &directory, &runtime)?;

    let over = over_base(&recipe, permissions, membership, program)?;
    status.enter("waits for the first weights");
    let (remote, relay) = (remote(membership, &recipe), relay(args, &recipe)?);
    let sampler = match recipe.engine_kind() {
        Some(kind) => {
            let subscriber = subscribe(remote, relay)?;
            let setup = EngineSetup {
                recipe: &recipe,
                weights_dir: scratch.path().join(engines::WEIGHTS),
                directory: &directory,
                prepared: &prepared,
                notice: Box::new(|text| eprintln!("{text}")),
            };
            eprintln!("sampling with {}", recipe.rollout.urls.join(", "));
            setup.sampler(kind, subscriber)?
        }
        None => {
            let model = SampledModel { config: directory.config(), over };
            let Some(weights) = first(remote, relay, model, &recipe, stop)? else {
                return Ok(());
            };
            eprintln!("sampling from {} on", weights.version);
            let setup = SamplerSetup { recipe: &recipe, directory: &directory, prepared: &prepared };
            setup.updated(weights, false)?
        }
    };
    let sampler = match &prepared.agents {
        Some(agents) => agents.training(sampler),
        None => sampler,
    };
    let Some(rewards) = prepared.rewards.clone() else {
        return Err(Failure::Argument("the run samples nothing: its recipe has no rewards".to_owned()));
    };
    let producer: Arc<dyn Producer> = membership.buffer();
    let capacity = recipe.rollout.max_running * 2;
    let scorer = Scorer::start(runtime.handle(), Arc::clone(&rewards), Arc::clone(&producer), None, capacity);
    let config = WorkerConfig { holder: Some(membership.joined.instance), ..recipe.worker() };
    let worker = Worker::new(config, sampler, Arc::clone(&prepared.train), scorer);
    let worker = worker.acting_in(prepared.episodes.clone());
    status.start_sampling(SamplingParts {
        progress: worker.progress(),
        activity: worker.activity(),
        rewards,
    });
    Ok(worker.run(&*producer, stop)?)
}

/// Sets the device of this sampler in `recipe`; without `device` that of all samplers.
fn settle_device(recipe: &mut Recipe, device: Option<DeviceWord>) -> Result<(), Failure> {
    let refused = |text: &str| Err(Failure::Argument(text.to_owned()));
    let placement = &mut recipe.placement;
    match (device, &placement.rollout_devices) {
        (None, None) => return Ok(()),
        (None, Some(_)) => {
            return refused(
                "the run gives each of its own samplers a device (`placement.rollout_devices`): say with --device which one \
                 this worker has",
            );
        }
        (Some(device), _) => {
            (placement.rollout_device, placement.rollout_devices) = (Some(device), None);
        }
    }
    match recipe.devices().rollout {
        None if recipe.weights.transport.is_between_devices() => refused(
            "the weights of this run go from device to device (`weights.transport`), and --device is the processor",
        ),
        Some(_) if recipe.rollout.quantization != Quantization::None => refused(
            "this run samples with `rollout.quantization`, which has kernels for the processor alone: leave --device out",
        ),
        Some(_) if recipe.rollout.tensor > 1 => refused(
            "this run samples with `rollout.tensor`, whose ranks compute on the processor: leave --device out",
        ),
        Some(_) if recipe.rollout.speculation != Speculation::None => refused(
            "this run samples with `rollout.speculation`, which is for the processor alone: leave --device out",
        ),
        _ => Ok(()),
    }
}

/// The client configuration for the run's hub.
fn remote(membership: &Membership, recipe: &Recipe) -> RemoteConfig {
    let transport = recipe.weights.transport.remote();
    let ClientConfig { url, token, roots, patience, .. } = membership.config.clone();
    let config = RemoteConfig::new(url, membership.joined.name.clone());
    RemoteConfig { token, roots, patience, transport, ..config }
}

/// The relay that this worker is asked to be.
fn relay(args: &RolloutArgs, recipe: &Recipe) -> Result<Option<RelayConfig>, Failure> {
    let Some(address) = args.relay else { return Ok(None) };
    if recipe.weights.transport.is_between_devices() {
        return Err(Failure::Argument(
            "the weights of this run go from device to device (`weights.transport`): leave --relay out"
                .to_owned(),
        ));
    }
    let system = |source| Failure::System { what: format!("listen on {address}"), source };
    let listener = TcpListener::bind(address).map_err(system)?;
    Ok(Some(RelayConfig { listener, url: args.relay_url.clone(), dtype: recipe.hub().dtype }))
}

/// The subscription to weights in memory of the host.
fn subscribe(remote: RemoteConfig, relay: Option<RelayConfig>) -> Result<Arc<dyn Subscriber>, Failure> {
    let Some(relay) = relay else { return Ok(Arc::new(RemoteSubscriber::connect(remote)?)) };
    let subscriber = RelaySubscriber::start(remote, relay)?;
    eprintln!("passing weights on from http://{}", subscriber.address());
    Ok(Arc::new(subscriber))
}

/// The model that is sampled from.
struct SampledModel<'a> {
    config: &'a Config,
    /// Its frozen weights under factors that are not published yet, if they stay quantised.
    over: Option<AdaptedBase>,
}

/// The frozen weights of a run whose base stays quantised, from the model of the operator's recipe; the run publishes factors alone.
///
/// # Errors
/// The operator has named no recipe, or its model is another.
fn over_base(
    recipe: &Recipe,
    permissions: &Permissions,
    membership: &Membership,
    program: &Program,
) -> Result<Option<AdaptedBase>, Failure> {
    let Some(lora) = recipe.lora().filter(|_| recipe.has_quantized_base()) else { return Ok(None) };
    if recipe.engine_kind().is_some() {
        return Err(Failure::Argument(
            "the frozen weights of this run stay as their files store them (`lora.quantized_base`), which rlrun's own sampler \
             reads: leave --engine out"
                .to_owned(),
        ));
    }
    let Some(path) = permissions.model() else {
        return Err(Failure::Argument(
            "the frozen weights of this run stay as their files store them (`lora.quantized_base`), and it sends the adapter alone: \
             name with --recipe a recipe of this machine whose `model.path` is a copy of these files"
                .to_owned(),
        ));
    };
    let directory = recipe.opened(&HuggingFace::of(program).model(path)?)?;
    let base = FrozenParameters::load(directory.path(), directory.config())?;
    if membership.joined.model.base.as_ref() != Some(&base.digest()) {
        return Err(Failure::Argument(format!(
            "{}: these are not the frozen weights of the run; name with --recipe a recipe whose `model.path` is a copy of its files",
            path.display()
        )));
    }
    lora.check(base.layout().specs())?;
    // Its values come with the first push.
    let factors = Arc::clone(Adapter::over(lora, &base, recipe.seed).factors());
    Ok(Some(AdaptedBase::new(Arc::new(base), factors)))
}

/// The newest weights; `None` if the worker was stopped before.
fn first(
    remote: RemoteConfig,
    relay: Option<RelayConfig>,
    SampledModel { config, over }: SampledModel<'_>,
    recipe: &Recipe,
    stop: &AtomicBool,
) -> Result<Option<SamplerWeights>, Failure> {
    let place = recipe.devices().rollout;
    if let Some(place) = place.filter(|_| recipe.weights.transport.is_between_devices()) {
        return match recipe.dtype_on(Some(place)) {
            DeviceDtype::F32 => {
                first_from_device(remote, place, config, recipe, stop, StagedWeights::F32, WeightSource::F32)
            }
            DeviceDtype::Bf16 => first_from_device(
                remote,
                place,
                config,
                recipe,
                stop,
                StagedWeights::Bf16,
                WeightSource::Bf16,
            ),
        };
    }
    let subscriber = subscribe(remote, relay)?;
    let Some(snapshot) = wait_for(recipe, stop, || Ok(subscriber.wait_newer(None, LOOK_UP)?))? else {
        return Ok(None);
    };
    let (version, on) = (snapshot.version, recipe.serve_on()?);
    let (network, on) = match over {
        Some(before) => {
            let policy = before.with_values(&snapshot.values)?;
            let network = Network::adapted(&on, &policy)?;
            (network, recipe.serve_on()?.adapted(policy))
        }
        None => {
            // The next version is uploaded on another stream than the engine's.
            (Network::of_version(&on, config, snapshot.values.clone())?, recipe.serve_on()?)
        }
    };
    let config = Arc::new(config.clone());
    Ok(Some(SamplerWeights { version, network, incoming: WeightSource::Host { subscriber, config, on } }))
}

/// [`first`] from the trainer's device. The sampler decodes on another stream than the one that receives.
fn first_from_device<T: Storage>(
    remote: RemoteConfig,
    place: DeviceLocation,
    config: &Config,
    recipe: &Recipe,
    stop: &AtomicBool,
    stage: impl FnOnce(DeviceBuffer<T>) -> StagedWeights,
    incoming: impl FnOnce(Arc<dyn DeviceSubscriber<T>>) -> WeightSource,
) -> Result<Option<SamplerWeights>, Failure> {
    let device = Device::open(place)?;
    let subscriber = remote_subscriber::<T>(recipe.weights.transport, remote, &device)?;
    let Some(weights) = wait_for(recipe, stop, || Ok(subscriber.wait_newer(None, LOOK_UP)?))? else {
        return Ok(None);
    };
    let sampler = DeviceSampler::new(&Device::open(place)?, config, stage(weights.values))?;
    let (version, network) = (weights.version, Network::Device(Box::new(sampler)));
    Ok(Some(SamplerWeights { version, network, incoming: incoming(subscriber) }))
}

/// The first value of `look`; `None` if the worker was stopped before.
fn wait_for<W>(
    recipe: &Recipe,
    stop: &AtomicBool,
    mut look: impl FnMut() -> Result<Option<W>, Failure>,
) -> Result<Option<W>, Failure> {
    let deadline = Instant::now() + recipe.wait();
    while !stop.load(Ordering::Relaxed) {
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        if Instant::now() > deadline {
            return Err(::rollout::RolloutError::Deadline {
                who: "a rollout worker",
                whom: "the first weights; has the trainer started?".to_owned(),
                seconds: recipe.deadlines.wait_s,
            }
            .into());
        }
    }
    Ok(None)
}

/// The phase of this worker, shared with its heartbeat.
#[derive(Debug, Default)]
struct SamplerStatus {
    state: Mutex<SamplerState>,
}

#[derive(Debug, Default)]
struct SamplerState {
    doing: String,
    sampling: Option<SamplingParts>,
}

/// What a worker that samples reports.
#[derive(Debug)]
struct SamplingParts {
    progress: Arc<Mutex<Progress>>,
    activity: Arc<ActivityLog>,
    rewards: Arc<RewardSet>,
}

impl SamplerStatus {
    fn enter(&self, doing: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        doing.clone_into(&mut state.doing);
    }

    fn start_sampling(&self, parts: SamplingParts) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.doing.clear();
        state.sampling = Some(parts);
    }
}

/// The heartbeat report of a sampler.
struct SamplerReport(Arc<SamplerStatus>);

impl WorkerReport for SamplerReport {
    fn doing(&self) -> String {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        match (&state.doing[..], &state.sampling) {
            ("", Some(parts)) => {
                parts.progress.lock().unwrap_or_else(PoisonError::into_inner).doing.to_string()
            }
            (doing, _) => doing.to_owned(),
        }
    }

    fn progress(&self) -> Option<Progress> {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = state.sampling.as_ref()?;
        Some(*parts.progress.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn take_activity(&self) -> Activity {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.sampling.as_ref().map(|parts| parts.activity.take()).unwrap_or_default()
    }

    fn take_loads(&self) -> Vec<(String, LoadCounts)> {
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.sampling.as_ref().map(|parts| parts.rewards.take_loads()).unwrap_or_default()
    }

    fn serves(&self) -> Option<(String, ModelServer)> {
        None
    }
}
