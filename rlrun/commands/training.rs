//! `rlrun serve training`: the trainer as a service, for clients of tinker.
//!
//! Invariant: one process serves a directory. The first line on standard output is the address. On a stop signal requests that have
//! begun are finished within a limit; weights that were not saved are lost, and the process says so.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::SharedCores;
use rollout::EngineConfig;
use service::base::BaseModel;
use service::fair_queue::FairBounds;
use service::http::ServiceAccess;
use service::sampling::HostConfig;
use service::server::{TrainingServer, TrainingServerConfig, TrainingServerError};
use service::training::{ServiceConfig, ServiceLimits, TrainingService};

use super::checkpoint_paths::model_of;
use crate::args::{NamedModel, ServeTrainingArgs};
use crate::failure::Failure;
use crate::huggingface::HuggingFace;
use crate::memory;
use crate::program::Program;
use crate::run_dir::{Lock, RunDirError};
use crate::serve::{MAX_CONTEXT, ServerSignals, cache_tokens, name_of, runtime, say};

/// The KV cache of an engine takes at most this part of the free memory, or one sequence: there may be several engines.
const CACHE_PART: usize = 8;
/// Most completions of one request.
const MAX_SAMPLES: usize = 1024;
/// Shortest key of a user, bytes.
const SHORTEST_KEY: usize = 16;

/// Serves training until a signal stops it.
///
/// # Errors
/// Models, a key file, certificates or an address that cannot be used.
pub(super) fn serve(args: &ServeTrainingArgs, program: &Program) -> Result<String, Failure> {
    let keys = args.token_file.as_deref().map(keys).transpose()?.unwrap_or_default();
    let tls = args.certificate.read()?;
    let cores = SharedCores::all();
    let threads = args.threads.unwrap_or(cores.total());
    let bases = bases(args, program, (&cores, threads))?;
    let longest = bases.iter().map(|base| base.info().max_context).max().unwrap_or(MAX_CONTEXT);
    let caches = bases
        .iter()
        .map(|base| cache_tokens(base.directory().config(), args.max_running, longest, CACHE_PART));
    let memory = memory::available().map(|bytes| bytes as u64);
    let config = ServiceConfig {
        host: HostConfig {
            max_running: args.max_running,
            max_context: longest,
            kv_cache_tokens: caches.min().unwrap_or(longest),
            prefill_chunk: EngineConfig::default_prefill_chunk(false),
            max_samples: MAX_SAMPLES,
            threads,
            waiting: FairBounds {
                total: 64 * args.max_open.max(MAX_SAMPLES),
                per_user: 16 * args.max_open.max(MAX_SAMPLES),
            },
        },
        dir: args.dir.clone(),
        cores,
        limits: ServiceLimits {
            models: args.max_models,
            open: args.max_open,
            session: Duration::from_secs(args.session_timeout as u64),
            sampler_bytes: memory.map_or(ServiceLimits::default().sampler_bytes, |bytes| bytes / 4),
            model_bytes: memory.map_or(ServiceLimits::default().model_bytes, |bytes| bytes / 2),
            ..ServiceLimits::default()
        },
        bases,
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let config_of_server = TrainingServerConfig {
        access: ServiceAccess::new(&keys),
        tls,
        ..TrainingServerConfig::new(args.listen)
    };
    let _lock = locked(&args.dir)?;
    runtime()?.block_on(async {
        let signals = ServerSignals::listen()?;
        let service = TrainingService::start(config).map_err(|refusal| Failure::System {
            what: "start the service".to_owned(),
            source: std::io::Error::other(refusal.message),
        })?;
        let server = TrainingServer::bind(service.clone(), config_of_server).await;
        let server = server.map_err(|error| match error {
            TrainingServerError::Listen { address, source } => {
                Failure::System { what: format!("listen on {address}"), source }
            }
            other => Failure::Argument(other.to_string()),
        })?;
        say(&format!("listening on {scheme}://{}", server.local_addr()));
        server.serve(signals.stop()).await;
        // Its thread ends after the request that it carries out.
        let ended = tokio::task::spawn_blocking(move || drop(service)).await;
        ended.map_err(|error| Failure::System {
            what: "stop".to_owned(),
            source: std::io::Error::other(error),
        })?;
        Ok(String::new())
    })
}

/// The lock of the directory of saved weights, which is made if it does not exist.
fn locked(dir: &Path) -> Result<Lock, Failure> {
    std::fs::create_dir_all(dir)
        .map_err(|source| Failure::System { what: format!("make {}", dir.display()), source })?;
    Lock::take(dir).map_err(|error| match error {
        RunDirError::InUse { path, pid } => Failure::Argument(format!(
            "--dir {}: process {pid} has it open; stop that process, or name another directory",
            path.display()
        )),
        other => other.into(),
    })
}

/// The base models of the arguments.
fn bases(
    args: &ServeTrainingArgs,
    program: &Program,
    threads: (&Arc<SharedCores>, usize),
) -> Result<Vec<Arc<BaseModel>>, Failure> {
    let mut bases: Vec<Arc<BaseModel>> = Vec::new();
    for NamedModel { name, path } in &args.models {
        let name = name.clone().unwrap_or_else(|| name_of(path));
        if bases.iter().any(|base| base.info().name == name) {
            return Err(Failure::Argument(format!(
                "--model {name}: the name is taken; give each model a name of its own"
            )));
        }
        let found = model_of(&HuggingFace::of(program).model(path)?, None)?;
        let max_context = args.max_context.unwrap_or(MAX_CONTEXT);
        bases.push(Arc::new(BaseModel::open(&name, &found, Some(max_context), threads)?));
    }
    Ok(bases)
}

/// The keys of a file of lines `NAME KEY`; `#` begins a comment.
fn keys(file: &Path) -> Result<Vec<String>, Failure> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| Failure::System { what: format!("read {}", file.display()), source })?;
    let mut keys = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [_, key] if key.len() >= SHORTEST_KEY => keys.push(key.to_owned()),
            _ => {
                return Err(Failure::Argument(format!(
                    "{}, line {number}: write `NAME KEY`, a key of at least {SHORTEST_KEY} characters without spaces",
                    file.display()
                )));
            }
        }
    }
    match keys.is_empty() {
        true => Err(Failure::Argument(format!("{} has no key; write lines `NAME KEY`", file.display()))),
        false => Ok(keys),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_served_once_at_a_time() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("saved");
        let first = locked(&dir).unwrap();
        let error = locked(&dir).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(first);
        locked(&dir).unwrap();
    }

    #[test]
    fn keys_are_lines_of_a_name_and_a_key() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        std::fs::write(&file, "# users\nada tml-0123456789abcdef\n\nbob tml-fedcba9876543210\n").unwrap();
        assert_eq!(keys(&file).unwrap(), ["tml-0123456789abcdef", "tml-fedcba9876543210"]);
        for wrong in ["", "ada short", "tml-0123456789abcdef", "a b c-0123456789abcdef"] {
            std::fs::write(&file, wrong).unwrap();
            assert!(keys(&file).is_err(), "{wrong}");
        }
    }
}
