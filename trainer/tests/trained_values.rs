//! Trained values that are read and replaced from outside of the optimizer.

use model::{Parameters, ThreadPool};
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::{Learner, LearnerConfig};

use crate::{LEARNER, config, groups, learner, policy_step};

fn bits(learner: &Learner) -> Vec<u32> {
    learner.parameters().unwrap().values().iter().map(|value| value.to_bits()).collect()
}

/// The weights after a step, a replacement of the trained values, and another step.
fn replaced(mut learner: Learner) -> Vec<u32> {
    let groups = groups();
    policy_step(&mut learner, &groups, 1e-2);
    let (before, updates) = (bits(&learner), learner.updates());
    let mut values = learner.trained_values().unwrap();
    learner.set_trained_values(&values).unwrap();
    assert!(bits(&learner) == before, "the same values change nothing");
    values
        .iter_mut()
        .zip((0_u8..=255).cycle())
        .for_each(|(value, index)| *value += f32::from(index) / 1024.0);
    learner.set_trained_values(&values).unwrap();
    assert!(learner.trained_values().unwrap() == values && bits(&learner) != before);
    assert_eq!(learner.updates(), updates, "the optimizer has made no update");
    policy_step(&mut learner, &groups, 1e-2);
    bits(&learner)
}

#[test]
fn ranks_and_stages_continue_from_replaced_weights_with_the_same_bits() {
    let expected = replaced(learner(LearnerConfig { microbatch_tokens: 100_000, ..LEARNER }));
    for world in [2, 4] {
        for zero in [1, 2, 3] {
            let settings = LearnerConfig { world, zero, microbatch_tokens: 100_000, ..LEARNER };
            assert!(replaced(learner(settings)) == expected, "{world} ranks, stage {zero}");
        }
    }
}

#[test]
fn a_replaced_adapter_is_merged_into_the_weights() {
    let base = Parameters::random(&config(), 5);
    let lora = LoraConfig { rank: 3, alpha: 6.0, target_modules: TargetModule::BLOCK.to_vec() };
    let new = |settings| {
        let adapter = Adapter::new(lora.clone(), &base, 1);
        Learner::adapting(settings, config(), base.clone(), adapter, None).unwrap()
    };
    let expected = replaced(new(LEARNER));
    assert!(replaced(new(LearnerConfig { world: 2, ..LEARNER })) == expected);
    let mut learner = new(LEARNER);
    let values: Vec<f32> = (0..learner.trained_values().unwrap().len()).map(|i| (i as f32).sin()).collect();
    learner.set_trained_values(&values).unwrap();
    let adapter = learner.adapter().unwrap();
    let mut merged = base.clone();
    adapter.merge(merged.values_mut(), &ThreadPool::single());
    assert!(adapter.values() == values && merged.values() == learner.parameters().unwrap().values());
}

/// A version that was published keeps its values.
#[test]
fn shared_weights_are_copied_before_they_are_replaced() {
    let mut learner = learner(LEARNER);
    let published = learner.parameters().unwrap();
    let before = published.values().to_vec();
    learner.set_trained_values(&vec![0.5; before.len()]).unwrap();
    assert!(published.values() == before && learner.trained_values().unwrap()[0] == 0.5);
}
