"""The common part of pgratelimit.asgi and pgratelimit.wsgi: keys, the fields of the answer, and refusals."""

import asyncio
import contextvars
import functools
import hashlib
import ipaddress
import json
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from .answers import Charge, Decision, JointDecision
from .calls import invalid, name_or_none, read_charge
from .errors import Error, InvalidArgument, NotReady, kind, remedy, state

T = TypeVar("T")

Failure = Literal["closed", "open"]

Fields = list[tuple[str, str]]

_QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
_PLAIN = "".join(chr(c) for c in range(32, 127) if chr(c) not in "%")

log = logging.getLogger("pgratelimit")

_told: set[str] = set()


def named(kind: str, text: str) -> str:
    """The key of a text of some kind, "kind:" and the text, or "kind-sha256:" and its hash if it is too long for a key, or no text. The
    text must be one that the program has verified, such as a user's name: a client that chooses its key has as many buckets as it likes.
    """
    data = text.encode("utf-8", "surrogatepass")
    key = f"{kind}:{text}"
    if len(kind.encode()) + 1 + len(data) <= 512 and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text):
        return key
    return f"{kind}-sha256:{hashlib.sha256(data).hexdigest()}"


def key_of_address(peer: str | None, forwarded: Collection[str], trusted_proxies: int | None, ipv6_prefix: int = 64) -> str:
    """ "ip:" and the address of the client, of IPv6 its network of ipv6_prefix bits: one customer has at least a /64.

    With n trusted proxies it is the n-th address of X-Forwarded-For from the end; the client may have written the addresses before it.
    Without so many it is the peer's, and without an address, as on a Unix socket, "ip:unknown". With None it trusts none, and warns once
    if there is the field.
    """
    if trusted_proxies is None:
        if forwarded and not _told:
            _told.add("proxies")
            log.warning("pgratelimit: a request has X-Forwarded-For, and by_ip trusts no proxy. Behind one, all clients share its address: "
                        "pass trusted_proxies=1 for one proxy, or 0 if there is none.")
        trusted_proxies = 0
    for name, value, least, most in (("trusted_proxies", trusted_proxies, 0, math.inf), ("ipv6_prefix", ipv6_prefix, 1, 128)):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise invalid(f"{name} is {value!r}; it must be a whole number from {least}{'' if most == math.inf else f' to {most}'}")
    hops = [hop.strip() for line in forwarded for hop in line.split(",")]
    candidates = [hops[-trusted_proxies]] if 0 < trusted_proxies <= len(hops) else []
    for text in (*candidates, peer or ""):
        if (address := _address(text)) is not None:
            if isinstance(address, ipaddress.IPv4Address):
                return f"ip:{address}"
            return f"ip:{ipaddress.IPv6Network((int(address), ipv6_prefix), strict=False)}"
    return "ip:unknown"


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Reads an address, perhaps with a port or a zone."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def decided(charges: Sequence[Charge], d: Decision, quotas: Collection[str] = ()) -> tuple[int | None, Fields]:
    """The status of the refusal or None, and the fields for the answer."""
    decisions = d.decisions if isinstance(d, JointDecision) else [d]
    fields: Fields = []
    policies, limits = [], []
    for policy, own in _tightest(charges, decisions).items():
        if own.shadowed:
            continue
        name = _string(policy)
        policies.append(f"{name};q={own.capacity}")
        more = "" if own.reset_after is None else f";t={_until_more(own, d, policy in quotas)}"
        limits.append(f"{name};r={max(0, own.remaining)}{more}")
    if policies:
        fields += [("RateLimit-Policy", ", ".join(policies)), ("RateLimit", ", ".join(limits))]
    if d.allowed:
        return None, fields
    if d.retry_after is not None:
        fields.append(("Retry-After", str(math.ceil(d.retry_after))))
    return 429, fields


Outcome = Literal["allowed", "denied", "failed open", "failed closed", "invalid", "abandoned"]

SETUP_PAUSE = 0.1  # seconds after which a call is tried once more that found no function: an upgrade may have been under way


class ClientGone(ConnectionError):
    """The client has hung up, and its address is not known any more. Its request is not charged, and the program does not run."""


@dataclass(slots=True)
class Event:
    """How the middleware handled a request."""

    outcome: Outcome
    """"allowed" and "denied" are decisions. Without one, the program runs after "failed open", and the client is refused after "failed
    closed", "invalid" (the request cannot be charged as it was asked for) and "abandoned" (the client has gone)."""

    status: int | None
    """Of the refusal, or None if the program runs."""

    charges: list[Charge]
    """They have the keys, which are not for clients."""

    decision: Decision | None = None

    error: BaseException | None = None
    """Why there is no decision. Its text may have the key."""

    duration: float = 0.0
    """Seconds."""

    fields: Fields = field(default_factory=list)
    """RateLimit, RateLimit-Policy and Retry-After of the answer."""


let_pass: Counter[str] = Counter()
"""The requests of this process that passed without a decision, by policy."""

_let_pass_lock = threading.Lock()


@contextmanager
def logged(name: str) -> Iterator[None]:
    """Logs what a function of the program raises: the tokens are taken, and the request goes on."""
    try:
        yield
    except Exception:
        log.exception("pgratelimit: %s failed", name)


class Threads:
    """The calls of a Limiter, each in a thread, so that nobody has to wait for its end. There are as many threads as its pool has connections.
    A call that is cancelled before it has one is not made."""

    def __init__(self, limiter: Any) -> None:
        self._limiter = limiter
        self._free: int = getattr(getattr(getattr(limiter, "_driver", None), "_db", None), "max_size", 0) or 32
        self._calls: OrderedDict[Future[Any], Callable[[], Any]] = OrderedDict()  # that wait for a thread
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the limiter, for asyncio."""
        method = getattr(self._limiter, name)

        async def call(*args: Any, **more: Any) -> Any:
            return await asyncio.wrap_future(self._begin(method, *args, **more))

        return call

    def within(self, timeout: float, method: Callable[..., T], *args: Any) -> T:
        future = self._begin(method, *args)
        try:
            return future.result(min(timeout, threading.TIMEOUT_MAX))
        finally:
            future.cancel()

    def _begin(self, method: Callable[..., T], *args: Any, **more: Any) -> "Future[T]":
        future: Future[T] = Future()
        with self._lock:
            if self._free:
                threading.Thread(target=self._work, name="pgratelimit", daemon=True).start()
                self._free -= 1
            self._calls[future] = functools.partial(contextvars.copy_context().run, method, *args, **more)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: "Future[Any]") -> None:
        with self._lock:
            self._calls.pop(future, None)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._free += 1
                    return
                future, call = self._calls.popitem(last=False)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)


class Rules:
    """What the middleware of ASGI and of WSGI have in common: what they were given, checked, and what follows from it."""

    def __init__(self, limiter: object, failure: Failure, quotas: Collection[str], **functions: Callable[..., Any] | None) -> None:
        if not hasattr(limiter, "acquire_all"):
            raise TypeError("pgratelimit: limiter must be a Limiter, an AsyncLimiter or a Combiner")
        if failure not in ("closed", "open"):
            raise ValueError('pgratelimit: failure must be "closed" or "open"')
        if isinstance(quotas, str) or not all(isinstance(name, str) for name in quotas):
            raise TypeError("pgratelimit: quotas must be a collection of names of policies")
        for name, function in functions.items():
            if not (callable(function) or function is None and name != "charges"):
                raise TypeError(f"pgratelimit: {name} must be a function, and is a {type(function).__name__}")
        self.failure, self.quotas = failure, quotas
        self.has_decided = self.has_checked = False
        self._logged: dict[str, float] = {}

    def request(self, asked: list[Any], key: Any) -> "Request | Event":
        """What the program asked for, or the refusal of what cannot be asked."""
        request = Request(self)
        try:
            request.charges = [read_charge(c) for c in asked]
        except InvalidArgument as error:
            return request.failed(error) or Event("invalid", 500, [], error=error)
        try:
            request.key = key and name_or_none(key)
            if request.key and len(request.key.encode()) > 512:
                raise invalid("idempotency_key is longer than 512 bytes; pass a hash of it")
        except InvalidArgument as error:
            return Event("invalid", 400, request.charges, error=error)
        return request

    def is_to_check(self) -> bool:
        """Whether to look now what further requests would lack, which failure="open" would hide: once, after the first decision."""
        is_first, self.has_checked = self.has_decided and not self.has_checked, self.has_checked or self.has_decided
        return is_first

    @contextmanager
    def checking(self) -> Iterator[None]:
        try:
            yield
        except NotReady as lacking:
            log.warning("%s", lacking)
        except Exception:  # a database that is away is told of elsewhere
            log.debug("pgratelimit: not checked", exc_info=True)

    def log(self, error: Exception, whose: str, sqlstate: str | None, event: Event) -> None:
        """What has a remedy at most once a minute, of each SQLSTATE, and the rest at most once a second."""
        about, pause = (sqlstate or "", 60) if whose == "setup" or remedy(sqlstate) else ("", 1)
        if not self.is_due(about, pause):
            return
        what = str(error).removeprefix("pgratelimit: ") or "no decision within the timeout" * isinstance(error, TimeoutError) or type(error).__name__
        if whose == "setup":
            what = what.partition("\n")[0]  # a hint of the server's, about casts, would mislead
        for help in getattr(error, "__notes__", None) or filter(None, [remedy(sqlstate)]):
            what = f"{what.removesuffix('.')}. {help}"
        policies = ", ".join(dict.fromkeys(c.policy for c in event.charges))
        fate = f"is refused with {event.status}" if event.status else 'passes without a decision (failure="open")'
        text = f"pgratelimit: a request{policies and ' of '}{policies} {fate}: {what}"
        log.warning("%s", text, exc_info=error if whose == "fault" and sqlstate is None else None)

    def is_due(self, about: str, pause: float) -> bool:
        """Whether nothing was logged about it for so many seconds, which begin anew now."""
        now = time.monotonic()
        if now - self._logged.get(about, -math.inf) < pause:
            return False
        self._logged[about] = now
        return True


class Request:
    """A request with charges, under a key or none."""

    def __init__(self, rules: Rules) -> None:
        self._rules, self._tries = rules, 0
        self.charges: list[Charge] = []
        self.key: str | None = None

    def send(self, acquire: Callable[..., T], acquire_all: Callable[..., T]) -> T:
        self._tries += 1
        more = {"idempotency_key": self.key} if self.key else {}
        return acquire(*self.charges[0], **more) if len(self.charges) == 1 else acquire_all(self.charges, **more)

    def decided(self, d: Decision) -> Event:
        if isinstance(d, JointDecision) and len(d.decisions) != len(self.charges):
            raise Error(f"pgratelimit: {len(d.decisions)} decisions about {len(self.charges)} charges")
        status, fields = decided(self.charges, d, self._rules.quotas)
        self._rules.has_decided = True
        for charge, own in zip(self.charges, d.decisions if isinstance(d, JointDecision) else [d]):
            is_never = not own.allowed and own.retry_after is None and 0 < own.capacity < charge.cost
            if is_never and self._rules.is_due(f"cost {charge.policy}", 60):
                text = 'pgratelimit: a request of %d tokens is never allowed: the capacity of the policy "%s" is %d'
                log.warning(text, charge.cost, charge.policy, own.capacity)
        return Event("allowed" if status is None else "denied", status, self.charges, d, fields=fields)

    def failed(self, error: Exception) -> Event | None:
        """By the table of client/testdata/failures.json; None if the call is to be sent once more after SETUP_PAUSE. An error that a client
        could provoke refuses the request in each mode."""
        whose, sqlstate = kind(error), state(error)
        if whose == "setup" and self._tries == 1:
            return None
        event = self._without_decision(error, whose, sqlstate)
        self._rules.log(error, whose, sqlstate, event)
        return event

    def _without_decision(self, error: Exception, whose: str, sqlstate: str | None) -> Event:
        if whose == "fault" or whose == "setup" and not self._rules.has_decided:
            return Event("invalid", 409 if self.key and sqlstate in ("RL002", "RL004") else 500, self.charges, error=error)
        if self._rules.failure == "closed":
            return Event("failed closed", 503, self.charges, error=error)
        with _let_pass_lock:
            let_pass.update({c.policy for c in self.charges})
        return Event("failed open", None, self.charges, error=error)


_DENIED = "Request cannot be satisfied as assigned quota has been exceeded"


def title(event: Event) -> str:
    return _DENIED if event.outcome == "denied" else HTTPStatus(event.status or 500).phrase


def refusal(event: Event) -> tuple[Fields, bytes]:
    """The fields of a refusal, but for those of the event, and its body: problem+json, which names the policies that refused."""
    status = event.status or 500
    problem: dict[str, object] = {"type": "about:blank", "title": title(event), "status": status}
    if event.outcome == "denied" and event.decision is not None:
        d = event.decision
        decisions = d.decisions if isinstance(d, JointDecision) else [d]
        violated = dict.fromkeys(_public(c.policy) for c, own in zip(event.charges, decisions) if not own.allowed)
        problem = {"type": _QUOTA_EXCEEDED, "title": title(event), "status": status, "violated-policies": list(violated)}
    body = json.dumps(problem).encode() + b"\n"
    return [
        ("Content-Type", "application/problem+json"), ("X-Content-Type-Options", "nosniff"), ("Content-Length", str(len(body)))
    ], body


def _tightest(charges: Sequence[Charge], decisions: Sequence[Decision]) -> dict[str, Decision]:
    """Of each policy the bucket that holds the least, and of several such buckets the one that is full last."""

    def rank(d: Decision) -> tuple[int, float]:
        return d.remaining, -math.inf if d.reset_after is None else -d.reset_after

    tightest: dict[str, Decision] = {}
    for charge, d in zip(charges, decisions):
        if charge.policy not in tightest or rank(d) < rank(tightest[charge.policy]):
            tightest[charge.policy] = d
    return tightest


def _until_more(d: Decision, whole: Decision, is_quota: bool) -> int:
    """The time that a token takes to come, on average until the bucket is full: seconds, rounded up, at least 1, at most Retry-After.
    The tokens of a quota all come at its turn."""
    missing = 1 if is_quota else max(1, d.capacity - d.remaining)
    t = max(1, -(-round((d.reset_after or 0) * 1_000_000) // (missing * 1_000_000)))
    return min(t, math.ceil(whole.retry_after)) if not whole.allowed and whole.retry_after is not None else t


def _public(policy: str) -> str:
    """The name of a policy for clients: printable ASCII, with other bytes as in a URL."""
    return quote(policy, safe=_PLAIN)


def _string(policy: str) -> str:
    """A string of RFC 9651."""
    return '"' + _public(policy).replace("\\", "\\\\").replace('"', '\\"') + '"'
