//! Trains a model by hand, without a recipe: `cargo run --release --example train_by_hand -- MODEL_DIR OUT_DIR`.
//!
//! A demonstration first, then GRPO with a reward for short answers; an adapter in PEFT's layout at the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rlrun::training::{
    AdamParameters, BaseModel, Datum, LoraRequest, LossTensor, PassRequest, SampledTokens, SamplingRequest,
    SharedCores, SpecialTokens, TrainedModel,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(out)) = (arguments.next(), arguments.next()) else {
        return Err("usage: train_by_hand MODEL_DIR OUT_DIR".into());
    };
    let cores = SharedCores::all();
    let base = Arc::new(BaseModel::open("base", Path::new(&model), None, (&cores, cores.total()))?);
    let lora =
        LoraRequest { rank: 16, seed: Some(1), train_unembed: true, train_mlp: true, train_attn: true };
    let mut policy = TrainedModel::new(&base, Some(&lora))?;
    let adam = AdamParameters { learning_rate: 2e-3, grad_clip_norm: 1.0, ..AdamParameters::default() };
    let encode = |text: &str| base.directory().tokenizer().encode(text, SpecialTokens::Omit);

    // Supervised: the loss is on the answer, position i predicts target i.
    let (question, answer) = (encode("1 2 3")?, encode(" 4 5 6")?);
    let input = [&question[..], &answer[..answer.len() - 1]].concat();
    let weights = [vec![0.0; question.len() - 1], vec![1.0; answer.len()]].concat();
    let targets = [&question[1..], &answer[..]].concat();
    let inputs = [("target_tokens", LossTensor::tokens(&targets)), ("weights", LossTensor::floats(weights))];
    let data = vec![Datum::new(input, inputs)];
    let supervised = PassRequest { loss: "cross_entropy".to_owned(), data, ..PassRequest::default() };
    for step in 0..20 {
        let output = policy.pass(&supervised)?;
        policy.optim_step(&adam)?;
        eprintln!("step {step}: loss {:.3}", output.metrics["loss:sum"]);
    }

    // GRPO: shorter answers than the mean of their group are better.
    for step in 0..10 {
        let sampler = policy.sampler(&cores, cores.total())?;
        let group = sampler.sample(&SamplingRequest::new(question.clone(), 8, 16))?.sequences;
        let mean = group.iter().map(|answer| answer.tokens.len() as f32).sum::<f32>() / group.len() as f32;
        let datum = |answer: &SampledTokens| {
            let padding = question.len() - 1;
            let pad = |values: &[f32]| LossTensor::floats([&vec![0.0; padding][..], values].concat());
            let advantage = mean - answer.tokens.len() as f32;
            let inputs = [
                ("target_tokens", LossTensor::tokens(&[&vec![0; padding][..], &answer.tokens].concat())),
                ("advantages", pad(&vec![advantage; answer.tokens.len()])),
                ("logprobs", pad(&answer.logprobs)),
            ];
            Datum::new([&question[..], &answer.tokens[..answer.tokens.len() - 1]].concat(), inputs)
        };
        let data = group.iter().map(datum).collect();
        policy.pass(&PassRequest {
            loss: "ppo".to_owned(),
            data,
            settings: BTreeMap::new(),
            forward_only: false,
        })?;
        policy.optim_step(&adam)?;
        eprintln!("step {step}: {mean} tokens");
    }
    policy.export(Path::new(&out))?;
    Ok(())
}
