"""JSON schemas of Python functions: types from the signature, descriptions from the docstring.

Part of the adapters that call tools (host/src/python/user_code.py says what an adapter is). Standard library only, Python 3.9
or newer.

Invariant: a parameter whose annotation means nothing in JSON has no type, and takes every value.
"""

import collections.abc
import enum
import inspect
import re
import types
import typing

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", set: "array", dict: "object", type(None): "null"}
# A parameter in a docstring: `name: text` or `name (type): text`, indented.
PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?)\s*:?\s*$")


def schema_of(name, function):
    """`function` as OpenAI's `tools` describe it, without `self`."""
    about, parameters = described(inspect.getdoc(function) or "")
    hints = hints_of(function)
    properties, required = {}, []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        found = type_schema(hints.get(key, inspect.Parameter.empty))
        if key in parameters:
            found["description"] = parameters[key]
        properties[key] = found
        if parameter.default is inspect.Parameter.empty:
            required.append(key)
    return {"name": name, "description": about, "parameters": {"type": "object", "properties": properties, "required": required}}


def hints_of(function):
    try:
        return typing.get_type_hints(function)
    except Exception:  # a name that cannot be resolved
        return {}


def type_schema(hint):
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in NAMES:
        return {"type": NAMES[hint]}
    if origin is typing.Union or origin is getattr(types, "UnionType", None):
        parts = [type_schema(part) for part in inner]
        names = [part.get("type") for part in parts]
        if len(parts) == 2 and "null" in names:
            kept = dict(parts[1 - names.index("null")])
            if isinstance(kept.get("type"), str):
                kept["type"] = [kept["type"], "null"]
            return kept
        return {"anyOf": parts}
    if origin is typing.Literal:
        kinds = {NAMES.get(type(value)) for value in inner}
        found = {"enum": list(inner)}
        if len(kinds) == 1 and None not in kinds:
            found["type"] = kinds.pop()
        return found
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if origin in (list, set, tuple, collections.abc.Sequence, collections.abc.Iterable):
        return {"type": "array", "items": type_schema(inner[0])} if inner else {"type": "array"}
    if origin in (dict, collections.abc.Mapping):
        return {"type": "object"}
    return {}


def described(doc):
    """The first paragraphs of a docstring, and the descriptions of its parameters by name."""
    about, parameters, section, last = [], {}, None, None
    for line in doc.splitlines():
        heading = SECTION.match(line)
        if heading:
            section, last = heading.group(1), None
        elif section is None:
            about.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            found = PARAMETER.match(line)
            if found:
                last = found.group(1)
                parameters[last] = found.group(2).strip()
            elif last and line.strip():
                parameters[last] = (parameters[last] + " " + line.strip()).strip()
    return " ".join("\n".join(about).split()), parameters
