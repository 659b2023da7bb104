"""Executable environments of your own: tools from Python functions or an MCP server, tasks, an expert."""
