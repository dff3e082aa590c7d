"""What is wrong from the start is heard then, or at the first request, whatever failure is."""

import unittest
from unittest import mock

import psycopg
import psycopg_pool

from pgratelimit import AsyncLimiter, Combiner, InvalidArgument, Limiter, NotReady, http
from pgratelimit.asgi import RateLimit as Asgi
from pgratelimit.wsgi import RateLimit as Wsgi
from pgratelimit.wsgi import by_ip
from tests.kit import AsyncCase, asyncpg_pool_of, define, define_slots, execute, psycopg_pool_of
from tests.test_http import asgi_app, asgi_get, wsgi_app, wsgi_get


class CheckTest(AsyncCase):
    def setUp(self) -> None:
        self.role = "nobody_of_checks"
        execute(f"create role {self.role}")
        self.addCleanup(execute, f"drop owned by {self.role}; drop role {self.role}")
        define(self.id(), 5)

    def as_nobody(self) -> psycopg.Connection:
        conn = psycopg.connect("", autocommit=True, options=f"-c role={self.role}")
        self.addCleanup(conn.close)
        return conn

    def lacks(self, limiter: Limiter, *args, **more) -> list[str]:
        try:
            limiter.check(*args, **more)
        except NotReady as error:
            return error.lacks
        return []

    async def test_a_check_lists_what_calls_lack_and_its_statements_help(self):
        limiter = Limiter(self.as_nobody())
        grants = self.lacks(limiter)
        self.assertEqual(["ratelimit_acquire(", "ratelimit_acquire_all("], [line.split(".")[1].split("(")[0] + "(" for line in grants])
        self.assertEqual(4, len(self.lacks(limiter, calls=["hold", "acquire_up_to"])))
        for statement in grants:
            execute(statement)
        self.assertEqual([], self.lacks(limiter, [self.id()]))
        grant, policy = self.lacks(limiter, ["misspelt"], ["acquire", "refund"])
        self.assertIn("ratelimit_refund", grant)
        self.assertIn('no policy is named "misspelt"', policy)
        self.assertIn("not installed in schema", self.lacks(Limiter(self.as_nobody(), schema="none"))[0])
        for pool_of in (psycopg_pool_of, asyncpg_pool_of):
            async with pool_of(2, f"-c role={self.role}") as pool:
                await AsyncLimiter(pool).check([self.id()])
                with self.assertRaisesRegex(NotReady, '(?s)ratelimit_refund.*no policy is named "misspelt"'):
                    await AsyncLimiter(pool).check(["misspelt"], ["acquire", "refund"])
                with self.assertRaisesRegex(NotReady, "grant execute on function public.ratelimit_acquire_packed"):
                    await Combiner(pool).check()
        self.assertRaises(InvalidArgument, limiter.check, calls=["Acquire"])
        self.assertRaises(InvalidArgument, limiter.check, "api")

    def test_a_check_finds_policies_that_are_not_there_or_of_another_kind(self):
        slots = self.id() + "_slots"
        define_slots(slots)
        with psycopg_pool.ConnectionPool(min_size=1, max_size=1) as pool:
            limiter = Limiter(pool)
            unknown, of_slots = self.lacks(limiter, ["misspelt", self.id(), slots])
            self.assertIn('no policy is named "misspelt"', unknown)
            self.assertIn("lends slots: call hold", of_slots)
            self.assertEqual([], self.lacks(limiter, [slots], ["hold"]))
            self.assertIn("lends no slots", self.lacks(limiter, [self.id()], ["hold_wait", "release"])[0])
            every = [name for name in dir(Limiter) if name[0] != "_" and name not in ("check", "in_transaction")]
            self.assertEqual([], self.lacks(limiter, [slots, self.id()], every), "of either kind")

    async def test_the_first_decision_of_a_middleware_tells_what_further_requests_lack(self):
        execute(f"grant execute on function ratelimit_acquire to {self.role}")
        with self.assertLogs("pgratelimit") as logged:
            app = Wsgi(wsgi_app, Limiter(self.as_nobody()), lambda e: [(self.id(), "k")], failure="open")
            self.assertEqual(["200 OK"] * 2, [wsgi_get(app)[0] for _ in range(2)])
            async with psycopg_pool_of(2, f"-c role={self.role}") as pool:
                app = Asgi(asgi_app, Combiner(pool), lambda scope: [(self.id(), "k")], failure="open", timeout=60)
                self.assertEqual([200] * 2, [(await asgi_get(app))[0] for _ in range(2)])
        self.assertEqual(2, len(logged.output))
        self.assertIn("grant execute on function public.ratelimit_acquire_all", logged.output[0])
        self.assertIn("grant execute on function public.ratelimit_acquire_packed", logged.output[1])

    def test_a_cost_above_the_capacity_and_a_proxy_that_is_not_configured_are_told_once(self):
        self.enterContext(mock.patch.object(http, "_told", set()))
        owner = psycopg.connect("", autocommit=True)
        self.addCleanup(owner.close)
        forwarded = {"HTTP_X_FORWARDED_FOR": "192.0.2.1", "REMOTE_ADDR": "127.0.0.1"}
        with self.assertLogs("pgratelimit") as logged:
            app = Wsgi(wsgi_app, Limiter(owner), lambda e: [(self.id(), by_ip(e | forwarded), 6)], failure="open")
            self.assertEqual(["429 Too Many Requests"] * 2, [wsgi_get(app)[0] for _ in range(2)])
        self.assertEqual(2, len(logged.output))
        self.assertIn("has X-Forwarded-For", logged.output[0])
        self.assertRegex(logged.output[1], 'of 6 tokens is never allowed: the capacity of the policy ".*" is 5')
        with self.assertNoLogs("pgratelimit"):
            self.assertEqual("ip:127.0.0.1", by_ip(forwarded, 0))
