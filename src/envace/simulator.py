"""A model behind OpenAI-compatible endpoints that plays the environment; see `envace.endpoints`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from envace.chat import parse_observation
from envace.endpoints import ChatClient
from envace.settings import EndpointConfig
from envace.types import content_hash


class Simulator:
    """Asks for responses and counts. All its methods may be called from any thread. Raises EndpointError."""

    def __init__(self, config: EndpointConfig):
        self.config = config
        self._client = ChatClient(config, "simulator_endpoint", wanted="response")

    def submit(self, messages: list[dict[str, Any]]) -> Future[str | None]:
        """The response, a JSON object or array, that the model writes in a chat; one it cannot be read from is None."""
        request = {
            "model": self.config.model,
            "messages": messages,
            "temperature": self.config.temperature,
            "top_p": self.config.top_p,
            "max_tokens": self.config.max_tokens,
        }
        return self._client.submit(self._client.ask(request, content_hash(request), read_response))

    def end_step(self, total: Callable[[float], float] = float) -> dict[str, float]:
        """The metrics of the step that ends; see `ChatClient.end_step`. Raises EndpointOutage."""
        return self._client.end_step(total)

    def close(self) -> None:
        self._client.close()


def read_response(text: str) -> str | None:
    """What is between the tags, or the bare JSON, of a REHEARSE output of view separate."""
    observation = parse_observation(text)
    return None if observation.error else observation.text
