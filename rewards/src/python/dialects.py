"""How a reward function is found, recognised and called: the conventions of TRL, verl, OpenRLHF, AReaL, slime, verifiers.

An adapter of the process pool (host/src/python/user_code.py says what that is): it runs between user_code.py and worker.py as
one module, and knows nothing of processes. A dialect is a pair of pure functions: from items (JSON as item.rs writes it) to
the arguments of a call, and from what it returned to (value, details) of each item.

Invariant: nothing is guessed. A file with several candidates, or a function whose parameters fit two dialects, is an
error that lists the choices; so is a result of another length or type than the dialect's.
"""

import enum
import importlib.util
import inspect
import math
import numbers
import sys
import types

# ruff: noqa: F821 (Unusable, InvalidResult, import_code and others are those of user_code.py)

# Longest text among the details of a sample, in characters, and deepest nesting.
DETAIL_CHARS, DETAIL_DEPTH = 20_000, 6


# Finding the function


def load(config):
    """Imports what `path` names and wraps its reward function."""
    name = config.get("function")
    if config.get("source") is not None:
        return choose(import_source(config["source"]), name, config)
    target, after = split_target(config["path"])
    if after is not None:
        if name not in (None, after):
            raise Unusable(f"`path` names the function `{after}`, `function` names `{name}`; leave one of them out")
        name = after
    return choose(import_code(target, stand_in), name, config)


def stand_in():
    """A stand-in for slime where it is not installed, so that files can import its Sample for their annotations."""
    if importlib.util.find_spec("slime") is None:
        for name in ("slime", "slime.utils", "slime.utils.types"):
            module = sys.modules[name] = types.ModuleType(name)
            module.__path__ = []  # importing another name from it fails as without the stand-in
        module.Sample = Sample


def choose(module, name, config):
    wanted = config["dialect"]
    if name is not None:
        found = vars(module).get(name)
        if found is None:
            own = ", ".join(sorted(own_functions(module))) or "none"
            raise Unusable(f"there is no `{name}`; the functions of the file are: {own}")
        candidates = {name: found}
    else:
        candidates = {key: value for key, value in vars(module).items() if weighted(value)} or own_functions(module)
        fit = {key: value for key, value in candidates.items() if fitting(value) and wanted in ("auto", *fitting(value))}
        candidates = fit or candidates
    if len(candidates) != 1:
        listed = "".join(f"\n  {key}{signature_text(value)}: {' or '.join(fitting(value)) or 'no dialect'}" for key, value in candidates.items())
        if not candidates:
            raise Unusable("it defines no function; define one in the file itself, or name an imported one in `function`")
        raise Unusable("several functions could be the reward; name one in `function`:" + listed)
    [(name, found)] = candidates.items()
    if not weighted(found) and not callable(found):
        raise Unusable(f"`{name}` is {describe(found)}, which is not a function")
    dialects = [wanted] if wanted != "auto" else fitting(found)
    if len(dialects) != 1:
        fits = "fits no dialect by its parameter names" if not dialects else "fits several dialects: " + ", ".join(dialects)
        every = ", ".join([*ONE, *MANY])
        raise Unusable(f"`{name}{signature_text(found)}` {fits}; say which in `dialect` (one of {every})")
    return Subject(name, found, dialects[0], config.get("parameters") or {}, module)


def weighted(found):
    """(functions, weights) of an object like verifiers' Rubric, else None."""
    if inspect.isclass(found) or inspect.isfunction(found) or inspect.ismodule(found):
        return None
    for functions_of, weights_of in (("funcs", "weights"), ("reward_funcs", "reward_weights")):
        parts, weights = getattr(found, functions_of, None), getattr(found, weights_of, None)
        if isinstance(parts, list) and parts and all(map(callable, parts)):
            return parts, (weights if isinstance(weights, list) and len(weights) == len(parts) else [1.0] * len(parts))
    return None


def signature(function):
    """Names of the parameters in order, and whether any keyword is taken."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], True
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return names, any(p.kind == p.VAR_KEYWORD for p in parameters)


def signature_text(function):
    try:
        return "(" + ", ".join(inspect.signature(function).parameters) + ")"
    except (TypeError, ValueError):
        return "(...)"


SINGULAR = {"prompt", "completion", "answer", "state", "info", "task", "parser"}
PLURAL = {"prompts", "completions", "answers", "states", "infos", "tasks"}


def fitting(function):
    """The dialects that the parameter names fit."""
    if weighted(function):
        parts = weighted(function)[0]
        return ["verifiers_group" if any(is_group_function(part) for part in parts) else "verifiers"]
    if not callable(function):
        return []
    names, keywords = signature(function)
    has, found = set(names), []
    if "solution_str" in has:
        found.append("verl")
    if "solution_strs" in has:
        found.append("verl_batch")
    if "queries" in has:
        found.append("openrlhf")
    if names[:2] == ["args", "samples"] or names[:2] == ["args", "sample"] and annotated_list(function, "sample"):
        found.append("slime_group")
    elif names[:2] == ["args", "sample"]:
        found.append("slime")
    if {"prompt_ids", "completions"} <= has and "prompts" not in has:
        found.append("areal")
        if "prompt" in has:
            return found
    # TRL always passes names that no function lists, so its functions take any keyword.
    if has & {"prompts", "completions", "completion_ids"} and "queries" not in has and keywords and "prompt" not in has:
        found.append("trl")
    if is_group_function(function) and (not keywords or has & (PLURAL - {"prompts", "completions"})):
        found.append("verifiers_group")
    if has & {"completion", "state"} and not has & PLURAL:
        found.append("verifiers")
    return found


def is_group_function(function):
    """verifiers' rule: plural names."""
    names = set(signature(function)[0])
    return bool(names & PLURAL) and not names & {"queries", "prompt_ids", "args"}


def annotated_list(function, parameter):
    annotation = str(inspect.signature(function).parameters[parameter].annotation)
    return "list" in annotation.lower()


# Calling it


class Subject:
    """A reward function with its dialect: what a worker calls."""

    def __init__(self, name, found, dialect, parameters, module):
        self.name, self.dialect, self.parameters = name, dialect, parameters
        self.parser = getattr(module, "parser", None)
        parts = self.parts = weighted(found)
        if parts:
            self.parser = getattr(found, "parser", self.parser)
            if dialect not in ("verifiers", "verifiers_group"):
                raise Unusable(f"`{name}` is a rubric; its dialect is verifiers or verifiers_group, not {dialect}")
            found = rubric(*parts, group=dialect == "verifiers_group")
        self.function = found
        self.names, self.keywords = signature(found)
        self.batch = dialect in MANY
        self.group = dialect in ("slime_group", "verifiers_group")
        self.arguments, self.read = (MANY if self.batch else ONE)[dialect]
        call = found if inspect.isroutine(found) else getattr(found, "__call__", found)
        self.concurrent = not self.batch and (inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(call))
        unknown = [key for key in parameters if not self.keywords and key not in self.names]
        if unknown and dialect not in ("slime", "slime_group"):
            raise Unusable(f"`{name}` takes no `{unknown[0]}`; its parameters are {signature_text(found)}")

    def describe(self):
        needs = {"trl": ["completion_ids"], "openrlhf": ["query"], "areal": ["prompt_ids", "completion_ids", "query"]}
        needs["slime"] = needs["slime_group"] = ["prompt_ids", "completion_ids"]
        needs = needs.get(self.dialect, [])
        return {"dialect": self.dialect, "function": self.name, "needs": needs, "group": self.group}

    def call_one(self, item, result):
        return outcome(*self.read(result(self.invoke(item, {})), self))

    async def call_async(self, item):
        return outcome(*self.read(await self.invoke(item, {}), self))

    def call_all(self, items, result):
        extras = {}
        returned = result(self.invoke(items, extras))
        outcomes = [self.read(value, self) for value in listing(returned, len(items), f"the result of `{self.name}`")]
        for key, values in extras.items():
            for (_, details), value in zip(outcomes, values):
                details[key] = detail(value)
        return [outcome(*found) for found in outcomes]

    def invoke(self, items, extras):
        positional, keywords = self.arguments(items, self, extras)
        keywords = {**keywords, **({} if self.dialect.startswith("slime") else self.parameters)}
        if not self.keywords:
            keywords = {key: value for key, value in keywords.items() if key in self.names[len(positional):]}
        return self.function(*positional, **keywords)


def rubric(parts, weights, group):
    """One function that returns the weighted sum of several, and each by name."""
    kept = [(part, float(weight), *signature(part)) for part, weight in zip(parts, weights)]
    names = [getattr(part, "__name__", type(part).__name__) for part in parts]

    def chosen(fields, names, keywords):
        return fields if keywords else {key: value for key, value in fields.items() if key in names}

    def calls(fields):
        return [part(**chosen(fields, accepted, keywords)) for part, _, accepted, keywords in kept]

    async def gathered(returned):
        return [await value if inspect.isawaitable(value) else value for value in returned]

    def summed(values):
        values = [number(value) for value in values]
        total = sum(weight * value for (_, weight, _, _), value in zip(kept, values))
        return {"score": total, **dict(zip(names, values))}

    if not group:
        if not any(inspect.iscoroutinefunction(part) for part in parts):
            return lambda **fields: summed(calls(fields))

        async def one(**fields):
            return summed(await gathered(calls(fields)))

        return one

    async def many(**fields):
        singles, columns = fields.pop("singles"), []
        for part, _, accepted, keywords in kept:
            if is_group_function(part):
                [values] = await gathered([part(**chosen(fields, accepted, keywords))])
                columns.append(listing(values, len(singles), f"the result of `{part.__name__}`"))
            else:
                columns.append(await gathered([part(**chosen(single, accepted, keywords)) for single in singles]))
        return [summed(values) for values in zip(*columns)]

    return many


def columns(item):
    """The columns of the row; the answer too, where it is no column."""
    found = dict(item["columns"])
    if item["answer"] is not None:
        found.setdefault("answer", item["answer"])
    return found


def chat(item):
    return isinstance(item["prompt"], list)


def completion(item):
    return [{"role": "assistant", "content": item["completion"]}] if chat(item) else item["completion"]


def prompt_text(item):
    """The prompt as text with special tokens, or, where nothing decodes, its messages one below the other."""
    if "prompt_text" in item or not chat(item):
        return item.get("prompt_text", item["prompt"])
    return "".join(f"{message['role']}: {message['content']}\n" for message in item["prompt"])


def trl_arguments(items, _, extras):
    rows = [columns(item) for item in items]
    reserved = ("prompt", "completion", "completion_ids")
    fields = {key: [row.get(key) for row in rows] for row in rows for key in row if key not in reserved}

    def log_extra(column, values):
        extras[column] = listing(values, len(items), f"the values of log_extra({column!r})")

    def log_metric(name, value):
        extras[name] = [number(value)] * len(items)

    fields["prompts"] = [item["prompt"] for item in items]
    fields["completions"] = [completion(item) for item in items]
    fields["completion_ids"] = [item["completion_ids"] for item in items]
    step, last = max(item["step"] for item in items), items[0]["max_steps"]
    epoch = step / last if last else 0.0  # share of the run: rows are drawn from a stream
    fields["trainer_state"] = types.SimpleNamespace(global_step=step, max_steps=last, epoch=epoch)
    fields["log_extra"], fields["log_metric"] = log_extra, log_metric
    return (), fields


def trl_read(value, _):
    return (None if value is None else number(value)), {}


def verl_fields(item):
    found = item["columns"]
    model = found.get("reward_model")
    truth = model["ground_truth"] if isinstance(model, dict) and "ground_truth" in model else item["answer"]
    own = found.get("extra_info")
    # verl counts the messages of both sides: a turn of the policy and what precedes it.
    turns = 2 * len(item.get("turns") or [None])
    given = {**(own if isinstance(own, dict) else {}), "num_turns": turns, "rollout_reward_scores": {}}
    return found.get("data_source"), item["completion"], truth, given


def verl_arguments(item, *_):
    return (), dict(zip(("data_source", "solution_str", "ground_truth", "extra_info"), verl_fields(item)))


def verl_batch_arguments(items, *_):
    names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    return (), {key: list(values) for key, values in zip(names, zip(*map(verl_fields, items)))}


def verl_read(value, _):
    return scored(value, "score")


def openrlhf_arguments(item, *_):
    prompt = prompt_text(item)
    query = item.get("query", prompt + item["completion"])
    return ([query], [prompt], [item["answer"]]), {}


def openrlhf_read(value, _):
    if not isinstance(value, dict):
        return number(first(value)), {}
    if "rewards" not in value:
        raise InvalidResult(f"a dict with the key `rewards` was expected, but one with {sorted(map(str, value))} came")
    details = {str(key): detail(first(part)) for key, part in (value.get("extra_logs") or {}).items()}
    if value.get("scores") is not None:
        details["scores"] = detail(first(value["scores"]))
    return number(first(value["rewards"])), details


def areal_arguments(item, *_):
    four = ("prompt", "completions", "prompt_ids", "completion_ids")
    fields = {key: value for key, value in columns(item).items() if key not in four}
    return (prompt_text(item), item["completion"], item["prompt_ids"], item["completion_ids"]), fields


def areal_read(value, _):
    return number(value), {}


class Status(enum.Enum):
    """slime's Sample.Status."""

    PENDING, COMPLETED, TRUNCATED, ABORTED, FAILED = "pending", "completed", "truncated", "aborted", "failed"


class Sample:
    """slime's Sample: one response with its prompt, label and metadata."""

    Status = Status

    def __init__(self, item):
        found = item["columns"].get("metadata")
        self.group_index, self.index = item["task"], item["index"]
        self.prompt, self.response, self.label = item["prompt"], item["completion"], item["answer"]
        self.tokens = item["prompt_ids"] + item["completion_ids"]
        self.response_length = len(item["completion_ids"])
        self.loss_mask = [1] * self.response_length
        self.metadata = dict(found) if isinstance(found, dict) else dict(item["columns"])
        self.status = Status.TRUNCATED if item["truncated"] else Status.COMPLETED
        self.reward = self.rollout_log_probs = self.multimodal_inputs = self.multimodal_train_inputs = None
        self.train_metadata = self.session_id = None
        self.weight_versions = [str(item["step"])]
        self.remove_sample = False

    @property
    def effective_response_length(self):
        return sum(self.loss_mask)

    def get_reward_value(self, args):
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward


def slime_arguments(item, subject, _):
    return (types.SimpleNamespace(**subject.parameters), Sample(item)), {}


def slime_group_arguments(items, subject, _):
    return (types.SimpleNamespace(**subject.parameters), [Sample(item) for item in items]), {}


def slime_read(value, subject):
    return scored(value, subject.parameters.get("reward_key", "score"))


def verifiers_fields(item, subject):
    found = item["columns"]
    own = found.get("info")
    fields = {**found, "prompt": item["prompt"], "completion": completion(item), "answer": item["answer"] or ""}
    fields.update(info=own if isinstance(own, dict) else {}, task=found.get("task", "default"))
    state = {key: fields[key] for key in ("prompt", "completion", "answer", "info", "task")}
    fields["state"] = {**state, "is_truncated": item["truncated"], "turn": len(item.get("turns") or [None]), "example_id": item["task"]}
    fields["parser"] = subject.parser
    return fields


def verifiers_arguments(item, subject, _):
    return (), verifiers_fields(item, subject)


def verifiers_group_arguments(items, subject, _):
    singles = [verifiers_fields(item, subject) for item in items]
    names = {"prompts": "prompt", "completions": "completion", "answers": "answer"}
    names.update(states="state", tasks="task", infos="info")
    rest = {key: [single.get(key) for single in singles] for key in singles[0] if key not in SINGULAR}
    fields = {many: [single[one] for single in singles] for many, one in names.items()}
    fields.update({"parser": subject.parser}, **({"singles": singles} if subject.parts else {}))
    return (), {**rest, **fields}


def verifiers_read(value, _):
    return scored(value, "score")


ONE = {
    "verl": (verl_arguments, verl_read),
    "openrlhf": (openrlhf_arguments, openrlhf_read),
    "areal": (areal_arguments, areal_read),
    "slime": (slime_arguments, slime_read),
    "verifiers": (verifiers_arguments, verifiers_read),
}
MANY = {
    "trl": (trl_arguments, trl_read),
    "verl_batch": (verl_batch_arguments, verl_read),
    "slime_group": (slime_group_arguments, slime_read),
    "verifiers_group": (verifiers_group_arguments, verifiers_read),
}


# Results


def outcome(value, details):
    """An outcome as JSON; NaN and infinities are text."""
    if value is not None and value - value != 0.0:
        return {"not_finite": str(value)}
    return {"value": value, "details": details}


def scored(value, key):
    """A number, or a dict with the number under `key` and details beside it."""
    if not isinstance(value, dict):
        return number(value), {}
    if key not in value:
        raise InvalidResult(f"a dict with the key `{key}` was expected, but one with {sorted(map(str, value))} came")
    return number(value[key]), {str(name): detail(part) for name, part in value.items() if name != key}


def number(value):
    """A float out of a number, a bool, or a scalar of numpy or torch."""
    if isinstance(value, (bool, int, float)):
        return as_float(value)
    if not isinstance(value, str) and callable(getattr(value, "item", None)):
        try:
            return as_float(value.item())
        except (ValueError, RuntimeError, TypeError):
            raise InvalidResult(f"a number was expected, but {describe(value)} came") from None
    if isinstance(value, numbers.Number) and not isinstance(value, complex) or type(value).__name__ == "Decimal":
        return as_float(value)
    hint = "; does the function return in every case?" if value is None else ""
    raise InvalidResult(f"a number was expected, but {describe(value)} came{hint}")


def as_float(value):
    try:
        return float(value)
    except OverflowError:
        raise InvalidResult("a number was expected, but an integer too large for a float came") from None


def first(value):
    """The only element of a list or tensor of one."""
    if isinstance(value, dict) or isinstance(value, str) or not hasattr(value, "__len__") and not hasattr(value, "tolist"):
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise InvalidResult(f"one value was expected for one query, but {describe(value)} came")
    return first(value[0])


def listing(value, length, what):
    """A list of one element for each item, out of a list, a tuple, or an array."""
    found = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if not isinstance(found, (list, tuple)):
        raise InvalidResult(f"{what} must be a list of {length}, one for each completion, but {describe(value)} came")
    if len(found) != length:
        raise InvalidResult(f"{what} must have {length} values, one for each completion, but it has {len(found)}")
    return found


def detail(value, depth=0):
    """A value as JSON; text for a value that JSON cannot carry."""
    if isinstance(value, int) and value.bit_length() > 63:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return clean(value[:DETAIL_CHARS])
    if callable(getattr(value, "tolist", None)):
        return detail(value.tolist(), depth + 1)
    if depth < DETAIL_DEPTH and isinstance(value, dict):
        return {clean(str(key)): detail(part, depth + 1) for key, part in value.items()}
    if depth < DETAIL_DEPTH and isinstance(value, (list, tuple)):
        return [detail(part, depth + 1) for part in value]
    return clean(repr(value)[:1000])


def describe(value):
    text = repr(value)
    return f"{type(value).__name__} {clean(text if len(text) <= 200 else text[:200] + '...')}"
