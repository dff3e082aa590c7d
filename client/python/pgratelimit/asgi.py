"""Middleware for ASGI: Starlette, FastAPI, Quart, Django.

    app = RateLimit(app, limiter, lambda scope: [("api", by_ip(scope))], failure="open", timeout=0.1)
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any

from . import http
from .answers import Charge
from .calls import charged
from .http import Failure, named
from .limiter import AsyncAcquirer

__all__ = ["RateLimit", "by_ip", "named"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def by_ip(scope: Scope, trusted_proxies: int = 0) -> str:
    """A key such as "ip:192.0.2.1" or "ip:2001:db8::/64". Count exactly the proxies that every request passes: with too many, clients
    choose their address."""
    client = scope.get("client")
    forwarded = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
    return http.key_of_address(client and client[0], forwarded, trusted_proxies)


class RateLimit:
    """Charges each HTTP request before app gets it, and refuses it with 429 and problem+json if a bucket does not cover its charge.

    charges returns the charges of a request, all of which are taken or none, by its scope. A request without charges passes, and so does
    everything but HTTP. failure is the fate of a request that has no decision within timeout seconds: "closed" refuses it with 503,
    "open" lets it pass. quotas are the policies with turns: their field t is the time until the turn.
    """

    def __init__(
        self,
        app: App,
        limiter: AsyncAcquirer,
        charges: Callable[[Scope], Iterable[Charge | tuple[str, str] | tuple[str, str, int]]],
        *,
        failure: Failure,
        timeout: float,
        quotas: Collection[str] = (),
    ) -> None:
        http.check(limiter, failure)
        self._app, self._limiter, self._charges, self._failure, self._timeout = app, limiter, charges, failure, timeout
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (asked := list(self._charges(scope))):
            await self._app(scope, receive, send)
            return
        try:
            charges = [charged(c) for c in asked]
            async with asyncio.timeout(self._timeout):
                decision = await (self._limiter.acquire(*charges[0]) if len(charges) == 1 else self._limiter.acquire_all(charges))
            status, fields, body = http.decided(charges, decision, self._quotas)
        except Exception as error:
            status, fields, body = http.failed(self._failure, error)
        headers = [(name.lower().encode(), value.encode()) for name, value in fields]
        if status is not None:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return

        async def send_with_fields(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}  # the app may send its own again
            await send(message)

        await self._app(scope, receive, send_with_fields if headers else send)
