//! Supervised warm-up: a fresh model learns from demonstrations, some of which are wrong.
//!
//! Invariant: demonstration `i` of step `s` is a function of seed, `s` and `i`, so that the warm-up is reproducible. Whether a
//! demonstration is wrong is drawn for each step, not for each task, so that the model cannot memorise wrong answers.

use model::ModelDirectory;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rollout::tasks::arithmetic::{Demonstration, Sum};
use trainer::learner::Learner;
use trainer::schedule::{LearningRateSchedule, ScheduleShape};
use trainer::supervised::imitate;
use trajectory::{Sample, Task};

use crate::demonstrations;
use crate::failure::Failure;
use crate::recipe::schema::Warmup;

/// Share of the steps over which the learning rate rises.
const RISE: f64 = 0.07;

/// Runs the steps of `warmup` on `learner`; `progress` gets every step with its loss and returns whether to continue.
///
/// # Errors
/// If a task is not arithmetic, or training fails.
pub fn warm_up(
    warmup: &Warmup,
    seed: u64,
    learner: &mut Learner,
    directory: &ModelDirectory,
    tasks: &[Task],
    mut progress: impl FnMut(u64, f64, &Learner) -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let steps = warmup.steps as u64;
    let schedule = LearningRateSchedule {
        peak: warmup.learning_rate as f32,
        shape: ScheduleShape::Cosine,
        warmup_steps: (RISE * warmup.steps as f64).ceil() as u64,
        decay_steps: 0,
        steps,
    };
    for step in 0..steps {
        let samples = (0..warmup.batch_tasks)
            .map(|i| {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(step * warmup.batch_tasks as u64 + i as u64);
                let task = &tasks[((u64::from(rng.next_u32()) * tasks.len() as u64) >> 32) as usize];
                let wrong = f64::from(rng.next_u32()) < warmup.wrong_share * 4_294_967_296.0;
                let kind = if wrong { Demonstration::Wrong } else { Demonstration::Right };
                demonstrations::sample(directory, &task.prompt, &Sum::of(task)?.demonstration(kind))
            })
            .collect::<Result<Vec<_>, Failure>>()?;
        let rows: Vec<&Sample> = samples.iter().collect();
        let report = imitate(learner, &rows, schedule.at(step))?;
        if !progress(step + 1, report.loss, learner)? {
            break;
        }
    }
    Ok(())
}
