"""Tools of an MCP server, through the official client: over stdio or streamable HTTP.

A session is one connection; over stdio, one process. Each episode has a world of its own: before its first call the
server's reset tool is called with the world of the task, or where there is none, a connection is opened anew. There are
`sessions` connections at most. When more episodes are alive, one takes the session that was used least recently, and
the episode that had it makes its earlier calls again when it goes on. Their responses must be the same, otherwise the
server is not deterministic and the episode has a fault; with sessions >= rollout.batch_size nothing is repeated.
A server over HTTP keeps the worlds of its connections apart itself; for one that does not, set sessions=1.

The client is asynchronous and lives on an event loop in a thread of its own. A server that crashes, hangs or breaks the
protocol is a ServiceFault; a tool's own error is what the agent sees.
"""

from __future__ import annotations

import json
import logging
import tempfile
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO, cast

from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent, Tool
from pydantic import ValidationError

from envace.custom.tools import READ_ONLY, as_response, checked, read_only_names
from envace.types import ServiceFault, ToolCall, UserError, canonical_json, first_line

logger = logging.getLogger("envace")
# It tells a line that is no message with a traceback; `_note` does it in one line.
logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
BROKEN = (MCPError, ValidationError, OSError, RuntimeError, ValueError, ExceptionGroup)


class McpTools:
    """What an MCP server offers.

    command: of a server over stdio, such as ["python", "server.py"]; url: of one over HTTP. One of the two.
    cwd, env: of the command. A server gets HOME, PATH and the like and what is in `env`, and nothing else.
    reset: name of its tool that begins a new world, with the world of the task as arguments. state: name of one that
    tells the state, without arguments. The agent is shown neither.
    read_only: names of tools that change nothing, beside those that say so themselves (readOnlyHint).
    timeout: seconds until a request has failed.
    """

    def __init__(
        self,
        command: Iterable[str] = (),
        *,
        url: str = "",
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
        reset: str = "",
        state: str = "",
        read_only: Iterable[str] = (),
        sessions: int = 4,
        timeout: float = 30.0,
    ):
        self.command = list(command)
        if bool(self.command) == bool(url):
            raise UserError("an MCP server has a command or a url: give one of the two")
        self.url, self.cwd, self.env = url, cwd, env
        self.reset, self.state = reset, state
        self.sessions = sessions
        self.timeout = timeout
        self._said_read_only = frozenset(read_only)
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()
        self._pool: list[Connection] = []  # the one that was used least recently first
        # Also runs at the end of the program, when it does so by an error.
        self._finalizer = weakref.finalize(self, _end, self._pool, self._stack)

    def close(self) -> None:
        """End all servers, connections and the thread. Later use begins them anew."""
        _end(self._pool, self._stack)

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """Raises UserError if the server cannot be reached, or offers tools that cannot be used."""
        try:
            connection = self._connect()
            self._pool.insert(0, connection)
            listed = connection.tools()
        except ServiceFault as fault:
            raise UserError(str(fault)) from fault
        names = {tool.name for tool in listed}
        if missing := sorted({self.reset, self.state, *self._said_read_only} - {""} - names):
            raise UserError(f"{self._name} has no tool {missing[0]!r}; there are {', '.join(sorted(names))}")
        shown = [tool for tool in listed if tool.name not in (self.reset, self.state)]
        return checked([self._schema(tool) for tool in shown])

    def _schema(self, tool: Tool) -> dict[str, Any]:
        said = {} if tool.annotations is None else tool.annotations.model_dump(by_alias=True, exclude_none=True)
        hints = said | (READ_ONLY if tool.name in self._said_read_only else {})
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        return {"type": "function", "function": function, "annotations": hints}

    @cached_property
    def read_only(self) -> frozenset[str]:
        return read_only_names(self.schemas)

    def open(self, world: Any) -> McpSession:
        """Nothing is asked of the server before the first call."""
        return McpSession(self, world)

    def connection_of(self, session: McpSession) -> Connection:
        """The connection that `session` has, or one that it now gets, in the state that its calls had led to."""
        held = next((c for c in self._pool if c.holder() is session), None)
        if held is None:
            held = self._take()
            self._begin(held, session)
        self._pool.remove(held)
        self._pool.append(held)
        return held

    def _take(self) -> Connection:
        """A connection for another episode; without a reset tool it has served none yet."""
        free = next((c for c in self._pool if c.holder() is None), None)
        if free is None and len(self._pool) < self.sessions:
            free = self._connect()
            self._pool.append(free)
        taken = free or self._pool[0]
        if not self.reset and taken.is_used:
            self.drop(taken)
            taken = self._connect()
            self._pool.append(taken)
        return taken

    def _begin(self, connection: Connection, session: McpSession) -> None:
        connection.holder, connection.is_used = weakref.ref(session), True
        try:
            if self.reset:
                result = connection.call(self.reset, session.world)
                if result.is_error:
                    raise ServiceFault(f"{self._name}: the reset tool refused the world of a task: {text_of(result)}")
            for call, response in session.made:
                again = response_of(connection.call(call.name, call.arguments))
                if canonical_json(again) != canonical_json(response):
                    raise ServiceFault(
                        f"{self._name}: {call.name} gave two responses to one call in one state; set sessions, of "
                        "McpTools, to rollout.batch_size or more"
                    )
        except ServiceFault:
            self.drop(connection)
            raise

    def drop(self, connection: Connection) -> None:
        self._pool.remove(connection)
        connection.close()

    def _connect(self) -> Connection:
        if self._portal is None or not self._pool:  # the loop may have ended with the last connection
            self._stack.close()
            self._portal = self._stack.enter_context(start_blocking_portal(name="mcp"))
        return Connection(self._portal, self._transport, self._name, self.timeout)

    def _transport(self, log: TextIO) -> Any:
        if self.url:
            return streamable_http_client(self.url)
        parameters = StdioServerParameters(command=self.command[0], args=self.command[1:], cwd=self.cwd, env=self.env)
        return stdio_client(parameters, errlog=log)

    @property
    def _name(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)}"


class McpSession:
    """One episode's world in a server. made: its calls and their responses, in order."""

    def __init__(self, tools: McpTools, world: Any):
        self.tools = tools
        self.world = world
        self.made: list[tuple[ToolCall, Any]] = []

    def execute(self, call: ToolCall) -> Any:
        response = response_of(self._ask(call.name, call.arguments))
        self.made.append((call, response))
        return response

    def state(self) -> Any:
        return response_of(self._ask(self.tools.state, {})) if self.tools.state else None

    def _ask(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        connection = self.tools.connection_of(self)
        try:
            return connection.call(name, arguments)
        except ServiceFault:
            self.tools.drop(connection)
            raise


class Connection:
    """One client and its server, driven from a thread without an event loop. Every failure is a ServiceFault."""

    def __init__(self, portal: BlockingPortal, transport: Callable[[TextIO], Any], name: str, timeout: float):
        self.holder: Callable[[], McpSession | None] = lambda: None
        self.is_used = False
        self._has_warned = False
        self._name = name
        self._portal = portal
        self._timeout = timeout
        # What the server says on stderr.
        self._log = cast(TextIO, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        client = Client(transport(self._log), read_timeout_seconds=timeout, message_handler=self._note, cache=None)
        self._context = portal.wrap_async_context_manager(client)
        try:
            self._client: Client = self._context.__enter__()
        except BROKEN as error:
            fault = self._fault("does not start", error)
            self._log.close()
            raise fault from error

    def tools(self) -> list[Tool]:
        found, cursor = [], None
        while True:
            page = self._ask("cannot list its tools", partial(self._client.list_tools, cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found

    def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        return self._ask(f"{name} failed", partial(self._client.call_tool, name, arguments))

    def _ask(self, what: str, request: Callable[[], Any]) -> Any:
        try:
            return self._portal.call(request)
        except BROKEN as error:
            raise self._fault(what, error) from error

    def close(self) -> None:
        with suppress(*BROKEN):  # of a server that is broken already
            self._context.__exit__(None, None, None)
        self._log.close()

    async def _note(self, message: Any) -> None:
        """Called with what the server sends unasked, and with what could not be read; the first such line is told."""
        if isinstance(message, Exception) and not self._has_warned:
            self._has_warned = True
            logger.warning("%s prints what is no message: its standard output is for MCP only", self._name)

    def _fault(self, what: str, error: BaseException) -> ServiceFault:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._log.seek(0)
        said = [line.strip() for line in self._log if line.strip()]
        return ServiceFault(f"{self._name}: {what}: {first_line(error)}{f' ({said[-1]})' if said else ''}")


def _end(pool: list[Connection], stack: ExitStack) -> None:
    while pool:
        pool.pop().close()
    stack.close()


def response_of(result: CallToolResult) -> Any:
    """What the agent sees. Raises ServiceFault if it cannot be written as JSON text."""
    try:
        response = _content_of(result)
        json.dumps(response, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ServiceFault(f"a tool of the MCP server returned what is no JSON: {first_line(error)}") from error
    return response


def _content_of(result: CallToolResult) -> Any:
    """Structured content, else text that is JSON, else the text in an object."""
    if result.is_error:
        return {"error": text_of(result)}
    if result.structured_content is not None:
        return as_response(result.structured_content)
    text = text_of(result)
    try:
        return as_response(json.loads(text))
    except ValueError:
        return {"result": text}


def text_of(result: CallToolResult) -> str:
    """The text of a result; what is none, such as a picture, is named by its kind."""
    return "\n".join(b.text if isinstance(b, TextContent) else f"[{b.type}]" for b in result.content)
