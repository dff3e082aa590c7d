"""Views, storages and connections of the frameworks, as Debian has them."""

import asyncio
import concurrent.futures
import multiprocessing
import os
import re
import socket
import threading
import time
import unittest
import warnings
from pathlib import Path
from typing import Any

import django
import django.conf
import fastapi
import fastapi.testclient
import flask
import flask.views
import httpx
import limits.storage
import limits.strategies
import psycopg2
import psycopg_pool
import requests
import requests.adapters
import starlette.applications
import starlette.endpoints
import starlette.responses
import starlette.routing

from pgratelimit import AsyncLimiter, Charge, Combiner, Denied, InvalidArgument, Limiter, Locked, TooLate, UnknownPolicy, errors
from pgratelimit.limits import PostgresStorage
from pgratelimit.outgoing import AsyncLimitedTransport, LimitedAdapter, LimitedTransport
from pgratelimit.views import django_limit, fastapi_limit, flask_limit, starlette_limit
from tests.kit import AsyncCase, connection, define, define_quota, execute, locked, psycopg_pool_of, taken

database = {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"], "OPTIONS": {}}
database |= {setting: os.environ.get(f"PG{setting}", "") for setting in ("HOST", "PORT", "USER", "PASSWORD")}
django.conf.settings.configure(DATABASES={"default": database}, ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="k")
django.setup()

import django.db  # noqa: E402
import django.http  # noqa: E402
import django.test  # noqa: E402
import django.views  # noqa: E402

urlpatterns: list[Any] = []


class User:
    """The user of a request, as Django's middleware of authentication sets it."""

    def __init__(self, name: str | None) -> None:
        self.pk, self.is_authenticated = name, name is not None


def pool() -> psycopg_pool.ConnectionPool:
    return psycopg_pool.ConnectionPool(min_size=1, max_size=2)


def text_of(answer: Any) -> str:
    return answer.content.decode() if isinstance(answer, django.http.HttpResponse) else answer.text


class ViewsTest(unittest.TestCase):
    def passes_once(self, get: Any) -> None:
        """Of a policy of two tokens, each answer of the view has the fields."""
        name = f'"{self.id()}"'
        first, _, denied = get(), get(), get()
        self.assertEqual((200, "hello"), (first.status_code, text_of(first)))
        self.assertEqual((name + ";q=2", name + ";r=1;t=3600"), (first.headers["RateLimit-Policy"], first.headers["RateLimit"]))
        self.assertEqual(429, denied.status_code)
        self.assertRegex(denied.headers["RateLimit"], re.escape(name) + ";r=0;t=3(600|5[0-9][0-9])")  # less what the calls took
        self.assertGreater(int(denied.headers["Retry-After"]), 3500)
        self.assertIn("quota has been exceeded", text_of(denied))

    def setUp(self) -> None:
        define(self.id(), 2, 1)

    def test_fastapi(self):
        for is_async in (False, True):
            opened: Any = psycopg_pool.AsyncConnectionPool(open=False) if is_async else pool()
            app = fastapi.FastAPI(on_startup=[opened.open], on_shutdown=[opened.close])
            limited = fastapi_limit(opened, self.id(), failure="closed", timeout=60)

            @app.get("/", dependencies=[limited])
            def hello():
                return fastapi.responses.PlainTextResponse("hello")

            @app.get("/json", dependencies=[limited])
            async def json():
                return {}

            with self.subTest(is_async=is_async), fastapi.testclient.TestClient(app) as client:
                self.assertIn("ratelimit", client.get("/json").headers)
                execute("select ratelimit_reset(%s::text, 'ip:unknown')", self.id())
                statuses = [client.get("/") for _ in range(3)]
                self.assertEqual([200, 200, 429], [answer.status_code for answer in statuses])
                self.assertGreater(int(statuses[2].headers["Retry-After"]), 3500)
                self.assertIn("quota has been exceeded", statuses[2].json()["detail"])
                execute("select ratelimit_reset(%s::text, 'ip:unknown')", self.id())

    def test_starlette(self):
        with pool() as opened:
            limit = starlette_limit(Limiter(opened), self.id(), key=lambda request: request.url.path, failure="closed", timeout=60)

            @limit
            async def hello(request):
                return starlette.responses.PlainTextResponse("hello")

            @limit
            def in_thread(request):
                return starlette.responses.PlainTextResponse("hello")

            class Endpoint(starlette.endpoints.HTTPEndpoint):
                @limit
                async def get(self, request):
                    return starlette.responses.PlainTextResponse("hello")

            routes = [starlette.routing.Route(path, view) for path, view in (("/a", hello), ("/b", in_thread), ("/c", Endpoint))]
            client = fastapi.testclient.TestClient(starlette.applications.Starlette(routes=routes))
            for path in ("/a", "/b", "/c"):
                with self.subTest(path):
                    self.passes_once(lambda: client.get(path))

    def test_flask(self):
        app = flask.Flask(__name__)
        with pool() as opened:
            limit = flask_limit("", self.id(), key=lambda request: request.path, failure="closed", timeout=60)

            @app.route("/a")
            @limit
            def hello():
                return "hello"

            @app.route("/b")
            @limit
            async def hello_async():
                return "hello"

            class Hello(flask.views.MethodView):
                decorators = [limit]

                def get(self):
                    return "hello", 200, {"X-Own": "1"}

            app.add_url_rule("/c", view_func=Hello.as_view("c"))
            define_quota(quota := self.id() + " quota", 10, "2 days")
            app.add_url_rule("/quota", "q", flask_limit("", quota, failure="closed", timeout=60, quotas=[quota])(lambda: "hello"))

            app.add_url_rule("/default", "d", flask_limit(Limiter(opened), self.id(), cost=lambda request: 2, failure="closed")(lambda: "hello"))
            app.test_client().get("/default")
            for path in ("/a", "/b", "/c"):
                with self.subTest(path):
                    self.passes_once(lambda: app.test_client().get(path))
            self.assertEqual(2, taken(self.id(), "ip:127.0.0.1"))
        self.assertRegex(app.test_client().get("/quota").headers["RateLimit"], ";r=9;t=172[78]..$")
        with app.test_request_context(), self.assertRaisesRegex(TypeError, "key of the view returned a NoneType"):
            flask_limit("", quota, key=lambda request: None, failure="open")(hello)()
        self.assertRaisesRegex(TypeError, "not a psycopg.Connection", flask_limit, 5, self.id(), failure="closed")
        with self.assertRaisesRegex(TypeError, "must be a Limiter"):
            flask_limit(AsyncLimiter.__new__(AsyncLimiter), self.id(), failure="closed")

    def test_django(self):
        limit = django_limit(django.db.connection, self.id(), failure="closed")
        answer = lambda *_, **__: django.http.HttpResponse("hello")  # noqa: E731

        @limit
        def function(request):
            return answer()

        @limit
        async def function_async(request):
            return answer()

        @limit
        class Class(django.views.View):
            get = answer

        class Method(django.views.View):
            @limit
            def get(self, request):
                return answer()

        views = {"function": function, "async": function_async, "class": Class.as_view(), "method": Method.as_view()}
        for user, (name, view) in zip("abcd", views.items()):

            def get():
                request = django.test.RequestFactory().get("/")
                request.user = User(user)
                response = view(request)
                return asyncio.run(response) if asyncio.iscoroutine(response) else response

            with self.subTest(name):
                self.passes_once(get)
                self.assertEqual(2, taken(self.id(), f"user:{user}"))
        request = django.test.RequestFactory().get("/")
        request.user = User(None)
        function(request)
        self.assertEqual(1, taken(self.id(), "ip:127.0.0.1"))
        with self.assertRaisesRegex(TypeError, "the view is not async"):
            django_limit(AsyncLimiter.__new__(AsyncLimiter), self.id(), failure="closed")(answer)

    def test_django_says_once_that_a_transaction_of_the_view_takes_the_tokens(self):
        view = django_limit(Limiter(django.db.connection), self.id(), failure="closed")(lambda request: django.http.HttpResponse())
        request = django.test.RequestFactory().get("/")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            view(request)
            for _ in range(2):
                with django.db.transaction.atomic():
                    view(request)
        self.assertEqual([RuntimeWarning], [warning.category for warning in seen])
        self.assertIn("non_atomic_requests", str(seen[0].message))

    def test_without_a_database_a_view_is_503_or_runs_as_chosen(self):
        app = flask.Flask(__name__)
        conn = psycopg2.connect("")
        conn.close()
        for failure in ("closed", "open"):
            app.add_url_rule(f"/{failure}", failure, flask_limit(Limiter(conn), self.id(), failure=failure)(lambda: "hello"))
        away = django.db.connection.copy()
        away.settings_dict |= {"HOST": "127.0.0.1", "PORT": "1"}
        view = django_limit(away, self.id(), failure="open")(lambda request: django.http.HttpResponse())
        with self.assertLogs("pgratelimit"):
            self.assertEqual(200, view(django.test.RequestFactory().get("/")).status_code)
            self.assertEqual([503, 200], [app.test_client().get(f"/{failure}").status_code for failure in ("closed", "open")])

    def test_an_argument_that_cannot_be_is_refused_where_the_view_is_written(self):
        for limited in (fastapi_limit, starlette_limit, flask_limit, django_limit):
            for name, wrong in (
                ("policy", None), ("policy", 5), ("key", "user:42"), ("cost", 1.5), ("cost", "5"), ("cost", None), ("cost", True),
                ("trusted_proxies", "1"), ("trusted_proxies", -1), ("timeout", "1s"), ("timeout", 0), ("quotas", "api"),
            ):
                with self.subTest(limited.__name__, name=name, wrong=wrong), self.assertRaisesRegex((InvalidArgument, TypeError), f"{name} (is|must be) .*[a-z]"):
                    limited("postgresql://", **{"policy": "api", "failure": "open", name: wrong})


class TimeoutTest(AsyncCase):
    async def at_once(self, framework: str, limiter: Any) -> list[int]:
        """The statuses of 60 requests at once."""
        if framework == "fastapi":
            app = fastapi.FastAPI(dependencies=[fastapi_limit(limiter, self.id(), failure="open")])
            app.get("/")(lambda: "hello")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
                return [answer.status_code for answer in await asyncio.gather(*(client.get("/") for _ in range(60)))]
        app = flask.Flask(__name__)
        app.add_url_rule("/", "hello", flask_limit(limiter, self.id(), failure="open")(lambda: "hello"))
        with concurrent.futures.ThreadPoolExecutor(60) as threads:
            return await asyncio.to_thread(lambda: [a.status_code for a in threads.map(lambda _: app.test_client().get("/"), range(60))])

    async def test_requests_at_once_are_all_answered_within_the_timeout(self):
        define(self.id(), 1000)
        silent = self.enterContext(socket.create_server(("127.0.0.1", 0)))
        own = self.enterContext(pool())  # whose connections wait for a locked bucket as for a server that has stopped
        async with locked(self.id(), "ip:127.0.0.1"):
            for limiter in ("application_name=locked", Limiter(own), "host=127.0.0.1 port=1", f"host=127.0.0.1 port={silent.getsockname()[1]}"):
                for framework in ("fastapi", "flask"):
                    with self.subTest(framework=framework, limiter=limiter), self.assertLogs("pgratelimit"):
                        began = time.monotonic()
                        self.assertEqual([200] * 60, await asyncio.wait_for(self.at_once(framework, limiter), 60))
                        self.assertLess(time.monotonic() - began, 4)
            self.assertTrue(Limiter("application_name=locked").acquire(self.id(), "other"), "a connection is free")


class DjangoAsyncTest(AsyncCase):
    async def test_an_async_view_has_an_async_limiter(self):
        define(self.id(), 1)
        async with psycopg_pool_of(2) as opened:

            @django_limit(Combiner(opened), self.id(), failure="closed", timeout=60)
            async def view(request):
                return django.http.HttpResponse()

            request = django.test.RequestFactory().get("/")
            self.assertEqual([200, 429], [(await view(request)).status_code for _ in range(2)])


class ConnectionTest(unittest.TestCase):
    def test_connections_take_tokens_in_or_outside_a_transaction_and_say_which(self):
        define(self.id(), 10)
        conn = psycopg2.connect("")
        limiter = Limiter(conn)
        with self.assertWarnsRegex(RuntimeWarning, "no autocommit"):
            self.assertEqual(9, limiter.acquire(self.id(), "k").remaining)
        self.assertTrue(limiter.in_transaction)
        conn.rollback()
        self.assertEqual(0, taken(self.id()))
        conn.autocommit = True
        self.assertFalse(limiter.in_transaction)
        limiter.acquire(self.id(), "k")
        self.assertEqual(1, taken(self.id()))
        limiter = Limiter(django.db.connection)
        self.assertFalse(limiter.in_transaction)
        with self.assertRaises(KeyError), django.db.transaction.atomic():
            limiter.acquire(self.id(), "k")
            self.assertTrue(limiter.in_transaction)
            raise KeyError
        self.assertEqual(1, taken(self.id()))
        limiter.acquire(self.id(), "k")
        self.assertEqual(2, taken(self.id()))
        conn.close()

    def test_a_url_is_one_pool_that_the_process_opens_that_calls(self):
        define(self.id(), 10)
        limiter = Limiter("application_name=of_a_url")
        self.assertIs(limiter._driver._db, Limiter("application_name=of_a_url")._driver._db)
        if not (child := os.fork()):
            os._exit(limiter.acquire(self.id(), "k").remaining)
        self.assertEqual(9, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        self.assertEqual(8, limiter.acquire(self.id(), "k").remaining)
        self.assertRaisesRegex(ValueError, "write postgresql://", Limiter, "postgresql+psycopg2://of_another_library")
        began = time.monotonic()
        self.assertRaises(psycopg_pool.PoolTimeout, Limiter("host=127.0.0.1 port=1").acquire, self.id(), "k")
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual(1, limiter._driver._db.reconnect_timeout, "after a longer outage psycopg's pool connects later and later")

    def test_every_kind_of_text_and_of_answer(self):
        define(self.id(), 10)
        key = "%s ' \\ \" { é 🪣"
        conn = psycopg2.connect("")
        conn.autocommit = True
        for taken_before, db in ((0, conn), (3, django.db.connection)):
            limiter = Limiter(db)
            self.assertEqual(9 - taken_before, limiter.acquire(self.id(), key).remaining)
            joint = limiter.acquire_all([(self.id(), key), (self.id(), "other", 2)], idempotency_key=f"once {taken_before} %")
            self.assertEqual((8 - taken_before, 8 - taken_before // 3 * 2), tuple(d.remaining for d in joint.decisions))
            self.assertTrue(limiter.reserve(self.id(), key, 5))
            self.assertEqual(11, limiter.acquire_up_to(self.id(), "full", 20).taken + 1)
            limiter._driver.fetch("select ratelimit_reset(%s::text, 'full')", (self.id(),))
            for error, call in (
                (UnknownPolicy, lambda: limiter.acquire("none", key)),
                (InvalidArgument, lambda: limiter.acquire(self.id(), "a\0b")),
                (InvalidArgument, lambda: limiter.acquire(self.id(), "k", -1)),
                (InvalidArgument, lambda: limiter.hold(self.id(), "k").__enter__()),
            ):
                self.assertRaises(error, call)
        conn.close()

    def test_an_error_of_the_server_is_what_it_is_under_any_driver(self):
        define(self.id(), 9)
        conn = psycopg2.connect("", options="-c lock_timeout=50")
        conn.autocommit = True
        execute("create role nobody_at_all")
        self.addCleanup(execute, "drop role nobody_at_all")

        def guarded(cursor):
            cursor.execute("select ratelimit_enforce(%s, 'guarded', 50)", (self.id(),))

        def forbidden(cursor):
            cursor.execute("set role nobody_at_all; select ratelimit_acquire(%s, 'k')", (self.id(),))

        execute("select ratelimit_acquire(%s::text, 'k')", self.id())
        holder = psycopg2.connect("")
        holder.cursor().execute("select ratelimit_acquire(%s, 'k')", (self.id(),))
        self.assertRaises(Locked, Limiter(conn).acquire, self.id(), "k")
        holder.close()
        for db in (conn, django.db.connection):
            for use, sqlstate, kind in ((guarded, "RL429", "fault"), (forbidden, "42501", "setup")):
                with self.assertRaises(Exception) as raised, db.cursor() as cursor:
                    use(cursor)
                self.assertEqual((sqlstate, kind), (errors.state(raised.exception), errors.kind(raised.exception)))
                denied = Denied.of(raised.exception)
                self.assertEqual(50 if sqlstate == "RL429" else None, denied and denied.cost)
            db.cursor().execute("reset role")
        pid = conn.info.backend_pid
        execute("select pg_terminate_backend(%s)", pid)
        with self.assertRaises(Exception) as raised:
            Limiter(conn).acquire(self.id(), "k")
        self.assertEqual("away", errors.kind(raised.exception))


ROOT = Path(__file__).parents[3]


class PageTest(unittest.TestCase):
    """The lines of docs/frameworks.md bring a program into PostgreSQL."""

    def setUp(self) -> None:
        execute("select ratelimit_define_policy('api', 3, 3, '1 hour', stepped => true)")
        self.addCleanup(execute, "select ratelimit_drop_policy('api')")
        Limiter("postgresql://").peek("api", "k")  # opens the pool
        self.module: dict[str, Any] = {"__name__": __name__}

    def passes(self, section: str, lines: int, get: Any) -> None:
        page = (ROOT / "docs" / "frameworks.md").read_text()
        diff = re.search(rf"^## {section}\n\n```text\n(.*?)^```", page, re.M | re.S)[1].splitlines()
        exec("\n".join(line[2:] for line in diff if line[:1] != "-"), self.module)
        self.assertEqual(lines, sum(line[:1] == "+" for line in diff))
        self.assertEqual([200, 200, 200, 429], [get() for _ in range(4)])

    def test_fastapi(self):
        self.passes("FastAPI", 2, lambda: fastapi.testclient.TestClient(self.module["app"]).get("/").status_code)

    def test_flask(self):
        self.passes("Flask", 2, lambda: self.module["app"].test_client().get("/").status_code)

    def test_django(self):
        def get() -> int:
            (pattern,) = self.module["urlpatterns"]
            return pattern.callback(django.test.RequestFactory().get("/")).status_code

        self.passes("Django", 3, get)

    def test_each_line_of_the_table_for_python(self):
        lines = re.findall(r"^\| (flask-limiter, slowapi|FastAPI|Flask|Django|httpx|requests) \| `(.*)` \|$", (ROOT / "README.md").read_text(), re.M)
        self.assertEqual(6, len(lines))
        with pool() as opened:
            names = globals() | vars(limits.storage) | {
                "FastAPI": fastapi.FastAPI, "limiter": Limiter(opened), "connection": django.db.connection, "charges": lambda request: [],
            }
            for library, line in lines:
                with self.subTest(library):
                    self.assertIsNotNone(eval(line, names))


class OutgoingTest(AsyncCase):
    """Limits for requests that httpx and requests send."""

    def setUp(self) -> None:
        define(self.id(), 2, 2, "200 ms")

    def answer(self, request: Any) -> httpx.Response:
        self.sent += 1
        return httpx.Response(429, headers={"Retry-After": "60"}) if request.url.path == "/busy" else httpx.Response(200, text="hello")

    def charges(self, request: Any) -> list[Any]:
        return [] if "free" in str(request.url) else [(self.id(), "k", 9 if "never" in str(request.url) else 2)]

    def paused(self) -> bool:
        return execute("select retry_after > interval '50 seconds' from ratelimit_peek(%s::text, 'k', 1)", self.id())[0][0]

    async def test_httpx(self):
        self.sent = 0
        with pool() as opened:
            transport = LimitedTransport(httpx.MockTransport(self.answer), Limiter(opened), self.charges, max_wait=30)
            with httpx.Client(transport=transport, base_url="http://upstream") as client:
                began = time.monotonic()
                with concurrent.futures.ThreadPoolExecutor(3) as threads:
                    self.assertEqual(["hello"] * 3, list(threads.map(lambda _: client.get("/").text, range(3))))
                self.assertGreater(time.monotonic() - began, 0.35, "each takes all tokens")
                with self.assertRaisesRegex(TooLate, f'of 9 tokens .*"{self.id()}" is 2'):
                    client.get("/never")
                self.assertEqual((3, False), (self.sent, self.paused()))
                self.assertEqual(429, client.get("/busy").status_code)
                self.assertTrue(self.paused())
                transport._max_wait = 0.05
                with transport._place([Charge(self.id(), "k")], threading.Lock) as line, line, self.assertRaisesRegex(TooLate, "too late"):
                    client.get("/")
                self.assertEqual("hello", client.get("/free").text)
                self.assertEqual({}, transport._lines)

    async def test_httpx_async(self):
        self.sent = 0
        async with psycopg_pool_of(2) as opened:
            transport = AsyncLimitedTransport(httpx.MockTransport(self.answer), Combiner(opened), self.charges, max_pause=55, max_wait=30)
            async with httpx.AsyncClient(transport=transport, base_url="http://upstream") as client:
                began = time.monotonic()
                self.assertEqual([200] * 3, [answer.status_code for answer in await asyncio.gather(*(client.get("/") for _ in range(3)))])
                self.assertGreater(time.monotonic() - began, 0.35)
                self.assertEqual(429, (await client.get("/busy")).status_code)
                self.assertTrue(self.paused())
                with self.assertRaises(TooLate):
                    await client.get("/never")
                transport._max_wait = 0.05
                with transport._place([Charge(self.id(), "k")], asyncio.Lock) as line, self.assertRaises(TooLate):
                    async with line:
                        await client.get("/")
                self.assertEqual("hello", (await client.get("/free")).text)
                self.assertEqual({}, transport._lines)
        self.assertRaises(TypeError, LimitedTransport, None, Combiner.__new__(Combiner), self.charges)

    async def test_requests(self):
        class Adapter(requests.adapters.BaseAdapter):
            def send(self, request: Any, **_: Any) -> requests.Response:
                response = requests.Response()
                response.status_code, response.url, response.request = 429, request.url, request
                response.headers["Retry-After"] = "60"
                return response

            def close(self) -> None: ...

        with pool() as opened, requests.Session() as session:
            session.mount("http://", LimitedAdapter(Adapter(), Limiter(opened), self.charges))
            self.assertEqual(429, session.get("http://upstream/").status_code)
            self.assertTrue(self.paused())
            self.assertRaises(TooLate, session.get, "http://upstream/never")
            self.assertEqual(429, session.get("http://upstream/free").status_code)


def hits_of(policy_and_limit: tuple[str, int]) -> int:
    """How many of 100 parallel hits of this process pass."""
    key, limit = policy_and_limit
    with psycopg_pool.ConnectionPool(min_size=4, max_size=4) as opened, concurrent.futures.ThreadPoolExecutor(8) as threads:
        limiter = limits.strategies.FixedWindowRateLimiter(storage := PostgresStorage(limiter=Limiter(opened)))
        item = limits.RateLimitItemPerHour(limit)
        passed = sum(threads.map(lambda _: limiter.hit(item, key), range(100)))
        del storage
        return passed


class LimitsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.storage: Any = limits.storage.storage_from_string("pgratelimit://")
        self.limiter = limits.strategies.FixedWindowRateLimiter(self.storage)

    def test_of_200_parallel_hits_of_two_processes_exactly_the_limit_passes(self):
        with multiprocessing.get_context("spawn").Pool(2) as processes:
            self.assertEqual(50, sum(processes.map(hits_of, [(self.id(), 50)] * 2)))
            self.assertEqual([0, 0], processes.map(hits_of, [(self.id(), 50)] * 2), "other processes find the counts")

    def test_the_contract_of_a_storage(self):
        item = limits.parse("3/2 hours")
        key = item.key_for("k", self.id())
        self.assertTrue(self.storage.check())
        self.assertEqual((0, 3), (self.storage.get(key), self.limiter.get_window_stats(item, "k", self.id())[1]))
        self.assertEqual([1], [self.storage.incr(key, 7200)])
        self.assertTrue(7190 < self.storage.get_expiry(key) - time.time() < 7201)
        self.assertEqual([2, 3, 4, 4], [self.storage.incr(key, 7200) for _ in range(4)])
        self.assertEqual((3, False, False), (self.storage.get(key), self.limiter.test(item, "k", self.id()), self.limiter.hit(item, "k", self.id())))
        reset, remaining = self.limiter.get_window_stats(item, "k", self.id())
        self.assertEqual(0, remaining)
        self.assertTrue(7190 < reset - time.time() < 7201)
        self.assertTrue(self.limiter.hit(item, "another", self.id(), cost=2))
        self.assertFalse(self.limiter.hit(item, "another", self.id(), cost=2))
        self.limiter.clear(item, "k", self.id())
        self.assertEqual((0, 2), (self.storage.get(key), self.storage.get(item.key_for("another", self.id()))))
        self.storage.reset()
        self.assertEqual(0, self.storage.get(item.key_for("another", self.id())))
        with self.assertRaisesRegex(NotImplementedError, "fixed-window"):
            limits.strategies.FixedWindowElasticExpiryRateLimiter(self.storage).hit(item, "k")
        self.assertRaises(NotImplementedError, limits.strategies.MovingWindowRateLimiter, self.storage)
        self.assertRaisesRegex(TypeError, "storage_options", PostgresStorage, limiter=pool)

    def test_an_override_decides_for_its_key(self):
        item = limits.parse("2/4 hours")
        self.assertTrue(self.limiter.hit(item, "k"))
        execute("select ratelimit_override('2 per 14400000 ms', %s::text, capacity => 4, refill => 4)", f"limits:{item.key_for('paying')}")
        self.assertEqual([True] * 4 + [False], [self.limiter.hit(item, "paying") for _ in range(5)])

    def test_a_limit_that_is_not_the_capacity_of_its_policy_is_an_error_until_it_was(self):
        item = limits.parse("2/6 hours")
        for capacity in (3, 2, 4):
            execute(f"select ratelimit_define_policy('2 per 21600000 ms', {capacity}, {capacity}, '6 hours', stepped => true)")
            if capacity == 3:
                self.assertRaisesRegex(InvalidArgument, "limit is 2, but the policy .* has capacity 3", self.limiter.hit, item, "k")
            else:
                self.assertTrue(self.limiter.hit(item, "k" * capacity), "a policy that is changed later decides")

    def test_a_role_that_may_not_define_the_policy_gets_the_statement(self):
        execute("create role hits; grant execute on function ratelimit_acquire to hits")
        self.addCleanup(execute, "drop owned by hits; drop role hits")
        conn = psycopg2.connect("", options="-c role=hits")
        conn.autocommit = True
        limiter = limits.strategies.FixedWindowRateLimiter(storage := PostgresStorage(limiter=Limiter(conn)))
        item = limits.parse("2/5 hours")
        with self.assertRaises(UnknownPolicy) as raised:
            limiter.hit(item, "k")
        self.assertIn("grant execute on function ratelimit_define_policy to <role>", raised.exception.__cause__.__notes__[0])
        connection().execute(raised.exception.hint.removeprefix("Its owner can run: "))
        self.assertTrue(limiter.hit(item, "k"))
        conn.close()
        del storage
