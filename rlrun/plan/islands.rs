//! The traffic of an island.

use model::{Config, Layout, ParameterSpec};

use islands::IslandTerms;
use islands::terms::fragment_ends;

use crate::recipe::Recipe;

/// Bytes that an island of `recipe` sends and receives in a round and in a step, in words; `None` for a run that is none.
#[must_use]
pub fn describe(recipe: &Recipe, config: &Config) -> Option<String> {
    let island = recipe.island.as_ref()?;
    let layout = Layout::new(config);
    let trained = match recipe.lora() {
        Some(lora) => lora.shapes(layout.specs()).0,
        None => layout.specs().to_vec(),
    };
    let lens: Vec<usize> = trained.iter().map(ParameterSpec::len).collect();
    let ends = fragment_ends(&lens, island.fragments);
    let terms = IslandTerms {
        model: String::new(),
        local_steps: island.steps,
        compression: island.compression,
        ends,
    };
    let rounds = terms.ends.len() as u64;
    let largest = (0..rounds).map(|round| terms.message_bytes(round)).max().unwrap_or_default();
    let all: u64 = (0..rounds).map(|round| terms.message_bytes(round) as u64).sum();
    Some(format!(
        "island        {} trained values ({}); every {} steps a round sends at most {largest} bytes and receives as many; \
         {:.0} bytes per step each way, and {} if f32 gradients were exchanged at every step",
        terms.values(),
        island.compression.as_str(),
        terms.steps_per_round(),
        all as f64 / island.steps.max(1) as f64,
        4 * terms.values()
    ))
}
