//! What a turn of an episode costs after the turns before it: with the KV pages of the episode kept, and after they were given up
//! for others.
//!
//! # Fields of the objects
//! | field | is |
//! |---|---|
//! | `measure`, `model`, `turn` | `turns`, the model, and which turn, from 1 |
//! | `tokens` | tokens of an episode before the turn |
//! | `kept_s`, `given_up_s` | seconds of the turn of all episodes together |
//! | `kept_prefilled`, `given_up_prefilled` | tokens that were prefilled for it |
//!
//! Invariant: both ways sample the same tokens. A turn reads what is new and says one token, so that its cost is that of reading.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use model::{ModelDirectory, Sampling, SharedCores, ThreadPool};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rlrun::failure::Failure;
use rollout::{Engine, EngineConfig, Network, RequestOptions, SampleRequest, ServeOn, StopRules};
use serde_json::json;
use trajectory::{GroupId, PolicyVersion};

use crate::args::TurnsBenchArgs;
use crate::generate::random_tokens;
use crate::suite::model_name;

/// What a turn cost.
#[derive(Clone, Copy)]
struct TurnCost {
    seconds: f64,
    prefilled: u64,
}

/// Plays the episodes both ways and writes a row for every turn to `out`.
///
/// # Errors
/// A model that cannot be used, or a context that is too short for the turns; an output that cannot be written.
pub fn run(args: &TurnsBenchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let write = |source| Failure::System { what: "write the result".to_owned(), source };
    let threads = args.target.output.threads;
    let cores = &threads.map_or_else(SharedCores::all, SharedCores::new);
    let directory = ModelDirectory::open(&args.target.model)?;
    let (mut kept, mut given_up): (Vec<TurnCost>, Vec<TurnCost>) = Default::default();
    for _ in 0..args.repeats {
        least(&mut kept, play(args, &directory, cores, true)?);
        least(&mut given_up, play(args, &directory, cores, false)?);
    }
    if !args.target.output.json {
        writeln!(out, "turn  tokens  kept, ms  prefilled  given up, ms  prefilled").map_err(write)?;
    }
    for (n, (kept, given_up)) in kept.iter().zip(&given_up).enumerate() {
        let tokens = n * (args.read + 1);
        let row = if args.target.output.json {
            let model = model_name(&args.target.model);
            json!({
                "measure": "turns", "model": model, "turn": n + 1, "tokens": tokens,
                "kept_s": kept.seconds, "kept_prefilled": kept.prefilled,
                "given_up_s": given_up.seconds, "given_up_prefilled": given_up.prefilled,
            })
            .to_string()
        } else {
            let [first, second] = [kept, given_up].map(|cost| (1e3 * cost.seconds, cost.prefilled));
            format!(
                "{:>4} {tokens:>7} {:>9.2} {:>10} {:>13.2} {:>10}",
                n + 1,
                first.0,
                first.1,
                second.0,
                second.1
            )
        };
        writeln!(out, "{row}").map_err(write)?;
    }
    Ok(())
}

/// Keeps the least time of each turn.
fn least(known: &mut Vec<TurnCost>, new: Vec<TurnCost>) {
    if known.is_empty() {
        *known = new;
        return;
    }
    for (known, new) in known.iter_mut().zip(new) {
        known.seconds = known.seconds.min(new.seconds);
    }
}

/// One round; between turns pages are `kept` or given up.
fn play(
    args: &TurnsBenchArgs,
    directory: &ModelDirectory,
    cores: &Arc<SharedCores>,
    kept: bool,
) -> Result<Vec<TurnCost>, Failure> {
    let longest = args.turns * (args.read + 1);
    let vocabulary = directory.config().vocab_size;
    let config = EngineConfig {
        max_running: args.episodes,
        prefill_chunk: EngineConfig::default_prefill_chunk(false),
        kv_cache_tokens: None,
        max_prompt_length: longest,
        max_completion_length: 1,
        max_episode_length: longest,
        max_samples: 1,
        seed: 0,
    };
    // Every token ends a completion as a stop token does: the pages of one that is cut off are not kept.
    let stop = StopRules {
        token_ids: (0..vocabulary as u32).collect(),
        strings: Vec::new(),
        tokenizer: directory.tokenizer().clone(),
    };
    let served = ServeOn::Host(model::Quantization::None);
    let network = Network::new(&served, directory.config(), &directory.load_parameters()?)?;
    let pool = Arc::new(ThreadPool::new(cores, cores.total()));
    let mut engine = Engine::new(config, stop, network, PolicyVersion::default())?.on(pool);
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut episodes: Vec<Vec<u32>> = vec![Vec::new(); args.episodes];
    let mut costs = Vec::with_capacity(args.turns);
    for turn in 0..args.turns {
        let before = engine.counts().prefilled_tokens;
        for (n, episode) in (0..).zip(&mut episodes) {
            if !kept {
                engine.end_episode(GroupId(n), 0);
            }
            episode.extend(random_tokens(&mut rng, args.read, vocabulary));
        }
        let clock = Instant::now();
        for (n, episode) in (0..).zip(&episodes) {
            engine.submit(request(n, turn, episode))?;
        }
        while !engine.is_idle() {
            for completion in engine.step()? {
                episodes[completion.group.0 as usize] = completion.token_ids;
            }
        }
        let (seconds, prefilled) = (clock.elapsed().as_secs_f64(), engine.counts().prefilled_tokens - before);
        costs.push(TurnCost { seconds, prefilled });
    }
    Ok(costs)
}

fn request(episode: u64, turn: usize, tokens: &[u32]) -> SampleRequest {
    SampleRequest {
        group: GroupId(episode),
        prompt: tokens.to_vec(),
        first_index: 0,
        turn: turn as u32,
        samples: 1,
        sampling: Sampling::PLAIN,
        max_completion_length: 1,
        baseline: false,
        keep_cache: true,
        options: RequestOptions::default(),
    }
}
