//! Supervised warm-up: a fresh model learns from demonstrations, some of which are wrong. With an environment they are episodes
//! of its scripted player.
//!
//! Invariant: demonstration `i` of step `s` is a function of seed, `s` and `i`, so that the warm-up is reproducible. Whether a
//! demonstration is wrong is drawn for each step, not for each task, so that the model cannot memorise wrong answers.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use trainer::learner::Learner;
use trainer::schedule::{LearningRateSchedule, ScheduleShape};
use trainer::supervised::imitate;
use trajectory::Sample;

use crate::demonstrations::Demonstrations;
use crate::failure::Failure;
use crate::recipe::schema::Warmup;

/// Share of the steps over which the learning rate rises.
const RISE: f64 = 0.07;

/// Runs the steps of `warmup` on `learner`; `progress` gets every step with its loss and returns whether to continue.
///
/// # Errors
/// If there is no demonstration of a task, or training fails.
pub(crate) fn warm_up(
    warmup: &Warmup,
    seed: u64,
    learner: &mut Learner,
    demonstrations: &Demonstrations<'_>,
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
                demonstrations.draw(warmup.wrong_share, || rng.next_u32())
            })
            .collect::<Result<Vec<_>, Failure>>()?;
        let rows: Vec<&Sample> = samples.iter().flatten().collect();
        let report = imitate(learner, &rows, schedule.at(step))?;
        if !progress(step + 1, report.loss, learner)? {
            break;
        }
    }
    Ok(())
}
