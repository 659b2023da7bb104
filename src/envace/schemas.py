"""Whether a call fits the JSON schema of its tool. The schemas come with the data, and some are none."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from referencing import Registry

from envace.prompts import unusable_call_error
from envace.types import ToolCall, canonical_json

# What can take a time without bound on the right arguments is not checked: a regular expression may backtrack for ever.
UNCHECKED = ("pattern", "uniqueItems")
_InBoundedTime = validators.extend(Draft202012Validator, dict.fromkeys(UNCHECKED, lambda *_: ()))
MESSAGE_CHARS = 300  # of what the library says; it quotes the value


def call_error(tools: list[dict[str, Any]], call: ToolCall) -> dict[str, Any] | None:
    """The response that tells what is wrong with a call; None if nothing is, or if its tool's schema cannot tell."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if call.name not in functions:
        return unusable_call_error("TOOL_NOT_AVAILABLE", f"there is no tool {call.name}")
    try:
        validator = validator_of(functions[call.name].get("parameters", {}))
        error = None if validator is None else best_match(validator.iter_errors(call.arguments))
    except Exception:  # of any kind: a reference may lead to what is no schema, a number be too large to divide
        return None
    if error is None:
        return None
    field = "".join(f"{part}: " for part in error.absolute_path)
    return unusable_call_error("INVALID_PARAMETERS", f"{field}{error.message}"[:MESSAGE_CHARS])


def validator_of(schema: dict[str, Any]) -> Validator | None:
    """None if `schema` is not a JSON schema, such as one with the type "float": its calls cannot be checked."""
    return _validator(canonical_json(schema))


@lru_cache(maxsize=65536)
def _validator(text: str) -> Validator | None:
    schema = json.loads(text)
    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError):
        return None
    # An empty registry: a reference to another place is never fetched.
    return None if '"patternProperties"' in text else _InBoundedTime(schema, registry=Registry())
