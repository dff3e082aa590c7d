"""Limiters that make calls one by one. A Limiter and an AsyncLimiter differ in how they send, and in nothing else."""

import asyncio
import functools
import math
import random
import secrets
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from . import answers, calls, check, drivers, errors, hold
from .answers import DECISION, PARTIAL, Charge, Decision, JointDecision, JointSettlement, PartialDecision, Reservation, seconds
from .calls import Call, Duration, whole
from .errors import Error, InvalidArgument, Locked, NotReady, TooLate
from .hold import AsyncHeld, Held

T = TypeVar("T")
P = ParamSpec("P")

MAX_TRIES = 3
GIVE_BACK_TIMEOUT = 5.0  # for which an interrupted caller waits
UNDO_PAUSE = 1.0  # after the first try to undo a call, and twice as long after each
LONGEST_UNDO_PAUSE = 30.0
LONGEST_UNDO = 3600.0  # of a hold whose lease is not known
UNDO_ANSWERS = 3  # the server may carry out a call later than its undoing
MAX_UNDOING = 1000  # in the background; of further ones the leases end by themselves


class Acquirer(Protocol):
    """The methods that a Limiter shares with fakes in a program's own tests."""

    def acquire(self, policy: str, key: str, cost: int = 1, *, idempotency_key: str | None = None) -> Decision: ...

    def acquire_all(self, charges: Iterable[Charge], *, idempotency_key: str | None = None) -> JointDecision: ...


class AsyncAcquirer(Protocol):
    """The methods that AsyncLimiter and Combiner share with fakes."""

    def acquire(self, policy: str, key: str, cost: int = 1, *, idempotency_key: str | None = None) -> Awaitable[Decision]: ...

    def acquire_all(self, charges: Iterable[Charge], *, idempotency_key: str | None = None) -> Awaitable[JointDecision]: ...


class Limiter:
    """Limits for programs without asyncio, on a psycopg 3 Connection or a psycopg_pool.ConnectionPool, a connection of psycopg2, Django's
    django.db.connection, or a URL such as "postgresql://user@host/name": of that the process has one psycopg_pool, of 4 connections at most,
    which the first call opens, and where a call waits 1 second for a connection, and 0.5 for a locked bucket unless the role or the URL
    sets lock_timeout.

    On a pool each call is a transaction of its own, committed before it returns. On a connection it is part of the transaction that is
    open there, and a grant keeps the bucket locked until it ends. A psycopg connection without autocommit opens one by itself: without
    a commit the tokens go back.

    A call is repeated after a serialization failure or a deadlock (40001, 40P01), or when an upgrade replaced its function (XX000), where
    it is a transaction of its own: on a pool, and on a connection with autocommit that is in no transaction. After the loss of a pool's
    connection a call is repeated if that does no harm: with an idempotency key, peek, settle, hold, renew and release. There
    are three tries at most.

    policy, key and idempotency_key have 1 to 512 bytes of UTF-8. schema names the schema of the functions, where search_path does not
    lead there. Durations are seconds, or a timedelta; math.inf is the longest that the server takes. Besides the errors named below, each
    method raises UnknownPolicy, InvalidArgument, Locked, and errors of the driver.
    """

    def __init__(self, db: Any, *, schema: str | None = None) -> None:
        self._driver = drivers.sync_driver(db)
        self._schema = schema

    @property
    def in_transaction(self) -> bool:
        """Whether a call now is part of a transaction: a rollback gives its tokens back, and until the end the bucket stays locked."""
        return not self._driver.is_alone()

    def acquire(self, policy: str, key: str, cost: int = 1, *, idempotency_key: str | None = None) -> Decision:
        """Take tokens from the bucket of key if it holds enough. A denial is a decision, not an error, and writes nothing.

        With an idempotency key, chosen by the program, a repeat within the policy's remember has the first grant, replayed, and takes
        nothing. It raises IdempotencyMismatch if the cost is another, and Settled once the grant is settled. A denial is not remembered.
        """
        return self._run(calls.acquire(policy, key, cost, idempotency_key))

    def acquire_all(self, charges: Iterable[Charge], *, idempotency_key: str | None = None) -> JointDecision:
        """Take the tokens of all charges, 1 to 1,000, if each bucket holds enough, and otherwise nothing. Idempotency keys and errors are
        as in acquire."""
        return self._run(calls.acquire_all([calls.read_charge(c) for c in charges], idempotency_key))

    def peek(self, policy: str, key: str, cost: int = 1) -> Decision:
        """Return the decision that acquire would return now, and take nothing."""
        return self._run(
            calls.decision("peek", "ratelimit_peek($1::text, $2::text, $3::bigint)", policy, key, whole("cost", cost), once=True)
        )

    def charge(self, policy: str, key: str, cost: int, *, idempotency_key: str | None = None) -> Decision:
        """Take tokens even if the bucket holds fewer: missing tokens are debt, which refill pays first. Raises IdempotencyMismatch."""
        function = "ratelimit_charge($1::text, $2::text, $3::bigint, $4::text)"
        return self._run(
            calls.keyed("charge", DECISION, function, answers.decision, policy, key, whole("cost", cost), idempotency_key)
        )

    def settle(self, policy: str, key: str, idempotency_key: str, cost: int) -> Decision:
        """Replace the cost of the grant under idempotency_key, an estimate, by the real cost, once. 0 gives all of it back.

        The difference goes back, up to full, or is taken, also into debt. A repeat changes nothing. Raises NoGrant, and
        IdempotencyMismatch if it was settled at another cost.
        """
        return self._run(calls.settle(policy, key, idempotency_key, cost))

    def settle_all(self, settlements: Iterable[Charge], idempotency_key: str) -> JointSettlement:
        """Replace the costs of the grants of acquire_all under idempotency_key by the real costs, of all buckets or of none.

        A bucket that is named twice is settled once, at the sum. A repeat changes nothing. Errors as settle.
        """
        return self._run(calls.settle_all([calls.read_charge(c) for c in settlements], idempotency_key))

    def reserve(self, policy: str, key: str, max_wait: Duration, cost: int = 1, *, idempotency_key: str | None = None) -> Reservation:
        """Take tokens now if the bucket will have them within max_wait seconds, and return how long to wait before acting: 0, which
        means now or not at all, to 365 days. Errors as acquire. A caller that does not act gives the tokens back with settle(…, 0)."""
        return self._run(calls.reserve(policy, key, max_wait, cost, idempotency_key))

    def acquire_up_to(
        self, policy: str, key: str, at_most: int, at_least: int = 1, *, idempotency_key: str | None = None
    ) -> PartialDecision:
        """Take as many tokens as the bucket holds, up to at_most, or a denial if it holds fewer than at_least. Errors as acquire."""
        function = "ratelimit_acquire_up_to($1::text, $2::text, $3::bigint, $4::bigint, $5::text)"
        bounds = whole("at_most", at_most), whole("at_least", at_least)
        return self._run(calls.keyed("acquire up to", PARTIAL, function, answers.partial, policy, key, *bounds, idempotency_key))

    def refund(self, policy: str, key: str, amount: int) -> Decision:
        """Give tokens back to the bucket, never above its capacity. A refund that is sent twice gives back twice."""
        return self._run(
            calls.decision("refund", "ratelimit_refund($1::text, $2::text, $3::bigint)", policy, key, whole("amount", amount))
        )

    def pause(self, policy: str, key: str, pause_for: Duration) -> Decision:
        """Stop the bucket for pause_for seconds, 0.001 to 365 days; after them it refills from 0. A longer pause stays. Reservations
        made before are not stopped."""
        function = "ratelimit_pause($1::text, $2::text, $3::text::interval)"
        return self._run(calls.decision("pause", function, policy, key, calls.interval("pause_for", pause_for)))

    def wait(self, policy: str, key: str, cost: int = 1, *, timeout: Duration | None = None) -> Reservation:
        """Take tokens, and return when they are there: a reserve and a sleep. Callers are served in the order of their calls.

        A quota lends nothing: at its next turn, and up to a second later at random, wait reserves again. Its callers are in no order.
        Raises TooLate at once, and takes nothing, if they would come after timeout seconds: 0 is for tokens that are there, and the
        default is 365 days. When the sleep is interrupted, the tokens are given back. It is for pools, and for connections with
        autocommit that are in no transaction.
        """
        rounds = _rounds(self._driver, timeout)
        while True:
            max_wait, name = next(rounds)
            call, undo = calls.reserve(policy, key, max_wait, cost, name), calls.settle(policy, key, name, 0)
            reservation = None
            try:
                reservation = self._run(call)
                for pause in _pauses(reservation, max_wait, cost, policy):
                    time.sleep(pause)
            except BaseException as error:
                if reservation or reservation is None and _is_unknown(error):
                    self._undo(undo, _Undoing(reservation is None), error)
                raise
            if reservation:
                return reservation

    @contextmanager
    def hold(self, policy: str, key: str, cost: int = 1, *, holder: str | None = None) -> Iterator[Held]:
        """Take slots of a policy with a lease if enough are free, and hold them during a with block. A denial is a value that is false.

            with limiter.hold("jobs", "tenant:7") as held:
                if held:
                    work(held)

        The holder is a new uuid. A daemon thread renews the lease on the pool: when a third of it is over, and if that fails again and
        again until it ends. When the lease is lost, the block goes on, and another holder may have the slots: held.lost is true then,
        and held.check() raises LeaseLost; call it before each step that has an effect outside. The end of the block releases the slots;
        it raises the error of a release that fails, but not over an error of the block. A release that fails is tried again in the
        background until the lease ends, and so are the slots released of a hold whose answer was lost, for up to an hour.
        It needs a pool: in a transaction call the SQL function ratelimit_hold as the last statement, with a holder of your own.

        holder is a name of your own in place of the uuid, for a lease that two tasks or programs pass on: a holder that holds already
        begins its lease anew. After a lost answer its slots are not released: repeat the call.
        """
        own, (holder, sent) = holder, _new_hold(self._driver, holder)
        call, end = calls.hold(policy, key, holder, cost), calls.release(policy, key, holder)
        try:
            answer = self._run(call)
        except BaseException as error:
            if own is None and _is_unknown(error):
                self._undo(end, _Undoing(True), error)
            raise
        renewal = calls.renew(policy, key, holder, lambda us: us)
        held = Held(holder, sent, answer, lambda: self._run(renewal), lambda: self._run(end))
        try:
            yield held
        except BaseException:
            with suppress(Exception):  # the first error is the one to see
                self._end(held, end)
            raise
        self._end(held, end)

    @contextmanager
    def hold_wait(
        self, policy: str, key: str, cost: int = 1, *, timeout: Duration | None = None, holder: str | None = None
    ) -> Iterator[Held]:
        """hold, again and again until the slots are free: when retry_after is over, or after about a second if that is earlier. Callers
        who wait are in no order. Raises TooLate after timeout seconds, and at once if no wait helps."""
        pauses = _hold_pauses(timeout, cost, policy)
        while True:
            with self.hold(policy, key, cost, holder=holder) as held:
                if held:
                    yield held
                    return
            time.sleep(pauses(held))

    def _end(self, held: Held, end: Call[bool]) -> None:
        try:
            held.release()
        except BaseException as error:
            self._undo(end, _Undoing(False, held._tenure.until), error)
            raise

    def _undo(self, call: Call[Any], undoing: "_Undoing", error: BaseException) -> None:
        """Undo what a call may have done, in a thread that tries until there is an answer. An interrupted caller waits for the first
        try: the program may be about to end."""
        tried = threading.Event()

        def undo() -> None:
            answer: Any
            with _background:
                pause: float | None = 0.0
                while pause is not None and not self._driver.is_closed():
                    time.sleep(pause)
                    try:
                        answer = self._run(call)
                    except Exception as again:
                        answer = again
                    pause = undoing.after(answer)
                    tried.set()

        if _background.has_room(self._driver, error):
            threading.Thread(target=undo, name="pgratelimit undoes", daemon=True).start()
            if not isinstance(error, Exception):
                tried.wait(GIVE_BACK_TIMEOUT)

    def renew(self, policy: str, key: str, holder: str) -> float | None:
        """Begin the lease of a holder of your own anew, and return its seconds; None if it does not hold, or not any more: stop what it
        does. It never takes slots."""
        return self._run(calls.renew(policy, key, holder, seconds))

    def release(self, policy: str, key: str, holder: str) -> bool:
        """Free the slots of a holder of your own, and return whether it held them until now. After a lost answer it is sent again, and
        returns False."""
        return self._run(calls.release(policy, key, holder))

    def check(self, policies: Collection[str] = (), calls: Collection[str] = ("acquire", "acquire_all")) -> None:
        """Raise NotReady if the database lacks what calls need: the package, a grant, a policy. It is for the start of a program. calls
        are names of methods. If all are about slots, the policies must lend slots; if none is, they must not. It takes nothing."""
        lacks, can_ask = self._run(check.functions(self, self._schema, policies, calls, False))
        for policy in policies if can_ask else ():
            try:
                self._run(check.of_policy(policy, calls))
            except Error as error:
                lacks += check.refused(policy, calls, error)
        if lacks:
            raise NotReady(lacks)

    def _run(self, call: Call[T]) -> T:
        tries = _Tries(call, self._driver)
        sql = calls.statement(None if call.is_query else self._schema, call.columns, call.function, self._driver.percent)
        while True:
            try:
                row = self._driver.fetch(sql, call.args)
                break
            except Exception as error:
                pause = tries.after(error)
            time.sleep(pause)
        return call.read(row)


def _awaited(method: Callable[Concatenate[Limiter, P], T]) -> Callable[Concatenate["AsyncLimiter", P], Coroutine[Any, Any, T]]:
    """A method of AsyncLimiter: the Limiter's, with its call awaited."""

    @functools.wraps(method)
    async def awaited(self: "AsyncLimiter", *args: P.args, **kwargs: P.kwargs) -> T:
        return await cast(Any, method)(self, *args, **kwargs)

    return awaited


class AsyncLimiter:
    """Limiter for asyncio, on a connection or pool of psycopg 3's async classes or of asyncpg: each method is as the Limiter's, awaited.

    A cancelled call has no answer, and its tokens may be taken: repeat it under its idempotency key, or asyncio.shield it.
    """

    _packs = False  # whether requests share calls

    def __init__(self, db: Any, *, schema: str | None = None) -> None:
        self._driver = drivers.async_driver(db)
        self._schema = schema

    acquire = _awaited(Limiter.acquire)
    acquire_all = _awaited(Limiter.acquire_all)
    peek = _awaited(Limiter.peek)
    charge = _awaited(Limiter.charge)
    settle = _awaited(Limiter.settle)
    settle_all = _awaited(Limiter.settle_all)
    reserve = _awaited(Limiter.reserve)
    acquire_up_to = _awaited(Limiter.acquire_up_to)
    refund = _awaited(Limiter.refund)
    pause = _awaited(Limiter.pause)
    renew = _awaited(Limiter.renew)
    release = _awaited(Limiter.release)

    async def wait(self, policy: str, key: str, cost: int = 1, *, timeout: Duration | None = None) -> Reservation:
        """As Limiter.wait. A cancelled wait first gives the tokens back, for up to 5 seconds, and goes on in the background."""
        rounds = _rounds(self._driver, timeout)
        while True:
            max_wait, name = next(rounds)
            call, undo = calls.reserve(policy, key, max_wait, cost, name), calls.settle(policy, key, name, 0)
            reservation, unended = None, set[asyncio.Future[Any]]()
            try:
                reservation = await self._run(call, unended)
                for pause in _pauses(reservation, max_wait, cost, policy):
                    await asyncio.sleep(pause)
            except BaseException as error:
                if reservation or reservation is None and _is_unknown(error):
                    await self._undo(undo, _Undoing(reservation is None), error, unended)
                raise
            if reservation:
                return reservation

    @asynccontextmanager
    async def hold(self, policy: str, key: str, cost: int = 1, *, holder: str | None = None) -> AsyncIterator[AsyncHeld]:
        """As Limiter.hold, in async with, and a task renews. When the lease is lost, the block is not cancelled. A cancelled hold
        first releases the slots, for up to 5 seconds, and goes on in the background."""
        own, (holder, sent) = holder, _new_hold(self._driver, holder)
        call, end = calls.hold(policy, key, holder, cost), calls.release(policy, key, holder)
        unended = set[asyncio.Future[Any]]()
        try:
            answer = await self._run(call, unended)
        except BaseException as error:
            if own is None and _is_unknown(error):
                await self._undo(end, _Undoing(True), error, unended)
            raise
        renewal = calls.renew(policy, key, holder, lambda us: us)
        held = AsyncHeld(holder, sent, answer, lambda: self._run(renewal), lambda: self._run(end))
        try:
            yield held
        except BaseException:
            with suppress(Exception):  # the first error is the one to see
                await self._end(held, end)
            raise
        await self._end(held, end)

    @asynccontextmanager
    async def hold_wait(
        self, policy: str, key: str, cost: int = 1, *, timeout: Duration | None = None, holder: str | None = None
    ) -> AsyncIterator[AsyncHeld]:
        """As Limiter.hold_wait."""
        pauses = _hold_pauses(timeout, cost, policy)
        while True:
            async with self.hold(policy, key, cost, holder=holder) as held:
                if held:
                    yield held
                    return
            await asyncio.sleep(pauses(held))

    async def _end(self, held: AsyncHeld, end: Call[bool]) -> None:
        async def finish() -> None:
            try:
                await held._finish()
            except Exception as error:
                await self._undo(end, _Undoing(False, held._tenure.until), error, set())
                raise

        releasing = drivers.keep(asyncio.get_running_loop().create_task(finish()))
        try:
            await asyncio.wait({releasing})
        except asyncio.CancelledError:
            await asyncio.wait({releasing}, timeout=GIVE_BACK_TIMEOUT)
            raise
        releasing.result()

    async def _undo(self, call: Call[Any], undoing: "_Undoing", error: BaseException, unended: set[asyncio.Future[Any]]) -> None:
        """As Limiter._undo, in a task, once the call has ended."""
        tried = asyncio.Event()

        async def undo() -> None:
            answer: Any
            with _background:
                if unended:
                    with suppress(asyncio.CancelledError):  # the loop ends
                        await asyncio.wait(unended)
                    undoing.ended(all(task.done() and not task.cancelled() for task in unended))
                pause: float | None = 0.0
                while pause is not None and not self._driver.is_closed():
                    if pause:
                        await asyncio.sleep(pause)
                    try:
                        answer = await self._run(call)
                    except Exception as again:
                        answer = again
                    pause = undoing.after(answer)
                    tried.set()

        if _background.has_room(self._driver, error):
            drivers.keep(asyncio.get_running_loop().create_task(undo()))
            if not isinstance(error, Exception):
                with suppress(TimeoutError):
                    await asyncio.wait_for(tried.wait(), GIVE_BACK_TIMEOUT)

    async def check(self, policies: Collection[str] = (), calls: Collection[str] = ("acquire", "acquire_all")) -> None:
        """As Limiter.check."""
        lacks, can_ask = await self._run(check.functions(self, self._schema, policies, calls, self._packs))
        for policy in policies if can_ask else ():
            try:
                await self._run(check.of_policy(policy, calls))
            except Error as error:
                lacks += check.refused(policy, calls, error)
        if lacks:
            raise NotReady(lacks)

    async def _run(self, call: Call[T], unended: set[asyncio.Future[Any]] | None = None) -> T:
        """The answer. A cancelled caller finds in unended what goes on without it."""
        left = set() if unended is None else unended
        tries = _Tries(call, self._driver)
        sql = calls.statement(None if call.is_query else self._schema, call.columns, call.function, self._driver.percent)
        while True:
            try:
                row = await self._driver.fetch(sql, call.args, left)
                break
            except Exception as error:
                pause = tries.after(error)
            await asyncio.sleep(pause)
        return call.read(row)


class _Tries:
    """Decides after an error of the driver whether a call is sent again."""

    def __init__(self, call: Call[Any], driver: drivers.Driver) -> None:
        self._call, self._driver, self._n = call, driver, 0
        self._alone = driver.is_alone()  # asked first: a failed transaction looks different afterwards

    def after(self, error: Exception) -> float:
        """The seconds to wait before another try; random, so that calls that collided do not meet again. Raises the error if there is
        none."""
        self._n += 1
        is_harmless = self._alone and errors.is_transient(error) or (
            self._call.once and self._driver.is_pool and errors.is_lost(error) and not self._driver.is_closed())
        if is_harmless and self._n < MAX_TRIES:
            return random.uniform(0, 0.05 * 2 ** (self._n - 1))
        known = errors.of_driver(self._call.verb, self._call.function, error)
        raise known from (None if known is error else error)


def _new_hold(driver: drivers.Driver, holder: str | None) -> tuple[str, float]:
    """The holder, a new one unless it is given, and the time from which its lease counts."""
    if not driver.is_pool:
        raise InvalidArgument(
            "pgratelimit: invalid argument: hold needs a pool, because it renews; in a transaction call the SQL function ratelimit_hold"
        )
    return str(uuid.uuid4()) if holder is None else calls.text("holder", holder), hold.monotonic()


def _hold_pauses(timeout: Duration | None, cost: int, policy: str) -> Callable[[Held | AsyncHeld], float]:
    """How long to sleep after a denial: holders release before their leases end."""
    until = time.monotonic() + (math.inf if timeout is None else calls.length("timeout", timeout, zero=True))

    def pause(held: Held | AsyncHeld) -> float:
        left = until - time.monotonic()
        if held.retry_after is None or left <= 0:
            raise TooLate(Reservation(False, held.remaining, held.retry_after, None, held.capacity, False, False), cost, policy)
        return min(held.retry_after, random.uniform(0.75, 1.25), left)

    return pause


def _rounds(driver: drivers.Driver, timeout: Duration | None) -> Iterator[tuple[float, str]]:
    """The longest wait of each reserve, and an idempotency key for giving back."""
    if not driver.is_alone():
        raise InvalidArgument("pgratelimit: invalid argument: wait is for calls outside a transaction, which would keep the bucket locked")
    left = longest = calls.LONGEST if timeout is None else min(calls.length("timeout", timeout, zero=True), calls.LONGEST)
    began = time.monotonic()
    while True:
        yield left, secrets.token_urlsafe()
        left = max(0.0, longest - (time.monotonic() - began))


def _pauses(reservation: Reservation, longest: float, cost: int, policy: str) -> Iterator[float]:
    """Sleeps until the tokens are there, of whole milliseconds and a day at most. A refusal by a quota is slept out, too: until its turn,
    and up to a second more, because all callers wait for the same instant. Raises TooLate after another refusal."""
    wait = reservation.wait
    if wait is None or not reservation and (wait > longest or cost > reservation.capacity):
        raise TooLate(reservation, cost, policy)
    due = time.monotonic() + wait
    if not reservation:
        due += random.uniform(0, min(1.0, (longest - wait) / 2))
    while (left := due - time.monotonic()) > 0:
        yield min(math.ceil(left * 1000) / 1000, 86400.0)


def _is_unknown(error: BaseException) -> bool:
    """Whether a call that ended so may have been carried out: it was interrupted, its connection was lost, or its answer is no answer."""
    return not isinstance(error, Exception) or errors.is_lost(error) or type(error) is Error and error.sqlstate is None


class _Undoing:
    """Decides whether the undoing of a call is tried again: until the server has undone it, or has answered often enough that there is
    nothing to undo."""

    def __init__(self, is_unknown: bool, until: float = math.inf) -> None:
        self._answers = UNDO_ANSWERS if is_unknown else 1
        self._until = min(until, hold.monotonic() + LONGEST_UNDO) if is_unknown else until
        self._pause = UNDO_PAUSE

    def ended(self, is_known: bool) -> None:
        """The call to undo will not be carried out later."""
        if is_known:
            self._answers = 1

    def after(self, answer: Any) -> float | None:
        """The seconds to wait before another try, or None."""
        if not isinstance(answer, Exception) or isinstance(answer, Error) and not isinstance(answer, Locked):
            self._answers -= 1
        undone = bool(answer) and not isinstance(answer, Exception)
        pause, self._pause = self._pause * random.uniform(0.5, 1), min(2 * self._pause, LONGEST_UNDO_PAUSE)
        return None if undone or self._answers == 0 or hold.monotonic() + pause >= self._until else pause


class _Background:
    """Counts what is undone in the background."""

    def __init__(self) -> None:
        self._lock, self._n = threading.Lock(), 0

    def has_room(self, driver: drivers.Driver, error: BaseException) -> bool:
        """Not for a connection that has failed: it can undo nothing."""
        return self._n < MAX_UNDOING and (driver.is_pool or not isinstance(error, Exception))

    def __enter__(self) -> None:
        with self._lock:
            self._n += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n -= 1


_background = _Background()
