//! The sections `[algorithm]` and `[critic]` as they are written.
//!
//! Invariant: a key that is not given is that of the kind; which keys say something to which kind stands in
//! `rlrun/recipe/algorithm.rs`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::recipe::words::{
    Aggregation, AlgorithmKind, CorrectionKind, CriticKind, KlEstimator, KlPlacement, Proximal, ScaleRewards,
};

/// `[algorithm]`: advantages, loss and off-policy correction. Keys that are not given are those of the kind; a key that
/// says nothing to the kind is an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AlgorithmSection {
    /// Which algorithm. `process` judges the turns of a trajectory by rewards of their own; rlrun's own rollouts have one
    /// turn without any, of which it makes what `grpo` does. verl `adv_estimator` and `policy_loss.loss_mode`, TRL
    /// `loss_type`.
    // resume = experiment, worker = run
    pub kind: AlgorithmKind,
    /// How far the ratio may fall below 1; of `gmpo` the log-ratio below 0, of `dppo` the probability. TRL `epsilon`,
    /// verl `clip_ratio_low`, AReaL `eps_clip`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub clip_eps_low: Option<f64>,
    /// How far it may rise. TRL `epsilon_high`, verl `clip_ratio_high`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub clip_eps_high: Option<f64>,
    /// Bound of the loss of bad tokens whose ratio rose, as a multiple of the advantage; above 1. None if not given, as in
    /// the papers of these kinds, TRL (`delta`) and AReaL (`c_clip`); verl has 3 (`clip_ratio_c`).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub dual_clip: Option<f64>,
    /// Largest importance weight of `cispo`, `scale_rl`, `distill` (5), `aipo` (2) and `dppo` (20, as verl's `dppo_tv`;
    /// prime-rl has none).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub importance_cap: Option<f64>,
    /// The policy that anchors the loss: of losses with a clip the one that sampled, so that the clip bounds the distance from
    /// it; of `gspo`, of losses without a clip, and where a correction is given, the one before the step. AReaL `use_decoupled_loss` and
    /// `prox_logp_method`, verl `bypass_mode`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub proximal: Option<Proximal>,
    /// How what another policy sampled is weighted or left out, compared with the policy before the step; `sequence_mask` if
    /// that anchors the loss, none if the sampler does. No weight is unbounded: `sequence_mask` weighs by the sequence's
    /// ratio, `token_mask` by the token's, `geometric_mask` and `k3_mask` by the token's, at most 2. verl
    /// `rollout_correction`, TRL `vllm_importance_sampling_mode`, slime `use_tis`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub correction: Option<CorrectionKind>,
    /// Upper bound of exp(proximal - behavior) in the correction: largest weight, or where masking begins. TRL
    /// `vllm_importance_sampling_cap`, AReaL `behav_imp_weight_cap`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub behavior_weight_cap: Option<f64>,
    /// Lower bound, of corrections that mask.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub behavior_weight_floor: Option<f64>,
    /// What rewards are divided by after the group's mean is taken off. TRL `scale_rewards`, verl
    /// `norm_adv_by_std_in_grpo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub scale_rewards: Option<ScaleRewards>,
    /// How token losses are averaged. TRL `loss_type`, verl `loss_agg_mode`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub loss_agg: Option<Aggregation>,
    /// Strength of the pull towards the reference policy; 0 is off. TRL `beta`, verl `kl_loss_coef`.
    // resume = changes, worker = run
    pub kl_coef: f64,
    /// How the divergence is estimated; `k3` if not given, which is at most 10 nats a token, as in verl. verl
    /// `kl_loss_type`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub kl_estimator: Option<KlEstimator>,
    /// Whether it stands in the loss, which is the default, or is taken off the reward. verl `use_kl_loss`,
    /// `use_kl_in_reward`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub kl_in: Option<KlPlacement>,
    /// Model directory of the reference policy, or of the teacher of `distill`; the policy that training starts from if
    /// not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub reference: Option<PathBuf>,
    /// What a nat of entropy is worth. verl `entropy_coeff`.
    // resume = changes, worker = run
    pub entropy_coef: f64,
    /// Share of the tokens whose policy loss counts, those of the largest entropy of the batch; all if not given. Losses are
    /// still divided by all tokens, and divergence, entropy bonus and likelihood are of all of them. Below 1, groups with
    /// equal rewards cost a forward pass. TRL `top_entropy_quantile`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub entropy_share: Option<f64>,
    /// Weight of the negative log-likelihood of trajectories with a positive reward: the mean over their tokens, whatever
    /// `loss_agg` is. VAPO's is 0.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub nll_coef: Option<f64>,
    /// What a reward is worth one token earlier, of `ppo`, `vapo`, `reinforce_pp` and its baseline. verl `gamma`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub gamma: Option<f64>,
    /// Weight of longer estimates in the advantages of `ppo` and `vapo`. verl `lam`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub lambda: Option<f64>,
    /// Of `ppo` and `vapo`: if above 0, lambda is 1 - 1 / (this * tokens) instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub length_adaptive: Option<f64>,
    /// Of `tb`: the target is the reference times exp(reward / beta). TBA `kl_coef`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub beta: Option<f64>,
    /// Of `pass_at_k`: attempts of which one must be right, which is a reward above 0.5.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub attempts: Option<usize>,
    /// Of `hpt`: a group whose share of right answers (rewards above 0.5) is at most this is replaced by a
    /// demonstration.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub demonstration_gate: Option<f64>,
    /// Of `hpt`: column of the demonstration; generated additions have their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub demonstration_column: Option<String>,
}

/// `[critic]`: of `ppo` and `vapo`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CriticSection {
    /// A network of its own, or a head of the policy.
    // resume = state, worker = ignored
    pub kind: CriticKind,
    /// Learning rate of a network of its own; that of the policy if not given. verl `critic.optim.lr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub learning_rate: Option<f64>,
    /// Factor of the value loss beside the policy's, of a shared network; 0.5 if not given. TRL `vf_coef`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub coef: Option<f64>,
    /// How far a value may move in a step; any way if not given. TRL `cliprange_value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub value_clip: Option<f64>,
    /// Weight of longer estimates in what the critic learns to expect (VC-PPO).
    // resume = changes, worker = ignored
    pub lambda: f64,
    /// Steps at the beginning in which only the critic learns; of a network of its own, 0 if not given. verl
    /// `critic_warmup`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub pretrain_steps: Option<u64>,
}

impl Default for CriticSection {
    fn default() -> Self {
        Self {
            kind: CriticKind::Separate,
            learning_rate: None,
            coef: None,
            value_clip: None,
            lambda: 1.0,
            pretrain_steps: None,
        }
    }
}
