"""A client of `rlrun serve training`: models that a program trains and samples, with the standard library alone.

    from rlrun.training import Client, policy_datum

    with Client("http://127.0.0.1:8703") as client:
        model = client.model("my-model", rank=16)              # a LoRA adapter; without `rank` all weights are trained
        sampler = model.sampler()
        completions = sampler.sample(prompt, n=8, max_tokens=64).result().completions
        data = [policy_datum(prompt, c.tokens, c.logprobs, advantage) for c, advantage in zip(completions, advantages)]
        passed = model.forward_backward(data, "importance_sampling")
        model.optim_step(learning_rate=1e-4)                   # is queued behind the pass, which nothing waits for
        print(passed.result().metrics["loss:sum"])

Methods that return a `Future` only queue their request; requests of a model run in the order of the calls. Numbers are
lists, or whatever has `tolist()`, such as arrays of numpy and tensors of torch. Log-probabilities are in nats. Requests
have the JSON form of tinker's API (docs/training_service.md), whose own client works as well.
"""

import json
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any, Optional

__all__ = [
    "Client", "Completion", "Future", "Model", "PassResult", "RequestFailed", "SampleResult", "Sampler", "ServiceError",
    "policy_datum", "supervised_datum",
]  # fmt: skip

HEARTBEAT_S = 10.0
"""Seconds between two heartbeats of a session."""
HOLD_S = 45.0
"""Longest wait for one answer, seconds; the service answers a request for an outcome after about 30 s."""
LONGEST_DELAY_S = 30.0
"""Longest delay between two attempts, seconds."""
CHUNK_DATA = 1024
"""Most sequences of one request."""
CHUNK_NUMBERS = 400_000
"""Most numbers of one request; more are sent as several requests, whose gradients add up."""


class ServiceError(Exception):
    """The service refused a request, or was not reached. `status` is the HTTP status, 0 if there was no answer."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class RequestFailed(Exception):
    """A request that was accepted failed. `category` is `user` if it cannot be carried out, or `server`."""

    def __init__(self, message: str, category: str, request_id: str):
        super().__init__(message)
        self.category = category
        self.request_id = request_id


@dataclass(frozen=True)
class PassResult:
    """What a pass over `D` sequences computed."""

    logprobs: list
    """`[D][N]` log-probabilities of the targets, nats."""
    metrics: dict
    """Metrics by `name:reduction`; `loss:sum` is summed over all tokens."""


@dataclass(frozen=True)
class Completion:
    """A completion of `C` tokens."""

    tokens: list
    """`[C]` token ids, with the token that ended it."""
    logprobs: list
    """`[C]` nats, of the distribution that the tokens were drawn from."""
    stopped: bool
    """Whether a stop rule ended it; otherwise `max_tokens` or the context did."""


@dataclass(frozen=True)
class SampleResult:
    """What was sampled of a prompt of `P` tokens."""

    completions: list
    """The completions, `n` of them."""
    prompt_logprobs: Optional[list] = None
    """`[P]` nats, None at the first position; None if not asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the cache."""


def supervised_datum(prompt: Any, completion: Any) -> dict:
    """The sequence of `[P]` prompt and `[C]` completion tokens for `cross_entropy`: weight 1 on the completion."""
    prompt, completion = _plain(prompt), _plain(completion)
    pad = len(prompt) - 1
    return {
        "tokens": prompt + completion[:-1],
        "target_tokens": prompt[1:] + completion,
        "weights": [0.0] * pad + [1.0] * len(completion),
    }


def policy_datum(prompt: Any, completion: Any, logprobs: Any, advantage: Any) -> dict:
    """The sequence of a sampled completion for the losses with a ratio.

    prompt `[P]`, completion `[C]`, logprobs `[C]` as sampled, advantage a number or `[C]`.
    """
    prompt, completion, logprobs, advantage = map(_plain, (prompt, completion, logprobs, advantage))
    pad = len(prompt) - 1
    advantages = advantage if isinstance(advantage, list) else [advantage] * len(completion)
    return {
        "tokens": prompt + completion[:-1],
        "target_tokens": [0] * pad + completion,
        "logprobs": [0.0] * pad + logprobs,
        "advantages": [0.0] * pad + advantages,
    }


class Client:
    """A session at a service. It ends with `close`, or when the service has had no heartbeat of it for its timeout.

    `key` is one of the service's `--token-file`; `cafile` has the certificates (PEM) that a service with TLS is checked
    against; a service that is not reached, or is overloaded, is tried again for `patience_s` seconds.
    """

    def __init__(self, url: str, key: str = "tml-local", *, cafile: Optional[str] = None, patience_s: float = 300.0):
        self._url, self._key, self._patience_s = url.rstrip("/") + "/api/v1/", key, patience_s
        tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=cafile))
        # macOS names its proxy for loopback addresses too.
        local = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
        self._opener = urllib.request.build_opener(tls, urllib.request.ProxyHandler({} if local else None))
        self._lock = threading.Lock()
        self._models = self._samplers = 0
        session = {"tags": [], "user_metadata": {}, "sdk_version": "rlrun", "type": "create_session"}
        self.session_id = self._post("create_session", session)["session_id"]
        self._closed = threading.Event()
        self._over: Optional[ServiceError] = None
        threading.Thread(target=self._beat, name="rlrun-heartbeat", daemon=True).start()

    def bases(self) -> list:
        """Names of the base models."""
        answer = self._send("get_server_capabilities", None, HOLD_S)
        return [model["model_name"] for model in answer["supported_models"]]

    def model(
        self, base: str, rank: Optional[int] = None, *, seed: Optional[int] = None, train_attention: bool = True,
        train_mlp: bool = True, train_unembed: bool = True,
    ) -> "Model":  # fmt: skip
        """A new model of the base model named `base`: a LoRA adapter of `rank`, or all weights without one."""
        body = {"session_id": self.session_id, "model_seq_id": self._next_model(), "base_model": base}
        if rank is not None:
            body["lora_config"] = {"rank": rank, "train_attn": train_attention, "train_mlp": train_mlp,
                                   "train_unembed": train_unembed}  # fmt: skip
            if seed is not None:
                body["lora_config"]["seed"] = seed
        created = self._future("create_model", {**body, "type": "create_model"}, lambda value: value["model_id"])
        return Model(self, created.result())

    def load(self, path: str, *, optimizer: bool = True) -> "Model":
        """A new model from what `Model.save` saved at `path`, with the state of its optimizer if `optimizer`."""
        seq_id = self._next_model()
        body = {"session_id": self.session_id, "model_seq_id": seq_id, "path": path, "optimizer": optimizer}
        self._future("load_weights", {**body, "type": "load_weights"}, lambda value: value).result()
        return Model(self, f"{self.session_id}:train:{seq_id}")

    def sampler(self, base_or_path: str) -> "Sampler":
        """A sampler of a base model, or of weights that were saved for sampling at a `tinker://` path."""
        of = "model_path" if base_or_path.startswith("tinker://") else "base_model"
        body = {"session_id": self.session_id, "sampling_session_seq_id": self._next_sampler(), of: base_or_path}
        answer = self._post("create_sampling_session", {**body, "type": "create_sampling_session"})
        return Sampler(self, answer["sampling_session_id"])

    def close(self) -> None:
        """Ends the session: the service unloads its models. What was saved of them stays."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._send(f"sessions/{self.session_id}/finish", {}, HEARTBEAT_S)
        except ServiceError:
            # Without heartbeats it ends too.
            pass

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _next_model(self) -> int:
        with self._lock:
            self._models += 1
            return self._models - 1

    def _next_sampler(self) -> int:
        with self._lock:
            self._samplers += 1
            return self._samplers - 1

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            try:
                self._send("session_heartbeat", {"session_id": self.session_id}, HEARTBEAT_S)
            except ServiceError as error:
                # A service that is not reached may come back before the session has timed out.
                if error.status == 410:
                    self._over = error
                    return

    def _future(self, route: str, body: Any, convert: Any) -> "Future":
        if self._over is not None:
            raise ServiceError(f"the session {self.session_id} is over: {self._over}; make a new Client", 410)
        encoded = _encode(body)
        return Future(self, route, encoded, self._post(route, encoded), convert)

    def _post(self, route: str, body: Any) -> dict:
        """Sends a request until it is answered: 408, 409, 429, 5xx and lost connections are tried again."""
        end, delay_s = time.monotonic() + self._patience_s, 1.0
        while True:
            try:
                return self._send(route, body, HOLD_S)
            except ServiceError as error:
                transient = error.status in (0, 408, 409, 429) or error.status >= 500
                if not transient or time.monotonic() + delay_s > end:
                    raise
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _send(self, route: str, body: Any, timeout_s: float) -> dict:
        headers = {"X-API-Key": self._key, "Accept": "application/json", "Content-Type": "application/json"}
        data = None if body is None else _encode(body)
        request = urllib.request.Request(self._url + route, data=data, headers=headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise ServiceError(f"{route}: {error.code}: {_text_of(error)}", error.code) from None
        except (OSError, ValueError) as error:
            raise ServiceError(f"{route}: no answer from {self._url}: {error}") from error


class Future:
    """The outcome of a request that the service has accepted."""

    def __init__(self, client: Client, route: str, body: bytes, ticket: dict, convert: Any):
        self._client, self._route, self._body, self._convert = client, route, body, convert
        self.request_id: str = ticket["request_id"]
        self._lock = threading.Lock()
        self._value: Any = None
        self._done = False
        self._unreached_since: Optional[float] = None

    def result(self, timeout: Optional[float] = None) -> Any:
        """Waits for the outcome, at most `timeout` seconds. Errors: RequestFailed, ServiceError, TimeoutError."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._done:
                left_s = HOLD_S if end is None else min(HOLD_S, end - time.monotonic())
                if left_s <= 0:
                    raise TimeoutError(f"{self._route}: request {self.request_id} has not ended within {timeout} s")
                self._ask(left_s, end)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def _ask(self, left_s: float, end: Optional[float]) -> None:
        """One question for the outcome, which waits at the service."""
        try:
            body = {"request_id": self.request_id, "allow_metadata_only": False}
            answer = self._client._send("retrieve_future", body, left_s)
        except ServiceError as error:
            if error.status == 410:
                # The service has dropped the outcome. A repeated request has the same name, so it runs once.
                self.request_id = self._client._post(self._route, self._body)["request_id"]
            elif error.status in (0, 429) or error.status >= 500:
                self._wait_for_service(error, end)
            elif error.status != 408:
                self._finish(error)
            return
        self._unreached_since = None
        if answer.get("type") == "try_again":
            return
        if "error" in answer:
            category = answer.get("category", "unknown")
            self._finish(RequestFailed(f"{self._route}: {answer['error']}", category, self.request_id))
        else:
            self._finish(self._convert(answer))

    def _wait_for_service(self, error: ServiceError, end: Optional[float]) -> None:
        now = time.monotonic()
        self._unreached_since = self._unreached_since or now
        if now - self._unreached_since > self._client._patience_s:
            raise error
        time.sleep(max(0.0, min(1.0, 1.0 if end is None else end - now)))

    def _finish(self, value: Any) -> None:
        self._value, self._done, self._body = value, True, b""


class Model:
    """A model in training. Its methods may be called from several threads; requests run in the order of the calls."""

    def __init__(self, client: Client, model_id: str):
        self.model_id = model_id
        self._client = client
        self._lock = threading.Lock()
        self._seq_id = 0
        self._lost: Optional[ServiceError] = None

    def forward_backward(self, data: Any, loss: str, **config: float) -> Future:
        """A pass over `data` whose gradients are added to those since the last `optim_step`.

        A sequence of `N` tokens is a dict: `tokens [N]`, and the inputs of the loss by name, each `[N]`.
        `cross_entropy` has `target_tokens` and `weights`; `importance_sampling`, `ppo`, `cispo`, `dro` and `gspo`
        have `target_tokens`, `logprobs` and `advantages`. `config` are settings of the loss, such as
        `clip_low_threshold=0.8`. The future's result is a `PassResult`.
        """
        return self._pass("forward_backward", data, loss, config)

    def forward(self, data: Any, loss: str = "cross_entropy", **config: float) -> Future:
        """As `forward_backward`, without gradients."""
        return self._pass("forward", data, loss, config)

    def optim_step(
        self, learning_rate: float = 1e-4, *, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-12,
        weight_decay: float = 0.0, grad_clip_norm: float = 0.0,
    ) -> Future:  # fmt: skip
        """One update by AdamW with the gradients since the last one; the future's result is a dict of metrics.

        `grad_clip_norm` is the largest norm of the gradient, 0 for no limit; `weight_decay` is decoupled.
        """
        adam = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps,
                "weight_decay": weight_decay, "grad_clip_norm": grad_clip_norm}  # fmt: skip
        return self._request("optim_step", {"adam_params": adam}, _metrics)

    def sampler(self, *, inflight: bool = False) -> "Sampler":
        """A sampler of the weights after the requests so far.

        With `inflight` all such samplers of the model adopt what is published later, within a completion as well.
        """
        kind = "inflight" if inflight else "snapshot"
        body = {"sampling_session_seq_id": self._client._next_sampler(), "kind": kind}
        saved = self._request("save_weights_for_sampler", body, lambda value: value["sampling_session_id"])
        return Sampler(self._client, saved.result())

    def save_for_sampling(self, name: str, *, ttl_s: Optional[int] = None) -> Future:
        """Saves the weights for `Client.sampler` under `name`, for `ttl_s` seconds. The result is their path."""
        return self._save("save_weights_for_sampler", {"path": name}, ttl_s)

    def save(self, name: str, *, overwrite: bool = False, ttl_s: Optional[int] = None) -> Future:
        """Saves weights and optimizer for `Client.load` under `name`; the future's result is their path."""
        return self._save("save_weights", {"path": name, "overwrite": overwrite}, ttl_s)

    def load(self, path: str, *, optimizer: bool = True) -> Future:
        """Replaces the weights by those saved at `path`, and the optimizer by the saved one, or by a new one."""
        return self._request("load_weights", {"path": path, "optimizer": optimizer}, lambda value: None)

    def info(self) -> dict:
        """`model_data` with name, architecture and tokenizer; `is_lora`, `lora_rank`."""
        return self._client._post("get_info", {"model_id": self.model_id, "type": "get_info"})

    def close(self) -> Future:
        """Unloads the model. What was saved of it stays."""
        body = {"model_id": self.model_id, "type": "unload_model"}
        return self._client._future("unload_model", body, lambda value: None)

    def _save(self, route: str, body: dict, ttl_s: Optional[int]) -> Future:
        if ttl_s is not None:
            body["ttl_seconds"] = ttl_s
        return self._request(route, body, lambda value: value["path"])

    def _request(self, route: str, body: dict, convert: Any) -> Future:
        # The lock also covers the sending, so that the service gets a model's requests in order.
        with self._lock:
            # Numbers that JSON does not have are found here, before the number of the request is used.
            encoded = _encode({**body, "model_id": self.model_id, "seq_id": self._seq_id + 1})
            if self._lost is not None:
                raise ServiceError(f"a request of {self.model_id} was lost: {self._lost}; load what was saved of it")
            self._seq_id += 1
            try:
                return self._client._future(route, encoded, convert)
            except ServiceError as error:
                if 400 <= error.status < 500:
                    self._seq_id -= 1  # It was not accepted: the next request has its number.
                else:
                    self._lost = error  # Whether the service has it is not known, so that no later one can follow.
                raise

    def _pass(self, route: str, data: Any, loss: str, config: dict) -> Future:
        of = "forward_input" if route == "forward" else "forward_backward_input"
        parts = [
            self._request(route, {of: {"data": chunk, "loss_fn": loss, "loss_fn_config": config}}, _pass_result)
            for chunk in _chunks([_datum(number, datum) for number, datum in enumerate(data)])
        ]
        return parts[0] if len(parts) == 1 else _Joined(parts)


class Sampler:
    """What samples completions. Requests run together; each has the weights of its sampler alone."""

    def __init__(self, client: Client, sampler_id: str):
        self.sampler_id = sampler_id
        self._client = client
        self._lock = threading.Lock()
        self._seq_id = -1

    def sample(
        self, prompt: Any, n: int = 1, *, max_tokens: Optional[int] = None, temperature: float = 1.0, top_k: int = -1,
        top_p: float = 1.0, stop: Any = None, seed: Optional[int] = None, prompt_logprobs: bool = False,
    ) -> Future:  # fmt: skip
        """`n` completions of `[P]` prompt tokens; the future's result is a `SampleResult`.

        `stop` is a string, a list of strings or a list of token ids; with an empty list nothing but the length ends a
        completion, without it the model's end tokens do. `temperature` 0 takes the most likely token.
        """
        settings = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
                    "stop": stop, "seed": seed}  # fmt: skip
        with self._lock:
            self._seq_id += 1
            seq_id = self._seq_id
        body = {
            "sampling_session_id": self.sampler_id,
            "seq_id": seq_id,
            "num_samples": n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": _plain(prompt)}]},
            "sampling_params": {name: value for name, value in settings.items() if value is not None},
            "prompt_logprobs": prompt_logprobs,
            "type": "sample",
        }
        return self._client._future("asample", body, _sample_result)

    def logprobs(self, tokens: Any) -> list:
        """`[N]` log-probabilities of `[N]` tokens, each after those before it, nats; None at the first position."""
        return self.sample(tokens, max_tokens=1, prompt_logprobs=True).result().prompt_logprobs


class _Joined:
    """The futures of one pass that was sent in several requests."""

    def __init__(self, parts: list):
        self._parts = parts

    def result(self, timeout: Optional[float] = None) -> PassResult:
        end = None if timeout is None else time.monotonic() + timeout
        results = [part.result(None if end is None else max(0.0, end - time.monotonic())) for part in self._parts]
        counts = [len(result.logprobs) for result in results]
        metrics = {}
        for key in results[0].metrics:
            values = [result.metrics.get(key, 0.0) for result in results]
            reduction = key.rpartition(":")[2]
            mean = sum(value * count for value, count in zip(values, counts)) / sum(counts)
            metrics[key] = {"sum": sum(values), "min": min(values), "max": max(values)}.get(reduction, mean)
        return PassResult([row for result in results for row in result.logprobs], metrics)


def _pass_result(answer: dict) -> PassResult:
    logprobs = [list(map(float, output["logprobs"]["data"])) for output in answer["loss_fn_outputs"]]
    return PassResult(logprobs, _metrics(answer))


def _metrics(answer: dict) -> dict:
    # Numbers that JSON does not have come as strings.
    return {name: float(value) for name, value in (answer.get("metrics") or {}).items()}


def _sample_result(answer: dict) -> SampleResult:
    completions = [
        Completion(sequence["tokens"], sequence["logprobs"], sequence["stop_reason"] == "stop")
        for sequence in answer["sequences"]
    ]
    return SampleResult(completions, answer.get("prompt_logprobs"), answer.get("prompt_cache_hit_tokens", 0))


def _datum(number: int, datum: dict) -> dict:
    if "tokens" not in datum:
        raise ValueError(f"sequence {number} has no `tokens`; it has {sorted(datum)}")
    inputs = {}
    for name, values in datum.items():
        if name != "tokens":
            values = _plain(values)
            dtype = "int64" if name == "target_tokens" else "float32"
            inputs[name] = {"data": values, "dtype": dtype, "shape": [len(values)]}
    chunks = [{"type": "encoded_text", "tokens": _plain(datum["tokens"])}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def _chunks(data: list) -> list:
    """The sequences in their order, in requests of bounded size. Errors: ValueError if there are none."""
    if not data:
        raise ValueError("the pass has no sequences")
    chunks, numbers = [[]], 0
    for datum in data:
        size = sum(len(values["data"]) for values in datum["loss_fn_inputs"].values())
        size += len(datum["model_input"]["chunks"][0]["tokens"])
        if chunks[-1] and (len(chunks[-1]) == CHUNK_DATA or numbers + size > CHUNK_NUMBERS):
            chunks.append([])
            numbers = 0
        chunks[-1].append(datum)
        numbers += size
    return chunks


def _plain(values: Any) -> Any:
    """A list, or a number, of what may be an array."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(values) if isinstance(values, (list, tuple, range)) else values


def _encode(body: Any) -> bytes:
    if isinstance(body, bytes):
        return body
    try:
        return json.dumps(body, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError(f"a request has a number that is not finite: {error}") from None


def _text_of(error: urllib.error.HTTPError) -> str:
    """What the service says about a refusal."""
    text = error.read(1 << 16).decode(errors="replace")
    try:
        answer = json.loads(text)
        return str(answer.get("detail") or answer.get("error") or text)
    except (ValueError, AttributeError):
        return text or error.reason
