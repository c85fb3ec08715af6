"""How an environment of a user is found, recognised and called: TRL, skyrl-gym, Gymnasium, and plain `reset` and `step`.

An adapter of a session (host/src/python/user_code.py says what that is): it runs between user_code.py and worker.py as one
module, after schema.py. A process plays one episode at a time, and keeps its environment for the next one.

Calls: {"op": "reset", "row": {...}, "prompt": [messages]}, {"op": "step", "text"}, {"op": "call", "name", "arguments"},
{"op": "end"}. Results: {"messages", "reward", "done"}; of "call" {"text"} or {"error"}.

Invariant: nothing is guessed. An object whose methods fit no convention is an error that lists the conventions.
"""

import inspect
import json
import math
import numbers
import re

# ruff: noqa: F821 (Unusable, InvalidResult, import_code and others are those of user_code.py and schema.py)

CONVENTIONS = """trl: a class with `reset(**row)`, public methods that are tools, and optionally `get_reward()`
skyrl_gym: a class with `init(prompt)` and `step(text)`
gymnasium: a class with `reset(seed=, options=)` and `step(text)` that returns five values
plain: a class with `reset(row)` and `step(text)` that returns (observation, reward, done); with an attribute `roles`, a list of
  names, `step(text, role)` that returns a dict"""


def load(config):
    target, name = split_target(config["path"])
    module = import_code(target)
    name = config.get("name") or name
    if name is None:
        own = {key: value for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__}
        fit = {key: value for key, value in own.items() if not key.startswith("_") and convention(value)}
        if len(fit) != 1:
            listed = ", ".join(fit or own) or "none"
            raise Unusable(f"name the environment as `path = \"FILE.py:NAME\"`; classes of the file that could be one: {listed}")
        [name] = fit
    factory = vars(module).get(name)
    if not callable(factory):
        raise Unusable(f"there is no class or function `{name}` in {target}")
    return Subject(name, factory, config)


def convention(found):
    """The convention that the methods of a class or an object fit, or None."""
    has = lambda method: callable(getattr(found, method, None))
    if has("init") and has("step"):
        return "skyrl_gym"
    if has("reset") and has("step"):
        parameters = inspect.signature(found.reset).parameters
        return "gymnasium" if "seed" in parameters else "plain"
    return "trl" if has("reset") and tool_names(found) else None


def tool_names(found):
    own = [key for key in dir(found) if not key.startswith("_") and key not in ("reset", "get_reward", "close")]
    return [key for key in own if inspect.isroutine(getattr(found, key))]


class Subject:
    batch = concurrent = False

    def __init__(self, name, factory, config):
        self.name, self.factory, self.parameters = name, factory, config.get("parameters") or {}
        self.seed = config.get("seed", 0)
        subject = factory if inspect.isclass(factory) else self.made()
        self.convention = config.get("dialect") or convention(subject)
        if self.convention is None:
            raise Unusable(f"`{name}` fits no convention; these are known:\n{CONVENTIONS}")
        known = [line.split(":")[0] for line in CONVENTIONS.splitlines() if not line.startswith(" ")]
        if self.convention not in known:
            raise Unusable(f"there is no convention `{self.convention}`; there are {', '.join(known)}")
        self.tools = []
        if self.convention == "trl":
            self.tools = [schema_of(key, bound(subject, key)) for key in tool_names(subject)]
        self.roles = [str(role) for role in getattr(subject, "roles", ())] if self.convention == "plain" else []
        self.environment = None

    def describe(self):
        return {"environment": self.name, "convention": self.convention, "tools": self.tools, "roles": self.roles}

    def made(self, row=None):
        if self.convention_is("skyrl_gym"):
            return self.factory(self.parameters, row or {})
        return self.factory(**self.parameters)

    def convention_is(self, name):
        return getattr(self, "convention", None) == name

    def call_one(self, call, result):
        return getattr(self, "do_" + call["op"])(call, result)

    def do_reset(self, call, result):
        row, prompt = call["row"], call["prompt"]
        if self.environment is None or self.convention == "skyrl_gym":
            self.environment = self.made(row)
        if self.convention == "skyrl_gym":
            opened = result(self.environment.init(prompt))
            opened = opened[0] if isinstance(opened, tuple) else opened
            # It returns the prompt as it is, or with messages behind it.
            added = opened[len(prompt):] if isinstance(opened, list) and opened[: len(prompt)] == prompt else opened
            return {"messages": messages(added)}
        if self.convention == "gymnasium":
            observation = result(self.environment.reset(seed=call["seed"], options=row or None))
            observation = observation[0] if isinstance(observation, tuple) else observation
            return {"messages": messages(observation)}
        takes_row = self.convention == "trl" or any(
            p.kind == p.VAR_KEYWORD for p in inspect.signature(self.environment.reset).parameters.values()
        )
        if takes_row:
            return {"messages": messages(result(self.environment.reset(**row)))}
        wanted = inspect.signature(self.environment.reset).parameters
        return {"messages": messages(result(self.environment.reset(row) if wanted else self.environment.reset()))}

    def do_step(self, call, result):
        roles = [self.roles[call["role"]]] if self.roles else []
        returned = result(self.environment.step(self.action(call["text"]), *roles))
        others = {}
        if isinstance(returned, dict):
            if self.roles:
                others = {"role": returned.get("role"), "rewards": {key: number(r) for key, r in (returned.get("rewards") or {}).items()}}
            observed = next((returned[key] for key in ("observations", "observation", "messages") if key in returned), None)
            reward, done = returned.get("reward"), returned.get("done", False)
        elif isinstance(returned, tuple) and len(returned) == 5:
            observed, reward, terminated, truncated, _ = returned
            done = terminated or truncated
        elif isinstance(returned, tuple) and len(returned) in (3, 4):
            observed, reward, done = returned[:3]
        else:
            raise InvalidResult(f"`step` returned {type(returned).__name__}; it must return (observation, reward, done), five values as Gymnasium, or a dict")
        return {"messages": messages(observed), "reward": number(reward), "done": bool(done), **others}

    def action(self, text):
        """The text; a number where the action space of Gymnasium counts."""
        space = type(getattr(self.environment, "action_space", None)).__name__
        if self.convention == "gymnasium" and space == "Discrete":
            found = re.findall(r"-?\d+", text)
            start, count = int(getattr(self.environment.action_space, "start", 0)), int(self.environment.action_space.n)
            last = int(found[-1]) if found else start
            return last if start <= last < start + count else start
        return text

    def do_call(self, call, result):
        try:
            returned = result(getattr(self.environment, call["name"])(**call["arguments"]))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"text": clean(returned if isinstance(returned, str) else json.dumps(returned, default=str))}

    def do_end(self, call, result):
        if hasattr(self.environment, "get_reward"):
            return {"reward": number(result(self.environment.get_reward()))}
        return {"reward": None}


def bound(subject, key):
    """A method without its `self`."""
    method = getattr(subject, key)
    if not inspect.isclass(subject) or isinstance(inspect.getattr_static(subject, key), (staticmethod, classmethod)):
        return method
    signature = inspect.signature(method)

    def call(*_, **__):
        raise NotImplementedError

    call.__doc__, call.__annotations__ = method.__doc__, getattr(method, "__annotations__", {})
    call.__module__ = method.__module__
    call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return call


def messages(observed):
    """Messages of an observation: a text is one of the user."""
    if observed is None or observed == "" or observed == []:
        return []
    if isinstance(observed, str):
        return [{"role": "user", "content": clean(observed)}]
    if isinstance(observed, dict) and "content" in observed:
        observed = [observed]
    if isinstance(observed, (list, tuple)) and all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in observed):
        return [{"role": str(message.get("role", "user")), "content": clean(message["content"])} for message in observed]
    return [{"role": "user", "content": clean(str(observed))}]


def number(reward):
    if reward is None:
        return None
    if hasattr(reward, "item"):
        reward = reward.item()
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        if isinstance(reward, bool):
            return float(reward)
        raise InvalidResult(f"the reward is {reward!r}, which is not a finite number")
    return float(reward)
