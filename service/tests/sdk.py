"""tinker's own SDK, unmodified, at a training service: `sdk.py URL MODEL_NAME`, with tinker 0.24.1 and with 0.38.0.

Prints a line for each part and ends at the first assertion that fails. Tokens are 5 to 21, which every vocabulary has.
The key is TINKER_API_KEY, or any where the service has none.
"""

import os
import sys

URL, BASE = sys.argv[1:3]
os.environ["TINKER_BASE_URL"] = URL
os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import tinker  # noqa: E402
from tinker import types as T  # noqa: E402

PROMPT = [5, 6, 7, 8]
COMPLETIONS = [[9, 10, 11, 12, 13], [9, 14, 15], [9, 10, 16, 17, 18, 19]]
WAIT_S = 120


def ready(made):
    """Clients come as futures from the newer SDK."""
    return made.result() if hasattr(made, "result") else made


def lora(service, seed=1):
    return ready(service.create_lora_training_client(base_model=BASE, rank=8, seed=seed))


def datum(tokens, **inputs):
    return T.Datum(model_input=T.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def supervised(prompt, completion):
    pad = len(prompt) - 1
    weights = [0.0] * pad + [1.0] * len(completion)
    return datum(prompt + completion[:-1], target_tokens=prompt[1:] + completion, weights=weights)


def sampled(prompt, sequence, advantage):
    """Prompt and completion as two chunks, as the cookbook sends them."""
    pad = len(prompt) - 1
    tokens = T.ModelInput.from_ints(prompt).append(T.EncodedTextChunk(tokens=sequence.tokens[:-1]))
    inputs = {
        "target_tokens": [0] * pad + list(sequence.tokens),
        "logprobs": [0.0] * pad + list(sequence.logprobs),
        "advantages": [0.0] * pad + [advantage] * len(sequence.tokens),
    }
    return T.Datum(model_input=tokens, loss_fn_inputs=inputs)


DATA = [supervised(PROMPT, completion) for completion in COMPLETIONS]


def train(client, steps, data=DATA, rate=0.02):
    """Losses of so many steps, all of which are sent before the first answer is read."""
    passes = []
    for _ in range(steps):
        passes.append(client.forward_backward(data, "cross_entropy"))
        client.optim_step(T.AdamParams(learning_rate=rate, grad_clip_norm=1.0))
    return [passed.result(timeout=WAIT_S).metrics["loss:sum"] for passed in passes]


def logprobs(client, data=DATA):
    outputs = client.forward(data, "cross_entropy").result(timeout=WAIT_S).loss_fn_outputs
    return [output["logprobs"].tolist() for output in outputs]


def supervised_training(service):
    client = lora(service)
    losses = train(client, 12)
    assert losses[-1] < 0.8 * losses[0], losses
    info = client.get_info()
    assert info.model_data.model_name == BASE and info.is_lora and info.lora_rank == 8, info
    try:
        assert len(client.get_tokenizer()) > 21
    except ImportError as error:
        print(f"skipped the tokenizer: {error}")
    print(f"ok supervised training: {losses[0]:.2f} to {losses[-1]:.2f}")


def large_batch(service):
    """More sequences than one request has: the SDK sends several, at the same time, and sums their metrics."""
    client = lora(service)
    data = [supervised([5, 6], [7 + n % 7, 14]) for n in range(1100)]
    passed = client.forward_backward(data, "cross_entropy").result(timeout=WAIT_S)
    rows = [output["logprobs"].tolist() for output in passed.loss_fn_outputs]
    assert len(rows) == 1100 and rows[0] == rows[7 * 150] and rows[0] != rows[1], "outputs are in another order"
    expected = -sum(sum(row[1:]) for row in rows)
    assert abs(passed.metrics["loss:sum"] - expected) < 1e-3 * abs(expected), (passed.metrics, expected)
    print("ok a batch of several requests")


def policy(service):
    """GRPO by hand with each loss; the reward is the share of even tokens."""
    settings = {
        "importance_sampling": None,
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    }
    for loss, config in settings.items():
        client = lora(service, seed=2)
        rewards = []
        for step in range(10):
            sampler = ready(client.save_weights_and_get_sampling_client())
            prompts = [[5, 6, 7], [5, 6, 8]]
            params = T.SamplingParams(max_tokens=4, temperature=1.0, stop=[], seed=step)
            futures = [sampler.sample(T.ModelInput.from_ints(prompt), 16, params) for prompt in prompts]
            data, scores = [], []
            for prompt, future in zip(prompts, futures):
                sequences = future.result(timeout=WAIT_S).sequences
                assert len(sequences) == 16 and all(s.stop_reason == "length" for s in sequences), sequences
                group = [sum(token % 2 == 0 for token in s.tokens) / len(s.tokens) for s in sequences]
                mean = sum(group) / len(group)
                data += [sampled(prompt, s, reward - mean) for s, reward in zip(sequences, group)]
                scores += group
            rewards.append(sum(scores) / len(scores))
            passed = client.forward_backward(data, loss, loss_fn_config=config)
            client.optim_step(T.AdamParams(learning_rate=0.02, grad_clip_norm=1.0))
            metrics = passed.result(timeout=WAIT_S).metrics
            if step == 0 and loss == "importance_sampling":
                # Ratios of a policy with itself are 1, and advantages of a group add up to 0.
                assert abs(metrics["loss:sum"]) < 1e-3, metrics
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, (loss, rewards)
        print(f"ok {loss}: reward {rewards[0]:.2f} to {rewards[-1]:.2f}")


def custom_loss(service):
    try:
        import torch  # noqa: F401
    except ImportError as error:
        print(f"skipped forward_backward_custom: {error}")
        return
    weights = [torch.tensor(d.loss_fn_inputs["weights"].tolist()) for d in DATA]

    def likelihood(_, rows):
        return -sum((row * weight).sum() for row, weight in zip(rows, weights)), {"custom:sum": 1.0}

    def distance(_, rows):
        loss = sum((((row + 1.0) ** 2) * weight).sum() for row, weight in zip(rows, weights))
        return loss, {"custom:sum": float(loss)}

    data = [datum(d.model_input.to_ints(), target_tokens=d.loss_fn_inputs["target_tokens"].tolist()) for d in DATA]
    adam = T.AdamParams(learning_rate=0.02, grad_clip_norm=1.0)
    plain, custom = lora(service), lora(service)
    plain.forward_backward(DATA, "cross_entropy").result(timeout=WAIT_S)
    custom.forward_backward_custom(data, likelihood).result(timeout=WAIT_S)
    for client in (plain, custom):
        client.optim_step(adam).result(timeout=WAIT_S)
    assert logprobs(plain) == logprobs(custom), "a custom loss that is cross-entropy makes another update"
    losses = []
    for _ in range(8):
        passed = custom.forward_backward_custom(data, distance)
        losses.append(passed.result(timeout=WAIT_S).metrics["custom:sum"])
        custom.optim_step(adam).result(timeout=WAIT_S)
    assert losses[-1] < losses[0], losses
    print(f"ok forward_backward_custom: {losses[0]:.2f} to {losses[-1]:.2f}")


def samplers(service):
    """A sampler computes what its model computes; a snapshot stays; saved weights are sampled by their path."""
    client = lora(service)
    train(client, 2)
    tokens = PROMPT + COMPLETIONS[0]
    whole = [datum(tokens[:-1], target_tokens=tokens[1:], weights=[1.0] * (len(tokens) - 1))]
    prompt = T.ModelInput.from_ints(tokens)
    snapshot = ready(client.save_weights_and_get_sampling_client())
    path = client.save_weights_for_sampler("weights").result(timeout=WAIT_S).path
    before = logprobs(client, whole)[0]
    train(client, 2)
    assert logprobs(client, whole)[0] != before
    saved = ready(service.create_sampling_client(model_path=path))
    base = ready(service.create_sampling_client(base_model=BASE))
    scored = [sampler.compute_logprobs(prompt).result(timeout=WAIT_S) for sampler in (snapshot, saved, base)]
    assert scored[0][0] is None, scored[0]
    assert scored[0][1:] == before, (scored[0], before)
    assert scored[1] == scored[0], "weights that were saved and loaded differ"
    assert scored[2] != scored[0], "the base model has the adapter"
    assert saved.get_base_model() == BASE, saved.get_base_model()
    params = T.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    greedy = [sampler.sample(prompt, 1, params).result(timeout=WAIT_S).sequences[0] for sampler in (snapshot, saved)]
    assert greedy[0].tokens == greedy[1].tokens and greedy[0].logprobs == greedy[1].logprobs, greedy
    params = T.SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop=[])
    drawn = snapshot.sample(prompt, 2, params).result(timeout=WAIT_S).sequences
    for sequence in drawn:
        rows = snapshot.compute_logprobs(T.ModelInput.from_ints(tokens + sequence.tokens)).result(timeout=WAIT_S)
        assert rows[len(tokens) :] == sequence.logprobs, (rows, sequence)
    repeated = saved.sample(prompt, 2, params).result(timeout=WAIT_S).sequences
    assert [s.tokens for s in repeated] == [s.tokens for s in drawn], "a seed draws other tokens"
    stop = T.SamplingParams(max_tokens=64, seed=1, stop=[greedy[0].tokens[0]], temperature=0.0)
    ended = snapshot.sample(prompt, 1, stop).result(timeout=WAIT_S).sequences[0]
    assert ended.stop_reason == "stop" and ended.tokens == greedy[0].tokens[:1], ended
    print("ok samplers")


def saved_state(service):
    """What continues from a saved state is what continues without one."""
    client = lora(service)
    train(client, 3)
    path = client.save_state("state").result(timeout=WAIT_S).path
    assert path.startswith("tinker://") and path.endswith("/weights/state"), path
    expected = train(client, 3)
    restored = ready(service.create_training_client_from_state_with_optimizer(path))
    assert train(restored, 3) == expected
    weights = ready(service.create_training_client_from_state(path))
    other = train(weights, 3)
    assert other[0] == expected[0] and other[2] != expected[2], (other, expected)
    client.load_state_with_optimizer(path).result(timeout=WAIT_S)
    assert train(client, 3) == expected
    print("ok saved states")


def inflight(service):
    """All in-flight samplers of a model take up what is published later."""
    if not hasattr(T, "SamplingClientKind"):
        print(f"skipped in-flight samplers: tinker {tinker.__version__} has none")
        return
    client = lora(service)
    prompt = T.ModelInput.from_ints(PROMPT + COMPLETIONS[0])
    first = ready(client.save_weights_and_get_sampling_client(kind="inflight"))
    before = first.compute_logprobs(prompt).result(timeout=WAIT_S)
    train(client, 3)
    second = ready(client.save_weights_and_get_sampling_client(kind="inflight"))
    after = [sampler.compute_logprobs(prompt).result(timeout=WAIT_S) for sampler in (second, first)]
    assert after[0] != before and after[1] == after[0], (before, after)
    print("ok in-flight samplers")


def several_models(service):
    """Models of two sessions that train at the same time compute what each computes alone."""
    alone = train(lora(service), 4)
    other = tinker.ServiceClient()
    clients = [lora(service), lora(other), lora(other)]
    passes = []
    for _ in range(4):
        for client in clients:
            passes.append(client.forward_backward(DATA, "cross_entropy"))
            client.optim_step(T.AdamParams(learning_rate=0.02, grad_clip_norm=1.0))
    losses = [passed.result(timeout=WAIT_S).metrics["loss:sum"] for passed in passes]
    assert all(losses[n::3] == alone for n in range(3)), (losses, alone)
    assert len({client.model_id for client in clients}) == 3
    print("ok several models")


def rest(service):
    """Lists of what was saved, and its deletion."""
    client = lora(service)
    path = client.save_state("listed").result(timeout=WAIT_S).path
    api = tinker.RestClient() if hasattr(tinker, "RestClient") else service.create_rest_client()
    names = [model.model_name for model in ready(service.get_server_capabilities()).supported_models]
    assert BASE in names, names
    run = api.get_training_run_by_tinker_path(path).result()
    assert run.training_run_id == client.model_id and run.base_model == BASE and run.lora_rank == 8, run
    saved = api.list_checkpoints(client.model_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in saved] == [path], saved
    assert saved[0].checkpoint_id == "weights/listed" and saved[0].checkpoint_type == "training", saved
    api.delete_checkpoint_from_tinker_path(path).result()
    assert api.list_checkpoints(client.model_id).result().checkpoints == []
    assert client.model_id in [run.training_run_id for run in api.list_training_runs(limit=100).result().training_runs]
    print("ok lists of what was saved")


def mistakes(service):
    """Mistakes have the documented types of error, and the model continues."""
    client = lora(service)
    good = datum([5, 6, 7], target_tokens=[6, 7, 8], logprobs=[-1.0] * 3, advantages=[1.0] * 3)
    short = datum([5, 6, 7], target_tokens=[6, 7], logprobs=[-1.0] * 3, advantages=[1.0] * 3)
    beyond = datum([5, 1 << 30, 7], target_tokens=[6, 7, 8], logprobs=[-1.0] * 3, advantages=[1.0] * 3)
    nan = datum([5, 6, 7], target_tokens=[6, 7, 8], logprobs=[-1.0] * 3, advantages=[float("nan")] * 3)
    path = "tinker://none/weights/none"
    attempts = {
        "a wrong shape": lambda: client.forward_backward([short], "importance_sampling"),
        "a token beyond the vocabulary": lambda: client.forward_backward([beyond], "importance_sampling"),
        "stable_reinforce": lambda: client.forward_backward([good], "stable_reinforce"),
        "an unknown loss": lambda: client.forward_backward([good], "no_such_loss"),
        "an unknown setting": lambda: client.forward_backward([good], "ppo", loss_fn_config={"no_such_setting": 1.0}),
        "an unknown model": lambda: service.create_lora_training_client(base_model="no-such-model", rank=8),
        "an unknown state": lambda: service.create_training_client_from_state_with_optimizer(path),
        "an unknown sampler": lambda: service.create_sampling_client(model_path="tinker://none/sampler_weights/none"),
    }
    # The older client finds NaN itself, because JSON has none. It then waits for the number of that request for ever.
    own_client = lora(service) if tinker.__version__ == "0.24.1" else client
    attempts["NaN advantages"] = lambda: own_client.forward_backward([nan], "importance_sampling")
    for what, attempt in attempts.items():
        try:
            made = attempt()
            if hasattr(made, "result"):
                made.result()
        except tinker.RequestFailedError as error:
            assert error.category == T.RequestErrorCategory.User, (what, error)
        except (tinker.BadRequestError, tinker.NotFoundError, tinker.UnprocessableEntityError) as error:
            assert "detail" in str(error) or "error" in str(error), (what, error)
        except ValueError as error:
            assert what == "NaN advantages" and own_client is not client, (what, error)
        else:
            raise AssertionError(f"{what} was accepted")
    assert client.forward([good], "importance_sampling").result(timeout=WAIT_S).loss_fn_outputs
    client.forward_backward([good], "importance_sampling")
    client.optim_step(T.AdamParams()).result(timeout=WAIT_S)
    print("ok mistakes")


def main():
    service = tinker.ServiceClient()
    parts = [supervised_training, large_batch, policy, custom_loss, samplers, saved_state, inflight, several_models]
    for part in [*parts, rest, mistakes]:
        part(service)
    print(f"ok tinker {tinker.__version__}")


if __name__ == "__main__":
    main()
