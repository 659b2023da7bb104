"""The library as an MCP server over stdio. Yours may be any server, in any language; only tools.py knows its command.

The tool reset gives each episode its world and the tool state tells how it ended; the agent sees neither.
"""

from typing import Any

from library import Library
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("library")
library = Library({})


@server.tool()
def reset(books: dict[str, Any]) -> None:
    """Begin a new world."""
    library.books = books


@server.tool()
def state() -> dict[str, Any]:
    """The world as it is now."""
    return vars(library)


server.add_tool(library.get_book, annotations=ToolAnnotations(read_only_hint=True))
server.add_tool(library.lend_book, annotations=ToolAnnotations(destructive_hint=False))
server.add_tool(library.reserve_book, annotations=ToolAnnotations(destructive_hint=False))

if __name__ == "__main__":
    server.run()
