"""How a statement is sent by each driver. A driver is recognised only if the program has imported it: there is nothing to depend on."""

import asyncio
import atexit
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# In seconds:
POOL_PATIENCE = 0.05  # that a statement of a pool may go on after its caller was cancelled. To stop it costs psycopg's pool a connection
PATIENCE = 1.0  # the same on a connection
SHORTEST_LOOK, LONGEST_LOOK = 0.1, 10.0  # until the server is looked at again that goes on with a statement
RELEASE_TIMEOUT = 5.0  # after which a connection of asyncpg that cannot be reset is closed


class Driver(Protocol):
    percent: bool  # %s in place of $1
    is_pool: bool  # each statement is a transaction of its own, and there are other connections

    def is_alone(self) -> bool:
        """Whether a statement is a transaction of its own now."""

    def is_closed(self) -> bool: ...


class SyncDriver(Driver, Protocol):
    def fetch(self, sql: str, args: Sequence[Any]) -> Sequence[Any]: ...


class AsyncDriver(Driver, Protocol):
    async def fetch(self, sql: str, args: Sequence[Any], unended: set[asyncio.Future[Any]]) -> Sequence[Any]: ...


_pools: dict[str, Any] = {}  # of this process, by their URL


def sync_driver(db: Any) -> SyncDriver:
    if isinstance(db, str):
        if db not in _pools:
            import psycopg.conninfo
            import psycopg_pool

            if found := re.match(r"(?!postgres(ql)?://)[\w+.-]+://", db):
                raise ValueError(f"pgratelimit: write postgresql:// in place of {found[0]}")
            psycopg.conninfo.conninfo_to_dict(db)  # raises now what a pool would log, and failure="open" let pass
            _pools[db] = psycopg_pool.ConnectionPool(
                db, kwargs={"autocommit": True}, configure=_bound_locks, min_size=1, max_size=4, timeout=1, reconnect_timeout=1, open=False)
            atexit.register(_pools[db].close)
        return OwnPool(_pools[db])
    if _is(db, "psycopg", "Connection") or _is(db, "psycopg_pool", "ConnectionPool"):
        return Psycopg(db)
    if _is(db, "psycopg2.extensions", "connection"):
        return Psycopg2(db)
    if "django.db" in sys.modules and getattr(db, "vendor", None) == "postgresql":
        return Django(db)
    if is_async(db) or _is(db, "psycopg", "AsyncConnection") or _is(db, "asyncpg", "Connection"):
        raise TypeError(f"pgratelimit: use an AsyncLimiter or a Combiner for {type(db)}")
    raise TypeError(f"pgratelimit: not a psycopg.Connection, psycopg_pool.ConnectionPool, connection of psycopg2 or of Django, or URL: {type(db)}")


def _bound_locks(conn: Any) -> None:
    """A locked bucket must not keep the connections of a pool. Behind a pooler, where the process has another number, the session is not ours."""
    conn.execute("select pg_catalog.set_config('lock_timeout', '500ms', false) where pg_catalog.current_setting('lock_timeout') = '0' "
                 "and pg_catalog.pg_backend_pid() = %s", [conn.info.backend_pid])


def is_async(db: Any) -> bool:
    return _is(db, "psycopg_pool", "AsyncConnectionPool") or _is(db, "asyncpg.pool", "Pool")


def async_driver(db: Any) -> AsyncDriver:
    if _is(db, "psycopg", "AsyncConnection") or _is(db, "psycopg_pool", "AsyncConnectionPool"):
        return AsyncPsycopg(db)
    if _is(db, "asyncpg", "Connection") or _is(db, "asyncpg.pool", "Pool", "PoolConnectionProxy"):
        return Asyncpg(db)
    if isinstance(db, str) or _is(db, "psycopg", "Connection") or _is(db, "psycopg_pool", "ConnectionPool"):
        raise TypeError(f"pgratelimit: use a Limiter for {type(db)}, or pass a pool of psycopg's async classes or of asyncpg")
    raise TypeError(f"pgratelimit: not a connection or pool of psycopg's async classes or of asyncpg: {type(db)}")


def pool_size(pool: Any) -> int:
    """The most connections that a pool has."""
    size: int = pool.max_size if hasattr(pool, "max_size") else pool.get_max_size()
    return size


def _is(db: object, module: str, *names: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(db, tuple(getattr(loaded, name) for name in names))


class _Psycopg:
    percent = True

    def __init__(self, db: Any) -> None:
        self._db = db
        self.is_pool = not hasattr(db, "cursor")
        self._has_warned = False

    def is_alone(self) -> bool:
        return self.is_pool or bool(self._db.autocommit) and _is_idle(self._db)

    def is_closed(self) -> bool:
        return bool(self._db.closed)

    def _warn_of_transaction(self) -> None:
        """Once, when a statement is about to open a transaction that the program did not ask for."""
        if not (self.is_pool or self._has_warned or self._db.autocommit) and _is_idle(self._db):
            self._has_warned = True
            warnings.warn(
                "pgratelimit: this connection has no autocommit, so the call opens a transaction: until conn.commit() nothing is taken for "
                "good, and the bucket stays locked. Connect with autocommit=True, or call inside conn.transaction().",
                RuntimeWarning,
                stacklevel=5,
            )


def _is_idle(conn: Any) -> bool:
    return bool(conn.info.transaction_status == 0)


class Psycopg(_Psycopg):
    def fetch(self, sql: str, args: Sequence[Any]) -> Any:
        from psycopg import Cursor, rows  # the connection's own may be others

        self._warn_of_transaction()
        with self._connection() as conn, Cursor(conn, row_factory=rows.tuple_row) as cursor:
            cursor.execute(sql, args, prepare=False)
            return cursor.fetchone() if cursor.description else None

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """The connection. One of a pool is on autocommit meanwhile, which spares it begin and commit."""
        if not self.is_pool:
            yield self._db
            return
        with self._db.connection() as conn:
            before, conn.autocommit = conn.autocommit, True
            try:
                yield conn
            finally:
                if _is_idle(conn):
                    conn.autocommit = before


class OwnPool(Psycopg):
    """A pool that the first call opens: a server may fork after the program has made its limiter, and threads do not survive that."""

    def fetch(self, sql: str, args: Sequence[Any]) -> Any:
        self._db.open()
        return super().fetch(sql, args)


class Psycopg2(_Psycopg):
    def fetch(self, sql: str, args: Sequence[Any]) -> Any:
        self._warn_of_transaction()
        with self._db.cursor(cursor_factory=sys.modules["psycopg2.extensions"].cursor) as cursor:
            cursor.execute(sql, args)
            return cursor.fetchone() if cursor.description else None


class Django:
    """django.db.connection, which is another one in each thread, or one of django.db.connections."""

    percent, is_pool = True, False

    def __init__(self, db: Any) -> None:
        self._db = db

    def is_alone(self) -> bool:
        db = self._db  # whose get_autocommit() connects
        return not db.in_atomic_block and bool(db.settings_dict["AUTOCOMMIT"] if db.connection is None else db.autocommit)

    def is_closed(self) -> bool:
        return False  # it connects again by itself

    def fetch(self, sql: str, args: Sequence[Any]) -> Any:
        with self._db.cursor() as cursor:
            cursor.execute(sql, args)
            return cursor.fetchone() if cursor.description else None


class _Statement:
    """A statement in a task of its own, whose caller may leave."""

    def __init__(self) -> None:
        self.is_left = False
        self._running: asyncio.Task[Any] | None = None

    async def run(self, execute: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Nothing but this is ever cancelled."""
        self._running = asyncio.current_task()
        try:
            return await execute(*args)
        finally:
            self._running = None

    def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()


class _Async(ABC):
    """Sends each statement in a task of its own. Pools lose a connection if a cancellation interrupts its way out or back, and before 3.2 a
    connection of psycopg whose statement is cancelled is of no use. So a statement whose caller was cancelled may finish within a moment,
    is stopped in the server then, and gives its connection back by itself."""

    is_pool: bool

    async def fetch(self, sql: str, args: Sequence[Any], unended: set[asyncio.Future[Any]]) -> Any:
        """The row. A cancelled caller leaves at once, and what has not ended is added to unended. On a connection it waits for the end,
        because the connection can take no other statement before."""
        statement = _Statement()
        task = asyncio.get_running_loop().create_task(self._send(statement, sql, args))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            statement.is_left = True
            unended.add(keep(task))
            asyncio.get_running_loop().call_later(POOL_PATIENCE if self.is_pool else PATIENCE, statement.stop)
            if not self.is_pool:
                await asyncio.wait({task})
            raise
        return task.result()

    @abstractmethod
    async def _send(self, statement: _Statement, sql: str, args: Sequence[Any]) -> Any: ...

    async def _is_seen_to_end(self, process: int, statement: str, is_closed: bool = False) -> bool:
        """Whether the server was seen to go on with a statement whose connection was given up, and then not any more. The process, or another
        that has its number by then, may run others: the text up to the arguments must be that of the statement, and the transaction the same
        at each look. If the connection is closed, the process may not have read the statement yet: for a second, one that is idle counts.
        Behind a pooler it is not seen: the number that it gave is not that of a process."""
        sql = """select extract(epoch from xact_start)::text from pg_catalog.pg_stat_activity where pid <> pg_catalog.pg_backend_pid() and pid = $1
            and (state = 'active' and pg_catalog.starts_with(query, $2) or state = 'idle' and $3)"""
        text = statement.partition("%" if self.percent else "$")[0]
        if self.percent:
            sql = re.sub(r"\$\d", "%s", sql)
        is_seen, transaction, pause = False, None, SHORTEST_LOOK
        with suppress(Exception):  # without an answer it is not known
            while not self.is_closed() and (row := await self._send(_Statement(), sql, [process, text, is_closed and pause < 1])):
                if None not in (transaction, row[0]) and transaction != row[0]:
                    break
                is_seen, transaction = True, row[0] or transaction
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK)
            return is_seen
        return False


_kept: set[asyncio.Task[Any]] = set()


def keep(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """A task that nobody awaits: the loop has no reference to it, and its error is none."""

    def forget(task: asyncio.Task[Any]) -> None:
        _kept.discard(task)
        if not task.cancelled():
            task.exception()

    _kept.add(task)
    task.add_done_callback(forget)
    return task


class AsyncPsycopg(_Psycopg, _Async):
    async def _send(self, statement: _Statement, sql: str, args: Sequence[Any]) -> Any:
        from psycopg import AsyncCursor, rows

        self._warn_of_transaction()
        process = 0
        try:
            async with self._connection() as conn, AsyncCursor(conn, row_factory=rows.tuple_row) as cursor:
                if statement.is_left:
                    return None
                try:
                    await statement.run(partial(cursor.execute, prepare=False), sql, args)
                except asyncio.CancelledError:
                    if not _is_idle(conn):
                        with suppress(Exception):  # the server may be told to stop
                            await asyncio.wait_for(asyncio.to_thread(conn.cancel), 1)
                        if self.is_pool:
                            process = conn.info.backend_pid
                            await conn.close()
                    raise
                return await cursor.fetchone()
        except asyncio.CancelledError:
            if not process or not await self._is_seen_to_end(process, sql, is_closed=True):
                raise

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        if not self.is_pool:
            yield self._db
            return
        async with self._db.connection() as conn:
            before = conn.autocommit
            await conn.set_autocommit(True)
            try:
                yield conn
            finally:
                if _is_idle(conn):
                    await conn.set_autocommit(before)


class Asyncpg(_Async):
    percent = False

    def __init__(self, db: Any) -> None:
        self._db = db
        self.is_pool = hasattr(db, "get_max_size")

    def is_alone(self) -> bool:
        return self.is_pool or not self._db.is_in_transaction()

    def is_closed(self) -> bool:
        return bool(self._db._closing or self._db._closed if self.is_pool else self._db.is_closed())  # a Pool has is_closing() from 0.28 on

    async def _send(self, statement: _Statement, sql: str, args: Sequence[Any]) -> Any:
        if not self.is_pool:
            return None if statement.is_left else await statement.run(self._db.fetchrow, sql, *args)
        conn = await self._db.acquire()
        process = conn.get_server_pid()
        try:
            try:
                return None if statement.is_left else await statement.run(conn.fetchrow, sql, *args)
            except Exception as error:
                if getattr(error, "sqlstate", None) is None:  # it is not the server's: the pool might wait forever for a connection that broke
                    conn.terminate()
                raise
            finally:
                with suppress(Exception):  # the answer is there; after a cancelled call asyncpg asks the server to stop, and waits for that
                    await self._db.release(conn, timeout=RELEASE_TIMEOUT)
        except asyncio.CancelledError:
            if not await self._is_seen_to_end(process, sql):
                raise
