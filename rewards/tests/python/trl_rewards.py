"""Reward functions in the shape that TRL's GRPOTrainer documents."""

import asyncio
import os
import re
import time


def reward_length(completion_ids, **kwargs):
    """Longer completions get more."""
    return [float(len(ids)) for ids in completion_ids]


def reward_format(completions, **kwargs):
    """One if the completion thinks and then answers."""
    contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) for content in contents]
    return [1.0 if match else 0.0 for match in matches]


def reward_accuracy(completions, ground_truth, **kwargs):
    """One if what is boxed is the column `ground_truth`."""
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if match and match.group(1) == truth else 0.0 for match, truth in zip(found, ground_truth)]


def reward_math_only(prompts, completions, task, **kwargs):
    """Does not apply to rows of other tasks."""
    return [(1.0 if "4" in completion else -1.0) if kind == "math" else None for completion, kind in zip(completions, task)]


async def reward_async(prompts, completions, **kwargs):
    async def one(prompt, completion):
        await asyncio.sleep(0.01)
        return 2.0 if prompt in completion else 0.0

    return await asyncio.gather(*map(one, prompts, completions))


def reward_logged(completions, trainer_state, log_extra=None, log_metric=None, **kwargs):
    upper = [completion.upper() for completion in completions]
    log_extra("upper", upper)
    log_metric("share_short", sum(len(completion) < 3 for completion in completions) / len(completions))
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]


def reward_everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    """The columns that arrive, as a detail."""
    log_extra("columns", [",".join(sorted(columns))] * len(prompts))
    return [float(len(prompts))] * len(completions)


def reward_batch_size(completions, **kwargs):
    return [float(len(completions))] * len(completions)


def reward_short(completions, **kwargs):
    return [1.0]


def reward_number(completions, **kwargs):
    return 1.0


def reward_odd(completions, **kwargs):
    """Raises, hangs or dies for a whole batch if one of its completions says so."""
    if "hang" in completions:
        time.sleep(1000)
    if "die" in completions:
        os._exit(9)
    if "bad" in completions:
        raise ValueError(f"one of {len(completions)} is bad")
    return [float(len(completions)) / len(completions) for _ in completions]
