import asyncio
import json
import logging
import unittest
from unittest import mock

import psycopg_pool

from pgratelimit import AsyncLimiter, Charge, Combiner, Decision, JointDecision, Limiter, http
from pgratelimit.asgi import RateLimit as Asgi
from pgratelimit.asgi import by_ip as scope_ip
from pgratelimit.wsgi import RateLimit as Wsgi
from pgratelimit.wsgi import by_ip as environ_ip
from tests.kit import AsyncCase, asyncpg_pool_of, define, execute, locked, psycopg_pool_of, vectors


async def asgi_get(app, path="/", headers=()):
    """The status, the fields and the body of an answer."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "client": ("192.0.2.1", 5), "headers": [(n.encode(), v.encode()) for n, v in headers]}
    await app(scope, None, send)
    fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], fields, b"".join(m.get("body", b"") for m in sent)


async def asgi_app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b"hello"})


def wsgi_get(app, path="/"):
    answer = []
    body = b"".join(app({"REMOTE_ADDR": "192.0.2.1", "PATH_INFO": path}, lambda status, headers, *_: answer.extend((status, headers))))
    return answer[0], {name.lower(): value for name, value in answer[1]}, body


def wsgi_app(environ, start_response):
    start_response("200 OK", [("X-Own", "1")])
    return [b"hello"]


class Broken:
    """A limiter without a database."""

    async def acquire(self, *_, **__):
        raise ConnectionError("secret key")

    acquire_all = acquire


class AsgiTest(AsyncCase):
    async def test_an_answer_has_the_fields_and_a_denial_a_problem(self):
        p = self.id() + ' "%é'
        define(p, 2, 1, "1 hour")
        for pool_of, kind in ((psycopg_pool_of, AsyncLimiter), (asyncpg_pool_of, Combiner)):
            async with pool_of(2) as pool:
                app = Asgi(asgi_app, kind(pool), lambda scope: [(p, scope_ip(scope))], failure="closed", timeout=60)
                status, fields, body = await asgi_get(app)
                name = '"' + self.id() + ' \\"%25%C3%A9"'
                self.assertEqual((200, b"hello", "1"), (status, body, fields["x-own"]))
                self.assertEqual((name + ";q=2", name + ";r=1;t=3600"), (fields["ratelimit-policy"], fields["ratelimit"]))
                await asgi_get(app)
                status, fields, body = await asgi_get(app)
                self.assertEqual((429, "application/problem+json"), (status, fields["content-type"]))
                self.assertTrue(3590 < int(fields["retry-after"]) <= 3600)
                self.assertEqual(
                    {
                        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
                        "title": "Request cannot be satisfied as assigned quota has been exceeded",
                        "status": 429,
                        "violated-policies": [self.id() + ' "%25%C3%A9'],
                    },
                    json.loads(body))
                self.assertNotIn("192.0.2.1", str(fields) + str(body))
                execute("select ratelimit_reset(%s::text, 'ip:192.0.2.1')", p)

    async def test_the_message_of_the_app_stays_its_own(self):
        p, start = self.id(), {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}
        define(p, 9, 1, "1 hour")

        async def constant(scope, receive, send):
            await send(start)

        async with asyncpg_pool_of(2) as pool:
            app = Asgi(constant, Combiner(pool), lambda scope: [(p, "k")], failure="closed", timeout=60)
            for _ in range(2):
                await asgi_get(app)
        self.assertEqual([(b"x-own", b"1")], start["headers"])

    async def test_a_request_without_charges_and_what_is_no_request_pass(self):
        app = Asgi(asgi_app, Broken(), lambda scope: [], failure="closed", timeout=60)
        self.assertEqual(200, (await asgi_get(app))[0])
        app = Asgi(asgi_app, Broken(), None, failure="closed", timeout=60)
        await app({"type": "lifespan"}, None, lambda message: asyncio.sleep(0))

    async def test_without_a_database_the_program_has_chosen(self):
        with self.assertLogs("pgratelimit", logging.WARNING):
            for charges in ([("p", "k")], [("p", "k"), ("p", "j")]):
                for failure, status in (("open", 200), ("closed", 503)):
                    http._logged = float("-inf")
                    app = Asgi(asgi_app, Broken(), lambda scope: charges, failure=failure, timeout=60)
                    got, fields, body = await asgi_get(app)
                    self.assertEqual(status, got)
                    self.assertNotIn(b"secret", body)
        self.assertEqual({"type": "about:blank", "title": "Service Unavailable", "status": 503}, json.loads(body))
        with self.assertRaises(TypeError):
            Asgi(asgi_app, Broken(), lambda scope: [])
        with self.assertRaises(ValueError):
            Asgi(asgi_app, Broken(), lambda scope: [], failure="maybe", timeout=60)

    async def test_an_error_that_a_client_could_provoke_and_charges_of_a_wrong_shape_are_no_way_past_the_limit(self):
        define(self.id(), 2)
        http._logged = float("-inf")
        wrong = [("api",)], "api", [None], [(self.id(), "k", True)], [(self.id(), None)]
        provoked = [("none", "k")], [(self.id(), "a\0b")], [(self.id(), "k", -1)]
        self.enterContext(mock.patch.object(http, "time", mock.Mock(monotonic=lambda: 0.0)))
        with self.assertLogs("pgratelimit", logging.WARNING) as logged:
            async with psycopg_pool_of(2) as pool:
                for charges in wrong + provoked:
                    for limiter in (AsyncLimiter(pool), Combiner(pool)):
                        app = Asgi(asgi_app, limiter, lambda scope: charges, failure="open", timeout=60)
                        self.assertEqual(500, (await asgi_get(app))[0], charges)
        self.assertEqual(1, len(logged.records), "once a second")
        with self.assertRaises(TypeError):
            Asgi(asgi_app, pool, lambda scope: [], failure="open", timeout=60)

    async def test_a_stalled_database_is_waited_for_until_the_timeout(self):
        define(self.id(), 2)
        http._logged = float("-inf")
        async with psycopg_pool_of(2) as pool, locked(self.id(), "k"):
            app = Asgi(asgi_app, AsyncLimiter(pool), lambda scope: [(self.id(), "k")], failure="closed", timeout=0.05)
            with self.assertLogs("pgratelimit", logging.WARNING):
                self.assertEqual(503, (await asgi_get(app))[0])


class WsgiTest(unittest.TestCase):
    def test_an_answer_has_the_fields_and_a_denial_a_problem(self):
        define(self.id(), 2)
        with psycopg_pool.ConnectionPool(min_size=1, max_size=1) as pool:
            charges = {"/": lambda e: [(self.id(), environ_ip(e))], "/two": lambda e: [(self.id(), "a"), Charge("none", "b")], "/free": lambda e: []}
            app = Wsgi(wsgi_app, Limiter(pool), lambda e: charges[e["PATH_INFO"]](e), failure="open")
            status, fields, body = wsgi_get(app)
            name = f'"{self.id()}"'
            self.assertEqual(("200 OK", "1", name + ";q=2", name + ";r=1", b"hello"), (status, fields["x-own"], fields["ratelimit-policy"], fields["ratelimit"], body))
            wsgi_get(app)
            status, fields, body = wsgi_get(app)
            self.assertEqual("429 Too Many Requests", status)
            self.assertNotIn("retry-after", fields, "no wait helps")
            self.assertEqual([self.id()], json.loads(body)["violated-policies"])
            self.assertEqual("200 OK", wsgi_get(app, "/free")[0])
            http._logged = float("-inf")
            with self.assertLogs("pgratelimit"):
                self.assertEqual("500 Internal Server Error", wsgi_get(app, "/two")[0])

    def test_keys(self):
        for v in vectors("addresses.json"):
            self.assertEqual(v["key"], http.key_of_address(v["peer"] or None, v["forwarded"], v["proxies"]), v)
        self.assertEqual("ip:198.51.100.7", scope_ip({"client": None, "headers": [(b"x-forwarded-for", b"198.51.100.7")]}, 1))
        self.assertEqual("ip:198.51.100.7", environ_ip({"HTTP_X_FORWARDED_FOR": "198.51.100.7"}, 1))
        self.assertEqual("user:42", http.named("user", "42"))
        for text in ("x" * 508, "\ud800", "\0"):
            self.assertRegex(http.named("user", text), "^user-sha256:[0-9a-f]{64}$")

    def test_the_tightest_bucket_stands_for_its_policy(self):
        def bucket(remaining, reset_after, allowed=True, shadowed=False):
            return Decision(allowed, remaining, 0.0 if allowed else 1.5, reset_after, 10, False, shadowed)

        own = [bucket(5, 5.0), bucket(4, 6.0), bucket(4, 60.000001), bucket(-3, 1.0, False), bucket(1, 1.0, shadowed=True)]
        charges = [Charge("a", str(i)) for i in range(3)] + [Charge("b", "k"), Charge("watched", "k")]
        status, fields, _ = http.decided(charges, JointDecision(False, 0, 1.5, 1.0, 10, False, False, 3, own))
        self.assertEqual(
            (429, '"a";q=10, "b";q=10', '"a";r=4;t=2, "b";r=0;t=1', "2"),
            (status, *(dict(fields)[name] for name in ("RateLimit-Policy", "RateLimit", "Retry-After"))))
        month = bucket(4, 86400.0)
        _, fields, _ = http.decided(charges[:1], JointDecision(True, 4, 0.0, 86400.0, 10, False, False, 0, [month]), ["a"])
        self.assertEqual('"a";r=4;t=86400', dict(fields)["RateLimit"], "all that is missing comes at the turn")
