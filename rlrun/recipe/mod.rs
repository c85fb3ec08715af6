//! The recipe: one TOML file that says everything about a run.
//!
//! Invariant: a [`Recipe`] has passed every check that needs no model and no data, and every value knows where it was
//! written. Loading a recipe's [`resolved_toml`](Recipe::resolved_toml) gives an equal recipe. Nothing here opens a
//! model, a dataset or a network connection.
//!
//! Layers, last wins: defaults, files named by `extends`, the recipe, variables `RLRUN__SECTION__KEY`, `--set`.

mod adapted;
mod algorithm;
mod checks;
mod curation;
pub(crate) mod decode;
mod diagnostic;
mod elements;
pub(crate) mod endpoint;
mod engines;
mod environment;
mod eval;
mod island;
mod layers;
mod log;
pub(crate) mod manual;
pub(crate) mod peers;
mod placement;
mod quantized_base;
mod ranges;
mod resolved;
pub(crate) mod resume;
mod rewards;
pub mod schema;
mod source;
mod supervised;
mod training;
pub mod words;

use std::path::{Path, PathBuf};

use ::environments::EnvironmentSpec;
use ::rewards::RewardSpec;
pub use diagnostic::{Diagnostic, Place};
pub use eval::DEFAULT_SET;
pub use layers::{Origin, Origins};
pub(crate) use placement::WITHOUT_CUDA;
pub use resume::{Change, Resumption};
use schema::{
    AlgorithmSection, ArithmeticSection, BufferSection, CheckpointSection, CriticSection, CurationSection,
    DashboardSection, Deadlines, EndpointSection, Eval, IslandSection, Log, Lora, PlacementSection,
    RandomModel, Rollout, SeedsSection, Supervised, TrainerSection, Warmup, Weights,
};
pub use source::Layer;
use words::{ModelDtype, Overlong, Reduction};

use crate::program::Program;

/// A checked recipe. Paths in it are absolute.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// Name of the run and of its directory.
    pub name: String,
    /// Seed of everything random.
    pub seed: u64,
    /// The policy.
    pub model: Model,
    /// The number format on a device.
    pub dtype: ModelDtype,
    /// Order of the sums that tensor-parallel ranks would share.
    pub reduction: Reduction,
    /// The tasks.
    pub data: Data,
    /// Supervised warm-up; only with generated tasks, `steps` at least 1.
    pub warmup: Option<Warmup>,
    /// Training without sampling, instead of reinforcement learning.
    pub supervised: Option<Supervised>,
    /// How trajectories are sampled.
    pub rollout: Rollout,
    /// What the policy acts in; paths in it are absolute.
    pub environment: Option<EnvironmentSpec>,
    /// At least one; names are filled in and unique.
    pub rewards: Vec<RewardSpec>,
    /// Which tasks are drawn and which groups are trained on.
    pub curation: CurationSection,
    /// The buffer between rollout and trainer.
    pub buffer: BufferSection,
    /// Advantages and loss.
    pub algorithm: AlgorithmSection,
    /// What the advantages of an actor-critic algorithm are measured against.
    pub critic: Option<CriticSection>,
    /// The update.
    pub trainer: TrainerSection,
    /// What of the policy is updated, if not all of it; the path in it is absolute.
    pub lora: Option<Lora>,
    /// Exchange of outer gradients, if the run is an island; paths in it are absolute.
    pub island: Option<IslandSection>,
    /// The policy as an endpoint; the path in it is absolute.
    pub endpoint: EndpointSection,
    /// Which answers are correct, by a named reward if anything says so, and how accuracy is measured; paths are absolute.
    pub eval: Eval,
    /// The checkpoints.
    pub checkpoint: CheckpointSection,
    /// How versions get to samplers.
    pub weights: Weights,
    /// Records in addition to the metrics.
    pub log: Log,
    /// The live page of the run; the path in it is absolute.
    pub dashboard: DashboardSection,
    /// How long one role waits for another.
    pub deadlines: Deadlines,
    /// Devices, processes and cores of each role.
    pub placement: PlacementSection,
}

/// Where the policy comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Model {
    /// An existing Hugging Face model directory, or a GGUF file.
    Path(PathBuf),
    /// A new character-level model.
    Random(RandomModel),
}

/// The tasks and how long their prompts may be.
#[derive(Clone, Debug, PartialEq)]
pub struct Data {
    /// Where tasks come from.
    pub source: DataSource,
    /// System message put before every prompt.
    pub system_prompt: Option<String>,
    /// Whether text prompts are rendered with the chat template of the model.
    pub chat: bool,
    /// Longest prompt in tokens.
    pub max_prompt_length: usize,
    /// What to do with longer prompts.
    pub overlong_prompts: Overlong,
    /// Whether tasks come in a new random order in every epoch.
    pub shuffle: bool,
}

/// Where tasks come from.
#[derive(Clone, Debug, PartialEq)]
pub enum DataSource {
    /// Rows of files.
    Files(Files),
    /// Generated additions or questions.
    Arithmetic(ArithmeticSection),
    /// Numbers alone, for an environment that makes its own tasks.
    Seeds(SeedsSection),
}

/// Datasets in files, and how a row becomes a task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Files {
    /// Existing files or directories to train on, at least one.
    pub train: Vec<PathBuf>,
    /// Existing files or directories of held-out tasks.
    pub eval: Vec<PathBuf>,
    /// Column of the prompt, if named.
    pub prompt_column: Option<String>,
    /// Column of the answer, if named.
    pub answer_column: Option<String>,
    /// Prompt with `{column}` placeholders.
    pub prompt_template: Option<String>,
}

impl DataSource {
    /// Whether tasks have generated demonstrations, and prompts that are no messages.
    #[must_use]
    pub fn is_additions(&self) -> bool {
        matches!(self, Self::Arithmetic(arithmetic) if arithmetic.questions.is_empty())
    }

    /// Whether tasks are made and not read, so that they have no columns to name.
    #[must_use]
    pub fn is_generated(&self) -> bool {
        matches!(self, Self::Arithmetic(_) | Self::Seeds(_))
    }
}

impl Recipe {
    /// Reads, merges and checks a recipe.
    ///
    /// `sets` are `section.key=value` arguments; of the variables of `program`, those that do not start with `RLRUN__` are
    /// ignored.
    ///
    /// # Errors
    /// Everything found wrong, in the order found: files that cannot be read or are not TOML, circles of `extends`,
    /// unknown keys, wrong types, values out of range, keys that contradict each other, paths that do not exist.
    pub fn load(path: &Path, sets: &[String], program: &Program) -> Result<(Self, Origins), Vec<Diagnostic>> {
        let sources = layers::read(path, sets, program.environment().as_ref().clone())?;
        let (table, origins) = layers::merge(&sources, &[])?;
        let raw = decode::decode(table, &sources)?;
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let recipe = checks::check(raw, stem, &origins, program)?;
        Ok((recipe, origins))
    }

    /// The recipe with every value spelled out, each with its origin as a comment.
    #[must_use]
    pub fn resolved_toml(&self, origins: &Origins) -> String {
        resolved::write(self, origins)
    }

    /// Every value that has an effect, by section.
    #[must_use]
    pub fn values(&self) -> serde_json::Map<String, serde_json::Value> {
        match serde_json::to_value(resolved::table(self)) {
            Ok(serde_json::Value::Object(values)) => values,
            // A table of TOML is an object of JSON.
            _ => serde_json::Map::new(),
        }
    }

    /// Whether there are held-out tasks to measure accuracy on.
    #[must_use]
    pub fn has_eval_tasks(&self) -> bool {
        let default = match &self.data.source {
            DataSource::Files(files) => !files.eval.is_empty(),
            DataSource::Arithmetic(arithmetic) => arithmetic.eval_tasks > 0,
            DataSource::Seeds(seeds) => seeds.eval_tasks > 0,
        };
        default || !self.eval.sets.is_empty()
    }
}

#[cfg(test)]
mod tests;
