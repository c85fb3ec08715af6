//! From `[algorithm]` and `[critic]` to an algorithm: the defaults of its kind, changed by what the recipe says.
//!
//! Invariant: a key that says nothing to the kind is an error, and a resolved recipe holds exactly the keys that do.

use std::path::PathBuf;

use trainer::advantage::AdvantageEstimator;
use trainer::algorithm::Algorithm;
use trainer::loss::{Correction, PolicyLoss};

use super::ranges::Checker;
use super::schema::{self, RawRecipe};
use super::words::{AlgorithmKind, CorrectionKind, CriticKind, Proximal};
use crate::huggingface::RepositoryKind;

/// Factor of the value loss of a critic that is a head of the policy.
const SHARED_COEF: f64 = 0.5;

impl schema::AlgorithmSection {
    /// The algorithm that the keys describe. Weights of rewards are not among them.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        let mut algorithm = self.kind.algorithm();
        let mut given = self.clone();
        given.apply(&mut algorithm);
        algorithm
    }

    /// What a user should know of a kind that does less than its name says.
    #[must_use]
    pub fn note(&self) -> Option<&'static str> {
        (self.kind == AlgorithmKind::Process).then_some(
            "note: `algorithm.kind = \"process\"` judges turns by rewards of their own; without an environment that gives them, \
             or groups of other programs that have them, it trains as \"grpo\" does",
        )
    }

    /// The section with every key that says something to `kind`, as it is by default.
    #[must_use]
    pub fn usual(kind: AlgorithmKind) -> Self {
        let mut section = Self { kind, ..Self::default() };
        section.apply(&mut kind.algorithm());
        section
    }

    /// Changes `algorithm` by the keys that say something to it, and fills in those that are not given. Returns the keys
    /// that are given and say nothing.
    fn apply(&mut self, algorithm: &mut Algorithm) -> Vec<&'static str> {
        let mut without_effect = Vec::new();
        let mut key = |name: &'static str, given: &mut Option<f64>, of: Option<&mut f64>| match (&given, of) {
            (Some(value), Some(of)) => *of = *value,
            (None, Some(of)) => *given = Some(*of),
            (Some(_), None) => without_effect.push(name),
            (None, None) => {}
        };
        let (low, high, cap) = match &mut algorithm.loss {
            PolicyLoss::Clip { low, high, .. }
            | PolicyLoss::Gspo { low, high }
            | PolicyLoss::Gmpo { low, high } => (Some(low), Some(high), None),
            PolicyLoss::Dppo { low, high, cap } => (Some(low), Some(high), Some(cap)),
            PolicyLoss::Cispo { high, .. } => (None, None, Some(high)),
            _ => (None, None, None),
        };
        key("clip_eps_low", &mut self.clip_eps_low, low);
        key("clip_eps_high", &mut self.clip_eps_high, high);
        key("importance_cap", &mut self.importance_cap, cap);
        let beta = match &mut algorithm.loss {
            PolicyLoss::TrajectoryBalance { beta } => Some(beta),
            _ => None,
        };
        key("beta", &mut self.beta, beta);
        let (gamma, lambda, adaptive) = match &mut algorithm.advantage {
            AdvantageEstimator::Gae(gae) => {
                (Some(&mut gae.gamma), Some(&mut gae.lambda_policy), Some(&mut gae.length_adaptive))
            }
            AdvantageEstimator::Whiten { gamma, .. } => (Some(gamma), None, None),
            _ => (None, None, None),
        };
        key("gamma", &mut self.gamma, gamma);
        key("lambda", &mut self.lambda, lambda);
        key("length_adaptive", &mut self.length_adaptive, adaptive);
        key("demonstration_gate", &mut self.demonstration_gate, algorithm.demonstration_gate.as_mut());
        let own_loss = !matches!(algorithm.loss, PolicyLoss::TrajectoryBalance { .. });
        key("nll_coef", &mut self.nll_coef, own_loss.then_some(&mut algorithm.nll_coef));
        key("entropy_share", &mut self.entropy_share, own_loss.then_some(&mut algorithm.entropy_share));
        if algorithm.entropy_share < 1.0 {
            algorithm.entropy_unit = *self.entropy_unit.get_or_insert_default();
        } else if self.entropy_unit.is_some() {
            without_effect.push("entropy_unit");
        }
        self.apply_dual_clip(algorithm, &mut without_effect);
        self.apply_correction(algorithm, &mut without_effect);
        match (&mut algorithm.advantage, self.scale_rewards) {
            (AdvantageEstimator::Group { scale }, Some(given)) => *scale = given,
            (AdvantageEstimator::Group { scale }, None) => self.scale_rewards = Some(*scale),
            (_, Some(_)) => without_effect.push("scale_rewards"),
            (_, None) => {}
        }
        match (&mut algorithm.advantage, self.attempts) {
            (AdvantageEstimator::PassAtK { k }, Some(given)) => *k = given,
            (AdvantageEstimator::PassAtK { k }, None) => self.attempts = Some(*k),
            (_, Some(_)) => without_effect.push("attempts"),
            (_, None) => {}
        }
        if algorithm.demonstration_gate.is_none() && self.demonstration_column.is_some() {
            without_effect.push("demonstration_column");
        }
        algorithm.aggregation = *self.loss_agg.get_or_insert(algorithm.aggregation);
        self.apply_kl(algorithm, &mut without_effect);
        algorithm.entropy_coef = self.entropy_coef;
        without_effect
    }

    fn apply_kl(&mut self, algorithm: &mut Algorithm, without_effect: &mut Vec<&'static str>) {
        algorithm.kl.coef = self.kl_coef;
        if self.kl_coef == 0.0 {
            without_effect.extend(self.kl_estimator.map(|_| "kl_estimator"));
            without_effect.extend(self.kl_in.map(|_| "kl_in"));
        } else {
            algorithm.kl.estimator = *self.kl_estimator.get_or_insert_default();
            algorithm.kl.placement = *self.kl_in.get_or_insert_default();
            let charged = algorithm.advantage.counts_penalties()
                && !matches!(algorithm.loss, PolicyLoss::TrajectoryBalance { .. });
            without_effect.extend((algorithm.kl.in_reward() && !charged).then_some("kl_in"));
        }
    }

    fn apply_dual_clip(&mut self, algorithm: &mut Algorithm, without_effect: &mut Vec<&'static str>) {
        match (&mut algorithm.loss, self.dual_clip) {
            (PolicyLoss::Clip { dual, .. }, given) => *dual = given,
            (_, Some(_)) => without_effect.push("dual_clip"),
            (_, None) => {}
        }
    }

    /// Losses that weigh by the behavior policy themselves have no other correction.
    fn apply_correction(&mut self, algorithm: &mut Algorithm, without_effect: &mut Vec<&'static str>) {
        let own = matches!(
            algorithm.loss,
            PolicyLoss::Cispo { .. }
                | PolicyLoss::Topr { .. }
                | PolicyLoss::Dppo { .. }
                | PolicyLoss::TrajectoryBalance { .. }
        );
        let keys = [
            ("proximal", self.proximal.is_some()),
            ("correction", self.correction.is_some()),
            ("behavior_weight_cap", self.behavior_weight_cap.is_some()),
            ("behavior_weight_floor", self.behavior_weight_floor.is_some()),
        ];
        if own {
            without_effect.extend(keys.iter().filter(|(_, given)| *given).map(|(key, _)| *key));
            return;
        }
        let anchored = algorithm.loss.uses_proximal();
        if !anchored && self.proximal == Some(Proximal::Behavior) {
            // It would take the correction away and put no clip in its place.
            without_effect.push("proximal");
            self.proximal = None;
        }
        // A correction compares with the policy before the step: with it the recipe asks for the decoupled objective.
        let corrected = keys[1..].iter().any(|(_, given)| *given);
        let default = if corrected { Proximal::Recompute } else { algorithm.proximal };
        algorithm.proximal = *self.proximal.get_or_insert(default);
        if algorithm.proximal == Proximal::Behavior {
            // Anchored at the policy that sampled, there is nothing to correct.
            algorithm.correction = Correction::None;
            without_effect.extend(keys[1..].iter().filter(|(_, given)| *given).map(|(key, _)| *key));
            return;
        }
        // An interpolated policy is not known before the updates, so that nothing can be masked by it.
        let default = match algorithm.proximal {
            Proximal::Interpolate => CorrectionKind::TokenTruncate,
            Proximal::Recompute | Proximal::Behavior => CorrectionKind::SequenceMask,
        };
        let kind = *self.correction.get_or_insert(default);
        let (cap, floor) = kind.bounds();
        for (name, given, of) in [
            ("behavior_weight_cap", &mut self.behavior_weight_cap, cap),
            ("behavior_weight_floor", &mut self.behavior_weight_floor, floor),
        ] {
            match of {
                Some(default) => drop(given.get_or_insert(default)),
                None if given.is_some() => without_effect.push(name),
                None => {}
            }
        }
        let high = self.behavior_weight_cap.unwrap_or_default();
        let low = self.behavior_weight_floor.unwrap_or_default();
        algorithm.correction = match kind {
            CorrectionKind::None => Correction::None,
            CorrectionKind::TokenTruncate => Correction::TokenTruncate { cap: high },
            CorrectionKind::SequenceTruncate => Correction::SequenceTruncate { cap: high },
            CorrectionKind::TokenMask => Correction::TokenMask { low, high },
            CorrectionKind::SequenceMask => Correction::SequenceMask { low, high },
            CorrectionKind::GeometricMask => Correction::GeometricMask { low, high },
            CorrectionKind::K3Mask => Correction::K3Mask { high },
        };
    }
}

impl CorrectionKind {
    /// Published upper and lower bound; `None` where there is none.
    fn bounds(self) -> (Option<f64>, Option<f64>) {
        match self {
            Self::None => (None, None),
            Self::TokenTruncate => (Some(2.0), None),
            Self::SequenceTruncate => (Some(5.0), None),
            Self::TokenMask => (Some(5.0), Some(0.5)),
            Self::SequenceMask => (Some(2.0), Some(0.5)),
            Self::GeometricMask => (Some(1.001), Some(0.999)),
            Self::K3Mask => (Some(0.01), None),
        }
    }
}

/// Checks both sections and fills in what the kind says.
pub(super) fn check(raw: &mut RawRecipe, checker: &mut Checker<'_>) {
    let mut algorithm = raw.algorithm.kind.algorithm();
    let kind = raw.algorithm.kind.as_str();
    for key in raw.algorithm.apply(&mut algorithm) {
        let path = format!("algorithm.{key}");
        let message = format!("`{path}` has no effect on `algorithm.kind = \"{kind}\"` as it is set up here");
        // TRL and others call the strength of the pull towards the reference so.
        let help = if key == "beta" {
            "remove it; what TRL calls `beta` is `algorithm.kl_coef`"
        } else {
            "remove it"
        };
        checker.report(&path, message, help);
    }
    check_values(&raw.algorithm, checker);
    if algorithm.correction.masks() && algorithm.proximal == Proximal::Interpolate {
        let message =
            "an interpolated proximal policy follows the updates, so no token can be masked by it beforehand";
        let paths = ["algorithm.correction", "algorithm.proximal"];
        checker.report_latest(&paths, message, "set `algorithm.proximal` to \"recompute\"");
    }
    check_reference(raw, &algorithm, checker);
    check_group_size(raw, &algorithm, checker);
    check_critic(raw, &algorithm, checker);
    if algorithm.advantage == AdvantageEstimator::Greedy && raw.buffer.dedup {
        let message = "`buffer.dedup` would leave out the greedy completion that `algorithm.kind = \"remax\"` compares with";
        checker.report_latest(&["buffer.dedup", "algorithm.kind"], message, "set `buffer.dedup = false`");
    }
}

fn check_values(algorithm: &schema::AlgorithmSection, checker: &mut Checker<'_>) {
    let (low, high) = (algorithm.behavior_weight_floor, algorithm.behavior_weight_cap);
    if let (Some(low), Some(high)) = (low, high)
        && low >= high
    {
        let paths = ["algorithm.behavior_weight_floor", "algorithm.behavior_weight_cap"];
        let message = format!("the bounds of the correction are {low} and {high}: nothing lies between them");
        checker.report_latest(&paths, message, "the floor must be below the cap");
    }
    if algorithm.dual_clip.is_some_and(|dual| dual <= 1.0) {
        let message = "`algorithm.dual_clip` must be above 1, or it would clip what has not moved";
        checker.report("algorithm.dual_clip", message, "3 is usual");
    }
}

/// An unused reference, a missing teacher.
fn check_reference(raw: &mut RawRecipe, algorithm: &Algorithm, checker: &mut Checker<'_>) {
    let distils = algorithm.advantage == AdvantageEstimator::Teacher;
    let given = raw.algorithm.reference.take();
    if given.is_none() && distils {
        let message = "`algorithm.kind = \"distill\"` needs a teacher: `algorithm.reference`";
        checker.report("algorithm.kind", message, "name its model directory");
    }
    if let Some(path) = given {
        if !algorithm.needs_reference() {
            let message = "`algorithm.reference` has no effect: nothing is compared with it";
            checker.report("algorithm.reference", message, "set `algorithm.kl_coef`, or remove it");
        }
        let (key, help) = ("algorithm.reference", "give a model directory, or hf:OWNER/NAME");
        let found = super::checks::model_or_dataset(&path, RepositoryKind::Model, key, help, checker);
        raw.algorithm.reference = found.or(Some(PathBuf::new()));
    }
}

fn check_group_size(raw: &RawRecipe, algorithm: &Algorithm, checker: &mut Checker<'_>) {
    let (kind, size) = (raw.algorithm.kind.as_str(), raw.rollout.group_size);
    if size == 1 && algorithm.needs_groups() {
        let message =
            "`rollout.group_size` is 1: a trajectory that is compared with nothing has no advantage";
        let help = format!("`algorithm.kind = \"{kind}\"` needs 2 or more");
        checker.report("rollout.group_size", message, &help);
    }
    if let AdvantageEstimator::PassAtK { k } = algorithm.advantage
        && k > size
    {
        let message =
            format!("`algorithm.attempts` is {k}, but a group has only {size} (`rollout.group_size`)");
        checker.report_latest(&["algorithm.attempts", "rollout.group_size"], message, "");
    }
}

fn check_critic(raw: &mut RawRecipe, algorithm: &Algorithm, checker: &mut Checker<'_>) {
    let kind = raw.algorithm.kind.as_str();
    if !algorithm.needs_critic() {
        if raw.critic.is_some() {
            let message = format!("`algorithm.kind = \"{kind}\"` has no critic");
            checker.report("critic", message, "remove `[critic]`, or set `algorithm.kind = \"ppo\"`");
        }
        return;
    }
    let policy_rate = raw.trainer.learning_rate;
    let critic = raw.critic.get_or_insert_default();
    let (without_effect, word): (Vec<(&str, bool)>, _) = match critic.kind {
        CriticKind::Shared => {
            if raw.lora.is_some() {
                let message = "`[lora]` would freeze the value head of a shared critic";
                let help = "set `critic.kind = \"separate\"`, or remove `[lora]`";
                checker.report("critic.kind", message, help);
            }
            let keys = [
                ("learning_rate", critic.learning_rate.is_some()),
                ("pretrain_steps", critic.pretrain_steps.is_some()),
            ];
            critic.coef.get_or_insert(SHARED_COEF);
            (keys.to_vec(), "shared")
        }
        CriticKind::Separate => {
            let keys = [("coef", critic.coef.is_some())];
            critic.learning_rate.get_or_insert(policy_rate);
            critic.pretrain_steps.get_or_insert(0);
            (keys.to_vec(), "separate")
        }
    };
    for (key, _) in without_effect.iter().filter(|(_, given)| *given) {
        let path = format!("critic.{key}");
        let message = format!("`{path}` has no effect with `critic.kind = \"{word}\"`");
        checker.report(&path, message, "remove it");
    }
}
