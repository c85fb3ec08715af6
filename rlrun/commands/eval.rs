//! `rlrun eval`: the accuracy of a trained model.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use model::SharedCores;
use rollout::Network;
use rollout::evaluate::EvaluationObserver;

use super::checkpoint_paths::model_of;
use super::{load, scratch_directory};
use crate::args::EvalArgs;
use crate::evaluation::{EvaluationRequest, Which};
use crate::failure::Failure;
use crate::huggingface::{FetchScope, HuggingFace};
use crate::prepare::{Prepared, RewardRuntime};
use crate::program::Program;
use crate::trainer_progress::{TrainerPhase, TrainerProgress};

/// Evaluates a model on the held-out tasks of a recipe.
pub(super) fn eval(args: &EvalArgs, program: &Program) -> Result<String, Failure> {
    let mut sets = args.sets.clone();
    sets.extend(args.samples.map(|samples| format!("eval.samples={samples}")));
    sets.extend(args.temperature.map(|temperature| format!("eval.temperature={temperature}")));
    sets.extend(args.tasks.map(|tasks| format!("eval.tasks={tasks}")));
    let (recipe, _) = load(&args.recipe, &sets, program)?;
    let hub = HuggingFace::of(program);
    let (recipe, target) = (hub.fetched(&recipe, FetchScope::Data)?, hub.model(&args.target)?);
    // An interrupt ends the process: there is nothing to save.
    let (progress, stop) = (Arc::new(TrainerProgress::default()), AtomicBool::new(false));
    let _watchdog = progress.watch(&recipe, |text| eprintln!("{text}"))?;
    let directory = recipe.opened(&model_of(&target, None)?)?;
    let (runtime, scratch) = (RewardRuntime::new(program, &SharedCores::all())?, scratch_directory()?);
    let prepared = Prepared::new(&recipe, &directory, &runtime, scratch.path())?;
    progress.set_rewards(prepared.rewards.clone());
    let parameters = directory.load_parameters()?;
    let network = Network::new(&recipe.evaluate_on()?, directory.config(), &parameters)?;
    progress.enter(TrainerPhase::Evaluation);
    let watch = EvaluationObserver { stop: &stop, progress: progress.evaluation(), show: &|_| {} };
    let (which, directory, runtime, watch) = (Which::All, &directory, &runtime, &watch);
    let evaluated =
        prepared.evaluate(&recipe, EvaluationRequest { which, network, directory, runtime, watch })?;
    let Some(evaluated) = evaluated else {
        let what = format!("{} has no held-out tasks; name some under data.eval", args.recipe.display());
        return Err(Failure::NotThere(what));
    };
    if let Some(why) = evaluated.diagnosis() {
        return Err(Failure::Unscored(why));
    }
    let mut lines = evaluated.lines();
    if let Some(line) = lines.last_mut() {
        *line += &format!(", {} tokens sampled", evaluated.tokens());
    }
    lines.extend(evaluated.failures());
    Ok(lines.join("\n"))
}
