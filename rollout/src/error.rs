//! Errors of the rollout worker.

use model::ModelError;
use trajectory::{GroupId, PolicyVersion, TaskId};

use crate::curation::Exhausted;

/// Why generation or scoring failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RolloutError {
    /// A prompt has no tokens.
    #[error("the prompt of {group} has no tokens; a model continues at least one")]
    EmptyPrompt {
        /// Whose prompt.
        group: GroupId,
    },
    /// Prompt and completion do not fit the model.
    #[error(
        "the prompt of {group} has {prompt} tokens; with {completion} of completion that is more than the {limit}; lower rollout.max_completion_length or data.max_prompt_length"
    )]
    PromptTooLong {
        /// Whose prompt.
        group: GroupId,
        /// Prompt tokens.
        prompt: usize,
        /// Longest completion.
        completion: usize,
        /// What limits it; see [`model::Config::context_limit`].
        limit: String,
    },
    /// The longest prompt of the dataset does not fit the model.
    #[error(
        "the longest prompt has {prompt} tokens; with {completion} of completion that is more than the {limit}; lower rollout.max_completion_length or data.max_prompt_length"
    )]
    ContextTooShort {
        /// Tokens of the longest prompt.
        prompt: usize,
        /// Longest completion.
        completion: usize,
        /// What limits it; see [`model::Config::context_limit`].
        limit: String,
    },
    /// A rollout engine failed, or cannot be reached.
    #[error("the rollout engine {engine} {evidence}; {remedy}")]
    Sampler {
        /// Which engine: its address, for one in another process.
        engine: String,
        /// What it answered or did.
        evidence: String,
        /// What to do.
        remedy: String,
    },
    /// An environment adds messages where nothing encodes them.
    #[error(
        "environment {environment} adds messages to its episodes, and the episode driver has no encoder for them; set \
         `EpisodeEnvironment::encoder`"
    )]
    NoEncoder {
        /// Its name.
        environment: String,
    },
    /// An episode begins with nothing that the policy could continue.
    #[error(
        "task {} has no prompt, and environment {environment} begins its episode with no message; give tasks a prompt \
         (`data.seeds.prompt`, or a prompt column)", task.0
    )]
    NoOpening {
        /// The task.
        task: trajectory::TaskId,
        /// Name of the environment.
        environment: String,
    },
    /// A task names an environment that there is not.
    #[error("the column `environment` of task {} is {name}; the recipe names `{known}`", task.0)]
    NoEnvironment {
        /// The task.
        task: trajectory::TaskId,
        /// What the column has.
        name: String,
        /// The environments of the recipe.
        known: String,
    },
    /// A chat template that cannot continue a conversation.
    #[error(
        "the chat template {} leaves out the assistant's messages, so nothing can follow a completion; use a template that \
         renders them", path.display()
    )]
    Template {
        /// Where the template is.
        path: std::path::PathBuf,
    },
    /// Agents have no greedy completion to be compared with.
    #[error(
        "the algorithm compares with a greedy episode, which the agents of environment `{environment}` do not play; choose \
         another algorithm"
    )]
    NoGreedyAgent {
        /// Its name.
        environment: String,
    },
    /// An environment whose loop is elsewhere has no endpoint that its agents could call.
    #[error(
        "the agents of environment `{environment}` need an endpoint; it is served in training runs alone"
    )]
    NoEndpoint {
        /// Its name.
        environment: String,
    },
    /// Alternatives of sampled tokens were asked of an engine that does not report them.
    #[error(
        "an engine on a GPU reports the sampled tokens alone; ask for no alternatives (top_logprobs = 0)"
    )]
    NoAlternatives,
    /// A request names an adapter that the engine does not serve.
    #[error("the request names adapter {adapter}, which is none of the {served} that the engine serves")]
    UnknownAdapter {
        /// Its index.
        adapter: usize,
        /// Number of adapters.
        served: usize,
    },
    /// Factors for an adapter slot are of another model.
    #[error(
        "the factors for adapter slot {slot} are of another model: the values {weight:?} are no matrix of the one that is \
         served; serve adapters of that model"
    )]
    OtherModel {
        /// The slot.
        slot: usize,
        /// Values of the flat parameters that a pair of factors is of.
        weight: std::ops::Range<usize>,
    },
    /// An older version was to be served in place of a newer one, or other weights under the same version.
    #[error("{what} serves version {served} and does not take {asked} for it; publish a newer version")]
    OlderVersion {
        /// What serves it.
        what: String,
        /// The version that is served.
        served: PolicyVersion,
        /// The version that was asked for.
        asked: PolicyVersion,
    },
    /// More adapters than an engine serves.
    #[error("the engine has {most} adapters, which is the limit; free some that are not needed")]
    TooManyAdapters {
        /// Most adapters.
        most: usize,
    },
    /// Adapters and weights are changed faster than the engine takes them.
    #[error("{waiting} changes of adapters wait for the sampler, which is the limit; try again later")]
    TooManyChanges {
        /// Changes that wait.
        waiting: usize,
    },
    /// A device failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// A request does not fit the cache.
    #[error(
        "the completions of one prompt may need {needed} positions of the key-value cache, there are {positions}; raise \
         rollout.kv_cache_tokens, or lower rollout.group_size or rollout.max_completion_length"
    )]
    CacheTooSmall {
        /// Positions needed.
        needed: usize,
        /// Positions free.
        positions: usize,
    },
    /// A prompt of the dataset is too long.
    #[error(
        "the prompt of dataset row {} has {tokens} tokens, data.max_prompt_length is {max_length}; raise it, or set \
         data.overlong_prompts = \"drop\"", task.0
    )]
    OverlongTask {
        /// The row.
        task: TaskId,
        /// Its tokens.
        tokens: usize,
        /// What is allowed.
        max_length: usize,
    },
    /// Every prompt of the dataset is too long.
    #[error("all {dropped} prompts are longer than data.max_prompt_length = {max_length} tokens; raise it")]
    NothingLeft {
        /// How many.
        dropped: usize,
        /// What is allowed.
        max_length: usize,
    },
    /// Training was asked to learn from greedy choices.
    #[error(
        "rollout.temperature is {temperature}: a greedy choice has no log-probability to learn from; use 1.0"
    )]
    GreedyTraining {
        /// The temperature.
        temperature: f32,
    },
    /// The text of an interruption cannot be inserted.
    #[error("rollout.interrupt_text {reason}")]
    Interruption {
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// Curation has left no task to draw.
    #[error(
        "no task is left to draw: of {} tasks, {} pass so often that curation.max_pass_rate retires them, and {} never \
         passed within the trajectories of curation.filter_after; raise them, take in more tasks, or set trainer.steps to \
         fewer steps", .0.tasks, .0.retired, .0.unlearnable
    )]
    Exhausted(Exhausted),
    /// The history of the tasks cannot be written.
    #[error("what became of a group cannot be written down: {0}")]
    Outcome(Box<dyn std::error::Error + Send + Sync>),
    /// The network could not compute.
    #[error("the network failed: {0}")]
    Compute(#[from] candle_core::Error),
    /// Weights are not where the engine computes.
    #[error("the weights are {weights}, the engine computes {engine}; prepare them with its own `ServeOn`")]
    Misplaced {
        /// Where the weights are.
        weights: &'static str,
        /// Where the engine computes.
        engine: &'static str,
    },
    /// The files of a model could not be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The engine made a sample that cannot be one.
    #[error("trajectory {index} of {group} is broken: {source}")]
    Sample {
        /// The group.
        group: GroupId,
        /// Which trajectory.
        index: u32,
        /// What is wrong.
        source: trajectory::SampleError,
    },
    /// A reward ended the run, as the recipe asks.
    #[error(transparent)]
    Reward(#[from] rewards::RewardError),
    /// The tasks could not be read.
    #[error(transparent)]
    Task(#[from] crate::tasks::TaskError),
    /// The buffer failed.
    #[error(transparent)]
    Buffer(#[from] buffer::BufferError),
    /// The weights could not be received.
    #[error(transparent)]
    Weights(#[from] weights::WeightsError),
    /// A wait ran over its deadline.
    #[error("{who} waited {seconds:.0} s for {whom}; raise deadlines.wait_s if that is expected")]
    Deadline {
        /// The role that waited.
        who: &'static str,
        /// What it waited for.
        whom: String,
        /// How long.
        seconds: f64,
    },
    /// The trainer keeps the device that they share.
    #[error(transparent)]
    Turn(#[from] model::TurnTimeout),
    /// A part of the worker ended without saying why.
    #[error("{who} ended unexpectedly")]
    Ended {
        /// Which part.
        who: &'static str,
    },
}

impl RolloutError {
    /// Whether the recipe, the model or the data are to blame, rather than what happened during the run.
    #[must_use]
    pub fn is_input(&self) -> bool {
        if let Self::Model(error) = self {
            return !matches!(error, ModelError::SamplerRank { .. });
        }
        matches!(
            self,
            Self::EmptyPrompt { .. }
                | Self::PromptTooLong { .. }
                | Self::ContextTooShort { .. }
                | Self::CacheTooSmall { .. }
                | Self::OverlongTask { .. }
                | Self::NothingLeft { .. }
                | Self::GreedyTraining { .. }
                | Self::Interruption { .. }
                | Self::NoEncoder { .. }
                | Self::NoOpening { .. }
                | Self::NoEnvironment { .. }
                | Self::Template { .. }
                | Self::Task(_)
        )
    }
}
