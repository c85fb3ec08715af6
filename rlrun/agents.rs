//! The policy as an endpoint for the agents of a run.
//!
//! Requests of a session go to the sampler of its episode: that of the training, or of an evaluation. All others go to the
//! sampler of the training.
//!
//! Invariant: without agents and without `endpoint.listen` no address is opened.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use endpoint::session::{
    EndpointAddress, SessionControl, SessionPlayer, SessionStore, WaitingEpisodes, expire_idle,
    session_routes,
};
use endpoint::{EndpointConfig, EndpointLimits, EndpointServer, ServedPolicy, Service};
use model::ModelDirectory;
use rollout::{
    ClientQueue, ExternalPlayer, RequestBounds, RequestHandle, Sampler, ServedSampler, request_queue,
};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::endpoint::AGENT_KINDS;
use crate::workers::membership::token;

/// Whether agents play episodes of the recipe.
pub(crate) fn has_agents(recipe: &Recipe) -> bool {
    let mut kinds = recipe.environment.iter().flat_map(|environment| environment.kinds());
    kinds.any(|kind| AGENT_KINDS.contains(&kind))
}

/// The endpoint of a run; it is served until this is dropped.
pub(crate) struct AgentEndpoint {
    address: SocketAddr,
    player: Arc<dyn ExternalPlayer>,
    handle: RequestHandle,
    /// The other side of `handle`, until the sampler of the training has it.
    queue: Mutex<Option<ClientQueue>>,
    /// The server, and the expiry of its sessions; they end when they are dropped.
    _tasks: JoinSet<()>,
}

impl std::fmt::Debug for AgentEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AgentEndpoint").field("address", &self.address).finish_non_exhaustive()
    }
}

impl AgentEndpoint {
    /// Serves the policy of `directory` as `recipe` says; `None` if it wants no endpoint.
    ///
    /// # Errors
    /// An address that cannot be opened; a file of keys that cannot be read.
    pub(crate) fn start(
        recipe: &Recipe,
        directory: &Arc<ModelDirectory>,
        runtime: &Handle,
    ) -> Result<Option<Self>, Failure> {
        let agents = has_agents(recipe);
        if !agents && recipe.endpoint.listen.is_none() {
            return Ok(None);
        }
        let listen = recipe.endpoint.listen.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let admin = recipe.endpoint.token_file.as_deref().map(|file| token(file, "admin")).transpose()?;
        let bounds =
            RequestBounds { max_open: recipe.endpoint.max_requests, max_running: recipe.rollout.max_running };
        let (handle, queue) = request_queue(bounds);
        let (store, waiting) = (SessionStore::new(recipe.session_limits()), WaitingEpisodes::default());
        let policy = ServedPolicy {
            name: recipe.name.clone(),
            root: directory.path().display().to_string(),
            directory: Arc::clone(directory),
            max_context: directory.config().max_context(),
            stop_strings: recipe.stop_rules(directory).strings,
            adapters: Vec::new(),
        };
        let config = EndpointConfig {
            policy,
            limits: EndpointLimits { max_open: recipe.endpoint.max_requests, ..EndpointLimits::default() },
            token: admin.clone(),
            sessions: Some(Arc::new(store.clone())),
        };
        let control = SessionControl {
            store: store.clone(),
            waiting: agents.then(|| waiting.clone()),
            admin_key: admin.map(Into::into),
        };
        let service = Service::new(config, handle.clone());
        let routes = session_routes(control, &service);
        let refused = |error| Failure::Argument(format!("`endpoint.listen`: {error}"));
        let server = runtime.block_on(EndpointServer::bind(service, listen)).map_err(refused)?;
        let address = server.local_addr();
        let mut tasks = JoinSet::new();
        tasks.spawn_on(server.with_routes(routes).serve(std::future::pending()), runtime);
        tasks.spawn_on(expire_idle(store.clone()), runtime);
        let base_url = format!("http://{address}/v1");
        let played = EndpointAddress { base_url, model: recipe.name.clone() };
        let player: Arc<dyn ExternalPlayer> =
            Arc::new(SessionPlayer::new(store, waiting, played, recipe.seed));
        Ok(Some(Self { address, player, handle, queue: Mutex::new(Some(queue)), _tasks: tasks }))
    }

    /// Plays the episodes of agents.
    pub(crate) fn player(&self) -> &Arc<dyn ExternalPlayer> {
        &self.player
    }

    /// What people read of it.
    pub(crate) fn note(&self) -> String {
        format!("the policy is served at http://{}/v1", self.address)
    }

    /// The sampler of the training, which serves the endpoint too.
    pub(crate) fn training(&self, sampler: Box<dyn Sampler>) -> Box<dyn Sampler> {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        match queue {
            Some(queue) => Box::new(ServedSampler::new(sampler, queue).for_agents(self.handle.clone())),
            None => self.aside(sampler),
        }
    }

    /// A further sampler, such as that of an evaluation, for the episodes that it plays.
    pub(crate) fn aside(&self, sampler: Box<dyn Sampler>) -> Box<dyn Sampler> {
        let (handle, queue) = request_queue(self.handle.bounds());
        Box::new(ServedSampler::new(sampler, queue).for_agents(handle))
    }
}
