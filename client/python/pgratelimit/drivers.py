"""How a statement is sent by each driver. A driver is recognised only if the program has imported it: there is nothing to depend on."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol


RELEASE_TIMEOUT = 5.0
"""Seconds after which a connection of asyncpg that cannot be reset is closed."""


class Driver(Protocol):
    percent: bool  # %s in place of $1
    is_pool: bool  # each statement is a transaction of its own, and there are other connections

    def is_alone(self) -> bool:
        """Whether a statement is a transaction of its own now."""


class SyncDriver(Driver, Protocol):
    def fetch(self, sql: str, args: Sequence[Any]) -> Sequence[Any]: ...


class AsyncDriver(Driver, Protocol):
    async def fetch(self, sql: str, args: Sequence[Any]) -> Sequence[Any]: ...


def sync_driver(db: Any) -> SyncDriver:
    if _is(db, "psycopg", "Connection") or _is(db, "psycopg_pool", "ConnectionPool"):
        return Psycopg(db)
    raise TypeError(f"pgratelimit: not a psycopg.Connection or psycopg_pool.ConnectionPool: {type(db)}")


def async_driver(db: Any) -> AsyncDriver:
    if _is(db, "psycopg", "AsyncConnection") or _is(db, "psycopg_pool", "AsyncConnectionPool"):
        return AsyncPsycopg(db)
    if _is(db, "asyncpg", "Connection") or _is(db, "asyncpg.pool", "Pool", "PoolConnectionProxy"):
        return Asyncpg(db)
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

    def is_alone(self) -> bool:
        return self.is_pool or bool(self._db.autocommit) and _is_idle(self._db)


def _is_idle(conn: Any) -> bool:
    return bool(conn.info.transaction_status == 0)


class Psycopg(_Psycopg):
    def fetch(self, sql: str, args: Sequence[Any]) -> Any:
        from psycopg import Cursor, rows  # the connection's own may be others

        with self._connection() as conn, Cursor(conn, row_factory=rows.tuple_row) as cursor:
            return cursor.execute(sql, args, prepare=False).fetchone()

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


class AsyncPsycopg(_Psycopg):
    async def fetch(self, sql: str, args: Sequence[Any]) -> Any:
        from psycopg import AsyncCursor, rows

        async with self._connection() as conn, AsyncCursor(conn, row_factory=rows.tuple_row) as cursor:
            try:
                await cursor.execute(sql, args, prepare=False)
            except asyncio.CancelledError:
                with suppress(Exception):  # the server may be told to stop; before 3.2 the connection is of no use either way
                    await asyncio.wait_for(asyncio.to_thread(conn.cancel), 1)
                if self.is_pool:
                    await conn.close()
                raise
            return await cursor.fetchone()

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


class Asyncpg:
    percent = False

    def __init__(self, db: Any) -> None:
        self._db = db
        self.is_pool = hasattr(db, "get_max_size")

    def is_alone(self) -> bool:
        return self.is_pool or not self._db.is_in_transaction()

    async def fetch(self, sql: str, args: Sequence[Any]) -> Any:
        if not self.is_pool:
            return await self._db.fetchrow(sql, *args)
        conn = await self._db.acquire()
        try:
            return await conn.fetchrow(sql, *args)
        except Exception as error:
            if getattr(error, "sqlstate", None) is None:  # it is not the server's: the pool might wait forever for a connection that broke
                conn.terminate()
            raise
        finally:
            with suppress(Exception):  # the answer is there; after a cancelled call asyncpg asks the server to stop, and waits for that
                await self._db.release(conn, timeout=RELEASE_TIMEOUT)
