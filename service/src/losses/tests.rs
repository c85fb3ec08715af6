//! Losses against their formulas, and data that do not fit.

use model::Prediction;
use proptest::prelude::*;

use super::*;

fn tensor(values: LossValues) -> LossTensor {
    let shape = match &values {
        LossValues::Float(values) => vec![values.len()],
        LossValues::Int(values) => vec![values.len()],
    };
    LossTensor { values, shape }
}

fn datum(tokens: &[u32], targets: &[i64], floats: &[(&str, &[f32])]) -> Datum {
    let floats =
        floats.iter().map(|(name, values)| ((*name).to_owned(), tensor(LossValues::Float(values.to_vec()))));
    let targets = ("target_tokens".to_owned(), tensor(LossValues::Int(targets.to_vec())));
    Datum { tokens: tokens.to_vec(), inputs: floats.chain([targets]).collect(), sampled: Vec::new() }
}

fn request(loss: &str, settings: &[(&str, f64)], datum: Datum) -> PassRequest {
    let settings =
        settings.iter().map(|(name, value)| ((*name).to_owned(), LossSetting::Number(*value))).collect();
    PassRequest { loss: loss.to_owned(), settings, data: vec![datum], forward_only: false }
}

fn predicted(logprobs: &[f32]) -> Vec<Prediction> {
    logprobs.iter().map(|logprob| Prediction { logprob: *logprob, entropy: 0.0, value: 0.0 }).collect()
}

const LOSSES: [(&str, &[(&str, f64)]); 6] = [
    ("cross_entropy", &[]),
    ("importance_sampling", &[]),
    ("ppo", &[("clip_low_threshold", 0.7), ("clip_high_threshold", 1.1)]),
    ("cispo", &[("clip_low_threshold", 0.0), ("clip_high_threshold", 1.3)]),
    ("dro", &[("beta", 0.3)]),
    // With one token the ratio of the sequence is its own.
    ("gspo", &[("clip_low_threshold", 0.7), ("clip_high_threshold", 1.1)]),
];

/// The documented formula of a loss at one token, in f64.
fn formula(loss: &str, factor: f64, logprob: f64, behavior: f64, weight: f64) -> f64 {
    let ratio = (logprob - behavior).exp();
    match loss {
        "cross_entropy" => -factor * logprob,
        "importance_sampling" => -ratio * factor,
        "ppo" | "gspo" => -(ratio * factor).min(ratio.clamp(0.7, 1.1) * factor),
        "cispo" => -weight * factor * logprob,
        _ => -(factor * logprob - 0.15 * (logprob - behavior).powi(2)),
    }
}

proptest! {
    /// The loss is that of the formula, and the slope its difference quotient.
    #[test]
    fn losses_are_their_formulas(
        which in 0..LOSSES.len(), factor in -2.0_f32..2.0, logprob in -3.0_f32..-0.01, behavior in -3.0_f32..-0.01,
    ) {
        let (loss, settings) = LOSSES[which];
        let of_tokens: [(&str, &[f32]); 2] = [("advantages", &[factor]), ("logprobs", &[behavior])];
        let inputs: &[(&str, &[f32])] = if loss == "cross_entropy" { &[("weights", &[factor])] } else { &of_tokens };
        let pass = PreparedPass::new(&request(loss, settings, datum(&[1], &[2], inputs)), 4, 8).unwrap();
        let mut report = PassReport::default();
        let slopes = pass.row(0, &predicted(&[logprob]), &mut report);
        let (factor, logprob, behavior) = (f64::from(factor), f64::from(logprob), f64::from(behavior));
        let weight = (logprob - behavior).exp().min(1.3);
        let at = |logprob| formula(loss, factor, logprob, behavior, weight);
        prop_assert!((report.loss - at(logprob)).abs() < 1e-6 * (1.0 + at(logprob).abs()));
        let ratio = (logprob - behavior).exp();
        // A difference quotient is none at the corners of a clipped ratio.
        if [0.7, 1.1].iter().all(|corner: &f64| (ratio - corner).abs() > 1e-3) {
            let quotient = (at(logprob + 1e-5) - at(logprob - 1e-5)) / 2e-5;
            let slope = f64::from(slopes[0].logprob);
            prop_assert!((slope - quotient).abs() < 1e-3 * (1.0 + quotient.abs()), "{loss}: {slope} and {quotient}");
        }
    }
}

#[test]
fn padding_before_what_was_sampled_is_not_computed() {
    // Two tokens of a prompt, whose targets are 0, then two sampled tokens of which the first has no advantage.
    let inputs: [(&str, &[f32]); 2] =
        [("advantages", &[0.0, 0.0, 0.0, 1.0]), ("logprobs", &[0.0, 0.0, -1.0, -2.0])];
    let all = datum(&[5, 6, 7, 8], &[0, 0, 8, 9], &inputs);
    let pass = PreparedPass::new(&request("importance_sampling", &[], all.clone()), 10, 8).unwrap();
    assert_eq!(pass.targets(), &[vec![8, 9]]);
    assert_eq!(pass.samples()[0].token_ids(), &[5, 6, 7, 8, 9]);
    assert_eq!(pass.samples()[0].loss_mask(), &[false, false, false, true, true]);
    let mut report = PassReport::default();
    pass.row(0, &predicted(&[-1.5, -0.5]), &mut report);
    assert_eq!(pass.outputs(&report)[0]["logprobs"], [0.0, 0.0, -1.5, -0.5]);
    let forward = PassRequest { forward_only: true, ..request("importance_sampling", &[], all) };
    assert_eq!(PreparedPass::new(&forward, 10, 8).unwrap().targets(), &[vec![0, 0, 8, 9]]);
    // A token whose target is not the next one, but counts.
    let inputs: [(&str, &[f32]); 1] = [("weights", &[1.0, 0.5])];
    let other =
        PreparedPass::new(&request("cross_entropy", &[], datum(&[1, 2], &[9, 3], &inputs)), 10, 8).unwrap();
    assert_eq!((other.targets(), other.samples()[0].token_ids()), (&[vec![9, 3]][..], &[1, 2, 3][..]));
}

/// The loss of a sequence is `-A |y| s`, and its slope by the log-probability of a token `-A s`, unless `s` is clipped.
#[test]
fn gspo_has_one_ratio_for_a_sequence() {
    const CLIP: [(&str, f64); 2] = [("clip_low_threshold", 0.5), ("clip_high_threshold", 1.2)];
    // The first token is of the prompt.
    let inputs: [(&str, &[f32]); 2] = [("advantages", &[0.0, 2.0, 2.0]), ("logprobs", &[0.0, -1.0, -2.0])];
    let whole = datum(&[5, 6, 7], &[6, 7, 8], &inputs);
    let run = |datum: &Datum, logprobs: [f32; 3]| {
        let pass = PreparedPass::new(&request("gspo", &CLIP, datum.clone()), 10, 8).unwrap();
        let mut report = PassReport::default();
        let slopes = pass.row(0, &predicted(&logprobs), &mut report);
        (report.loss, slopes.iter().map(|slope| f64::from(slope.logprob)).collect::<Vec<_>>())
    };
    let close = |a: f64, b: f64| (a - b).abs() < 1e-6;
    let ratio = (-0.05_f64).exp();
    let (loss, slopes) = run(&whole, [-3.0, -1.2, -1.9]);
    assert!(close(loss, -4.0 * ratio), "{loss}");
    assert!(slopes[0] == 0.0 && close(slopes[1], -2.0 * ratio) && slopes[1] == slopes[2], "{slopes:?}");
    // A ratio of e is above the bound.
    let (loss, slopes) = run(&whole, [-3.0, -0.0, -1.0]);
    assert!(close(loss, -4.0 * 1.2), "{loss}");
    assert_eq!(slopes, [0.0; 3]);
    let mut masked = whole;
    masked.inputs.insert("sequence_ratio_mask".to_owned(), tensor(LossValues::Int(vec![0, 0, 1])));
    let (loss, _) = run(&masked, [-3.0, -1.2, -1.9]);
    assert!(close(loss, -4.0 * 0.1_f64.exp()), "{loss}");
}

#[test]
fn data_that_do_not_fit_are_named() {
    let rl = |advantages: &[f32]| {
        datum(&[1, 2], &[2, 3], &[("advantages", advantages), ("logprobs", &[-1.0, -1.0])])
    };
    let wide = LossTensor { values: LossValues::Int(vec![1, 2, 3, 4]), shape: vec![2, 2] };
    let mut of_two = rl(&[1.0, 1.0]);
    of_two.inputs.insert("target_tokens".to_owned(), wide);
    let mut masked = rl(&[1.0, 1.0]);
    masked.inputs.insert("sequence_ratio_mask".to_owned(), tensor(LossValues::Int(vec![1, 0])));
    let text = LossSetting::Text("much".to_owned());
    let with_text = PassRequest {
        settings: BTreeMap::from([("beta".to_owned(), text)]),
        ..request("dro", &[], rl(&[1.0, 1.0]))
    };
    let cases = [
        (request("ppo", &[], rl(&[f32::NAN, 1.0])), "datum 0: `advantages` is NaN at position 0"),
        (request("ppo", &[], rl(&[1.0])), "`advantages` has 1 numbers, and the datum has 2 tokens"),
        (request("ppo", &[], datum(&[1], &[2], &[("advantages", &[1.0])])), "it lacks `logprobs`"),
        (request("ppo", &[("clip_low_threshold", 1.5)], rl(&[1.0, 1.0])), "bound the ratio itself"),
        (request("ppo", &[("epsilon", 0.2)], rl(&[1.0, 1.0])), "no setting `epsilon`"),
        (request("cross_entropy", &[], rl(&[1.0, 1.0])), "no input `advantages`"),
        (request("cross_entropy", &[], datum(&[1], &[2], &[])), "it lacks `weights`"),
        (request("cross_entropy", &[], datum(&[], &[], &[])), "it has no tokens"),
        (request("cross_entropy", &[], datum(&[99], &[1], &[("weights", &[1.0])])), "token 99 is outside"),
        (request("cross_entropy", &[], datum(&[1], &[-1], &[("weights", &[1.0])])), "`target_tokens` is -1"),
        (
            request("cross_entropy", &[], datum(&[1; 9], &[1; 9], &[("weights", &[1.0; 9])])),
            "context of the model is 8",
        ),
        (request("importance_sampling", &[], of_two), "has the shape [2, 2]"),
        (request("dro", &[], rl(&[1.0, 1.0])), "needs `beta`"),
        (with_text, "must be a finite number"),
        (request("stable_reinforce", &[], rl(&[1.0, 1.0])), "use importance_sampling"),
        (request("gspo", &[("clip_low_threshold", 0.9)], rl(&[1.0, 1.0])), "`gspo` needs"),
        (request("ppo", &[], masked), "no input `sequence_ratio_mask`"),
        (request("mine", &[], rl(&[1.0, 1.0])), "the loss `mine` is unknown"),
    ];
    for (request, expected) in cases {
        let failure = PreparedPass::new(&request, 10, 8).unwrap_err();
        assert!(failure.message.contains(expected), "{} lacks {expected}", failure.message);
    }
}
