"""How an agent of a user is found and called: a function whose loop is its own, and which calls the policy at `base_url`.

An adapter of a session (host/src/python/user_code.py says what that is). A call has what the agent may take by the names of its
parameters: base_url, api_key, model, row (or task), messages (or prompt), seed, index. Parameters of the recipe are keyword
arguments. OPENAI_BASE_URL and OPENAI_API_KEY are set as well, for agents that take neither.

Invariant: an agent is given what it names and nothing else; a required parameter that nothing gives is an error before the first
episode.
"""

import inspect
import math
import numbers
import os

# ruff: noqa: F821 (Unusable, InvalidResult, import_code and others are those of user_code.py)

# What an agent may take. A function that takes what TRL or slime give is called as they call it: generators.py.
GIVEN = ("base_url", "api_key", "model", "row", "task", "messages", "prompt", "seed", "index")


def load(config):
    target, name = split_target(config["path"])
    module = import_code(target, prepare=offer_slime)
    functions = own_functions(module)
    if name is None:
        public = [key for key in functions if not key.startswith("_")]
        if len(public) != 1:
            raise Unusable(f"name the agent as `path = \"FILE.py:NAME\"`; functions of the file: {', '.join(sorted(public)) or 'none'}")
        [name] = public
    agent = vars(module).get(name)
    if not callable(agent):
        raise Unusable(f"there is no function `{name}`; the functions of the file are: {', '.join(sorted(functions)) or 'none'}")
    parameters = config.get("parameters") or {}
    for kind in (RolloutFunction, GenerateFunction):  # of generators.py
        if kind.takes(agent):
            return kind(name, agent, parameters)
    return Agent(name, agent, parameters)


class Agent:
    batch = concurrent = False

    def __init__(self, name, agent, parameters):
        self.name, self.agent, self.parameters = name, agent, parameters
        kinds = inspect.Parameter
        found = inspect.signature(agent).parameters
        self.everything = any(parameter.kind == kinds.VAR_KEYWORD for parameter in found.values())
        named = [key for key, parameter in found.items() if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        missing = [key for key in named if found[key].default is kinds.empty and key not in GIVEN and key not in parameters]
        if missing:
            raise Unusable(f"`{name}` needs {', '.join(missing)}; an agent is given {', '.join(GIVEN)}, and what `environment.parameters` has")
        unknown = [key for key in parameters if key not in named and not self.everything]
        if unknown:
            raise Unusable(f"`{name}` does not take {', '.join(unknown)} of `environment.parameters`")
        self.arguments = [key for key in GIVEN if key in named or self.everything]

    def describe(self):
        return {"agent": self.name, "arguments": self.arguments + sorted(self.parameters)}

    def call_one(self, call, result):
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = call["base_url"], call["api_key"]
        given = dict(call, task=call["row"], prompt=call["messages"])
        arguments = {key: given[key] for key in self.arguments}
        returned = result(self.agent(**arguments, **self.parameters))
        if isinstance(returned, dict):
            returned = returned.get("reward")
        return {"reward": number(returned)}


def number(reward):
    if reward is None:
        return None
    if hasattr(reward, "item"):
        reward = reward.item()
    if not isinstance(reward, (bool, numbers.Real)) or not math.isfinite(reward):
        raise InvalidResult(f"the agent returned {reward!r}; it must return a finite number, a dict with `reward`, or None")
    return float(reward)
