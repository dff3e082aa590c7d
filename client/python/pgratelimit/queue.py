"""Which requests share a call, and when a call is made: a state machine without I/O, timers or tasks."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from .answers import Charge
from .errors import Overloaded

MAX_BATCH = 256  # elements of one call, which bounds its locks and the wait of its callers. Below it, it still takes a whole joint request
MIN_SHARE = 32  # so many requests make a call worth its fixed cost
MAX_LENGTH = 512  # of policies, keys and idempotency keys, in bytes
MAX_CHARGES = 1000


class Request:
    """A request whose caller waits for the answer."""

    __slots__ = ("charges", "is_joint", "idempotency_key", "bucket", "kind", "answer")

    def __init__(self, charges: list[Charge], is_joint: bool, idempotency_key: str | None, answer: asyncio.Future[Any]) -> None:
        self.charges = charges
        self.is_joint = is_joint
        self.idempotency_key = idempotency_key
        self.answer = answer
        self.bucket: tuple[Any, ...] = tuple((c.policy, c.key) for c in charges) if is_joint else (charges[0].policy, charges[0].key)
        self.kind = is_joint, idempotency_key is not None

    def can_share(self) -> bool:
        """Whether it may share a call: text that is too long for any bucket would burden it."""
        texts = [text for c in self.charges for text in (c.policy, c.key)] + [self.idempotency_key or ""]
        return 0 < len(self.charges) <= MAX_CHARGES and all(
            len(text) <= MAX_LENGTH // 4 or len(text.encode()) <= MAX_LENGTH for text in texts
        )


@dataclass(eq=False, slots=True)
class Batch:
    """The requests of one call."""

    requests: list[Request] = field(default_factory=list)
    buckets: set[tuple[Any, ...]] = field(default_factory=set)


class Queue:
    """Requests that wait, and calls that are open.

    Between any two methods:

    1. At most limit calls have a place: the calls in open.
    2. A bucket belongs to one call at most, until finish, so a stalled call holds up its own buckets only. A joint request counts as one
       for a virtual bucket, named after all of its buckets.
    3. Requests for one bucket are taken in order of arrival. Requests with and without an idempotency key are two orders.
    4. The requests of a call all have an idempotency key or none has, and all are joint or none is. With MAX_BATCH elements it takes no
       more.
    5. At most max_waiting requests wait.
    """

    def __init__(self, limit: int, max_waiting: int) -> None:
        self.limit = limit
        self.max_waiting = max_waiting
        self.waiting: dict[Request, None] = {}  # in order of arrival
        self.open: set[Batch] = set()
        self.owned: set[tuple[Any, ...]] = set()  # the buckets of calls that have not ended
        self.is_lingering = False  # the last take left requests to linger for company: call it soon with hurry

    def add(self, request: Request) -> None:
        if len(self.waiting) >= self.max_waiting:
            raise Overloaded(f"pgratelimit: too many requests wait: {len(self.waiting)}")
        self.waiting[request] = None

    def leave(self, request: Request) -> None:
        """Take a request back whose caller has left. One that was sent stays."""
        self.waiting.pop(request, None)

    def take(self, hurry: bool = False) -> Batch | None:
        """Open the next call. None if no place is free or no request can be sent; or, without hurry, if another call is not worth it
        beside the open calls: below half a share."""
        self.is_lingering = False
        if len(self.open) >= self.limit:
            return None
        free = [r for r in self.waiting if r.bucket not in self.owned]
        share = self._share(len(free))
        if self.open and len(free) < share // 2 and not hurry:
            self.is_lingering = bool(free)
            return None
        batch = Batch()
        elements = 0
        for r in free:
            if elements >= MAX_BATCH:
                break
            if batch.requests and r.kind != batch.requests[0].kind:
                continue
            if len(batch.requests) >= share and r.bucket not in batch.buckets:  # no other call could take one of its buckets
                continue
            batch.requests.append(r)
            batch.buckets.add(r.bucket)
            elements += len(r.charges)
        if not batch.requests:
            return None
        for r in batch.requests:
            del self.waiting[r]
        self.owned |= batch.buckets
        self.open.add(batch)
        return batch

    def give_up(self, batch: Batch) -> None:
        """Free the place of a call that has taken too long. Its buckets stay apart until finish."""
        self.open.discard(batch)

    def finish(self, batch: Batch) -> None:
        self.open.discard(batch)
        self.owned -= batch.buckets

    def _share(self, waiting: int) -> int:
        """How many requests a call should have: all that wait and are under way, divided by the places, but no fewer than MIN_SHARE if
        there are as many."""
        everything = waiting + sum(len(batch.requests) for batch in self.open)
        return max(-(-everything // self.limit), min(everything, MIN_SHARE))
