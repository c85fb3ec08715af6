//! Networks with experts learn on a device, and corrections of routers move as on the processor.

use model::Layout;
use model::on_device::DeviceDtype;
use trainer::optimizer::{OptimizerConfig, OptimizerKind};
use trainer::{CollectivePlace, DeviceConfig, Learner, LearnerConfig, OptimizerPlace};

use super::{advance, assert_same, exchanging, on_device, placed, smooth, steps, values};
use crate::LEARNER;
use crate::router_correction::{BALANCED, skewed, with_experts};

/// A learner of experts whose first expert has every token, with corrections that the steps move.
fn balanced(device: Option<DeviceConfig>, settings: &LearnerConfig) -> Learner {
    let (config, settings) = (with_experts(), settings.clone());
    let settings =
        LearnerConfig { device, router_correction_rate: BALANCED.router_correction_rate, ..settings };
    Learner::new(settings, config.clone(), skewed(&config), None).unwrap()
}

#[test]
fn experts_learn_and_corrections_move_as_on_the_processor() {
    let plain = smooth(OptimizerKind::Adamw);
    let (expected, norms, sums) = steps(balanced(None, &plain), 3);
    assert!(sums.experts.variation().is_some_and(|variation| variation > 0.0));
    for (place, world) in
        [(OptimizerPlace::Device, 1), (OptimizerPlace::Host, 1), (OptimizerPlace::Device, 2)]
    {
        let device = placed(DeviceDtype::F32, place, &plain).device;
        let (found, other, reported) =
            steps(balanced(device, &LearnerConfig { world, zero: 2, ..plain.clone() }), 3);
        let what = format!("{place:?}, {world} ranks");
        assert_same(&found[2], &expected[2], 1e-5, &what);
        assert_same(&other, &norms, 1e-5, &what);
        assert_eq!(reported.experts, sums.experts, "{what}");
        // Corrections have no gradient and do not decay: they move by the rate alone.
        let layout = Layout::new(&with_experts());
        for layer in 0..with_experts().num_layers() {
            let place = layout.router_correction(layer);
            assert_eq!(found[2][place.clone()], expected[2][place], "{what}");
        }
    }
}

#[test]
fn corrections_that_are_not_updated_stay_on_a_device() {
    let config = with_experts();
    let optimizer = OptimizerConfig { weight_decay: 0.1, ..LEARNER.optimizer };
    for dtype in [DeviceDtype::F32, DeviceDtype::Bf16] {
        let settings = LearnerConfig { optimizer, ..placed(dtype, OptimizerPlace::Device, &LEARNER) };
        let mut learner = Learner::new(settings, config.clone(), skewed(&config), None).unwrap();
        let before = values(&learner);
        advance(&mut learner, 2);
        let (after, layout) = (values(&learner), Layout::new(&config));
        for layer in 0..config.num_layers() {
            let place = layout.router_correction(layer);
            assert_eq!(after[place.clone()], before[place], "{dtype:?}");
        }
        assert_ne!(after, before);
    }
}

#[test]
fn ranks_of_a_device_group_refuse_to_update_corrections() {
    let config = with_experts();
    let settings = exchanging(CollectivePlace::Device, on_device(DeviceDtype::F32));
    let settings = LearnerConfig { world: 2, router_correction_rate: 0.1, ..settings };
    let error = Learner::new(settings, config.clone(), skewed(&config), None).unwrap_err().to_string();
    assert!(error.contains("`trainer.router_correction_rate`"), "{error}");
    assert!(error.contains("trainer.collective = \"auto\""), "{error}");
}
