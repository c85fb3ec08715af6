//! The sections `[algorithm]` and `[critic]`.
//!
//! Invariant: the kind defines the default of every key. `rlrun/recipe/algorithm.rs` says which keys have an effect on
//! which kind.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::recipe::words::{
    Aggregation, AlgorithmKind, CorrectionKind, CriticKind, EntropyUnit, KlEstimator, KlPlacement, Proximal,
    ScaleRewards,
};

/// `[algorithm]`: advantages, loss and off-policy correction. The kind defines the default of every key; a key without
/// effect on the kind is an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AlgorithmSection {
    /// Algorithm. `process` computes advantages from one reward per turn of a trajectory; for trajectories of a single turn
    /// without such rewards it equals `grpo`. verl `adv_estimator` and `policy_loss.loss_mode`, TRL
    /// `loss_type`.
    // resume = experiment, worker = run
    pub kind: AlgorithmKind,
    /// Clip range below: distance of the importance ratio below 1. It is the log-ratio below 0 for `gmpo`, and the
    /// difference of probabilities for `dppo`. TRL `epsilon`, verl `clip_ratio_low`, AReaL `eps_clip`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub clip_eps_low: Option<f64>,
    /// Clip range above, of the same quantity. TRL `epsilon_high`, verl `clip_ratio_high`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub clip_eps_high: Option<f64>,
    /// Dual clip: largest importance ratio of tokens with a negative advantage; above 1. Default: no bound, as in the papers
    /// of these kinds, TRL (`delta`) and AReaL (`c_clip`). verl has 3 (`clip_ratio_c`).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub dual_clip: Option<f64>,
    /// Largest importance weight, with these defaults: 5 for `cispo`, `scale_rl` and `distill`, 2 for `aipo`, 20 for `dppo`
    /// (as verl's `dppo_tv`; prime-rl has none).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub importance_cap: Option<f64>,
    /// The proximal policy, which anchors the clip. Losses with a clip default to the behavior policy, so that the clip
    /// bounds the distance from it. `gspo`, losses without a clip, and recipes with a correction default to the policy
    /// before the step. AReaL `use_decoupled_loss` and `prox_logp_method`, verl `bypass_mode`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub proximal: Option<Proximal>,
    /// Off-policy correction: weights or masks by the ratio of the policy before the step to the behavior policy. Default:
    /// `sequence_mask` if the policy before the step anchors the loss, none if the behavior policy does. Every weight is
    /// bounded: `sequence_mask` uses the ratio of the sequence, `token_mask` that of the token, and `geometric_mask` and
    /// `k3_mask` that of the token up to 2. verl
    /// `rollout_correction`, TRL `vllm_importance_sampling_mode`, slime `use_tis`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub correction: Option<CorrectionKind>,
    /// Upper bound of exp(proximal - behavior) in the correction: the largest weight, or the limit of a mask. TRL
    /// `vllm_importance_sampling_cap`, AReaL `behav_imp_weight_cap`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub behavior_weight_cap: Option<f64>,
    /// Lower bound of exp(proximal - behavior), for corrections that mask.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub behavior_weight_floor: Option<f64>,
    /// Divisor of rewards after the mean of the group is subtracted. TRL `scale_rewards`, verl
    /// `norm_adv_by_std_in_grpo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub scale_rewards: Option<ScaleRewards>,
    /// Aggregation of token losses. TRL `loss_type`, verl `loss_agg_mode`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub loss_agg: Option<Aggregation>,
    /// Coefficient of the KL divergence from the reference policy; 0 is off. TRL `beta`, verl `kl_loss_coef`.
    // resume = changes, worker = run
    pub kl_coef: f64,
    /// Estimator of the KL divergence. Default: `k3`, which is at most 10 nats per token, as in verl. verl
    /// `kl_loss_type`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub kl_estimator: Option<KlEstimator>,
    /// Whether the KL divergence is added to the loss, which is the default, or subtracted from the reward. verl
    /// `use_kl_loss`, `use_kl_in_reward`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub kl_in: Option<KlPlacement>,
    /// Model directory of the reference policy, or of the teacher of `distill`. Default: the initial policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub reference: Option<PathBuf>,
    /// Coefficient of the entropy bonus, per nat. verl `entropy_coeff`.
    // resume = changes, worker = run
    pub entropy_coef: f64,
    /// Fraction of the batch's tokens, those with the largest entropy, that the policy loss is computed for. Default: all.
    /// The divisor of the loss still counts all tokens, and KL divergence, entropy bonus and likelihood use all tokens.
    /// Below 1, groups with equal rewards cost a forward pass. TRL `top_entropy_quantile`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub entropy_share: Option<f64>,
    /// With `entropy_share`: whether tokens are selected, or whole turns of episodes by their mean entropy. Default: `token`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub entropy_unit: Option<EntropyUnit>,
    /// Coefficient of the negative log-likelihood of correct trajectories (`eval.correct`). It is the mean over their tokens
    /// for every `loss_agg`. VAPO has 0.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub nll_coef: Option<f64>,
    /// Discount per token, for `ppo`, `vapo`, `reinforce_pp` and its baseline. verl `gamma`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub gamma: Option<f64>,
    /// Lambda of generalized advantage estimation, for `ppo` and `vapo`. verl `lam`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub lambda: Option<f64>,
    /// For `ppo` and `vapo`: if above 0, lambda is 1 - 1 / (`length_adaptive` * tokens) instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub length_adaptive: Option<f64>,
    /// For `tb`: the target is the reference times exp(reward / beta). TBA `kl_coef`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub beta: Option<f64>,
    /// For `pass_at_k`: number of attempts, k. One of them must be correct (`eval.correct`).
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub attempts: Option<usize>,
    /// For `hpt`: a demonstration replaces a group if the fraction of correct answers (`eval.correct`) is at most this
    /// number.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub demonstration_gate: Option<f64>,
    /// For `hpt`: column of the demonstration; generated additions include one.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = experiment, worker = run
    pub demonstration_column: Option<String>,
}

/// `[critic]`: the value function of `ppo` and `vapo`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CriticSection {
    /// A separate network, or a head of the policy.
    // resume = state, worker = ignored
    pub kind: CriticKind,
    /// Learning rate of a separate network. Default: that of the policy. verl `critic.optim.lr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub learning_rate: Option<f64>,
    /// Coefficient of the value loss of a shared network. Default: 0.5. TRL `vf_coef`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub coef: Option<f64>,
    /// Clip range of a value in a step. Default: no clip. TRL `cliprange_value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub value_clip: Option<f64>,
    /// Lambda of the return estimates that the critic is trained on (VC-PPO).
    // resume = changes, worker = ignored
    pub lambda: f64,
    /// Steps at the beginning in which only the critic is trained; the warm-up and the schedule of the policy's learning
    /// rate begin after them. For a separate network; default: 0. verl `critic_warmup`.
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
