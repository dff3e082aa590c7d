"""Middleware for WSGI: Flask, Django.

    app.wsgi_app = RateLimit(app.wsgi_app, limiter, lambda environ: [("api", by_ip(environ))], failure="open")
"""

from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from typing import Any

from . import http
from .answers import Charge
from .calls import charged
from .http import Failure, named
from .limiter import Acquirer

__all__ = ["RateLimit", "by_ip", "named"]

Environ = dict[str, Any]


def by_ip(environ: Environ, trusted_proxies: int = 0) -> str:
    """As asgi.by_ip."""
    forwarded = environ.get("HTTP_X_FORWARDED_FOR")
    return http.key_of_address(environ.get("REMOTE_ADDR"), [forwarded] if forwarded else [], trusted_proxies)


class RateLimit:
    """asgi.RateLimit for WSGI. A call has no timeout of its own: bound it by connect_timeout, by the timeout of the pool, and by
    lock_timeout and statement_timeout of its sessions."""

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        limiter: Acquirer,
        charges: Callable[[Environ], Iterable[Charge | tuple[str, str] | tuple[str, str, int]]],
        *,
        failure: Failure,
        quotas: Collection[str] = (),
    ) -> None:
        http.check(limiter, failure)
        self._app, self._limiter, self._charges, self._failure, self._quotas = app, limiter, charges, failure, quotas

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not (asked := list(self._charges(environ))):
            return self._app(environ, start_response)
        try:
            charges = [charged(c) for c in asked]
            decision = self._limiter.acquire(*charges[0]) if len(charges) == 1 else self._limiter.acquire_all(charges)
            status, fields, body = http.decided(charges, decision, self._quotas)
        except Exception as error:
            status, fields, body = http.failed(self._failure, error)
        if status is not None:
            start_response(f"{status} {HTTPStatus(status).phrase}", fields)
            return [body]

        def start_with_fields(status: str, headers: http.Fields, *more: Any) -> Any:
            return start_response(status, [*headers, *fields], *more)

        return self._app(environ, start_with_fields)
