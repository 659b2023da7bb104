"""Tools of an MCP server over stdio: real processes, the official client and the official server."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from envace.custom.mcp_tools import McpTools
from envace.gate import risk_of
from envace.types import ServiceFault, ToolCall, UserError

SERVER = [sys.executable, str(Path(__file__).parent / "mcp_server.py")]


def servers(mark):
    """Processes of the test server with `mark` in their command that live."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and mark in p.cmdline()]


@pytest.fixture
def tools_of():
    """tools_of(mode, **settings of McpTools); all are closed behind the test, and nothing of them is left."""
    made, threads = [], set(threading.enumerate())

    def build(mode="plain", **settings):
        made.append(McpTools([*SERVER, mode, "one_test"], **{"reset": "reset", "state": "state", **settings}))
        return made[-1]

    yield build
    for tools in made:
        tools.close()
    assert not servers("one_test")
    assert set(threading.enumerate()) <= threads


@pytest.fixture(scope="module")
def shared():
    """One server for the tests that leave it whole."""
    tools = McpTools([*SERVER, "plain", "shared"], reset="reset", state="state", sessions=1)
    yield tools
    tools.close()


def world(**counts):
    return {"counts_before": counts}


def called(session, tool, /, **arguments):
    return session.execute(ToolCall(tool, arguments))


def test_the_agent_is_shown_the_tools_with_their_schemas_and_annotations(shared):
    tools = {tool["function"]["name"]: tool for tool in shared.schemas}
    assert tools.keys() == {"peek", "count", "clock", "refuse", "crash", "hang", "picture", "words", "rows"}
    peek = tools["peek"]["function"]
    assert peek["description"] == "How often `name` was counted."
    assert peek["parameters"]["properties"]["name"]["type"] == "string" and peek["parameters"]["required"] == ["name"]
    assert shared.read_only == {"peek"}
    assert [risk_of(name, shared.schemas, {}) for name in ("peek", "count", "clock")] == ["low", "high", "medium"]


def test_a_tool_may_be_called_read_only_from_outside(tools_of):
    assert tools_of(read_only=["clock"]).read_only == {"peek", "clock"}


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("refuse", {"error": "Error executing tool refuse: you may not"}),
        ("picture", {"result": "[image]"}),
        ("words", {"result": "two words"}),
        ("rows", [1, 2]),
    ],
)
def test_results_become_json_and_errors_of_a_tool_are_observed(shared, name, response):
    assert called(shared.open(world()), name) == response


def test_the_world_of_a_task_is_where_an_episode_begins(shared):
    first, second = shared.open(world(a=3)), shared.open(world())
    assert called(first, "count", name="a") == {"a": 4}
    assert called(second, "peek", name="a") == {"result": 0}
    assert first.state() == {"a": 4} and second.state() == {}


def test_episodes_that_take_turns_on_one_server_do_not_see_each_other(shared):
    """The one that lost the server makes its calls again: counts go on from where they were."""
    sessions = [shared.open(world(a=10 * i)) for i in range(3)]
    seen = [[called(session, "count", name="a")["a"] for session in sessions] for _ in range(3)]
    assert seen == [[1, 11, 21], [2, 12, 22], [3, 13, 23]]
    assert len(servers("shared")) == 1


@pytest.mark.slow
def test_a_server_that_answers_differently_when_asked_again_is_told(tools_of):
    tools = tools_of(sessions=1)
    first, second = tools.open(world()), tools.open(world())
    called(first, "clock")
    called(second, "peek", name="a")
    with pytest.raises(ServiceFault, match="clock gave two responses to one call.*rollout.batch_size"):
        called(first, "peek", name="a")
    enough = tools_of(sessions=2)
    first, second = enough.open(world()), enough.open(world())
    called(first, "clock")
    called(second, "peek", name="a")
    assert called(first, "peek", name="a") == {"result": 0}


@pytest.mark.slow
def test_without_a_reset_tool_each_episode_has_a_process_of_its_own(tools_of):
    tools = tools_of(reset="", state="", sessions=2)
    pids = []
    for _ in range(3):
        session = tools.open(None)
        assert called(session, "count", name="a") == {"a": 1}
        assert called(session, "count", name="a") == {"a": 2}
        pids.append(called(session, "clock")["pid"])
        assert session.state() is None
    assert len(set(pids)) == 3 and len(servers("one_test")) <= 2


def test_a_crash_is_a_fault_with_the_last_words_of_the_server_and_the_next_episode_gets_another(tools_of):
    tools = tools_of(sessions=1)
    session = tools.open(world())
    with pytest.raises(ServiceFault, match=r"^MCP server .*: crash failed: .*\(out of luck\)$") as caught:
        called(session, "crash")
    assert "\n" not in str(caught.value)
    assert called(tools.open(world(a=1)), "peek", name="a") == {"result": 1}


@pytest.mark.slow
def test_a_hanging_call_is_a_fault_after_the_timeout(tools_of):
    tools = tools_of(timeout=3.0)
    session = tools.open(world())
    called(session, "peek", name="a")
    started = time.monotonic()
    with pytest.raises(ServiceFault, match="hang failed: .*[Tt]imed out"):
        called(session, "hang")
    assert time.monotonic() - started < 30  # the server would take 60 s


def test_a_world_that_the_reset_tool_refuses_is_a_fault(tools_of):
    with pytest.raises(ServiceFault, match="the reset tool refused the world of a task: .*no such world"):
        called(tools_of().open(world(bad=1)), "peek", name="a")


def test_a_server_that_prints_among_its_messages_is_told_once_and_still_understood(tools_of, caplog):
    assert called(tools_of("babbling").open(world(a=2)), "peek", name="a") == {"result": 2}
    [message] = caplog.messages
    assert "prints what is no message" in message


@pytest.mark.parametrize(
    ("mode", "settings", "message"),
    [
        ("dead", {}, r"does not start: .*\(the licence has expired\)$"),
        ("deaf", {"timeout": 1.0}, "does not start: .*[Tt]imed out"),
        ("badly_named", {}, "tool 'look up': a name has letters, digits"),
        ("plain", {"reset": "restart"}, "has no tool 'restart'; there are clock, count,"),
        ("plain", {"read_only": ["peak"]}, "has no tool 'peak'"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(tools_of, mode, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        _ = tools_of(mode, **settings).schemas
    assert "\n" not in str(caught.value)


def test_a_command_that_is_not_there_is_one_line():
    with pytest.raises(UserError, match="MCP server no-such-command: does not start: "):
        _ = McpTools(["no-such-command"]).schemas


@pytest.mark.slow
def test_a_server_over_http():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tools = McpTools(url=f"http://127.0.0.1:{port}/mcp", reset="reset", state="state", sessions=1)
    with pytest.raises(UserError, match="^MCP server http://.*: does not start: ") as caught:
        _ = tools.schemas
    assert "\n" not in str(caught.value)
    process = subprocess.Popen([*SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not is_listening(port):
            time.sleep(0.1)
        first, second = tools.open(world(a=1)), tools.open(world(a=5))
        assert [called(session, "count", name="a") for session in (first, second, first)] == [
            {"a": 2},
            {"a": 6},
            {"a": 3},
        ]
        assert tools.read_only == {"peek"}
    finally:
        tools.close()
        process.terminate()
        process.wait()


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("settings", [{}, {"command": ["a"], "url": "http://localhost/mcp"}])
def test_a_server_has_a_command_or_a_url(settings):
    with pytest.raises(UserError, match="give one of the two"):
        McpTools(**settings)


@pytest.mark.slow
def test_servers_end_with_the_program_that_forgot_to_close_them():
    code = (
        "from envace.custom.mcp_tools import McpTools\n"
        f"tools = McpTools({[*SERVER, 'forgotten']})\n"
        "tools.schemas\n"
        "raise SystemExit('as it ends: ' + str(len(tools._pool)))"
    )
    src = str(Path(__file__).parent.parent / "src")
    done = subprocess.run([sys.executable, "-c", code], cwd=src, capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "as it ends: 1"
    assert not [p for p in psutil.process_iter(["cmdline"]) if "forgotten" in (p.info["cmdline"] or [])]


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', "[" * 200_000, '{"a": NaN}'])
def test_a_response_that_is_no_json_text_is_a_fault_of_the_service(text):
    from mcp.types import CallToolResult, TextContent

    from envace.custom.mcp_tools import response_of

    with pytest.raises(ServiceFault, match="what is no JSON"):
        response_of(CallToolResult(content=[TextContent(type="text", text=text)]))
