"""A limiter whose callers share calls."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Self, TypeVar

from . import calls, drivers, errors
from .answers import Charge, Decision, JointDecision
from .calls import Call, Duration
from .errors import Closed, Locked
from .limiter import AsyncLimiter
from .queue import Batch, Queue, Request

T = TypeVar("T")

LINGER = 0.005  # seconds that few requests wait for company while calls are open. Most calls end sooner, but one may be stalled
MAX_APART = 8  # so many buckets are asked for at a time after a call has failed because of one of them


class Combiner(AsyncLimiter):
    """AsyncLimiter for many tasks at once, on an AsyncConnectionPool of psycopg or a pool of asyncpg: requests of acquire and acquire_all
    that wait at the same moment share a call. The other methods are the AsyncLimiter's own, one call each.

    Requests for one bucket are sent in the order of the calls, and never in two calls at a time. A bucket that another transaction has
    locked holds up the requests of its call, and no other. If lock_timeout ends such a call, its buckets are asked for one by one, and
    only requests for the locked one raise Locked.

    A cancelled caller leaves at once, and other callers notice nothing. Its request is not sent, unless it was sent already: then its
    tokens may be taken. If the connection is lost, only requests with an idempotency key are sent again.

    calls_in_flight bounds the calls that are open at a time, to one fewer than the pool has connections at most. With max_waiting
    requests waiting, a further one raises Overloaded. After call_timeout seconds the callers of a call get a TimeoutError, and it is
    cancelled: as after any lost answer, tokens may be taken.

    It belongs to the event loop that calls it first. Close it when it is no longer used, or use it in async with.
    """

    _packs = True

    def __init__(
        self,
        pool: Any,
        *,
        calls_in_flight: int = 2,
        max_waiting: int = 10_000,
        call_timeout: Duration = 5.0,
        schema: str | None = None,
    ) -> None:
        super().__init__(pool, schema=schema)
        if not self._driver.is_pool:
            raise TypeError("pgratelimit: a Combiner needs a pool")
        for name, value in (("calls_in_flight", calls_in_flight), ("max_waiting", max_waiting)):
            if calls.whole(name, value) < 1:
                raise calls.invalid(f"{name} is {value}; it must be 1 or more")
        self._queue = Queue(max(1, min(calls_in_flight, drivers.pool_size(pool) - 1)), max_waiting)
        self._call_timeout = calls.length("call_timeout", call_timeout)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turn: asyncio.Handle | None = None  # the next look at the queue
        self._linger: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many requests wait for a call, for a gauge."""
        return len(self._queue.waiting)

    async def acquire(self, policy: str, key: str, cost: int = 1, *, idempotency_key: str | None = None) -> Decision:
        """As Limiter.acquire, at a fraction of the work when there are many callers. Raises Overloaded, Closed and TimeoutError, too."""
        answer: Decision = await self._combine([calls.read_charge((policy, key, cost))], False, idempotency_key)
        return answer

    async def acquire_all(self, charges: Iterable[Charge], *, idempotency_key: str | None = None) -> JointDecision:
        """As Limiter.acquire_all, and shares calls with other callers of acquire_all."""
        answer: JointDecision = await self._combine([calls.read_charge(c) for c in charges], True, idempotency_key)
        return answer

    async def close(self) -> None:
        """Admit no more requests, and wait until the earlier ones are answered. The pool stays open."""
        self._closed = True
        while self._queue.waiting or self._tasks:
            self._look(hurry=True)
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for timer in (self._turn, self._linger):
            if timer is not None:
                timer.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _combine(self, charges: list[Charge], is_joint: bool, idempotency_key: str | None) -> Any:
        if self._closed:
            raise Closed("pgratelimit: the Combiner is closed")
        loop = asyncio.get_running_loop()
        request = Request(charges, is_joint, calls.name_or_none(idempotency_key), loop.create_future())
        if not request.can_share():
            return await self._track(self._run(_alone(request)))
        self._queue.add(request)
        self._look_soon()
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._queue.leave(request)
            raise

    def _track(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that close waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _look_soon(self) -> None:
        """Looks at the queue in the loop's next turn: callers that were just answered often ask again at once."""
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._look)

    def _look(self, hurry: bool = False) -> None:
        """Starts the calls that are due."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        while batch := self._queue.take(hurry):
            hurry = False
            self._track(self._serve(batch))
        if self._queue.is_lingering and self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(LINGER, self._hurry)

    def _hurry(self) -> None:
        self._linger = None
        self._look(hurry=True)

    async def _serve(self, batch: Batch) -> None:
        """Makes the call of a batch, and ends when nothing of it is left."""
        try:
            await self._answer(batch, batch.requests)
        finally:
            for r in batch.requests:  # none is left, unless this task was cancelled
                r.answer.cancel()
            self._queue.finish(batch)
            self._look_soon()

    async def _answer(self, batch: Batch, requests: list[Request]) -> None:
        """Answers requests of a batch by one call, or apart if one of them has failed it and nothing was taken."""
        requests = [r for r in requests if not r.answer.done()]  # whose callers are there
        if not requests:
            return
        try:
            answers = await self._ask(batch, requests)
        except Exception as error:
            if len(requests) > 1 and (isinstance(error, Locked) or errors.is_text(error)):
                parts = _parts(requests)
                if len(parts) > 1:
                    await self._apart(batch, parts)
                    return
                if errors.is_text(error):
                    for r in requests:
                        await self._answer(batch, [r])
                    return
            answers = [error] * len(requests)
        for r, answer in zip(requests, answers):
            if r.answer.done():
                continue
            if isinstance(answer, Exception):
                r.answer.set_exception(answer)
            else:
                r.answer.set_result(answer)

    async def _apart(self, batch: Batch, parts: list[list[Request]]) -> None:
        """Answers MAX_APART parts at a time."""
        rest = iter(parts)

        async def some() -> None:
            for part in rest:
                await self._answer(batch, part)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(MAX_APART, len(parts))):
                group.create_task(some())

    async def _ask(self, batch: Batch, requests: list[Request]) -> list[Any]:
        """Makes one call. When it takes too long, the callers have their error and the place is free before the call has ended."""
        loop, unended = asyncio.get_running_loop(), set[asyncio.Future[Any]]()
        deadline = loop.time() + self._call_timeout
        timer = loop.call_at(deadline, self._give_up, batch, requests)
        try:
            async with asyncio.timeout_at(deadline):
                if len(requests) > 1:
                    return await self._run(calls.acquire_packed(requests), unended)
                return [await self._run(_alone(requests[0]), unended)]
        finally:
            timer.cancel()
            if unended:  # the buckets of a call stay apart until it has ended
                await asyncio.wait(unended)

    def _give_up(self, batch: Batch, requests: list[Request]) -> None:
        for r in requests:
            if not r.answer.done():
                r.answer.set_exception(TimeoutError(f"pgratelimit: no answer within {self._call_timeout} seconds"))
        self._queue.give_up(batch)
        self._look_soon()


def _alone(r: Request) -> Call[Any]:
    """The call of one request."""
    if r.is_joint:
        return calls.acquire_all(r.charges, r.idempotency_key)
    return calls.acquire(*r.charges[0], r.idempotency_key)


def _parts(requests: list[Request]) -> list[list[Request]]:
    """The requests of each bucket."""
    parts: dict[tuple[Any, ...], list[Request]] = {}
    for r in requests:
        parts.setdefault(r.bucket, []).append(r)
    return list(parts.values())
