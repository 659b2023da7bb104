"""Asks a language model behind OpenAI-compatible endpoints, several at once, until what it says can be read.

A question is one request that is sent until `read` finds an answer in the reply: the API of an endpoint may be busy,
slow, broken or cut, and the reply may not hold one. Only when the retries are used up is the answer None, unknown.
While no endpoint can be reached questions wait, up to `max_outage_minutes`; see `envace.outage`.

All requests run in one background thread with its own event loop, so asking overlaps whatever the caller does:

    with ChatClient(config, "simulator") as client:
        pending = client.submit(client.ask(request, key, read))  # a Future: pending.done(), pending.result()
        metrics = client.end_step()

The API key is read from the environment and stands in no config, log line, error or repr.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from openai import APIError, APIStatusError, APITimeoutError, AsyncOpenAI

from envace.outage import EndpointError, EndpointOutage, Outage
from envace.rules import is_plain_url
from envace.settings import EndpointConfig
from envace.types import UserError, first_line

logger = logging.getLogger("envace")

Answer = TypeVar("Answer")
Result = TypeVar("Result")

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0  # seconds before the first retry, doubled for each further one
AVOID_SECONDS = 5.0  # how long an endpoint that failed is passed over while another works
PROBE_SECONDS = 10.0  # until `probe` gives an endpoint up
SILENT_QUESTIONS = 3  # so many different ones without any answer between them are an outage
LONG_WAIT = 30.0  # seconds of rest that an endpoint cannot ask for without a warning
MESSAGE_CHARS = 300  # of what an endpoint says about an error
JITTER = random.Random()  # its own: training's must not depend on how often a request failed
NO_KEY = "none"  # AsyncOpenAI insists on one
COUNTS = ("asked", "answered", "cached", "unknown", "refused", "requests", "prompt_tokens", "completion_tokens")
CAUSES = ("rate_limit", "server_error", "timeout", "connection")  # of a retry; one more is a reply without an answer
REFUSES_ALL = {401: "refuses the key", 403: "refuses the key", 404: "does not know the model or the path"}


@dataclass
class _Endpoint:
    """section: of the config, for messages."""

    section: str
    url: str
    client: AsyncOpenAI
    rest_until: float = 0.0  # seconds of the monotonic clock: it asked for no request before
    avoid_until: float = 0.0  # it is failing: others go first; 0.0 if it is not


@dataclass(frozen=True)
class _Failure:
    """Why a request gave no answer. cause: names a counter. wait: seconds the endpoint asked for."""

    cause: str
    text: str
    retry: bool = True
    down: bool = False
    wait: float = 0.0


class ChatClient:
    """Asks questions and counts. `ask` and `count` are for coroutines given to `submit`; the rest is for any thread.

    name: of the config's section, in messages and metrics. wanted: what an answer is called there.
    Raises EndpointError for settings that cannot work: no endpoint, an unset key variable.
    """

    def __init__(self, config: EndpointConfig, name: str, *, wanted: str = "result"):
        self.config = config
        self.name = name
        self._wanted = wanted
        self._causes = (*CAUSES, f"no_{wanted}")
        self._endpoints = _endpoints(config, name)
        self._outage = Outage(config, name, wanted)
        self._turn = 0
        self._slots = asyncio.Semaphore(config.concurrency)
        self._counts: Counter[str] = Counter()
        self._latency = 0.0
        self._last_failure = ""
        self._silent: set[str] = set()  # questions that timed out since the last answer
        self._broken: UserError | None = None
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a failing program is not kept alive by what it still waits for.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run it in the background thread, where it can await `ask`.

        The future raises EndpointError if an endpoint refuses the key or does not know the model, EndpointOutage if
        none could be reached for too long; any other error of the coroutine becomes an EndpointError.
        """
        return asyncio.run_coroutine_threadsafe(self._run(coroutine), self._loop)

    def metrics(self, total: Callable[[float], float] = float) -> dict[str, float]:
        """Counts since the last `end_step`: asked = answered + cached + unknown. Tokens and seconds are of all replies.

        cached: answered before, or being asked at that time; see `count`. refused: the endpoint would not answer it,
        for example because it is too long. total: sums a count over all ranks.
        """
        counts = {name: total(self._counts[name]) for name in COUNTS}
        retries = {f"retries_{cause}": total(self._counts[f"retries_{cause}"]) for cause in self._causes}
        asked, replies, latency = counts["asked"], total(self._counts["replies"]), total(self._latency)
        rates = {
            "unknown_share": counts["unknown"] / asked if asked else 0.0,
            "latency_seconds": latency,
            "latency_mean_seconds": latency / replies if replies else 0.0,
        }
        return {f"{self.name}/{name}": value for name, value in {**counts, **retries, **rates}.items()}

    def end_step(self, total: Callable[[float], float] = float) -> dict[str, float]:
        """The metrics of the step that ends, all of whose questions are answered; the next one counts from 0.

        total: sums a number over all ranks, all of which call this and fare alike.
        Raises EndpointOutage if more than `max_unknown_share` of the step's questions had no answer, and if a future of
        the step raised.
        """
        metrics = self.metrics(total)
        broken, self._broken = self._broken, None
        reason, self._last_failure = self._last_failure or "on another process", ""
        self._counts, self._latency = Counter(), 0.0
        if total(broken is not None):
            raise EndpointOutage(str(broken or f"{self.name}: it failed for another process, whose log says how"))
        self._outage.check_step(int(metrics[f"{self.name}/asked"]), int(metrics[f"{self.name}/unknown"]), reason)
        return metrics

    def close(self) -> None:
        """Give up what is still being asked, and end the thread. A closed client cannot be used again."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._give_up(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # From here on everything runs in the background thread.

    async def ask(self, request: dict[str, Any], key: str, read: Callable[[str], Answer | None]) -> Answer | None:
        """What `read` finds in the text of a reply, which is None if it finds nothing; None if no reply holds it.

        request: of a chat completion. key: the same for the same question. Raises EndpointError, EndpointOutage.
        """
        self.count("asked")
        answer = await self._ask(request, key, read)
        self.count("unknown" if answer is None else "answered")
        return answer

    def count(self, name: str) -> None:
        """One more of a metric. For a question that is not asked: "asked", and then "cached" or "unknown"."""
        self._counts[name] += 1

    async def _give_up(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for endpoint in self._endpoints:
            await endpoint.client.close()

    async def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await coroutine
        except UserError as error:
            self._broken = error
            raise
        except Exception as error:  # whatever it is, the run shall save a checkpoint
            self._broken = EndpointError(f"{self.name}: {type(error).__name__}: {first_line(error)}")
            raise self._broken from error

    async def _ask(self, request: dict[str, Any], key: str, read: Callable[[str], Answer | None]) -> Answer | None:
        tried: Counter[str] = Counter()  # by endpoint
        attempt = 0
        while True:
            outcome = await self._send(request, key, read, tried)
            if not isinstance(outcome, _Failure):
                return outcome
            self._last_failure = outcome.text
            if not outcome.retry or (attempt >= self.config.retries and not self._waits_for(outcome)):
                self._counts["refused"] += not outcome.retry
                if not self._counts["given_up"]:
                    logger.warning(
                        "%s: first question of this step without a %s (%s)", self.name, self._wanted, outcome.text
                    )
                self._counts["given_up"] += 1
                return None
            self._counts[f"retries_{outcome.cause}"] += 1
            await asyncio.sleep(min(_backoff(attempt), self._outage.remaining(time.monotonic())))
            attempt += 1

    def _waits_for(self, failure: _Failure) -> bool:
        """Whether it is the service that fails and not the question. Raises EndpointOutage if it has for too long."""
        self._outage.check(time.monotonic())
        return failure.down and self._outage.all_failing

    async def _send(
        self, request: dict[str, Any], key: str, read: Callable[[str], Answer | None], tried: Counter[str]
    ) -> Answer | _Failure:
        async with self._slots:
            endpoint = self._next_endpoint(tried)
            tried[endpoint.url] += 1
            # All of them ask for rest if this one does, so the slot is not missed.
            await asyncio.sleep(endpoint.rest_until - time.monotonic())
            started = time.monotonic()
            self._counts["requests"] += 1
            try:
                # AsyncOpenAI's own timeout is for each read: a reply that trickles in would never end.
                async with asyncio.timeout(self.config.timeout):
                    response = await endpoint.client.chat.completions.with_raw_response.create(**request)
            except (APIError, TimeoutError) as error:
                return self._failed(endpoint, _failure(error, endpoint), key)
            self._latency += time.monotonic() - started
            self._answered(endpoint)
            endpoint.avoid_until = 0.0
        return self._read(response.text, endpoint.url, read)

    def _next_endpoint(self, tried: Counter[str]) -> _Endpoint:
        """In turn; but behind the others come those that asked for rest, that are failing, that this question tried."""
        now = time.monotonic()
        self._turn += 1
        in_turn = [self._endpoints[(self._turn + i) % len(self._endpoints)] for i in range(len(self._endpoints))]
        chosen = min(in_turn, key=lambda e: (max(e.rest_until - now, 0.0), now < e.avoid_until, tried[e.url]))
        if chosen.avoid_until:
            # One request finds out whether a failing endpoint is back; the rest does not follow before that is known.
            chosen.avoid_until = now + AVOID_SECONDS
        return chosen

    def _answered(self, endpoint: _Endpoint) -> None:
        self._silent.clear()
        self._outage.answered(endpoint.url)

    def _failed(self, endpoint: _Endpoint, failure: _Failure, key: str) -> _Failure:
        now = time.monotonic()
        if failure.cause == "timeout":
            self._silent.add(key)
            # One question may take too long by itself; several in a row, and nobody is there.
            failure = replace(failure, down=len(self._silent) >= SILENT_QUESTIONS)
        if failure.down:
            self._outage.failed(endpoint.url, now, failure.text)
        elif failure.cause != "timeout":  # any answer shows that it can be reached
            self._answered(endpoint)
        wait = min(failure.wait, 60 * self.config.max_outage_minutes)
        if wait >= LONG_WAIT and endpoint.rest_until < now:
            logger.warning("%s: %s asks for %.0f seconds without requests", self.name, endpoint.url, wait)
        endpoint.avoid_until, endpoint.rest_until = now + AVOID_SECONDS, max(endpoint.rest_until, now + wait)
        return failure

    def _read(self, body: str, url: str, read: Callable[[str], Answer | None]) -> Answer | _Failure:
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError):
            reply = None
        self._counts["replies"] += 1
        for name in ("prompt_tokens", "completion_tokens"):
            tokens = _at(reply, "usage", name)
            self._counts[name] += tokens if isinstance(tokens, int) else 0
        text = _at(reply, "choices", 0, "message", "content")
        answer = read(text) if isinstance(text, str) else None
        if answer is None:
            ended = _at(reply, "choices", 0, "finish_reason")
            return _Failure(f"no_{self._wanted}", f"{url}: a reply without a {self._wanted} (finish_reason {ended})")
        return answer


def probe(config: EndpointConfig, name: str) -> dict[str, list[str] | EndpointError]:
    """By endpoint the names of the models that it lists, or why there is no list. No question is asked.

    name: of the config's section, for messages. Raises EndpointError for settings that cannot work.
    """

    async def answers() -> list[list[str] | EndpointError]:
        return await asyncio.gather(*map(_models, _endpoints(config, name)))

    return dict(zip(config.endpoints, asyncio.run(answers()), strict=True))


async def _models(endpoint: _Endpoint) -> list[str] | EndpointError:
    advice = f"start it, or correct {endpoint.section}.endpoints"
    try:
        async with endpoint.client, asyncio.timeout(PROBE_SECONDS):
            response = await endpoint.client.models.with_raw_response.list()
        return [str(model["id"]) for model in json.loads(response.text)["data"]]
    except (TimeoutError, APITimeoutError):
        return EndpointError(f"{endpoint.url}: no reply within {PROBE_SECONDS:g} seconds: {advice}")
    except APIError as error:
        try:
            return EndpointError(f"{_failure(error, endpoint).text}: {advice}")
        except EndpointError as refusal:
            return refusal
    except (ValueError, KeyError, TypeError):
        return EndpointError(f"{endpoint.url}: a reply without a list of models: {advice}")


def _endpoints(config: EndpointConfig, name: str) -> list[_Endpoint]:
    if not config.endpoints or not config.model:
        raise EndpointError(
            f"{name}.endpoints and {name}.model must be set: URLs such as http://localhost:8000/v1, a name"
        )
    # No value is shown here: someone may have put the key itself where its name belongs.
    key = os.environ.get(config.key_env, "").strip() if config.key_env else NO_KEY
    if not key or not key.isascii() or not key.isprintable():
        raise EndpointError(
            f"{name}.key_env must NAME an environment variable that holds the key: export it, or name none"
        )
    for number, url in enumerate(config.endpoints):
        if not is_plain_url(url):
            raise EndpointError(
                f"{name}.endpoints[{number}] must be like http://host:port/v1, without user, key or query"
            )
    # ChatClient does the retries: AsyncOpenAI knows neither other endpoints nor when to wait.
    return [
        _Endpoint(name, url, AsyncOpenAI(api_key=key, base_url=url, timeout=config.timeout, max_retries=0))
        for url in config.endpoints
    ]


def _failure(error: APIError | TimeoutError, endpoint: _Endpoint) -> _Failure:
    """What an error of a request means. Raises EndpointError if no other request could fare better."""
    section, url, key = endpoint.section, endpoint.url, endpoint.client.api_key
    if isinstance(error, TimeoutError | APITimeoutError):
        return _Failure("timeout", f"{url}: no reply within {section}.timeout")
    said = first_line(error if isinstance(error, APIStatusError) else error.__cause__ or error)
    # Some endpoints quote the key they refuse.
    text = f"{url}: {(said if key == NO_KEY else said.replace(key, '***'))[:MESSAGE_CHARS]}"
    if not isinstance(error, APIStatusError):
        return _Failure("connection", text, down=True)
    status = error.status_code
    if status in REFUSES_ALL:
        # Without the error itself, whose text may hold the key.
        raise EndpointError(
            f"{section}: {url} {REFUSES_ALL[status]} (HTTP {status}): check {section}.endpoints, model and key_env"
        ) from None
    wait = _retry_after(error.response.headers.get("retry-after", ""))
    if status == 429:
        return _Failure("rate_limit", text, wait=wait)
    if status >= 500 or status in (408, 409):
        # What a gateway says for a server that is not there.
        return _Failure("server_error", text, down=status in (502, 503), wait=wait)
    return _Failure("refused", text, retry=False)


def _retry_after(header: str) -> float:
    """Seconds, from a number or a date; 0 if it is neither."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _backoff(attempt: int) -> float:
    """Seconds before a retry: doubled each time, and spread so that retries do not come all at once."""
    return min(FIRST_BACKOFF * 2 ** min(attempt, 16), LONGEST_BACKOFF) * JITTER.uniform(0.5, 1)


def _at(value: Any, *path: str | int) -> Any:
    """What lies at a path in JSON, None if something else does."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value
