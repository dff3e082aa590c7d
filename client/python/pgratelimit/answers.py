"""Decisions and the like. Times are seconds from the moment the server decided, and None is never."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Charge(NamedTuple):
    """The part of a request that one bucket is charged: see Limiter.acquire_all. Any tuple of these fields will do."""

    policy: str
    key: str
    cost: int = 1


@dataclass(slots=True)
class Decision:
    """The answer to one request for tokens. It is true if the request is allowed."""

    allowed: bool
    """Whether the tokens were taken; from peek, whether they would be."""

    remaining: int
    """Whole tokens in the bucket after the call, rounded down. Below zero they are debt."""

    retry_after: float | None
    """Seconds until the same request is allowed if no other caller takes tokens. 0 when allowed, None if no wait helps."""

    reset_after: float | None
    """Seconds until the bucket is full if no caller takes tokens. None if it gains nothing by itself."""

    capacity: int
    """Tokens in a full bucket."""

    replayed: bool
    """This is the first answer under the same idempotency key, and nothing was taken this time."""

    shadowed: bool
    """The policy only watches, and would have denied: the request is allowed, and nothing was taken."""

    def __bool__(self) -> bool:
        return self.allowed


@dataclass(slots=True)
class JointDecision(Decision):
    """The answer to a request of several charges. allowed and retry_after are of the whole, remaining, reset_after and capacity of
    the binding charge."""

    binding: int
    """The index of the charge that decides: of a denial the one with the longest wait, of a grant the one whose bucket covers it
    the fewest times more."""

    decisions: list[Decision]
    """For each charge the decision of its bucket: allowed and retry_after as if it were asked alone."""


@dataclass(slots=True)
class JointSettlement:
    """The answer to settle_all."""

    replayed: bool
    """Nothing was settled this time: a bucket was settled before, at the same cost."""

    decisions: list[Decision]
    """For each settlement its bucket, after the whole."""


@dataclass(slots=True)
class PartialDecision(Decision):
    """The answer to acquire_up_to."""

    taken: int
    """How many tokens were taken: 0 for a denial."""


@dataclass(slots=True)
class Reservation:
    """The answer to reserve. It is true if the tokens were taken."""

    allowed: bool
    """Whether the tokens were taken."""

    remaining: int
    """As in a Decision. Below zero, it counts the tokens that callers, this one included, are waiting for."""

    wait: float | None
    """Seconds to wait before acting. After a refusal, the seconds that it would have been, or None if no wait helps."""

    reset_after: float | None
    capacity: int
    replayed: bool
    shadowed: bool
    """As in a Decision."""

    def __bool__(self) -> bool:
        return self.allowed


def seconds(microseconds: Any) -> float | None:
    """The number of seconds that is not shorter: a float may lie below the quotient."""
    if microseconds is None:
        return None
    n = int(microseconds)
    s = n / 1_000_000
    numerator, denominator = s.as_integer_ratio()
    return s if numerator * 1_000_000 >= n * denominator else math.nextafter(s, math.inf)


def microseconds(column: str) -> str:
    """Selects an interval as a bigint. The factor is numeric, as extract is: for an integer, an operator that an attacker planted on
    search_path would be the closer match."""
    return f"(extract(epoch from {column}) * 1000000.0)::bigint"


def flag(value: Any) -> bool:
    """A boolean. A handle that returns text has "f" for false, which is true in Python."""
    if not isinstance(value, bool):
        raise TypeError(f"not a boolean: {type(value)}")
    return value


def _columns(of: str = "", wait: str = "retry_after") -> str:
    times = f"{microseconds(of + wait)}, {microseconds(f'{of}reset_after')}"
    return f"{of}allowed, {of}remaining, {times}, {of}capacity, {of}replayed, {of}shadowed"


def _fields(row: Sequence[Any]) -> tuple[Any, ...]:
    allowed, remaining, wait, reset_after, capacity, replayed, shadowed = row
    return flag(allowed), int(remaining), seconds(wait), seconds(reset_after), int(capacity), flag(replayed), flag(shadowed)


class HoldAnswer(NamedTuple):
    """The answer to hold, as the server counts."""

    allowed: bool
    remaining: int
    retry_after: float | None
    held_for: int  # microseconds
    capacity: int
    renewed: bool
    shadowed: bool


DECISION = _columns()
RESERVATION = _columns(wait="wait")
HOLD = f"allowed, remaining, {microseconds('retry_after')}, {microseconds('held_for')}, capacity, renewed, shadowed"
PARTIAL = f"taken, {DECISION}"
DECISIONS = (
    f"(select pg_catalog.json_agg(pg_catalog.json_build_array({_columns('d.')}) order by d.ordinality) "
    "from pg_catalog.unnest(decisions) with ordinality as d)::text"
)
JOINT = f"binding, {DECISIONS}, {DECISION}"
SETTLEMENT = f"replayed, {DECISIONS}"


def decision(row: Sequence[Any]) -> Decision:
    return Decision(*_fields(row))


def hold(row: Sequence[Any]) -> HoldAnswer:
    allowed, remaining, wait, held_for, capacity, renewed, shadowed = row
    return HoldAnswer(flag(allowed), int(remaining), seconds(wait), int(held_for), int(capacity), flag(renewed), flag(shadowed))


def reservation(row: Sequence[Any]) -> Reservation:
    return Reservation(*_fields(row))


def partial(row: Sequence[Any]) -> PartialDecision:
    taken, *columns = row
    return PartialDecision(*_fields(columns), int(taken))


def joint(decisions: list[Decision], binding: int, allowed: bool, replayed: bool, shadowed: bool) -> JointDecision:
    of = decisions[binding]  # of a denial the one with the longest wait
    return JointDecision(
        allowed, of.remaining, of.retry_after, of.reset_after, of.capacity, replayed, shadowed, binding=binding, decisions=decisions
    )
