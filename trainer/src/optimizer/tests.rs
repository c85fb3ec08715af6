//! Properties of all optimizers.

use model::{Architecture, Config, Layout, SharedCores, Sizes};

use super::check::random;
use super::*;

fn layout() -> Layout {
    Layout::new(&Config::fresh(&Sizes {
        vocab_size: 100,
        hidden_size: 64,
        intermediate_size: 96,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 8,
    }))
}

fn configs() -> Vec<OptimizerConfig> {
    let all = OptimizerKind::ALL.map(|kind| OptimizerConfig::standard(kind, 0.95));
    let low_rank = OptimizerConfig { dion_rank_fraction: 0.25, ..all[3] };
    all.into_iter().chain([low_rank]).collect()
}

/// Mean squared distance to the minimum of a quadratic with curvatures over one order of magnitude, after noisy
/// gradients; 1/3 before the first step.
fn distance(config: OptimizerConfig, peak: f32) -> f64 {
    const STEPS: u32 = 300;
    let layout = layout();
    let mut optimizer = Optimizer::new(config, layout.specs());
    let (target, curvatures) = (random(layout.len(), 1), random(layout.len(), 2));
    let mut values = vec![0.0; layout.len()];
    for step in 0..STEPS {
        let noises = random(layout.len(), 10 + step);
        let gradient = |(i, value): (usize, &f32)| {
            10.0_f32.powf(0.5 * curvatures[i]) * (value - target[i] + 0.2 * noises[i])
        };
        let gradients: Vec<f32> = values.iter().enumerate().map(gradient).collect();
        let left = 1.0 - step as f32 / STEPS as f32;
        let update = ScaledGradients { gradients: &gradients, scale: 1.0 };
        optimizer.update(layout.specs(), &mut values, update, peak * left, &ThreadPool::single());
    }
    let squares = values.iter().zip(&target).map(|(value, target)| f64::from(value - target).powi(2));
    squares.sum::<f64>() / layout.len() as f64
}

#[test]
fn all_converge_on_a_quadratic() {
    for config in configs() {
        let peak = if config.kind == OptimizerKind::Dion { 0.3 } else { 0.05 };
        let distance = distance(config, peak);
        assert!(distance < 0.02, "{config:?}: from 0.33 to {distance}");
    }
}

#[test]
fn the_number_of_threads_does_not_change_bits() {
    let layout = layout();
    for config in configs() {
        let run = |pool: &ThreadPool| {
            let mut optimizer = Optimizer::new(config, layout.specs());
            let mut values = random(layout.len(), 1);
            for step in 0..3 {
                let gradients = random(layout.len(), 2 + step);
                optimizer.update(
                    layout.specs(),
                    &mut values,
                    ScaledGradients { gradients: &gradients, scale: 0.5 },
                    0.1,
                    pool,
                );
            }
            (values, optimizer)
        };
        let alone = run(&ThreadPool::single());
        for threads in [2, 3, 8] {
            assert!(
                run(&ThreadPool::new(&SharedCores::new(threads), threads)) == alone,
                "{config:?} on {threads} threads"
            );
        }
    }
}

#[test]
fn matrices_use_their_optimizer_and_other_tensors_use_adamw() {
    let layout = layout();
    for config in configs() {
        let optimizer = Optimizer::new(config, layout.specs());
        let mut bytes = 0;
        for (spec, state) in layout.specs().iter().zip(optimizer.states()) {
            let inside = spec.name.ends_with("_proj.weight");
            bytes += match state {
                TensorState::Moments(Moments::Full { .. }) => 8 * spec.len(),
                TensorState::Moments(Moments::Coded { first, .. }) => 2 * spec.len() + 8 * first.scales.len(),
                TensorState::Muon(momentum) => 4 * momentum.len(),
                TensorState::Dion { momentum, basis } => 4 * (momentum.len() + basis.len()),
            };
            match (config.kind, state) {
                (OptimizerKind::Muon, TensorState::Muon(_))
                | (OptimizerKind::Dion, TensorState::Dion { .. }) => assert!(inside, "{}", spec.name),
                (OptimizerKind::Muon | OptimizerKind::Dion, state) => {
                    assert!(!inside, "{}", spec.name);
                    assert!(matches!(state, TensorState::Moments(Moments::Full { .. })), "{}", spec.name);
                }
                (_, state) => assert!(matches!(state, TensorState::Moments(_)), "{}", spec.name),
            }
        }
        assert_eq!(config.state_bytes(layout.specs()), bytes as u64, "{config:?}");
    }
}

/// q, k and v are contiguous in memory, and updates of one do not change the others.
#[test]
fn contiguous_matrices_are_updated_separately() {
    let layout = layout();
    let spec = |name: &str| layout.spec(&format!("model.layers.0.self_attn.{name}_proj.weight")).unwrap();
    for config in configs().into_iter().skip(2) {
        let mut optimizer = Optimizer::new(config, layout.specs());
        let mut values = vec![0.0; layout.len()];
        let mut gradients = vec![0.0; layout.len()];
        let k = spec("k").range();
        gradients[k.clone()].copy_from_slice(&random(k.len(), 1));
        optimizer.update(
            layout.specs(),
            &mut values,
            ScaledGradients { gradients: &gradients, scale: 1.0 },
            0.1,
            &ThreadPool::single(),
        );
        assert!(values[k.clone()].iter().all(|x| *x != 0.0));
        assert!(values[..k.start].iter().chain(&values[k.end..]).all(|x| *x == 0.0), "{config:?}");
    }
}

/// The correction of a router is updated by loads of experts or not at all, whatever its gradient is.
#[test]
fn frozen_tensors_are_not_updated() {
    let sizes = Sizes {
        vocab_size: 10,
        hidden_size: 8,
        intermediate_size: 12,
        num_layers: 1,
        num_heads: 2,
        num_kv_heads: 1,
        max_position_embeddings: 8,
    };
    let layout = Layout::new(&Config::fresh(&sizes).of_family(Architecture::Glm4Moe));
    for config in configs() {
        let config = OptimizerConfig { weight_decay: 0.1, ..config };
        let before = random(layout.len(), 1);
        let mut values = before.clone();
        let gradients = random(layout.len(), 2);
        let update = ScaledGradients { gradients: &gradients, scale: 1.0 };
        let mut optimizer = Optimizer::new(config, layout.specs());
        optimizer.update(layout.specs(), &mut values, update, 0.1, &ThreadPool::single());
        for spec in layout.specs() {
            assert_eq!(
                values[spec.range()] == before[spec.range()],
                spec.frozen,
                "{config:?}: {}",
                spec.name
            );
        }
        assert_eq!(layout.specs().iter().filter(|spec| spec.frozen).count(), 1);
    }
}
