//! Algorithms: one file each, which states its advantage, its loss and its correction as the shared parts of
//! [`credit`](crate::credit) and [`loss`](crate::loss).
//!
//! Invariant: an algorithm is data. What a step does with it stands in [`trainer`](crate::trainer); a new algorithm of known
//! parts needs no other code than its file.

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

use crate::credit::Advantage;
use crate::loss::{Aggregation, Correction, Divergence, PolicyLoss};

/// What a training step computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Algorithm {
    /// What a trajectory is compared with.
    pub advantage: Advantage,
    /// The loss of its tokens.
    pub loss: PolicyLoss,
    /// The policy that anchors the loss.
    pub proximal: Proximal,
    /// What a token weighs that another policy sampled.
    pub correction: Correction,
    /// How token losses add up.
    pub aggregation: Aggregation,
    /// A pull towards the reference policy.
    pub divergence: Divergence,
    /// How much the entropy of the policy is worth, per nat.
    pub entropy_coef: f64,
    /// Weight of the negative log-likelihood of trajectories with a positive reward, averaged over their tokens.
    pub nll_coef: f64,
    /// Share of the tokens whose policy loss counts: those of the largest entropy of all tokens of the batch (arXiv
    /// 2506.01939); 1 is all. What the loss is divided by does not change.
    pub entropy_share: f64,
    /// Whether groups whose rewards are all equal leave the batch, with its denominators and its deviation.
    pub drop_zero_variance: bool,
    /// A group whose share of right answers is at most this is replaced by a demonstration.
    pub demonstration_gate: Option<f64>,
}

/// The policy that anchors a loss, and the numerator of the correction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Proximal {
    /// The policy before the step: decoupled PPO (AReaL, arXiv 2505.24298).
    Recompute,
    /// Between the sampler's and the current one, by staleness, without a forward pass (A-3PO).
    Interpolate,
    /// The one that sampled, without a correction: the clip bounds the distance from it (PPO, arXiv 1707.06347).
    #[default]
    Behavior,
}

/// The algorithms by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmKind {
    /// GRPO (DeepSeekMath, arXiv 2402.03300): the advantage is the reward normalised in its group, the loss PPO's clip.
    #[default]
    Grpo,
    /// Dr.GRPO (arXiv 2503.20783): GRPO without its two biases.
    DrGrpo,
    /// DAPO (arXiv 2503.14476): the upper bound of the clip is wider, tokens count the same.
    Dapo,
    /// RLOO (arXiv 2402.14740): the advantage is the reward minus the mean of the others of the group.
    Rloo,
    /// REINFORCE (Williams 1992) with the mean of the batch as its baseline.
    Reinforce,
    /// REINFORCE++ (arXiv 2501.03262): returns whitened over the batch, PPO's clip, no critic.
    ReinforcePp,
    /// REINFORCE++-baseline (arXiv 2501.03262): the group's mean is taken off before whitening over the batch.
    ReinforcePpBaseline,
    /// ReMax (arXiv 2310.10505): the baseline is the reward of the greedy completion of the same task.
    Remax,
    /// OPO (arXiv 2505.23585): exact on-policy training with the length-weighted baseline of least variance.
    Opo,
    /// GSPO (arXiv 2507.18071): the ratio and its clip are those of the whole sequence.
    Gspo,
    /// GMPO (arXiv 2507.20673): the geometric mean of clipped token ratios, with wide bounds.
    Gmpo,
    /// CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a bounded importance weight; no token loses its gradient.
    Cispo,
    /// ScaleRL (arXiv 2510.13786): CISPO, rewards normalised over the batch, tasks count the same.
    ScaleRl,
    /// AIPO (LlamaRL, arXiv 2505.24034): the policy gradient with a weight bounded on one side.
    Aipo,
    /// TOPR (arXiv 2503.14286): good trajectories as in supervised learning, bad ones tapered by their importance ratio.
    Topr,
    /// SAPO (arXiv 2511.20347): a smooth gate where PPO clips, which closes faster for bad tokens.
    Sapo,
    /// DPPO (arXiv 2602.04879): the trust region is measured by the divergence of the policies, not by their ratio.
    Dppo,
    /// PPO (arXiv 1707.06347) with a critic and generalised advantage estimation.
    Ppo,
    /// VAPO (arXiv 2504.05118): PPO whose lambda grows with the length, with a wider clip and imitation of what was right.
    Vapo,
    /// Trajectory balance (TBA, arXiv 2503.18929): the policy is fitted to `reference * exp(reward / beta)`.
    Tb,
    /// GDPO (arXiv 2601.05242): every reward is normalised by itself before they are added.
    Gdpo,
    /// Pass@k training (arXiv 2508.10751): a task counts as solved if one of k attempts is right.
    PassAtK,
    /// Process supervision (DeepSeekMath, arXiv 2402.03300): tokens are judged by the rewards of their turn and later ones.
    /// The same as [`Self::Grpo`] for trajectories without rewards of turns.
    Process,
    /// HPT (arXiv 2509.04419): reinforcement learning where the policy solves the task, a demonstration where it does not.
    Hpt,
    /// On-policy distillation: the advantage of a token is how much likelier the teacher finds it.
    Distill,
}

impl AlgorithmKind {
    /// All of them.
    pub const ALL: [Self; 25] = [
        Self::Grpo,
        Self::DrGrpo,
        Self::Dapo,
        Self::Rloo,
        Self::Reinforce,
        Self::ReinforcePp,
        Self::ReinforcePpBaseline,
        Self::Remax,
        Self::Opo,
        Self::Gspo,
        Self::Gmpo,
        Self::Cispo,
        Self::ScaleRl,
        Self::Aipo,
        Self::Topr,
        Self::Sapo,
        Self::Dppo,
        Self::Ppo,
        Self::Vapo,
        Self::Tb,
        Self::Gdpo,
        Self::PassAtK,
        Self::Process,
        Self::Hpt,
        Self::Distill,
    ];

    /// The algorithm with its published defaults.
    #[must_use]
    pub fn algorithm(self) -> Algorithm {
        match self {
            Self::Grpo => Algorithm::grpo(),
            Self::DrGrpo => Algorithm::dr_grpo(),
            Self::Dapo => Algorithm::dapo(),
            Self::Rloo => Algorithm::rloo(),
            Self::Reinforce => Algorithm::reinforce(),
            Self::ReinforcePp => Algorithm::reinforce_pp(),
            Self::ReinforcePpBaseline => Algorithm::reinforce_pp_baseline(),
            Self::Remax => Algorithm::remax(),
            Self::Opo => Algorithm::opo(),
            Self::Gspo => Algorithm::gspo(),
            Self::Gmpo => Algorithm::gmpo(),
            Self::Cispo => Algorithm::cispo(),
            Self::ScaleRl => Algorithm::scale_rl(),
            Self::Aipo => Algorithm::aipo(),
            Self::Topr => Algorithm::topr(),
            Self::Sapo => Algorithm::sapo(),
            Self::Dppo => Algorithm::dppo(),
            Self::Ppo => Algorithm::ppo(),
            Self::Vapo => Algorithm::vapo(),
            Self::Tb => Algorithm::tb(),
            Self::Gdpo => Algorithm::gdpo(),
            Self::PassAtK => Algorithm::pass_at_k(),
            Self::Process => Algorithm::process(),
            Self::Hpt => Algorithm::hpt(),
            Self::Distill => Algorithm::distill(),
        }
    }

    /// The word of the recipe.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Grpo => "grpo",
            Self::DrGrpo => "dr_grpo",
            Self::Dapo => "dapo",
            Self::Rloo => "rloo",
            Self::Reinforce => "reinforce",
            Self::ReinforcePp => "reinforce_pp",
            Self::ReinforcePpBaseline => "reinforce_pp_baseline",
            Self::Remax => "remax",
            Self::Opo => "opo",
            Self::Gspo => "gspo",
            Self::Gmpo => "gmpo",
            Self::Cispo => "cispo",
            Self::ScaleRl => "scale_rl",
            Self::Aipo => "aipo",
            Self::Topr => "topr",
            Self::Sapo => "sapo",
            Self::Dppo => "dppo",
            Self::Ppo => "ppo",
            Self::Vapo => "vapo",
            Self::Tb => "tb",
            Self::Gdpo => "gdpo",
            Self::PassAtK => "pass_at_k",
            Self::Process => "process",
            Self::Hpt => "hpt",
            Self::Distill => "distill",
        }
    }
}

impl Algorithm {
    /// The defaults of losses that are not anchored at the policy that sampled: compared with the policy before the step,
    /// without the sequences whose probability has changed by more than a factor of 2 since they were sampled.
    #[must_use]
    pub fn decoupled() -> Self {
        Self {
            proximal: Proximal::Recompute,
            correction: Correction::SequenceMask { low: 0.5, high: 2.0 },
            ..Self::grpo()
        }
    }

    /// Whether a step needs log-probabilities under the reference policy.
    #[must_use]
    pub fn needs_reference(&self) -> bool {
        self.divergence.coef != 0.0
            || self.advantage == Advantage::Teacher
            || matches!(self.loss, PolicyLoss::TrajectoryBalance { .. })
    }

    /// Whether a step needs a critic.
    #[must_use]
    pub fn needs_critic(&self) -> bool {
        matches!(self.advantage, Advantage::Gae(_))
    }

    /// Whether a step asks which answers are correct; trajectories that do not say so are left out then.
    #[must_use]
    pub fn needs_correct(&self) -> bool {
        matches!(self.advantage, Advantage::PassAtK { .. })
            || self.demonstration_gate.is_some()
            || self.nll_coef != 0.0
    }

    /// Whether a trajectory is compared with others of its group.
    #[must_use]
    pub fn needs_groups(&self) -> bool {
        self.advantage.needs_variance()
            || self.demonstration_gate.is_some()
            || matches!(self.loss, PolicyLoss::TrajectoryBalance { .. })
            || matches!(
                self.advantage,
                Advantage::PerReward { .. } | Advantage::Process | Advantage::Whiten { baseline: true, .. }
            )
    }

    /// Whether a step needs log-probabilities under the policy before the step even if it makes one update: to leave
    /// tokens out before anything is divided by their number, or to know the divergence before the advantages.
    pub(crate) fn needs_scores(&self) -> bool {
        (self.correction.masks() && self.proximal != Proximal::Behavior)
            || self.divergence.in_reward()
            || self.advantage == Advantage::Teacher
            || self.entropy_share < 1.0
    }

    /// Whether the loss or its correction looks at the proximal policy at all.
    pub(crate) fn uses_proximal(&self) -> bool {
        self.loss.uses_proximal() || self.correction != Correction::None
    }

    /// Whether a trajectory with no advantage has no gradient either.
    pub(crate) fn is_advantage_alone(&self) -> bool {
        !self.divergence.in_loss()
            && self.entropy_coef == 0.0
            && self.nll_coef == 0.0
            && !matches!(self.loss, PolicyLoss::Nll | PolicyLoss::TrajectoryBalance { .. })
    }
}
