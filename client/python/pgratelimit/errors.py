"""Errors to branch on. Any other error of the driver is passed on as it came."""

import functools
import json
import re
from decimal import Decimal
from typing import Any, Literal, Self

from .answers import Reservation, seconds


class Error(Exception):
    """An error of pgratelimit, with the server's SQLSTATE, DETAIL and HINT where it comes from there."""

    def __init__(self, message: str, sqlstate: str | None = None, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.sqlstate, self.detail, self.hint = message, sqlstate, detail, hint

    def __str__(self) -> str:
        more = filter(None, (self.detail, self.hint))
        return functools.reduce(lambda text, sentence: f"{text.removesuffix('.')}. {sentence}", more, self.message)


class UnknownPolicy(Error):
    """No policy of that name is defined (RL001)."""


class IdempotencyMismatch(Error):
    """The idempotency key was used before with another cost, or the holder holds with another cost (RL002). Nothing was taken."""


class NoGrant(Error):
    """No grant is remembered under the idempotency key, or it is not committed yet (RL003). Nothing was charged."""


class Settled(Error):
    """The grant under the idempotency key was settled, so the operation is over (RL004). Nothing was taken."""


class InvalidArgument(Error, ValueError):
    """An argument is outside its range, is no value of its type, or is text that the database cannot hold. One that cannot be sent,
    such as text with a zero byte, is found without the server, and has no SQLSTATE."""


class Locked(Error):
    """Another transaction has held the bucket for longer than lock_timeout (55P03). Nothing was taken."""


class LeaseLost(Error):
    """The slots are not held: the lease was not renewed in time, the slots were reset or released, or their policy dropped."""


class Overloaded(Error):
    """A Combiner has max_waiting requests already. This one was not sent."""


class Closed(Error):
    """The Combiner was closed. Nothing was sent."""


class NotReady(Error):
    """The database lacks what a limiter needs."""

    def __init__(self, lacks: list[str]) -> None:
        super().__init__("pgratelimit: the database lacks what this limiter needs", None, "\n".join(lacks))
        self.lacks = lacks
        """One line each, most of them statements that help."""


class TooLate(Error):
    """The tokens would come after the timeout, or never. Nothing was taken."""

    def __init__(self, reservation: Reservation, cost: int = 0, policy: str = "") -> None:
        size = reservation.capacity
        never = f"a request of {cost} tokens is never allowed: the capacity of the policy \"{policy}\" is {size}"
        super().__init__(f"pgratelimit: {never if 0 < size < cost else 'the tokens would come too late'}")
        self.reservation = reservation
        """Its wait is how long the wait would have been."""


class Denied(Error):
    """The refusal of a guard inside the database: ratelimit_enforce, or a trigger of ratelimit_guard (RL429). The statement has
    failed with it, and its tokens are given back."""

    def __init__(self, told: dict[str, Any], *texts: str | None) -> None:
        super().__init__("pgratelimit: rate limit exceeded", "RL429", *texts)
        self.policy: str = told["policy"]
        self.cost: int = told["cost"]
        self.remaining: int = told["remaining"]
        self.capacity: int = told["capacity"]
        wait = told["retry_after"]
        self.retry_after: float | None = None if wait is None else seconds(int(wait * 1_000_000))
        """Seconds, the same promise as in a Decision; None if no wait helps."""

    @classmethod
    def of(cls, error: BaseException) -> Self | None:
        """The numbers of a guard's refusal, or None if the error is another. The error may come from any statement of the driver."""
        if _sqlstate(error) != "RL429":
            return None
        _, detail, hint = _texts(error)
        try:
            return cls(json.loads(detail or "", parse_float=Decimal), detail, hint)
        except (ValueError, KeyError, TypeError):  # raised by other code
            return None


KINDS: dict[str, type[Error]] = {
    "RL001": UnknownPolicy,
    "RL002": IdempotencyMismatch,
    "RL003": NoGrant,
    "RL004": Settled,
    "22023": InvalidArgument,  # invalid_parameter_value
    "22007": InvalidArgument,  # invalid_datetime_format
    "22008": InvalidArgument,  # datetime_field_overflow
    "22P02": InvalidArgument,  # invalid_text_representation
    "22021": InvalidArgument,  # character_not_in_repertoire
    "22P05": InvalidArgument,  # untranslatable_character
    "55P03": Locked,  # lock_not_available
}


def of_server(verb: str, sqlstate: str, message: str | None, detail: str | None, hint: str | None) -> Error:
    """The error of a request, by its SQLSTATE."""
    if sqlstate == "55P03":
        hint = hint or "Another transaction has held the bucket or policy for longer than lock_timeout. Nothing was taken: try again later."
    elif sqlstate in ("22021", "22P05"):
        hint = "This database cannot hold text with these bytes: pass a hash."
    return KINDS.get(sqlstate, Error)(f"pgratelimit: {verb}: {message}", sqlstate, detail, hint)


def of_driver(verb: str, function: str, error: Exception) -> Exception:
    """The error to raise for one of the driver, which may be the same with a note."""
    sqlstate = _sqlstate(error)
    if sqlstate in KINDS:
        return of_server(verb, sqlstate, *_texts(error))
    if sqlstate == "42501" and function.partition("(")[0] in str(error):  # and not of a schema, or of code of the program's own
        signature = re.sub(r"[$][0-9]+::(?:[^ ,)]+::)?|\(.*=>.*\)", "", function)
        error.add_note(f"Its owner can run: grant execute on function {signature} to <role>;")
    elif note := remedy(sqlstate):
        error.add_note(note)
    return error


_INSTALL = "Install pgratelimit in this database, put its schema on search_path, or name it with schema=."
_REMEDIES = {
    "42501": "The role needs usage of the schema, and execute: grant execute on function ratelimit_acquire, ratelimit_acquire_all to <role>;",
    "42883": _INSTALL,
    "42P01": _INSTALL,
    "42703": _INSTALL,
    "3F000": _INSTALL,
    "28": "Check the user and the password of the connection, and pg_hba.conf.",
    "3D": "Check the name of the database in the connection.",
    "08P01": "Behind PgBouncer a connection takes no options: alter role <role> set lock_timeout = '500ms';",
}


def remedy(sqlstate: str | None) -> str | None:
    """What helps against an error of the installation or of the connection's settings."""
    return sqlstate and (_REMEDIES.get(sqlstate) or _REMEDIES.get(sqlstate[:2]))


_SETUP = ("42501", "42883", "42P01", "42703", "3F000")
_AWAY = ("08", "25006", "0A000", "28", "3D", "40001", "40P01", "53", "55P03", "57", "58", "XX")
_DRIVERS = ("psycopg", "psycopg_binary", "psycopg_c", "psycopg_pool", "psycopg2", "asyncpg")
_OF_PROGRAMS = (TypeError, AttributeError, NameError, LookupError, ValueError, AssertionError, ArithmeticError, ImportError, RecursionError)


def kind(error: BaseException) -> Literal["fault", "setup", "away"]:
    """Whose an error is: the request's or the program's, the installation's, or that of a database that is away."""
    sqlstate = state(error)
    if sqlstate is None:
        return "fault" if _is_of_program(error) else "away"
    if sqlstate in _SETUP:
        return "setup"
    return "away" if sqlstate.startswith(_AWAY) else "fault"


def state(error: BaseException) -> str | None:
    """The SQLSTATE of an error, of the one that it was raised from, or of the first of its group."""
    seen: list[BaseException] = []
    cause: Any = error
    while isinstance(cause, BaseException) and cause not in seen:
        seen.append(cause)
        if isinstance(sqlstate := _sqlstate(cause), str):
            return sqlstate
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
            continue
        hidden = cause.__suppress_context__ or _is_of_program(cause)  # a mistake in the handling of an error is a mistake
        cause = getattr(cause, "orig", None) or cause.__cause__ or (None if hidden else cause.__context__)
    return None


def _is_of_program(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return _is_of_program(error.exceptions[0])
    if isinstance(error, Error):
        return not isinstance(error, (Overloaded, Closed))
    if isinstance(error, UnicodeError):  # text that a driver cannot encode came with the request
        return True
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _DRIVERS:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_by = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return isinstance(error, _OF_PROGRAMS) and raised_by.partition(".")[0] not in _DRIVERS


def _of_driver(error: BaseException) -> BaseException:
    """The driver's error, which Django wraps."""
    return error.__cause__ if error.__cause__ is not None and type(error).__module__ == "django.db.utils" else error


def _sqlstate(error: BaseException) -> Any:
    error = _of_driver(error)
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # of psycopg2


def _texts(error: BaseException) -> tuple[str | None, str | None, str | None]:
    """Message, DETAIL and HINT, where psycopg and asyncpg keep them."""
    error = _of_driver(error)
    if (diag := getattr(error, "diag", None)) is not None:
        return diag.message_primary, diag.message_detail, diag.message_hint
    return getattr(error, "message", None), getattr(error, "detail", None), getattr(error, "hint", None)


def is_transient(error: Exception) -> bool:
    """Whether nothing happened, and a repeat may succeed: a serialization failure, a deadlock, an upgrade replaced the function, or a
    shard of Citus moved."""
    sqlstate = _sqlstate(error)
    return sqlstate in ("40001", "40P01") or sqlstate == "XX000" and str(error).startswith(
        ("cache lookup failed for function", "the shard has moved"))


def is_lost(error: Exception) -> bool:
    """Whether the connection broke, so that the call may have happened or not."""
    sqlstate = _sqlstate(error)
    if sqlstate is None:  # by name: the subclasses that psycopg's pool raises mean that nothing was sent
        return isinstance(error, ConnectionError) or type(error).__name__ in ("OperationalError", "InterfaceError", "InternalClientError")
    return sqlstate.startswith("08") or sqlstate in ("57P01", "57P02", "57P03")


def is_text(error: Exception) -> bool:
    """Whether the cause is text that this database cannot hold."""
    return _sqlstate(error) in ("22021", "22P05")
