//! The services of a run: the buffer, the weight hub and the listener for workers.
//!
//! They open before the model and the data, so that workers can join meanwhile and the run can wait for their services.
//!
//! Invariant: groups pass through the buffer, versions through the hub, reports of workers through the registry; nothing here
//! reads their content.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use ::rewards::reward_model::ModelServer;
use ::weights::Hub;
use ::weights::http::router;
use buffer::Producer;
use buffer::http::Role;
use rollout::RolloutError;
use trainer::trainer::elastic::Elasticity;

use super::Run;
use crate::failure::Failure;
use crate::recipe::words::Ranks;
use crate::run_buffer::{BufferSetup, RunBuffer};
use crate::workers::api::WorkerApi;
use crate::workers::registry::WorkerRegistry;
use crate::workers::reward::is_served;

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
    /// How the trainer continues without some of its ranks, if it does.
    pub(super) elasticity: Option<Elasticity>,
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
        let mut services = RunServices::open(&setup, &self.run_dir.resolved_recipe())?;
        if self.listener.is_some() {
            let wanted = self.recipe.rewards.iter().filter(|spec| is_served(spec));
            let wanted: Vec<&str> = wanted.map(|spec| spec.name()).collect();
            let stop = self.signals.stop_flag();
            self.runtime.ask(services.reward_servers(&wanted, self.recipe.wait(), &stop)?);
        }
        if let (Ranks::Processes, Some(server)) = (self.recipe.trainer.ranks, &services.buffer.server) {
            let (leader, elasticity) = self.wait_for_ranks(&services.api, server)?;
            self.leader = Some(leader);
            services.elasticity = elasticity;
        }
        Ok(services)
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
        Ok(Self { buffer, hub, registry, api, elasticity: None })
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
