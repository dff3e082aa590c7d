"""A database for the tests: PGHOST and the other variables name it, and it has pgratelimit installed. tests/languages
starts them with one of their own."""

import asyncio
import atexit
import datetime
import functools
import gc
import json
import os
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import asyncpg
import psycopg
import psycopg_pool

from pgratelimit import drivers

VECTORS = Path(__file__).parents[3] / "tests" / "vectors"


def vectors(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


@functools.cache
def connection() -> psycopg.Connection[tuple[Any, ...]]:
    conn = psycopg.connect(autocommit=True)
    atexit.register(conn.close)
    return conn


def execute(sql: str, *args: Any) -> list[tuple[Any, ...]]:
    """Runs SQL apart from what is tested."""
    cursor = connection().execute(sql, args or None, prepare=False)
    return cursor.fetchall() if cursor.description else []


def define(policy: str, capacity: int, refill: int = 0, every: str = "1 hour") -> None:
    execute("select ratelimit_define_policy(%s::text, %s::bigint, %s::bigint, %s::interval)", policy, capacity, refill, every)


def define_quota(policy: str, capacity: int, turn_in: str) -> datetime.datetime:
    """A quota of a month, and the instant of its next turn."""
    (turn,) = execute("select clock_timestamp() + %s::interval", turn_in)[0]
    execute("select ratelimit_define_policy(%s::text, %s::bigint, period => '1 month', anchor => %s at time zone 'UTC')", policy, capacity, turn)
    return turn


def define_slots(policy: str, capacity: int = 3, lease: str = "1 hour", shadow: bool = False) -> None:
    execute("select ratelimit_define_policy(%s::text, %s::bigint, lease => %s::interval, shadow => %s)", policy, capacity, lease, shadow)


def holders(policy: str) -> list[str]:
    return [holder for (holder,) in execute("select holder from ratelimit_holders(%s::text)", policy)]


def taken(policy: str, key: str = "k") -> int:
    """Tokens that are taken from a bucket that does not refill."""
    return execute("select capacity - remaining from ratelimit_peek(%s::text, %s::text)", policy, key)[0][0]


@contextmanager
def stopped_clock() -> Iterator[Callable[[int], Any]]:
    """The database's clock stands still, at the ms after the beginning that the function is given."""
    (definition,) = execute("select pg_get_functiondef('ratelimit.clock()'::regprocedure)")[0]
    begin = datetime.datetime(2024, 3, 30, 12, tzinfo=datetime.timezone.utc)
    execute("create table public.test_clock (now timestamptz not null)")
    try:
        execute("insert into public.test_clock values (%s)", begin)
        execute("create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe "
                "as $$ select now from public.test_clock $$")
        yield lambda ms: execute("update public.test_clock set now = %s", begin + datetime.timedelta(milliseconds=ms))
    finally:
        execute(definition)
        execute("drop table public.test_clock")


@contextmanager
def replaced(function: str, body: str) -> Iterator[None]:
    """A function has another body, which may call it as original."""
    sql = "select concat(proname, '(', pg_get_function_identity_arguments(oid), ') returns ', prorettype::regtype) from pg_proc where proname = %s"
    (signature,) = execute(sql, function)[0]
    execute(f"alter function {function} rename to original; create function {signature} language plpgsql as $${body}$$")
    try:
        yield
    finally:
        execute(f"drop function {function}; alter function original rename to {function}")


@contextmanager
def fails_once(sqlstate: str, message: str) -> Iterator[None]:
    """ratelimit_acquire raises once, and works from then on."""
    execute("create sequence if not exists fails; alter sequence fails restart")
    with replaced("ratelimit_acquire", f"""
        begin
          if nextval('fails') = 1 then raise exception '{message}' using errcode = '{sqlstate}'; end if;
          return original(policy, key, cost, idempotency_key);
        end"""):
        yield


@asynccontextmanager
async def psycopg_pool_of(size: int, options: str = "") -> AsyncIterator[Any]:
    """Its connections have the application_name test."""
    options = f"options='{os.environ.get('PGOPTIONS', '')} {options}'" if options else ""
    pool = psycopg_pool.AsyncConnectionPool(f"application_name=test {options}", min_size=1, max_size=size, open=False)
    async with pool:
        yield pool


@asynccontextmanager
async def asyncpg_pool_of(size: int, options: str = "") -> AsyncIterator[Any]:
    settings = {"application_name": "test"} | dict(o.split("=") for o in options.replace("-c ", "").split())
    cache = 0 if "RATELIMIT_TEST_POOLER" in os.environ else 100  # as asyncpg's documentation asks
    async with asyncpg.create_pool(min_size=0, max_size=size, server_settings=settings, statement_cache_size=cache) as pool:
        yield pool


BOTH_POOLS: dict[str, Callable[..., Any]] = {"psycopg": psycopg_pool_of, "asyncpg": asyncpg_pool_of}


async def until(condition: str, *args: Any) -> None:
    """Waits until the server sees that something holds."""
    async with asyncio.timeout(60):
        while execute(condition, *args) != [(True,)]:
            await asyncio.sleep(0.002)


BLOCKED = "select pid from pg_stat_activity where application_name = 'test' and datname = current_database() and wait_event_type = 'Lock'"
"""The sessions of a test that wait for a lock. Other tests run on the same server, in databases of their own."""


async def until_blocked(calls: int = 1) -> None:
    await until(f"select count(*) = %s from ({BLOCKED}) as blocked", calls)


@asynccontextmanager
async def transaction() -> AsyncIterator[asyncpg.Connection]:
    """A connection with an open transaction, which is rolled back."""
    conn = await asyncpg.connect()
    opened = conn.transaction()
    await opened.start()
    try:
        yield conn
    finally:
        await opened.rollback()
        await conn.close()


@asynccontextmanager
async def locked(policy: str, key: str) -> AsyncIterator[None]:
    """Another transaction holds the bucket, which has lost a token once."""
    execute("select ratelimit_acquire(%s::text, %s::text)", policy, key)
    async with transaction() as conn:
        await conn.execute("select ratelimit_acquire($1::text, $2::text)", policy, key)
        yield


class AsyncCase(unittest.IsolatedAsyncioTestCase):
    """Fails if a test leaves tasks behind, or an error that was never looked at."""

    async def asyncSetUp(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(False)
        self.enterContext(mock.patch("pgratelimit.limiter.UNDO_PAUSE", 0.01))
        self.loop_errors: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: self.loop_errors.append(context))
        self.addAsyncCleanup(self.leaves_nothing)

    async def leaves_nothing(self) -> None:
        while kept := {task for task in drivers._kept if task.get_loop() is asyncio.get_running_loop()}:
            async with asyncio.timeout(15):  # what goes on after its caller was cancelled
                await asyncio.wait(kept)
        gc.collect()  # an error that was never looked at is found when its future goes
        self.assertEqual([], self.loop_errors)
        self.assertEqual({asyncio.current_task()}, {t for t in asyncio.all_tasks() if "IsolatedAsyncioTestCase" not in repr(t)})


class Threads:
    """A Limiter whose calls are made in threads: what it has in common with an AsyncLimiter is tested once."""

    def __init__(self, limiter: Any) -> None:
        self.__dict__["of"] = limiter

    def __getattr__(self, name):
        value = getattr(self.of, name)
        return functools.partial(asyncio.to_thread, value) if callable(value) and name[0] != "_" and name != "check" else value

    def __setattr__(self, name, value):
        setattr(self.of, name, value)

    def hold(self, *args, **kwargs):
        return Threads(self.of.hold(*args, **kwargs))

    def hold_wait(self, *args, **kwargs):
        return Threads(self.of.hold_wait(*args, **kwargs))

    async def __aenter__(self):
        return Threads(await asyncio.to_thread(self.of.__enter__))

    async def __aexit__(self, *error):
        return await asyncio.to_thread(self.of.__exit__, *error)


async def gather(*calls: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def with_each_driver(loader: unittest.TestLoader, *cases: type[unittest.TestCase]) -> unittest.TestSuite:
    suite = unittest.TestSuite()
    for case in cases:
        for driver in BOTH_POOLS:
            own = type(f"{case.__name__}_{driver}", (case,), {"driver": driver, "__module__": case.__module__})
            suite.addTests(loader.loadTestsFromTestCase(own))
    return suite
