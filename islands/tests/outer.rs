//! The outer optimizer against PyTorch.
//!
//! ```python
//! p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
//! o = torch.optim.SGD([p], lr=0.7, momentum=0.9, nesterov=True)
//! for g in ([0.1, -0.2, 0.3], [0.05, 0.4, -0.1], [-0.3, 0.0, 0.2]):
//!     p.grad = torch.tensor(g); o.step(); print(p.tolist())
//! ```

use islands::OuterOptimizer;
use islands::outer::GradientSum;

#[test]
fn updates_equal_those_of_pytorch() {
    let (mut weights, mut momentum) = ([1.0_f32, -2.0, 0.5], [0.0; 3]);
    for (gradient, expected) in [
        ([0.1, -0.2, 0.3], [0.867, -1.734, 0.101_000_01]),
        ([0.05, 0.4, -0.1], [0.743_8, -2.152_6, 0.063_9]),
        ([-0.3, 0.0, 0.2], [1.063_42, -2.277_34, -0.298_490_02]),
    ] {
        let update = OuterOptimizer::default().update(&gradient, &mut momentum);
        weights.iter_mut().zip(update).for_each(|(weight, update)| *weight -= update);
        for (weight, expected) in weights.iter().zip(expected) {
            assert!((weight - expected).abs() < 1e-6, "{weights:?}");
        }
    }
}

#[test]
fn the_mean_of_one_is_itself() {
    let mean = |gradients: &[[f32; 2]]| {
        let mut sum = GradientSum::new(2);
        gradients.iter().for_each(|gradient| sum.add(gradient));
        sum.mean()
    };
    assert_eq!(mean(&[[0.1, -7.5]]), [0.1, -7.5]);
    assert_eq!(mean(&[[1.0, 2.0], [3.0, -2.0]]), [2.0, 0.0]);
}
