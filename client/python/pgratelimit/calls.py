"""The statements: their arguments, their text, and the decoding of the one row that each returns.

Arguments are text and bigint, each cast where it is used: psycopg sends 5 as int2, and asyncpg asks the server for types. An array is
sent as the text of one, which is faster than the drivers and alike in all.
"""

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from . import answers
from .answers import (
    DECISION, HOLD, JOINT, RESERVATION, SETTLEMENT, Charge, Decision, HoldAnswer, JointDecision, JointSettlement, Reservation, microseconds
)
from .errors import Error, InvalidArgument, of_server
from .queue import Request

T = TypeVar("T")

Duration = float | timedelta
"""Seconds, or a timedelta."""

LONGEST = 365 * 86400.0  # seconds that the server takes for a wait or a pause


@dataclass(slots=True)
class Call(Generic[T]):
    """One statement: it selects columns from a function, which returns one row."""

    verb: str
    columns: str
    function: str
    args: tuple[str | int | None, ...]
    decode: Callable[[Sequence[Any]], T]
    once: bool = False  # does the same however often it is sent
    is_query: bool = False  # function is a query, which has no schema

    def read(self, row: Any) -> T:
        """The answer. A row of another shape is an error: a column that is missing must not be taken for null, which is "never"."""
        try:
            return self.decode(tuple(row))
        except (TypeError, ValueError, LookupError) as error:
            raise Error(
                f"pgratelimit: {self.verb}: the answer has another shape",
                None,
                f"{self.function.partition('(')[0]} returned {_shape(row)}.",
                "Does the connection change rows or values? Is another function of this name first on search_path?",
            ) from error


def _shape(row: Any) -> str:
    return "no row" if row is None else f"a row of {len(row)} columns: {', '.join(type(value).__name__ for value in row)}"


@functools.cache
def statement(schema: str | None, columns: str, function: str, percent: bool) -> str:
    """The SQL of a call, with $1 or, for psycopg, with %s."""
    return f"select {_placed(columns, percent)} from {qualified(schema, function, percent)}"


def qualified(schema: str | None, function: str, percent: bool) -> str:
    """A function or procedure with its schema, and its arguments as of statement."""
    quoted = "" if schema is None else '"' + schema.replace('"', '""') + '".'
    return (quoted.replace("%", "%%") if percent else quoted) + _placed(function, percent)


def _placed(text: str, percent: bool) -> str:
    return re.sub(r"[$][0-9]+", "%s", text.replace("%", "%%")) if percent else text


def acquire(policy: str, key: str, cost: int, idempotency_key: str | None) -> Call[Decision]:
    function = "ratelimit_acquire($1::text, $2::text, $3::bigint, $4::text)"
    return keyed("acquire", DECISION, function, answers.decision, policy, key, whole("cost", cost), idempotency_key)


def settle(policy: str, key: str, idempotency_key: str, cost: int) -> Call[Decision]:
    function = "ratelimit_settle($1::text, $2::text, $3::text, $4::bigint)"
    return decision("settle", function, policy, key, text("idempotency_key", idempotency_key), whole("cost", cost), once=True)


def decision(verb: str, function: str, policy: str, key: str, *rest: str | int, once: bool = False) -> Call[Decision]:
    return Call(verb, DECISION, function, (*bucket(policy, key), *rest), answers.decision, once)


def length(name: str, value: Any, *, zero: bool = False) -> float:
    """Seconds of a duration. 0 is an error unless it has a meaning, and the caller's documentation says which."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise invalid(f"{name} is a {type(value).__name__}, not a number of seconds or a timedelta")
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        raise invalid(f"{name} is no number of seconds") from None
    if not (seconds > 0 or zero and seconds == 0):
        raise invalid(f"{name} is {seconds:g} seconds; it must be {'0 or ' if zero else ''}more{'' if zero else ' than 0'}")
    return seconds


def interval(name: str, value: Any, *, zero: bool = False) -> str:
    """Infinity is the longest that the server takes."""
    seconds = length(name, value, zero=zero)
    return f"{round(min(seconds, 1e10 if seconds < math.inf else LONGEST) * 1_000_000)} microseconds"


def reserve(policy: str, key: str, max_wait: Duration, cost: int, idempotency_key: str | None) -> Call[Reservation]:
    function = "ratelimit_reserve($1::text, $2::text, $3::text::interval, $4::bigint, $5::text)"
    longest = interval("max_wait", max_wait, zero=True)
    return keyed("reserve", RESERVATION, function, answers.reservation, policy, key, longest, whole("cost", cost), idempotency_key)


def acquire_all(charges: Sequence[Charge], idempotency_key: str | None) -> Call[JointDecision]:
    def decode(row: Sequence[Any]) -> JointDecision:
        binding, parts, *columns = row
        decisions, of_all = _decisions("acquire all", parts, charges), answers.decision(columns)
        return answers.joint(decisions, int(binding) - 1, of_all.allowed, of_all.replayed, of_all.shadowed)

    function = "ratelimit_acquire_all($1::text::text[], $2::text::text[], $3::text::bigint[], $4::text)"
    args = *arrays(charges), name_or_none(idempotency_key)
    return Call("acquire all", JOINT, function, args, decode, idempotency_key is not None)


def settle_all(settlements: Sequence[Charge], idempotency_key: str) -> Call[JointSettlement]:
    def decode(row: Sequence[Any]) -> JointSettlement:
        replayed, parts = row
        return JointSettlement(answers.flag(replayed), _decisions("settle all", parts, settlements))

    function = "ratelimit_settle_all($1::text::text[], $2::text::text[], $3::text, $4::text::bigint[])"
    policies, keys, costs = arrays(settlements)
    return Call("settle all", SETTLEMENT, function, (policies, keys, text("idempotency_key", idempotency_key), costs), decode, True)


def _decisions(verb: str, parts: str, charges: Sequence[Charge]) -> list[Decision]:
    decisions = [answers.decision(part) for part in json.loads(parts)]
    if len(decisions) != len(charges):
        raise Error(f"pgratelimit: {verb}: {len(decisions)} decisions about {len(charges)} charges")
    return decisions


_DECISIONS = "elements, remaining, retry_after_us, reset_after_us, capacity, replayed, shadowed"
_ERRORS = "refused, error_codes, error_messages, error_details, error_hints"
_WHOLES = "requests, requests_allowed, requests_replayed, requests_shadowed, bindings"
_PACKED = f"pg_catalog.json_build_array({_DECISIONS}, {_ERRORS}, {_WHOLES})::text"


def acquire_packed(requests: Sequence[Request]) -> Call[list[Decision | Error]]:
    """A call for requests of one kind. Its answers are in their order. Elements and requests are numbered from 1: an element is all of a
    plain request, or one charge of a joint one."""
    first = requests[0]
    sizes = numbers([len(r.charges) for r in requests]) if first.is_joint else None
    keyed = first.idempotency_key is not None
    keys = texts([r.idempotency_key or "" for r in requests]) if keyed else None
    return Call(
        "acquire all" if first.is_joint else "acquire",
        _PACKED,
        "ratelimit_acquire_packed($1::text::text[], $2::text::text[], $3::text::bigint[], $4::text::integer[], $5::text::text[])",
        (*arrays(c for r in requests for c in r.charges), sizes, keys),
        lambda row: _packed_answers(requests, *map(json.loads, row)),
        keyed,
    )


def _packed_answers(requests: Sequence[Request], packed: list[list[Any] | None]) -> list[Decision | Error]:
    columns = [array or [] for array in packed]  # one that is null is empty
    answered: dict[int, Decision | Error] = {}
    decisions: dict[int, Decision] = {}
    elements, remaining, retry_after, reset_after, capacity, replayed, shadowed = columns[:7]
    none = [False] * len(elements)
    for number, left, wait, reset, size, again, watched in zip(
        elements, remaining, retry_after, reset_after, capacity, replayed or none, shadowed or none, strict=True
    ):
        decisions[number] = Decision(wait == 0, left, answers.seconds(wait), answers.seconds(reset), size, again, watched)
    verb = "acquire all" if requests[0].is_joint else "acquire"
    for number, *error in zip(*columns[7:12], strict=True):
        answered[number] = of_server(verb, *error)
    if requests[0].is_joint:
        _wholes(requests, columns[12:], decisions, answered)
    else:
        answered |= decisions
    return [answered[number + 1] for number in range(len(requests))]


def _wholes(requests: Sequence[Request], columns: list[list[Any]], decisions: dict[int, Decision], answered: dict[int, Decision | Error]) -> None:
    """Adds the joint decisions."""
    places, allowed, replayed, shadowed, bindings = columns
    none = [False] * len(places)
    ends, end = [0], 0
    for r in requests:
        end += len(r.charges)
        ends.append(end)
    for number, granted, again, watched, binding in zip(places, allowed, replayed or none, shadowed or none, bindings, strict=True):
        own = [decisions[element + 1] for element in range(ends[number - 1], ends[number])]
        answered[number] = answers.joint(own, binding - 1, granted, again, watched)


def hold(policy: str, key: str, holder: str, cost: int) -> Call[HoldAnswer]:
    """The server takes a call by the same holder for the same, so it can be sent again."""
    function = "ratelimit_hold($1::text, $2::text, $3::text, $4::bigint)"
    return Call("hold", HOLD, function, (*bucket(policy, key), holder, whole("cost", cost)), answers.hold, True)


def renew(policy: str, key: str, holder: str, decode: Callable[[Any], T]) -> Call[T]:
    """What decode makes of the lease, which is microseconds or None."""
    function = "ratelimit_renew($1::text, $2::text, $3::text)"
    args = *bucket(policy, key), text("holder", holder)
    return Call("renew", microseconds("ratelimit_renew"), function, args, lambda row: decode(_only(row)), True)


def release(policy: str, key: str, holder: str) -> Call[bool]:
    function = "ratelimit_release($1::text, $2::text, $3::text)"
    args = *bucket(policy, key), text("holder", holder)
    return Call("release", "ratelimit_release", function, args, lambda row: answers.flag(_only(row)), True)


def keyed(
    verb: str, columns: str, function: str, decode: Callable[[Sequence[Any]], T], policy: str, key: str, *rest: str | int | None
) -> Call[T]:
    """A call whose last argument is an idempotency key, or None."""
    *others, idempotency_key = rest
    args = *bucket(policy, key), *others, name_or_none(idempotency_key)
    return Call(verb, columns, function, args, decode, idempotency_key is not None)


def _only(row: Sequence[Any]) -> Any:
    """The value of a row of one column."""
    (value,) = row
    return value


def invalid(reason: str) -> InvalidArgument:
    return InvalidArgument(f"pgratelimit: invalid argument: {reason}")


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(f"{name} is of type {type(value).__name__}, not a str; pass a text of 1 to 512 bytes")
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
        raise invalid(f"{name} is of type {type(value).__name__}, not an int; pass a whole number of tokens") from None
    if not -(1 << 63) <= n < 1 << 63:
        raise invalid(f"{name} is more than a bigint holds")
    return n


def read_charge(charge: Any) -> Charge:
    """The charge that a caller has passed as any tuple, checked."""
    if not isinstance(charge, (tuple, list)) or not 2 <= len(charge) <= 3:  # a dict or a str would be taken apart, too
        raise invalid(f"a charge is not a tuple (policy, key) or (policy, key, cost), but a {type(charge).__name__}")
    c = Charge(*charge)
    return Charge(*bucket(c.policy, c.key), whole("cost", c.cost))


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
