"""Reward functions in the shape of slime's --custom-rm-path."""

import asyncio

from slime.utils.types import Sample


async def custom_rm(args, sample: Sample, **kwargs):
    await asyncio.sleep(0)
    assert sample.response_length == len(sample.loss_mask)
    truncated = sample.status == Sample.Status.TRUNCATED
    score = float(sample.response == sample.label) - (args.penalty if truncated else 0.0)
    return {"score": score, "tokens": len(sample.tokens), "level": sample.metadata["level"]}


async def batched_custom_rm(args, samples: list[Sample], **kwargs):
    longest = max(sample.response_length for sample in samples)
    return [sample.response_length / longest for sample in samples]
