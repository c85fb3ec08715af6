//! The buffer of a run: its own, served to other processes or not, or a client of one that is served elsewhere.
//!
//! Invariant: sampler and trainer get the two traits of a buffer and do not depend on where it is.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::http::Uri;
use buffer::http::{Client, ClientConfig, RefusedGroup, Role, Server, ServerConfig, ServerLimits, Tokens};
use buffer::{Buffer, Consumer, GroupLimits, Producer};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::credentials::ServerAccess;
use crate::failure::Failure;
use crate::launchers::{network, variables};
use crate::lead_address::{self, AnnouncedAddress, LeadAddress};
use crate::peers::Peers;
use crate::prepare::RewardRuntime;
use crate::recipe::Recipe;
use crate::recipe::words::StoreWord;
use crate::report::Report;
#[cfg(feature = "postgres")]
use crate::run_database::NamedDatabase;
use crate::workers::membership::token;

/// The journal of the run in `run_dir`.
pub(crate) fn journal(run_dir: &Path) -> PathBuf {
    run_dir.join("buffer.redb")
}

/// What a program without the feature says.
#[cfg(not(feature = "postgres"))]
pub(crate) const WITHOUT_POSTGRES: &str =
    "this program was built without PostgreSQL; build it with `cargo install --path . --features postgres`";

/// The database that a recipe names.
#[cfg(feature = "postgres")]
pub(crate) fn run_database<'a>(
    recipe: &'a Recipe,
    directory: &'a Path,
    variables: &'a std::collections::BTreeMap<String, String>,
) -> NamedDatabase<'a> {
    let url = recipe.buffer.url.as_deref().unwrap_or_default();
    NamedDatabase { url, schema: recipe.buffer.schema.as_deref(), directory, variables }
}

/// The id of the sampler in the process of the run, for a buffer that is served elsewhere: one that no other sampler is likely to have. Those
/// of workers are times.
pub(crate) const OWN_SAMPLER: u64 = u64::from_be_bytes(*b"\0\0\0rlrun");

/// The buffer of a run, for both sides.
pub(crate) struct RunBuffer {
    /// For samplers.
    pub(crate) producer: Arc<dyn Producer>,
    /// For the trainer.
    pub(crate) consumer: Arc<dyn Consumer>,
    /// The run's own buffer, if it has one.
    pub(crate) own: Option<Arc<Buffer>>,
    /// Serves the buffer until it is dropped.
    pub(crate) server: Option<BufferServer>,
}

/// The listener that a controller has opened for the run, and the tokens for it.
#[derive(Clone, Debug)]
pub(crate) struct RunListener {
    /// Its backlog holds connections while the process of the run is started again.
    pub(crate) listener: Arc<TcpListener>,
    /// The tokens, with their roles.
    pub(crate) tokens: Tokens,
    /// The token of the workers.
    pub(crate) token: String,
    /// The file of the tokens.
    pub(crate) token_file: PathBuf,
}

/// The configuration of the buffer of a run.
pub(crate) struct BufferSetup<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) run_dir: &'a Path,
    pub(crate) runtime: &'a RewardRuntime,
    pub(crate) report: &'a Arc<Report>,
    /// In place of the recipe's address.
    pub(crate) listener: Option<&'a RunListener>,
    /// Whether the run has made anything that its journal belongs to.
    pub(crate) has_begun: bool,
    /// ServerLimits on groups that other processes send, once the model is open.
    pub(crate) limits: &'a Arc<OnceLock<GroupLimits>>,
    /// Records groups that were refused.
    pub(crate) peers: &'a Arc<Peers>,
}

impl BufferSetup<'_> {
    /// Opens the buffer that the recipe names; serves it, with `routes`, if there is a listener or the recipe has an address.
    ///
    /// # Errors
    /// A journal, address, server or token that cannot be used; a server with other batches or another bound than the
    /// recipe's.
    pub(crate) fn open(&self, routes: Vec<(Role, Router)>) -> Result<RunBuffer, Failure> {
        let config = self.recipe.buffer_config();
        let own = match self.recipe.buffer.store {
            StoreWord::Redb => Buffer::open(self.journal()?, config)?,
            StoreWord::Memory => Buffer::in_memory(config)?,
            StoreWord::Http => return connect(self.recipe),
            StoreWord::Postgres => self.database(!self.has_begun)?,
        };
        let own = Arc::new(own);
        let peers = Arc::clone(self.peers);
        let refused = move |RefusedGroup { sender, code, detail }: RefusedGroup<'_>| {
            let sender = sender.map_or_else(|| "an unknown address".to_owned(), |sender| sender.to_string());
            peers.refuse(&sender, code, detail);
        };
        let serve = |(config, access)| {
            let limits = Some(Arc::clone(self.limits));
            let config = ServerConfig { group_limits: limits, refused: Some(Arc::new(refused)), ..config };
            BufferServer::start(config, Arc::clone(&own), &access, self)
        };
        let server = self.server_config(routes)?.map(serve).transpose()?;
        let producer = Arc::clone(&own) as Arc<dyn Producer>;
        Ok(RunBuffer { producer, consumer: Arc::clone(&own) as Arc<dyn Consumer>, own: Some(own), server })
    }

    /// The buffer in the database of the recipe; `create`: a missing schema is made.
    #[cfg(feature = "postgres")]
    fn database(&self, create: bool) -> Result<Buffer, Failure> {
        let report = Arc::clone(self.report);
        let notice = Arc::new(move |text: &str| report.note(text));
        let database = run_database(self.recipe, self.run_dir, self.runtime.environment());
        Ok(Buffer::with_store(self.recipe.buffer_config(), database.of_run(create, notice)?)?)
    }

    /// Such a recipe was refused.
    #[cfg(not(feature = "postgres"))]
    fn database(&self, _create: bool) -> Result<Buffer, Failure> {
        Err(Failure::Argument(WITHOUT_POSTGRES.to_owned()))
    }

    /// The path of the journal. A resumed run without its journal is refused.
    fn journal(&self) -> Result<PathBuf, Failure> {
        let path = journal(self.run_dir);
        if !self.has_begun || path.exists() {
            return Ok(path);
        }
        Err(Failure::Argument(format!(
            "journal {} is missing, and with it the groups that no checkpoint contains: put it back, or continue without them \
             with `rlrun resume {} --without-journal`",
            path.display(),
            self.run_dir.display()
        )))
    }

    /// The server and how it authenticates; `None` without an address.
    fn server_config(
        &self,
        routes: Vec<(Role, Router)>,
    ) -> Result<Option<(ServerConfig, ServerAccess)>, Failure> {
        let buffer = &self.recipe.buffer;
        let system =
            |source| Failure::System { what: "read the address of the run's socket".to_owned(), source };
        let given = self.listener.map(|given| given.listener.local_addr().map_err(system)).transpose()?;
        let Some(listen) = given.or(buffer.listen) else { return Ok(None) };
        let mut access = ServerAccess::of(buffer, listen, self.run_dir)?;
        if let Some(given) = self.listener {
            access.token_file = Some(given.token_file.clone());
        }
        let tokens = match self.listener {
            Some(given) => Some(given.tokens.clone()),
            None => access.token_file.as_deref().map(Tokens::read).transpose()?,
        };
        let config = ServerConfig {
            listener: self.listener.map(|given| Arc::clone(&given.listener)),
            tokens,
            tls: access.tls(&self.names(listen))?,
            insecure: buffer.insecure,
            routes,
            limits: ServerLimits {
                correct: self.recipe.algorithm().needs_correct(),
                ..ServerLimits::default()
            },
            own_trainer: true,
            ..ServerConfig::new(listen)
        };
        Ok(Some((config, access)))
    }

    /// The names by which workers call this machine.
    fn names(&self, listen: SocketAddr) -> BTreeSet<String> {
        let environment = self.runtime.environment();
        let named = environment.get(variables::JOIN).and_then(|url| url.parse::<Uri>().ok());
        let named = named.as_ref().and_then(Uri::host).map(|host| host.trim_matches(['[', ']']).to_owned());
        let mut names = network::own_names();
        names.extend(named.into_iter().chain(variables::head(environment)));
        names.insert(listen.ip().to_string());
        names
    }
}

/// Connects to a buffer that is served elsewhere.
fn connect(recipe: &Recipe) -> Result<RunBuffer, Failure> {
    let buffer = &recipe.buffer;
    let url = buffer.url.clone().unwrap_or_default();
    let token = buffer.token_file.as_deref().map(|file| token(file, "admin")).transpose()?;
    let config = ClientConfig { token, patience: recipe.wait(), ..ClientConfig::new(url.clone()) };
    let client = Client::new(config)?;
    let stats = client.stats()?;
    let (ours, theirs) =
        ((buffer.batch_groups, buffer.max_staleness), (stats.batch_groups, stats.max_staleness));
    if ours != theirs {
        return Err(Failure::Argument(format!(
            "the buffer at {url} has batch_groups = {} and max_staleness = {}, the recipe has {} and {}: make them the \
             same (`--batch-groups`, `--max-staleness` where it is served)",
            theirs.0, theirs.1, ours.0, ours.1
        )));
    }
    let client = Arc::new(client);
    Ok(RunBuffer {
        producer: Arc::clone(&client) as Arc<dyn Producer>,
        consumer: client,
        own: None,
        server: None,
    })
}

/// The server of a run's buffer. It ends when it is dropped.
pub(crate) struct BufferServer {
    /// Its address.
    pub(crate) address: SocketAddr,
    /// The file of its tokens, if it wants any.
    pub(crate) token_file: Option<PathBuf>,
    /// For workers, until this is dropped.
    _announced: AnnouncedAddress,
    stop: Arc<Notify>,
    task: Option<JoinHandle<()>>,
    runtime: tokio::runtime::Handle,
}

impl BufferServer {
    fn start(
        config: ServerConfig,
        buffer: Arc<Buffer>,
        access: &ServerAccess,
        setup: &BufferSetup<'_>,
    ) -> Result<Self, Failure> {
        let handle = setup.runtime.handle();
        let encrypted = config.tls.is_some();
        let server = handle.block_on(Server::bind(config, buffer))?;
        let address = server.local_addr();
        let url = lead_address::url(address, encrypted);
        setup.report.note(&format!("the run is served on {url}"));
        let token_file = access.token_file.clone();
        let announced = LeadAddress { url, token_file: token_file.clone(), tls_ca: access.ca()? };
        let announced = announced.announce(setup.run_dir)?;
        let stop = Arc::new(Notify::new());
        let signal = Arc::clone(&stop);
        let task = handle.spawn(server.serve(async move { signal.notified().await }));
        let (task, runtime) = (Some(task), handle.clone());
        Ok(Self { address, token_file, _announced: announced, stop, task, runtime })
    }
}

impl Drop for BufferServer {
    fn drop(&mut self) {
        self.stop.notify_one();
        if let Some(task) = self.task.take() {
            // Its deadline bounds this; a panic of its task was printed.
            drop(self.runtime.block_on(task));
        }
    }
}
