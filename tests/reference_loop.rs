//! The algorithm as one plain loop: sample, score, compare, update. Read this first.
//!
//! No pipeline, no buffer, no cache, no batching, no threads: completions are sampled one token at a time by running the
//! whole sequence again. Only the network itself (`model`), the random streams and the plan of the leaves are shared with
//! rlrun; advantage, loss, the sum over leaves, clipping and AdamW are written out. `parity.rs` asserts that rlrun with
//! `buffer.max_staleness = 0` ends with the same weights, bit for bit.

use std::ops::Range;
use std::sync::Arc;

use model::{
    Config, Decoder, Draw, Gradients, ModelDirectory, Pack, Parameters, Prediction, PredictionGradient,
    Recompute, Sampling, Target, ThreadPool, TrainedTargets,
};
use rollout::PromptSet;
use rollout::engine::{random_stream, uniform};
use trainer::plan::{MicroBatch, plan};
use trajectory::{GroupId, PolicyVersion, Sample, SampleStreams, VersionRun};

/// The settings of the loop; the names are those of the recipe.
pub(crate) struct Reference<'a> {
    pub(crate) directory: &'a ModelDirectory,
    pub(crate) prompts: &'a PromptSet,
    pub(crate) reward: fn(&str) -> f64,
    pub(crate) seed: u64,
    pub(crate) steps: u64,
    pub(crate) batch_groups: u64,
    pub(crate) group_size: u32,
    pub(crate) max_completion_length: usize,
    pub(crate) learning_rate: f32,
    pub(crate) max_grad_norm: f32,
    pub(crate) leaves: usize,
}

/// A completion: prompt and sampled tokens, and their log-probabilities under the policy that sampled them.
struct Trajectory {
    token_ids: Vec<u32>,
    prompt_length: usize,
    behavior_logprobs: Vec<f32>,
    reward: f64,
    advantage: f64,
}

impl Trajectory {
    fn prompt(&self) -> &[u32] {
        &self.token_ids[..self.prompt_length]
    }
}

/// AdamW with `beta1 = 0.9`, `beta2 = 0.999`, `eps = 1e-8`, no weight decay.
struct Adam {
    first: Vec<f32>,
    second: Vec<f32>,
    updates: i32,
}

impl Reference<'_> {
    /// Trains, and returns the weights after the last step with the mean reward of every step.
    pub(crate) fn run(&self) -> (Parameters, Vec<f64>) {
        let config = self.directory.config();
        let mut parameters = Arc::new(self.directory.load_parameters().unwrap());
        let len = parameters.values().len();
        let mut adam = Adam { first: vec![0.0; len], second: vec![0.0; len], updates: 0 };
        let mut rewards = Vec::new();
        for step in 0..self.steps {
            let policy = Decoder::trainable(config, &parameters, Recompute::None);

            // Sample and score.
            let mut groups: Vec<Vec<Trajectory>> = Vec::new();
            for group in step * self.batch_groups..(step + 1) * self.batch_groups {
                groups.push(
                    (0..self.group_size).map(|index| self.sample(&policy, GroupId(group), index)).collect(),
                );
            }
            let all = || groups.iter().flatten();
            rewards.push(all().map(|t| t.reward).sum::<f64>() / all().count() as f64);

            // Compare each trajectory with the others of its group.
            let batch_tokens: usize = all().map(|t| t.behavior_logprobs.len()).sum();
            groups.retain(|group| group.iter().any(|t| t.reward != group[0].reward));
            groups.iter_mut().for_each(|group| set_advantages(group));

            // One update on all of them.
            if !groups.is_empty() {
                let trained: Vec<&Trajectory> = groups.iter().flatten().collect();
                let leaves: Vec<Vec<f32>> = self
                    .leaves(&trained, config)
                    .iter()
                    .map(|leaf| gradients(&policy, &parameters, leaf, batch_tokens))
                    .collect();
                let mut gradients = tree(&leaves);
                drop(policy);
                clip(&mut gradients, self.max_grad_norm);
                let values = Arc::get_mut(&mut parameters).unwrap().values_mut();
                adam.update(values, &gradients, self.learning_rate);
            }
        }
        (Arc::into_inner(parameters).unwrap(), rewards)
    }

    /// The trajectories of each leaf of a step.
    fn leaves<'a>(&self, trajectories: &[&'a Trajectory], config: &Config) -> Vec<Vec<&'a Trajectory>> {
        let sample = |t: &&Trajectory| {
            let prompt = t.prompt_length;
            Sample::new(SampleStreams {
                token_ids: t.token_ids.clone(),
                loss_mask: (0..t.token_ids.len()).map(|token| token >= prompt).collect(),
                behavior_logprobs: [&vec![0.0; prompt][..], &t.behavior_logprobs].concat(),
                versions: vec![VersionRun { version: PolicyVersion(0), len: t.token_ids.len() as u32 }],
                kept: None,
                experts: None,
                temperature: 1.0,
            })
        };
        let samples: Vec<Sample> = trajectories.iter().map(|t| sample(t).unwrap()).collect();
        let plan = plan(&samples.iter().collect::<Vec<_>>(), config, usize::MAX, self.leaves);
        let of_leaf = |leaf: &Vec<MicroBatch>| {
            leaf.iter().flat_map(|batch| &batch.rows).map(|row| trajectories[*row]).collect()
        };
        plan.iter().map(of_leaf).collect()
    }

    /// Samples one completion, token by token.
    fn sample(&self, policy: &Decoder, group: GroupId, index: u32) -> Trajectory {
        let (_, prompt) = self.prompts.of(group);
        let mut rng = random_stream(self.seed, group, index);
        let mut token_ids = prompt.to_vec();
        let mut behavior_logprobs = Vec::new();
        let stop = self.directory.stop_token_ids();
        while behavior_logprobs.len() < self.max_completion_length {
            let mut pack = Pack::new();
            pack.push(&token_ids).unwrap();
            let logits = policy.logits(&pack).unwrap();
            let mut last: Vec<f32> = logits.get(token_ids.len() - 1).unwrap().to_vec1().unwrap();
            let draw = Draw::new(&mut last, Sampling::PLAIN, uniform(&mut rng));
            token_ids.push(draw.token);
            behavior_logprobs.push(draw.logprob);
            if stop.contains(&draw.token) {
                break;
            }
        }
        let mut completion = &token_ids[prompt.len()..];
        if completion.last().is_some_and(|token| stop.contains(token)) {
            completion = &completion[..completion.len() - 1];
        }
        let text = self.directory.tokenizer().decode(completion).unwrap();
        let reward = (self.reward)(&text);
        Trajectory { prompt_length: prompt.len(), token_ids, behavior_logprobs, reward, advantage: 0.0 }
    }
}

/// GRPO: `(r - mean) / (std + 1e-6)` within the group.
fn set_advantages(group: &mut [Trajectory]) {
    let n = group.len() as f64;
    let mean = group.iter().map(|t| t.reward).sum::<f64>() / n;
    let variance = group.iter().map(|t| (t.reward - mean).powi(2)).sum::<f64>() / (n - 1.0);
    for trajectory in group {
        trajectory.advantage = (trajectory.reward - mean) / (variance.sqrt() + 1e-6);
    }
}

/// The sum of the gradients of the leaves, a power of two, as a balanced binary tree.
fn tree(leaves: &[Vec<f32>]) -> Vec<f32> {
    match leaves {
        [leaf] => leaf.clone(),
        _ => {
            let (left, right) = leaves.split_at(leaves.len() / 2);
            tree(left).iter().zip(tree(right)).map(|(left, right)| left + right).collect()
        }
    }
}

/// Gradient of the loss of one leaf, `[weights]`; the loss is a mean over all tokens of the batch. On policy the ratio is 1,
/// so each token's loss is `-advantage * ratio` and its derivative by the log-probability `-advantage`; groups whose rewards
/// are all equal would add zero.
fn gradients(
    policy: &Decoder,
    parameters: &Parameters,
    leaf: &[&Trajectory],
    batch_tokens: usize,
) -> Vec<f32> {
    let (mut pack, mut rows, mut targets, mut slopes) = (Pack::new(), Vec::new(), Vec::new(), Vec::new());
    let token_weight = 1.0 / batch_tokens as f64;
    for group in leaf.chunk_by(|a, b| a.prompt() == b.prompt()) {
        // The prompt goes through the network once for the trajectories of a group.
        let prompt = group[0].prompt_length;
        let prefix = pack.push(&group[0].token_ids[..prompt]).unwrap();
        for trajectory in group {
            let last = trajectory.token_ids.len() - 1;
            let rest = &trajectory.token_ids[prompt..last];
            let start = pack.push_continuation(prefix, rest).unwrap_or(0);
            for position in prompt..=last {
                rows.push(if position == prompt {
                    prefix + prompt - 1
                } else {
                    start + position - 1 - prompt
                });
                targets.push(Target { token: trajectory.token_ids[position], temperature: 1.0, kept: None });
                let logprob = (-trajectory.advantage * token_weight) as f32;
                slopes.push(PredictionGradient { logprob, entropy: 0.0, value: 0.0 });
            }
        }
    }
    let mut gradients = Gradients::zeros(parameters.layout());
    if leaf.is_empty() {
        return gradients.values().to_vec();
    }
    let behavior: Vec<f32> = leaf.iter().flat_map(|t| &t.behavior_logprobs).copied().collect();
    let samples: Vec<usize> = leaf.iter().map(|t| t.behavior_logprobs.len()).collect();
    let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &samples };
    let mut seen = 0;
    // The pass predicts some trajectories, and continues with the derivatives of the loss by these predictions.
    let mut slopes_of = |_: Range<usize>, predictions: &[Prediction]| {
        let own = seen..seen + predictions.len();
        seen = own.end;
        let logprobs = predictions.iter().map(|p| &p.logprob);
        assert!(logprobs.eq(&behavior[own.clone()]), "trainer and sampler agree bit for bit");
        slopes[own].to_vec()
    };
    policy.train(&pack, trained, &mut slopes_of, &mut gradients, &ThreadPool::single()).unwrap();
    assert_eq!(seen, slopes.len());
    gradients.values().to_vec()
}

/// Scales the gradient down to `max_norm`.
fn clip(gradients: &mut [f32], max_norm: f32) {
    let norm = gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt() as f32;
    let scale = max_norm / (norm + 1e-6);
    if scale < 1.0 {
        gradients.iter_mut().for_each(|g| *g *= scale);
    }
}

impl Adam {
    fn update(&mut self, values: &mut [f32], gradients: &[f32], learning_rate: f32) {
        self.updates += 1;
        let step_size = learning_rate / (1.0 - 0.9_f32.powi(self.updates));
        let second_scale = 1.0 / (1.0 - 0.999_f32.powi(self.updates));
        for (i, g) in gradients.iter().enumerate() {
            self.first[i] = 0.9 * self.first[i] + (1.0 - 0.9) * g;
            self.second[i] = 0.999 * self.second[i] + (1.0 - 0.999) * g * g;
            values[i] -= step_size * self.first[i] / ((self.second[i] * second_scale).sqrt() + 1e-8);
        }
    }
}
