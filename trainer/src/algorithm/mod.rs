//! Algorithms: one file each, which combines an advantage estimator of [`advantage`](crate::advantage) with a loss and
//! an off-policy correction of [`loss`](crate::loss).
//!
//! Invariant: an algorithm is data. [`update`](crate::update) interprets it; a new algorithm of existing parts needs
//! only its file, a variant of [`AlgorithmKind`] and a row in `algorithms!`.

mod aipo;
mod cispo;
mod dapo;
mod distill;
mod dppo;
mod dr_grpo;
mod gdpo;
mod gmpo;
mod grpo;
mod gspo;
mod hpt;
mod opo;
mod pass_at_k;
mod ppo;
mod process;
mod reinforce;
mod reinforce_pp;
mod reinforce_pp_baseline;
mod remax;
mod rloo;
mod sapo;
mod scale_rl;
mod tb;
mod topr;
mod vapo;

use serde::{Deserialize, Serialize};

use crate::advantage::AdvantageEstimator;
use crate::loss::{Aggregation, Correction, KlPenalty, PolicyLoss};

/// An algorithm: the parts of the loss of a training step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Algorithm {
    /// Advantage estimator.
    pub advantage: AdvantageEstimator,
    /// Policy loss.
    pub loss: PolicyLoss,
    /// Proximal policy: the anchor of the clip.
    pub proximal: Proximal,
    /// Off-policy correction.
    pub correction: Correction,
    /// Aggregation of token losses.
    pub aggregation: Aggregation,
    /// KL penalty from the reference policy.
    pub kl: KlPenalty,
    /// Coefficient of the entropy bonus, per nat.
    pub entropy_coef: f64,
    /// Coefficient of the negative log-likelihood of correct trajectories, a mean over their tokens (VAPO).
    pub nll_coef: f64,
    /// Share of tokens, or turns, with a policy loss: those of the largest entropy in the batch (arXiv 2506.01939); 1 for all.
    /// The denominators do not change.
    pub entropy_share: f64,
    /// What the share is of.
    pub entropy_unit: EntropyUnit,
    /// Whether groups with equal rewards leave the batch, its denominators and its standard deviation.
    pub drop_zero_variance: bool,
    /// HPT gate: a demonstration replaces a group whose share of correct answers is at most this.
    pub demonstration_gate: Option<f64>,
}

/// What is selected by its entropy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntropyUnit {
    /// Tokens, by their entropy (arXiv 2506.01939).
    #[default]
    Token,
    /// Turns of episodes, by the mean entropy of their tokens (DART, arXiv 2509.23866).
    Turn,
}

/// The proximal policy: the anchor of the clip and the numerator of the off-policy correction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Proximal {
    /// The policy at the start of the step: decoupled PPO (AReaL, arXiv 2505.24298).
    Recompute,
    /// Interpolated between behavior and current policy by staleness, without a forward pass (A-3PO).
    Interpolate,
    /// The behavior policy, without a correction: the clip bounds the distance from it (PPO, arXiv 1707.06347).
    #[default]
    Behavior,
}

/// Algorithms by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmKind {
    /// GRPO (DeepSeekMath, arXiv 2402.03300): group-normalised rewards as advantages, PPO's clipped loss.
    #[default]
    Grpo,
    /// Dr.GRPO (arXiv 2503.20783): GRPO without its two biases.
    DrGrpo,
    /// DAPO (arXiv 2503.14476): a higher upper clip bound and a mean over tokens.
    Dapo,
    /// RLOO (arXiv 2402.14740): the baseline is the mean reward of the other trajectories of the group.
    Rloo,
    /// REINFORCE (Williams 1992) with the batch mean as baseline.
    Reinforce,
    /// REINFORCE++ (arXiv 2501.03262): returns whitened over the batch, PPO's clip, no critic.
    ReinforcePp,
    /// REINFORCE++-baseline (arXiv 2501.03262): the group mean is subtracted before whitening over the batch.
    ReinforcePpBaseline,
    /// ReMax (arXiv 2310.10505): the baseline is the reward of the greedy completion of the task.
    Remax,
    /// OPO (arXiv 2505.23585): exact on-policy training with a length-weighted baseline of minimum variance.
    Opo,
    /// GSPO (arXiv 2507.18071): ratio and clip of the whole sequence.
    Gspo,
    /// GMPO (arXiv 2507.20673): the geometric mean of clipped token ratios, with wide bounds.
    Gmpo,
    /// CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a clipped importance weight; no token loses its gradient.
    Cispo,
    /// ScaleRL (arXiv 2510.13786): CISPO with batch-normalised rewards and a mean over prompts.
    ScaleRl,
    /// AIPO (LlamaRL, arXiv 2505.24034): policy gradient with an importance weight that is bounded from above.
    Aipo,
    /// TOPR (arXiv 2503.14286): imitation of positive trajectories, tapered importance sampling of negative ones.
    Topr,
    /// SAPO (arXiv 2511.20347): a smooth gate on the ratio instead of a clip, sharper for negative advantages.
    Sapo,
    /// DPPO (arXiv 2602.04879): the trust region bounds the divergence of the policies instead of their ratio.
    Dppo,
    /// PPO (arXiv 1707.06347) with a critic and generalised advantage estimation.
    Ppo,
    /// VAPO (arXiv 2504.05118): PPO with a length-adaptive lambda, a higher upper clip bound and a likelihood loss on
    /// correct answers.
    Vapo,
    /// Trajectory balance (TBA, arXiv 2503.18929): fits the policy to `reference * exp(reward / beta)`.
    Tb,
    /// GDPO (arXiv 2601.05242): every reward component is normalised separately before the sum.
    Gdpo,
    /// Pass@k training (arXiv 2508.10751): a task counts as solved if one of k attempts is correct.
    PassAtK,
    /// Process supervision (DeepSeekMath, arXiv 2402.03300): the advantage of a token sums the rewards of its turn and
    /// later turns. The same as [`Self::Grpo`] for trajectories without turn rewards.
    Process,
    /// HPT (arXiv 2509.04419): reinforcement learning on tasks that the policy solves, supervised fine-tuning on the
    /// others.
    Hpt,
    /// On-policy distillation: the advantage of a token is the teacher's log-probability minus the policy's.
    Distill,
}

/// Rows of a variant and its constructor of [`Algorithm`], which has the name of a recipe.
macro_rules! algorithms {
    ($($kind:ident => $name:ident,)*) => {
        impl AlgorithmKind {
            /// All algorithms.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// The algorithm with its published defaults.
            #[must_use]
            pub fn algorithm(self) -> Algorithm {
                match self {
                    $(Self::$kind => Algorithm::$name(),)*
                }
            }

            /// The name in a recipe.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$kind => stringify!($name),)*
                }
            }
        }
    };
}

algorithms! {
    Grpo => grpo,
    DrGrpo => dr_grpo,
    Dapo => dapo,
    Rloo => rloo,
    Reinforce => reinforce,
    ReinforcePp => reinforce_pp,
    ReinforcePpBaseline => reinforce_pp_baseline,
    Remax => remax,
    Opo => opo,
    Gspo => gspo,
    Gmpo => gmpo,
    Cispo => cispo,
    ScaleRl => scale_rl,
    Aipo => aipo,
    Topr => topr,
    Sapo => sapo,
    Dppo => dppo,
    Ppo => ppo,
    Vapo => vapo,
    Tb => tb,
    Gdpo => gdpo,
    PassAtK => pass_at_k,
    Process => process,
    Hpt => hpt,
    Distill => distill,
}

impl Algorithm {
    /// Base of losses that are not anchored at the behavior policy: the proximal policy is that at the start of the
    /// step, and sequences whose importance ratio is outside 0.5 to 2 are masked.
    #[must_use]
    pub fn decoupled() -> Self {
        Self {
            proximal: Proximal::Recompute,
            correction: Correction::SequenceMask { low: 0.5, high: 2.0 },
            ..Self::grpo()
        }
    }

    /// Whether a step needs reference log-probabilities.
    #[must_use]
    pub fn needs_reference(&self) -> bool {
        self.kl.coef != 0.0
            || self.advantage == AdvantageEstimator::Teacher
            || matches!(self.loss, PolicyLoss::TrajectoryBalance { .. })
    }

    /// Whether a step needs a critic.
    #[must_use]
    pub fn needs_critic(&self) -> bool {
        matches!(self.advantage, AdvantageEstimator::Gae(_))
    }

    /// Whether a step needs to know which answers are correct; trajectories without a verdict are skipped then.
    #[must_use]
    pub fn needs_correct(&self) -> bool {
        matches!(self.advantage, AdvantageEstimator::PassAtK { .. })
            || self.demonstration_gate.is_some()
            || self.nll_coef != 0.0
    }

    /// Whether the algorithm needs groups of more than one trajectory.
    #[must_use]
    pub fn needs_groups(&self) -> bool {
        self.advantage.needs_variance()
            || self.demonstration_gate.is_some()
            || matches!(self.loss, PolicyLoss::TrajectoryBalance { .. })
            || matches!(
                self.advantage,
                AdvantageEstimator::PerReward { .. }
                    | AdvantageEstimator::Process
                    | AdvantageEstimator::Whiten { baseline: true, .. }
            )
    }

    /// Whether a step with one update needs log-probabilities at the start of the step: masks change the denominators,
    /// and a KL penalty in the reward changes the advantages, before the forward pass.
    pub(crate) fn needs_scores(&self) -> bool {
        (self.correction.masks() && self.proximal != Proximal::Behavior)
            || self.kl.in_reward()
            || self.advantage == AdvantageEstimator::Teacher
            || self.entropy_share < 1.0
    }

    /// Whether the loss or its correction uses the proximal policy.
    pub(crate) fn uses_proximal(&self) -> bool {
        self.loss.uses_proximal() || self.correction != Correction::None
    }

    /// Whether a trajectory without an advantage has no gradient.
    pub(crate) fn is_advantage_alone(&self) -> bool {
        !self.kl.in_loss()
            && self.entropy_coef == 0.0
            && self.nll_coef == 0.0
            && !matches!(self.loss, PolicyLoss::Nll | PolicyLoss::TrajectoryBalance { .. })
    }
}
