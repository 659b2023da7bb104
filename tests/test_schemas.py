"""Calls against the JSON schema of their tool: what is an error, what it says, and schemas that cannot tell."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envace.chat import MAX_JSON_DEPTH, parse_action
from envace.checklist import has_tool_error
from envace.demo.desk import TOOLS
from envace.prompts import to_json, tool_call_block
from envace.schemas import MESSAGE_CHARS, call_error, validator_of
from envace.types import ToolCall

BOOKING = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "nights": {"type": "integer", "minimum": 1},
        "board": {"enum": ["none", "half", "full"]},
        "guests": {"type": "array", "items": {"type": "object", "properties": {"age": {"type": "integer"}}}},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(parameters, name="book"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def said(parameters, **arguments):
    """The error's code and message, None if there is none."""
    error = call_error([tool(parameters)], ToolCall("book", arguments))
    if error is None:
        return None
    assert list(error) == ["error_tool_call"] and list(error["error_tool_call"]) == ["code", "message"]
    return error["error_tool_call"]["code"], error["error_tool_call"]["message"]


def of_x(schema, **beside):
    """A schema in which only the argument x is described."""
    return {"type": "object", "properties": {"x": schema}, **beside}


# What fits and what does not


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Lima"},
        {"city": "", "nights": 1, "board": "half", "guests": [{"age": 3}, {"name": "Ines"}]},
        {"city": "Lima", "nights": 2.0, "guests": []},
    ],
)
def test_a_call_that_fits_has_no_error(arguments):
    assert said(BOOKING, **arguments) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"city": 3}, "city: 3 is not of type 'string'"),
        ({"city": None}, "city: None is not of type 'string'"),
        ({"city": "Lima", "nights": "2"}, "nights: '2' is not of type 'integer'"),
        ({"city": "Lima", "nights": True}, "nights: True is not of type 'integer'"),
        ({"city": "Lima", "nights": 2.5}, "nights: 2.5 is not of type 'integer'"),
        ({"city": "Lima", "nights": 0}, "nights: 0 is less than the minimum of 1"),
        ({}, "'city' is a required property"),
        ({"nights": "2"}, "'city' is a required property"),
        ({"city": "Lima", "stars": 5}, "Additional properties are not allowed ('stars' was unexpected)"),
        ({"city": "Lima", "board": "all"}, "board: 'all' is not one of ['none', 'half', 'full']"),
        ({"city": "Lima", "guests": [{"age": 3}, {"age": "4"}]}, "guests: 1: age: '4' is not of type 'integer'"),
        ({"city": "Lima", "guests": {"age": 3}}, "guests: {'age': 3} is not of type 'array'"),
    ],
)
def test_an_error_names_the_field_and_what_is_wrong_with_it(arguments, message):
    assert said(BOOKING, **arguments) == ("INVALID_PARAMETERS", message)


def test_a_tool_that_is_not_offered_is_no_tool():
    for tools in ([], [tool(BOOKING, "other")], TOOLS):
        error = call_error(tools, ToolCall("book", {"city": "Lima"}))
        assert error == {"error_tool_call": {"code": "TOOL_NOT_AVAILABLE", "message": "there is no tool book"}}


def test_of_several_tools_the_one_that_is_called_is_meant():
    tools = [tool(of_x({"type": "integer"}), "count"), tool(of_x({"type": "string"}), "spell")]
    assert call_error(tools, ToolCall("spell", {"x": "1"})) is None
    assert call_error(tools, ToolCall("count", {"x": 1})) is None
    assert call_error(tools, ToolCall("count", {"x": "1"})) is not None


def test_checklists_take_the_error_for_a_failed_call():
    error = call_error([tool(BOOKING)], ToolCall("book", {}))
    assert has_tool_error([to_json(error)])


def test_the_same_call_always_gets_the_same_error():
    wrong = {"stars": 5, "nights": "2", "board": "all"}
    first = said(BOOKING, **wrong)
    assert all(said(dict(reversed(BOOKING.items())), **wrong) == first for _ in range(3))


# Schemas that cannot tell


@pytest.mark.parametrize(
    "function", [{"name": "book"}, {"name": "book", "parameters": {}}, {"name": "book", "description": "Book."}]
)
def test_a_tool_without_parameters_takes_anything(function):
    tools = [{"type": "function", "function": function}]
    assert call_error(tools, ToolCall("book", {"anything": [1, None]})) is None
    assert call_error(tools, ToolCall("book", {})) is None


@pytest.mark.parametrize(
    "schema",
    [
        of_x({"type": "float"}),
        of_x({"type": "dict"}),
        of_x({"type": None}),
        of_x({"type": "string", "required": True}),
        of_x({"type": "array", "items": [{"type": "string"}]}),
        of_x({"type": "integer", "minimum": "1"}),
        of_x({"enum": "a, b"}),
        {"type": "object", "properties": ["x"]},
        {"type": "object", "required": "x"},
    ],
    ids=to_json,
)
def test_what_is_no_schema_lets_everything_pass(schema):
    assert validator_of(schema) is None
    assert said(schema, x="a word") is None and said(schema, x=-1, y=2) is None


def test_a_keyword_that_is_not_known_is_not_checked():
    schema = of_x({"type": "integer", "format": "int32", "example": 3, "nullable": True})
    assert said(schema, x=3) is None
    assert said(schema, x="3") == ("INVALID_PARAMETERS", "x: '3' is not of type 'integer'")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (of_x({"pattern": "^b*$"}), "a"),
        (of_x({"pattern": "^(a+)+$"}), "a" * 22 + "!"),
        (of_x({"pattern": "("}), "a"),
        (of_x({"uniqueItems": True}), [1, 1]),
        ({"patternProperties": {"^x$": {"type": "integer"}}, "required": ["y"]}, "a"),
        ({"patternProperties": {"(": {"type": "integer"}}}, "a"),
    ],
    ids=["pattern", "slow pattern", "no pattern", "uniqueItems", "patternProperties", "no pattern for names"],
)
def test_what_can_take_for_ever_is_not_checked(schema, value):
    assert said(schema, x=value) is None


def test_beside_a_pattern_everything_else_is_checked():
    schema = of_x({"type": "string", "pattern": "^b*$", "maxLength": 2}, required=["x"])
    assert said(schema, x="aaa") == ("INVALID_PARAMETERS", "x: 'aaa' is too long")
    assert said(schema)[1] == "'x' is a required property"
    # An argument may have such a name.
    assert said({"properties": {"pattern": {"type": "integer"}}}, pattern="^b*$")[1].startswith("pattern: ")


# References


def test_references_into_the_schema_itself_are_followed():
    schema = {**of_x({"$ref": "#/$defs/count"}), "$defs": {"count": {"type": "integer"}}}
    assert said(schema, x=3) is None
    assert said(schema, x="3") == ("INVALID_PARAMETERS", "x: '3' is not of type 'integer'")


@pytest.mark.parametrize("target", ["#/$defs/gone", "#gone", "other.json", "urn:x:y", "file:///etc/hostname"])
def test_a_reference_to_nowhere_lets_everything_pass(target):
    assert said(of_x({"$ref": target}), x=1) is None
    assert said(of_x({"$ref": target}, required=["y"]), z=1) == ("INVALID_PARAMETERS", "'y' is a required property")


def test_a_reference_to_another_place_is_never_fetched():
    hits = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hits.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "integer"}')

        def log_message(self, *args):
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/schema.json"
        for keyword in ("$ref", "$dynamicRef"):
            for reference in (url, f"{url}#/$defs/x"):
                assert said(of_x({keyword: reference}), x="no integer") is None
        based = {"$id": url, **of_x({"$ref": "other.json"})}
        assert said(based, x="no integer") is None
        assert said({"$schema": url, **of_x({"type": "integer"})}, x=1) is None
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert hits == []


TREE = {
    "type": "object",
    "properties": {"child": {"$ref": "#"}, "n": {"type": "integer"}},
    "additionalProperties": False,
}


def nested(depth, leaf):
    return {"child": nested(depth - 1, leaf)} if depth else leaf


def test_a_recursive_schema_is_checked_as_deep_as_the_arguments_are():
    assert said(TREE, **nested(5, {"n": 1})) is None
    assert said(TREE, **nested(5, {"n": "1"})) == (
        "INVALID_PARAMETERS",
        "child: " * 5 + "n: '1' is not of type 'integer'",
    )


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, of_x({"$ref": "#/properties/x"})])
def test_a_schema_that_is_nothing_but_itself_lets_everything_pass(schema):
    assert said(schema, x=1) is None


# Arguments that are hard to bear


def test_the_deepest_call_that_can_be_read_is_checked_without_harm():
    deepest = MAX_JSON_DEPTH - 2  # {"name", "arguments": {...}} are two more, with the innermost object
    text = tool_call_block(ToolCall("book", nested(deepest, {"n": "1"})))
    [call] = parse_action(text).calls
    assert parse_action(tool_call_block(ToolCall("book", nested(deepest + 1, {"n": "1"})))).error
    error = call_error([tool(TREE)], call)
    # How deep a recursive schema can be followed depends on the stack; not to know is no error.
    assert error is None or error["error_tool_call"]["code"] == "INVALID_PARAMETERS"
    assert call_error([tool({"type": "object", "additionalProperties": False})], call) is not None
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(_depth_of_stack() + 120)
        assert call_error([tool(TREE)], call) is None
    finally:
        sys.setrecursionlimit(limit)


def _depth_of_stack():
    frame, depth = sys._getframe(), 0
    while frame := frame.f_back:
        depth += 1
    return depth


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (of_x({"type": "integer"}), {"x": "y" * 100_000}),
        (of_x({"type": "integer"}), {"x": ["y"] * 100_000}),
        (of_x({"enum": ["z" * 100_000]}), {"x": 1}),
        ({"additionalProperties": False}, {"y" * 100_000: 1}),
        ({"additionalProperties": {"type": "integer"}}, {"y" * 100_000: "1"}),
    ],
    ids=["string", "list", "enum", "name", "path"],
)
def test_a_message_is_short_however_large_the_value(schema, arguments):
    code, message = said(schema, **arguments)
    assert code == "INVALID_PARAMETERS" and 0 < len(message) <= MESSAGE_CHARS


def test_a_message_shows_other_scripts_as_they_are():
    assert said(of_x({"type": "integer"}), x="查询 🌦")[1] == "x: '查询 🌦' is not of type 'integer'"


def test_a_schema_is_compiled_once():
    schema = of_x({"type": "integer", "description": "only here"})
    assert validator_of(schema) is validator_of(dict(reversed(schema.items())))


def test_checking_changes_neither_schema_nor_call():
    call = ToolCall("book", {"city": "Lima", "nights": "2"})
    tools = [tool(BOOKING)]
    before = to_json([tools, call.arguments])
    call_error(tools, call)
    assert to_json([tools, call.arguments]) == before


# What only fails when it is used


@pytest.mark.parametrize(
    ("schema", "x"),
    [
        # A number that a model can write, with a schema that is in order.
        (of_x({"type": "number", "multipleOf": 0.01}), 10**400),
        # What a reference leads to is not checked beforehand where no known keyword leads.
        (of_x({"$ref": "#/components/x"}, components={"x": {"type": "float"}}), 1),
        (of_x({"$ref": "#/components/x"}, components={"x": {"minimum": "3"}}), 1),
        (of_x({"$ref": "#/required"}, required=["x"]), 1),
        (of_x({"$ref": "#/required/x"}, required=["x"]), 1),
        (of_x({"$ref": "#/minProperties/x"}, minProperties=1), 1),
    ],
    ids=["huge number", "type float", "minimum text", "list", "path into a list", "path into a number"],
)
def test_a_schema_that_fails_only_when_it_is_used_lets_everything_pass(schema, x):
    assert said(schema, x=x) is None
    if "required" not in schema:
        assert said(schema | {"required": ["y"]}, z=x) == ("INVALID_PARAMETERS", "'y' is a required property")


def test_a_pattern_that_cannot_be_compiled_lets_everything_pass():
    assert said(of_x({"pattern": "a{99999999999999999999}"}), x="a") is None


def test_a_schema_that_is_nested_without_end_lets_everything_pass():
    schema = {}
    for _ in range(400):
        schema = of_x(schema)
    assert said(schema, x={}) is None
