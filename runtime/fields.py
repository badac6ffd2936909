"""Checked reading of JSON: each helper returns the value in its wanted type or names the bad field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import BundleError

__all__ = ["array", "choice", "integer", "mapping", "number", "only_keys", "required", "text"]


def _wrong(where: str, found: object, wanted: str) -> BundleError:
    shown = repr(found) if not isinstance(found, str) else f'"{found}"'
    return BundleError(f"{where}: found {shown[:80]}, wanted {wanted}")


def required(owner: Mapping[str, Any], key: str, where: str) -> Any:
    """Return ``owner[key]`` or raise BundleError that says which field is missing."""
    if key not in owner:
        raise BundleError(f"{where}.{key}: missing")
    return owner[key]


def only_keys(owner: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse keys that format 1 does not have: a typing mistake must not be read as an absent option."""
    for key in owner:
        if key not in known:
            raise _wrong(where, key, f"only the keys {', '.join(known)}")


def mapping(value: object, where: str) -> dict[str, Any]:
    """Return a JSON object as a dict."""
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    return value


def array(value: object, where: str) -> list[Any]:
    """Return a JSON array as a list."""
    if not isinstance(value, list | tuple):
        raise _wrong(where, value, "an array")
    return list(value)


def text(value: object, where: str, *, empty: bool = False) -> str:
    """Return a string, not empty unless ``empty``."""
    if not isinstance(value, str) or not (value or empty):
        raise _wrong(where, value, "a string" if empty else "a non-empty string")
    return value


def choice(value: object, options: tuple[str, ...], where: str) -> str:
    """Return a string that is one of ``options``."""
    if not isinstance(value, str) or value not in options:
        raise _wrong(where, value, f"one of {', '.join(options)}")
    return value


def integer(value: object, where: str, *, minimum: int = 0) -> int:
    """Return an int of at least ``minimum`` (a bool is no int)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise _wrong(where, value, f"an integer of at least {minimum}")
    return value


def number(value: object, where: str) -> float:
    """Return an int or float as float (a bool is no number)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(where, value, "a number")
    return float(value)
