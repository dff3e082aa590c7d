"""Middleware for ASGI: Starlette, FastAPI, Quart, Django.

    app = RateLimit(app, limiter, lambda scope: [("api", by_ip(scope))], failure="open", timeout=0.1)
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, MutableMapping
from typing import Any

from . import http
from .calls import Duration, length
from .http import Event, Failure, Rules, let_pass, named
from .limiter import AsyncAcquirer, Limiter

__all__ = ["Event", "RateLimit", "by_ip", "let_pass", "named"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def by_ip(scope: Scope, trusted_proxies: int | None = None, ipv6_prefix: int = 64) -> str:
    """A key such as "ip:192.0.2.1" or "ip:2001:db8::/64". Count exactly the proxies that every request passes: with too many, clients
    choose their address. Without a number, no proxy is trusted, and a warning is logged once if a request has X-Forwarded-For.

    A connection without an address, such as a Unix socket, is "ip:unknown". A client on TCP that has hung up has none, either: the
    middleware then drops the request, and charges nobody."""
    client, server = scope.get("client"), scope.get("server")
    forwarded = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
    key = http.key_of_address(client and client[0], forwarded, trusted_proxies, ipv6_prefix)
    if not client and server and server[1] is not None and key == "ip:unknown":
        raise http.ClientGone("the client has hung up")
    return key


class RateLimit:
    """Charges each HTTP request and each handshake of a WebSocket before app gets it, and refuses it with 429 and problem+json if a
    bucket does not cover its charge.

    charges returns the charges of a request, all of which are taken or none, by its scope. It may be an async function or a generator. A
    request without charges passes, and so does what is neither HTTP nor a WebSocket. failure is the fate of a request that has no
    decision within timeout seconds: "closed" refuses it with 503, "open" lets it pass, and let_pass counts it. Errors of the request and
    of the program are 500 with either, and so is a missing function or grant until there was a decision. quotas are the policies with
    turns: their field t is the time until the turn.

    idempotency_key returns the key under which a request is charged, or None: a repeat is not charged again, so the program must choose
    it, not the client. observe is called with the scope and an Event for each request that has charges. refuse_with answers in place of
    problem+json: an ASGI application with the Event as a fourth argument, whose answer gets the fields. All may be async.

    A refused WebSocket gets the same answer where the server can send one (websocket.http.response), and else 403.
    """

    def __init__(
        self,
        app: App,
        limiter: AsyncAcquirer,
        charges: Callable[[Scope], Any],
        *,
        failure: Failure,
        timeout: Duration,
        quotas: Collection[str] = (),
        idempotency_key: Callable[[Scope], Any] | None = None,
        observe: Callable[[Scope, Event], Any] | None = None,
        refuse_with: Callable[[Scope, Receive, Send, Event], Awaitable[None]] | None = None,
    ) -> None:
        self._rules = Rules(limiter, failure, quotas, charges=charges, idempotency_key=idempotency_key, observe=observe, refuse_with=refuse_with)
        if isinstance(limiter, Limiter):
            raise TypeError("pgratelimit: limiter must be an AsyncLimiter or a Combiner: a Limiter would stop the event loop")
        self._app, self._limiter, self._charges, self._timeout = app, limiter, charges, length("timeout", timeout)
        self._idempotency_key, self._observe, self._refuse = idempotency_key, observe, refuse_with

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        if scope["type"] not in ("http", "websocket") or (event := await self._decide(scope)) is None:
            await self._app(scope, receive, send)
            return
        event.duration = time.monotonic() - began
        if self._observe is not None:
            with http.logged("observe"):
                await _awaited(self._observe(scope, event))
        headers = _encoded(event.fields)

        async def send_with_fields(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                message = {**message, "headers": [*message.get("headers", ()), *headers]}  # the app may send its own again
            await send(message)

        if event.status is None:
            await self._app(scope, receive, send_with_fields if headers else send)
        elif scope["type"] == "websocket" and "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1013, "reason": ""})
        elif self._refuse is not None:
            await self._refuse(scope, receive, send_with_fields, event)
        else:
            prefix = "websocket." if scope["type"] == "websocket" else ""
            fields, body = http.refusal(event)
            await send_with_fields({"type": prefix + "http.response.start", "status": event.status, "headers": _encoded(fields)})
            await send({"type": prefix + "http.response.body", "body": b"" if scope.get("method") == "HEAD" else body})

    async def _decide(self, scope: Scope) -> Event | None:
        """What becomes of the request, or None if it has no charges. Errors of the program's functions are its own."""
        try:
            asked = await _awaited(self._charges(scope))
            asked = [c async for c in asked] if isinstance(asked, AsyncIterable) else list(asked)
        except http.ClientGone as gone:
            return Event("abandoned", 503, [], error=gone)
        if not asked:
            return None
        key = None if self._idempotency_key is None else await _awaited(self._idempotency_key(scope))
        request = self._rules.request(asked, key)
        while isinstance(request, http.Request):
            try:
                async with asyncio.timeout(self._timeout):
                    decision = await request.send(self._limiter.acquire, self._limiter.acquire_all)
                made = request.decided(decision)
                if self._rules.is_to_check() and hasattr(self._limiter, "check"):
                    with self._rules.checking():
                        async with asyncio.timeout(self._timeout):
                            await self._limiter.check()
                return made
            except Exception as error:
                if event := request.failed(error):
                    return event
            await asyncio.sleep(http.SETUP_PAUSE)
        return request


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _encoded(fields: http.Fields) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in fields]
