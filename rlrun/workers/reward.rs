//! `rlrun worker reward`: serves a reward model of a run's recipe to the samplers of the run.
//!
//! Invariant: the recipe chooses the model and its settings, the operator of this machine allows its path. The process ends
//! with the run. Only members of the run get its address and its token.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::rewards::reward_model::ModelServer;
use ::rewards::reward_model::server::{RewardModelServer, ServedModel};
use ::rewards::{LoadCounts, RewardSpec};
use ::rollout::Progress;
use model::{Placement, Quantization};

use super::membership::{Membership, WorkerReport, derived};
use super::permissions::Permissions;
use super::registry::WorkerRole;
use crate::args::RewardWorkerArgs;
use crate::failure::Failure;
use crate::huggingface::HuggingFace;
use crate::launchers::network::address_of;
use crate::program::Program;
use crate::signals::{Signals, end_with_parent};

/// Purpose of the key derivation: the token of a reward server from that of its run.
const PURPOSE: &str = "rlrun 2026 token of a reward server from that of its run";
/// Pause between two looks at the stop flag.
const LOOK_UP: Duration = Duration::from_millis(50);

/// Serves until the run ends or the process is stopped.
///
/// # Errors
/// A run that cannot be reached or has no such reward, a model that cannot be opened, an address that cannot be used.
pub(crate) fn run(args: &RewardWorkerArgs, program: &Program) -> Result<(), Failure> {
    if let Some(parent) = args.join.parent {
        end_with_parent(parent)?;
    }
    let permissions = Permissions::new(&args.allow, &[], program)?;
    let signals = Signals::listen()?;
    let stop = signals.stop_flag();
    let Some(mut membership) = Membership::join(WorkerRole::Reward, &args.join, program, &stop)? else {
        return Ok(());
    };
    let listener = listener(args)?;
    let served = served(args, &permissions, &membership)?;
    let model = HuggingFace::of(program).model(&served.path)?;
    let address = listener.local_addr().map_err(socket)?;
    // All processes of this reward have the same token.
    let token = derived(membership.token(), PURPOSE);
    let config = ServedModel { token: token.clone(), ..served.config };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("serve").build();
    let runtime = runtime.map_err(|source| Failure::System { what: "start threads".to_owned(), source })?;
    runtime.block_on(async {
        let server = RewardModelServer::on(&model, config, listener).await?;
        eprintln!("serving reward `{}` on http://{address}", args.reward);
        let url = args.url.clone().unwrap_or_else(|| format!("http://{address}"));
        let report = RewardReport { serves: (args.reward.clone(), ModelServer { url, token }) };
        membership.start_heartbeat(report, Arc::clone(&stop))?;
        let ended = server.serve(until(Arc::clone(&stop))).await;
        let served = ended.map_err(|source| Failure::System { what: "serve".to_owned(), source });
        membership.leave(served)
    })
}

async fn until(stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        tokio::time::sleep(LOOK_UP).await;
    }
}

fn socket(source: std::io::Error) -> Failure {
    Failure::System { what: "take the socket of the reward".to_owned(), source }
}

/// A new listener, or that on standard input, which outlives this process.
fn listener(args: &RewardWorkerArgs) -> Result<TcpListener, Failure> {
    if args.socket {
        return Ok(TcpListener::from(std::io::stdin().as_fd().try_clone_to_owned().map_err(socket)?));
    }
    let listen = match &args.interface {
        Some(name) => SocketAddr::new(address_of(name)?, args.listen.port()),
        None => args.listen,
    };
    let system = |source| Failure::System { what: format!("listen on {listen}"), source };
    TcpListener::bind(listen).map_err(system)
}

/// The model of a reward, and how it is served.
struct ServedReward {
    path: PathBuf,
    config: ServedModel,
}

fn served(
    args: &RewardWorkerArgs,
    permissions: &Permissions,
    membership: &Membership,
) -> Result<ServedReward, Failure> {
    let recipe = membership.raw_recipe()?;
    let mut named = recipe.rewards.iter().filter(|spec| spec.name() == args.reward && is_served(spec));
    let Some(spec) = named.next() else {
        return Err(Failure::Argument(format!(
            "the run has no reward `{}` of kind \"model\" with a `path` that is not colocated",
            args.reward
        )));
    };
    let path = permissions.reward_model(spec)?;
    let config = ServedModel {
        batch_tokens: spec.batch_tokens,
        threads: args.threads.or(spec.threads),
        quantization: spec.quantization.unwrap_or(Quantization::None),
        token: None,
        timeout: spec.timeout(),
    };
    Ok(ServedReward { path, config })
}

/// Whether a run of processes starts a process for this reward.
pub(crate) fn is_served(spec: &RewardSpec) -> bool {
    spec.kind == "model" && spec.path.is_some() && spec.placement != Some(Placement::Colocated)
}

/// The heartbeat report of a reward server.
struct RewardReport {
    serves: (String, ModelServer),
}

impl WorkerReport for RewardReport {
    fn doing(&self) -> String {
        format!("serves reward `{}`", self.serves.0)
    }

    fn progress(&self) -> Option<Progress> {
        None
    }

    fn take_loads(&self) -> Vec<(String, LoadCounts)> {
        Vec::new()
    }

    fn serves(&self) -> Option<(String, ModelServer)> {
        Some(self.serves.clone())
    }
}
