import asyncio
import functools
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from unittest import mock

import psycopg
import psycopg_pool

from pgratelimit import AsyncLimiter, Combiner, InvalidArgument, LeaseLost, Limiter, UnknownPolicy, hold
from pgratelimit.hold import Tenure
from tests.kit import BOTH_POOLS, AsyncCase, define, define_slots, execute, gather, holders, until, until_blocked, with_each_driver

WITHOUT_LEASE = "select count(*) = 0 from ratelimit_holders(%s::text)"
RENEWED = "select held_for > interval '45 minutes' from ratelimit_holders(%s::text)"
FAIL_BLOCKED = """select pg_cancel_backend(pid) from pg_stat_activity
    where application_name = 'test' and datname = current_database() and wait_event_type = 'Lock'"""
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
    """A driver whose calls of a function are counted, and fail while told to."""

    def __init__(self, test: unittest.TestCase, limiter: Limiter | AsyncLimiter, name: str) -> None:
        self.calls, self.fails = 0, False
        fetch = limiter._driver.fetch

        def flaky(sql, args, *unended):
            if f"{name}(" in sql:
                self.calls += 1
                if self.fails:
                    raise AN_ERROR("down")
            return fetch(sql, args, *unended)

        test.enterContext(mock.patch.object(limiter._driver, "fetch", flaky))


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

    def until(self, condition):
        asyncio.run(until(condition, self.policy))

    def test_slots_are_held_until_the_end_of_the_block(self):
        with self.limiter.hold(self.policy, "k", cost=2) as held:
            self.assertTrue(held)
            self.assertEqual((True, 1, 0.0, 3600.0, 3, False, False, False),
                             (held.allowed, held.remaining, held.retry_after, held.held_for, held.capacity, held.renewed, held.shadowed, held.lost))
            self.assertEqual([held.holder], holders(self.policy))
            held.check()
            with self.limiter.hold(self.policy, "k", 2) as denied:
                self.assertEqual((False, False, 1, 0.0, True), (bool(denied), denied.allowed, denied.remaining, denied.held_for, denied.lost))
                self.assertTrue(0 < denied.retry_after <= 3600)
                self.assertIsNone(denied._thread)
                with self.assertRaises(LeaseLost):
                    denied.check()
            with self.limiter.hold(self.policy, "k", 4) as never:
                self.assertIsNone(never.retry_after)
        self.assertEqual((True, []), (held.lost, holders(self.policy)))

    def test_release_is_safe_to_repeat_also_after_it_failed(self):
        release = Flaky(self, self.limiter, "ratelimit_release")
        with self.limiter.hold(self.policy, "k") as held:
            release.fails = True
            with self.assertRaises(AN_ERROR):
                held.release()
            self.assertTrue(held.lost)
            self.assertEqual([held.holder], holders(self.policy))
            release.fails, before = False, release.calls
            held.release()
            held.release()
        self.assertEqual((before + 1, []), (release.calls, holders(self.policy)))

    def test_the_error_of_a_block_comes_before_that_of_its_release(self):
        release = Flaky(self, self.limiter, "ratelimit_release")
        self.enterContext(mock.patch("pgratelimit.limiter.MAX_UNDOING", 0))
        release.fails = True
        with self.assertRaises(ZeroDivisionError), self.limiter.hold(self.policy, "k"):
            raise ZeroDivisionError
        with self.assertRaises(AN_ERROR), self.limiter.hold(self.policy, "k"):
            pass

    def test_the_lease_is_renewed_when_a_third_is_over(self):
        time, renew = FakeTime(self), Flaky(self, self.limiter, "ratelimit_renew")
        with self.limiter.hold(self.policy, "k") as held:
            age(self.policy)
            time.ahead += 1201
            self.until(RENEWED)
            time.ahead += 1100
            self.assertFalse(held.lost)
        self.assertEqual((1, []), (renew.calls, holders(self.policy)))

    def test_a_lease_that_is_over_is_lost_at_the_first_look(self):
        with self.limiter.hold(self.policy, "k") as held:
            self.enterContext(mock.patch.object(hold, "monotonic", lambda: held._tenure.until))
            with self.assertRaises(LeaseLost):
                held.check()
        self.assertEqual([], holders(self.policy), "what is lost here is released there")

    def test_a_renewal_finds_that_the_slots_were_reset_or_their_policy_dropped(self):
        for lose in ("select ratelimit_reset(%s::text, 'k')", "select ratelimit_drop_policy(%s::text)"):
            time = FakeTime(self)
            with self.limiter.hold(self.policy, "k") as held:
                execute(lose, self.policy)
                time.ahead += 1201
                held._thread.join()
                self.assertTrue(held.lost)

    def test_an_invalid_argument_of_a_renewal_ends_the_hold(self):
        for error in (InvalidArgument("the policy is one of tokens now"), UnknownPolicy("dropped")):
            time = FakeTime(self)
            with self.limiter.hold(self.policy, "k") as held:
                held._renew = mock.Mock(side_effect=error)
                time.ahead += 1201
                held._thread.join(60)
                self.assertEqual((True, False, 1), (held.lost, held._thread.is_alive(), held._renew.call_count))

    def test_a_hold_that_is_forgotten_does_not_keep_the_process(self):
        program = f"""
import psycopg_pool, pgratelimit
pool = psycopg_pool.ConnectionPool(min_size=1, max_size=2)
forgotten = pgratelimit.Limiter(pool).hold({self.policy!r}, "k")
print(bool(forgotten.__enter__()), flush=True)
"""
        done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
        self.assertEqual(("True\n", 0), (done.stdout, done.returncode))

    def test_a_hold_whose_answer_and_retries_were_lost_is_released_in_the_background(self):
        self.enterContext(mock.patch("pgratelimit.limiter.UNDO_PAUSE", 0.01))
        fetch, is_down = self.limiter._driver.fetch, threading.Event()
        tried = threading.Semaphore(0)

        def lossy(sql, args):
            if not is_down.is_set():
                row = fetch(sql, args)  # the server has committed it
                is_down.set()
            elif "ratelimit_hold(" not in sql:
                tried.release()
            if is_down.is_set():
                raise AN_ERROR("server closed the connection unexpectedly")
            return row

        with mock.patch.object(self.limiter._driver, "fetch", lossy):
            with self.assertRaises(AN_ERROR):
                self.limiter.hold(self.policy, "k").__enter__()
            for _ in range(4):  # of which each release makes three
                tried.acquire(timeout=60)
            self.assertEqual(1, len(holders(self.policy)))
        self.until(WITHOUT_LEASE)
        self.leaves_nothing_to_undo()

    def test_a_release_that_fails_at_the_end_of_the_block_goes_on_until_the_lease_ends(self):
        self.enterContext(mock.patch("pgratelimit.limiter.UNDO_PAUSE", 0.01))
        release = Flaky(self, self.limiter, "ratelimit_release")
        release.fails = True
        with self.assertRaises(AN_ERROR), self.limiter.hold(self.policy, "k"):
            pass
        self.assertEqual(1, len(holders(self.policy)))
        release.fails = False
        self.until(WITHOUT_LEASE)
        self.leaves_nothing_to_undo()
        time, release.fails = FakeTime(self), True
        with self.assertRaises(AN_ERROR), self.limiter.hold(self.policy, "k"):
            pass
        time.ahead += 3601
        self.leaves_nothing_to_undo()

    def leaves_nothing_to_undo(self):
        for thread in threading.enumerate():
            if thread.name == "pgratelimit undoes":
                thread.join(60)
                self.assertFalse(thread.is_alive())

    def test_a_renewal_that_fails_is_tried_again_until_the_lease_ends(self):
        time, renew = FakeTime(self), Flaky(self, self.limiter, "ratelimit_renew")
        renew.fails = True
        with self.limiter.hold(self.policy, "k") as held:
            time.ahead += 1201
            for calls in (3, 6, 7):  # three tries each
                while renew.calls < calls:
                    held._thread.join(0.002)
                time.ahead += 2
            self.assertFalse(held.lost)
            time.ahead += 3600
            held._thread.join()
            self.assertTrue(held.lost)

    def test_release_waits_for_a_renewal_under_way(self):
        time, order, begun, go = FakeTime(self), [], threading.Event(), threading.Event()
        with self.limiter.hold(self.policy, "k") as held:
            renew, release = held._renew, held._release
            held._renew = lambda: (begun.set(), go.wait(), order.append("renewed"), renew())[-1]
            held._release = lambda: (order.append("released"), release())[-1]
            time.ahead += 1201
            begun.wait()
            releasing = threading.Thread(target=held.release)
            releasing.start()
            held._stop.wait()
            go.set()
            releasing.join()
        self.assertEqual((["renewed", "released"], []), (order, holders(self.policy)))

    def test_under_a_policy_that_watches_no_more_calls_are_made(self):
        policy = self.policy + " shadow"
        define_slots(policy, 1, shadow=True)
        with self.limiter.hold(policy, "k"), self.limiter.hold(policy, "k") as held:
            self.assertEqual((True, True, None, False), (held.allowed, held.shadowed, held._thread, held.lost))
            with mock.patch.object(self.limiter, "_run", side_effect=AssertionError):
                held.release()
            self.assertTrue(held.lost)

    def test_renew_and_release_of_a_holder_of_ones_own(self):
        with psycopg.connect(autocommit=True) as conn:
            for limiter in (self.limiter, Limiter(conn, schema="public")):
                execute("select ratelimit_hold(%s::text, 'k', 'job 7, attempt 1')", self.policy)
                call = self.policy, "k", "job 7, attempt 1"
                self.assertEqual([3600.0, True, False, None], [limiter.renew(*call), limiter.release(*call), limiter.release(*call), limiter.renew(*call)])

    def test_errors(self):
        bucket = self.policy + " bucket"
        define(bucket, 10)
        for error, sqlstate, call in (
            (UnknownPolicy, "RL001", lambda: self.limiter.hold("none", "k").__enter__()),
            (InvalidArgument, "22023", lambda: self.limiter.hold(bucket, "k").__enter__()),
            (InvalidArgument, "22023", lambda: self.limiter.renew(bucket, "k", "h")),
            (InvalidArgument, "22023", lambda: self.limiter.release(bucket, "k", "h")),
            (InvalidArgument, "22023", lambda: self.limiter.hold(self.policy, "k", 0).__enter__()),
            (InvalidArgument, None, lambda: self.limiter.hold(self.policy, "k", 1.5).__enter__()),
            (InvalidArgument, None, lambda: self.limiter.renew(self.policy, "k", 7)),
        ):
            with self.assertRaises(error) as raised:
                call()
            self.assertEqual(sqlstate, raised.exception.sqlstate)
        with psycopg.connect(autocommit=True) as conn, self.assertRaisesRegex(InvalidArgument, "needs a pool"):
            Limiter(conn).hold(self.policy, "k").__enter__()

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


class AsyncTest(AsyncCase):
    driver: str

    async def asyncSetUp(self):
        await super().asyncSetUp()
        for bound in ("pgratelimit.hold.RELEASE_TIMEOUT", "pgratelimit.limiter.GIVE_BACK_TIMEOUT"):
            self.enterContext(mock.patch(bound, 60))  # on a machine of any speed

    async def limiters(self):
        """An AsyncLimiter and a Combiner, each with a policy."""
        pool = await self.enterAsyncContext(BOTH_POOLS[self.driver](4))
        for n, limiter in enumerate((AsyncLimiter(pool), await self.enterAsyncContext(Combiner(pool)))):
            policy = f"{self.driver} {self.id()} {n}"
            define_slots(policy)
            yield limiter, policy

    async def test_slots_are_held_until_the_end_of_the_block(self):
        async for limiter, p in self.limiters():
            async with limiter.hold(p, "k", cost=2) as held:
                self.assertEqual((True, 1, 0.0, 3600.0, 3, False, [held.holder]),
                                 (bool(held), held.remaining, held.retry_after, held.held_for, held.capacity, held.lost, holders(p)))
                async with limiter.hold(p, "k", 2) as denied:
                    self.assertEqual((False, None, True), (denied.allowed, denied._task, denied.lost))
                self.assertEqual(3600.0, await limiter.renew(p, "k", held.holder))
                await gather(held.release(), held.release())
                with self.assertRaises(LeaseLost):
                    held.check()
                self.assertFalse(await limiter.release(p, "k", held.holder))
            self.assertEqual([], holders(p))
            with self.assertRaises(UnknownPolicy):
                await limiter.hold("none", "k").__aenter__()

    async def test_the_lease_is_renewed_and_its_loss_is_found(self):
        time = FakeTime(self)
        async for limiter, p in self.limiters():
            async with limiter.hold(p, "k") as held:
                age(p)
                time.ahead += 1201
                await until(RENEWED, p)
                execute("select ratelimit_reset(%s::text, 'k')", p)
                time.ahead += 1300
                await asyncio.wait({held._task})
                self.assertTrue(held.lost)
            async with limiter.hold(p, "k") as held:
                time.ahead += 3601
                self.assertTrue(held.lost, "at the first look")

    async def test_an_invalid_argument_of_a_renewal_ends_the_hold(self):
        async for limiter, p in self.limiters():
            for error in (InvalidArgument("the policy is one of tokens now"), UnknownPolicy("dropped")):
                time = FakeTime(self)
                async with limiter.hold(p, "k") as held:
                    held._renew = mock.AsyncMock(side_effect=error)
                    time.ahead += 1201
                    await asyncio.wait({held._task}, timeout=60)
                    self.assertEqual((True, True, 1), (held.lost, held._task.done(), held._renew.await_count))

    async def test_a_hold_whose_answer_and_retries_were_lost_is_released_in_the_background(self):
        async for limiter, p in self.limiters():
            fetch, calls = limiter._driver.fetch, []

            async def lossy(sql, args, unended):
                calls.append("hold" if "ratelimit_hold(" in sql else "other")
                if len(calls) == 1 or calls.count("other") > 4:
                    row = await fetch(sql, args, unended)  # the server has committed it
                if calls.count("other") <= 4:
                    raise AN_ERROR("server closed the connection unexpectedly")
                return row

            with mock.patch.object(limiter._driver, "fetch", lossy):
                with self.assertRaises(AN_ERROR):
                    await limiter.hold(p, "k").__aenter__()
                self.assertEqual((["hold"] * 3, 1), (calls, len(holders(p))))
                await until(WITHOUT_LEASE, p)

    async def test_a_release_that_fails_at_the_end_of_the_block_goes_on_until_the_lease_ends(self):
        async for limiter, p in self.limiters():
            release = Flaky(self, limiter, "ratelimit_release")
            release.fails = True
            with self.assertRaises(AN_ERROR):
                async with limiter.hold(p, "k"):
                    pass
            self.assertEqual(1, len(holders(p)))
            release.fails = False
            await until(WITHOUT_LEASE, p)

    async def test_a_renewal_that_fails_is_tried_again_until_the_lease_ends(self):
        time = FakeTime(self)
        async for limiter, p in self.limiters():
            renew = Flaky(self, limiter, "ratelimit_renew")
            renew.fails = True
            async with limiter.hold(p, "k") as held:
                time.ahead += 1201
                for calls in (3, 6, 7):
                    while renew.calls < calls:
                        await asyncio.wait({held._task}, timeout=0.002)
                    time.ahead += 2
                self.assertFalse(held.lost)
                time.ahead += 3600
                await asyncio.wait({held._task})
                self.assertTrue(held.lost)

    async def test_release_waits_for_a_renewal_under_way(self):
        time = FakeTime(self)
        async for limiter, p in self.limiters():
            async with limiter.hold(p, "k") as held:
                conn = await psycopg.AsyncConnection.connect()
                await conn.execute("select ratelimit_hold(%s::text, 'k', 'other')", (p,))
                is_idle, release = [], held._release
                held._release = lambda: (is_idle.append(held._task.done()), release())[-1]
                time.ahead += 1201
                await until_blocked()
                releasing = asyncio.create_task(held.release())
                await asyncio.sleep(0)
                self.assertEqual((True, False), (held.lost, held._task.done()))
                await conn.close()
                await releasing
            self.assertEqual(([True], []), (is_idle, holders(p)))

    async def test_under_a_policy_that_watches_no_more_calls_are_made(self):
        async for limiter, p in self.limiters():
            define_slots(p + " shadow", 1, shadow=True)
            async with limiter.hold(p + " shadow", "k"), limiter.hold(p + " shadow", "k") as held:
                self.assertEqual((True, None, False), (held.shadowed, held._task, held.lost))
                with mock.patch.object(limiter, "_run", side_effect=AssertionError):
                    await held.release()

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

    async def test_a_pool_that_was_closed_is_known_as_closed(self):
        async with BOTH_POOLS[self.driver](1) as pool:
            driver = AsyncLimiter(pool)._driver
            self.assertFalse(driver.is_closed())
        self.assertTrue(driver.is_closed())  # else a call is undone on it for an hour

    async def test_a_hold_that_is_cancelled_during_its_call_holds_nothing(self):
        async for limiter, p in self.limiters():
            async with limiter.hold(p, "k"):
                pass
            conn = await psycopg.AsyncConnection.connect()
            await conn.execute("select ratelimit_hold(%s::text, 'k', 'other')", (p,))
            holding = asyncio.create_task(limiter.hold(p, "k").__aenter__())
            await until_blocked()
            holding.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await holding
            await conn.close()
            await until_blocked(0)
            self.assertEqual([], holders(p))

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
                    execute(FAIL_BLOCKED)
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
                await begun.wait()
                for _ in range(2):
                    using.cancel()
                    await asyncio.sleep(0)
                may_go_on.set()
                await asyncio.wait({using})
                self.assertTrue(using.cancelled())
                await until(WITHOUT_LEASE, p)

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

    async def test_1000_holds_of_which_some_are_cancelled_leave_no_task(self):
        async for limiter, p in self.limiters():
            define_slots(p, 1000)

            async def use(i: int, holds: asyncio.Event) -> None:
                async with limiter.hold(p, f"k{i % 7}") as held:
                    self.assertTrue(held)
                    holds.set()
                    if i % 2:
                        await asyncio.Event().wait()

            async def caller(i: int) -> None:
                holds = asyncio.Event()
                task = asyncio.create_task(use(i, holds))
                if i % 2:  # during the block: drivers lose connections with callers that wait for one
                    await holds.wait()
                    task.cancel()
                await asyncio.wait({task})
                self.assertEqual(i % 2 == 1, task.cancelled())

            for begin in range(0, 500, 20):
                self.assertEqual([None] * 20, await gather(*map(caller, range(begin, begin + 20))))
            self.assertEqual([], [t for t in asyncio.all_tasks() - {asyncio.current_task()} if "pgratelimit" in repr(t)])
            await until(WITHOUT_LEASE, p)


def load_tests(loader: unittest.TestLoader, *_) -> unittest.TestSuite:
    suite = with_each_driver(loader, AsyncTest)
    suite.addTests(map(loader.loadTestsFromTestCase, (TenureTest, SyncTest)))
    return suite
