"""Reference formulas of every advantage, loss, correction and aggregation of the trainer.

Each formula is written the way its source states it, in float64, and differentiated by PyTorch
autograd. Nothing here is taken from the trainer: the file is a second implementation that the trainer's
own code is compared with. `algorithms.py` applies it to drawn cases.

Names: `current` is differentiated, `proximal` anchors the clip, `behavior` sampled the tokens,
`reference` is the frozen model of the KL term; all of them [T] log-probabilities in nats. Log-ratios
are clamped to [-20, 20] before exp: each token's own for a token ratio, the sum or the mean for the
ratio of a sequence.
"""

import math

import torch

EPS = 1e-6
WHITEN_EPS = 1e-8
MAX_LOG_RATIO = 20.0


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def bounded_exp(log_ratio):
    return torch.exp(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


# Advantages: groups [[{reward, length, ..}]] to [[advantage of each trajectory]] ----------------


def mean(values):
    return math.fsum(values) / len(values)


def sample_std(values):
    """Standard deviation with n - 1 in the denominator; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1))


def rewards_of(group):
    return [trajectory["reward"] for trajectory in group]


def group_advantage(groups, scale="group"):
    """GRPO (arXiv 2402.03300): (r - mean) / (std + eps); a group of one keeps its reward.
    scale "none": Dr.GRPO (arXiv 2503.20783), r - mean. scale "batch": ScaleRL (arXiv 2510.13786),
    the deviations from the group's mean over their standard deviation in the whole batch."""
    deviations = [[r - mean(rewards_of(g)) for r in rewards_of(g)] for g in groups]
    if scale == "none":
        return deviations
    if scale == "batch":
        spread = sample_std([d for group in deviations for d in group]) + EPS
        return [[d / spread for d in group] for group in deviations]
    out = []
    for group, own in zip(groups, deviations):
        if len(group) == 1:
            out.append(rewards_of(group))
        else:
            spread = sample_std(rewards_of(group)) + EPS
            out.append([d / spread for d in own])
    return out


def leave_one_out(groups):
    """RLOO (arXiv 2402.14740): the reward less the mean of the others, (r - mean) n / (n - 1)."""
    out = []
    for group in groups:
        rewards = rewards_of(group)
        total, n = math.fsum(rewards), len(rewards)
        out.append([r - (total - r) / (n - 1) if n > 1 else r for r in rewards])
    return out


def whiten(groups, baseline=False):
    """REINFORCE++ (arXiv 2501.03262): with gamma = 1 every token's return is the reward of its
    trajectory; whitened over all tokens of the batch, population variance. `baseline` takes the
    group's mean off first; a group of one has none to take off."""
    returns = []
    for group in groups:
        rewards = rewards_of(group)
        off = mean(rewards) if baseline and len(rewards) > 1 else 0.0
        returns.append([r - off for r in rewards])
    tokens = [
        value
        for group, own in zip(groups, returns)
        for trajectory, value in zip(group, own)
        for _ in range(trajectory["length"])
    ]
    centre = mean(tokens)
    variance = math.fsum((x - centre) ** 2 for x in tokens) / len(tokens)
    return [[(x - centre) / math.sqrt(variance + WHITEN_EPS) for x in own] for own in returns]


def greedy(groups):
    """ReMax (arXiv 2310.10505): the reward less that of the greedy completion."""
    return [[t["reward"] - t["greedy"] for t in group] for group in groups]


def length_weighted(groups):
    """OPO (arXiv 2505.23585): baseline sum(len r) / sum(len); a group of one keeps its reward."""
    out = []
    for group in groups:
        tokens = sum(t["length"] for t in group)
        base = math.fsum(t["length"] * t["reward"] for t in group) / tokens
        out.append([t["reward"] - (base if len(group) > 1 else 0.0) for t in group])
    return out


def per_reward(groups, weights=()):
    """GDPO (arXiv 2601.05242): every component normalised in its own group, summed by weight, the
    sum normalised over the batch. A group of one has nothing to compare with: 0."""
    sums = []
    for group in groups:
        own = [0.0] * len(group)
        for n, weight in enumerate(weights):
            values = [t["components"][n] for t in group]
            centre, spread = mean(values), sample_std(values) + EPS
            if len(group) > 1:
                own = [a + weight * (x - centre) / spread for a, x in zip(own, values)]
        sums.append(own)
    flat = [a for own in sums for a in own]
    if len(flat) == 1:
        return sums
    centre, spread = mean(flat), sample_std(flat) + EPS
    return [[(a - centre) / spread for a in own] for own in sums]


def pass_at_k(groups, k=1):
    """Pass@k training, analytic (arXiv 2508.10751): the expected pass@k of the N samples is
    1 - C(N_neg, k) / C(N, k); a sample's advantage is that of the subsets it is in."""
    out = []
    for group in groups:
        total = len(group)
        wrong = sum(1 for r in rewards_of(group) if r <= 0.5)
        expected = 1.0 - math.comb(wrong, k) / math.comb(total, k)
        sigma = math.sqrt(expected * (1.0 - expected))
        if sigma == 0.0:
            out.append([0.0] * total)
            continue
        right = (1.0 - expected) / (sigma + EPS)
        joined = math.comb(wrong - 1, k - 1) / math.comb(total - 1, k - 1)
        missed = (1.0 - expected - joined) / (sigma + EPS)
        out.append([right if r > 0.5 else missed for r in rewards_of(group)])
    return out


def batch_mean(groups):
    """REINFORCE with the batch's mean reward as baseline."""
    base = mean([r for group in groups for r in rewards_of(group)])
    return [[r - base for r in rewards_of(group)] for group in groups]


def process(groups):
    """Process supervision (arXiv 2402.03300, section 4.1.3): all turn rewards of the group are
    normalised together; a token's advantage is the sum over its own turn and the later ones."""
    out = []
    for group in groups:
        every = [turn["reward"] for t in group for turn in t["turns"]]
        centre, spread = mean(every), sample_std(every) + EPS
        own = []
        for t in group:
            normal = [(turn["reward"] - centre) / spread for turn in t["turns"]]
            own.append([math.fsum(normal[i:]) for i in range(len(normal))])
        out.append(own)
    return out


ADVANTAGES = {
    "group": group_advantage,
    "leave_one_out": leave_one_out,
    "whiten": whiten,
    "greedy": greedy,
    "length_weighted": length_weighted,
    "per_reward": per_reward,
    "pass_at_k": pass_at_k,
    "batch_mean": batch_mean,
    "none": lambda groups: [rewards_of(group) for group in groups],
    "process": process,
}

# Losses: row {current, proximal, behavior, advantages} of tensors to [T] token losses ------------


def clip_loss(row, low, high, dual):
    """PPO (arXiv 1707.06347), asymmetric bounds of DAPO (arXiv 2503.14476); with `dual`, A < 0 is
    bounded from the other side too: max(min(r A, clip(r) A), c A) (dual clip, arXiv 1912.09729)."""
    r, a = bounded_exp(row["current"] - row["proximal"]), row["advantages"]
    objective = torch.min(r * a, torch.clamp(r, 1.0 - low, 1.0 + high) * a)
    if dual is not None:
        objective = torch.where(a < 0, torch.max(objective, dual * a), objective)
    return -objective


def gspo_loss(row, low, high):
    """GSPO-token (arXiv 2507.18071): the ratio is the geometric mean over the sequence, and each
    token differentiates its own log-probability: sg[s] pi_t / sg[pi_t]."""
    s = bounded_exp(torch.mean(row["current"] - row["proximal"])).detach()
    ratio = s * torch.exp(row["current"] - row["current"].detach())
    a = row["advantages"]
    return -torch.min(ratio * a, torch.clamp(ratio, 1.0 - low, 1.0 + high) * a)


def cispo_loss(row, low, high):
    """CISPO (arXiv 2506.13585), ScaleRL (arXiv 2510.13786) and AIPO (arXiv 2505.24034, low 0):
    -sg(clip(r)) A log pi with r against the sampling policy."""
    weight = torch.clamp(bounded_exp(row["current"] - row["behavior"]), low, high).detach()
    return -weight * row["advantages"] * row["current"]


def topr_loss(row, positive, negative):
    """TOPR (arXiv 2503.14286): the sequence's ratio, tapered by the sign of the reward."""
    ratio = bounded_exp(torch.sum(row["current"] - row["behavior"])).detach()
    a = row["advantages"]
    weight = torch.where(a > 0, torch.clamp(ratio, *positive), torch.clamp(ratio, *negative))
    return -weight * a * row["current"]


def sapo_loss(row, tau_positive, tau_negative):
    """SAPO (arXiv 2511.20347): a soft gate, sigmoid(tau (r - 1)) 4 / tau, in place of the clip."""
    r, a = bounded_exp(row["current"] - row["proximal"]), row["advantages"]
    tau = torch.where(a > 0, tensor(tau_positive), tensor(tau_negative))
    return -torch.sigmoid(tau * (r - 1.0)) * 4.0 / tau * a


def gmpo_loss(row, low, high):
    """GMPO (arXiv 2507.20673): the geometric mean of the token ratios, each clipped in log space
    on the side that its advantage could run away to. One value, repeated for every token."""
    log_r = torch.clamp(row["current"] - row["proximal"], -MAX_LOG_RATIO, MAX_LOG_RATIO)
    a = row["advantages"][0]
    bounded = torch.clamp(log_r, max=high) if a > 0 else torch.clamp(log_r, min=-low)
    return (-a * torch.exp(torch.mean(bounded))).expand(len(log_r))


def dppo_loss(row, low, high, cap):
    """DPPO, binary total variation (arXiv 2602.04879; verl dppo_tv, cap 20): a token whose probability
    has already moved past the bound in the direction of its advantage is dropped; the others carry a
    capped ratio."""
    a = row["advantages"]
    moved = torch.exp(row["current"]) - torch.exp(row["behavior"])
    dropped = ((a > 0) & (moved > high)) | ((a < 0) & (moved < -low))
    ratio = torch.clamp(bounded_exp(row["current"] - row["behavior"]), max=cap)
    weight = torch.where(dropped, tensor(0.0), ratio).detach()
    return -weight * a * row["current"]


LOSSES = {
    "clip": clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "topr": topr_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "dppo": dppo_loss,
    "reinforce": lambda row: -row["advantages"] * row["current"],
    "nll": lambda row: -row["current"],
}


def trajectory_balance_group(currents, references, rewards, beta):
    """TBA (arXiv 2503.18929): residual log Z + log pi - log ref - r / beta, squared, where VarGrad
    estimates log Z as the mean over the task's completions of log ref - log pi + r / beta."""
    gap = torch.stack([c.sum() - f.sum() for c, f in zip(currents, references)])
    gap = gap - tensor(rewards) / beta
    log_z = -torch.mean(gap).detach()
    residuals = log_z + gap
    return log_z, residuals, torch.mean(residuals**2)


# Corrections for a sampler that is not the trainer: [T] weights and kept tokens -----------------


def correction(name, proximal, behavior, cap=None, low=None, high=None):
    """rho = exp(proximal - behavior). Truncated importance sampling by token or sequence; IcePop's
    mask by token (arXiv 2510.18855), whose kept tokens carry their own rho; masks of a whole row by
    the product of its ratios, which its tokens then carry (verl decoupled_seq_is_rs, TRL
    sequence_mask), or by their geometric mean or mean k3, whose kept tokens carry min(rho, 2)
    (verl decoupled_geo_rs_token_tis and decoupled_k3_rs_token_tis)."""
    log_rho = proximal - behavior
    rho = bounded_exp(log_rho)
    every = torch.ones_like(rho, dtype=torch.bool)
    if name == "none":
        return torch.ones_like(rho), every
    if name == "token_truncate":
        return torch.clamp(rho, max=cap), every
    if name == "sequence_truncate":
        return torch.clamp(bounded_exp(log_rho.sum()), max=cap).expand(len(rho)), every
    if name == "token_mask":
        kept, weight = (rho >= low) & (rho <= high), rho
    elif name == "sequence_mask":
        product = bounded_exp(log_rho.sum())
        kept, weight = every & (low <= product <= high), product.expand(len(rho))
    elif name == "geometric_mask":
        kept, weight = every & (low <= bounded_exp(log_rho.mean()) <= high), torch.clamp(rho, max=2.0)
    elif name == "k3_mask":
        bounded = torch.clamp(log_rho, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        kept = every & (torch.mean(rho - bounded - 1.0) <= high)
        weight = torch.clamp(rho, max=2.0)
    else:
        raise ValueError(name)
    return torch.where(kept, weight, tensor(0.0)), kept


def divergence(estimator, current, reference):
    """Schulman's estimators of KL(current || reference), d = log reference - log current: k1 = -d,
    k2 = d^2 / 2, k3 = e^d - d - 1, which verl bounds: d to [-20, 20], the value to 10."""
    d = reference - current
    near = torch.clamp(d, -20.0, 20.0)
    k3 = torch.clamp(torch.exp(near) - near - 1.0, -10.0, 10.0)
    return {"k1": -d, "k2": d**2 / 2.0, "k3": k3}[estimator]


# Aggregation, advantage estimation with a critic, value and preference losses --------------------


def aggregation_weights(mode, lengths, max_completion_length):
    """Weight of each token of every trajectory, same shape as `lengths` [[tokens]] by group."""
    sequences = sum(len(group) for group in lengths)
    tokens = sum(sum(group) for group in lengths)
    if mode == "token_mean":
        return [[1.0 / tokens for _ in group] for group in lengths]
    if mode == "sequence_mean":
        return [[1.0 / (sequences * max(1, n)) for n in group] for group in lengths]
    if mode == "prompt_mean":
        return [[1.0 / (len(lengths) * max(1, sum(group))) for _ in group] for group in lengths]
    return [[1.0 / (sequences * max_completion_length) for _ in group] for group in lengths]


def gae(rewards, values, gamma, decay):
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; V_T = 0
    (arXiv 1506.02438)."""
    out, following, later = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        later = delta + gamma * decay * later
        out[t], following = later, values[t]
    return out


def value_loss(values, old, returns, clip):
    """PPO's clipped value loss, 0.5 max((V - R)^2, (clip(V, old - c, old + c) - R)^2)."""
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain
    near = torch.max(torch.min(values, old + clip), old - clip)
    return 0.5 * torch.max(plain, (near - returns) ** 2)


def dpo(chosen, rejected, reference_chosen, reference_rejected, beta, smoothing):
    """DPO (arXiv 2305.18290) with label smoothing (conservative DPO)."""
    x = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    log_sigmoid = torch.nn.functional.logsigmoid
    return -(1.0 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)


def ipo(chosen, rejected, reference_chosen, reference_rejected, beta):
    """IPO (arXiv 2310.12036) on log-probabilities averaged over the tokens."""
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    return (margin - 1.0 / (2.0 * beta)) ** 2


def bradley_terry(chosen, rejected, margin):
    """Bradley-Terry with a margin (arXiv 2307.09288): -log sigmoid(chosen - rejected - margin)."""
    return -torch.nn.functional.logsigmoid(chosen - rejected - margin)


# A whole minibatch --------------------------------------------------------------------------------


def kept_weights(mode, kept, max_completion_length):
    """Aggregation over kept tokens only: rows, and then groups, of which nothing is kept leave
    every denominator. Returns the weights in the shape of `kept`, 0 for what has left."""
    counts = [[int(k.sum()) for k in group] for group in kept]
    left = [[n for n in group if n > 0] for group in counts]
    left = [group for group in left if group]
    weights = iter([w for g in aggregation_weights(mode, left, max_completion_length) for w in g])
    return [[next(weights) if n > 0 else 0.0 for n in group] for group in counts]


def selected_tokens(rows, share):
    """The tokens whose entropy is at least the quantile 1 - share of all (arXiv 2506.01939; TRL
    top_entropy_quantile)."""
    every = torch.cat([row["entropy"] for group in rows for row in group]).detach()
    least = torch.quantile(every, 1.0 - share)
    return [[row["entropy"].detach() >= least for row in group] for group in rows]


def batch_loss(batch):
    """Sum over kept tokens of w (correction * policy loss + coef KL) - w entropy_coef entropy, less
    nll_coef times the mean log-probability of the kept tokens of right trajectories (VAPO, arXiv
    2504.05118). The policy loss is that of selected tokens; w counts all that are kept. With
    `drop_zero_variance` groups of equal rewards are not there (ScaleRL, arXiv 2510.13786).
    Fills `expected` with the loss and its gradients by `current` and by `entropy`."""
    everything = batch["groups"]
    if batch["drop_zero_variance"]:
        batch = {**batch, "groups": [g for g in everything if len({t["reward"] for t in g}) > 1]}
    given = [[{"length": len(t["current"]), **t} for t in g] for g in batch["groups"]]
    chosen = dict(batch["advantage"])
    advantages = ADVANTAGES[chosen.pop("name")](given, **chosen)
    loss, fix = dict(batch["loss"]), batch["correction"]
    loss_of = LOSSES[loss.pop("name")]
    streams = ("current", "proximal", "behavior", "reference", "entropy")
    rows = [[{s: tensor(t[s]) for s in streams} for t in g] for g in batch["groups"]]
    fixed = [[correction(proximal=r["proximal"], behavior=r["behavior"], **fix) for r in g] for g in rows]
    weights = kept_weights(
        batch["aggregation"], [[kept for _, kept in g] for g in fixed], batch["max_completion_length"]
    )
    selected = selected_tokens(rows, batch["entropy_share"])
    right = [[t["reward"] > 0.5 for t in g] for g in batch["groups"]]
    likely = [fixed[g][i][1].sum() for g, own in enumerate(right) for i, yes in enumerate(own) if yes]
    total = tensor(0.0)
    for g, group in enumerate(rows):
        for i, row in enumerate(group):
            row["current"].requires_grad_(True)
            row["entropy"].requires_grad_(True)
            row["advantages"] = torch.full_like(row["proximal"], advantages[g][i])
            rho, kept = fixed[g][i]
            policy = torch.where(selected[g][i], rho * loss_of(row, **loss), tensor(0.0))
            token = policy - batch["entropy_coef"] * row["entropy"]
            if batch["kl"] is not None:
                kl = divergence(batch["kl"]["estimator"], row["current"], row["reference"])
                token = token + batch["kl"]["coef"] * kl
            total = total + weights[g][i] * torch.where(kept, token, tensor(0.0)).sum()
            if batch["nll_coef"] and right[g][i]:
                total = total - batch["nll_coef"] * row["current"][kept].sum() / sum(likely)
    total.backward()
    grads = {s: [[r[s].grad.tolist() for r in g] for g in rows] for s in ("current", "entropy")}
    batch["expected"] = {
        "loss": total.item(),
        "advantages": advantages,
        "gradient": grads["current"],
        "entropy_gradient": grads["entropy"],
    }
    return {**batch, "groups": everything}
