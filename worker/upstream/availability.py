"""Asks an upstream whether it can be used: that it answers, takes the key and has the models.

Nothing is sent to one that can't be. It is asked again, after longer and longer pauses, until it
can be used.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any

import httpx2

from jobs.api.via import LOOP
from jobs.encoding import from_json
from jobs.errors import JobError
from worker.upstream.address import KEY_VARIABLE, Address
from worker.upstream.faults import NotNow, fault_of, message_of

Models = Mapping[str, Mapping[str, Any]]  # entries of the list of models, by their names

PAUSES = (0.5, 30.0)  # seconds before an upstream is asked again: the first, the longest
LONGEST_HOLD = 60.0  # seconds for which claimed jobs wait here; for longer, they go back
MAX_SHOWN = 20  # models in an error
LIST_SECONDS = 10.0  # that the list of models may take


class Away(Exception):
    """The upstream does not answer now; it may come back by itself."""


async def read_models(http: httpx2.AsyncClient, address: Address) -> Models:
    """The models of an upstream. Raises Away, and JobError if an operator has to change
    something."""
    url = f"{address}/models"
    try:
        response = await http.get(url, timeout=LIST_SECONDS)
    except httpx2.TransportError as error:
        raise Away(f"the upstream {address} does not answer: {describe(error)}") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
        raise JobError("unavailable", f"{url}: {describe(error)}: check the URL") from None
    if response.status_code != 200:
        fault = fault_of(response.status_code, response.headers, response.content)
        meaning = fault.error if isinstance(fault, NotNow) else fault
        said = address.masked(meaning.message).replace("the upstream", f"the upstream {address}", 1)
        if isinstance(fault, NotNow):
            raise Away(said)
        kind = response.headers.get("content-type", "")
        if message_of(kind, response.content)[1] == LOOP:
            raise JobError("invalid_request", said, "upstream")
        if response.status_code in (401, 403):
            raise JobError("unavailable", f"{said}; is {KEY_VARIABLE} right?")
        raise JobError("unavailable", f"{said}; it has no list of models at {url}: check the URL")
    try:
        found = from_json(response.content)
        return {str(one["id"]): one for one in found["data"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        kind = response.headers.get("content-type", "no type")
        raise JobError(
            "unavailable",
            f"{url} is no list of models as OpenAI's API has it ({kind}): check the URL, which "
            "often ends in /v1",
        ) from None


def require_model(models: Models, name: str, address: Address) -> None:
    """Raises JobError if an upstream does not have a model."""
    if name not in models:
        shown = ", ".join(sorted(models)[:MAX_SHOWN]) or "none"
        more = ", …" if len(models) > MAX_SHOWN else ""
        raise JobError(
            "model_not_found",
            f"the upstream {address} does not serve '{name}'; it serves: {shown}{more} (--model "
            "QUEUE=NAME, if the queue has another name than its model)",
            "model",
        )


def describe(error: BaseException) -> str:
    """An error of the connection, in words."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def pause_before(tried: int) -> float:
    """Seconds before the upstream is asked again, twice as long each time, with a random part."""
    first, longest = PAUSES
    return min(longest, first * 2.0 ** min(tried, 20)) * random.uniform(0.5, 1.0)


class Availability:
    """Owned by the upstream's thread; any thread may read `obstacle` and `holds`.

    obstacle: why the upstream can't be used; "" if it can. names: of the models that it has to
    have.
    """

    def __init__(
        self, client: httpx2.AsyncClient, address: Address, names: Callable[[], Collection[str]]
    ) -> None:
        self._client, self._address, self._names = client, address, names
        self.obstacle = ""
        self._held_until = 0.0  # monotonic: it has asked to be sent nothing until then
        self._look: asyncio.Task[bool] | None = None
        self._return: asyncio.Task[None] | None = None

    @property
    def holds(self) -> bool:
        """True while the upstream is to be sent nothing."""
        return time.monotonic() < self._held_until

    async def usable(self) -> bool:
        """Ask the upstream, after an error that it may be the cause of."""
        if self.obstacle:
            return False
        if self._look is None:
            self._look = asyncio.create_task(self._ask())
        return await asyncio.shield(self._look)

    def suspect(self) -> None:
        """Ask the upstream, without waiting."""
        if not self.obstacle and self._look is None:
            self._look = asyncio.create_task(self._ask())

    def hold(self, seconds: float, why: str) -> None:
        """The upstream asks to be sent nothing for some seconds. If these are many, it counts as
        one that can't be used."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)
        if seconds > LONGEST_HOLD and not self.obstacle:
            until = datetime.fromtimestamp(time.time() + min(seconds, 10**8)).astimezone()
            self._close(f"{why}; it asks to wait until {until:%Y-%m-%d %H:%M:%S %z}")

    async def wait(self) -> None:
        """Until the upstream may be sent something."""
        while (left := self._held_until - time.monotonic()) > 0 and not self.obstacle:
            await asyncio.sleep(left)

    async def _ask(self) -> bool:
        try:
            obstacle = await self._find_obstacle()
        finally:
            self._look = None
        if obstacle and not self.obstacle:
            self._close(obstacle)
        return not self.obstacle

    def _close(self, obstacle: str) -> None:
        self.obstacle = obstacle
        self._return = asyncio.create_task(self._wait_for_return())

    async def _wait_for_return(self) -> None:
        tried = 0
        while True:
            held = self._held_until - time.monotonic()
            await asyncio.sleep(max(held, pause_before(tried)))
            tried += 1
            obstacle = await self._find_obstacle()
            if not obstacle:
                self.obstacle = ""
                return
            self.obstacle = obstacle

    async def _find_obstacle(self) -> str:
        try:
            models = await read_models(self._client, self._address)
            for name in self._names():
                require_model(models, name, self._address)
        except Away as error:
            return str(error)
        except JobError as error:
            return error.message
        return ""
