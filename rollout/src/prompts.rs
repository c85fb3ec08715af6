//! Tasks as tokens: every prompt of a dataset is encoded, and its length checked, before any work is done.

use std::sync::Arc;

use model::directory::ModelDirectory;
use trajectory::{GroupId, Task, TaskId};

use crate::RolloutError;
use crate::tasks::{TaskOrder, TaskStream};

/// What happens to a prompt that is longer than allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overlong {
    /// The run does not start.
    #[default]
    Error,
    /// The task is left out, and counted.
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
        let count = tasks.len();
        let mut kept = Vec::with_capacity(count);
        let mut prompts: Vec<Arc<[u32]>> = Vec::with_capacity(count);
        for task in tasks {
            let prompt = directory.encode_prompt(&task.prompt)?;
            if prompt.len() <= max_length {
                prompts.push(prompt.into());
                kept.push(task);
            } else if overlong == Overlong::Error {
                return Err(RolloutError::OverlongTask { task: task.id, tokens: prompt.len(), max_length });
            }
        }
        let dropped = count - kept.len();
        if kept.is_empty() {
            return Err(RolloutError::NothingLeft { dropped, max_length });
        }
        let tasks = kept.iter().cloned().map(Arc::new).collect();
        Ok(Self { stream: TaskStream::new(renumbered(kept), order)?, prompts, tasks, dropped })
    }

    /// The task of a group, with its prompt.
    #[must_use]
    pub fn of(&self, group: GroupId) -> (&Arc<Task>, &Arc<[u32]>) {
        let place = self.stream.task(group).id.0 as usize;
        (&self.tasks[place], &self.prompts[place])
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

    /// Tasks left out because their prompts are too long.
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

/// The stream orders places; the rows that they came from stay in the tasks.
fn renumbered(mut tasks: Vec<Task>) -> Vec<Task> {
    for (place, task) in tasks.iter_mut().enumerate() {
        task.id = TaskId(place as u64);
    }
    tasks
}
