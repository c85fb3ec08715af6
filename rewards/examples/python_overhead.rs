//! What a call of a Python reward costs beside the function itself: `cargo run --release -p rlrun-rewards --example
//! python_overhead`.
//!
//! A function that returns at once is called through one worker, with items that wait together and one at a time. The
//! texts are as long as completions are (2000 characters), with rows of a data set around them.

#![expect(clippy::print_stdout, reason = "its figures are what it is for")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use rewards::python::PythonReward;
use rewards::{Reward, RewardContext, RewardInput, RewardSpec};
use serde_json::json;
use trajectory::{Prompt, Task, TaskId};

const VERL: &str =
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n";
const TRL: &str = "def reward(prompts, completions, **kwargs):\n    return [1.0] * len(completions)\n";
/// Trajectories that wait together, and how often they do.
const BATCH: usize = 64;
const ROUNDS: usize = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let scratch = std::env::temp_dir().join(format!("rlrun-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&scratch)?;
    let context = RewardContext {
        // Where python3 is found; an example reads no environment.
        environment: Arc::new(
            option_env!("PATH").map(|path| ("PATH".into(), path.into())).into_iter().collect(),
        ),
        runtime: Some(runtime.handle().clone()),
        scratch: scratch.clone(),
        ..RewardContext::default()
    };
    let columns = json!({"data_source": "math", "level": 3, "question": "how much is it? ".repeat(20)});
    let task = Task {
        id: TaskId(0),
        prompt: Prompt::Text("how much is it? ".repeat(20)),
        answer: Some("4".into()),
        columns: columns.as_object().cloned().unwrap_or_default(),
    };
    let text = "so it is four, ".repeat(2000 / 15);
    let ids: Vec<u32> = (0..500).collect();
    let input =
        RewardInput { prompt_ids: &ids[..80], completion_ids: &ids, ..RewardInput::text(&task, &text) };
    for (dialect, source) in [("verl", VERL), ("trl", TRL)] {
        let file = scratch.join(format!("{dialect}_reward.py"));
        std::fs::write(&file, source)?;
        let mut spec = RewardSpec::new("python");
        (spec.path, spec.workers) = (Some(file), Some(1));
        let begun = Instant::now();
        let reward = PythonReward::new(&spec, &context)?;
        println!("{dialect}: ready after {:.0} ms", begun.elapsed().as_secs_f64() * 1e3);
        for (name, together, rounds) in [("together", BATCH, ROUNDS), ("one by one", 1, ROUNDS * 10)] {
            let inputs = vec![input; together];
            // Once unmeasured: the worker may still be starting.
            let mut times = Vec::with_capacity(rounds + 1);
            for _ in 0..=rounds {
                let begun = Instant::now();
                let judged = runtime.block_on(reward.score(&inputs));
                times.push(begun.elapsed());
                for judged in judged {
                    judged?;
                }
            }
            times.remove(0);
            times.sort_unstable();
            let each = |time: Duration| time.as_secs_f64() * 1e6 / together as f64;
            let (median, p95) = (each(times[rounds / 2]), each(times[rounds * 95 / 100]));
            println!("  {together:>2} {name}: {median:.1} us a call (median; 95 in 100 below {p95:.1})");
        }
    }
    std::fs::remove_dir_all(&scratch)?;
    Ok(())
}
