"""When to wait for endpoints, and when to stop a run for lack of them. See `envace.endpoints`."""

from __future__ import annotations

import logging
import math
from collections import Counter

from envace.settings import EndpointConfig
from envace.types import Interruption, UserError

logger = logging.getLogger("envace")

WARN_AFTER = 3  # failures of an endpoint in a row until it is called down


class EndpointError(UserError):
    """Endpoints cannot be used as they are configured. One line: what, where, what to do."""


class EndpointOutage(Interruption):
    """Endpoints do not work well enough to go on; save a checkpoint and stop."""


class Outage:
    """When to wait and when to stop. It reads no clock: `now` is in seconds, from any origin.

    An endpoint is failing from its first failure until it answers. As long as another one answers the run goes on;
    only when all have been failing for `max_outage_minutes` does `check` raise. name, wanted: as in `ChatClient`.
    """

    def __init__(self, config: EndpointConfig, name: str, wanted: str):
        self._name = name
        self._wanted = wanted
        self._max_unknown_share = config.max_unknown_share
        self._max_minutes = config.max_outage_minutes
        self._endpoints = list(dict.fromkeys(config.endpoints))  # one may be named twice, to get more of the requests
        self._since: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

    def answered(self, endpoint: str) -> None:
        if self._failures[endpoint] >= WARN_AFTER:
            logger.warning("%s: %s answers again", self._name, endpoint)
        self._since.pop(endpoint, None)
        self._failures[endpoint] = 0

    def failed(self, endpoint: str, now: float, reason: str) -> None:
        self._since.setdefault(endpoint, now)
        self._failures[endpoint] += 1
        if self._failures[endpoint] == WARN_AFTER:
            hope = f"waiting up to {self._max_minutes:g} minutes" if self.all_failing else "the others take over"
            logger.error("%s: %s is down (%s); %s", self._name, endpoint, reason, hope)

    def is_failing(self, endpoint: str) -> bool:
        return endpoint in self._since

    @property
    def all_failing(self) -> bool:
        return len(self._since) == len(self._endpoints)

    def remaining(self, now: float) -> float:
        """Seconds until an outage of all endpoints has lasted too long; infinite while one of them works."""
        return max(self._since.values()) + 60 * self._max_minutes - now if self.all_failing else math.inf

    def check(self, now: float) -> None:
        """Raises EndpointOutage if no endpoint has worked for `max_outage_minutes`."""
        if self.remaining(now) <= 0:
            down = f"{', '.join(self._endpoints)} down for {self._max_minutes:g} minutes"
            raise EndpointOutage(f"{self._name}: {down}: start it again and resume")

    def check_step(self, asked: int, unknown: int, reason: str) -> None:
        """Raises EndpointOutage if too large a share of a step's questions has no answer; warns from half of that."""
        share = unknown / asked if asked else 0.0
        found = f"{unknown} of {asked} questions of this step have no {self._wanted} (last: {reason})"
        message = f"{self._name}: {found}"
        if share > self._max_unknown_share:
            raise EndpointOutage(
                f"{message}, more than max_unknown_share={self._max_unknown_share:g}: mend it and resume"
            )
        if share > self._max_unknown_share / 2:
            logger.warning("%s; the run stops above max_unknown_share=%g", message, self._max_unknown_share)
