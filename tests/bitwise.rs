//! Sampler and trainer compute the same bits from the same weights, unless the sampler is quantised. The run then measures
//! the mismatch and corrects for it.

use crate::support::{Home, Run};

const STEPS: &str = "trainer.steps=5";

/// Truncated distributions; `tests/logs.rs` compares whole ones, token by token.
#[test]
fn a_bitwise_run_finds_no_difference_while_sampling_is_synchronous() {
    let home = Home::new();
    let truncated = ["rollout.temperature=0.9", "rollout.top_k=40", "rollout.top_p=0.95", "trainer.world=2"];
    let sets = [&["rollout.bitwise=true", "buffer.max_staleness=0", STEPS][..], &truncated].concat();
    let run = home.small("run", &sets);
    assert_eq!(run.values("logprob_abs_diff/max"), [0.0; 5]);
    assert_eq!(run.values("is/max"), [1.0; 5]);
    assert!(run.values("optim/grad_norm").iter().all(|norm| *norm > 0.0), "nothing was compared");
}

/// Only samples of the current version are compared bitwise, not those of older or several versions.
#[test]
fn a_bitwise_run_can_be_asynchronous() {
    let home = Home::new();
    let sets =
        ["rollout.bitwise=true", "rollout.prefill_chunk=3", "trainer.minibatches=2", "trainer.steps=8"];
    let run = home.small("run", &sets);
    assert!(run.values("staleness/max").iter().any(|staleness| *staleness > 0.0));
    assert!(run.values("logprob_abs_diff/max").iter().any(|difference| *difference > 0.0));
}

#[test]
fn the_mismatch_of_a_quantized_sampler_is_measured_and_corrected() {
    let home = Home::new();
    for quantization in ["int8", "bf16"] {
        let key = format!("rollout.quantization=\"{quantization}\"");
        mismatch_is_corrected(&home.small(quantization, &[&key, "buffer.max_staleness=0", STEPS]));
    }
}

fn mismatch_is_corrected(run: &Run) {
    let finite = |name: &str| {
        let values = run.values(name);
        assert_eq!(values.len(), 5);
        assert!(values.iter().all(|v| v.is_finite()), "{name}: {values:?}");
        values
    };
    assert_eq!(finite("staleness/max"), [0.0; 5]);
    for (mean, max) in finite("logprob_abs_diff/mean").into_iter().zip(finite("logprob_abs_diff/max")) {
        assert!(mean > 0.0 && mean < 0.1 && max > mean, "{mean} {max}");
    }
    // The KL divergence of two similar policies is small and never negative.
    assert!(finite("kl/mismatch").iter().all(|kl| (0.0..0.05).contains(kl)));
    // The importance weights differ from 1, and their mean over sampled tokens is 1 up to noise.
    assert!(finite("is/max").iter().all(|weight| *weight > 1.0));
    assert!(finite("is/mean").iter().all(|weight| (weight - 1.0).abs() < 0.05));
    assert!(finite("is/ess").iter().all(|share| *share > 0.9 && *share < 1.0));
    assert!(finite("optim/grad_norm").iter().any(|norm| *norm > 0.0));
}

#[test]
fn bitwise_and_quantized_exclude_each_other() {
    let home = Home::new();
    let sets = ["--set", "rollout.bitwise=true", "--set", "rollout.quantization=int8"];
    let evidence = ["`rollout.bitwise`", "`rollout.quantization`", "quantization = \"none\""];
    home.rlrun(&[&["small.toml", "--run-dir", "run"], &sets[..]].concat()).refused(&evidence);
    assert!(!home.path("run").exists());
    let misspelt = ["check", "small.toml", "--set", "rollout.quantization=int4"];
    home.rlrun(&misspelt)
        .refused(&["`rollout.quantization` cannot be \"int4\"", "\"none\", \"int8\", \"bf16\""]);
}
