"""Rate limits that live in PostgreSQL: a client of the functions ratelimit_*. See README.md, and the classes Limiter, AsyncLimiter and
Combiner. Middleware is in pgratelimit.asgi and pgratelimit.wsgi."""

from .answers import Charge, Decision, JointDecision, PartialDecision, Reservation
from .combiner import Combiner
from .errors import (
    Closed,
    Denied,
    Error,
    IdempotencyMismatch,
    InvalidArgument,
    Locked,
    NoGrant,
    Overloaded,
    Settled,
    TooLate,
    UnknownPolicy,
)
from .limiter import Acquirer, AsyncAcquirer, AsyncLimiter, Limiter

__all__ = [
    "Acquirer",
    "AsyncAcquirer",
    "AsyncLimiter",
    "Charge",
    "Closed",
    "Combiner",
    "Decision",
    "Denied",
    "Error",
    "IdempotencyMismatch",
    "InvalidArgument",
    "JointDecision",
    "Limiter",
    "Locked",
    "NoGrant",
    "Overloaded",
    "PartialDecision",
    "Reservation",
    "Settled",
    "TooLate",
    "UnknownPolicy",
]
