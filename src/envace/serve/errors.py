"""What a client is told when a request cannot be answered: one shape for everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class ApiError(Exception):
    """An answer in the shape {"error": {message, type, param, code}}. The message is for clients: no paths, no keys."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}
        self.headers = headers

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def backend_error(message: str, code: str = "backend_error") -> ApiError:
    return ApiError(502, message, type="api_error", code=code)


def timed_out() -> ApiError:
    return ApiError(504, "the request was not answered in time", type="timeout_error", code="timeout")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII, so that nothing in it can fail to be encoded."""
    return Response(json.dumps(value), status, headers, media_type="application/json")
