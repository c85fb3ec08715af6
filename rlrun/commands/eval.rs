//! `rlrun eval`: the accuracy of a trained model.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use model::SharedCores;
use rollout::evaluate::EvaluationObserver;

use super::checkpoint_paths::{model_of, network_of};
use super::{load, scratch_directory};
use crate::args::EvalArgs;
use crate::evaluation::{Evaluated, EvaluationRequest, Which};
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
    // A file that cannot be written is found before the work.
    let answers = args.answers.as_deref().map(|path| Ok::<_, Failure>((path, create(path)?))).transpose()?;
    // An interrupt ends the process: there is nothing to save.
    let (progress, stop) = (Arc::new(TrainerProgress::default()), AtomicBool::new(false));
    let _watchdog = progress.watch(&recipe, |text| eprintln!("{text}"))?;
    let directory = recipe.opened(&model_of(&target, None)?)?;
    let (runtime, scratch) = (RewardRuntime::new(program, &SharedCores::all())?, scratch_directory()?);
    let prepared = Prepared::new(&recipe, &directory, &runtime, scratch.path())?;
    let prepared = prepared.serving_agents(&recipe, &directory, &runtime)?;
    progress.set_rewards(prepared.rewards.clone());
    let network = network_of(&directory, &recipe.evaluate_on()?)?;
    progress.enter(TrainerPhase::Evaluation);
    let watch = EvaluationObserver { stop: &stop, progress: progress.evaluation(), show: &|_| {} };
    let (which, directory, runtime, watch) = (Which::All, &directory, &runtime, &watch);
    let evaluated =
        prepared.evaluate(&recipe, EvaluationRequest { which, network, directory, runtime, watch })?;
    let Some(evaluated) = evaluated else {
        let what = format!("{} has no held-out tasks; name some under data.eval", args.recipe.display());
        return Err(Failure::NotThere(what));
    };
    if let Some((path, file)) = answers {
        write_answers(file, &evaluated).map_err(|source| not_written(path, source))?;
    }
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

fn create(path: &Path) -> Result<File, Failure> {
    File::create(path).map_err(|source| not_written(path, source))
}

fn not_written(path: &Path, source: std::io::Error) -> Failure {
    Failure::System { what: format!("write the answers to {}", path.display()), source }
}

/// Writes one line per answer.
fn write_answers(file: File, evaluated: &Evaluated) -> std::io::Result<()> {
    let mut lines = BufWriter::new(file);
    for answer in evaluated.answers() {
        writeln!(lines, "{answer}")?;
    }
    lines.flush()
}
