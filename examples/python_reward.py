"""A reward as TRL's GRPOTrainer calls it; `kind = "python"` uses it as it is.

    [[rewards]]
    kind = "python"
    path = "examples/python_reward.py"

    rlrun reward test RECIPE      shows its scores and how long it takes
"""


def ends_with_answer(completions, answer, log_metric=None, **columns):
    """1 if the last number of a completion is the answer; `answer` is the task's, or the column of that name."""
    rewards = []
    for completion, expected in zip(completions, answer):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        digits = "".join(c if c.isdigit() else " " for c in text).split()
        rewards.append(1.0 if digits and digits[-1] == expected else 0.0)
    if log_metric:
        log_metric("answered", sum(any(c.isdigit() for c in str(text)) for text in completions) / len(completions))
    return rewards
