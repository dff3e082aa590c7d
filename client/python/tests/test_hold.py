import asyncio
import functools
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import psycopg_pool

from pgratelimit import AsyncLimiter, Combiner, InvalidArgument, LeaseLost, Limiter, TooLate, UnknownPolicy, hold
from pgratelimit.hold import Tenure
from tests.kit import (
    BLOCKED, BOTH_POOLS, AsyncCase, Threads, define, define_slots, execute, gather, holders, replaced, until, until_blocked, with_each_driver
)

WITHOUT_LEASE = "select count(*) = 0 from ratelimit_holders(%s::text)"
RENEWED = "select held_for > interval '45 minutes' from ratelimit_holders(%s::text)"
AN_ERROR = psycopg.OperationalError


class FakeTime:
    """Moves the time that the client sees. Who renews looks at it every 2 ms, and calls are counted."""

    def __init__(self, test: unittest.TestCase) -> None:
        self.ahead = 0.0
        real, pause = hold.monotonic, Tenure.pause
        for patch in (
            mock.patch.object(hold, "monotonic", lambda: real() + self.ahead),
            mock.patch.object(Tenure, "pause", lambda tenure, now: min(0.002, pause(tenure, now))),
        ):
            test.enterContext(patch)


def age(policy: str) -> None:
    """Half an hour of the leases is over for the server."""
    execute("update ratelimit.leases set ends_at = ends_at - interval '30 minutes' where policy_id = (select id from ratelimit.policies where name = %s)", policy)


class Flaky:
    """A driver whose calls of a function are counted, and fail while told to: "unsent", or "unanswered" after the server has committed."""

    def __init__(self, test: unittest.TestCase, limiter: Any, name: str) -> None:
        self.calls, self.fails = 0, ""
        fetch = limiter._driver.fetch

        async def unanswered(row):
            await row
            raise AN_ERROR("down")

        def flaky(*args):
            called = f"{name}(" in args[0]
            self.calls += called
            if called and self.fails == "unsent":
                raise AN_ERROR("down")
            row = fetch(*args)
            if called and self.fails:
                if asyncio.iscoroutine(row):
                    return unanswered(row)
                raise AN_ERROR("down")
            return row

        test.enterContext(mock.patch.object(limiter._driver, "fetch", flaky))


def renews(held: Any) -> Any:
    """The thread or the task that renews, or None."""
    return held._thread if isinstance(held, Threads) else held._task


async def renews_no_more(held: Any) -> None:
    if isinstance(held, Threads):
        await asyncio.to_thread(held._thread.join, 60)
    else:
        await asyncio.wait({held._task}, timeout=60)


class TenureTest(unittest.TestCase):
    def test_a_renewal_at_a_third_and_again_after_a_failure(self):
        t = Tenure(100, 3)
        self.assertEqual([False, True, False], [t.begin(100.9), t.begin(101), t.begin(101)])
        self.assertEqual([1.0, 0.5], [t.patience(101), t.patience(102.5)])
        t.failed(101.2)
        self.assertTrue(0.149 <= t.pause(101.2) <= 0.301)
        self.assertFalse(t.begin(101.2))
        self.assertTrue(t.begin(101.6))
        t.renewed(101.6, 6)
        self.assertEqual([False, True], [t.over(107.5), t.over(107.6)])
        t.renewed(107.5, 6)
        self.assertEqual([True, False], [t.over(107.5), t.begin(107.5)], "what was over stays over")

    def test_ended_and_long(self):
        t = Tenure(0, 3)
        t.end()
        self.assertTrue(t.over(0))
        self.assertEqual(86400.0, Tenure(0, 1000 * 365 * 86400.0).pause(0))


class SyncTest(unittest.TestCase):
    def setUp(self):
        self.policy = self.id()
        define_slots(self.policy)
        self.pool = self.enterContext(psycopg_pool.ConnectionPool(min_size=1, max_size=2, kwargs={"application_name": "test"}))
        self.limiter = Limiter(self.pool)
        self.addCleanup(self.leaves_no_thread)

    def leaves_no_thread(self):
        self.assertEqual([], [t for t in threading.enumerate() if t.name == "pgratelimit renews"])

    def test_a_hold_that_is_forgotten_does_not_keep_the_process(self):
        program = f"""
import psycopg_pool, pgratelimit
pool = psycopg_pool.ConnectionPool(min_size=1, max_size=2)
forgotten = pgratelimit.Limiter(pool).hold({self.policy!r}, "k")
print(bool(forgotten.__enter__()), flush=True)
"""
        done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
        self.assertEqual(("True\n", 0), (done.stdout, done.returncode))

    def test_renew_and_release_of_a_holder_of_ones_own(self):
        with psycopg.connect(autocommit=True) as conn:
            for limiter in (self.limiter, Limiter(conn, schema="public")):
                execute("select ratelimit_hold(%s::text, 'k', 'job 7, attempt 1')", self.policy)
                call = self.policy, "k", "job 7, attempt 1"
                self.assertEqual([3600.0, True, False, None], [limiter.renew(*call), limiter.release(*call), limiter.release(*call), limiter.renew(*call)])

    def test_an_interrupted_hold_is_released(self):
        fetch = self.limiter._driver.fetch

        def interrupted(sql, args):
            row = fetch(sql, args)
            if "ratelimit_hold(" in sql:
                raise KeyboardInterrupt
            return row

        with mock.patch.object(self.limiter._driver, "fetch", interrupted), self.assertRaises(KeyboardInterrupt):
            self.limiter.hold(self.policy, "k").__enter__()
        self.assertEqual([], holders(self.policy))

    def test_1000_holds_leave_no_thread(self):
        for i in range(1000):
            try:
                with self.limiter.hold(self.policy, f"k{i % 7}") as held:
                    if i % 5 == 0:
                        raise KeyboardInterrupt
                    self.assertTrue(held)
            except KeyboardInterrupt:
                pass
        self.leaves_no_thread()
        self.assertEqual([], holders(self.policy))


class EachTest(AsyncCase):
    """What a Limiter, an AsyncLimiter and a Combiner do alike."""

    driver: str

    async def asyncSetUp(self):
        await super().asyncSetUp()
        for bound in ("pgratelimit.hold.RELEASE_TIMEOUT", "pgratelimit.limiter.GIVE_BACK_TIMEOUT"):
            self.enterContext(mock.patch(bound, 60))  # on a machine of any speed

    async def limiters(self):
        """Each with a policy."""
        if self.driver == "threads":
            pool = self.enterContext(psycopg_pool.ConnectionPool(min_size=1, max_size=4, kwargs={"application_name": "test"}))
            limiters = [Threads(Limiter(pool))]
        else:
            pool = await self.enterAsyncContext(BOTH_POOLS[self.driver](4))
            limiters = [AsyncLimiter(pool), await self.enterAsyncContext(Combiner(pool))]
        for n, limiter in enumerate(limiters):
            policy = f"{self.driver} {self.id()} {n}"
            define_slots(policy)
            yield limiter, policy

    async def test_slots_are_held_until_the_end_of_the_block(self):
        async for limiter, p in self.limiters():
            async with limiter.hold(p, "k", cost=2) as held:
                self.assertEqual((True, 1, 0.0, 3600.0, 3, False, False, False),
                                 (held.allowed, held.remaining, held.retry_after, held.held_for, held.capacity, held.renewed, held.shadowed, held.lost))
                self.assertEqual([held.holder], holders(p))
                held.check()
                async with limiter.hold(p, "k", 2) as denied:
                    self.assertEqual((False, 1, 0.0, True, None), (denied.allowed, denied.remaining, denied.held_for, denied.lost, renews(denied)))
                    self.assertTrue(0 < denied.retry_after <= 3600)
                    with self.assertRaises(LeaseLost):
                        denied.check()
                async with limiter.hold(p, "k", 4) as never:
                    self.assertIsNone(never.retry_after)
                self.assertEqual(3600.0, await limiter.renew(p, "k", held.holder))
                await gather(held.release(), held.release())
                with self.assertRaises(LeaseLost):
                    held.check()
                self.assertFalse(await limiter.release(p, "k", held.holder))
            async with limiter.hold(p, "k") as held:
                pass
            self.assertEqual((True, []), (held.lost, holders(p)))

    async def test_a_caller_that_waits_gets_slots_when_they_are_released(self):
        async for limiter, p in self.limiters():

            async def wait():
                async with limiter.hold_wait(p, "k", 3) as held:
                    return held.allowed

            async with limiter.hold(p, "k"):
                waiting = asyncio.create_task(wait())
                with self.assertRaises(TooLate):
                    await limiter.hold_wait(p, "k", 3, timeout=0).__aenter__()
                with self.assertRaisesRegex(TooLate, f'of 4 tokens .*"{p}" is 3'):
                    await limiter.hold_wait(p, "k", 4).__aenter__()
                self.assertFalse(waiting.done())
            self.assertTrue(await waiting)
            self.assertEqual([], holders(p))

    async def test_a_lease_under_a_holder_of_ones_own_passes_from_one_task_to_another(self):
        async for limiter, p in self.limiters():
            execute("select ratelimit_hold(%s::text, 'k', 'job 7', 3)", p)
            async with limiter.hold(p, "k", 3, holder="job 7") as held:
                self.assertEqual((True, True, "job 7"), (held.allowed, held.renewed, held.holder))
                async with limiter.hold(p, "k") as denied:
                    self.assertFalse(denied.allowed)
                flaky = Flaky(self, limiter, "ratelimit_hold")
                flaky.fails = "unanswered"
                with self.assertRaises(AN_ERROR):
                    await limiter.hold(p, "k", 3, holder="job 7").__aenter__()
                self.assertEqual(["job 7"], holders(p), "not released behind its back")
            self.assertEqual([], holders(p))

    async def test_errors(self):
        async for limiter, p in self.limiters():
            define(p + " bucket", 10)
            for error, sqlstate, call in (
                (UnknownPolicy, "RL001", lambda: limiter.hold("none", "k").__aenter__()),
                (InvalidArgument, "22023", lambda: limiter.hold(p + " bucket", "k").__aenter__()),
                (InvalidArgument, "22023", lambda: limiter.renew(p + " bucket", "k", "h")),
                (InvalidArgument, "22023", lambda: limiter.release(p + " bucket", "k", "h")),
                (InvalidArgument, "22023", lambda: limiter.hold(p, "k", 0).__aenter__()),
                (InvalidArgument, None, lambda: limiter.hold(p, "k", 1.5).__aenter__()),
                (InvalidArgument, None, lambda: limiter.renew(p, "k", 7)),
            ):
                with self.assertRaises(error) as raised:
                    await call()
                self.assertEqual(sqlstate, raised.exception.sqlstate)

    async def test_release_is_safe_to_repeat_also_after_it_failed(self):
        async for limiter, p in self.limiters():
            release = Flaky(self, limiter, "ratelimit_release")
            async with limiter.hold(p, "k") as held:
                release.fails = "unsent"
                with self.assertRaises(AN_ERROR):
                    await held.release()
                self.assertTrue(held.lost)
                self.assertEqual([held.holder], holders(p))
                release.fails, before = "", release.calls
                await held.release()
                await held.release()
            self.assertEqual((before + 1, []), (release.calls, holders(p)))

    async def test_the_error_of_a_block_comes_before_that_of_its_release(self):
        self.enterContext(mock.patch("pgratelimit.limiter.MAX_UNDOING", 0))
        async for limiter, p in self.limiters():
            Flaky(self, limiter, "ratelimit_release").fails = "unsent"
            with self.assertRaises(ZeroDivisionError):
                async with limiter.hold(p, "k"):
                    raise ZeroDivisionError
            with self.assertRaises(AN_ERROR):
                async with limiter.hold(p, "k"):
                    pass

    async def test_the_lease_is_renewed_when_a_third_is_over_and_its_loss_is_found(self):
        time = FakeTime(self)
        async for limiter, p in self.limiters():
            renew = Flaky(self, limiter, "ratelimit_renew")
            for lose in ("select ratelimit_reset(%s::text, 'k')", "select ratelimit_drop_policy(%s::text)"):
                async with limiter.hold(p, "k") as held:
                    age(p)
                    time.ahead += 1201
                    await until(RENEWED, p)
                    time.ahead += 1100
                    self.assertEqual((False, 1), (held.lost, renew.calls))
                    execute(lose, p)
                    time.ahead += 101
                    await renews_no_more(held)
                    self.assertTrue(held.lost)
                renew.calls = 0
            define_slots(p)
            async with limiter.hold(p, "k") as held:
                time.ahead += 3600
                with self.assertRaises(LeaseLost):
                    held.check()
            self.assertEqual([], holders(p), "what is lost here is released there")

    async def test_an_invalid_argument_of_a_renewal_ends_the_hold(self):
        async for limiter, p in self.limiters():
            for error in (InvalidArgument("the policy is one of tokens now"), UnknownPolicy("dropped")):
                time = FakeTime(self)
                async with limiter.hold(p, "k") as held:
                    renew = held._renew = (mock.Mock if isinstance(held, Threads) else mock.AsyncMock)(side_effect=error)
                    time.ahead += 1201
                    await renews_no_more(held)
                    self.assertEqual((True, 1), (held.lost, renew.call_count))

    async def test_a_hold_whose_answer_and_retries_were_lost_is_released_in_the_background(self):
        async for limiter, p in self.limiters():
            holding, releasing = Flaky(self, limiter, "ratelimit_hold"), Flaky(self, limiter, "ratelimit_release")
            holding.fails, releasing.fails = "unanswered", "unsent"
            with self.assertRaises(AN_ERROR):
                await limiter.hold(p, "k").__aenter__()
            while releasing.calls < 4:  # of which each release makes three
                await asyncio.sleep(0.002)
            self.assertEqual((3, 1), (holding.calls, len(holders(p))))
            releasing.fails = ""
            await until(WITHOUT_LEASE, p)

    async def test_a_release_that_fails_at_the_end_of_the_block_goes_on_until_the_lease_ends(self):
        async for limiter, p in self.limiters():
            time, release = FakeTime(self), Flaky(self, limiter, "ratelimit_release")
            for is_over in (False, True):
                release.fails = "unsent"
                with self.assertRaises(AN_ERROR):
                    async with limiter.hold(p, "k"):
                        pass
                self.assertEqual(1, len(holders(p)))
                if is_over:
                    time.ahead += 3601
                else:
                    release.fails = ""
                    await until(WITHOUT_LEASE, p)

    async def test_a_renewal_that_fails_is_tried_again_until_the_lease_ends(self):
        time = FakeTime(self)
        async for limiter, p in self.limiters():
            renew = Flaky(self, limiter, "ratelimit_renew")
            renew.fails = "unsent"
            async with limiter.hold(p, "k") as held:
                time.ahead += 1201
                for calls in (3, 6, 7):  # three tries each
                    while renew.calls < calls:
                        await asyncio.sleep(0.002)
                    time.ahead += 2
                self.assertFalse(held.lost)
                time.ahead += 3600
                await renews_no_more(held)
                self.assertTrue(held.lost)
                with self.assertRaises(LeaseLost) as raised:
                    held.check()
                self.assertIsInstance(raised.exception.__cause__, AN_ERROR)

    async def test_release_waits_for_a_renewal_under_way(self):
        time = FakeTime(self)
        async for limiter, p in self.limiters():
            async with limiter.hold(p, "k") as held:
                conn = await psycopg.AsyncConnection.connect()
                await conn.execute("select ratelimit_hold(%s::text, 'k', 'other')", (p,))
                is_over, release = [], held._release
                held._release = lambda: (is_over.append(held._tenure.is_renewing), release())[-1]
                time.ahead += 1201
                await until_blocked()
                releasing = asyncio.create_task(held.release())
                while not held.lost:
                    await asyncio.sleep(0)
                self.assertTrue(held._tenure.is_renewing)
                await conn.close()
                await releasing
            self.assertEqual(([False], []), (is_over, holders(p)))

    async def test_under_a_policy_that_watches_no_more_calls_are_made(self):
        async for limiter, p in self.limiters():
            define_slots(p + " shadow", 1, shadow=True)
            async with limiter.hold(p + " shadow", "k"), limiter.hold(p + " shadow", "k") as held:
                self.assertEqual((True, True, None, False), (held.allowed, held.shadowed, renews(held), held.lost))
                with mock.patch.object(getattr(limiter, "of", limiter), "_run", side_effect=AssertionError):
                    await held.release()
                self.assertTrue(held.lost)

    async def leaves_nothing(self):
        for thread in threading.enumerate():
            if thread.name == "pgratelimit undoes":
                await asyncio.to_thread(thread.join, 60)
                self.assertFalse(thread.is_alive())
        await super().leaves_nothing()


class AsyncTest(EachTest):
    """What is cancelled."""

    async def test_a_cancelled_release_goes_on(self):
        async for limiter, p in self.limiters():
            async with limiter.hold(p, "k") as held:
                releasing = asyncio.create_task(held.release())
                await asyncio.sleep(0)
                releasing.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await releasing
                self.assertEqual([], holders(p))

    async def test_a_connection_is_refused(self):
        async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
            with self.assertRaisesRegex(InvalidArgument, "needs a pool"):
                await AsyncLimiter(conn).hold("p", "k").__aenter__()
        with psycopg.connect(autocommit=True) as conn, self.assertRaisesRegex(InvalidArgument, "needs a pool"):
            Limiter(conn).hold("p", "k").__enter__()

    async def test_a_pool_that_was_closed_is_known_as_closed(self):
        async with BOTH_POOLS[self.driver](1) as pool:
            limiter = AsyncLimiter(pool)
            driver = limiter._driver
            self.assertFalse(driver.is_closed())
        self.assertTrue(driver.is_closed())  # else a call is undone on it for an hour
        with mock.patch.object(driver, "fetch", wraps=driver.fetch) as fetch, self.assertRaises(Exception):
            await limiter.peek("p", "k")
        self.assertEqual(1, fetch.call_count)

    async def test_nothing_reports_an_error_that_comes_after_a_cancellation(self):
        async for limiter, p in self.limiters():
            define(f"{p} tokens", 10)
            for call, lock in (
                (limiter.hold(p, "k").__aenter__, ("select ratelimit_hold(%s::text, 'k', 'other')", p)),
                (functools.partial(limiter.wait, f"{p} tokens", "k"), ("select ratelimit_acquire(%s::text, 'k')", f"{p} tokens")),
            ):
                execute(*lock)  # so that there is a row
                with psycopg.connect() as conn:
                    conn.execute(lock[0], lock[1:])
                    calling = asyncio.create_task(call())
                    await until_blocked()
                    calling.cancel()
                    execute(f"select pg_cancel_backend(pid) from ({BLOCKED}) as blocked")
                    with self.assertRaises(asyncio.CancelledError):
                        await calling
        del calling, call  # leaves_nothing sees what they leave

    async def test_a_release_goes_on_when_its_caller_is_cancelled_again(self):
        async for limiter, p in self.limiters():

            async def use(is_cancelled: bool, begun: asyncio.Event, may_go_on: asyncio.Event) -> None:
                async with limiter.hold(p, "k") as held:
                    release = held._release

                    async def gated() -> None:
                        begun.set()
                        await may_go_on.wait()
                        await release()

                    held._release = gated
                    if is_cancelled:
                        asyncio.current_task().cancel()
                        await asyncio.sleep(0)

            for is_cancelled in (False, True):
                begun, may_go_on = asyncio.Event(), asyncio.Event()
                using = asyncio.create_task(use(is_cancelled, begun, may_go_on))
                await asyncio.wait_for(begun.wait(), 60)
                for _ in range(2):
                    using.cancel()
                    await asyncio.sleep(0)
                may_go_on.set()
                await asyncio.wait({using})
                self.assertTrue(using.cancelled())
                await until(WITHOUT_LEASE, p)

    async def test_a_hold_that_does_not_stop_when_it_is_cancelled_holds_nothing(self):
        self.enterContext(replaced("ratelimit_hold", """
            begin
              begin
                perform pg_advisory_xact_lock(1);
              exception when query_canceled then
                perform pg_advisory_xact_lock(1);
              end;
              return original(policy, key, holder, cost);
            end"""))
        async for limiter, p in self.limiters():
            looked, send = asyncio.Event(), limiter._driver._send

            async def told(statement: Any, sql: str, args: Any) -> Any:
                row = await send(statement, sql, args)
                if "pg_stat_activity" in sql:
                    looked.set()
                return row

            with mock.patch.object(limiter._driver, "_send", told):
                with psycopg.connect() as conn:
                    conn.execute("select pg_advisory_xact_lock(1)")
                    holding = asyncio.create_task(limiter.hold(p, "k").__aenter__())
                    await until_blocked()
                    holding.cancel()
                    await asyncio.wait_for(looked.wait(), 60)
                await until_blocked(0)
                with self.assertRaises(asyncio.CancelledError):
                    await holding
                await until(WITHOUT_LEASE, p)
            self.assertEqual([], holders(p))

    async def test_a_look_at_a_statement_ends_although_its_process_goes_on(self):
        """The number of the process may be that of another session by then, or the connection of a pool runs the next statement."""
        async for limiter, _ in self.limiters():
            slot, look = "%s" if limiter._driver.percent else "$1", limiter._driver._is_seen_to_end
            async with await psycopg.AsyncConnection.connect(autocommit=True) as other:
                pid, sleeping = other.info.backend_pid, asyncio.create_task(other.execute("select pg_sleep(%s)", [300]))
                try:
                    await until("select state = 'active' from pg_stat_activity where pid = %s", pid)
                    self.assertFalse(await asyncio.wait_for(look(pid, f"select another({slot})"), 60))
                    self.assertTrue(await self.ends_in_another_transaction(limiter._driver, look(pid, f"select pg_sleep({slot})")))
                finally:
                    execute("select pg_cancel_backend(%s)", pid)
                    with self.assertRaises(psycopg.errors.QueryCanceled):
                        await sleeping

    async def ends_in_another_transaction(self, driver: Any, looking: Any) -> bool:
        send, looks = driver._send, 0

        async def told(statement: Any, sql: str, args: Any) -> Any:
            nonlocal looks
            row, looks = await send(statement, sql, args), looks + 1
            return row if looks < 3 else ("another",)

        with mock.patch.object(driver, "_send", told):
            return await asyncio.wait_for(looking, 60)

    async def test_holds_that_are_cancelled_on_their_way_hold_nothing(self):
        async for limiter, p in self.limiters():
            define_slots(p, 1000)

            async def caller(i: int) -> bool:
                holding = asyncio.create_task(limiter.hold(p, f"k{i % 7}").__aenter__())
                await asyncio.sleep(i % 40 / 20_000)
                holding.cancel()
                if i % 3 == 0:  # and does not wait for the release
                    await asyncio.sleep(0)
                    holding.cancel()
                await asyncio.wait({holding})
                if not holding.cancelled():
                    await holding.result().release()
                return holding.cancelled()

            cancelled = [await gather(caller(i), caller(i + 1)) for i in range(0, 400, 2)]  # of 4 connections
            self.assertIn([True, True], cancelled)
            await until(WITHOUT_LEASE, p)


def load_tests(loader: unittest.TestLoader, *_) -> unittest.TestSuite:
    suite = with_each_driver(loader, AsyncTest)
    in_threads = type("EachTest_threads", (EachTest,), {"driver": "threads", "__module__": __name__})
    suite.addTests(map(loader.loadTestsFromTestCase, (TenureTest, SyncTest, in_threads)))
    return suite
