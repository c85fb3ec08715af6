//! One more attempt after a wrong answer: the smallest environment with several turns and a reward per turn.
//!
//! Invariant: it is a function of the task and the completions; it waits for nothing.

use trajectory::{Message, Task};

use crate::{
    Action, BoxFuture, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits, Observation,
};

/// The policy answers until the text equals the answer of the task, or until it has no attempt left. A right answer is
/// worth 1, a wrong one 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    limits: EnvironmentLimits,
    hint: String,
}

impl Retry {
    /// At most `limits.max_turns` turns; `hint` is the message of the user after a wrong answer.
    #[must_use]
    pub fn new(limits: EnvironmentLimits, hint: impl Into<String>) -> Self {
        Self { limits, hint: hint.into() }
    }

    /// The same with `attempts` turns and the other limits as they are by default.
    #[must_use]
    pub fn attempts(attempts: usize, hint: impl Into<String>) -> Self {
        Self::new(EnvironmentLimits { max_turns: attempts.max(1), ..EnvironmentLimits::default() }, hint)
    }
}

impl EnvironmentFactory for Retry {
    fn name(&self) -> &str {
        "retry"
    }

    fn limits(&self) -> EnvironmentLimits {
        self.limits
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(Attempts { hint: self.hint.clone(), answer: None })
    }
}

/// One episode.
#[derive(Debug)]
struct Attempts {
    hint: String,
    answer: Option<String>,
}

impl Environment for Attempts {
    fn reset<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        self.answer.clone_from(&task.answer);
        let evidence = "the task has no answer to compare with; give every row one (data.answer_column)";
        let failed = || EnvironmentError::Failed {
            environment: "retry".to_owned(),
            turn: 0,
            evidence: evidence.to_owned(),
        };
        let opened = self.answer.as_ref().map(|_| Vec::new()).ok_or_else(failed);
        Box::pin(std::future::ready(opened))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        let right = self.answer.as_deref() == Some(action.text.trim());
        let hint = Message::new("user", self.hint.clone());
        let messages = if right { Vec::new() } else { vec![hint] };
        let reward = Some(f64::from(u8::from(right)));
        Box::pin(std::future::ready(Ok(Observation {
            messages,
            reward,
            done: right,
            ..Observation::default()
        })))
    }
}
