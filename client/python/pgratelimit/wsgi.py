"""Middleware for WSGI: Flask, Django.

    app.wsgi_app = RateLimit(app.wsgi_app, limiter, lambda environ: [("api", by_ip(environ))], failure="open")
"""

import functools
import inspect
import time
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from typing import Any

from . import http
from .answers import Charge
from .calls import Duration, length
from .http import Event, Failure, Rules, let_pass, named
from .limiter import Acquirer

__all__ = ["Event", "RateLimit", "by_ip", "let_pass", "named"]

Environ = dict[str, Any]


def by_ip(environ: Environ, trusted_proxies: int | None = None, ipv6_prefix: int = 64) -> str:
    """As asgi.by_ip. Servers of WSGI know the address of a client that has hung up, too."""
    forwarded = environ.get("HTTP_X_FORWARDED_FOR")
    return http.key_of_address(environ.get("REMOTE_ADDR"), [forwarded] if forwarded else [], trusted_proxies, ipv6_prefix)


class RateLimit:
    """asgi.RateLimit for WSGI, with functions of environ that are not async; refuse_with is a WSGI application with the Event as a third
    argument. A call on a pool is made in a thread of its own, and may go on after the timeout. On a connection it is made in the thread of the
    request, and has no timeout but those of the connection, such as lock_timeout and statement_timeout."""

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        limiter: Acquirer,
        charges: Callable[[Environ], Iterable[Charge | tuple[str, str] | tuple[str, str, int]]],
        *,
        failure: Failure,
        timeout: Duration = 1,
        quotas: Collection[str] = (),
        idempotency_key: Callable[[Environ], str | None] | None = None,
        observe: Callable[[Environ, Event], Any] | None = None,
        refuse_with: Callable[[Environ, Callable[..., Any], Event], Iterable[bytes]] | None = None,
    ) -> None:
        functions = {"charges": charges, "idempotency_key": idempotency_key, "observe": observe, "refuse_with": refuse_with}
        self._rules = Rules(limiter, failure, quotas, **functions)
        for name, function in (*functions.items(), ("limiter.acquire", getattr(limiter, "acquire", None))):
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError(f"pgratelimit: {name} must not be async under WSGI")
        self._app, self._limiter, self._charges, seconds = app, limiter, charges, length("timeout", timeout)
        self._call: Callable[..., Any] = functools.partial(http.Threads(limiter).within, seconds)
        if not getattr(getattr(limiter, "_driver", None), "is_pool", True):
            self._call = lambda method, *args: method(*args)
        self._idempotency_key, self._observe, self._refuse = idempotency_key, observe, refuse_with

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        began = time.monotonic()
        event = self._decide(environ)
        if event is None:
            return self._app(environ, start_response)
        more_fields = event.fields
        event.duration = time.monotonic() - began
        if self._observe is not None:
            with http.logged("observe"):
                self._observe(environ, event)

        def start_with_fields(status: str, headers: http.Fields, *more: Any, **named: Any) -> Any:
            return start_response(status, [*headers, *more_fields], *more, **named)

        if event.status is None:
            return self._app(environ, start_with_fields)
        if self._refuse is not None:
            return self._refuse(environ, start_with_fields, event)
        fields, body = http.refusal(event)
        start_with_fields(f"{event.status} {HTTPStatus(event.status).phrase}", fields)
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [body]

    def _decide(self, environ: Environ) -> Event | None:
        """As asgi.RateLimit."""
        if not (asked := list(self._charges(environ))):
            return None
        request = self._rules.request(asked, None if self._idempotency_key is None else self._idempotency_key(environ))
        while isinstance(request, http.Request):
            try:
                made = request.decided(self._call(request.send, self._limiter.acquire, self._limiter.acquire_all))
                if self._rules.is_to_check() and hasattr(self._limiter, "check"):
                    with self._rules.checking():
                        self._call(self._limiter.check)
                return made
            except Exception as error:
                if event := request.failed(error):
                    return event
            time.sleep(http.SETUP_PAUSE)
        return request
