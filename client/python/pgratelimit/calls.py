"""The statements: their arguments, their text, and the decoding of the one row that each returns.

Arguments are text and bigint, each cast where it is used: psycopg sends 5 as int2, and asyncpg asks the server for types. An array is
sent as the text of one, which is faster than the drivers and alike in all.
"""

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from . import answers
from .answers import DECISION, JOINT, PARTIAL, RESERVATION, Charge, Decision, JointDecision, PartialDecision, Reservation, microseconds
from .errors import Error, InvalidArgument, of_server
from .hold import COLUMNS as HOLD

T = TypeVar("T")


@dataclass(slots=True)
class Call(Generic[T]):
    """One statement: it selects columns from a function, which returns one row."""

    verb: str
    columns: str
    function: str
    args: tuple[str | int | None, ...]
    decode: Callable[[Sequence[Any]], T]
    once: bool = False  # does the same however often it is sent


@functools.cache
def statement(schema: str | None, columns: str, function: str, percent: bool) -> str:
    """The SQL of a call, with $1 or, for psycopg, with %s."""
    if percent:
        columns, function = (re.sub(r"[$][0-9]+", "%s", text.replace("%", "%%")) for text in (columns, function))
    if schema is not None:
        quoted = '"' + schema.replace('"', '""') + '".'
        function = (quoted.replace("%", "%%") if percent else quoted) + function
    return f"select {columns} from {function}"


def acquire(policy: str, key: str, cost: int, idempotency_key: str | None) -> Call[Decision]:
    function = "ratelimit_acquire($1::text, $2::text, $3::bigint, $4::text)"
    return _call("acquire", DECISION, function, answers.decision, policy, key, whole("cost", cost), idempotency_key)


def peek(policy: str, key: str, cost: int) -> Call[Decision]:
    function = "ratelimit_peek($1::text, $2::text, $3::bigint)"
    return Call("peek", DECISION, function, (*bucket(policy, key), whole("cost", cost)), answers.decision, True)


def peek_many(requests: Iterable[Charge]) -> Call[list[Decision | Error]]:
    return _many("peek", DECISION, "ratelimit_peek_many", answers.decision, requests, "cost", True)


def acquire_up_to_many(requests: Iterable[Charge]) -> Call[list[PartialDecision | Error]]:
    return _many("acquire up to", PARTIAL, "ratelimit_acquire_up_to_many", answers.partial, requests, "at_most", False)


def _many(
    operation: str, columns: str, function: str, decode_one: Callable[[Sequence[Any]], T], requests: Iterable[Charge], tokens: str, once: bool
) -> Call[list[T | Error]]:
    """A request that cannot be sent has its error in its place."""
    asked = [_charged_or_error(r, tokens) for r in requests]
    sent = [r for r in asked if isinstance(r, Charge)]

    def decode(row: Sequence[Any]) -> list[T | Error]:
        found: list[T | Error] = [
            decode_one(columns) if code is None else of_server(operation, code, message, detail, hint)
            for code, message, detail, hint, *columns in json.loads(row[0] or "[]")  # null: all errors were found before
        ]
        if len(found) != len(sent):
            raise Error(f"pgratelimit: {operation}: {len(found)} answers to {len(sent)} requests")
        rest = iter(found)
        return [next(rest) if isinstance(r, Charge) else r for r in asked]

    columns = (
        "pg_catalog.json_agg(pg_catalog.json_build_array(error_code, error_message, error_detail, error_hint, "
        f"{columns}) order by request)::text"
    )
    return Call(operation, columns, function + "($1::text::text[], $2::text::text[], $3::text::bigint[])", arrays(sent), decode, once)


def refund(policy: str, key: str, amount: int) -> Call[Decision]:
    function = "ratelimit_refund($1::text, $2::text, $3::bigint)"
    return Call("refund", DECISION, function, (*bucket(policy, key), whole("amount", amount)), answers.decision)


def charge(policy: str, key: str, cost: int, idempotency_key: str | None) -> Call[Decision]:
    function = "ratelimit_charge($1::text, $2::text, $3::bigint, $4::text)"
    return _call("charge", DECISION, function, answers.decision, policy, key, whole("cost", cost), idempotency_key)


def settle(policy: str, key: str, idempotency_key: str, cost: int) -> Call[Decision]:
    function = "ratelimit_settle($1::text, $2::text, cost => $3::bigint, idempotency_key => $4::text)"
    return _call("settle", DECISION, function, answers.decision, policy, key, whole("cost", cost), idempotency_key)


def _interval(argument: str, seconds: float) -> str:
    try:
        return f"{round(seconds * 1_000_000)} microseconds"
    except (TypeError, ValueError, OverflowError):
        raise invalid(f"{argument} is not a number of seconds") from None


def reserve(policy: str, key: str, max_wait: float, cost: int, idempotency_key: str | None) -> Call[Reservation]:
    function = "ratelimit_reserve($1::text, $2::text, $3::text::interval, $4::bigint, $5::text)"
    longest = _interval("max_wait", max_wait)
    return _call("reserve", RESERVATION, function, answers.reservation, policy, key, longest, whole("cost", cost), idempotency_key)


def pause(policy: str, key: str, pause_for: float) -> Call[Decision]:
    function = "ratelimit_pause($1::text, $2::text, $3::text::interval)"
    return Call("pause", DECISION, function, (*bucket(policy, key), _interval("pause_for", pause_for)), answers.decision)


def acquire_up_to(policy: str, key: str, at_most: int, at_least: int, idempotency_key: str | None) -> Call[PartialDecision]:
    function = "ratelimit_acquire_up_to($1::text, $2::text, $3::bigint, $4::bigint, $5::text)"
    bounds = whole("at_most", at_most), whole("at_least", at_least)
    return _call("acquire up to", PARTIAL, function, answers.partial, policy, key, *bounds, idempotency_key)


def acquire_all(charges: Sequence[Charge], idempotency_key: str | None) -> Call[JointDecision]:
    def decode(row: Sequence[Any]) -> JointDecision:
        binding, parts, *columns = row
        decisions, of_all = [answers.decision(part) for part in json.loads(parts)], answers.decision(columns)
        if len(decisions) != len(charges):
            raise Error(f"pgratelimit: acquire all: {len(decisions)} decisions about {len(charges)} charges")
        return answers.joint(decisions, int(binding) - 1, of_all.allowed, of_all.replayed, of_all.shadowed)

    function = "ratelimit_acquire_all($1::text::text[], $2::text::text[], $3::text::bigint[], $4::text)"
    args = *arrays(charges), name_or_none(idempotency_key)
    return Call("acquire all", JOINT, function, args, decode, idempotency_key is not None)


def hold(policy: str, key: str, holder: str, cost: int) -> Call[Sequence[Any]]:
    """The row. The server takes a call by the same holder for the same, so it can be sent again."""
    function = "ratelimit_hold($1::text, $2::text, $3::text, $4::bigint)"
    return Call("hold", HOLD, function, (*bucket(policy, key), holder, whole("cost", cost)), lambda row: row, True)


def renew(policy: str, key: str, holder: str, decode: Callable[[Any], T]) -> Call[T]:
    """What decode makes of the lease, which is microseconds or None."""
    function = "ratelimit_renew($1::text, $2::text, $3::text)"
    args = *bucket(policy, key), text("holder", holder)
    return Call("renew", microseconds("ratelimit_renew"), function, args, lambda row: decode(row[0]), True)


def release(policy: str, key: str, holder: str) -> Call[bool]:
    function = "ratelimit_release($1::text, $2::text, $3::text)"
    args = *bucket(policy, key), text("holder", holder)
    return Call("release", "ratelimit_release", function, args, lambda row: bool(row[0]), True)


def _call(
    verb: str, columns: str, function: str, decode: Callable[[Sequence[Any]], T], policy: str, key: str, *rest: str | int | None
) -> Call[T]:
    """A call whose last argument is an idempotency key, or None."""
    *others, idempotency_key = rest
    args = *bucket(policy, key), *others, name_or_none(idempotency_key)
    return Call(verb, columns, function, args, decode, idempotency_key is not None)


def invalid(reason: str) -> InvalidArgument:
    return InvalidArgument(f"pgratelimit: invalid argument: {reason}")


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(f"{name} is not a str")
    if "\0" in value:
        raise invalid(f"{name} has a zero byte, which no text in PostgreSQL can hold; pass a hash of it")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise invalid(f"{name} has half of a surrogate pair, which is no text; pass a hash of it")
    return value


def bucket(policy: Any, key: Any) -> tuple[str, str]:
    return text("policy", policy), text("key", key)


def name_or_none(idempotency_key: Any) -> str | None:
    return None if idempotency_key is None else text("idempotency_key", idempotency_key)


def whole(name: str, value: Any) -> int:
    """A whole number of tokens. The server would round 1.5."""
    try:
        n = operator.index(None if isinstance(value, bool) else value)
    except TypeError:
        raise invalid(f"{name} is not an int") from None
    if not -(1 << 63) <= n < 1 << 63:
        raise invalid(f"{name} is more than a bigint holds")
    return n


def charged(charge: Sequence[Any], tokens: str = "cost") -> Charge:
    """The charge that a caller has passed as any tuple, checked."""
    try:
        c = Charge(*charge)
    except TypeError:
        raise invalid(f"a charge is not (policy, key) or (policy, key, {tokens})") from None
    return Charge(*bucket(c.policy, c.key), whole(tokens, c.cost))


def _charged_or_error(charge: Sequence[Any], tokens: str) -> Charge | InvalidArgument:
    try:
        return charged(charge, tokens)
    except InvalidArgument as error:
        return error


def arrays(charges: Iterable[Charge]) -> tuple[str, str, str]:
    """The policies, keys and costs, each as the text of an array."""
    policies, keys, costs = tuple(zip(*charges)) or ((), (), ())
    return texts(policies), texts(keys), numbers(costs)


def texts(values: Iterable[str]) -> str:
    """The text of an array of texts. No text has a zero byte: it stands for the separator while quotes and backslashes are escaped."""
    joined = "\0".join(values)
    return '{"' + joined.replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","') + '"}' if joined or values else "{}"


def numbers(values: Iterable[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"
