

# Rollout functions of TRL, `f(prompts, trainer)`, and generate functions of slime, `f(args, sample, sampling_params)`, called as
# those call them, for one episode at a time. What they ask of their trainer is the policy: the routes of vLLM and SGLang, and a
# tokenizer, under the key of a session, which records tokens, log-probabilities and versions of what it answers.
#
# Invariant: what is trained on is what the session recorded. The tokens that such a function returns are checked for their form and
# not used; its reward is.

import asyncio
import enum
import importlib.abc
import importlib.machinery
import json
import types
import urllib.error
import urllib.parse
import urllib.request

# Longest wait for an answer of the endpoint, seconds. An episode has its own limit.
ANSWER_S = 3600
# Asks no proxy: macOS names one for loopback addresses too.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class SessionRoutes:
    """The routes of the endpoint under the key of a session."""

    def __init__(self, call):
        root = call["base_url"].removesuffix("/v1")
        self.url = f"{root}/sessions/{call['api_key']}"

    def post(self, route, body):
        return post_json(f"{self.url}{route}", body)


def post_json(url, body, headers=None):
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        local = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
        with (DIRECT.open if local else urllib.request.urlopen)(request, timeout=ANSWER_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url.rpartition('/')[2]} answered {error.code}: {error.read().decode('utf-8', 'replace')}") from None


class PolicyTokenizer:
    """The tokenizer and chat template of the policy, by the endpoint: what functions use of a tokenizer of transformers."""

    def __init__(self, routes):
        self.routes = routes

    def __call__(self, text, add_special_tokens=True, **_):
        if not isinstance(text, str):
            return {"input_ids": [self.encode(each, add_special_tokens) for each in text]}
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text, add_special_tokens=True, **_):
        return self.routes.post("/tokenize", {"prompt": text, "add_special_tokens": add_special_tokens})["tokens"]

    def decode(self, token_ids, skip_special_tokens=False, **_):
        token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
        body = {"tokens": token_ids, "skip_special_tokens": skip_special_tokens}
        return self.routes.post("/detokenize", body)["prompt"] if token_ids else ""

    def batch_decode(self, sequences, skip_special_tokens=False, **_):
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def apply_chat_template(self, conversation, tools=None, add_generation_prompt=False, tokenize=True, return_dict=False, **_):
        body = {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        if tools:
            body["tools"] = tools
        token_ids = self.routes.post("/tokenize", body)["tokens"]
        if not tokenize:
            return self.decode(token_ids)
        return {"input_ids": token_ids} if return_dict else token_ids

    def __getattr__(self, name):
        raise AttributeError(
            f"the policy's tokenizer has no `{name}`: it has encode, decode, batch_decode and apply_chat_template; load another with transformers"
        )


class Generator:
    """A function that is given what its trainer gives."""

    batch = concurrent = False
    arguments = ()

    def __init__(self, name, function, parameters):
        self.name, self.function, self.parameters = name, function, parameters

    @classmethod
    def takes(cls, function):
        return tuple(inspect.signature(function).parameters)[: len(cls.arguments)] == cls.arguments

    def describe(self):
        return {"agent": self.name, "arguments": list(self.arguments) + sorted(self.parameters)}


def prompt_of(call):
    """The prompt of a task as its trainer gives it: messages, or the text of a prompt that is a text."""
    messages = call["messages"]
    plain = len(messages) == 1 and set(messages[0]) == {"role", "content"} and isinstance(call["row"].get("prompt"), str)
    return messages[0]["content"] if plain else messages


# TRL


class VllmClient:
    """`trl.generation.vllm_client.VLLMClient` as far as rollout functions call it."""

    def __init__(self, routes, model):
        self.routes, self.model, self.base_url = routes, model, routes.url

    def generate(self, prompts, n=1, max_tokens=16, logprobs=0, generation_kwargs=None, features=None, structured_outputs_regex=None, **sampling):
        if features is not None or structured_outputs_regex is not None:
            raise ValueError("the policy has no images and no structured outputs")
        body = {"model": self.model, "prompt": prompts, "n": n, "max_tokens": max_tokens, "logprobs": logprobs, **sampling}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, **(generation_kwargs or {})}
        choices = self.routes.post("/v1/completions", body)["choices"]
        return {"prompt_ids": [choice["prompt_token_ids"] for choice in choices[::n]], **self.parts(choices, lambda choice: choice["logprobs"]["token_logprobs"])}

    def chat(self, messages, n=1, max_tokens=16, logprobs=0, generation_kwargs=None, tools=None, structured_outputs_regex=None, chat_template=None, chat_template_kwargs=None, max_concurrent_requests=1, **sampling):
        if structured_outputs_regex is not None or chat_template is not None:
            raise ValueError("the policy has its own chat template and no structured outputs")
        body = {"model": self.model, "n": n, "max_tokens": max_tokens, "logprobs": True, "return_token_ids": True, **sampling}
        body |= {"top_logprobs": logprobs or 0, **({"tools": tools} if tools else {}), **(generation_kwargs or {})}
        answers = [self.routes.post("/v1/chat/completions", {**body, "messages": conversation}) for conversation in messages]
        choices = [choice for answer in answers for choice in answer["choices"]]
        prompt_ids = [answer["prompt_token_ids"] for answer in answers]
        return {"prompt_ids": prompt_ids, **self.parts(choices, lambda choice: [entry["logprob"] for entry in choice["logprobs"]["content"]])}

    @staticmethod
    def parts(choices, logprobs):
        completion_ids = [choice["token_ids"] for choice in choices]
        return {
            "completion_ids": completion_ids,
            "logprobs": [[[logprob] for logprob in logprobs(choice)] for choice in choices],
            "logprob_token_ids": [[[token] for token in ids] for ids in completion_ids],
        }


class TrlTrainer:
    """`trl.GRPOTrainer` as far as rollout functions read it, for one prompt and one completion of it."""

    def __init__(self, call, parameters):
        routes = SessionRoutes(call)
        address = urllib.parse.urlparse(routes.url)
        self.processing_class = self.tokenizer = PolicyTokenizer(routes)
        self.vllm_client = VllmClient(routes, call["model"])
        self.vllm_generation = types.SimpleNamespace(vllm_client=self.vllm_client, mode="server")
        self.use_vllm, self.vllm_mode = True, "server"
        self.num_generations = self.num_generations_eval = 1
        self.temperature, self.top_p, self.top_k, self.min_p = call["temperature"], 1.0, 0, 0.0
        self.repetition_penalty = 1.0
        self.max_completion_length = call["max_completion_length"]
        self.accelerator = types.SimpleNamespace(device="cpu", is_main_process=True, process_index=0, num_processes=1)
        self.args = types.SimpleNamespace(
            num_generations=1, temperature=self.temperature, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
            max_completion_length=self.max_completion_length, seed=call["seed"], use_vllm=True, vllm_mode="server",
            vllm_server_base_url=routes.url, vllm_server_host=address.hostname, vllm_server_port=address.port,
            chat_template_kwargs=None, generation_kwargs=None, **parameters,
        )

    def __getattr__(self, name):
        raise AttributeError(f"a rollout function has no `trainer.{name}` here; it has {', '.join(sorted(vars(self)))}")


class RolloutFunction(Generator):
    """`rollout_func` of TRL."""

    arguments = ("prompts", "trainer")
    needed = ("prompt_ids", "completion_ids", "logprobs")
    rewards = ("reward", "rewards", "env_reward", "env_rewards")

    def call_one(self, call, result):
        returned = result(self.function([prompt_of(call)], TrlTrainer(call, self.parameters)))
        missing = [key for key in self.needed if not isinstance(returned, dict) or key not in returned]
        if missing:
            raise InvalidResult(f"`{self.name}` returned no {', '.join(missing)}; a rollout function returns a dict with {', '.join(self.needed)}")
        if len(returned["completion_ids"]) != 1:
            raise InvalidResult(f"`{self.name}` returned {len(returned['completion_ids'])} completions for one prompt of one completion")
        found = [returned[key] for key in self.rewards if key in returned]
        reward = found[0] if found else None
        return {"reward": number(reward[0] if isinstance(reward, (list, tuple)) else reward)}


# slime


class SampleStatus(enum.Enum):
    """How far a sample is."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Sample:
    """`slime.utils.types.Sample` as far as generate functions use it."""

    Status = SampleStatus

    def __init__(self, **fields):
        self.group_index = self.index = self.label = self.reward = self.loss_mask = None
        self.rollout_log_probs = self.train_metadata = self.session_id = self.multimodal_inputs = None
        self.prompt, self.response, self.response_length = "", "", 0
        self.tokens, self.weight_versions, self.metadata = [], [], {}
        self.remove_sample, self.status = False, SampleStatus.PENDING
        vars(self).update(fields)

    def append_response_tokens(self, args, tokens, log_probs=None, trainable=True, meta_info=None, text=""):
        self.tokens = list(self.tokens) + list(tokens)
        self.response += text
        self.response_length += len(tokens)
        self.loss_mask = (self.loss_mask or []) + [int(trainable)] * len(tokens)
        self.rollout_log_probs = (self.rollout_log_probs or []) + list(log_probs or [0.0] * len(tokens))
        if meta_info:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args, meta_info):
        self.weight_versions.append(meta_info.get("weight_version"))
        ends = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
        self.status = ends.get(meta_info["finish_reason"]["type"], self.status)

    def get_reward_value(self, args):
        return self.reward[args.reward_key] if getattr(args, "reward_key", None) else self.reward


class GenerateState:
    """`slime.rollout.sglang_rollout.GenerateState` as far as generate functions use it."""

    def __init__(self, args):
        self.args, self.tokenizer, self.processor, self.aborted = args, args.policy_tokenizer, None, False
        self.sampling_params = dict(args.policy_sampling)


async def post(url, payload, max_retries=1, headers=None, **_):
    """`slime.utils.http_utils.post`."""
    return await asyncio.get_running_loop().run_in_executor(None, post_json, url, payload, headers)


SLIME = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": Sample},
    "slime.utils.http_utils": {"post": post},
    "slime.rollout": {},
    "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
}


class SlimeModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules of slime that generate functions import, where slime is not installed."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in SLIME else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        vars(module).update(SLIME[module.__name__])


def offer_slime():
    # The last finder is asked for what no other has.
    sys.meta_path.append(SlimeModules())


class GenerateFunction(Generator):
    """A custom generate function of slime."""

    arguments = ("args", "sample", "sampling_params")

    def call_one(self, call, result):
        routes = SessionRoutes(call)
        tokenizer = PolicyTokenizer(routes)
        address = urllib.parse.urlparse(routes.url)
        sampling = {
            "temperature": call["temperature"], "top_p": 1.0, "top_k": -1, "max_new_tokens": call["max_completion_length"], "stop": None,
            "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
        }
        # Addresses are made as http://IP:PORT/ROUTE, so the path of the session follows the port.
        args = types.SimpleNamespace(
            sglang_router_ip=address.hostname, sglang_router_port=f"{address.port}{address.path}", partial_rollout=False, group_rm=False,
            ci_test=False, use_rollout_routing_replay=False, sglang_speculative_algorithm=None, reward_key=None, apply_chat_template=False,
            n_samples_per_prompt=1, rollout_seed=call["seed"], rollout_temperature=call["temperature"], rollout_top_p=1.0, rollout_top_k=-1,
            rollout_max_response_len=call["max_completion_length"], rollout_max_context_len=None, policy_tokenizer=tokenizer, policy_sampling=sampling,
        )
        vars(args).update(self.parameters)
        kind = getattr(sys.modules.get("slime.utils.types"), "Sample", Sample)
        row = call["row"]
        sample = kind(prompt=prompt_of(call), label=row.get("answer"), metadata=dict(row), group_index=call["seed"], index=call["index"])
        returned = result(self.function(args, sample, dict(sampling)))
        samples = returned if isinstance(returned, list) else [returned]
        if not samples or not all(hasattr(sample, "status") for sample in samples):
            raise InvalidResult(f"`{self.name}` returned {returned!r}; a generate function returns its sample")
        ended = [sample.status.value for sample in samples if sample.status.value in ("aborted", "failed")]
        if ended:
            raise RuntimeError(f"`{self.name}` returned a sample that is {ended[0]}")
        reward = samples[-1].reward
        if isinstance(reward, dict):
            key = getattr(args, "reward_key", None) or "score"
            if key not in reward:
                raise InvalidResult(f"`{self.name}` returned rewards {', '.join(reward)}; name one of them as the parameter `reward_key`")
            reward = reward[key]
        return {"reward": number(reward)}
