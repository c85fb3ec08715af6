"""Trains a model by the Python package alone: `package.py URL MODEL_NAME`, where a training service listens.

Prints a line for each part and ends at the first assertion that fails. Tokens are 5 to 21, which every vocabulary has.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))

from rlrun.training import Client, RequestFailed, ServiceError, policy_datum, supervised_datum  # noqa: E402

PROMPT = [5, 6, 7, 8]
COMPLETIONS = [[9, 10, 11, 12, 13], [9, 14, 15], [9, 10, 16, 17, 18, 19]]
WAIT_S = 120


def supervised(client, base):
    """The loss falls, by an adapter and by all weights."""
    data = [supervised_datum(PROMPT, completion) for completion in COMPLETIONS]
    for rank in (8, None):
        model = client.model(base, rank=rank, seed=1)
        passes = []
        for _ in range(12):
            passes.append(model.forward_backward(data, "cross_entropy"))
            model.optim_step(learning_rate=0.02, grad_clip_norm=1.0)
        losses = [passed.result(WAIT_S).metrics["loss:sum"] for passed in passes]
        assert losses[-1] < 0.9 * losses[0], losses
        model.close().result(WAIT_S)
        print(f"ok loss of {'all weights' if rank is None else 'an adapter'}: {losses[0]:.2f} to {losses[-1]:.2f}")


def policy(client, base):
    """GRPO: the share of even tokens rises."""
    model = client.model(base, rank=8, seed=2)
    shares = []
    for step in range(12):
        sampler = model.sampler()
        prompts = [[5, 6, 7], [5, 6, 8]]
        sampled = [sampler.sample(prompt, n=16, max_tokens=4, stop=[], seed=step) for prompt in prompts]
        data, rewards = [], []
        for prompt, future in zip(prompts, sampled):
            completions = future.result(WAIT_S).completions
            scores = [sum(token % 2 == 0 for token in c.tokens) / len(c.tokens) for c in completions]
            mean = sum(scores) / len(scores)
            data += [policy_datum(prompt, c.tokens, c.logprobs, s - mean) for c, s in zip(completions, scores)]
            rewards += scores
        shares.append(sum(rewards) / len(rewards))
        passed = model.forward_backward(data, "importance_sampling")
        model.optim_step(learning_rate=0.02, grad_clip_norm=1.0)
        assert "loss:sum" in passed.result(WAIT_S).metrics
    assert sum(shares[-3:]) / 3 > sum(shares[:3]) / 3 + 0.1, shares
    print(f"ok share of even tokens: {shares[0]:.2f} to {shares[-1]:.2f}")
    return model


def versions(client, model):
    """A sampler and its model compute the same, and what was saved is what is loaded."""
    tokens = PROMPT + COMPLETIONS[0]
    data = [{"tokens": tokens[:-1], "target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}]
    sampler = model.sampler()
    before = model.forward(data).result(WAIT_S).logprobs[0]
    assert sampler.logprobs(tokens)[1:] == before, (sampler.logprobs(tokens), before)
    path, weights = model.save("state"), model.save_for_sampling("weights")
    loaded = client.load(path.result(WAIT_S))
    for same in (model, loaded):
        same.forward_backward(data, "cross_entropy")
        same.optim_step(learning_rate=0.01)
    after = [same.forward(data).result(WAIT_S).logprobs[0] for same in (model, loaded)]
    assert after[0] == after[1] != before, (before, after)
    assert client.sampler(weights.result(WAIT_S)).logprobs(tokens)[1:] == before
    assert sampler.logprobs(tokens)[1:] == before, "a snapshot has changed"
    print("ok samplers and saved weights")


def refusals(client, model):
    """Mistakes are refused with a sentence, and the model continues."""
    good = policy_datum(PROMPT, [9, 10], [-1.0, -1.0], 1.0)
    attempts = [
        lambda: model.forward_backward([good], "stable_reinforce").result(WAIT_S),
        lambda: model.forward_backward([{**good, "advantages": [1.0]}], "ppo").result(WAIT_S),
        lambda: model.forward_backward([{**good, "tokens": [5, 6, 7, 1 << 30, 9]}], "ppo").result(WAIT_S),
        lambda: client.model("no-such-model", rank=8),
        lambda: client.load("tinker://none/weights/none"),
        lambda: client.sampler("tinker://none/sampler_weights/none"),
    ]
    for number, attempt in enumerate(attempts):
        try:
            attempt()
        except (RequestFailed, ServiceError) as error:
            assert getattr(error, "category", "user") == "user", repr(error)
            assert 400 <= getattr(error, "status", 400) < 500, repr(error)
        else:
            raise AssertionError(f"mistake {number} was accepted")
    assert model.forward([good], "importance_sampling").result(WAIT_S).logprobs
    print("ok refusals")


def main():
    url, base = sys.argv[1:3]
    with Client(url, os.environ.get("TINKER_API_KEY", "tml-local")) as client:
        assert base in client.bases(), client.bases()
        supervised(client, base)
        model = policy(client, base)
        versions(client, model)
        refusals(client, model)


if __name__ == "__main__":
    main()
