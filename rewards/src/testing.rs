//! Helpers of the unit tests: a task, an input and a minimal executor.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use trajectory::{Prompt, Task, TaskId};

use crate::RewardInput;

/// Task 7, with the given reference answer.
pub(crate) fn task(answer: &str) -> Task {
    Task {
        id: TaskId(7),
        prompt: Prompt::Text("2+2=".into()),
        answer: Some(answer.into()),
        columns: serde_json::Map::new(),
    }
}

/// Trajectory 3 of a task, complete, 10 tokens of at most 20.
pub(crate) fn input<'a>(task: &'a Task, text: &'a str) -> RewardInput<'a> {
    const COMPLETION: [u32; 10] = [1; 10];
    RewardInput {
        index: 3,
        completion_ids: &COMPLETION,
        max_completion_length: 20,
        ..RewardInput::text(task, text)
    }
}

/// Polls until the future is done; it must not need a waker.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..1000 {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
    panic!("the future made no progress in 1000 polls");
}
