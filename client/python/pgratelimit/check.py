"""What the calls of a limiter lack in its database."""

import json
from collections.abc import Collection
from typing import Any

from . import calls
from .calls import Call, invalid, texts
from .errors import Error, InvalidArgument, UnknownPolicy

_HOLD = ["hold", "renew", "release"]
_SLOTS = {"hold_wait", *_HOLD}
_FUNCTIONS = {"hold": _HOLD, "hold_wait": _HOLD, "wait": ["reserve", "settle"]}  # of methods that differ

_FOUND = """(
  select current_user::text as role, pg_catalog.json_agg(pg_catalog.json_build_array(
           wanted.name, found.schema, found.signature, found.visible, found.usage, found.execute))::text as functions
    from (select $1::text::text[] as names, $2::text as schema) as given
   cross join pg_catalog.unnest(given.names) as wanted (name)
    left join lateral (
      select pg_catalog.quote_ident(n.nspname) as schema,
             pg_catalog.format('%I(%s)', p.proname, pg_catalog.oidvectortypes(p.proargtypes)) as signature,
             given.schema is not null or pg_catalog.pg_function_is_visible(p.oid) as visible,
             pg_catalog.has_schema_privilege(n.oid, 'usage') as usage,
             pg_catalog.has_function_privilege(p.oid, 'execute') as execute
        from pg_catalog.pg_proc as p
        join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
       where p.proname = wanted.name and n.nspname = coalesce(given.schema, n.nspname)
       order by pg_catalog.pg_function_is_visible(p.oid) desc
       limit 1) as found on true) as answer"""


def functions(limiter: object, schema: str | None, policies: Collection[str], methods: Collection[str], packs: bool) -> Call[tuple[list[str], bool]]:
    """A call that lists the functions and grants that are lacking, with the statements that help, and tells whether policies can be asked."""
    if isinstance(policies, str) or isinstance(methods, str):
        raise invalid("policies and calls are collections of names")
    wanted: dict[str, None] = {}
    asking = "renew" if _SLOTS & set(methods) else "acquire"  # the call by which policies are asked
    for method in [*methods, *([asking] if policies else [])]:
        if method.startswith("_") or not callable(getattr(limiter, method, None)):
            raise invalid(f"calls has {method!r}, which is no method of a limiter")
        wanted |= dict.fromkeys(_FUNCTIONS.get(method, [method]))
    if packs and ("acquire" in wanted or "acquire_all" in wanted):
        wanted["acquire_packed"] = None
    names = texts([f"ratelimit_{name}" for name in wanted])

    def decode(row: Any) -> tuple[list[str], bool]:
        found = json.loads(row[1])
        can_ask = all(own and visible and usage and execute for name, own, _, visible, usage, execute in found if name == f"ratelimit_{asking}")
        return _lacks(row[0], found, schema), can_ask

    return Call("check", "role, functions", _FOUND, (names, schema), decode, True, True)


def _lacks(role: str, found: list[list[Any]], schema: str | None) -> list[str]:
    if all(own is None for _, own, *_ in found):
        place = "this database" if schema is None else f'schema "{schema}" of this database'
        return [f"pgratelimit is not installed in {place}: run migrations/psql/install.sql"]
    without_usage = dict.fromkeys(own for _, own, _, _, usage, _ in found if own is not None and not usage)
    lacks = [f'grant usage on schema {own} to "{role}";' for own in without_usage]
    for name, own, signature, visible, usage, execute in found:
        if own is None:
            lacks.append(f"{name} is missing: bring pgratelimit up to date")
            continue
        if usage and not visible:
            lacks.append(f"{name} is in schema {own}, which is not on search_path: name it with schema=")
        if not execute:
            lacks.append(f'grant execute on function {own}.{signature} to "{role}";')
    return lacks


def of_policy(policy: str, methods: Collection[str]) -> Call[Any]:
    """A call that takes nothing, and fails if there is no such policy."""
    return calls.renew(policy, "check", "check", bool) if _SLOTS & set(methods) else calls.acquire(policy, "check", 0, None)


def refused(policy: str, methods: Collection[str], error: Error) -> list[str]:
    if isinstance(error, UnknownPolicy):
        return [f'no policy is named "{policy}": see the names in ratelimit_policies(), or define it']
    if not isinstance(error, InvalidArgument):
        raise error
    if not _SLOTS & set(methods):
        return [f'the policy "{policy}" lends slots: call hold']
    return [] if set(methods) - _SLOTS else [f'the policy "{policy}" lends no slots: define it with a lease, or call acquire']
