"""The common part of pgratelimit.asgi and pgratelimit.wsgi: keys, the fields of the answer, and refusals."""

import hashlib
import ipaddress
import json
import logging
import math
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Literal
from urllib.parse import quote

from .answers import Charge, Decision, JointDecision
from .errors import Error, IdempotencyMismatch, InvalidArgument, UnknownPolicy

Failure = Literal["closed", "open"]

Fields = list[tuple[str, str]]

_QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
_TITLES = {500: "Internal Server Error", 503: "Service Unavailable"}
_PLAIN = "".join(chr(c) for c in range(32, 127) if chr(c) not in "%")

log = logging.getLogger("pgratelimit")
_logged = -math.inf


def named(kind: str, text: str) -> str:
    """The key of a text of some kind, "kind:" and the text, or "kind-sha256:" and its hash if it is too long for a key, or no text. The
    text must be one that the program has verified, such as a user's name: a client that chooses its key has as many buckets as it likes.
    """
    data = text.encode("utf-8", "surrogatepass")
    key = f"{kind}:{text}"
    if len(kind.encode()) + 1 + len(data) <= 512 and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text):
        return key
    return f"{kind}-sha256:{hashlib.sha256(data).hexdigest()}"


def key_of_address(peer: str | None, forwarded: Iterable[str], trusted_proxies: int) -> str:
    """ "ip:" and the address of the client, of IPv6 its /64: one customer has at least that.

    With n trusted proxies it is the n-th address of X-Forwarded-For from the end; the client may have written the addresses before it.
    Without so many it is the peer's, and without an address, as on a Unix socket, "ip:unknown".
    """
    hops = [hop.strip() for line in forwarded for hop in line.split(",")]
    candidates = [hops[-trusted_proxies]] if 0 < trusted_proxies <= len(hops) else []
    for text in (*candidates, peer or ""):
        if (address := _address(text)) is not None:
            if isinstance(address, ipaddress.IPv4Address):
                return f"ip:{address}"
            return f"ip:{ipaddress.IPv6Network((int(address), 64), strict=False)}"
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


def decided(charges: Sequence[Charge], d: Decision, quotas: Collection[str] = ()) -> tuple[int | None, Fields, bytes]:
    """The status of the refusal or None, the fields for the answer, and the body of the refusal."""
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
        return None, fields, b""
    if d.retry_after is not None:
        fields.append(("Retry-After", str(math.ceil(d.retry_after))))
    violated = dict.fromkeys(_public(c.policy) for c, own in zip(charges, decisions) if not own.allowed)
    return 429, fields + _PROBLEM, _problem(
        429, _QUOTA_EXCEEDED, "Request cannot be satisfied as assigned quota has been exceeded", {"violated-policies": list(violated)}
    )


def failed(failure: Failure, error: Exception) -> tuple[int | None, Fields, bytes]:
    """As decided, without a decision. An error that a client could provoke refuses the request in each mode."""
    global _logged
    if time.monotonic() - _logged >= 1:
        _logged = time.monotonic()
        log.warning("rate limit not checked: %s", str(error) or type(error).__name__)
    invalid = isinstance(error, (UnknownPolicy, InvalidArgument, IdempotencyMismatch))
    if failure == "open" and not invalid:
        return None, [], b""
    status = 500 if invalid else 503
    return status, list(_PROBLEM), _problem(status, "about:blank", _TITLES[status], {})


def check(limiter: object, failure: Failure) -> None:
    if not hasattr(limiter, "acquire_all"):
        raise TypeError("pgratelimit: limiter must be a Limiter, an AsyncLimiter or a Combiner")
    if failure not in ("closed", "open"):
        raise ValueError('pgratelimit: failure must be "closed" or "open"')


_PROBLEM: Fields = [("Content-Type", "application/problem+json"), ("X-Content-Type-Options", "nosniff")]


def _problem(status: int, kind: str, title: str, more: dict[str, object]) -> bytes:
    return json.dumps({"type": kind, "title": title, "status": status, **more}).encode() + b"\n"


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
