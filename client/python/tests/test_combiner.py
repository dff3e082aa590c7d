import asyncio
import os
import random
import time
import unittest

import asyncpg
import psycopg

from pgratelimit import AsyncLimiter, Charge, Closed, Combiner, Decision, InvalidArgument, JointDecision, Locked, Overloaded, UnknownPolicy
from tests.kit import BLOCKED, BOTH_POOLS, AsyncCase, define, execute, gather, locked, replaced, taken, until, until_blocked, with_each_driver


class Base(AsyncCase):
    driver: str

    async def combiner(self, size: int = 4, options: str = "", **settings) -> Combiner:
        """Closed before the test ends. A caller that is held up fails after a minute, on a machine of any speed."""
        pool = await self.enterAsyncContext(BOTH_POOLS[self.driver](size, options))
        return await self.enterAsyncContext(Combiner(pool, call_timeout=60, **settings))

    def policy(self, capacity: int = 1000) -> str:
        name = f"{self.driver} {self.id().rpartition('.')[2]} {os.getpid()}"
        define(name, capacity)
        return name


class Answers(Base):
    async def test_callers_share_calls_and_each_gets_its_own_answer(self):
        p, combiner = self.policy(10), await self.combiner()
        asked = [*(combiner.acquire(p, "k", cost) for cost in (4, 4, 4, 2)), combiner.acquire("none", "k"), combiner.acquire(p, "j", 11)]
        a, b, denied, rest, unknown, never = await gather(*asked)
        self.assertEqual([(True, 6), (True, 2), (False, 2), (True, 0)], [(d.allowed, d.remaining) for d in (a, b, denied, rest)])
        self.assertEqual((None, None, 10), (denied.retry_after, denied.reset_after, denied.capacity))
        self.assertIsInstance(unknown, UnknownPolicy)
        self.assertEqual("RL001", unknown.sqlstate)
        self.assertIn("ratelimit_define_policy", unknown.hint)
        self.assertIsNone(never.retry_after)
        self.assertEqual(Decision(True, 9, 0.0, None, 10, False, False), await combiner.acquire(p, "alone"))

    async def test_keyed_requests_are_replayed(self):
        p, combiner = self.policy(), await self.combiner()
        for replayed in (False, True):
            keyed = [combiner.acquire(p, str(i), 2, idempotency_key="once") for i in range(3)]
            answers = await gather(*keyed, *(combiner.acquire(p, str(i)) for i in range(3)))
            self.assertEqual([replayed] * 3 + [False] * 3, [d.replayed for d in answers])
        self.assertEqual(4, taken(p, "0"))

    async def test_joint_requests(self):
        p, combiner = self.policy(10), await self.combiner()
        one, other = [Charge(p, "a", 3), Charge(p, "b", 8)], [Charge(p, "c"), (p, "a")]
        granted, denied, second, wrong, keyed, plain = await gather(
            combiner.acquire_all(one), combiner.acquire_all(one), combiner.acquire_all(other), combiner.acquire_all([("none", "k")]),
            combiner.acquire_all([Charge(p, "x")], idempotency_key="once"), combiner.acquire(p, "z"))
        self.assertEqual((True, 1, 2, [7, 2]), (granted.allowed, granted.binding, granted.remaining, [d.remaining for d in granted.decisions]))
        self.assertEqual((False, 1, None), (denied.allowed, denied.binding, denied.retry_after))
        self.assertEqual([True, False], [d.allowed for d in denied.decisions])
        self.assertTrue(second.allowed and keyed.allowed and plain.allowed)
        self.assertIsInstance(wrong, UnknownPolicy)
        self.assertEqual((4, 8, 1), (taken(p, "a"), taken(p, "b"), taken(p, "c")))
        self.assertIsInstance(await combiner.acquire_all(one), JointDecision)

    async def test_text_that_cannot_be_sent_and_text_that_is_too_long_harm_no_other_caller(self):
        p, combiner = self.policy(), await self.combiner()
        odd = ["a\0b", "\ud800", "x" * 513, "é" * 257, "", "quote\" slash\\ comma, {brace} \n\t"]
        *wrong, good, fine = await gather(*(combiner.acquire(p, key) for key in [*odd, "fine"]))
        self.assertEqual([InvalidArgument] * 5, [type(e) for e in wrong])
        self.assertEqual([None, None, "22023", "22023", "22023"], [e.sqlstate for e in wrong])
        self.assertTrue(good.allowed and fine.allowed)
        self.assertEqual(1, taken(p, odd[-1]))
        wrong = await gather(combiner.acquire(p, "k", 1.5), combiner.acquire(p, "k", 1 << 63), combiner.acquire(p, 5), combiner.acquire_all([]))
        self.assertEqual([InvalidArgument] * 4, [type(e) for e in wrong])

    async def test_text_that_the_server_cannot_hold_fails_its_own_request_only(self):
        p, combiner = self.policy(), await self.combiner()
        with replaced("ratelimit_acquire_packed", """
            begin
              if 'bad' = any (keys) or 'bad' = any (idempotency_keys) then raise sqlstate '22P05'; end if;
              return original(policies, keys, costs, sizes, idempotency_keys);
            end"""):
            answers = await gather(*(combiner.acquire(p, key) for key in ["a", "b", "b", "bad", "c"]))
            keyed = await gather(*(combiner.acquire(p, "k", idempotency_key=key) for key in ["a", "bad", "c"]))
        self.assertEqual([999, 999, 998, 999, 999], [d.remaining for d in answers], "alone it is sent by another function")
        self.assertEqual([999, 998, 997], [d.remaining for d in keyed])


class Callers(Base):
    async def test_a_locked_bucket_holds_up_nobody_beside_its_call(self):
        p, combiner = self.policy(), await self.combiner()
        async with locked(p, "hot"):
            stalled = [asyncio.create_task(combiner.acquire(p, key)) for key in ("hot", "hot", "with it")]
            await until_blocked()
            for _ in range(5):
                answers = await gather(
                    *(combiner.acquire(p, f"free {i}") for i in range(31)), *(combiner.acquire_all([(p, f"free {i}")]) for i in range(3)))
                self.assertEqual([Decision] * 31 + [JointDecision] * 3, [type(d) for d in answers])
            stalled.append(asyncio.create_task(combiner.acquire(p, "hot")))
            self.assertTrue(await combiner.acquire(p, "free"))
            self.assertFalse(any(task.done() for task in stalled))
        self.assertEqual([998, 997, 999, 996], [d.remaining for d in await gather(*stalled)])

    async def test_a_request_is_not_sent_once_its_caller_has_left(self):
        p, combiner = self.policy(), await self.combiner(calls_in_flight=1)
        async with locked(p, "hot"):
            first, sent = (asyncio.create_task(combiner.acquire(p, "hot")) for _ in range(2))
            await until_blocked()
            unsent = [asyncio.create_task(combiner.acquire(p, key)) for key in ("hot", "other")]
            await asyncio.sleep(0)
            self.assertEqual(2, combiner.waiting)
            for task in (sent, *unsent):
                task.cancel()
            self.assertEqual([asyncio.CancelledError] * 3, [type(e) for e in await gather(sent, *unsent)], "at once")
            self.assertEqual(0, combiner.waiting)
            self.assertFalse(first.done())
        await first
        await combiner.close()
        self.assertEqual((3, 0), (taken(p, "hot"), taken(p, "other")), "the lock's, the first caller's, and what was sent")

    async def test_overloaded(self):
        p, combiner = self.policy(), await self.combiner(max_waiting=5)
        answers = await gather(*(combiner.acquire(p, "k") for _ in range(7)))
        self.assertEqual([Decision] * 5 + [Overloaded] * 2, [type(a) for a in answers])
        self.assertEqual(5, taken(p))

    async def test_closed(self):
        p, combiner = self.policy(), await self.combiner()
        waiting = [asyncio.create_task(combiner.acquire(p, str(i))) for i in range(100)]
        waiting.append(asyncio.create_task(combiner.acquire(p, "x" * 513)))
        await asyncio.sleep(0)
        await combiner.close()
        self.assertEqual(100, sum(isinstance(a, Decision) for a in await gather(*waiting)))
        with self.assertRaises(Closed):
            await combiner.acquire(p, "k")
        self.assertTrue(await combiner.peek(p, "k"))

    async def test_no_more_calls_than_the_pool_has_connections_but_one(self):
        for size, calls in ((1, 1), (2, 1), (3, 2), (9, 2)):
            self.assertEqual(calls, (await self.combiner(size))._queue.limit)


class Failures(Base):
    async def test_a_call_that_takes_too_long_is_given_up(self):
        p, combiner = self.policy(), await self.combiner(calls_in_flight=1)
        await combiner.acquire(p, "warm")
        async with locked(p, "hot"):
            combiner._call_timeout, began = 0.3, time.monotonic()
            self.assertEqual([TimeoutError] * 2, [type(e) for e in await gather(*(combiner.acquire(p, key) for key in ("hot", "beside")))])
            self.assertGreaterEqual(time.monotonic() - began, 0.3)
            combiner._call_timeout = 60
            self.assertTrue(await combiner.acquire(p, "free"), "the place is free")
            await until_blocked(0)
            await combiner.close()
        self.assertEqual((1, 0), (taken(p, "hot"), taken(p, "beside")), "the lock's own: the server was told to stop")

    async def test_while_a_call_that_was_given_up_goes_on_its_place_is_free_and_its_buckets_stay_apart(self):
        p, combiner = self.policy(), await self.combiner(calls_in_flight=1)
        combiner._call_timeout = 0.1
        fetch, ended = combiner._driver.fetch, asyncio.Event()

        async def stubborn(sql, args, unended):
            try:
                return await fetch(sql, args, unended)
            except asyncio.CancelledError:
                await ended.wait()
                raise

        combiner._driver.fetch = stubborn
        async with locked(p, "hot"):
            with self.assertRaises(TimeoutError):
                await combiner.acquire(p, "hot")
        combiner._call_timeout = 60
        behind = asyncio.create_task(combiner.acquire(p, "hot"))
        self.assertTrue(await combiner.acquire(p, "free"))
        self.assertEqual((1, False), (combiner.waiting, behind.done()))
        ended.set()
        self.assertIn((await behind).remaining, (997, 998), "the server may have been quicker than the cancel")

    async def test_after_a_lost_connection_only_keyed_requests_are_sent_again(self):
        p, combiner = self.policy(), await self.combiner(size=5, calls_in_flight=4)
        async with locked(p, "hot"), locked(p, "warm"):
            plain = [combiner.acquire(p, "hot"), combiner.acquire(p, "a"), combiner.acquire_all([(p, "hot")])]
            keyed = [combiner.acquire(p, key, idempotency_key="once") for key in ("warm", "b")]
            plain, keyed = (asyncio.gather(*calls, return_exceptions=True) for calls in (plain, keyed))
            await until_blocked(3)
            execute(f"select pg_terminate_backend(pid) from ({BLOCKED}) as blocked")
            for error in await plain:
                self.assertIsInstance(error, (psycopg.OperationalError, asyncpg.PostgresConnectionError, asyncpg.AdminShutdownError))
            await until_blocked()
        self.assertEqual([998, 999], [d.remaining for d in await keyed])
        self.assertEqual([1, 0, 2, 1], [taken(p, key) for key in ("hot", "a", "warm", "b")])

    async def test_lock_timeout_fails_only_requests_for_the_locked_bucket(self):
        p, combiner = self.policy(), await self.combiner(options="-c lock_timeout=50")
        async with locked(p, "hot"):
            calls = [combiner.acquire(p, key) for key in ["hot", *map(str, range(40)), "hot", "0"]]
            joint = [combiner.acquire_all([(p, key), (p, "j")]) for key in ("hot", "x")]
            keyed = [combiner.acquire(p, key, idempotency_key="once") for key in ("hot", "y")]
            first, *free, last, twice, all_hot, all_x, keyed_hot, keyed_y = await gather(*calls, *joint, *keyed)
        for error in (first, last, all_hot, keyed_hot):
            self.assertIsInstance(error, Locked)
            self.assertEqual("55P03", error.sqlstate)
            self.assertIn("lock_timeout", error.hint)
        self.assertTrue(all(d.allowed for d in (*free, twice, all_x, keyed_y)))
        self.assertEqual((1, 2, 1, 1), (taken(p, "hot"), taken(p, "0"), taken(p, "j"), taken(p, "y")))

    async def test_exact_counts_while_connections_are_killed_and_callers_leave(self):
        """1,000 callers, and again for RATELIMIT_TORTURE_MINUTES. Answers are delayed by a lock."""
        ends = time.monotonic() + 60 * float(os.environ.get("RATELIMIT_TORTURE_MINUTES", 0))
        chance = random.Random(7)
        combiner = await self.combiner(size=6, calls_in_flight=3)
        while True:
            await self.storm(combiner, f"{self.policy(100_000)}", chance)
            if time.monotonic() > ends:
                return

    async def storm(self, combiner: Combiner, p: str, chance: random.Random) -> None:
        execute("select ratelimit_drop_policy(%s::text)", p)
        define(p, 100_000)
        granted, unknown = {"plain": 0, "keyed": 0}, {"plain": 0, "keyed": 0}
        lost = (psycopg.OperationalError, asyncpg.PostgresConnectionError, asyncpg.AdminShutdownError,
                asyncpg.InternalClientError, asyncpg.InterfaceError, ConnectionError)

        async def caller(n: int) -> None:
            nonlocal answers
            kind = "keyed" if n % 4 == 0 else "plain"
            for i in range(5):
                key = f"{kind} {chance.choice(['hot', n % 100])}"
                try:
                    async with asyncio.timeout(chance.choice([0.01, 0.1, 60, 60, 60])):
                        d = await combiner.acquire(p, key, idempotency_key=f"{n} {i}" if kind == "keyed" else None)
                    granted[kind] += d.allowed
                except (TimeoutError, *lost):
                    unknown[kind] += 1
                answers += 1
                if answers % 250 == 0:
                    async with storming:
                        await storm.execute(kill if answers % 500 else f"begin; select ratelimit_acquire('{p}', 'plain hot'); select pg_sleep(0.01); rollback")

        kill = """select pg_terminate_backend(pid) from pg_stat_activity
            where application_name = 'test' and datname = current_database() order by state limit 1"""  # an active one, if there is
        answers, storming, storm = 0, asyncio.Lock(), await asyncpg.connect()
        self.assertEqual({None}, set(await gather(*map(caller, range(1000)))))
        await storm.close()
        await until("select count(*) = 0 from pg_stat_activity where application_name = 'test' and datname = current_database() and state = 'active'")
        self.assertEqual(5000, sum(granted.values()) + sum(unknown.values()), "every caller got one answer")
        for kind in granted:
            took = execute("select coalesce(sum(capacity - remaining), 0)::bigint from ratelimit_status(%s::text, 1000) where key like %s", p, kind + "%")[0][0]
            self.assertGreaterEqual(took, granted[kind], kind)
            self.assertLessEqual(took, granted[kind] + unknown[kind], kind)
        self.assertTrue(granted["plain"] and granted["keyed"])
        while combiner._tasks:
            await asyncio.wait(combiner._tasks)
        self.assertEqual((0, set(), set()), (combiner.waiting, combiner._queue.open, combiner._queue.owned))


class Pooler(Base):
    async def test_through_a_pooler_in_transaction_mode(self):
        p, combiner = self.policy(), await self.combiner(size=8, calls_in_flight=6)
        pool = combiner._driver._db
        for _ in range(5):
            limiter = AsyncLimiter(pool)
            answers = await gather(
                *(combiner.acquire(p, str(i % 100), idempotency_key=str(i) if i % 2 else None) for i in range(300)),
                *(combiner.acquire_all([(p, "a"), (p, str(i))]) for i in range(10)),
                *(limiter.acquire(p, "100%s") for _ in range(20)))
            self.assertEqual({True}, {isinstance(d, Decision) and d.allowed for d in answers}, answers[-1])
        self.assertEqual((100, 50), (taken(p, "100%s"), taken(p, "a")))


def load_tests(loader: unittest.TestLoader, *_) -> unittest.TestSuite:
    """With RATELIMIT_TEST_POOLER, PGHOST is a PgBouncer."""
    cases = (Pooler,) if "RATELIMIT_TEST_POOLER" in os.environ else (Answers, Callers, Failures)
    return with_each_driver(loader, *cases)
