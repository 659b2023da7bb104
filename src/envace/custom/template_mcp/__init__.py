"""What is different in a new environment whose tools are those of an MCP server."""
