"""Rate limits that live in PostgreSQL: a client of the functions ratelimit_*. See README.md, and the classes Limiter, AsyncLimiter and
Combiner. Middleware is in pgratelimit.asgi and pgratelimit.wsgi."""

from .answers import Charge, Decision, JointDecision, JointSettlement, PartialDecision, Reservation
from .combiner import Combiner
from .errors import (
    Closed, Denied, Error, IdempotencyMismatch, InvalidArgument, LeaseLost, Locked, NoGrant, NotReady, Overloaded, Settled, TooLate, UnknownPolicy
)
from .hold import AsyncHeld, Held
from .limiter import Acquirer, AsyncAcquirer, AsyncLimiter, Limiter

__all__ = [
    "Acquirer", "AsyncAcquirer", "AsyncHeld", "AsyncLimiter", "Charge", "Closed", "Combiner", "Decision", "Denied", "Error", "Held",
    "IdempotencyMismatch", "InvalidArgument", "JointDecision", "JointSettlement", "LeaseLost", "Limiter", "Locked", "NoGrant", "NotReady",
    "Overloaded", "PartialDecision", "Reservation", "Settled", "TooLate", "UnknownPolicy",
]
