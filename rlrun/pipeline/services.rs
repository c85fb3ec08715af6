//! The services of a run: the buffer, the weight hub and the listener for workers.
//!
//! They open before the model and the data, so that workers can join meanwhile and the run can wait for their services.
//!
//! Invariant: groups pass through the buffer, versions through the hub, reports of workers through the registry; nothing here
//! reads their content.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use ::rewards::reward_model::ModelServer;
use ::weights::Hub;
use ::weights::http::router;
use buffer::http::Role;
use collective::tcp;
use rollout::RolloutError;
use trainer::{Leader, TrainerError};

use super::Run;
use crate::failure::Failure;
use crate::recipe::words::Ranks;
use crate::run_buffer::{BufferServer, BufferSetup, RunBuffer};
use crate::workers::api::WorkerApi;
use crate::workers::membership::{derived, token};
use crate::workers::registry::WorkerRegistry;
use crate::workers::reward::is_served;
use crate::workers::trainer::MEETING;

/// Pause between two looks for workers that the run waits for.
const POLL: Duration = Duration::from_millis(50);

/// See the module.
pub(super) struct RunServices {
    /// For groups.
    pub(super) buffer: RunBuffer,
    /// For versions.
    pub(super) hub: Hub,
    /// The workers of the run.
    pub(super) registry: Arc<WorkerRegistry>,
    /// The routes for workers.
    pub(super) api: Arc<WorkerApi>,
}

impl Run<'_> {
    /// Opens the services and waits for reward servers and trainer ranks that join as processes.
    pub(super) fn open_services(&mut self) -> Result<RunServices, Failure> {
        let setup = BufferSetup {
            recipe: self.recipe,
            run_dir: self.run_dir.path(),
            runtime: &self.runtime,
            report: &self.report,
            listener: self.listener.as_ref(),
            has_begun: self.run_dir.has_begun(),
            limits: &self.limits,
            peers: &self.peers,
        };
        let services = RunServices::open(&setup, &self.run_dir.resolved_recipe())?;
        if self.listener.is_some() {
            let wanted = self.recipe.rewards.iter().filter(|spec| is_served(spec));
            let wanted: Vec<&str> = wanted.map(|spec| spec.name()).collect();
            let stop = self.signals.stop_flag();
            self.runtime.ask(services.reward_servers(&wanted, self.recipe.wait(), &stop)?);
        }
        if let (Ranks::Processes, Some(server)) = (self.recipe.trainer.ranks, &services.buffer.server) {
            self.leader = Some(self.wait_for_ranks(&services.api, server)?);
        }
        Ok(services)
    }

    /// Waits until all other ranks of the trainer have joined.
    fn wait_for_ranks(&self, api: &WorkerApi, server: &BufferServer) -> Result<Arc<Leader>, Failure> {
        let own = server.token_file.as_deref().map(|file| token(file, "writer")).transpose()?;
        let known = self.listener.as_ref().map(|listener| listener.token.as_str()).or(own.as_deref());
        let secret = derived(known, MEETING).unwrap_or_default();
        let address = SocketAddr::new(server.address.ip(), 0);
        let listener = tcp::Listener::bind(address, secret.as_bytes()).map_err(TrainerError::from)?;
        let system = |source| Failure::System { what: "read the address for ranks".to_owned(), source };
        let port = listener.local_addr().map_err(system)?.port();
        api.set_rank_port(Some(port));
        let (world, wait) = (self.recipe.trainer.world, self.recipe.wait());
        self.report.note(&format!("waiting for {} more ranks of the trainer", world - 1));
        let collective = listener.accept(world, wait).map_err(TrainerError::from)?;
        // A rank that is started again waits until this process is started again too.
        api.set_rank_port(None);
        Ok(Leader::new(Arc::new(collective)))
    }
}

impl RunServices {
    /// Opens all services; `recipe` is the resolved recipe, which workers get.
    ///
    /// # Errors
    /// A buffer, address or token that cannot be used.
    fn open(setup: &BufferSetup<'_>, recipe: &Path) -> Result<Self, Failure> {
        let hub = Hub::new(setup.recipe.hub());
        let registry = Arc::new(WorkerRegistry::after(now_ns()));
        let system = |source| Failure::System { what: format!("read {}", recipe.display()), source };
        let text = std::fs::read_to_string(recipe).map_err(system)?;
        let (model, ranks) = (OnceLock::new(), Mutex::new(None));
        let api = Arc::new(WorkerApi { registry: Arc::clone(&registry), recipe: text, model, ranks });
        let routes = vec![(Role::Writer, api.router()), (Role::Writer, router(hub.clone()))];
        let buffer = setup.open(routes)?;
        let (own, subscribers) = (buffer.own.clone(), hub.clone());
        registry.on_lost(move |name, instance| {
            // An error of the buffer is reported by its next user.
            own.iter().for_each(|buffer| drop(buffer.abandon(instance)));
            name.into_iter().for_each(|name| subscribers.forget(name));
        });
        Ok(Self { buffer, hub, registry, api })
    }

    /// The servers of the rewards `wanted`, once all are served; those known so far if `stop` is set before.
    ///
    /// # Errors
    /// A reward that is not served in time.
    fn reward_servers(
        &self,
        wanted: &[&str],
        wait: Duration,
        stop: &AtomicBool,
    ) -> Result<BTreeMap<String, ModelServer>, Failure> {
        let deadline = Instant::now() + wait;
        loop {
            let servers = self.registry.servers();
            let missing = wanted.iter().find(|name| !servers.contains_key(**name));
            let Some(missing) = missing.filter(|_| !stop.load(Ordering::Relaxed)) else { return Ok(servers) };
            if Instant::now() > deadline {
                return Err(RolloutError::Deadline {
                    who: "the run",
                    whom: format!("the process that serves reward `{missing}`; see its log"),
                    seconds: wait.as_secs_f64(),
                }
                .into());
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Nanoseconds since 1970: the first instance id of this process, larger than those of earlier processes of the run.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(0)
}
