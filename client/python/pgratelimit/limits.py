"""A storage of the library limits, which flask-limiter and slowapi use:

    Limiter(key_func, storage_uri="pgratelimit://app@localhost/app")

or with storage_options={"limiter": pgratelimit.Limiter(pool)}, for the strategy fixed-window. A limit is a stepped policy, such as "100 per
60000 ms", which is defined when it is first used, if the role may. A hit takes tokens if the bucket covers them, and a hit beyond the limit
writes nothing. The windows of a key follow each other from its first hit on, until the key was idle and cleaned up; the storage of memory
begins a window with the first hit after the last one. So of what that calls a window, up to twice the limit may pass.
"""

from __future__ import annotations

import math
import time
from typing import Any

from limits.limits import GRANULARITIES
from limits.storage import Storage

from .calls import Call, bucket, qualified
from .errors import InvalidArgument, UnknownPolicy
from .http import named
from .limiter import Limiter


class PostgresStorage(Storage):
    """Of what the storage of memory calls a window, up to twice the limit may pass."""

    STORAGE_SCHEME = ["pgratelimit"]
    base_exceptions = Exception

    def __init__(self, uri: str | None = None, limiter: Limiter | None = None, **options: Any) -> None:
        super().__init__(uri, **options)
        self._limiter = limiter or Limiter((uri or "pgratelimit://").replace("pgratelimit", "postgresql", 1))
        if not isinstance(self._limiter, Limiter):
            raise TypeError('pgratelimit: pass storage_options={"limiter": pgratelimit.Limiter(pool)}, or a URI alone')
        self._policies: set[str] = set()
        self._fitting: set[str] = set()  # policies whose capacity once was their limit

    def incr(self, key: str, expiry: int, elastic_expiry: bool = False, amount: int = 1) -> int:
        """The hits in the window with these; beyond the limit, as many as there would be."""
        if elastic_expiry:
            raise NotImplementedError("pgratelimit: a window ends when it ends: choose the strategy fixed-window")
        limit, policy, name = self._bucket(key, expiry)
        try:
            d = self._limiter.acquire(policy, name, amount)
        except UnknownPolicy:
            self._define(policy, limit, expiry)
            d = self._limiter.acquire(policy, name, amount)
        if policy not in self._fitting:
            capacity = limit if d.capacity == limit else self._limiter.acquire(policy, "check", 0).capacity  # that of the key may be an override's
            if capacity != limit:
                hint = f"Define it with capacity {limit}, or name a limit of {capacity}."
                raise InvalidArgument("pgratelimit: invalid limit", None, f'limit is {limit}, but the policy "{policy}" has capacity {capacity}.', hint)
            self._fitting.add(policy)
        hits = limit - d.remaining  # an override may be of another capacity: PostgreSQL decides
        return max(1, hits) if d.allowed else max(limit, hits) + amount

    def get(self, key: str) -> int:
        limit, policy, name = self._bucket(key)
        try:
            return max(0, limit - self._limiter.peek(policy, name, 0).remaining)
        except UnknownPolicy:
            return 0

    def get_expiry(self, key: str) -> int:
        _, policy, name = self._bucket(key)
        try:
            return math.ceil(time.time() + (self._limiter.peek(policy, name, 0).reset_after or 0))
        except UnknownPolicy:
            return math.ceil(time.time())

    def check(self) -> bool:
        try:
            return bool(self._limiter._driver.fetch("select true", ()))
        except Exception:
            return False

    def clear(self, key: str) -> None:
        _, policy, name = self._bucket(key)
        self._limiter._run(Call("reset", "true", "ratelimit_reset($1::text, $2::text)", bucket(policy, name), bool, True))

    def reset(self) -> int | None:
        """Forgets all hits under the limits that this process has used."""
        procedure = qualified(self._limiter._schema, "ratelimit_reset_all($1::text)", True)
        for policy in self._policies:
            self._limiter._driver.fetch(f"call {procedure}", (policy,))
        return None

    def _bucket(self, key: str, expiry: int | None = None) -> tuple[int, str, str]:
        """The limit, its policy and the bucket. limits passes the limit in the key only: …/10/1/minute."""
        *_, amount, multiples, granularity = key.split("/")
        window = int(multiples) * GRANULARITIES[granularity].GRANULARITY.seconds if expiry is None else expiry
        policy = f"{amount} per {window * 1000} ms"
        self._policies.add(policy)
        return int(amount), policy, named("limits", key)

    def _define(self, policy: str, limit: int, expiry: int) -> None:
        function = "ratelimit_define_policy($1::text, $2::bigint, $3::bigint, $4::text::interval, stepped => true)"
        try:
            self._limiter._run(Call("define policy", "true", function, (policy, limit, limit, f"{expiry} s"), bool, True))
        except Exception as error:
            hint = f"Its owner can run: select ratelimit_define_policy('{policy}', {limit}, {limit}, '{expiry} s', stepped => true);"
            raise UnknownPolicy(f'pgratelimit: no policy is named "{policy}"', "RL001", "It was not defined, either.", hint) from error
