//! A run as an island: it joins the coordinator of its recipe, and exchanges outer gradients between its training steps.
//!
//! ```text
//! RUN_DIR/island/run       the id of the run, made once
//! RUN_DIR/island/answers/  answers of the coordinator that a resume applies again
//! ```
//!
//! Invariant: an exchange reads and replaces the trained values between the updates of a step and the publication of its version.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use islands::coordinator::{JoinAnswer, new_id};
use islands::island::{IslandReport, saved_run};
use islands::terms::fragment_ends;
use islands::{CoordinatorAddress, CoordinatorClient, Island, IslandError, IslandSchedule, IslandTerms};
use model::ParameterSpec;
use trainer::{ExchangeReport, Learner, OuterExchange, TrainerError};
use trajectory::PolicyVersion;

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::schema::IslandSection;
use crate::report::Report;
use crate::run_dir::{RunDir, replace};
use crate::serve::token;
use crate::trainer_progress::{TrainerPhase, TrainerProgress};

/// The island of a run.
#[derive(Debug)]
pub(crate) struct RunIsland {
    island: Island,
    /// Where the run has its checkpoints.
    checkpoints: PathBuf,
    report: Arc<Report>,
    progress: Arc<TrainerProgress>,
}

/// What the island of a run is made of.
pub(crate) struct IslandSetup<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) section: &'a IslandSection,
    pub(crate) run_dir: &'a RunDir,
    pub(crate) report: &'a Arc<Report>,
    /// The phase of the trainer's thread.
    pub(crate) progress: &'a Arc<TrainerProgress>,
    /// Ends a wait for the answer of the coordinator.
    pub(crate) stop: Arc<AtomicBool>,
}

impl IslandSetup<'_> {
    /// Joins, and replaces the trained values of `learner` by the newest outer weights.
    ///
    /// # Errors
    /// A refusal of the coordinator, no answer before the deadline, or a coordinator that waits longer than the run.
    pub(crate) fn join(&self, learner: &mut Learner) -> Result<RunIsland, Failure> {
        let (client, terms) = (self.client(&self.run_id()?)?, self.terms(learner)?);
        let mut values = learner.trained_values()?;
        let joined = Island::join(client, terms, self.schedule(), self.answers(), 0, &mut values)?;
        let (island, answer) = joined;
        self.check_deadline(&island, &answer)?;
        learner.set_trained_values(&values)?;
        let JoinAnswer { round, islands, .. } = answer;
        self.report.note(&format!("joined as island {}: round {round}, {islands} live islands", self.name()));
        Ok(self.of(island))
    }

    /// Comes back with the state of a checkpoint.
    ///
    /// # Errors
    /// A checkpoint without a state, or as [`Self::join`].
    pub(crate) fn resume(&self, learner: &Learner, state: Option<&[u8]>) -> Result<RunIsland, Failure> {
        let state = state.ok_or_else(|| IslandError::State { reason: "is not there".to_owned() })?;
        // The directory of a run that an archive has restored has no id.
        let run = saved_run(state).map_or_else(|| self.run_id(), Ok)?;
        let (client, terms) = (self.client(&run)?, self.terms(learner)?);
        let (island, answer) = Island::resume(client, terms, self.schedule(), self.answers(), state)?;
        self.check_deadline(&island, &answer)?;
        Ok(self.of(island))
    }

    /// Refuses a coordinator whose rounds may be open for longer than the run waits.
    fn check_deadline(&self, island: &Island, answer: &JoinAnswer) -> Result<(), Failure> {
        let (deadline_s, wait_s) = (answer.deadline_s, self.recipe.deadlines.wait_s);
        if deadline_s < wait_s {
            return Ok(());
        }
        island.client().leave()?;
        Err(Failure::Argument(format!(
            "the coordinator at {} waits up to {deadline_s} s for islands that are late, and `deadlines.wait_s` is {wait_s}: \
             raise it, or start the coordinator with a shorter `--deadline`",
            self.section.url
        )))
    }

    fn of(&self, island: Island) -> RunIsland {
        RunIsland {
            island: island.stopped_by(Arc::clone(&self.stop)),
            checkpoints: self.run_dir.checkpoints(),
            report: Arc::clone(self.report),
            progress: Arc::clone(self.progress),
        }
    }

    fn directory(&self) -> PathBuf {
        self.run_dir.path().join("island")
    }

    fn answers(&self) -> PathBuf {
        self.directory().join("answers")
    }

    fn name(&self) -> String {
        let directory = self.run_dir.path().file_name().map(|name| name.to_string_lossy().into_owned());
        self.section.name.clone().or(directory).unwrap_or_else(|| self.recipe.name.clone())
    }

    /// The id of the run, which is made at its first start.
    fn run_id(&self) -> Result<String, Failure> {
        let (directory, path) = (self.directory(), self.directory().join("run"));
        let system = |what: &str, path: &Path| {
            let what = format!("{what} {}", path.display());
            move |source| Failure::System { what, source }
        };
        if path.exists() {
            return token(&path);
        }
        std::fs::create_dir_all(&directory).map_err(system("make", &directory))?;
        let id = new_id();
        replace(&path, id.as_bytes()).map_err(system("write", &path))?;
        Ok(id)
    }

    fn client(&self, run: &str) -> Result<CoordinatorClient, Failure> {
        let IslandSection { url, token_file, tls_ca, .. } = self.section;
        Ok(CoordinatorClient::new(CoordinatorAddress {
            url: url.clone(),
            token: token_file.as_deref().map(token).transpose()?,
            roots: tls_ca.clone(),
            island: self.name(),
            run: run.to_owned(),
            wait: self.recipe.wait(),
        })?)
    }

    fn schedule(&self) -> IslandSchedule {
        let IslandSection { overlap_steps, local_weight, .. } = self.section;
        IslandSchedule { overlap_steps: *overlap_steps, local_weight: *local_weight as f32 }
    }

    /// What all islands must have in common.
    fn terms(&self, learner: &Learner) -> Result<IslandTerms, Failure> {
        let lens: Vec<usize> = learner.trained().iter().map(ParameterSpec::len).collect();
        Ok(IslandTerms {
            model: digest(learner)?,
            local_steps: self.section.steps,
            compression: self.section.compression,
            ends: fragment_ends(&lens, self.section.fragments),
        })
    }
}

impl RunIsland {
    /// Its connection, to leave with when the run ends.
    pub(crate) fn client(&self) -> Arc<CoordinatorClient> {
        Arc::clone(self.island.client())
    }
}

impl OuterExchange for RunIsland {
    fn after_updates(
        &mut self,
        version: PolicyVersion,
        learner: &mut Learner,
    ) -> Result<Option<ExchangeReport>, TrainerError> {
        let failed = |error: IslandError| TrainerError::Exchange { reason: error.to_string() };
        if !self.island.is_due(version.0) {
            return Ok(None);
        }
        let mut values = learner.trained_values()?;
        self.progress.enter(TrainerPhase::Exchange);
        let report = self.island.after_step(version.0, &mut values).map_err(failed);
        self.progress.enter(TrainerPhase::Step);
        let Some(IslandReport { round, islands, bytes, wait_s, norm, is_late, is_replaced }) = report? else {
            return Ok(None);
        };
        learner.set_trained_values(&values)?;
        if is_late {
            self.report.note(&format!(
                "step {}: the outer gradient came late and is in no round; it is added to the next one, unless the one before came \
                 late too; training continues from the outer weights of round {round}; if this repeats, start the coordinator \
                 with a longer `--deadline`",
                version.0
            ));
        }
        if is_replaced {
            self.report.note(&format!(
                "step {}: the outer update is kept no more, or leads to other outer weights than those of the coordinator; training \
                 continues from its outer weights of round {round}",
                version.0
            ));
        }
        // A resume goes back to the checkpoint before the last at most, if no step is named.
        let checkpoints = trainer::checkpoint::list(&self.checkpoints);
        if let [.., before, _] = checkpoints[..] {
            self.island.forget_through(before.0).map_err(failed)?;
        }
        let (sent_bytes, received_bytes, gradient_norm) = (bytes.sent, bytes.received, norm);
        let report =
            ExchangeReport { round, islands, sent_bytes, received_bytes, wait_s, gradient_norm, is_late };
        Ok(Some(report))
    }

    fn state(&self) -> Vec<u8> {
        self.island.state()
    }
}

/// Digest of what islands must have in common of their models: the configuration, the trained tensors, and the frozen weights under
/// an adapter.
fn digest(learner: &Learner) -> Result<String, Failure> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(learner.model().to_json().to_string().as_bytes());
    for spec in learner.trained() {
        hasher.update(format!("\n{} {:?}", spec.name, spec.shape).as_bytes());
    }
    if let Some(adapter) = learner.adapter() {
        hasher.update(format!("\nscale {}", adapter.config().scale()).as_bytes());
        match learner.adapted() {
            Some(policy) => hasher.update(policy.base().digest().as_bytes()),
            None => {
                let base = adapter.base_parameters(&*learner.parameters()?);
                hasher.update(bytemuck::cast_slice(base.values()))
            }
        };
    }
    Ok(hasher.finalize().to_hex().to_string())
}
