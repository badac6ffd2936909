"""Checked reading of JSON: each helper returns the value in its wanted type or names the bad field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ..errors import BundleError

__all__ = ["array", "choice", "integer", "mapping", "number", "only_keys", "required", "text", "wrong"]


_LARGEST = 2**63 - 1
"""What an int64, and any file or tensor, can count."""


def wrong(where: str, found: object, wanted: str) -> BundleError:
    """Return the error, one printable line, of a field that holds something else than what is wanted."""
    shown = json.dumps(found, ensure_ascii=False) if isinstance(found, str) else repr(found)
    line = f"{where}: found {shown[:80]}, wanted {wanted}"
    # Names come from the file too; lone surrogates could not be printed.
    return BundleError(line.encode("utf-8", "backslashreplace").decode())


def required(owner: Mapping[str, Any], key: str, where: str) -> Any:
    """Return ``owner[key]`` or raise BundleError that says which field is missing."""
    if key not in owner:
        raise BundleError(f"{where}.{key}: missing")
    return owner[key]


def only_keys(owner: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse keys that format 1 does not have: a typing mistake must not be read as an absent option."""
    for key in owner:
        if key not in known:
            raise wrong(where, key, f"only the keys {', '.join(known)}")


def mapping(value: object, where: str) -> dict[str, Any]:
    """Return a JSON object as a dict."""
    if not isinstance(value, dict):
        raise wrong(where, value, "an object")
    return value


def array(value: object, where: str) -> list[Any]:
    """Return a JSON array as a list."""
    if not isinstance(value, list | tuple):
        raise wrong(where, value, "an array")
    return list(value)


def text(value: object, where: str, *, empty: bool = False) -> str:
    """Return a string of valid Unicode, not empty unless ``empty``."""
    if not isinstance(value, str) or not (value or empty):
        raise wrong(where, value, "a string" if empty else "a non-empty string")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise wrong(where, value, "valid Unicode (no lone surrogate)")
    return value


def choice(value: object, options: tuple[str, ...], where: str) -> str:
    """Return a string that is one of ``options``."""
    if not isinstance(value, str) or value not in options:
        raise wrong(where, value, f"one of {', '.join(options)}")
    return value


def integer(value: object, where: str, *, minimum: int = 0) -> int:
    """Return an int of at least ``minimum`` that an int64 holds (a bool is no int)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise wrong(where, value, f"an integer of at least {minimum}")
    if value > _LARGEST:
        raise wrong(where, value, f"an integer of at most {_LARGEST}")
    return value


def number(value: object, where: str, minimum: float = -math.inf, maximum: float = math.inf) -> float:
    """Return a finite int or float between two bounds as float (a bool is no number)."""
    bounds = [f"of at least {minimum:g}"] * (minimum > -math.inf) + [f"of at most {maximum:g}"] * (maximum < math.inf)
    wanted = " ".join(["a finite number", " and ".join(bounds)]).strip()
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(where, value, wanted)
    try:
        found = float(value)
    except OverflowError:  # an integer beyond 1e308
        raise wrong(where, value, wanted) from None
    if not math.isfinite(found) or not minimum <= found <= maximum:
        raise wrong(where, value, wanted)
    return found
