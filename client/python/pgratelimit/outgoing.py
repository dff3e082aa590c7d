"""Limits for requests to an upstream, such as the API of a vendor.

    client = httpx.Client(transport=LimitedTransport(httpx.HTTPTransport(), limiter, lambda request: [("vendor", "key:1")]))
    session.mount("https://api.example.org/", LimitedAdapter(requests.adapters.HTTPAdapter(), limiter, lambda request: [("vendor", "key:1")]))

Each request first takes the tokens of the charges that a function of it returns, in one acquire_all, or waits until they are there. In a
process, requests with the same buckets wait in line, and one of them asks. Nothing is sent if the tokens would come after max_wait seconds
or never (TooLate), or if the limiter fails. When a response asks to wait (retry_after), the bucket of the first charge is paused for so long,
at most max_pause. There are no retries: the caller gets each response, a 429 too, when its pause is committed. A failed pause is logged.
"""

import asyncio
import datetime
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from .answers import Charge, JointDecision, Reservation
from .calls import LONGEST, Duration, length, read_charge
from .errors import TooLate
from .limiter import AsyncLimiter, Limiter

_NUMBER = re.compile(r"[ \t]*([0-9]+(?:\.[0-9]+)?)[ \t]*")
_DAY_FIRST = re.compile(r"(?:Sun|Mon|Tue|Wed|Thu|Fri|Sat)[a-z]*, ([0-9]{2})([ -])([A-Z][a-z]{2})\2([0-9]{2}|[0-9]{4}) (\S+) GMT")
_ASCTIME = re.compile(r"(?:Sun|Mon|Tue|Wed|Thu|Fri|Sat) ([A-Z][a-z]{2}) ([ 0-9][0-9]) (\S+) ([0-9]{4})")
_ISO = re.compile(r"[0-9]{4}(?:-[0-9]{2}){2}T(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:[0-9]{2})")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*"?')


class Fields(Protocol):
    def items(self) -> Iterable[tuple[str, str]]: ...


def retry_after(status: int, headers: Fields) -> float:
    """How many seconds an answer asks its client to wait, or 0. Retry-After of a status of 400 or more wins if it can be read, then
    Retry-After-Ms or X-Ms-Retry-After-Ms, of such a status, too. Otherwise it is the longest wait of RateLimit, and of RateLimit-Reset,
    X-RateLimit-Reset and X-Rate-Limit-Reset, if nothing is left.

    A value is a number of decimal digits with or without a fraction, an HTTP date, or a date of RFC 3339. A number up to 365 days, behind
    X- up to a day, is seconds; a number within 365 days of now is Unix time in seconds or milliseconds. Now is the answer's Date, or the
    local clock if there is no Date within 365 days of the instant. Any other value, a list, or a field that is sent twice is no wait.
    """
    fields: dict[str, str] = {}
    for name, value in headers.items():
        name = name.lower()
        fields[name] = f"{fields[name]}, {value}" if name in fields else value

    # The first clock that is near an instant measures it.
    clocks = [now for now in (_date(fields.get("date", "")), time.time()) if now is not None]

    def wait(name: str, text: str) -> float | None:
        n = _number(text)
        if n is not None and n <= (86400 if name.startswith("x-") else LONGEST):
            return n  # behind X- no standard says seconds: 600000 has been seen for milliseconds
        instants = [_date(text)] if n is None else [n, n / 1000]
        return next((max(0.0, at - now) for now in clocks for at in instants if at is not None and abs(at - now) <= LONGEST), None)

    if status >= 400:
        if (asked := wait("retry-after", fields.get("retry-after", ""))) is not None:
            return asked
        for name in ("retry-after-ms", "x-ms-retry-after-ms"):
            if (ms := _number(fields.get(name, ""))) is not None and ms <= LONGEST * 1000:
                return ms / 1000

    resets = [(f"{x}-", fields.get(f"{x}-remaining", ""), fields.get(f"{x}-reset", "")) for x in ("ratelimit", "x-ratelimit", "x-rate-limit")]
    listed = _QUOTED.sub("", fields.get("ratelimit", ""))
    for item in [listed.replace(",", ";")] if "remaining=" in listed else listed.split(","):  # the members of a dictionary are of one policy
        of = {name.strip(): value for name, _, value in (parameter.partition("=") for parameter in item.split(";"))}
        resets += [("ratelimit", of.get(left, ""), of.get(reset, "")) for left, reset in (("r", "t"), ("remaining", "reset"))]
    return max((wait(name, reset) or 0.0 for name, remaining, reset in resets if _number(remaining) == 0), default=0.0)


Charges = Callable[[Any], Iterable[Charge | tuple[str, str] | tuple[str, str, int]]]

log = logging.getLogger("pgratelimit")


class _Limited:
    """What wraps something that sends requests: everything but sending is that one's."""

    def __init__(
        self, sender: Any, limiter: Any, charges: Charges, *, max_wait: Duration = math.inf, max_pause: Duration = 3600.0,
        pause_for: Callable[[int, Fields], float] = retry_after,
    ) -> None:
        self._sender, self._limiter, self._charges = sender, limiter, charges
        self._max_wait = min(length("max_wait", max_wait, zero=True), LONGEST)
        self._max_pause, self._pause_for = min(length("max_pause", max_pause), LONGEST), pause_for
        self._lines: dict[tuple[Charge, ...], list[Any]] = {}  # a lock, and how many have it or wait for it, by the buckets
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    @contextmanager
    def _place(self, charges: list[Charge], new_lock: Callable[[], Any]) -> Iterator[Any]:
        """The lock of the line for these buckets."""
        name = tuple(Charge(c.policy, c.key) for c in charges)
        with self._lock:
            line = self._lines.setdefault(name, [new_lock(), 0])
            line[1] += 1
        try:
            yield line[0]
        finally:
            with self._lock:
                line[1] -= 1
                if line[1] == 0:
                    del self._lines[name]

    def _pause(self, status: int, headers: Fields) -> float:
        """Seconds; 0 is no pause."""
        seconds = min(self._pause_for(status, headers), self._max_pause)
        return max(seconds, 0.001) if seconds > 0 else 0.0


def _wait(d: JointDecision, charges: list[Charge], until: float) -> float:
    if d.retry_after is None or d.retry_after > until - time.monotonic():
        of = charges[d.binding]
        raise TooLate(Reservation(False, d.remaining, d.retry_after, d.reset_after, d.capacity, False, False), of.cost, of.policy)
    return d.retry_after


class _Sync(_Limited):
    def __init__(self, sender: Any, limiter: Limiter, charges: Charges, **more: Any) -> None:
        if not isinstance(limiter, Limiter):
            raise TypeError("pgratelimit: limiter must be a Limiter")
        super().__init__(sender, limiter, charges, **more)

    def _send(self, request: Any, send: Callable[[], Any]) -> Any:
        charges = [read_charge(c) for c in self._charges(request)]
        if not charges:
            return send()
        until = time.monotonic() + self._max_wait
        with self._place(charges, threading.Lock) as lock:
            is_first = lock.acquire(timeout=self._max_wait)  # another one asks once, at its end
            try:
                while not (d := self._limiter.acquire_all(charges)):
                    time.sleep(_wait(d, charges, until))
            finally:
                if is_first:
                    lock.release()
        response = send()
        try:
            if seconds := self._pause(int(response.status_code), response.headers):
                self._limiter.pause(charges[0].policy, charges[0].key, seconds)
        except Exception:  # the response is there
            log.exception("pgratelimit: bucket not paused")
        return response


class LimitedTransport(_Sync):
    """A transport of httpx.Client around another, with the buckets of a Limiter."""

    def handle_request(self, request: Any) -> Any:
        return self._send(request, lambda: self._sender.handle_request(request))

    def __enter__(self) -> "LimitedTransport":
        self._sender.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._sender.__exit__(*error)


class LimitedAdapter(_Sync):
    """An adapter of requests.Session around another, with the buckets of a Limiter."""

    def send(self, request: Any, **more: Any) -> Any:
        return self._send(request, lambda: self._sender.send(request, **more))


class AsyncLimitedTransport(_Limited):
    """A transport of httpx.AsyncClient around another, with the buckets of an AsyncLimiter or a Combiner. A request that is cancelled while
    it asks may have taken its tokens."""

    def __init__(self, sender: Any, limiter: AsyncLimiter, charges: Charges, **more: Any) -> None:
        if not isinstance(limiter, AsyncLimiter):
            raise TypeError("pgratelimit: limiter must be an AsyncLimiter or a Combiner")
        super().__init__(sender, limiter, charges, **more)

    async def handle_async_request(self, request: Any) -> Any:
        charges = [read_charge(c) for c in self._charges(request)]
        if not charges:
            return await self._sender.handle_async_request(request)
        until, is_first = time.monotonic() + self._max_wait, False
        with self._place(charges, asyncio.Lock) as lock:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._max_wait):
                    is_first = await lock.acquire()
            try:
                while not (d := await self._limiter.acquire_all(charges)):
                    await asyncio.sleep(_wait(d, charges, until))
            finally:
                if is_first:
                    lock.release()
        response = await self._sender.handle_async_request(request)
        try:
            if seconds := self._pause(int(response.status_code), response.headers):
                await self._limiter.pause(charges[0].policy, charges[0].key, seconds)
        except Exception:
            log.exception("pgratelimit: bucket not paused")
        return response

    async def __aenter__(self) -> "AsyncLimitedTransport":
        await self._sender.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._sender.__aexit__(*error)


def _number(text: str) -> float | None:
    return float(match[1]) if (match := _NUMBER.fullmatch(text)) else None


def _date(text: str) -> float | None:
    """Unix time of the three forms of an HTTP date, and of RFC 3339 with or without seconds."""
    text = text.strip(" \t")
    if match := _DAY_FIRST.fullmatch(text):
        text = _iso(match[4], match[3], match[1], match[5])
    elif match := _ASCTIME.fullmatch(text):
        text = _iso(match[4], match[1], match[2], match[3])
    try:
        return datetime.datetime.fromisoformat(text).timestamp() if _ISO.fullmatch(text) else None
    except (ValueError, OverflowError):
        return None


def _iso(year: str, month: str, day: str, time_of_day: str) -> str:
    number = "JanFebMarAprMayJunJulAugSepOctNovDec".find(month) // 3 + 1
    return f"{year[-4:-2] or '20'}{year[-2:]}-{number:02}-{day.replace(' ', '0')}T{time_of_day}Z"
