"""A server over stdio that does wrong what can be done wrong: the first argument says what.

Run by tests in a process of its own, with the official server.
"""

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

mode = sys.argv[1] if len(sys.argv) > 1 else "plain"
server = MCPServer("odd")
counts: dict[str, int] = {}

if mode == "dead":
    sys.exit("the licence has expired")
if mode == "deaf":
    time.sleep(60)
if mode == "babbling":
    print("Welcome to the server!\n" * 20, flush=True)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def peek(name: str) -> int:
    """How often `name` was counted."""
    return counts.get(name, 0)


@server.tool(annotations=ToolAnnotations(destructive_hint=True))
def count(name: str) -> dict[str, int]:
    """Count `name`."""
    counts[name] = counts.get(name, 0) + 1
    return {name: counts[name]}


@server.tool()
def clock() -> dict[str, int]:
    """Never the same."""
    return {"now": time.monotonic_ns(), "pid": os.getpid()}


@server.tool()
def refuse() -> str:
    """An error of the tool's own."""
    raise ToolError("you may not")


@server.tool()
def crash() -> str:
    """Ends the server."""
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(1)


@server.tool()
def hang() -> str:
    """Takes a minute."""
    time.sleep(60)
    return "done"


@server.tool()
def picture() -> Image:
    """No text."""
    return Image(data=b"PNG", format="png")


@server.tool(structured_output=False)
def words() -> str:
    """Text that is no JSON."""
    return "two words"


@server.tool(structured_output=False)
def rows() -> str:
    """Text that is JSON."""
    return "[1, 2]"


@server.tool()
def reset(counts_before: dict[str, int]) -> None:
    """Begin anew."""
    if "bad" in counts_before:
        raise ToolError("no such world")
    counts.clear()
    counts.update(counts_before)


@server.tool()
def state() -> dict[str, int]:
    """All counts."""
    return counts


if mode == "badly_named":
    server.add_tool(peek, name="look up")

if mode == "http":
    server.run(transport="streamable-http", port=int(sys.argv[2]))
else:
    server.run()
