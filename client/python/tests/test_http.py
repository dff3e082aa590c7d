import asyncio
import datetime
import email.message
import itertools
import json
import logging
import unittest
from pathlib import Path
from unittest import mock

import asyncpg
import psycopg
import psycopg_pool

import pgratelimit
from pgratelimit import AsyncLimiter, Charge, Combiner, Decision, InvalidArgument, JointDecision, Limiter, errors, http
from pgratelimit.asgi import RateLimit as Asgi
from pgratelimit.asgi import by_ip as scope_ip
from pgratelimit.outgoing import retry_after
from pgratelimit.wsgi import RateLimit as Wsgi
from pgratelimit.wsgi import by_ip as environ_ip
from tests.kit import AsyncCase, asyncpg_pool_of, define, execute, locked, psycopg_pool_of, vectors


async def asgi_get(app, path="/", headers=(), **more):
    """The status, the fields and the body of an answer."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "client": ("192.0.2.1", 5), "headers": [(n.encode(), v.encode()) for n, v in headers]} | more
    await app(scope, None, send)
    fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], fields, b"".join(m.get("body", b"") for m in sent)


async def asgi_app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b"hello"})


def wsgi_get(app, path="/", method="GET"):
    answer = []
    body = b"".join(app({"REMOTE_ADDR": "192.0.2.1", "PATH_INFO": path, "REQUEST_METHOD": method}, lambda status, headers, *_: answer.extend((status, headers))))
    return answer[0], {name.lower(): value for name, value in answer[1]}, body


def wsgi_app(environ, start_response):
    start_response("200 OK", [("X-Own", "1")])
    return [b"hello"]


class AsgiTest(AsyncCase):
    async def test_an_answer_has_the_fields_and_a_denial_a_problem(self):
        p = self.id() + ' "%é'
        define(p, 2, 1, "1 hour")
        name = '"' + self.id() + ' \\"%25%C3%A9"'
        of_scope = {"charges": lambda scope: [(p, scope_ip(scope))], "failure": "closed", "timeout": 60}
        of_environ = {"/": lambda e: [(p, environ_ip(e))], "/two": lambda e: [(p, "a"), Charge("none", "b")], "/free": lambda e: []}
        pool = self.enterContext(psycopg_pool.ConnectionPool(min_size=1, max_size=1))
        async with psycopg_pool_of(2) as of_psycopg, asyncpg_pool_of(2) as of_asyncpg:
            of_wsgi = Wsgi(wsgi_app, Limiter(pool), lambda e: of_environ[e["PATH_INFO"]](e), failure="open")
            for app in (Asgi(asgi_app, AsyncLimiter(of_psycopg), **of_scope), Asgi(asgi_app, Combiner(of_asyncpg), **of_scope), of_wsgi):
                status, fields, body = await get(app)
                self.assertEqual((200, b"hello", "1"), (status, body, fields["x-own"]))
                self.assertEqual((name + ";q=2", name + ";r=1;t=3600"), (fields["ratelimit-policy"], fields["ratelimit"]))
                await get(app)
                status, fields, body = await get(app)
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
        self.assertEqual("200 OK", wsgi_get(of_wsgi, "/free")[0])
        with self.assertLogs("pgratelimit"):
            self.assertEqual("500 Internal Server Error", wsgi_get(of_wsgi, "/two")[0])

    async def test_an_error_that_a_client_could_provoke_and_charges_of_a_wrong_shape_are_no_way_past_the_limit(self):
        define(self.id(), 2)
        wrong = [("api",)], "api", [None], [(self.id(), "k", True)], [(self.id(), None)]
        provoked = [("none", "k")], [(self.id(), "a\0b")], [(self.id(), "k", -1)]
        self.enterContext(mock.patch.object(http, "time", mock.Mock(monotonic=lambda: 0.0)))
        async with psycopg_pool_of(2) as pool:
            for limiter in (AsyncLimiter(pool), Combiner(pool)):
                with self.assertLogs("pgratelimit", logging.WARNING) as logged:
                    app = Asgi(asgi_app, limiter, lambda scope: charges, failure="open", timeout=60)
                    for charges in wrong + provoked:
                        self.assertEqual(500, (await asgi_get(app))[0], charges)
                self.assertEqual(1, len(logged.records), "once a second")

    async def test_a_stalled_database_is_waited_for_until_the_timeout(self):
        define(self.id(), 2)
        async with psycopg_pool_of(2) as pool, locked(self.id(), "k"):
            app = Asgi(asgi_app, AsyncLimiter(pool), lambda scope: [(self.id(), "k")], failure="closed", timeout=0.05)
            with self.assertLogs("pgratelimit", logging.WARNING):
                self.assertEqual(503, (await asgi_get(app))[0])


class WsgiTest(unittest.TestCase):
    def test_the_log_names_the_request_its_fate_and_the_remedy(self):
        self.enterContext(mock.patch.object(http, "time", mock.Mock(monotonic=iter(range(0, 10_000, 100)).__next__)))
        missing = psycopg.errors.UndefinedFunction("function ratelimit_acquire(text) does not exist\nLINE 1: select\nHINT:  You might need casts.")
        for failure, charge, error, line in (
            ("open", ("api", "k"), OSError("refused"), 'a request of api passes without a decision (failure="open"): refused'),
            ("closed", ("api", "k"), OSError("refused"), "a request of api is refused with 503: refused"),
            ("open", ("api", "k"), missing, "a request of api is refused with 500: function ratelimit_acquire(text) does not exist. Install pgratelimit in this "
             "database, put its schema on search_path, or name it with schema=."),
            ("open", ("api", None), None, "a request is refused with 500: invalid argument: key is of type NoneType, not a str; pass a text of 1 to 512 bytes"),
        ):
            limiter = mock.Mock(spec=Limiter, acquire=mock.Mock(side_effect=error))
            with self.assertLogs("pgratelimit", logging.WARNING) as logged:
                wsgi_get(Wsgi(wsgi_app, limiter, lambda e: [charge], failure=failure))
            self.assertEqual([f"pgratelimit: {line}"], [record.getMessage() for record in logged.records])

    def test_keys(self):
        for v in vectors("addresses.json"):
            self.assertEqual(v["key"], http.key_of_address(v["peer"] or None, v["forwarded"], v["proxies"], v.get("ipv6_prefix", 64)), v)
        for prefix, key in ((1, "ip:8000::/1"), (48, "ip:a001:db8:1::/48"), (128, "ip:a001:db8:1:2:3:4:5:6/128")):
            self.assertEqual(key, scope_ip({"client": ("a001:db8:1:2:3:4:5:6", 1), "headers": []}, ipv6_prefix=prefix))
            self.assertEqual(key, environ_ip({"REMOTE_ADDR": "a001:db8:1:2:3:4:5:6"}, ipv6_prefix=prefix))
        self.assertEqual("ip:192.0.2.1", environ_ip({"REMOTE_ADDR": "::ffff:192.0.2.1"}, ipv6_prefix=1))
        for name, wrong in (("ipv6_prefix", (0, 129, -1, 64.0, True, "64")), ("trusted_proxies", (-1, 1.0, True))):
            for value in wrong:
                with self.assertRaisesRegex(InvalidArgument, name):
                    environ_ip({"REMOTE_ADDR": "::1"}, **{name: value})
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
        status, fields = http.decided(charges, JointDecision(False, 0, 1.5, 1.0, 10, False, False, 3, own))
        self.assertEqual(
            (429, '"a";q=10, "b";q=10', '"a";r=4;t=2, "b";r=0;t=1', "2"),
            (status, *(dict(fields)[name] for name in ("RateLimit-Policy", "RateLimit", "Retry-After"))))
        _, fields = http.decided(charges[:1], Decision(False, 4, None, None, 10, False, False))
        self.assertEqual({"RateLimit-Policy": '"a";q=10', "RateLimit": '"a";r=4'}, dict(fields), "no wait helps, and nothing refills it")
        month = bucket(4, 86400.0)
        _, fields = http.decided(charges[:1], JointDecision(True, 4, 0.0, 86400.0, 10, False, False, 0, [month]), ["a"])
        self.assertEqual('"a";r=4;t=86400', dict(fields)["RateLimit"], "all that is missing comes at the turn")


def raised_in(module, error):
    """An error that code of a module has raised."""
    try:
        exec(compile("raise error", "driver.py", "exec"), {"__name__": module, "error": error})
    except Exception as caught:
        return caught


def linked(outer, **link):
    """An error with another one behind it, as raise and an ORM set it."""
    for name, error in link.items():
        setattr(outer, name, error)
    return outer


OTHERS = {
    "program": [
        TypeError(), AttributeError(), NameError(), KeyError(), IndexError(), ValueError(), AssertionError(), ZeroDivisionError(),
        pgratelimit.Error("an answer of another shape"), InvalidArgument("found without the server"),
        raised_in("psycopg.adapt", UnicodeEncodeError("latin-1", "\u20ac", 0, 1, "no such character")),
        linked(AttributeError("a mistake in the handling"), __context__=psycopg.errors.AdminShutdown()),
    ],
    "timeout": [TimeoutError(), psycopg_pool.PoolTimeout(), asyncio.TimeoutError()],
    "refused": [ConnectionRefusedError(), psycopg.OperationalError("connection failed"), OSError("no route")],
    "lost": [
        ConnectionResetError(), psycopg.OperationalError("server closed the connection"), asyncpg.InterfaceError("closed"),
        asyncpg.InternalClientError("broken"), raised_in("asyncpg.protocol.protocol", AttributeError("'NoneType'")),
        raised_in("psycopg_pool.pool", AssertionError()),
    ],
    "overloaded": [pgratelimit.Overloaded("full")],
    "closed": [pgratelimit.Closed("closed"), psycopg_pool.PoolClosed()],
}


def errors_of(row):
    """The errors that a row of the table is about, of each driver, as they come and as a program may have wrapped them."""
    if (code := row["error"]) in OTHERS:
        return OTHERS[code]
    of_psycopg = psycopg.errors._sqlcodes.get(code, type("Unknown", (psycopg.DatabaseError,), {"sqlstate": code}))("made up")
    of_asyncpg = asyncpg.PostgresError.new({"C": code, "M": "made up"})
    return [
        of_psycopg, of_asyncpg, errors.of_server("acquire", code, "made up", None, None), linked(RuntimeError("wrapped"), __cause__=of_psycopg),
        linked(Exception("of an ORM"), orig=of_asyncpg), ExceptionGroup("tasks", [of_psycopg]),
    ]


class Failing:
    """A limiter that decides, or raises an error."""

    def __init__(self):
        self.error, self.calls = None, 0

    def acquire(self, policy, key, cost=1, *, idempotency_key=None):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return Decision(True, 9, 0.0, 1.0, 10, False, False)

    def acquire_all(self, charges, *, idempotency_key=None):
        return self.acquire(*charges[0])


class AsyncFailing(Failing):
    async def acquire(self, *args, **kwargs):
        return super().acquire(*args, **kwargs)


def asgi(app=asgi_app, charges=lambda scope: [("p", "k")], **options):
    limiter = AsyncFailing()
    return limiter, Asgi(app, limiter, charges, **{"failure": "closed", "timeout": 60} | options)


def wsgi(app=wsgi_app, charges=lambda environ: [("p", "k")], **options):
    limiter = Failing()
    return limiter, Wsgi(app, limiter, charges, **{"failure": "closed", "timeout": 60} | options)


async def get(app, **more):
    """The answer of an application of either kind."""
    if isinstance(app, Asgi):
        return await asgi_get(app, **more)
    status, fields, body = wsgi_get(app, **more)
    return int(status[:3]), fields, body


class TableTest(unittest.TestCase):
    """client/testdata/failures.json."""

    rows = json.loads((Path(__file__).parents[2] / "testdata" / "failures.json").read_text())

    def setUp(self):
        self.enterContext(mock.patch.object(http, "SETUP_PAUSE", 0))
        self.runner = self.enterContext(asyncio.Runner())

    def middlewares(self, failure, has_decided, key):
        """Each with a limiter, and a function that returns the status of an answer."""
        for make in (asgi, wsgi):
            limiter, app = make(failure=failure, idempotency_key=(lambda _: key) if key else None)
            status = lambda app=app: self.runner.run(get(app))[0]  # noqa: E731
            if has_decided:
                self.assertEqual(200, status())
            limiter.calls = 0
            yield limiter, app, status

    def expected(self, row, failure, has_decided, key):
        if row["kind"] == "fault":
            return row["keyed" if key else "status"]
        if row["kind"] == "setup" and not has_decided:
            return 500
        return 200 if failure == "open" else 503

    def test_each_row_of_the_table(self):
        runs = 0
        for row, failure, has_decided, key in itertools.product(self.rows, ("open", "closed"), (False, True), (None, "job")):
            expected = self.expected(row, failure, has_decided, key)
            for error in errors_of(row) if row["error"] != "wrong shard" else ():  # there are no shards in Python
                for limiter, app, status in self.middlewares(failure, has_decided, key):
                    limiter.error, runs, before = error, runs + 1, http.let_pass["p"]
                    with self.subTest(row=row["error"], error=repr(error), failure=failure, decided=has_decided, key=key, app=app):
                        with self.assertLogs("pgratelimit", logging.WARNING) as logged:
                            self.assertEqual(expected, status())
                            first = len(logged.records)
                            self.assertEqual(expected, status())
                        self.assertEqual(2 * (expected == 200), http.let_pass["p"] - before)
                        self.assertEqual(4 if row["kind"] == "setup" else 2, limiter.calls)
                        if row["kind"] == "setup" or row.get("remedy"):
                            self.assertIn(errors.remedy(row["error"]), logged.records[0].getMessage())
                            self.assertEqual(first, len(logged.records), "once a minute")
        self.assertGreater(runs, 3000)

    def test_what_lacks_is_logged_once_a_minute_and_another_code_too(self):
        now = 0.0
        self.enterContext(mock.patch.object(http, "time", mock.Mock(monotonic=lambda: now)))
        for limiter, _, status in self.middlewares("open", True, None):
            now = 0.0
            with self.assertLogs("pgratelimit", logging.WARNING) as logged:
                for now, code in ((0.0, "42501"), (30.0, "42501"), (30.5, "42883"), (59.0, "42501"), (61.0, "42501")):
                    limiter.error = errors_of({"error": code})[0]
                    status()
            self.assertEqual(3, len(logged.records))

    def test_an_upgrade_under_way_costs_nobody_a_refusal(self):
        for limiter, _, status in self.middlewares("closed", False, None):
            decide = Failing().acquire
            upgraded = [psycopg.errors.UndefinedFunction("made up")]

            def acquire(*args, **kwargs):
                if upgraded:
                    raise upgraded.pop()
                return decide(*args, **kwargs)

            async def acquire_later(*args, **kwargs):
                return acquire(*args, **kwargs)

            limiter.acquire = acquire_later if isinstance(limiter, AsyncFailing) else acquire
            self.assertEqual(200, status())


class EdgesTest(AsyncCase):
    async def test_the_message_of_the_app_stays_its_own(self):
        start = {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}

        async def constant(scope, receive, send):
            await send(start)

        await asgi_get(asgi(constant)[1])
        self.assertEqual([(b"x-own", b"1")], start["headers"])

    async def test_a_request_without_charges_and_what_is_no_request_pass(self):
        limiter, app = asgi(charges=lambda scope: [] if scope["type"] == "http" else [("p", "k")])
        self.assertEqual(200, (await asgi_get(app))[0])
        await app({"type": "lifespan"}, None, lambda message: asyncio.sleep(0))
        self.assertEqual(0, limiter.calls)

    async def test_a_refusal_tells_nothing_and_of_head_has_the_length_of_get_and_no_body(self):
        for limiter, app in (asgi(), wsgi()):
            limiter.error = ConnectionRefusedError("secret key")
            with self.assertLogs("pgratelimit"):
                (*answer, body), (*of_head, none) = await get(app, method="GET"), await get(app, method="HEAD")
            self.assertEqual({"type": "about:blank", "title": "Service Unavailable", "status": 503}, json.loads(body))
            self.assertEqual((b"", str(len(body)), answer), (none, of_head[1]["content-length"], of_head))

    async def test_options_are_checked_at_set_up(self):
        for make, wrong_limiter in ((asgi, Limiter.__new__(Limiter)), (wsgi, AsyncLimiter.__new__(AsyncLimiter))):
            wrong = [
                ("charges", dict(charges=None)), ("charges", dict(charges=[("p", "k")])), ("failure", dict(failure="maybe")),
                ("quotas", dict(quotas="api")), ("idempotency_key", dict(idempotency_key="job")), ("observe", dict(observe=1)),
                ("refuse_with", dict(refuse_with=b"no")),
            ]
            wrong += [("timeout", dict(timeout=t)) for t in (0, -1, float("nan"), True, "5", None, datetime.timedelta(0))]
            if make == wsgi:
                async def charges(environ): ...

                wrong += [("charges", dict(charges=charges))]
            for name, options in wrong:
                with self.assertRaisesRegex((TypeError, ValueError), name):
                    make(**options)
            for limiter in (None, wrong_limiter):
                with self.assertRaisesRegex(TypeError, "limiter"):
                    (Asgi if make == asgi else Wsgi)(None, limiter, print, failure="open", timeout=1)
            for timeout in (float("inf"), 30 * 86400, datetime.timedelta(days=30)):
                self.assertEqual(200, (await get(make(timeout=timeout)[1]))[0])

    async def test_charges_may_be_async_or_generators(self):
        async def function(scope):
            await asyncio.sleep(0)
            return [("p", "k")]

        async def generator(scope):
            await asyncio.sleep(0)
            yield "p", "k"

        def plain(_):
            yield "p", "k"

        for charges in (function, generator, plain):
            limiter, app = asgi(charges=charges)
            self.assertEqual((200, 1), ((await asgi_get(app))[0], limiter.calls))
        limiter, app = wsgi(charges=plain)
        self.assertEqual(("200 OK", 1), (wsgi_get(app)[0], limiter.calls))

    async def test_an_idempotency_key_is_the_programs_and_one_that_does_not_fit_is_400(self):
        for key, status, passed in (("job 7", 200, "job 7"), ("", 200, None), (None, 200, None), ("x" * 513, 400, None), ("\0", 400, None), (7, 400, None)):
            for make in (asgi, wsgi):
                seen = []
                limiter, app = make(idempotency_key=lambda _: key)
                acquire = limiter.acquire
                limiter.acquire = lambda *args, idempotency_key=None: (seen.append(idempotency_key), acquire(*args))[1]
                self.assertEqual((status, [passed] if status == 200 else []), ((await get(app))[0], seen), key)

    async def test_each_decision_is_observed_and_a_refusal_may_be_written_by_the_program(self):
        denied = Decision(False, 0, 1.5, 10.0, 10, False, False)

        async def refuse(scope, receive, send, event):
            await send({"type": "http.response.start", "status": 420, "headers": [(b"x-own", event.outcome.encode())]})
            await send({"type": "http.response.body", "body": b"calm"})

        def refuse_wsgi(environ, start_response, event):
            start_response("420 Calm", [("X-Own", event.outcome)])
            return [b"calm"]

        for make, refuse_with in ((asgi, refuse), (wsgi, refuse_wsgi)):
            seen = []
            limiter, app = make(observe=lambda _, event: seen.append(event), refuse_with=refuse_with)
            self.assertEqual(200, (await get(app))[0])
            acquire = limiter.acquire

            async def deny_later(*_): return denied

            limiter.acquire = deny_later if make == asgi else lambda *_: denied
            status, fields, body = await get(app)
            self.assertEqual((420, "denied", "2", b"calm"), (status, fields["x-own"], fields["retry-after"], body))
            limiter.acquire, limiter.error = acquire, TimeoutError("away")
            with self.assertLogs("pgratelimit"):
                self.assertEqual("failed closed", (await get(app))[1]["x-own"])
            self.assertEqual([("allowed", None), ("denied", 429), ("failed closed", 503)], [(e.outcome, e.status) for e in seen])
            self.assertEqual(([Charge("p", "k")], denied, limiter.error), (seen[0].charges, seen[1].decision, seen[2].error))

    async def test_errors_of_the_programs_functions_are_its_own(self):
        def fail(*_):
            raise ZeroDivisionError

        for make in (asgi, wsgi):
            for options in (dict(charges=fail), dict(idempotency_key=fail), dict(app=fail)):
                _, app = make(failure="open", **options)
                with self.assertRaises(ZeroDivisionError):
                    await get(app)
            _, app = make(failure="open", observe=fail)
            with self.assertLogs("pgratelimit", "ERROR"):
                self.assertEqual(200, (await get(app))[0])

    async def test_what_an_application_of_wsgi_returns_stays_as_it_is(self):
        class Body(list):
            def close(self): ...

        body, started = Body([b"hello"]), []

        def app(environ, start_response):
            start_response("200 OK", [])
            start_response("500 Oh", [("X-Own", "1")], (None, None, None))
            return body

        _, app = wsgi(app)
        self.assertIs(body, app({"REQUEST_METHOD": "GET"}, lambda *args: started.append(args)))
        self.assertEqual(("500 Oh", (None, None, None)), (started[1][0], started[1][2]))
        self.assertEqual(["X-Own", "RateLimit-Policy", "RateLimit"], [name for name, _ in started[1][1]])

    async def test_a_client_that_has_hung_up_is_charged_to_no_bucket(self):
        asked = []
        limiter, app = asgi(charges=lambda scope: [("p", scope_ip(scope))], failure="open", observe=lambda _, e: asked.append(e.outcome))
        for server, status, calls in ((("192.0.2.1", 80), 503, 0), (None, 200, 1), (("/run/app.sock", None), 200, 2)):
            got, *_ = await asgi_get(app, client=None, server=server)
            self.assertEqual((status, calls), (got, limiter.calls), server)
        self.assertEqual(["abandoned", "allowed", "allowed"], asked)

    async def test_the_handshake_of_a_websocket_is_charged(self):
        sent = []

        async def send(message):
            sent.append(message)

        async def accept(scope, receive, send):
            await send({"type": "websocket.accept", "headers": [(b"x-own", b"1")]})

        limiter, app = asgi(accept)
        scope = {"type": "websocket", "client": ("192.0.2.1", 5), "headers": []}
        await app(scope, None, send)
        self.assertEqual(("websocket.accept", 3, 1), (sent[0]["type"], len(sent[0]["headers"]), limiter.calls))

        async def deny(*_): return Decision(False, 0, 1.5, 10.0, 10, False, False)

        limiter.acquire = deny
        sent.clear()
        await app(scope, None, send)
        self.assertEqual(["websocket.close"], [m["type"] for m in sent])
        sent.clear()
        await app(scope | {"extensions": {"websocket.http.response": {}}}, None, send)
        self.assertEqual(["websocket.http.response.start", "websocket.http.response.body"], [m["type"] for m in sent])
        self.assertEqual((429, b"2"), (sent[0]["status"], dict(sent[0]["headers"])[b"retry-after"]))


class RetryAfterTest(unittest.TestCase):
    def test_an_answer_names_the_wait_of_the_shared_table(self):
        table = json.loads((Path(__file__).parents[2] / "testdata" / "upstream.json").read_text())
        self.assertGreater(len(table["answers"]), 100)
        with mock.patch("time.time", datetime.datetime.fromisoformat(table["clock"]).timestamp):
            for answer in table["answers"]:
                headers = email.message.Message()  # as urllib's: a field can have several lines
                for field in answer["fields"]:
                    name, _, value = field.partition(": ")
                    headers.add_header(name, value)
                with self.subTest(answer["source"]):
                    self.assertAlmostEqual(retry_after(answer["status"], headers), answer["seconds"], delta=0.001)
