//! The plan of a recipe before it runs: batch arithmetic, and in [`memory`] the memory that it needs, in [`traffic`]
//! what ranks of the trainer send, in [`sampler_ranks`] what those of a sampler have and send, in [`search`] the fastest settings.
//!
//! Invariant: counts follow from the recipe alone and are exact; bytes are estimates that name what they count. No weights
//! and no dataset are read.

pub mod islands;
mod layouts;
pub mod memory;
pub mod sampler_ranks;
pub mod search;
pub mod traffic;

use model::Config;
use trainer::ParallelConfig;

use crate::failure::Failure;
use crate::recipe::words::OnUpdate;
use crate::recipe::{DataSource, Recipe};

/// What a step consists of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchPlan {
    /// Groups per training step, `B`; without sampling, demonstrations or pairs.
    pub groups: u64,
    /// Trajectories per training step; each role of an environment is one, and each completion of a pair.
    pub trajectories: u64,
    /// Most tokens per training step, prompts counted once per trajectory.
    pub max_tokens: u64,
    /// Groups that may be on their way at the same time: (staleness bound + 1) * B.
    pub slots: u64,
    /// Optimizer updates per training step.
    pub updates: u64,
    /// Groups of the whole run.
    pub total_groups: u64,
}

impl BatchPlan {
    /// The batch arithmetic of a recipe. Counts saturate.
    #[must_use]
    pub fn of(recipe: &Recipe) -> Self {
        let (groups, of_group) = match &recipe.supervised {
            Some(supervised) => (supervised.batch as u64, if supervised.kind.has_pairs() { 2 } else { 1 }),
            None => {
                let (size, roles) = (recipe.rollout.group_size as u64, recipe.known_roles() as u64);
                (recipe.buffer.batch_groups as u64, size.saturating_mul(roles))
            }
        };
        let trajectories = groups.saturating_mul(of_group);
        Self {
            groups,
            trajectories,
            max_tokens: trajectories.saturating_mul(longest_sequence(recipe)),
            slots: recipe.buffer.max_staleness.saturating_add(1).saturating_mul(groups),
            updates: (recipe.trainer.minibatches as u64).saturating_mul(recipe.trainer.epochs as u64),
            total_groups: groups.saturating_mul(recipe.trainer.steps),
        }
    }

    /// Passes over `tasks` training tasks that the run makes.
    #[must_use]
    pub fn epochs(&self, tasks: u64) -> f64 {
        self.total_groups as f64 / tasks.max(1) as f64
    }
}

/// The batch arithmetic in words.
#[must_use]
pub fn describe(recipe: &Recipe) -> String {
    let plan = BatchPlan::of(recipe);
    if let Some(supervised) = &recipe.supervised {
        let (steps, batch, what) = (recipe.trainer.steps, supervised.batch, supervised.kind.as_str());
        let (name, seed, longest) = (&recipe.name, recipe.seed, longest_sequence(recipe));
        return format!(
            "run           {name}, {steps} steps, seed {seed}\n\
             step          {batch} demonstrations or pairs ({what})\n\
             sequence      at most {longest} tokens"
        );
    }
    let roles = match recipe.known_roles() {
        1 => String::new(),
        roles => format!(" x {roles} roles"),
    };
    let mut lines = vec![
        format!("run           {}, {} steps, seed {}", recipe.name, recipe.trainer.steps, recipe.seed),
        format!(
            "step          {} groups x {}{} = {} trajectories, at most {} tokens",
            plan.groups, recipe.rollout.group_size, roles, plan.trajectories, plan.max_tokens
        ),
        format!(
            "updates       {} per step ({} minibatches x {} epochs)",
            plan.updates, recipe.trainer.minibatches, recipe.trainer.epochs
        ),
        format!(
            "staleness     at most {} versions; {} slots = ({} + 1) x {} groups under way",
            recipe.buffer.max_staleness, plan.slots, recipe.buffer.max_staleness, plan.groups
        ),
        format!("sequence      at most {} tokens", longest_sequence(recipe)),
    ];
    match &recipe.data.source {
        DataSource::Arithmetic(arithmetic) => lines.push(format!(
            "tasks         {} groups over {} tasks: {:.2} epochs",
            plan.total_groups,
            arithmetic.train_tasks,
            plan.epochs(arithmetic.train_tasks as u64)
        )),
        DataSource::Seeds(seeds) => lines.push(format!(
            "tasks         {} groups over {} tasks of the environment: {:.2} epochs",
            plan.total_groups,
            seeds.train_tasks,
            plan.epochs(seeds.train_tasks as u64)
        )),
        DataSource::Files(files) => {
            let names: Vec<_> = files.train.iter().map(|path| path.display().to_string()).collect();
            lines.push(format!("tasks         {} groups from {}", plan.total_groups, names.join(", ")));
        }
    }
    lines.join("\n")
}

/// Refuses ranks of the trainer or of samplers that cannot share a model of the shape `config`.
///
/// # Errors
/// [`Failure::Argument`] with the numbers that do not divide each other.
pub fn refuse_degrees(recipe: &Recipe, config: &Config) -> Result<(), Failure> {
    if recipe.rollout.tensor > 1 {
        let checked = recipe.sampler_ranks().check(config);
        checked.map_err(|error| Failure::Argument(format!("`rollout.tensor`: {error}")))?;
    }
    let learner = recipe.learner();
    if learner.parallel == ParallelConfig::DATA {
        return Ok(());
    }
    let checked = learner.check_parallel(config, recipe.lora.is_some());
    checked.map_err(|error| Failure::Argument(error.to_string()))
}

/// Where sampler and trainer compute, in words; `None` where nothing is sampled.
#[must_use]
pub fn placement(recipe: &Recipe) -> Option<String> {
    if recipe.supervised.is_some() {
        return None;
    }
    if !recipe.is_colocated() {
        return Some("placement: sampler and trainer work at the same time and share the cores".to_owned());
    }
    let stays = match recipe.placement.memory_mib {
        None => "keeps its optimizer and its weights".to_owned(),
        Some(mib) => {
            format!("keeps of its optimizer and its weights what fits `placement.memory_mib` = {mib}")
        }
    };
    let first = match recipe.rollout.on_update {
        OnUpdate::Drain => "finishes what is in flight, then drops its weights and its cache",
        OnUpdate::Keep | OnUpdate::Recompute => {
            "drops its weights and its cache, and computes again what is in flight"
        }
    };
    Some(format!(
        "placement: sampler and trainer take turns; while the trainer works the sampler {first}; while the sampler works \
         the trainer {stays}"
    ))
}

/// Tokens of the longest prompt with the longest completion, or of the longest episode.
fn longest_sequence(recipe: &Recipe) -> u64 {
    match recipe.environment {
        // The context of the model may be shorter.
        Some(_) => recipe.episode_tokens(usize::MAX) as u64,
        None => {
            (recipe.data.max_prompt_length as u64).saturating_add(recipe.rollout.max_completion_length as u64)
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::recipe::schema::Supervised;
    use crate::recipe::words::SupervisedKind;

    /// A small model.
    pub(super) const SIZES: model::Sizes = model::Sizes {
        vocab_size: 10,
        hidden_size: 8,
        intermediate_size: 16,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 2,
        max_position_embeddings: 64,
    };

    pub(super) fn recipe() -> Recipe {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        let text = "[model.random]\n[data]\nmax_prompt_length = 16\n[data.arithmetic]\n[rollout]\n\
                    max_completion_length = 24\nmax_running = 10\n[[rewards]]\nkind = \"exact\"\n\
                    [trainer]\nsteps = 500\nepochs = 2\nminibatches = 4\nmicrobatch_tokens = 100\n";
        std::fs::write(&path, text).unwrap();
        Recipe::load(&path, &[], &crate::program::Program::default()).unwrap().0
    }

    #[test]
    fn batch_arithmetic_is_exact() {
        let expected = "\
run           r, 500 steps, seed 0
step          32 groups x 8 = 256 trajectories, at most 10240 tokens
updates       8 per step (4 minibatches x 2 epochs)
staleness     at most 4 versions; 160 slots = (4 + 1) x 32 groups under way
sequence      at most 40 tokens
tasks         16000 groups over 8000 tasks: 2.00 epochs";
        assert_eq!(describe(&recipe()), expected);
    }

    #[test]
    fn without_sampling_a_step_has_demonstrations_or_pairs() {
        let mut recipe = recipe();
        for (kind, trajectories) in [(SupervisedKind::Sft, 5), (SupervisedKind::Dpo, 10)] {
            recipe.supervised = Some(Supervised { kind, batch: 5, ..Supervised::default() });
            let plan = BatchPlan::of(&recipe);
            assert_eq!((plan.trajectories, plan.max_tokens), (trajectories, 40 * trajectories));
        }
    }

    fn shipped(name: &str) -> Recipe {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes").join(name);
        Recipe::load(&path, &[], &crate::program::Program::default()).unwrap().0
    }

    #[test]
    fn episodes_count_whole_and_once_for_every_role() {
        let text = describe(&shipped("guess_number.toml"));
        for line in [
            "step          32 groups x 8 = 256 trajectories, at most 76800 tokens",
            "sequence      at most 300 tokens",
        ] {
            assert!(text.lines().any(|other| other == line), "{text}");
        }
        let text = describe(&shipped("selfplay_tictactoe.toml"));
        let line = "step          16 groups x 16 x 2 roles = 512 trajectories, at most 98304 tokens";
        assert!(text.lines().any(|other| other == line), "{text}");
    }
}
