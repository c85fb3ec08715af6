//! The memory of each phase if sampler and trainer alternate on one device.
//!
//! Invariant: parts move to a phase or shrink; every part also exists in a run that is not colocated. The parts that stay in
//! memory follow from the same budget in the same order as in a run.

use model::{Layout, Placement};

use super::{F32, Part, Phase, gradients, product, reference_copies};
use crate::recipe::Recipe;
use crate::recipe::words::CriticKind;

/// Puts every part of `parts` where it belongs; the policy has this `layout`.
pub(super) fn take_turns(parts: &mut Vec<Part>, recipe: &Recipe, layout: &Layout) {
    let weights = product(&[F32, layout.len() as u64]);
    let mut left = recipe.placement.memory_mib.map(|mib| mib << 20);
    let mut stays = |bytes: u64| match &mut left {
        None => true,
        Some(left) => {
            let fits = bytes <= *left;
            *left -= if fits { bytes } else { 0 };
            fits
        }
    };
    // In the order in which a run allocates.
    // The process that takes turns has one copy of the reference.
    let reference = bytes(parts, "reference") / reference_copies(recipe);
    let rewards = bytes(parts, "rewards");
    stays(rewards);
    if recipe.placement.reference != Some(Placement::Separated) {
        stays(reference);
    }
    let phase = |stays: bool| if stays { Phase::Always } else { Phase::Training };
    let optimizer = phase(stays(bytes(parts, "optimizer")));
    let policy = phase(stays(weights));
    let own_critic = recipe.critic().is_some_and(|critic| critic.kind == CriticKind::Separate);
    let critic = own_critic.then(|| {
        let gradients = gradients::bytes(recipe, layout, None);
        let kept = bytes(parts, "critic").saturating_sub(gradients);
        (phase(stays(kept)), gradients, kept)
    });
    for part in parts.iter_mut() {
        match part.name {
            "gradients" | "update" | "logits" => part.phase = Phase::Training,
            // When the activations are gone, the next version is copied to be published.
            "activations" => (part.phase, part.bytes) = (Phase::Training, part.bytes.max(weights)),
            "optimizer" => part.phase = optimizer,
            "policy" => part.phase = policy,
            "served" | "kv cache" | "decoding" => part.phase = Phase::Sampling,
            "critic" => {
                if let Some((phase, _, kept)) = critic {
                    (part.phase, part.bytes) = (phase, kept);
                }
            }
            _ => {}
        }
    }
    if let Some((_, bytes, _)) = critic {
        let what = "those of the critic";
        parts.push(Part { name: "its gradients", what, bytes, phase: Phase::Training });
    }
}

fn bytes(parts: &[Part], name: &str) -> u64 {
    parts.iter().find(|part| part.name == name).map_or(0, |part| part.bytes)
}
