"""Writes algorithms.json: reference numbers of the formulas in `formulas.py`.

Inputs are rounded to four decimals and drawn from Python's own generator under a fixed seed, so that
the same PyTorch writes the same file again:

    python3 -m venv venv && venv/bin/pip install torch && venv/bin/python algorithms.py

Per-trajectory lists (`groups`, `lengths`, `expected`, `weights`, gradients) are nested by group.
`case` says what an entry is about; every other key beside the inputs is a parameter by its name.
"""

import json
import math
import pathlib
import random

import torch

from formulas import (
    ADVANTAGES,
    LOSSES,
    WHITEN_EPS,
    aggregation_weights,
    batch_loss,
    bradley_terry,
    correction,
    divergence,
    dpo,
    gae,
    ipo,
    mean,
    pass_at_k,
    per_reward,
    process,
    tensor,
    trajectory_balance_group,
    value_loss,
)

# Cases ----------------------------------------------------------------------------------------------

DRAW = random.Random(20261121)


def logprobs(n):
    return [round(-DRAW.expovariate(1.0) - 0.02, 4) for _ in range(n)]


def near(values, spread):
    return [round(min(v + DRAW.gauss(0.0, spread), -0.001), 4) for v in values]


def normals(n):
    return [round(DRAW.gauss(0.0, 1.0), 4) for _ in range(n)]


def advantage_cases():
    def drawn(rewards, one=0.0):
        group = [{"reward": r, "length": DRAW.randint(1, 9)} for r in rewards]
        for t in group:
            t["components"] = [t["reward"], round(DRAW.random(), 4)]
            t["greedy"] = one
        return group

    plain = {
        "mixed": [drawn([1.0, 0.0, 0.0, 1.0], 1.0), drawn([0.25, -0.5, 1.5], 0.25), drawn([0.0, 1.0])],
        "all_equal": [drawn([1.0] * 4, 1.0), drawn([0.0] * 3)],
        "two_identical": [drawn([0.3, 0.3], 0.1)],
        "huge": [drawn([1e6, -1e6, 0.5, 0.0]), drawn([1e6, 1e6, 1e6 + 1.0])],
        "negative": [drawn([-1.0, -2.0, -4.5], -1.0), drawn([-1.0, -1.0, 1.0, -1.0], 1.0)],
        "long": [drawn([round(DRAW.random(), 4) for _ in range(16)], 0.5) for _ in range(3)],
    }
    one = {"group_of_one": [drawn([0.7], 0.2), drawn([1.0, 0.0, 0.0])]}
    settings = [("group", {"scale": s}) for s in ("group", "none", "batch")]
    settings += [("whiten", {"baseline": b}) for b in (False, True)]
    settings += [("per_reward", {"weights": [1.0, 0.5]})]
    settings += [(n, {}) for n in ("leave_one_out", "greedy", "length_weighted", "batch_mean", "none")]
    out = []
    for name, params in settings:
        alone = {} if params.get("scale") in ("none", "batch") else one
        for case, groups in {**plain, **alone}.items():
            expected = ADVANTAGES[name](groups, **params)
            out.append({"name": name, "case": case, **params, "groups": groups, "expected": expected})
    single = [drawn([0.7], 0.2)]
    out.append(
        {
            "name": "per_reward",
            "case": "batch_of_one",
            "weights": [1.0, 2.0],
            "groups": single,
            "expected": per_reward(single, [1.0, 2.0]),
        }
    )
    for k, right, total in [
        (1, 2, 4),
        (2, 1, 4),
        (4, 3, 8),
        (4, 5, 8),
        (8, 1, 8),
        (4, 0, 8),
        (4, 8, 8),
        (8, 2, 16),
        (1, 1, 1),
    ]:
        groups = [drawn([1.0] * right + [0.0] * (total - right))]
        out.append(
            {
                "name": "pass_at_k",
                "case": f"{right}_of_{total}",
                "k": k,
                "groups": groups,
                "expected": pass_at_k(groups, k),
            }
        )
    for case, counts in {"mixed": [[3, 2, 1], [2, 2]], "group_of_one": [[3]]}.items():
        groups = [
            [
                {"turns": [{"tokens": DRAW.randint(1, 5), "reward": round(DRAW.random(), 4)} for _ in range(n)]}
                for n in group
            ]
            for group in counts
        ]
        out.append({"name": "process", "case": case, "groups": groups, "expected": process(groups)})
    same = [[{"turns": [{"tokens": 2, "reward": 0.5}, {"tokens": 1, "reward": 0.5}]} for _ in range(2)]]
    out.append({"name": "process", "case": "all_equal", "groups": same, "expected": process(same)})
    return out


def loss_case(name, case, params, current, proximal, behavior, advantages):
    row = {
        "current": tensor(current).requires_grad_(True),
        "proximal": tensor(proximal),
        "behavior": tensor(behavior),
        "advantages": tensor(advantages),
    }
    tokens = LOSSES[name](row, **params)
    tokens.sum().backward()
    return {
        "name": name,
        "case": case,
        **params,
        "current": current,
        "proximal": proximal,
        "behavior": behavior,
        "advantages": advantages,
        "loss": tokens.sum().item(),
        "token_losses": tokens.tolist(),
        "gradient": row["current"].grad.tolist(),
    }


def loss_cases():
    settings = [
        ("clip", {"low": 0.2, "high": 0.2, "dual": None}),
        ("clip", {"low": 0.2, "high": 0.28, "dual": 3.0}),
        ("gspo", {"low": 0.0003, "high": 0.0004}),
        ("gspo", {"low": 0.2, "high": 0.3}),
        ("cispo", {"low": 0.0, "high": 5.0}),
        ("cispo", {"low": 0.8, "high": 1.2}),
        ("topr", {"positive": [1.0, 1.0], "negative": [0.0, 1.0]}),
        ("topr", {"positive": [0.5, 2.0], "negative": [0.0, 1.5]}),
        ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("gmpo", {"low": 0.4, "high": 0.4}),
        ("dppo", {"low": 0.1, "high": 0.2, "cap": 20.0}),
        ("reinforce", {}),
        ("nll", {}),
    ]
    out = []
    for name, params in settings:
        by_row = name in ("gspo", "gmpo", "topr")
        for case, n, spread in [("near", 8, 0.15), ("far", 8, 1.0), ("one_token", 1, 0.3), ("on_policy", 4, 0.0)]:
            for sign in (1.0, -1.0) if by_row else (None,):
                proximal = logprobs(n)
                current, behavior = near(proximal, spread), near(proximal, spread)
                a = [round(sign * (0.2 + DRAW.random()), 4)] * n if sign else normals(n)
                out.append(loss_case(name, case, params, current, proximal, behavior, a))
        now, up, down = [-0.5, -31.0, -0.25, -30.5], [-30.5, -1.0, -0.3, -0.5], [-1.0, 1.0]
        for a in [[x] * 4 for x in down] if by_row else ([1.0] * 4, [-1.0] * 4, [0.5, -0.5, 1.0, -2.0]):
            out.append(loss_case(name, "huge", params, now, up, up, a))
            if by_row:
                out.append(loss_case(name, "all_huge", params, [-0.5] * 3, [-30.5] * 3, [-30.5] * 3, a[:3]))
        still = logprobs(3)
        out.append(loss_case(name, "zero_advantages", params, still, near(still, 0.5), near(still, 0.5), [0.0] * 3))
    # Ratios of 35, 15 and 1/35 of tokens that stay rare, and of 35 of one that does not.
    now, then = [-4.0, -4.0, -7.5553, -0.5], [-7.5553, -6.7081, -4.0, -4.0553]
    for a in (1.0, -1.0):
        out.append(loss_case("dppo", "large", {"low": 0.2, "high": 0.2, "cap": 20.0}, now, then, then, [a] * 4))
    return out + balance_cases()


def balance_cases():
    out = []
    for beta, reward, log_z, n in [(0.1, 1.0, 2.5, 6), (1.0, 0.0, 0.0, 1), (0.05, -0.5, -3.0, 4)]:
        current, reference = logprobs(n), logprobs(n)
        c = tensor(current).requires_grad_(True)
        loss = (log_z + c.sum() - tensor(reference).sum() - reward / beta) ** 2
        loss.backward()
        out.append(
            {
                "name": "trajectory_balance",
                "beta": beta,
                "log_z": log_z,
                "reward": reward,
                "current": current,
                "reference": reference,
                "loss": loss.item(),
                "gradient": c.grad.tolist(),
            }
        )
    for beta, lengths in [(0.1, [3, 5, 2, 4]), (1.0, [2, 2])]:
        current, reference = [logprobs(n) for n in lengths], [logprobs(n) for n in lengths]
        rewards = [float(i % 2) for i in range(len(lengths))]
        rows = [tensor(c).requires_grad_(True) for c in current]
        log_z, residuals, loss = trajectory_balance_group(rows, [tensor(f) for f in reference], rewards, beta)
        loss.backward()
        out.append(
            {
                "name": "trajectory_balance_group",
                "beta": beta,
                "rewards": rewards,
                "current": current,
                "reference": reference,
                "log_z": log_z.item(),
                "residuals": residuals.tolist(),
                "loss": loss.item(),
                "gradient": [c.grad.tolist() for c in rows],
            }
        )
    return out


def correction_cases():
    rows = [(near(b, s), b) for s, n in [(0.02, 6), (0.4, 6), (1.5, 8), (0.3, 1), (0.0, 3)] for b in [logprobs(n)]]
    rows += [([-0.5, -31.0, -0.25], [-30.5, -1.0, -0.3]), ([-0.5] * 2, [-30.5] * 2), ([-31.0] * 2, [-1.0] * 2)]
    settings = [
        ("none", {}),
        ("token_truncate", {"cap": 2.0}),
        ("sequence_truncate", {"cap": 5.0}),
        ("token_mask", {"low": 0.5, "high": 5.0}),
        ("sequence_mask", {"low": 0.5, "high": 2.0}),
        ("geometric_mask", {"low": 0.98, "high": 1.02}),
        ("k3_mask", {"high": 0.01}),
    ]
    out = []
    for name, params in settings:
        for proximal, behavior in rows:
            weights, kept = correction(name, tensor(proximal), tensor(behavior), **params)
            out.append(
                {
                    "name": name,
                    **params,
                    "proximal": proximal,
                    "behavior": behavior,
                    "weights": weights.tolist(),
                    "kept": kept.tolist(),
                }
            )
    for n in (1, 6):
        current, behavior = logprobs(n), logprobs(n)
        staleness = [i % 4 for i in range(n)]
        proximal = [b + d / (d + 1.0) * (c - b) for c, b, d in zip(current, behavior, staleness)]
        out.append(
            {
                "name": "interpolated_proximal",
                "current": current,
                "behavior": behavior,
                "staleness": staleness,
                "proximal": proximal,
            }
        )
    return out


def divergence_cases():
    out = []
    for estimator in ("k1", "k2", "k3"):
        far = ([-0.5, -25.0, -1.0, -5.0, -3.0, -0.5], [-25.0, -0.5, -1.0, -1.0, -1.0, -13.0])
        for current, reference in [(logprobs(6), logprobs(6)), far]:
            c = tensor(current).requires_grad_(True)
            values = divergence(estimator, c, tensor(reference))
            values.sum().backward()
            out.append(
                {
                    "estimator": estimator,
                    "current": current,
                    "reference": reference,
                    "values": values.tolist(),
                    "gradient": c.grad.tolist(),
                }
            )
    return out


def aggregation_cases():
    shapes = [[[3, 5, 1], [2, 2]], [[4]], [[7, 1, 1, 1], [9], [2, 3]], [[0, 4], [3, 0, 2]]]
    return [
        {
            "mode": mode,
            "lengths": lengths,
            "max_completion_length": 16,
            "weights": aggregation_weights(mode, lengths, 16),
        }
        for mode in ("token_mean", "sequence_mean", "prompt_mean", "constant")
        for lengths in shapes
    ]


def gae_cases():
    out = []
    for n, gamma, policy, critic in [(6, 1.0, 0.95, 1.0), (5, 0.9, 0.8, 0.95), (1, 1.0, 1.0, 1.0), (4, 1.0, 0.0, 0.0)]:
        rewards, values = normals(n), normals(n)
        returns = [a + v for a, v in zip(gae(rewards, values, gamma, critic), values)]
        out.append(
            {
                "name": "gae",
                "gamma": gamma,
                "lambda_policy": policy,
                "lambda_critic": critic,
                "rewards": rewards,
                "values": values,
                "advantages": gae(rewards, values, gamma, policy),
                "returns": returns,
            }
        )
    for n in (60, 25, 8):
        rewards, values = [0.0] * (n - 1) + [1.0], normals(n)
        decay = max(0.0, 1.0 - 1.0 / (0.05 * n))
        returns = [a + v for a, v in zip(gae(rewards, values, 1.0, 1.0), values)]
        out.append(
            {
                "name": "adaptive",
                "alpha": 0.05,
                "gamma": 1.0,
                "lambda_policy": decay,
                "lambda_critic": 1.0,
                "rewards": rewards,
                "values": values,
                "advantages": gae(rewards, values, 1.0, decay),
                "returns": returns,
            }
        )
    for rows in ([normals(5), normals(2), normals(3)], [[0.5, 0.5]]):
        masks = [[(i + j) % 4 != 3 for j in range(len(row))] for i, row in enumerate(rows)]
        flat = [x for row, mask in zip(rows, masks) for x, keep in zip(row, mask) if keep]
        spread = math.sqrt(math.fsum((x - mean(flat)) ** 2 for x in flat) / len(flat) + WHITEN_EPS)
        expected = [[(x - mean(flat)) / spread if keep else 0.0 for x, keep in zip(r, m)] for r, m in zip(rows, masks)]
        out.append({"name": "whitened", "rows": rows, "mask": masks, "expected": expected})
    return out


def value_cases():
    out = []
    for clip in (None, 0.2, 0.5):
        values, old, returns = normals(8), normals(8), normals(8)
        v = tensor(values).requires_grad_(True)
        losses = value_loss(v, tensor(old), tensor(returns), clip)
        losses.sum().backward()
        out.append(
            {
                "values": values,
                "old_values": old,
                "returns": returns,
                "clip": clip,
                "losses": losses.tolist(),
                "gradient": v.grad.tolist(),
            }
        )
    return out


def preference_cases():
    points = [
        (-12.5, -14.0, -13.0, -13.5),
        (-40.0, -10.0, -20.0, -20.0),
        (-3.0, -3.0, -3.0, -3.0),
        (-1.0, -900.0, -500.0, -2.0),
    ]
    settings = [
        ("dpo", {"beta": 0.1, "smoothing": 0.0}),
        ("dpo", {"beta": 0.5, "smoothing": 0.1}),
        ("ipo", {"beta": 0.1}),
    ]
    out = []
    for name, params in settings:
        for c, r, rc, rr in points:
            chosen, rejected = tensor(c).requires_grad_(True), tensor(r).requires_grad_(True)
            loss = {"dpo": dpo, "ipo": ipo}[name](chosen, rejected, rc, rr, **params)
            loss.backward()
            out.append(
                {
                    "name": name,
                    **params,
                    "chosen": c,
                    "rejected": r,
                    "reference_chosen": rc,
                    "reference_rejected": rr,
                    "loss": loss.item(),
                    "gradient_chosen": chosen.grad.item(),
                    "gradient_rejected": rejected.grad.item(),
                }
            )
    for c, r, margin in [(1.5, 0.5, 0.0), (0.2, 0.9, 0.5), (0.0, 0.0, 0.0), (50.0, -50.0, 1.0), (-400.0, 400.0, 0.0)]:
        chosen, rejected = tensor(c).requires_grad_(True), tensor(r).requires_grad_(True)
        loss = bradley_terry(chosen, rejected, margin)
        loss.backward()
        out.append(
            {
                "name": "bradley_terry",
                "chosen": c,
                "rejected": r,
                "margin": margin,
                "loss": loss.item(),
                "gradient_chosen": chosen.grad.item(),
                "gradient_rejected": rejected.grad.item(),
            }
        )
    return out


def batch_groups(rewards):
    """Every row drifts by its own amount, the second of each group not at all from its sampler, so
    that a mask keeps some rows, drops others whole and cuts tokens out of the rest. A group of two
    drifts so far that a mask of rows drops all of it."""
    groups = []
    for own in rewards:
        group = []
        drift = [0.6, 0.0, 0.05, 0.3] if len(own) > 2 else [2.0, 2.0]
        for i, reward in enumerate(own):
            # What a sampler recorded is in f32: numbers that are the same in both.
            behavior = [round(p * 1024) / 1024 for p in logprobs(DRAW.randint(1, 6))]
            proximal = near(behavior, drift[i])
            group.append(
                {
                    "reward": reward,
                    "current": near(proximal, 0.25),
                    "proximal": proximal,
                    "behavior": behavior,
                    "reference": near(behavior, 0.4),
                    "entropy": [round(DRAW.random() * 3.0, 4) for _ in behavior],
                }
            )
        groups.append(group)
    return groups


CLIP = {"name": "clip", "low": 0.2, "high": 0.2, "dual": None}
DUAL = {"name": "clip", "low": 0.2, "high": 0.28, "dual": 3.0}
TRUNCATE, BARE = {"name": "token_truncate", "cap": 2.0}, {"name": "none"}
GROUP, PLAIN = {"name": "group", "scale": "group"}, {"name": "reinforce"}
# kind: advantage, loss, correction, aggregation, and what else differs from no KL and no entropy
BATCHES = {
    "grpo": (GROUP, CLIP, TRUNCATE, "sequence_mean", {"kl": {"coef": 0.04, "estimator": "k3"}}),
    "dr_grpo": ({"name": "group", "scale": "none"}, CLIP, TRUNCATE, "constant", {}),
    "dapo": (GROUP, DUAL, TRUNCATE, "token_mean", {}),
    "rloo": ({"name": "leave_one_out"}, PLAIN, TRUNCATE, "sequence_mean", {}),
    "reinforce_pp": ({"name": "whiten", "baseline": False}, CLIP, TRUNCATE, "token_mean", {}),
    "reinforce_pp_baseline": (
        {"name": "whiten", "baseline": True},
        CLIP,
        TRUNCATE,
        "token_mean",
        {"kl": {"coef": 0.01, "estimator": "k2"}},
    ),
    "opo": ({"name": "length_weighted"}, PLAIN, BARE, "sequence_mean", {}),
    "gspo": (GROUP, {"name": "gspo", "low": 0.0003, "high": 0.0004}, TRUNCATE, "sequence_mean", {}),
    "cispo": (GROUP, {"name": "cispo", "low": 0.8, "high": 1.28}, BARE, "token_mean", {}),
    "aipo": (GROUP, {"name": "cispo", "low": 0.0, "high": 2.0}, BARE, "sequence_mean", {}),
    "scale_rl": (
        {"name": "group", "scale": "batch"},
        {"name": "cispo", "low": 0.0, "high": 5.0},
        BARE,
        "prompt_mean",
        {},
    ),
    "topr": (
        {"name": "none"},
        {"name": "topr", "positive": [1.0, 1.0], "negative": [0.0, 1.0]},
        BARE,
        "sequence_mean",
        {},
    ),
    "sapo": (GROUP, {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}, TRUNCATE, "sequence_mean", {}),
    "gmpo": (GROUP, {"name": "gmpo", "low": 0.4, "high": 0.4}, BARE, "sequence_mean", {}),
    "dppo": (GROUP, {"name": "dppo", "low": 0.1, "high": 0.1, "cap": 20.0}, BARE, "token_mean", {}),
    "icepop": (
        GROUP,
        CLIP,
        {"name": "token_mask", "low": 0.5, "high": 1.5},
        "token_mean",
        {"kl": {"coef": 0.1, "estimator": "k1"}},
    ),
    "geometric_mask": (
        GROUP,
        CLIP,
        {"name": "geometric_mask", "low": 0.9, "high": 1.1},
        "prompt_mean",
        {"entropy_coef": 0.01},
    ),
    "sequence_mask": (GROUP, CLIP, {"name": "sequence_mask", "low": 0.7, "high": 1.4}, "constant", {}),
    "k3_mask": (
        GROUP,
        CLIP,
        {"name": "k3_mask", "high": 0.01},
        "sequence_mean",
        {"kl": {"coef": 0.04, "estimator": "k3"}},
    ),
    "sequence_truncate": (GROUP, CLIP, {"name": "sequence_truncate", "cap": 2.0}, "token_mean", {}),
    "pass_at_k": ({"name": "pass_at_k", "k": 2}, CLIP, TRUNCATE, "sequence_mean", {}),
    "entropy": (GROUP, CLIP, TRUNCATE, "token_mean", {"entropy_coef": 0.05}),
    "entropy_share": (
        GROUP,
        CLIP,
        TRUNCATE,
        "token_mean",
        {"entropy_share": 0.3, "kl": {"coef": 0.04, "estimator": "k3"}},
    ),
    "entropy_share_masked": (
        GROUP,
        CLIP,
        {"name": "token_mask", "low": 0.5, "high": 1.5},
        "sequence_mean",
        {"entropy_share": 0.3},
    ),
    "likelihood": (GROUP, CLIP, {"name": "token_mask", "low": 0.5, "high": 1.5}, "token_mean", {"nll_coef": 0.1}),
    "scale_rl_dropped": (
        {"name": "group", "scale": "batch"},
        {"name": "cispo", "low": 0.0, "high": 5.0},
        BARE,
        "prompt_mean",
        {"drop_zero_variance": True},
    ),
}


def batch_cases():
    out = []
    for kind, (advantage, loss, fix, aggregation, more) in BATCHES.items():
        rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
        if kind == "geometric_mask":
            rewards.append([1.0, 0.0])
        if kind in ("entropy_share", "scale_rl_dropped"):
            rewards.append([1.0, 1.0, 1.0])
        if kind == "topr":
            rewards = [[2.0 * r - 1.0 for r in own] for own in rewards]
        batch = {
            "kind": kind,
            "advantage": advantage,
            "loss": loss,
            "correction": fix,
            "aggregation": aggregation,
            "kl": None,
            "entropy_coef": 0.0,
            "entropy_share": 1.0,
            "nll_coef": 0.0,
            "drop_zero_variance": False,
            "max_completion_length": 8,
            **more,
            "groups": batch_groups(rewards),
        }
        out.append(batch_loss(batch))
    return out


def main():
    goldens = {
        "made_by": "trainer/tests/goldens/algorithms.py",
        "torch": torch.__version__.split("+")[0],
        "advantages": advantage_cases(),
        "losses": loss_cases(),
        "corrections": correction_cases(),
        "divergences": divergence_cases(),
        "aggregations": aggregation_cases(),
        "gae": gae_cases(),
        "value_losses": value_cases(),
        "preferences": preference_cases(),
        "batches": batch_cases(),
    }
    lines = []
    for key, value in goldens.items():
        if isinstance(value, list):
            rows = ",\n".join("  " + json.dumps(entry, allow_nan=False) for entry in value)
            lines.append(f'"{key}": [\n{rows}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


if __name__ == "__main__":
    main()
