//! What the metrics of a run say about whether it learns: a batch without anything to learn from, and the signs of a
//! collapse.
//!
//! Invariant: it reads metrics and nothing else, names a problem only on evidence that it prints, and names only keys
//! that would change something in this recipe.

use std::collections::VecDeque;

use crate::metrics::Metrics;
use crate::recipe::Recipe;
use crate::recipe::words::Proximal;

/// Steps that a mean is taken over: single batches are too noisy to be compared.
const WINDOW: usize = 5;

/// A fall of the mean reward counts from this many standard deviations of a batch's rewards; the mean of [`WINDOW`]
/// batches has a standard error of a tenth of that even with 16 trajectories in a batch.
const FALL: f64 = 0.5;

/// How much more of the completions have to reach the length limit.
const MORE_CUT_OFF: f64 = 0.1;

/// By what factor `kl/mismatch` has to rise, and from where on it matters, nats.
const MORE_MISMATCH: (f64, f64) = (3.0, 0.01);

/// By what factor the entropy has to rise.
const MORE_ENTROPY: f64 = 1.5;

/// Steps in a row without anything to learn from after which the keys are named.
const UNLEARNABLE: u64 = 3;

/// Watches the metrics of a run, step by step.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    /// The remedies against a collapse in this recipe.
    remedies: String,
    /// Whether a trajectory is compared with others of its group.
    needs_groups: bool,
    recent: VecDeque<Signs>,
    /// The window with the largest mean reward.
    best: Option<Signs>,
    /// Current and greatest number of steps in a row without anything to learn from.
    unlearnable: (u64, u64),
    steps: u64,
    /// The step of the first sign of a collapse, and its description.
    collapse: Option<(u64, String)>,
}

/// The observed metrics of a step, or their means over a window of steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Signs {
    reward: f64,
    /// Standard deviation of the rewards of a batch.
    spread: f64,
    /// Share of the completions that reached the length limit.
    cut_off: f64,
    mismatch: f64,
    entropy: f64,
}

impl Diagnosis {
    pub(crate) fn new(recipe: &Recipe) -> Self {
        Self {
            remedies: remedies(recipe),
            needs_groups: recipe.supervised.is_none() && recipe.algorithm().needs_groups(),
            recent: VecDeque::new(),
            best: None,
            unlearnable: (0, 0),
            steps: 0,
            collapse: None,
        }
    }

    /// The problems of a step, a sentence each for the step table.
    pub(crate) fn observe(&mut self, metrics: &Metrics) -> Vec<String> {
        self.steps += 1;
        let unchanged = metrics.get("optim/updates") == Some(0.0);
        let found = [
            self.nothing_to_learn(metrics),
            self.collapsing(metrics),
            unchanged.then(|| "no policy update".to_owned()),
        ];
        found.into_iter().flatten().collect()
    }

    /// The problems of the run as a whole, a line each.
    pub(crate) fn summary(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if 2 * self.unlearnable.1 >= self.steps && self.unlearnable.1 > 0 {
            lines.push(format!(
                "{} of {} steps in a row had nothing to learn from: {UNLEARNABLE_HELP}",
                self.unlearnable.1, self.steps
            ));
        }
        if let Some((step, found)) = &self.collapse {
            lines.push(format!("the policy began to collapse at step {step}: {found}; {}", self.remedies));
        }
        lines
    }

    fn nothing_to_learn(&mut self, metrics: &Metrics) -> Option<String> {
        let (reward, spread) = (metrics.get("reward/mean")?, metrics.get("reward/std")?);
        let equal_groups = metrics.get("reward/frac_zero_std").is_some_and(|share| share >= 1.0);
        let found = if spread == 0.0 {
            format!("every trajectory has the reward {reward:.3}: nothing can be learnt")
        } else if self.needs_groups && equal_groups {
            "no group has two different rewards: nothing can be learnt".to_owned()
        } else {
            self.unlearnable.0 = 0;
            return None;
        };
        self.unlearnable.0 += 1;
        self.unlearnable.1 = self.unlearnable.1.max(self.unlearnable.0);
        Some(match self.unlearnable.0 {
            UNLEARNABLE.. => format!("{found}, {} steps in a row: {UNLEARNABLE_HELP}", self.unlearnable.0),
            _ => found,
        })
    }

    fn collapsing(&mut self, metrics: &Metrics) -> Option<String> {
        let sign = |name| metrics.get(name).filter(|value| value.is_finite());
        let signs = Signs {
            reward: sign("reward/mean")?,
            spread: sign("reward/std")?,
            cut_off: sign("completions/clipped_ratio")?,
            mismatch: sign("kl/mismatch")?,
            entropy: sign("entropy/mean")?,
        };
        self.recent.push_back(signs);
        if self.recent.len() > WINDOW {
            self.recent.pop_front();
        }
        if self.recent.len() < WINDOW {
            return None;
        }
        let now = Signs::mean(&self.recent);
        let best = match self.best {
            Some(best) if best.reward >= now.reward => best,
            _ => *self.best.insert(now),
        };
        if !best.has_fallen_to(&now) {
            // A policy that has recovered has not collapsed.
            self.collapse = None;
            return None;
        }
        let found = best.evidence(&now)?;
        let step = metrics.get("step").unwrap_or_default() as u64;
        match &self.collapse {
            Some(_) => Some(format!("the policy is collapsing: {found}")),
            None => {
                self.collapse = Some((step, found.clone()));
                Some(format!("the policy is collapsing: {found}; {}", self.remedies))
            }
        }
    }
}

/// The remedies for rewards that do not differ.
const UNLEARNABLE_HELP: &str = "look at the samples and at `rlrun reward test RECIPE`; easier or harder tasks, a larger \
                                `rollout.group_size` or a higher `rollout.temperature` make rewards differ";

impl Signs {
    fn mean(of: &VecDeque<Self>) -> Self {
        let mean = |field: fn(&Self) -> f64| of.iter().map(field).sum::<f64>() / of.len() as f64;
        Self {
            reward: mean(|s| s.reward),
            spread: mean(|s| s.spread),
            cut_off: mean(|s| s.cut_off),
            mismatch: mean(|s| s.mismatch),
            entropy: mean(|s| s.entropy),
        }
    }

    /// Whether the reward has fallen from here to `now`.
    fn has_fallen_to(&self, now: &Self) -> bool {
        // A spread near 0 belongs to a policy that was always right: a tenth of its reward is a fall then.
        let fall = (FALL * self.spread).max(0.1 * self.reward.abs());
        now.reward < self.reward - fall
    }

    /// The fall from here to `now`, if the policy shows why.
    fn evidence(&self, now: &Self) -> Option<String> {
        let mut evidence = vec![format!("reward {:.3} -> {:.3}", self.reward, now.reward)];
        if now.cut_off > self.cut_off + MORE_CUT_OFF {
            evidence.push(format!(
                "completions at the length limit {:.0} % -> {:.0} %",
                100.0 * self.cut_off,
                100.0 * now.cut_off
            ));
        }
        let (factor, least) = MORE_MISMATCH;
        if now.mismatch > (factor * self.mismatch).max(least) {
            evidence.push(format!("kl/mismatch {:.4} -> {:.4}", self.mismatch, now.mismatch));
        }
        if now.entropy > MORE_ENTROPY * self.entropy {
            evidence.push(format!("entropy {:.3} -> {:.3}", self.entropy, now.entropy));
        }
        (evidence.len() > 1).then(|| evidence.join(", "))
    }
}

/// The keys that bound how far a step goes from the policy that sampled, as far as the recipe has not set them so.
fn remedies(recipe: &Recipe) -> String {
    let given = &recipe.algorithm;
    let mut keys = Vec::new();
    let clipped = recipe.supervised.is_none() && recipe.algorithm().loss.uses_proximal();
    if clipped && given.proximal.is_some_and(|proximal| proximal != Proximal::Behavior) {
        keys.push("`algorithm.proximal = \"behavior\"`");
        if !recipe.algorithm().correction.masks() {
            keys.push("`algorithm.correction = \"sequence_mask\"`");
        }
    }
    keys.push("a smaller `trainer.learning_rate`");
    if recipe.buffer.max_staleness > 0 {
        keys.push("a smaller `buffer.max_staleness`");
    }
    format!("what helps: {}", keys.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch() -> Diagnosis {
        Diagnosis {
            remedies: "what helps: `key`".to_owned(),
            needs_groups: true,
            recent: VecDeque::new(),
            best: None,
            unlearnable: (0, 0),
            steps: 0,
            collapse: None,
        }
    }

    fn step(step: u64, reward: f64, signs: CollapseSigns) -> Metrics {
        let CollapseSigns { cut_off, mismatch, entropy } = signs;
        let mut metrics = Metrics::default();
        for (name, value) in [
            ("step", step as f64),
            ("reward/mean", reward),
            ("reward/std", (reward * (1.0 - reward)).max(0.0).sqrt()),
            ("reward/frac_zero_std", 0.2),
            ("completions/clipped_ratio", cut_off),
            ("kl/mismatch", mismatch),
            ("entropy/mean", entropy),
        ] {
            metrics.set(name, value);
        }
        metrics
    }

    #[derive(Clone, Copy)]
    struct CollapseSigns {
        cut_off: f64,
        mismatch: f64,
        entropy: f64,
    }

    const WELL: CollapseSigns = CollapseSigns { cut_off: 0.01, mismatch: 0.002, entropy: 0.2 };

    #[test]
    fn a_collapse_is_named_with_its_evidence_and_the_keys_once() {
        let mut diagnosis = watch();
        for i in 0..20 {
            assert!(diagnosis.observe(&step(i, 0.5 + 0.02 * i as f64, WELL)).is_empty());
        }
        let falling = |i: u64| {
            let lost = (i - 19) as f64 / 10.0;
            let signs =
                CollapseSigns { cut_off: 0.9 * lost, mismatch: 0.002 + 0.1 * lost, entropy: 0.2 + lost };
            step(i, 0.9 - 0.8 * lost, signs)
        };
        let said: Vec<String> = (20..30).flat_map(|i| diagnosis.observe(&falling(i))).collect();
        let first = &said[0];
        for part in ["reward 0.8", "length limit", "kl/mismatch", "entropy", "what helps: `key`"] {
            assert!(first.contains(part), "{first}");
        }
        assert!(said.last().unwrap().starts_with("the policy is collapsing: reward"));
        assert_eq!(said.iter().filter(|said| said.contains("what helps")).count(), 1, "{said:?}");
        assert!(diagnosis.summary()[0].starts_with("the policy began to collapse at step 2"));
        (30..40).for_each(|i| drop(diagnosis.observe(&step(i, 0.9, WELL))));
        assert_eq!(diagnosis.summary(), Vec::<String>::new(), "it has recovered");
    }

    #[test]
    fn a_fall_alone_and_noise_are_no_collapse() {
        let mut diagnosis = watch();
        for i in 0..60 {
            // The reward varies between batches; at the end the tasks are harder.
            let noise = if i % 2 == 0 { 0.06 } else { -0.06 };
            let reward = if i < 40 { 0.7 + noise } else { 0.3 + noise };
            assert_eq!(diagnosis.observe(&step(i, reward, WELL)), Vec::<String>::new(), "step {i}");
        }
        assert_eq!(diagnosis.summary(), Vec::<String>::new());
    }

    #[test]
    fn rewards_that_do_not_differ_are_named_at_once() {
        let mut diagnosis = watch();
        let constant = step(1, 0.0, WELL);
        let found = diagnosis.observe(&constant);
        assert_eq!(found, ["every trajectory has the reward 0.000: nothing can be learnt"]);
        let mut equal = step(2, 0.5, WELL);
        equal.set("reward/frac_zero_std", 1.0);
        equal.set("optim/updates", 0.0);
        let found = diagnosis.observe(&equal);
        assert_eq!(found, ["no group has two different rewards: nothing can be learnt", "no policy update"]);
        assert!(diagnosis.observe(&constant)[0].contains("3 steps in a row: look at the samples"));
        assert!(diagnosis.summary()[0].starts_with("3 of 3 steps in a row had nothing to learn from"));
        assert!(diagnosis.observe(&step(4, 0.5, WELL)).is_empty());
        diagnosis.needs_groups = false;
        assert_eq!(diagnosis.observe(&equal), ["no policy update"], "an advantage over the batch differs");
    }
}
