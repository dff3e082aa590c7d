"""One call of ratelimit_acquire_packed, for several requests. Elements and requests are numbered from 1: an element is all of a plain
request, or one charge of a joint one."""

import json
from collections.abc import Sequence
from typing import Any

from . import calls, errors
from .answers import Decision, JointDecision, joint, seconds
from .calls import Call
from .queue import Request

_DECISIONS = "elements, remaining, retry_after_us, reset_after_us, capacity, replayed, shadowed"
_ERRORS = "refused, error_codes, error_messages, error_details, error_hints"
_WHOLES = "requests, requests_allowed, requests_replayed, requests_shadowed, bindings"
COLUMNS = f"pg_catalog.json_build_array({_DECISIONS}, {_ERRORS}, {_WHOLES})::text"
FUNCTION = "ratelimit_acquire_packed($1::text::text[], $2::text::text[], $3::text::bigint[], $4::text::integer[], $5::text::text[])"

Answer = Decision | JointDecision | errors.Error


def call(requests: Sequence[Request]) -> Call[list[Answer]]:
    """A call for requests of one kind. Its answers are in their order."""
    first = requests[0]
    sizes = calls.numbers([len(r.charges) for r in requests]) if first.is_joint else None
    keyed = first.idempotency_key is not None
    keys = calls.texts([r.idempotency_key or "" for r in requests]) if keyed else None
    return Call(
        "acquire all" if first.is_joint else "acquire",
        COLUMNS,
        FUNCTION,
        (*calls.arrays(c for r in requests for c in r.charges), sizes, keys),
        lambda row: _answers(requests, *map(json.loads, row)),
        keyed,
    )


def _answers(requests: Sequence[Request], arrays: list[list[Any] | None]) -> list[Answer]:
    columns = [array or [] for array in arrays]  # one that is null is empty
    answers: dict[int, Answer] = {}
    decisions: dict[int, Decision] = {}
    elements, remaining, retry_after, reset_after, capacity, replayed, shadowed = columns[:7]
    none = [False] * len(elements)
    for number, left, wait, reset, size, again, watched in zip(
        elements, remaining, retry_after, reset_after, capacity, replayed or none, shadowed or none, strict=True
    ):
        decisions[number] = Decision(wait == 0, left, seconds(wait), seconds(reset), size, again, watched)
    verb = "acquire all" if requests[0].is_joint else "acquire"
    for number, *texts in zip(*columns[7:12], strict=True):
        answers[number] = errors.of_server(verb, *texts)
    if requests[0].is_joint:
        _wholes(requests, columns[12:], decisions, answers)
    else:
        answers |= decisions
    return [answers[number + 1] for number in range(len(requests))]


def _wholes(requests: Sequence[Request], columns: list[list[Any]], decisions: dict[int, Decision], answers: dict[int, Answer]) -> None:
    """Adds the joint decisions."""
    numbers, allowed, replayed, shadowed, bindings = columns
    none = [False] * len(numbers)
    ends, end = [0], 0
    for r in requests:
        end += len(r.charges)
        ends.append(end)
    for number, granted, again, watched, binding in zip(numbers, allowed, replayed or none, shadowed or none, bindings, strict=True):
        own = [decisions[element + 1] for element in range(ends[number - 1], ends[number])]
        answers[number] = joint(own, binding - 1, granted, again, watched)
