//! Tasks as tokens: every prompt of a dataset is encoded, and its length checked, before the run starts.

use std::num::NonZeroUsize;
use std::sync::Arc;

use model::directory::ModelDirectory;
use trajectory::{GroupId, Task};

use crate::RolloutError;
use crate::tasks::{TaskOrder, TaskStream};

/// What happens to a prompt that is longer than allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overlong {
    /// The run does not start.
    #[default]
    Error,
    /// The task is dropped, and counted.
    Drop,
}

/// The tasks of a dataset with their prompts as tokens, in an endless order.
#[derive(Debug)]
pub struct PromptSet {
    stream: TaskStream,
    /// Prompt tokens, by place in the list of tasks.
    prompts: Vec<Arc<[u32]>>,
    tasks: Vec<Arc<Task>>,
    dropped: usize,
}

impl PromptSet {
    /// Encodes `tasks` for the model of `directory`.
    ///
    /// # Errors
    /// A prompt of more than `max_length` tokens under [`Overlong::Error`], no task left, a prompt that the tokenizer
    /// or the chat template refuses.
    pub fn new(
        tasks: Vec<Task>,
        directory: &ModelDirectory,
        max_length: usize,
        overlong: Overlong,
        order: TaskOrder,
    ) -> Result<Self, RolloutError> {
        let encode = |task: &Task| Ok(directory.encode_prompt(&task.prompt)?);
        Self::encoded(tasks, encode, max_length, overlong, order)
    }

    /// The same with `encode`, which gives the prompt `[P]` of a task. A prompt that its environment writes is empty before.
    ///
    /// # Errors
    /// Those of [`PromptSet::new`] and of `encode`.
    pub fn encoded(
        tasks: Vec<Task>,
        encode: impl Fn(&Task) -> Result<Vec<u32>, RolloutError>,
        max_length: usize,
        overlong: Overlong,
        order: TaskOrder,
    ) -> Result<Self, RolloutError> {
        let count = tasks.len();
        let mut kept: Vec<Arc<Task>> = Vec::with_capacity(count);
        let mut prompts: Vec<Arc<[u32]>> = Vec::with_capacity(count);
        for task in tasks {
            let prompt = encode(&task)?;
            if prompt.len() <= max_length {
                prompts.push(prompt.into());
                kept.push(Arc::new(task));
            } else if overlong == Overlong::Error {
                return Err(RolloutError::OverlongTask { task: task.id, tokens: prompt.len(), max_length });
            }
        }
        let dropped = count - kept.len();
        let Some(len) = NonZeroUsize::new(kept.len()) else {
            return Err(RolloutError::NothingLeft { dropped, max_length });
        };
        Ok(Self { stream: TaskStream::new(len, order), prompts, tasks: kept, dropped })
    }

    /// Tasks with prompts that are tokens already, `[P]` each, for samplers without a tokenizer; `None` without a task.
    #[must_use]
    pub fn from_tokens(tasks: Vec<(Task, Vec<u32>)>, order: TaskOrder) -> Option<Self> {
        let len = NonZeroUsize::new(tasks.len())?;
        let (tasks, prompts) =
            tasks.into_iter().map(|(task, prompt)| (Arc::new(task), Arc::from(prompt))).unzip();
        Some(Self { stream: TaskStream::new(len, order), prompts, tasks, dropped: 0 })
    }

    /// The task of a group, with its prompt.
    #[must_use]
    pub fn of(&self, group: GroupId) -> (&Arc<Task>, &Arc<[u32]>) {
        let place = self.stream.place(group);
        (&self.tasks[place], &self.prompts[place])
    }

    /// A task by its place in the file, dropped tasks not counted.
    ///
    /// # Panics
    /// If there are fewer tasks.
    #[must_use]
    pub fn task(&self, place: usize) -> &Arc<Task> {
        &self.tasks[place]
    }

    /// The prompt `[P]` of a task by its place in the file, dropped tasks not counted.
    ///
    /// # Panics
    /// If there are fewer tasks.
    #[must_use]
    pub fn prompt(&self, place: usize) -> &[u32] {
        &self.prompts[place]
    }

    /// All tasks in file order, with their prompts.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<Task>, &Arc<[u32]>)> {
        self.tasks.iter().zip(&self.prompts)
    }

    /// Number of tasks.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a set without tasks cannot be made")]
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Tasks dropped because their prompts are too long.
    #[must_use]
    pub fn dropped(&self) -> usize {
        self.dropped
    }

    /// Tokens of the longest prompt.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0)
    }
}
