"""What the agent can call: the tools of an MCP server. This is the only file that knows which server."""

import sys
from pathlib import Path

from envace.custom.mcp_tools import McpTools

SERVER = Path(__file__).parent / "server.py"

TOOLS = McpTools([sys.executable, str(SERVER)], reset="reset", state="state")
