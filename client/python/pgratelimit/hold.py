"""Slots: leases that are renewed in the background, by a thread or a task."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any

from .answers import HoldAnswer, seconds
from .errors import InvalidArgument, LeaseLost, UnknownPolicy

# In seconds:
LEAST_PATIENCE = 1.0  # that a renewal may take even if a third of the lease is less
MAX_PAUSE = 1.0  # between two tries to renew, at most
RELEASE_TIMEOUT = 5.0  # that a release goes on for after its caller was cancelled
A_DAY = 86400.0


class Tenure:
    """The time for which a holder has its slots, as far as the client knows: a state machine without I/O, threads, clock or lock, whose
    owner makes the calls and passes the time. It has the names and the invariants of tenure in client/hold.go, and one more: at most one
    renewal is under way, and none begins at until or later, or after the end.
    """

    def __init__(self, sent: float, held_for: float) -> None:
        self.is_renewing = self.is_over = False
        self._extend(sent, held_for)

    def _extend(self, sent: float, held_for: float) -> None:
        self.lease, self.until, self.due = held_for, sent + held_for, sent + held_for / 3

    def over(self, now: float) -> bool:
        self.is_over = self.is_over or now >= self.until
        return self.is_over

    def begin(self, now: float) -> bool:
        """Whether the owner must renew now. After true it calls renewed, failed or end."""
        if self.over(now) or self.is_renewing or now < self.due:
            return False
        self.is_renewing = True
        return True

    def pause(self, now: float) -> float:
        """Seconds until something is to be done, a day at most."""
        return min(max(0.0, min(self.due, self.until) - now), A_DAY)

    def patience(self, now: float) -> float:
        """How long a renewal that begins now may take: so long that another can follow, or until the end."""
        return min(max(self.lease / 3, LEAST_PATIENCE), self.until - now)

    def renewed(self, sent: float, held_for: float) -> None:
        """The answer to a renewal that was sent at that time. What is over stays over."""
        self.is_renewing = False
        if not self.is_over:
            self._extend(sent, held_for)

    def failed(self, now: float) -> None:
        """A renewal without an answer. The pause is random, so that many holders of a database that was away do not ask at once."""
        self.is_renewing = False
        self.due = now + min(MAX_PAUSE, self.lease / 10) * random.uniform(0.5, 1)

    def end(self) -> None:
        """The answer to a renewal that the holder does not hold."""
        self.is_renewing, self.is_over = False, True


class _Held:
    """What Held and AsyncHeld have in common. It is true if the slots were granted."""

    allowed: bool
    """Whether the slots were granted."""

    remaining: int
    """Slots that were free after the call. Below zero after the capacity was lowered."""

    retry_after: float | None
    """Seconds until the same request is allowed if no holder holds, renews or releases. 0 when allowed, None if no wait helps."""

    held_for: float
    """Seconds of the lease. 0 when denied."""

    capacity: int
    """Slots of a key."""

    renewed: bool
    """The call was repeated after a lost answer, and the slots were held already."""

    shadowed: bool
    """The policy only watches, and would have denied: nothing is held, and no more calls are made."""

    holder: str
    """A uuid. Where only the holder may write, call ratelimit_renew with it in the same transaction, and roll back if that is null."""

    def __init__(self, holder: str, sent: float, answer: HoldAnswer) -> None:
        self.allowed, self.remaining, self.retry_after, held_for, self.capacity, self.renewed, self.shadowed = answer
        self.held_for, self.holder = seconds(held_for) or 0.0, holder
        self._calls = self.allowed and not self.shadowed  # whether it renews and releases
        self._tenure = Tenure(sent, _length(held_for))
        self._lock = threading.Lock()  # of the tenure
        self._failure: BaseException | None = None  # of the last renewal
        self._ended = not self.allowed  # nothing is held, or it was released
        self._released = not self._calls

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def lost(self) -> bool:
        """Whether the slots are held no more: the lease has ended, by this machine's monotonic clock, or a renewal found that the slots
        were reset or their policy dropped. It is true of a denial and after release, too. Time in which the machine sleeps is not
        counted on most systems."""
        if self._ended or self.shadowed:
            return self._ended
        with self._lock:
            return self._tenure.over(monotonic())

    def check(self) -> None:
        """Raise LeaseLost if the slots are lost, from the error of the last renewal, if it failed. Call it before each step that has an effect outside."""
        if self.lost:
            failure = None if self._ended else self._failure
            raise LeaseLost("pgratelimit: the slots are not held: the lease was lost, or released") from failure

    def _begin(self) -> tuple[bool, float, float]:
        """Whether to renew now, what time it is, and how long to wait for the renewal."""
        with self._lock:
            now = monotonic()
            return self._tenure.begin(now), now, self._tenure.patience(now)

    def _answered(self, sent: float, held_for: Any) -> None:
        """The microseconds that a renewal returned, or None, or its error."""
        with self._lock:
            self._failure = held_for if isinstance(held_for, BaseException) else None
            if held_for is None or isinstance(held_for, (UnknownPolicy, InvalidArgument)):  # it was reset or dropped, or has ended
                self._tenure.end()
            elif isinstance(held_for, BaseException):
                self._tenure.failed(monotonic())
            else:
                self._tenure.renewed(sent, _length(held_for))


def _length(microseconds: Any) -> float:
    """Seconds, in whole milliseconds and rounded down: a lease is never counted as longer than it is."""
    return int(microseconds) // 1000 / 1000


class Held(_Held):
    """Slots that Limiter.hold holds, or a denial. Its methods are safe for use in several threads."""

    def __init__(self, holder: str, sent: float, answer: HoldAnswer, renew: Callable[[], Any], release: Callable[[], Any]) -> None:
        super().__init__(holder, sent, answer)
        self._renew, self._release = renew, release
        self._stop = threading.Event()
        self._releasing = threading.Lock()
        self._thread: threading.Thread | None = None
        if self._calls:
            self._thread = threading.Thread(target=self._keep, name="pgratelimit renews", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Free the slots, after a renewal that is under way. It is safe to repeat: once it has succeeded it does nothing, and after an
        error it tries again. Without it the slots are free when the lease ends. A lost lease is no error."""
        self._ended = True
        self._stop.set()
        with self._releasing:
            if self._released:
                return
            if self._thread is not None:
                self._thread.join(max(0.0, min(self._tenure.until - monotonic(), A_DAY)))  # later it can renew nothing
                with self._lock:
                    is_idle = not self._tenure.is_renewing
                if is_idle:  # then it is about to end
                    self._thread.join()
            with suppress(UnknownPolicy):  # it was dropped with its holders
                self._release()
            self._released = True

    def _keep(self) -> None:
        while not self._ended and not self.lost and not self._stop.wait(self._tenure.pause(monotonic())):
            begins, sent, _ = self._begin()
            if begins:
                try:
                    answer = self._renew()
                except Exception as error:
                    answer = error
                self._answered(sent, answer)


class AsyncHeld(_Held):
    """Slots that AsyncLimiter.hold holds, or a denial."""

    def __init__(
        self, holder: str, sent: float, answer: HoldAnswer, renew: Callable[[], Awaitable[Any]], release: Callable[[], Awaitable[Any]]
    ) -> None:
        super().__init__(holder, sent, answer)
        self._renew, self._release = renew, release
        self._stop = asyncio.Event()
        self._releasing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._keep()) if self._calls else None

    async def release(self) -> None:
        """As Held.release. When its caller is cancelled, it goes on for up to 5 seconds, also when its caller does not wait for that."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._finish())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            loop.call_later(RELEASE_TIMEOUT, task.cancel)
            await asyncio.wait({task}, timeout=RELEASE_TIMEOUT)
            raise

    def _finish(self) -> Coroutine[Any, Any, None]:
        self._ended = True
        self._stop.set()
        return self._send()

    async def _send(self) -> None:
        async with self._releasing:
            if self._released:
                return
            if self._task is not None:
                await asyncio.wait({self._task})  # it ends with its patience at the latest
            with suppress(UnknownPolicy):
                await self._release()
            self._released = True

    async def _keep(self) -> None:
        while not self._ended and not self.lost:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tenure.pause(monotonic())):
                    await self._stop.wait()
                    return
            begins, sent, patience = self._begin()
            if begins:
                try:
                    async with asyncio.timeout(patience):
                        answer = await self._renew()
                except Exception as error:
                    answer = error
                self._answered(sent, answer)
