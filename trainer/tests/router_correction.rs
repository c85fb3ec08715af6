//! The correction of routers balances the loads of experts, with the same bits for every number of ranks and every ZeRO stage.

use std::sync::Arc;

use model::{Architecture, Config, ModelDirectory, Parameters};
use trainer::checkpoint::load;
use trainer::lora::{Adapter, LoraConfig, TargetModule};
use trainer::{Learner, LearnerConfig, TrainerState};
use trajectory::PolicyVersion;

use crate::{LEARNER, config, groups, policy_step, save};

/// What a step adds to a correction or takes from it.
const RATE: f32 = 0.125;

pub(crate) const BALANCED: LearnerConfig = LearnerConfig { router_correction_rate: RATE, ..LEARNER };

/// With four experts in every layer, of which a token has two.
pub(crate) fn with_experts() -> Config {
    config().of_family(Architecture::Glm4Moe)
}

/// Weights whose first expert has every token: no sigmoid is above 1.
pub(crate) fn skewed(config: &Config) -> Parameters {
    let mut parameters = Parameters::random(config, 5);
    for layer in 0..config.num_layers() {
        let place = parameters.layout().router_correction(layer);
        parameters.values_mut()[place.start] = 1.5;
    }
    parameters
}

fn learner(settings: LearnerConfig) -> Learner {
    let config = with_experts();
    Learner::new(settings, config.clone(), skewed(&config), None).unwrap()
}

/// The corrections of all layers.
fn corrections(learner: &Learner) -> Vec<f32> {
    let parameters = learner.parameters().unwrap();
    let layers = 0..learner.model().num_layers();
    layers
        .flat_map(|layer| parameters.values()[parameters.layout().router_correction(layer)].to_vec())
        .collect()
}

#[test]
fn loads_even_out() {
    let groups = groups();
    let variations = |settings: LearnerConfig| {
        let mut learner = learner(settings);
        let mut step = |_| policy_step(&mut learner, &groups, 1e-4).1.experts.variation().unwrap();
        (0..16).map(&mut step).collect::<Vec<f64>>()
    };
    let (balanced, frozen) = (variations(BALANCED), variations(LEARNER));
    assert_eq!(balanced[0], frozen[0], "a step computes with the corrections before it");
    assert!(frozen[15] > 0.9 * frozen[0], "{frozen:?}");
    let last = balanced[12..].iter().sum::<f64>() / 4.0;
    assert!(last < 0.5 * balanced[0], "{balanced:?}");
}

#[test]
fn a_step_moves_every_correction_by_the_rate_or_not_at_all() {
    let mut learner = learner(BALANCED);
    let before = corrections(&learner);
    policy_step(&mut learner, &groups(), 1e-4);
    let moved: Vec<f32> = corrections(&learner).iter().zip(&before).map(|(after, b)| after - b).collect();
    assert!(moved.iter().all(|moved| [-RATE, 0.0, RATE].contains(moved)), "{moved:?}");
    // The first expert of each layer has more tokens than the others.
    assert_eq!((moved[0], moved[4]), (-RATE, -RATE));
    assert!(moved.contains(&RATE), "{moved:?}");
}

#[test]
fn ranks_and_stages_give_the_same_bits() {
    let run = |world, zero| {
        let mut learner = learner(LearnerConfig { world, zero, microbatch_tokens: 100_000, ..BALANCED });
        let groups = groups();
        let steps = [(); 3].map(|()| policy_step(&mut learner, &groups, 1e-2));
        let weights = learner.parameters().unwrap();
        (steps, weights.values().iter().map(|value| value.to_bits()).collect::<Vec<_>>())
    };
    let expected = run(1, 1);
    for world in [1, 2, 4] {
        for zero in [1, 2, 3] {
            assert!(run(world, zero) == expected, "{world} ranks, stage {zero}");
        }
    }
}

#[test]
fn resuming_gives_the_same_bits() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &with_experts(), 5).unwrap());
    let mut learner = learner(BALANCED);
    let start = corrections(&learner);
    let advance = |learner: &mut Learner| {
        policy_step(learner, &groups(), 1e-2);
    };
    (0..3).for_each(|_| advance(&mut learner));
    let state = TrainerState { updates: learner.updates(), ..TrainerState::at(PolicyVersion(3)) };
    let dir = save(files.path(), &directory, &learner, &state, 2).unwrap();
    let read = load(&dir, BALANCED.optimizer, None).unwrap();
    let mut resumed = Learner::new(
        BALANCED,
        with_experts(),
        Parameters::clone(read.weights.whole().unwrap()),
        Some(read.optimizer),
    )
    .unwrap();
    assert_eq!(corrections(&resumed), corrections(&learner));
    assert_ne!(corrections(&resumed), start);
    advance(&mut resumed);
    advance(&mut learner);
    assert_eq!(resumed.parameters().unwrap().values(), learner.parameters().unwrap().values());
}

#[test]
fn learners_without_a_correction_to_update_refuse_the_rate() {
    let dense = config();
    let parameters = Parameters::random(&dense, 5);
    for world in [1, 2] {
        let settings = LearnerConfig { world, ..BALANCED };
        let error = Learner::new(settings, dense.clone(), parameters.clone(), None).unwrap_err().to_string();
        assert!(error.contains("`trainer.router_correction_rate` is 0.125"), "{error}");
        assert!(error.contains("e_score_correction_bias"), "{error}");
    }
    let config = with_experts();
    let base = skewed(&config);
    let lora = LoraConfig { rank: 2, alpha: 4.0, target_modules: vec![TargetModule::QProj] };
    let adapter = Adapter::new(lora, &base, 1);
    let error = Learner::adapting(BALANCED, config, base, adapter, None).unwrap_err().to_string();
    assert!(error.contains("under an adapter are frozen"), "{error}");
}
