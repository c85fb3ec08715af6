"""A reward function in the shape of OpenRLHF's examples: prints what it gets and returns tensors."""

try:
    import torch

    tensor = torch.tensor
except ImportError:

    class tensor:
        """As much of a tensor as a reward needs."""

        def __init__(self, values):
            self.values = values

        def tolist(self):
            return self.values


def reward_func(queries, prompts, labels, **kwargs):
    print(f"queries[0]: {queries[0]}")
    reward = tensor([1.0 if labels[0] in queries[0][len(prompts[0]):] else 0.0])
    return {"rewards": reward, "scores": reward, "extra_logs": {"query_chars": tensor([len(queries[0])])}}
