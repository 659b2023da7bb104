"""Whether a call fits the JSON schema of its tool. The schemas come with the data, and some are none."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from envace.prompts import unusable_call_error
from envace.types import ToolCall, canonical_json

MESSAGE_CHARS = 300  # of what the library says; it quotes the value


def call_error(tools: list[dict[str, Any]], call: ToolCall) -> dict[str, Any] | None:
    """The response that tells what is wrong with a call; None if nothing is, or if its tool's schema cannot tell."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if call.name not in functions:
        return unusable_call_error("TOOL_NOT_AVAILABLE", f"there is no tool {call.name}")
    validator = validator_of(functions[call.name].get("parameters", {}))
    if validator is None:
        return None
    try:
        error = best_match(validator.iter_errors(call.arguments))
    except (Unresolvable, RecursionError, re.error):  # only found where the arguments lead there
        return None
    if error is None:
        return None
    field = "".join(f"{part}: " for part in error.absolute_path)
    return unusable_call_error("INVALID_PARAMETERS", f"{field}{error.message}"[:MESSAGE_CHARS])


def validator_of(schema: dict[str, Any]) -> Draft202012Validator | None:
    """None if `schema` is not a JSON schema, such as one with the type "float": its calls cannot be checked."""
    return _validator(canonical_json(schema))


@lru_cache(maxsize=65536)
def _validator(text: str) -> Draft202012Validator | None:
    schema = json.loads(text)
    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError):
        return None
    # An empty registry: a reference to another place is never fetched.
    return Draft202012Validator(schema, registry=Registry())
