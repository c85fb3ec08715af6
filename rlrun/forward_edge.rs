//! The forward edge of a run: its own buffer, served to others or not, or one that is served elsewhere.
//!
//! Invariant: sampler and trainer get the two contracts and do not learn where the buffer is.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use buffer::http::{Client, ClientConfig, Server, ServerConfig};
use buffer::{Buffer, Consumer, Producer};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::failure::Failure;
use crate::prepare::RewardRuntime;
use crate::recipe::Recipe;
use crate::recipe::words::Store;
use crate::report::Report;

/// Both ends of the buffer of a run.
pub(crate) struct Edge {
    /// For samplers.
    pub(crate) producer: Arc<dyn Producer>,
    /// For the trainer.
    pub(crate) consumer: Arc<dyn Consumer>,
    /// Serves the buffer as long as it lives.
    pub(crate) served: Option<Served>,
}

/// Opens the buffer that the recipe names.
///
/// # Errors
/// A journal, address, server or token that cannot be used; a server with other batches or another bound than the recipe's.
pub(crate) fn open(
    recipe: &Recipe,
    run_dir: &Path,
    runtime: &RewardRuntime,
    report: &Report,
) -> Result<Edge, Failure> {
    let config = recipe.buffer_config();
    let own = match recipe.buffer.store {
        Store::Redb => Buffer::open(run_dir.join("buffer.redb"), config)?,
        Store::Memory => Buffer::in_memory(config)?,
        Store::Http => return elsewhere(recipe),
    };
    let own = Arc::new(own);
    let serve = |listen| Served::start(listen, Arc::clone(&own), runtime, report);
    let served = recipe.buffer.listen.map(serve).transpose()?;
    Ok(Edge { producer: Arc::clone(&own) as Arc<dyn Producer>, consumer: own, served })
}

fn elsewhere(recipe: &Recipe) -> Result<Edge, Failure> {
    let buffer = &recipe.buffer;
    let url = buffer.url.clone().unwrap_or_default();
    let token = buffer.token_file.as_deref().map(read_token).transpose()?;
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
    Ok(Edge { producer: Arc::clone(&client) as Arc<dyn Producer>, consumer: client, served: None })
}

fn read_token(file: &Path) -> Result<String, Failure> {
    let read = std::fs::read_to_string(file);
    let text = read.map_err(|source| Failure::System { what: format!("read {}", file.display()), source })?;
    Ok(text.trim().to_owned())
}

/// A server beside the run; ends when it is dropped.
pub(crate) struct Served {
    stop: Arc<Notify>,
    task: Option<JoinHandle<()>>,
    runtime: tokio::runtime::Handle,
}

impl Served {
    fn start(
        listen: SocketAddr,
        buffer: Arc<Buffer>,
        runtime: &RewardRuntime,
        report: &Report,
    ) -> Result<Self, Failure> {
        let handle = runtime.handle();
        let server = handle.block_on(Server::bind(ServerConfig::new(listen), buffer))?;
        report.note(&format!("the buffer is served on http://{}", server.local_addr()));
        let stop = Arc::new(Notify::new());
        let signal = Arc::clone(&stop);
        let task = handle.spawn(server.serve(async move { signal.notified().await }));
        Ok(Self { stop, task: Some(task), runtime: handle.clone() })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.notify_one();
        if let Some(task) = self.task.take() {
            // It ends by its own deadline; a panic in it was printed.
            drop(self.runtime.block_on(task));
        }
    }
}
