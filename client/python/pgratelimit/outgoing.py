"""What the answer of an upstream, such as the API of a vendor, asks its clients to wait."""

import datetime
import re
import time
from collections.abc import Iterable
from typing import Protocol

_LONGEST = 365 * 86400.0  # seconds, as a pause of the database

_NUMBER = re.compile(r"[ \t]*([0-9]+(?:\.[0-9]+)?)[ \t]*")
_DAY_FIRST = re.compile(r"(?:Sun|Mon|Tue|Wed|Thu|Fri|Sat)[a-z]*, ([0-9]{2})([ -])([A-Z][a-z]{2})\2([0-9]{2}|[0-9]{4}) (\S+) GMT")
_ASCTIME = re.compile(r"(?:Sun|Mon|Tue|Wed|Thu|Fri|Sat) ([A-Z][a-z]{2}) ([ 0-9][0-9]) (\S+) ([0-9]{4})")
_ISO = re.compile(r"[0-9]{4}(?:-[0-9]{2}){2}T(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:[0-9]{2})")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*"?')


class Fields(Protocol):
    def items(self) -> Iterable[tuple[str, str]]: ...


def retry_after(status: int, headers: Fields) -> float:
    """How many seconds an answer asks its client to wait, or 0. Retry-After of a status of 400 or more wins if it can be read, then
    Retry-After-Ms or X-Ms-Retry-After-Ms, of such a status, too. Otherwise it is the longest wait of RateLimit, and of RateLimit-Reset,
    X-RateLimit-Reset and X-Rate-Limit-Reset, if nothing is left.

    A value is a number of decimal digits with or without a fraction, an HTTP date, or a date of RFC 3339. A number up to 365 days, behind
    X- up to a day, is seconds; a number within 365 days of now is Unix time in seconds or milliseconds. Now is the answer's Date, or the
    local clock if there is no Date within 365 days of the instant. Any other value, a list, or a field that is sent twice is no wait.
    """
    fields: dict[str, str] = {}
    for name, value in headers.items():
        name = name.lower()
        fields[name] = f"{fields[name]}, {value}" if name in fields else value

    # The first clock that is near an instant measures it.
    clocks = [now for now in (_date(fields.get("date", "")), time.time()) if now is not None]

    def wait(name: str, text: str) -> float | None:
        n = _number(text)
        if n is not None and n <= (86400 if name.startswith("x-") else _LONGEST):
            return n  # behind X- no standard says seconds: 600000 has been seen for milliseconds
        instants = [_date(text)] if n is None else [n, n / 1000]
        return next((max(0.0, at - now) for now in clocks for at in instants if at is not None and abs(at - now) <= _LONGEST), None)

    if status >= 400:
        if (asked := wait("retry-after", fields.get("retry-after", ""))) is not None:
            return asked
        for name in ("retry-after-ms", "x-ms-retry-after-ms"):
            if (ms := _number(fields.get(name, ""))) is not None and ms <= _LONGEST * 1000:
                return ms / 1000

    resets = [(f"{x}-", fields.get(f"{x}-remaining", ""), fields.get(f"{x}-reset", "")) for x in ("ratelimit", "x-ratelimit", "x-rate-limit")]
    listed = _QUOTED.sub("", fields.get("ratelimit", ""))
    for item in [listed.replace(",", ";")] if "remaining=" in listed else listed.split(","):  # the members of a dictionary are of one policy
        of = {name.strip(): value for name, _, value in (parameter.partition("=") for parameter in item.split(";"))}
        resets += [("ratelimit", of.get(left, ""), of.get(reset, "")) for left, reset in (("r", "t"), ("remaining", "reset"))]
    return max((wait(name, reset) or 0.0 for name, remaining, reset in resets if _number(remaining) == 0), default=0.0)


def _number(text: str) -> float | None:
    return float(match[1]) if (match := _NUMBER.fullmatch(text)) else None


def _date(text: str) -> float | None:
    """Unix time of the three forms of an HTTP date, and of RFC 3339 with or without seconds."""
    text = text.strip(" \t")
    if match := _DAY_FIRST.fullmatch(text):
        text = _iso(match[4], match[3], match[1], match[5])
    elif match := _ASCTIME.fullmatch(text):
        text = _iso(match[4], match[1], match[2], match[3])
    try:
        return datetime.datetime.fromisoformat(text).timestamp() if _ISO.fullmatch(text) else None
    except (ValueError, OverflowError):
        return None


def _iso(year: str, month: str, day: str, time_of_day: str) -> str:
    number = "JanFebMarAprMayJunJulAugSepOctNovDec".find(month) // 3 + 1
    return f"{year[-4:-2] or '20'}{year[-2:]}-{number:02}-{day.replace(' ', '0')}T{time_of_day}Z"
