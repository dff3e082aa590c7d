"""One line per view: a dependency for FastAPI, and decorators for Starlette, Flask and Django.

    @app.get("/", dependencies=[fastapi_limit("postgresql://app@localhost/app", "api", failure="open")])

    @flask_limit("postgresql://app@localhost/app", "api", failure="open")
    def view(): ...

Each takes a limiter, or what one is made on (a URL, a pool or a connection), and the name of a policy, and charges cost tokens, a number or
a function of the request, to the bucket that key, a function of the framework's request, names. By default that is the client's address
behind so many trusted_proxies, and in Django first the user who has logged in. A request that the bucket does not cover is 429; that, and
the answers of the view, have the fields of pgratelimit.asgi. failure is the fate of a request without a decision, as there.

A request waits timeout seconds at most for its decision; on a connection of the program, for as long as the connection does. A Limiter
serves views that are async, too, in threads. Of an async pool a Combiner is made. An AsyncLimiter or a Combiner serves FastAPI, Starlette, and
async views of Django. quotas are as in pgratelimit.asgi.
"""

import functools
import inspect
import warnings
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar, cast

from . import asgi, drivers, http, wsgi
from .calls import Duration, text, whole
from .combiner import Combiner
from .http import Event, Failure, named
from .limiter import AsyncLimiter, Limiter

__all__ = ["django_limit", "fastapi_limit", "flask_limit", "starlette_limit"]

View = TypeVar("View", bound=Callable[..., Any])
Key = Callable[[Any], str] | None
Cost = int | Callable[[Any], int]


class _Decider:
    """Decides about requests, without and with asyncio."""

    def __init__(
        self, limiter: Any, policy: str, key: Callable[[Any], str], cost: Cost, trusted_proxies: int | None,
        failure: Failure, timeout: Duration, quotas: Collection[str],
    ) -> None:
        text("policy", policy)  # what is wrong is told where the view is written, and not by each request
        if not callable(key):
            raise TypeError(f"pgratelimit: key must be a function of the request, and is of type {type(key).__name__}")
        if not callable(cost):
            whole("cost", cost)
        http.key_of_address(None, (), trusted_proxies)

        def charges(request: Any) -> list[tuple[str, str, int]]:
            if not isinstance(name := key(request), str):
                raise TypeError(f"pgratelimit: key of the view returned a {type(name).__name__}; return a text, from a function that is not async")
            return [(policy, name, cost(request) if callable(cost) else cost)]

        if not hasattr(limiter, "acquire_all"):
            limiter = Combiner(limiter) if drivers.is_async(limiter) else Limiter(limiter)
        self.limiter, self.is_async = limiter, isinstance(limiter, AsyncLimiter) or inspect.iscoroutinefunction(limiter.acquire)
        options: dict[str, Any] = {"app": None, "charges": charges, "failure": failure, "timeout": timeout, "quotas": quotas}
        self.soon: Callable[[Any], Awaitable[Any]] = asgi.RateLimit(limiter=limiter if self.is_async else http.Threads(limiter), **options)._decide
        if not self.is_async:
            self.now: Callable[[Any], Any] = wsgi.RateLimit(limiter=limiter, **options)._decide


def fastapi_limit(
    limiter: Any, policy: str, *, key: Key = None, cost: Cost = 1, failure: Failure, timeout: Duration = 1, quotas: Collection[str] = (),
    trusted_proxies: int | None = None,
) -> Any:
    """A dependency of a view, a router or the application. Its refusal is an HTTPException, which handlers of the program may show in
    their own way."""
    from fastapi import Depends, HTTPException, Request, Response

    decider = _Decider(limiter, policy, key or (lambda r: asgi.by_ip(r.scope, trusted_proxies)), cost, trusted_proxies, failure, timeout, quotas)

    async def limited(request: Request, response: Response) -> None:
        event = await decider.soon(request)
        if event.status is not None:
            raise HTTPException(event.status, http.title(event), headers=dict(event.fields))
        for name, value in event.fields:
            response.headers.append(name, value)

    return Depends(limited)


def starlette_limit(
    limiter: Any, policy: str, *, key: Key = None, cost: Cost = 1, failure: Failure, timeout: Duration = 1, quotas: Collection[str] = (),
    trusted_proxies: int | None = None,
) -> Callable[[View], View]:
    """A decorator for an endpoint, or for a method of an HTTPEndpoint."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response

    decider = _Decider(limiter, policy, key or (lambda r: asgi.by_ip(r.scope, trusted_proxies)), cost, trusted_proxies, failure, timeout, quotas)

    def decorate(view: Any) -> Any:
        @functools.wraps(view)
        async def limited(*args: Any) -> Any:
            event = await decider.soon(args[-1])
            if event.status is not None:
                fields, body = http.refusal(event)
                response = Response(body, event.status, dict(fields))
            else:
                response = await (view(*args) if inspect.iscoroutinefunction(view) else run_in_threadpool(view, *args))
            for name, value in event.fields:
                response.headers.append(name, value)
            return response

        return limited

    return decorate


def flask_limit(
    limiter: Any, policy: str, *, key: Key = None, cost: Cost = 1, failure: Failure, timeout: Duration = 1, quotas: Collection[str] = (),
    trusted_proxies: int | None = None,
) -> Callable[[View], View]:
    """A decorator below @app.route, or in the decorators of a MethodView."""
    from flask import current_app, request

    decider = _Decider(limiter, policy, key or (lambda r: wsgi.by_ip(r.environ, trusted_proxies)), cost, trusted_proxies, failure, timeout, quotas)
    if decider.is_async:
        raise TypeError("pgratelimit: limiter must be a Limiter: Flask runs each async view in a loop of its own")

    def decorate(view: Any) -> Any:
        @functools.wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:
            event = decider.now(request)
            if event.status is not None:
                fields, body = http.refusal(event)
                response = current_app.response_class(body, event.status, fields)
            else:
                response = current_app.make_response(current_app.ensure_sync(view)(*args, **kwargs))
            response.headers.extend(event.fields)
            return response

        return limited

    return decorate


def django_limit(
    limiter: Any, policy: str, *, key: Key = None, cost: Cost = 1, failure: Failure, timeout: Duration = 1, quotas: Collection[str] = (),
    trusted_proxies: int | None = None,
) -> Callable[[View], View]:
    """A decorator for a view, a method of one, or a class of views. Under ATOMIC_REQUESTS a limiter on django.db.connection would give the
    tokens of a view that fails back, and lock the bucket until it ends: a RuntimeWarning says so, once."""
    from asgiref.sync import sync_to_async
    from django.http import HttpResponse

    def user_or_ip(request: Any) -> str:
        user = getattr(request, "user", None)
        return named("user", str(user.pk)) if user is not None and user.is_authenticated else wsgi.by_ip(request.META, trusted_proxies)

    decider = _Decider(limiter, policy, key or user_or_ip, cost, trusted_proxies, failure, timeout, quotas)
    warned = False

    def decide(request: Any) -> Event:
        nonlocal warned
        if not warned and isinstance(decider.limiter, Limiter) and decider.limiter.in_transaction:
            warned = True
            text = "pgratelimit: the view's transaction takes the tokens, and gives them back if the view fails: pass a limiter on a pool, or "
            warnings.warn(text + "decorate the view with django.db.transaction.non_atomic_requests, too.", RuntimeWarning, stacklevel=3)
        return decider.now(request)

    def refused(event: Event) -> Any:
        fields, body = http.refusal(event)
        response = HttpResponse(body, status=event.status)
        for name, value in fields:
            response[name] = value
        return response

    def finished(event: Event, response: Any) -> Any:
        for name, value in event.fields:
            response[name] = f"{response[name]}, {value}" if response.has_header(name) else value
        return response

    def decorate(view: Any) -> Any:
        if inspect.isclass(view):
            cast(Any, view).dispatch = wrap(cast(Any, view).dispatch, bool(getattr(view, "view_is_async", False)))
            return view
        return wrap(view, inspect.iscoroutinefunction(view))

    def wrap(view: Any, is_async: bool) -> Any:
        if decider.is_async and not is_async:
            raise TypeError("pgratelimit: limiter must be a Limiter, because the view is not async")

        @functools.wraps(view)
        async def limited_async(*args: Any, **kwargs: Any) -> Any:
            request = _request(args)
            event = await (decider.soon(request) if decider.is_async else sync_to_async(decide)(request))
            return finished(event, refused(event) if event.status is not None else await view(*args, **kwargs))

        @functools.wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:
            event = decide(_request(args))
            return finished(event, refused(event) if event.status is not None else view(*args, **kwargs))

        return limited_async if is_async else limited

    return decorate


def _request(args: tuple[Any, ...]) -> Any:
    """The request among the arguments of a view, or of a method, which has self before it."""
    return next(arg for arg in args if hasattr(arg, "META"))
