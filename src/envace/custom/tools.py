"""Tools of a custom environment: schemas to show, and sessions that execute calls. Here from Python functions.

A function's docstring (Google style) and type hints are its JSON schema, by transformers' get_json_schema. Whatever a
session is asked, the answer is a JSON object or array, as REHEARSE has to write one in its place.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from envace.types import Executable, ServiceFault, ToolCall, UserError, first_line

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # what MCP allows; a tool's name stands in prompts and in calls
READ_ONLY = {"readOnlyHint": True}
DESTRUCTIVE = {"destructiveHint": True}


class Session(Executable, Protocol):
    """One episode's world. `execute` is called only with calls that fit their tool's schema."""

    def state(self) -> Any:
        """The state as something that can be compared; None if the world cannot tell."""


class Tools(Protocol):
    """schemas: what the agent is told, with MCP annotations beside "function". read_only: names that change nothing."""

    @property
    def schemas(self) -> list[dict[str, Any]]: ...

    @property
    def read_only(self) -> frozenset[str]: ...

    def open(self, world: Any) -> Session:
        """A fresh world for one episode; `world` is that of its task and stays as it is."""


class ToolError(Exception):
    """What a tool raises to refuse a call: the agent is told the message."""


class PythonTools:
    """Functions as tools.

    begin: the world of a task -> the state of an episode, any object. A function whose first parameter is `self` is
    called with it, so the methods of the state's class can be given as they are.
    reads: functions that change nothing. writes, destructive: others; destructive ones are of high risk to the gate.
    Raises UserError for a function that makes no tool.
    """

    def __init__(
        self,
        begin: Callable[[Any], Any],
        *,
        reads: Iterable[Callable[..., Any]] = (),
        writes: Iterable[Callable[..., Any]] = (),
        destructive: Iterable[Callable[..., Any]] = (),
    ):
        self.begin = begin
        kinds: list[tuple[Iterable[Callable[..., Any]], dict[str, bool]]] = [
            (reads, READ_ONLY),
            (writes, {"readOnlyHint": False, "destructiveHint": False}),
            (destructive, DESTRUCTIVE),
        ]
        annotated = [(function, hints) for functions, hints in kinds for function in functions]
        self.schemas = checked([schema_of(function) | {"annotations": hints} for function, hints in annotated])
        self.functions = {function.__name__: function for function, _ in annotated}
        self.read_only = read_only_names(self.schemas)

    def open(self, world: Any) -> PythonSession:
        return PythonSession(self.functions, self.begin(copy.deepcopy(world)))


class PythonSession:
    def __init__(self, functions: dict[str, Callable[..., Any]], state: Any):
        self.functions = functions
        self._state = state

    def execute(self, call: ToolCall) -> Any:
        """Raises ServiceFault if the function raises anything but ToolError, or returns what is no JSON."""
        function = self.functions[call.name]
        receiver = (self._state,) if next(iter(inspect.signature(function).parameters), "") == "self" else ()
        try:
            value = function(*receiver, **copy.deepcopy(call.arguments))
        except ToolError as error:
            return {"error": str(error)}
        except (Exception, SystemExit) as error:  # of any kind: the function is not ours
            raise ServiceFault(f"tool {call.name} raised {type(error).__name__}: {first_line(error)}") from error
        return as_response(_as_json(value, f"tool {call.name} returned what"))

    def state(self) -> Any:
        """The attributes of the state; a state without any, such as a dict, itself. Raises ServiceFault if no JSON."""
        state = vars(self._state) if hasattr(self._state, "__dict__") else self._state
        return _as_json(state, "the state of the environment")


def _as_json(value: Any, what: str) -> Any:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()  # a lone surrogate is no text that a tokenizer takes
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ServiceFault(f"{what} is no JSON: {first_line(error)}") from error


def as_response(value: Any) -> Any:
    """A JSON value as an object or array."""
    return value if isinstance(value, dict | list) else {"result": value}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A tool as chat templates take it. Raises UserError if its name, docstring or type hints do not make one."""
    where = f"tool {function.__name__}"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where}: the agent names its arguments, so write {parameter} as an ordinary parameter")
    try:
        tool = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise UserError(f"{where}: {first_line(error)}") from None
    tool["function"].pop("return", None)
    tool["function"]["parameters"]["additionalProperties"] = False
    return tool


def checked(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tools. Raises UserError if a name cannot be used or is there twice, or if a schema is none."""
    if not tools:
        raise UserError("the environment has no tools: name at least one")
    names: set[str] = set()
    for function in (tool["function"] for tool in tools):
        name = function["name"]
        if not NAME.fullmatch(name):
            raise UserError(f"tool {name!r}: a name has letters, digits, _, - and . only, at most 128")
        if name in names:
            raise UserError(f"tool {name}: there are two of that name; rename one")
        names.add(name)
        try:
            Draft202012Validator.check_schema(function["parameters"])
        except SchemaError as error:
            raise UserError(f"tool {name}: its parameters are no JSON schema: {first_line(error)}") from None
        if function["parameters"].get("type") != "object":
            raise UserError(f"tool {name}: its parameters must be a JSON schema with type object")
    return tools


def read_only_names(tools: list[dict[str, Any]]) -> frozenset[str]:
    return frozenset(t["function"]["name"] for t in tools if t["annotations"].get("readOnlyHint") is True)
