//! `rlrun serve`: a part of rlrun as a separate process.
//!
//! Invariant: the first line on standard output is the address, printed once clients can connect; all other output goes to
//! standard error. On a stop signal the server finishes the requests it has begun and ends with success.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use buffer::http::{Reopen, ServedBuffer, Server, ServerConfig, ServerLimits, Tokens};
use buffer::{Buffer, BufferConfig, BufferError, Consumer};
use dashboard::DashboardConfig;
use model::{Config, KvCache, Quantization};
use rewards::reward_model::{self, server::ServedModel};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;

use crate::args::{KeepArgs, ServeBufferArgs, ServeRewardArgs};
use crate::failure::Failure;
use crate::huggingface::HuggingFace;
use crate::memory;
use crate::program::Program;
#[cfg(feature = "postgres")]
use crate::run_database::{NamedDatabase, is_in_use};
use crate::run_page::open_page;
use crate::signals::INTERRUPTED;
use crate::status::RunStatus;

/// Longest time for the score of one sequence whose turn has come.
const SCORE_TIME: Duration = Duration::from_secs(300);

/// Longest context of a model that is served unless the arguments name one, tokens.
pub(crate) const MAX_CONTEXT: usize = 32_768;

/// Time between two states of a buffer on its page.
const STATUS_EVERY: Duration = Duration::from_secs(1);
/// The journal in its directory.
const JOURNAL: &str = "buffer.redb";

/// Tokens of the KV cache of an engine: of `running` sequences of `longest` tokens within one `part`-th of the free memory, but at least
/// one such sequence.
pub(crate) fn cache_tokens(config: &Config, running: usize, longest: usize, part: usize) -> usize {
    let longest = longest + 3 * KvCache::PAGE;
    let all = running.saturating_mul(longest);
    let token_bytes = 2 * size_of::<f32>() * config.num_layers() * config.num_kv_heads * config.head_dim;
    let affordable = memory::available().map_or(all, |bytes| bytes / part.max(1) / token_bytes.max(1));
    all.min(affordable).max(longest)
}

/// Serves a buffer until a signal stops it.
///
/// # Errors
/// A directory, journal, database, token file, certificate or address that cannot be used.
pub fn buffer(args: &ServeBufferArgs, program: &Program) -> Result<String, Failure> {
    let config = server_config(args)?;
    std::fs::create_dir_all(&args.dir).map_err(|source| Failure::System {
        what: format!("make the directory {}", args.dir.display()),
        source,
    })?;
    let StoredBuffer { buffer, reopen } = match &args.postgres {
        None => journal(args)?,
        Some(url) => database(args, url, program)?,
    };
    runtime()?.block_on(async {
        let signals = ServerSignals::listen()?;
        let config = ServerConfig { reopen, ..config };
        let scheme = if config.tls.is_some() { "https" } else { "http" };
        let server = match buffer {
            Ok(buffer) => Server::bind(config, buffer).await?,
            Err(reason) => Server::bind_standby(config, &reason).await?,
        };
        let page = buffer_page(args, server.served()).await?;
        say(&format!("listening on {scheme}://{}", server.local_addr()));
        server.serve(signals.stop()).await;
        // Dropped, its tasks end.
        drop(page);
        Ok(String::new())
    })
}

/// A buffer to serve.
struct StoredBuffer {
    /// The buffer, or why another process has it open.
    buffer: Result<Arc<Buffer>, BufferError>,
    /// Opens it again, or as soon as the other process has ended.
    reopen: Option<Reopen>,
}

/// The buffer in the journal.
fn journal(args: &ServeBufferArgs) -> Result<StoredBuffer, Failure> {
    let buffer = Arc::new(Buffer::open(args.dir.join(JOURNAL), args.keep.buffer_config())?);
    let reopen = buffer.reopen();
    Ok(StoredBuffer { buffer: Ok(buffer), reopen })
}

/// The buffer in a database.
#[cfg(feature = "postgres")]
fn database(args: &ServeBufferArgs, url: &str, program: &Program) -> Result<StoredBuffer, Failure> {
    use buffer::postgres::open_postgres;
    let quiet = args.quiet;
    let notice = move |text: &str| {
        if !quiet {
            eprintln!("{text}");
        }
    };
    let (schema, directory) = (args.schema.as_deref(), &args.dir);
    let named = NamedDatabase { url, schema, directory, variables: program.environment() };
    let (config, keep) = (named.served(Arc::new(notice))?, args.keep.buffer_config());
    let open = move || Buffer::with_store(keep, open_postgres(config.clone())?);
    let buffer = match open() {
        Ok(buffer) => Ok(Arc::new(buffer)),
        Err(error) if is_in_use(&error) => Err(error),
        Err(error) => return Err(error.into()),
    };
    Ok(StoredBuffer { buffer, reopen: Some(Arc::new(open)) })
}

#[cfg(not(feature = "postgres"))]
fn database(_args: &ServeBufferArgs, _url: &str, _program: &Program) -> Result<StoredBuffer, Failure> {
    Err(Failure::Argument(crate::run_buffer::WITHOUT_POSTGRES.to_owned()))
}

/// Serves the page of a buffer, if it has one, and writes the file that it shows, until the tasks are dropped. A standby shows its
/// buffer once it has it.
async fn buffer_page(args: &ServeBufferArgs, served: ServedBuffer) -> Result<Option<JoinSet<()>>, Failure> {
    let Some(listen) = args.dashboard else { return Ok(None) };
    let token = args.dashboard_token_file.as_deref().map(token).transpose()?;
    let status = Arc::new(RunStatus::new(&args.dir));
    write_status(&status, &served);
    let page =
        open_page(DashboardConfig { listen, token, runs: vec![args.dir.clone()], advisor: None }).await?;
    if !args.quiet {
        eprintln!("the page is at http://{}", page.local_addr());
    }
    let mut tasks = JoinSet::new();
    tasks.spawn(page.serve(std::future::pending()));
    tasks.spawn(keep_status(status, served));
    Ok(Some(tasks))
}

/// Writes the state of the buffer every second.
async fn keep_status(status: Arc<RunStatus>, served: ServedBuffer) {
    loop {
        tokio::time::sleep(STATUS_EVERY).await;
        let (status, served) = (Arc::clone(&status), Arc::clone(&served));
        // A panic of it was printed.
        let _ = tokio::task::spawn_blocking(move || write_status(&status, &served)).await;
    }
}

/// Writes the state of the buffer; the last state stays while its storage has failed. The buffer is dropped at once, or its
/// journal could not be opened again.
fn write_status(status: &RunStatus, served: &ServedBuffer) {
    let Some(buffer) = served() else { return };
    let stats = buffer.stats().ok();
    status.write(&[], stats.as_ref(), Some(&buffer));
}

/// Serves a reward model until a signal stops it.
///
/// # Errors
/// A model, token file or address that cannot be used.
pub fn reward(args: &ServeRewardArgs, program: &Program) -> Result<String, Failure> {
    let token = args.token_file.as_deref().map(token).transpose()?;
    if !args.listen.ip().is_loopback() && token.is_none() {
        return Err(Failure::Argument(format!(
            "{} is not on loopback, so that others can reach it: give a token with --token-file",
            args.listen
        )));
    }
    let config = ServedModel {
        batch_tokens: args.batch_tokens,
        threads: args.threads,
        quantization: if args.int8 { Quantization::Int8 } else { Quantization::None },
        token,
        timeout: SCORE_TIME,
    };
    let model = HuggingFace::of(program).model(&args.model)?;
    runtime()?.block_on(async {
        let signals = ServerSignals::listen()?;
        let server = reward_model::server::RewardModelServer::bind(&model, config, args.listen).await?;
        say(&format!("listening on http://{}", server.local_addr()));
        let served = server.serve(signals.stop()).await;
        served.map_err(|source| Failure::System { what: "serve".to_owned(), source })?;
        Ok(String::new())
    })
}

/// The only word of a file.
pub(crate) fn token(file: &Path) -> Result<String, Failure> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| Failure::System { what: format!("read {}", file.display()), source })?;
    let token = text.trim();
    if token.is_empty() || token.contains(char::is_whitespace) {
        return Err(Failure::Argument(format!("{} must hold one word, the token", file.display())));
    }
    Ok(token.to_owned())
}

/// The last part of a path, or OWNER/NAME of a repository.
pub(crate) fn name_of(target: &Path) -> String {
    let text = target.display().to_string();
    if let Some(repository) = text.strip_prefix("hf:") {
        return repository.to_owned();
    }
    let absolute = std::path::absolute(target).unwrap_or_else(|_| target.to_owned());
    absolute.file_name().map_or(text, |name| name.to_string_lossy().into_owned())
}

/// Threads that serve.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let built = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("serve").build();
    built.map_err(|source| Failure::System { what: "start threads".to_owned(), source })
}

fn server_config(args: &ServeBufferArgs) -> Result<ServerConfig, Failure> {
    let tokens = args.token_file.as_deref().map(Tokens::read).transpose()?;
    if let Some(file) = args.token_file.as_deref().filter(|file| !args.quiet && others_may_read(file)) {
        eprintln!("warning: others can read {}; chmod 600 it", file.display());
    }
    let quiet = args.quiet;
    let notice = move |what: &str| {
        if !quiet {
            eprintln!("{what}");
        }
    };
    Ok(ServerConfig {
        limits: ServerLimits { vocabulary: args.vocab_size, ..ServerLimits::default() },
        tokens,
        tls: args.certificate.read()?,
        insecure: args.insecure,
        allow_hosts: args.allow_hosts.clone(),
        notice: Some(Arc::new(notice)),
        ..ServerConfig::new(args.listen)
    })
}

/// A file without metadata fails with its own error when it is read.
fn others_may_read(file: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(file).is_ok_and(|metadata| metadata.mode() & 0o077 != 0)
}

/// One line, at once; a closed pipe is no error.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

impl KeepArgs {
    fn buffer_config(&self) -> BufferConfig {
        BufferConfig {
            on_stale: self.on_stale,
            order: self.order.with(self.reward_temperature),
            max_uses: self.max_uses,
            dedup: self.dedup,
            max_bytes: self.max_bytes,
            ..BufferConfig::new(self.batch_groups, self.max_staleness)
        }
    }
}

/// Ctrl-C and SIGTERM: the first stops the server, the second ends the process at once.
pub(crate) struct ServerSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl ServerSignals {
    pub(crate) fn listen() -> Result<Self, Failure> {
        let of = |kind| {
            signal(kind).map_err(|source| Failure::System { what: "listen for signals".to_owned(), source })
        };
        Ok(Self { interrupt: of(SignalKind::interrupt())?, terminate: of(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Ends at the first signal; the second ends the process.
    pub(crate) async fn stop(mut self) {
        self.next().await;
        tokio::spawn(async move {
            self.next().await;
            std::process::exit(INTERRUPTED);
        });
    }
}

/// Errors of a buffer that name what is wrong with its configuration.
pub(crate) fn is_input(error: &BufferError) -> bool {
    matches!(
        error,
        BufferError::Config { .. }
            | BufferError::ReplayWaits { .. }
            | BufferError::Unusable { .. }
            | BufferError::StoreSetup { .. }
            | BufferError::StoreInUse { .. }
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Instant;

    use super::*;

    #[test]
    fn the_page_of_a_buffer_does_not_keep_it_open() {
        let directory = tempfile::tempdir().unwrap();
        let status = Arc::new(RunStatus::new(directory.path()));
        let buffer = Arc::new(Buffer::in_memory(BufferConfig::new(1, 0)).unwrap());
        let left = Arc::downgrade(&buffer);
        let slot = Arc::new(Mutex::new(Some(buffer)));
        let of_slot = Arc::clone(&slot);
        let served: ServedBuffer = Arc::new(move || of_slot.lock().unwrap().clone());
        let file = directory.path().join("status.json");
        runtime().unwrap().block_on(async {
            let mut tasks = JoinSet::new();
            tasks.spawn(keep_status(status, served));
            let deadline = Instant::now() + Duration::from_secs(30);
            let soon = async |done: &dyn Fn() -> bool| {
                while !done() {
                    assert!(Instant::now() < deadline);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            soon(&|| file.exists()).await;
            // Its storage failed: the server drops it.
            drop(slot.lock().unwrap().take());
            soon(&|| left.strong_count() == 0).await;
        });
    }

    #[test]
    fn a_model_is_named_by_its_directory_or_repository() {
        assert_eq!(name_of(Path::new("runs/mine/")), "mine");
        assert_eq!(name_of(Path::new("hf:owner/name")), "owner/name");
        assert_eq!(name_of(Path::new("some/model.gguf")), "model.gguf");
    }
}
