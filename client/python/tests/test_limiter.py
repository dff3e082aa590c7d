import asyncio
import contextlib
import io
import random
import re
import subprocess
import sys
import time
import unittest
import warnings
from contextlib import redirect_stdout
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import asyncpg
import psycopg
import psycopg_pool
from psycopg.rows import dict_row

import pgratelimit
from pgratelimit import (
    AsyncLimiter, Charge, Combiner, Denied, IdempotencyMismatch, InvalidArgument, Limiter, NoGrant, TooLate, UnknownPolicy, drivers
)
from pgratelimit.answers import Reservation, seconds
from pgratelimit.calls import statement, texts
from pgratelimit.limiter import _pauses
from tests.kit import (
    AsyncCase, Threads, asyncpg_pool_of, define, define_quota, define_slots, execute, fails_once, gather, psycopg_pool_of, stopped_clock, taken,
    transaction, until, vectors
)


class VectorsTest(unittest.TestCase):
    """The answers that clients of all languages have in common: tests/vectors."""

    def setUp(self):
        self.conn = self.enterContext(psycopg.connect(autocommit=True))
        self.limiter = Limiter(self.conn)

    def test_buckets(self):
        with stopped_clock() as set_clock:
            for v in vectors("buckets.json"):
                policy = v["name"]
                execute("select ratelimit_define_policy(%s::text, %s::bigint, %s::bigint, %s * interval '1 ms', %s)",
                        policy, v["capacity"], v["refill"], v["every"], v["stepped"])
                set_clock(0)
                if v["taken"]:
                    self.limiter.acquire(policy, "k", v["taken"])
                for step in v["steps"]:
                    set_clock(step["at"])
                    with self.subTest(policy, step=step):
                        self.check(step, self.call(policy, step))

    def call(self, policy, step):
        if step["call"] == "reset":
            execute("select ratelimit_reset(%s::text, 'k')", policy)
            return self.limiter.peek(policy, "k", 0)
        return getattr(self.limiter, step["call"])(policy, "k", step["tokens"])

    def check(self, step, d):
        self.assertEqual((step["allowed"], step["allowed"]), (d.allowed, d.retry_after == 0))
        if "remaining" in step:
            self.assertEqual(step["remaining"], d.remaining)
        for name in ("retry_after", "reset_after"):
            if name in step:
                got = getattr(d, name)
                self.assertEqual(step[name], got and round(got * 1_000_000) / 1000)

    def test_errors(self):
        define("api", 10, 1, "1 hour")
        for name in ("once", "over"):
            self.limiter.acquire("api", "user:42", 2, idempotency_key=name)
        self.limiter.settle("api", "user:42", "over", 1)
        for v in vectors("errors.json"):
            at, cost, name = (v["policy"], v["key"]), v.get("cost", 1), v.get("idempotency_key")
            with self.subTest(v["name"]), self.assertRaises(getattr(pgratelimit, v["error"])) as raised:
                match v["call"]:
                    case "acquire":
                        self.limiter.acquire(*at, cost, idempotency_key=name)
                    case "settle":
                        self.limiter.settle(*at, name, cost)
                    case call:
                        getattr(self.limiter, call)(*at, cost)
            self.assertEqual(v.get("sqlstate"), raised.exception.sqlstate)
            self.assertIn(raised.exception.hint or "", str(raised.exception))


def calls_of(policy, slots):
    """A call of each method."""
    return (
        ("acquire", policy, "k"), ("acquire_all", [(policy, "k"), (policy, "j")]), ("peek", policy, "k"), ("charge", policy, "k", 1),
        ("settle", policy, "k", "none", 1), ("reserve", policy, "k", 1), ("acquire_up_to", policy, "k", 1), ("refund", policy, "k", 1),
        ("pause", policy, "paused", 0.001), ("wait", policy, "k"), ("renew", slots, "k", "h"), ("release", slots, "k", "h"),
        ("hold", slots, "k"),
    )


class EachTest(AsyncCase):
    """What a Limiter and an AsyncLimiter do alike, on a pool and a connection of each driver."""

    async def asyncSetUp(self):
        await super().asyncSetUp()
        self.policy = self.id()
        define(self.policy, 10, 1, "1 hour")

    async def handles(self):
        """A pool and a connection of each driver for asyncio."""
        for pool in (psycopg_pool_of, asyncpg_pool_of):
            async with pool(2) as pool:
                yield pool
        async with await psycopg.AsyncConnection.connect("application_name=test", autocommit=True) as conn:
            yield conn
        conn = await asyncpg.connect(server_settings={"application_name": "test"})
        yield conn
        await conn.close()

    async def limiters(self):
        with psycopg_pool.ConnectionPool(min_size=1, max_size=2) as pool, psycopg.connect(autocommit=True) as conn:
            yield Threads(Limiter(pool))
            yield Threads(Limiter(conn))
        async for db in self.handles():
            yield AsyncLimiter(db)

    async def test_every_call(self):
        p = self.policy
        async for limiter in self.limiters():
            d = await limiter.acquire(p, "k", 3)
            self.assertEqual((True, 7, 0.0), (d.allowed, d.remaining, d.retry_after))
            d = await limiter.peek(p, "k", 8)
            self.assertEqual((False, 7), (d.allowed, d.remaining))
            self.assertFalse(d, "a denial is false")
            self.assertTrue(0 < d.retry_after <= 3600 and 0 < d.reset_after <= 10800)
            d = await limiter.pause(p, "paused", 1.5)
            self.assertTrue(1.5 <= d.retry_after and not d and d.remaining == 0)
            self.assertEqual(-2, (await limiter.charge(p, "k", 9, idempotency_key="job")).remaining)
            self.assertEqual(5, (await limiter.settle(p, "k", "job", 2)).remaining)
            d = await limiter.acquire_up_to(p, "k", 6)
            self.assertEqual((5, 0), (d.taken, d.remaining))
            self.assertEqual(4, (await limiter.refund(p, "k", 4)).remaining)
            r = await limiter.reserve(p, "k", 7200, 5)
            self.assertTrue(r and 3500 < r.wait <= 3600)
            self.assertEqual(-1, r.remaining)
            self.assertFalse(await limiter.reserve(p, "k", 0.5, 5))
            d = await limiter.acquire_all([Charge(p, "a", 3), (p, "b"), (p, "a", 3)], idempotency_key="all")
            self.assertEqual((True, 0, [4, 9, 4]), (d.allowed, d.binding, [each.remaining for each in d.decisions]))
            for replayed in False, True:
                s = await limiter.settle_all([Charge(p, "a", 1), (p, "b", 3), (p, "a", 1)], "all")
                self.assertEqual((replayed, [8, 7, 8]), (s.replayed, [each.remaining for each in s.decisions]))
            for error, sqlstate, call in (
                (UnknownPolicy, "RL001", limiter.acquire("none", "k")),
                (IdempotencyMismatch, "RL002", limiter.charge(p, "k", 1, idempotency_key="job")),
                (NoGrant, "RL003", limiter.settle(p, "k", "none", 1)),
                (NoGrant, "RL003", limiter.settle_all([(p, "k")], "none")),
                (InvalidArgument, "22023", limiter.refund(p, "k", -1)),
                (InvalidArgument, None, limiter.pause(p, "k", 0)),
                (InvalidArgument, "22023", limiter.acquire_all([])),
                (InvalidArgument, None, limiter.reserve(p, "k", float("nan"))),
            ):
                with self.assertRaises(error) as raised:
                    await call
                self.assertEqual(sqlstate, raised.exception.sqlstate)
                self.assertTrue(raised.exception.message and (raised.exception.hint or sqlstate is None))
            for key in ("k", "a", "b", "paused"):
                execute("select ratelimit_reset(%s::text, %s::text)", p, key)
            execute("delete from ratelimit.idempotency_keys")

    async def test_a_row_of_another_shape_is_an_error_and_never_none(self):
        async def call(limiter, name, args):
            called = getattr(limiter, name)(*args)
            return await (called.__aenter__() if name == "hold" else called)

        async for limiter in self.limiters():
            own = getattr(limiter, "of", limiter)
            fetch = own._driver.fetch

            def wrong(change):
                def fetched(sql, args, *unended):
                    return change(sql)

                async def fetched_later(*args):
                    return fetched(*args)

                return fetched_later if own is limiter else fetched

            for change in (
                lambda sql: None, lambda sql: (), lambda sql: ("f",), lambda sql: (True,) * 3, lambda sql: {"renew": None, "x": 1},
                lambda sql: ("f", 1, None, 1, 10, "f", "f"), lambda sql: (None, 1, 0, 1, 10, False, False), lambda sql: (True, None, 0, 1, 10, False, False),
                lambda sql: ("f", 1, 0, 0, 10, False, False), lambda sql: ("[[1]]",), lambda sql: (1, 2, 3, 4, 5, 6, 7, 8, 9),
            ):
                own._driver.fetch = wrong(change)
                try:
                    for name, *args in calls_of("p", "p"):
                        if name == "hold" and not own._driver.is_pool or name == "wait" and not own._driver.is_alone():
                            continue
                        with self.subTest(name, row=change("")), self.assertRaisesRegex(pgratelimit.Error, "another shape"):
                            await call(limiter, name, args)
                finally:
                    own._driver.fetch = fetch
                    while drivers._kept:
                        await asyncio.wait(drivers._kept)

    async def test_durations_are_seconds_or_a_timedelta(self):
        async for limiter in self.limiters():
            for wrong in (-1, float("nan"), True, "5", None, b"5", -timedelta(1), float("-inf")):
                for name, call in (
                    ("max_wait", lambda: limiter.reserve(self.policy, "k", wrong)),
                    ("timeout", lambda: limiter.wait(self.policy, "k", timeout="" if wrong is None else wrong)),
                    ("pause_for", lambda: limiter.pause(self.policy, "k", wrong)),
                ):
                    with self.subTest(name, wrong=wrong), self.assertRaisesRegex(InvalidArgument, name):
                        await call()
            with self.assertRaisesRegex(InvalidArgument, "pause_for is 0 seconds"):
                await limiter.pause(self.policy, "k", 0)
            for right in (0, 1.5, timedelta(days=30), float("inf"), Fraction(1, 3)):
                self.assertTrue(await limiter.reserve(self.policy, "k", right))
                self.assertTrue(await limiter.wait(self.policy, "j", timeout=right))
            for right in (0.001, timedelta(days=30), float("inf")):
                d = await limiter.pause(self.policy, "paused", right)
            self.assertAlmostEqual(365 * 86400, d.retry_after, delta=3700)
            for key in ("k", "j", "paused"):
                execute("select ratelimit_reset(%s::text, %s::text)", self.policy, key)

    async def test_an_argument_that_is_wrong_is_named_with_what_it_is_and_the_remedy(self):
        define(self.policy, 5)
        async for limiter in self.limiters():
            for wrong in ({"policy": self.policy, "key": "k", "cost": 1}, "pk", {"p", "k"}, None, ("p",), ("p", "k", 1, 2)):
                with self.assertRaisesRegex(InvalidArgument, f"a {type(wrong).__name__}"):
                    await limiter.acquire_all([wrong])
            for said, policy, key, cost in (
                ("policy is of type NoneType, not a str; pass a text of 1 to 512 bytes", None, "k", 1),
                ("key is of type NoneType, not a str; pass a text of 1 to 512 bytes", self.policy, None, 1),
                ("key is of type int, not a str; pass a text of 1 to 512 bytes", self.policy, 42, 1),
                ("cost is of type float, not an int; pass a whole number of tokens", self.policy, "k", 1.5),
                ("cost is of type str, not an int; pass a whole number of tokens", self.policy, "k", "5"),
                ("cost is of type bool, not an int; pass a whole number of tokens", self.policy, "k", True),
            ):
                for call in (limiter.acquire(policy, key, cost), limiter.acquire_all([(policy, key, cost)])):
                    with self.assertRaises(InvalidArgument) as raised:
                        await call
                    self.assertEqual(f"pgratelimit: invalid argument: {said}", str(raised.exception))
            self.assertEqual(5, (await limiter.peek(self.policy, "k")).remaining)

    async def test_a_third_of_all_calls_cancelled_leaves_the_pool_its_connections(self):
        slots = self.policy + " slots"
        define_slots(slots, 1000)
        define(self.policy, 1_000_000, 1, "1 hour")
        chance = random.Random(7)
        for pool_of in (psycopg_pool_of, asyncpg_pool_of):
            for kind in (AsyncLimiter, Combiner):
                async with pool_of(3) as pool:
                    limiter, p = kind(pool), self.policy

                    async def make(name, *args):
                        if name != "hold":
                            return await getattr(limiter, name)(*args)
                        async with limiter.hold(*args):
                            pass

                    methods = calls_of(p, slots)

                    async def caller():
                        for _ in range(3):
                            for method in chance.sample(methods, len(methods)):
                                call = asyncio.ensure_future(make(*method))
                                if chance.random() < 1 / 3:
                                    await asyncio.sleep(chance.random() / 100)
                                    call.cancel()
                                await gather(call)

                    await gather(*(caller() for _ in range(8)))
                    async with asyncio.timeout(60):  # each of the connections is there, at the same time
                        async with contextlib.AsyncExitStack() as stack:
                            for _ in range(3):
                                await stack.enter_async_context(pool.connection() if pool_of is psycopg_pool_of else pool.acquire())
                        self.assertEqual([True] * 100, [bool(d) for d in await gather(*(limiter.acquire(p, str(i)) for i in range(100)))])
                        if kind is Combiner:
                            await limiter.close()
                        await until("select count(*) = 0 from ratelimit_holders(%s::text)", slots)

    async def test_a_caller_that_was_cancelled_while_it_waited_for_a_connection_leaves_at_once(self):
        for pool_of in (psycopg_pool_of, asyncpg_pool_of):
            async with pool_of(1) as pool:
                limiter = AsyncLimiter(pool)
                async with pool.connection() if pool_of is psycopg_pool_of else pool.acquire():
                    with self.assertRaises(TimeoutError):
                        async with asyncio.timeout(0.01):
                            await limiter.acquire(self.policy, "k")
                self.assertTrue(await limiter.peek(self.policy, "k"))
        self.assertEqual(0, taken(self.policy), "nothing was sent")

    async def test_a_connection_is_in_the_callers_transaction(self):
        async def use(limiter):
            self.assertTrue(await limiter.acquire(self.policy, "k"))
            with self.assertRaisesRegex(InvalidArgument, "outside a transaction"):
                await limiter.wait(self.policy, "k")

        async with transaction() as conn:
            await use(AsyncLimiter(conn))
        async with await psycopg.AsyncConnection.connect() as conn:
            await use(AsyncLimiter(conn))
            await conn.rollback()
        with psycopg.connect() as conn:  # it opens a transaction by itself
            await use(Threads(Limiter(conn)))
            conn.rollback()
            self.assertEqual(0, taken(self.policy))
            await use(Threads(Limiter(conn)))
            conn.commit()
        self.assertEqual(1, taken(self.policy))

    async def test_a_conflict_a_replaced_function_and_a_moved_shard_are_repeated_where_the_call_is_alone(self):
        async def fails(limiter, sqlstate, message):
            with fails_once(sqlstate, message), self.assertRaises((psycopg.Error, asyncpg.PostgresError)) as raised:
                await limiter.acquire(self.policy, "k")
            self.assertEqual(sqlstate, raised.exception.sqlstate)

        errors = ("40001", "made up"), ("XX000", "cache lookup failed for function 16999"), ("XX000", "the shard has moved")
        async for limiter in self.limiters():
            for error in errors:
                with fails_once(*error):
                    self.assertTrue(await limiter.acquire(self.policy, "k"))
            execute("select ratelimit_reset(%s::text, 'k')", self.policy)
        for error in errors:
            async with transaction() as conn:
                await fails(AsyncLimiter(conn), *error)
            with psycopg.connect(autocommit=True) as conn, conn.transaction(force_rollback=True):
                await fails(Threads(Limiter(conn)), *error)
            with psycopg.connect() as conn:
                await fails(Threads(Limiter(conn)), *error)
        self.assertEqual(0, taken(self.policy))

    async def test_a_cancelled_wait_gives_the_tokens_back(self):
        async for db in self.handles():
            limiter = AsyncLimiter(db)
            await limiter.charge(self.policy, "k", 10)
            waiting = asyncio.create_task(limiter.wait(self.policy, "k", 5))
            await until("select remaining < 0 from ratelimit_peek(%s::text, 'k')", self.policy)
            waiting.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await waiting
            self.assertEqual(0, execute("select remaining from ratelimit_peek(%s::text, 'k')", self.policy)[0][0])
            execute("select ratelimit_reset(%s::text, 'k')", self.policy)


class SyncTest(unittest.TestCase):
    def setUp(self):
        self.policy = self.id()
        define(self.policy, 10, 1, "1 hour")
        self.pool = self.enterContext(psycopg_pool.ConnectionPool(min_size=1, max_size=2))
        self.conn = self.enterContext(psycopg.connect())

    def test_a_call_on_a_pool_is_committed_and_leaves_the_connection_as_it_was(self):
        limiter = Limiter(self.pool)
        limiter.acquire(self.policy, "k")
        self.assertEqual(1, taken(self.policy))
        with self.assertRaises(UnknownPolicy):
            limiter.acquire("none", "k")
        with self.pool.connection() as conn:
            self.assertFalse(conn.autocommit)
            self.assertEqual(0, conn.pgconn.transaction_status)

    def test_the_settings_of_a_connection_do_not_matter(self):
        for factory in (psycopg.Cursor, psycopg.ClientCursor):
            with psycopg.connect(row_factory=dict_row, cursor_factory=factory, autocommit=True, prepare_threshold=0) as conn:
                conn.execute("set intervalstyle = 'iso_8601'")
                limiter = Limiter(conn)
                self.assertTrue(limiter.acquire(self.policy, "100%s $1 \\", idempotency_key="%s"))
                self.assertTrue(limiter.acquire_all([(self.policy, '{"%s", \\')]))
                prepared = conn.execute("select statement from pg_prepared_statements where statement ~ 'ratelimit_'", prepare=False)
                self.assertEqual([], prepared.fetchall())

    def test_a_call_that_opens_a_transaction_is_warned_about_once(self):
        limiter = Limiter(self.conn)
        with self.assertWarnsRegex(RuntimeWarning, "no autocommit"):
            limiter.acquire(self.policy, "k")
        self.conn.rollback()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            limiter.acquire(self.policy, "k")
            self.conn.rollback()
            with self.conn.transaction():
                Limiter(self.conn).acquire(self.policy, "k")
            self.conn.execute("select 1")
            Limiter(self.conn).acquire(self.policy, "k")
            Limiter(self.pool).acquire(self.policy, "j")
            with psycopg.connect(autocommit=True) as conn:
                Limiter(conn).acquire(self.policy, "i")

    def test_the_grant_is_named_that_a_call_lacks_and_no_other(self):
        execute("drop role if exists pgratelimit_stranger; create role pgratelimit_stranger")
        self.addCleanup(execute, "drop role pgratelimit_stranger")
        with psycopg.connect(autocommit=True) as conn:
            conn.execute("set role pgratelimit_stranger")
            limiter = Limiter(conn)
            for grant, call in (
                ("ratelimit_settle(text, text, text, bigint)", lambda: limiter.settle(self.policy, "k", "job", 1)),
                ("ratelimit_reserve(text, text, interval, bigint, text)", lambda: limiter.reserve(self.policy, "k", 1)),
                ("ratelimit_acquire_all(text[], text[], bigint[], text)", lambda: limiter.acquire_all([(self.policy, "k")])),
                ("ratelimit_renew(text, text, text)", lambda: limiter.renew(self.policy, "k", "h")),
            ):
                with self.assertRaises(psycopg.errors.InsufficientPrivilege) as raised:
                    call()
                self.assertEqual([f"Its owner can run: grant execute on function {grant} to <role>;"], raised.exception.__notes__)
                execute(f"grant execute on function {grant} to pgratelimit_stranger")
                execute(f"revoke execute on function {grant} from pgratelimit_stranger")

    def test_denied(self):
        for cost, retry_after in ((12, None), (10, 3600.0)):
            self.conn.execute("select ratelimit_acquire(%s::text, 'k', 1)", (self.policy,))
            with self.assertRaises(psycopg.Error) as raised:
                self.conn.execute("select ratelimit_enforce(%s::text, 'k', %s)", (self.policy, cost))
            self.conn.rollback()
            denied = Denied.of(raised.exception)
            self.assertEqual((self.policy, cost, 9, 10), (denied.policy, denied.cost, denied.remaining, denied.capacity))
            self.assertTrue(denied.retry_after is None if retry_after is None else 3590 < denied.retry_after <= retry_after)
        self.assertIsNone(Denied.of(ValueError()))

    def test_wait(self):
        limiter = Limiter(self.pool)
        with stopped_clock():
            execute("select ratelimit_define_policy(%s::text, 10, 100, '1 second')", self.policy)
            limiter.acquire(self.policy, "k", 10)
            began = time.monotonic()
            self.assertEqual((0.05, -5), ((r := limiter.wait(self.policy, "k", 5)).wait, r.remaining))
            self.assertGreaterEqual(time.monotonic() - began, 0.05)
        execute("select ratelimit_define_policy(%s::text, 10, 1, '1 hour')", self.policy)
        limiter.charge(self.policy, "k", 100)
        with self.assertRaises(TooLate) as raised:
            limiter.wait(self.policy, "k", 10, timeout=60)
        self.assertGreater(raised.exception.reservation.wait, 60)
        with self.assertRaisesRegex(InvalidArgument, "outside a transaction"):
            Limiter(self.conn).wait(self.policy, "k")

    def test_wait_sleeps_until_the_turn_of_a_quota(self):
        limiter, quota = Limiter(self.pool), self.id() + " quota"
        define_quota(quota, 10, "1 hour")
        limiter.charge(quota, "k", 10)
        turn = define_quota(quota, 10, "500 ms")  # perhaps over by the call, on a slow machine
        reservation = limiter.wait(quota, "k", 4, timeout=60)
        self.assertEqual((True, 6, 0.0), (reservation.allowed, reservation.remaining, reservation.wait))
        self.assertEqual([(True,)], execute("select clock_timestamp() >= %s", turn))
        for cost, timeout, why in ((7, 3600, "too late"), (11, None, f'of 11 tokens .*"{quota}" is 10')):
            with self.assertRaisesRegex(TooLate, why):
                limiter.wait(quota, "k", cost, timeout=timeout)

    def test_a_sleep_of_a_month_is_cut_in_days(self):
        for allowed in (True, False):
            pauses = _pauses(Reservation(allowed, 0, 30 * 86400.0, None, 10, False, False), 365 * 86400.0, 1, "api")
            self.assertEqual(86400.0, next(pauses))

    def test_no_wait_is_short(self):
        self.assertIsNone(seconds(None))
        self.assertEqual([0.0, 0.5, 1.0], [seconds(0), seconds("500000"), seconds(1_000_000)])
        for n in range(1, 9_000_000_000_000_000, 12_345_678_901_234):
            self.assertGreaterEqual(Fraction(seconds(n)), Fraction(n, 1_000_000))
            self.assertLess(seconds(n) - n / 1_000_000, 2e-6)

    def test_the_text_of_statements_and_arrays(self):
        call = ("1%s$1", "a % $1", "f($2::text)")
        self.assertEqual('select a %% %s from "1%%s$1".f(%s::text)', statement(*call, True))
        self.assertEqual('select a % $1 from "1%s$1".f($2::text)', statement(*call, False))
        self.assertEqual(["{}", '{""}'], [texts([]), texts([""])])

    def test_another_handle_is_refused(self):
        of_async = psycopg_pool.AsyncConnectionPool(open=False)
        for limiter, db, said in (
            (Limiter, None, "not a"), (Limiter, self.pool.connection(), "not a"), (AsyncLimiter, None, "not a"), (AsyncLimiter, self.pool.connection(), "not a"),
            (Limiter, of_async, "use an AsyncLimiter or a Combiner for .*AsyncConnectionPool"),
            (AsyncLimiter, self.pool, "use a Limiter for .*ConnectionPool"), (AsyncLimiter, "postgresql://", "use a Limiter for .*str"),
        ):
            self.assertRaisesRegex(TypeError, said, limiter, db)


class PackageTest(unittest.TestCase):
    def test_it_depends_on_nothing_but_python(self):
        subprocess.run([sys.executable, "-S", "-c", "import pgratelimit.asgi, pgratelimit.wsgi"], cwd=Path(__file__).parents[1], check=True)

    def test_the_programs_of_the_readme_run(self):
        define("api", 10_000)
        define_slots("jobs")
        blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
        programs = [block for block in blocks if "import pgratelimit\n" in block]
        self.assertEqual(3, len(programs))
        for program in programs:
            out = io.StringIO()
            with redirect_stdout(out):
                exec(compile(program, "README.md", "exec"), {})
            self.assertRegex(out.getvalue(), "^(9995 tokens left|one of 3|True)$")
        for fragment in blocks:
            compile(fragment, "README.md", "exec")
