"""Options as JSON, as plain values and in words. Runs anywhere."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.formatting import shortened
from gpupool.core.wire.masking import passwords, without_passwords

MAX_CHARS = 80  # of a value among others


def to_json(options: Any) -> str:
    """The fields of frozen options as a JSON object, in order.

    Raises:
        OptionsError: one is a function or an object, which JSON cannot hold, or a URL with a
            password in it, which the JSON must not.
    """
    for name, value in _values(options).items():
        for part in value if isinstance(value, tuple) else (value,):
            # JSON of options is kept in files and shown in notebooks; a password there is lost.
            if passwords(str(part)):
                raise OptionsError(
                    f"{name}: {without_passwords(str(part))} has a password in it, which would "
                    "stay in the JSON: give keys by the environment (`%gpupool env --aws`), or "
                    f"write the options without it (dataclasses.replace(options, {name}=...)).",
                    "password",
                    name,
                )
            if not _is_plain(part):
                raise OptionsError(
                    f"{name}: {_name_of(part)} is code, which JSON cannot hold: write the options "
                    f"without it (dataclasses.replace(options, {name}=...)), and give it again "
                    "when they are read.",
                    "code",
                    name,
                )
    # JSON has no NaN: Python would write one that other readers refuse.
    return json.dumps(_values(options), indent=2, allow_nan=False, default=list)


def from_json(text: str, profile: type) -> dict[str, Any]:
    """The values by name that `to_json` wrote.

    Raises:
        OptionsError: it is no JSON object, or its profile has other fields.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise OptionsError(f"these are no options: not JSON ({error}).", "not JSON") from None
    if not isinstance(values, dict):
        raise OptionsError(
            "these are no options: the JSON is no object of names and values.", "no object"
        )
    if isinstance(values.get("profile"), dict):
        try:
            values["profile"] = profile(**values["profile"])
        except TypeError as error:
            raise OptionsError(
                f"these are no options: profile: {error}.", "form", "profile"
            ) from None
    return values


def describe(options: Any) -> dict[str, Any]:
    """The fields as plain values that JSON can hold; functions and objects by their names.

    Passwords in URLs are not among them.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [plain(part) for part in value]
        if isinstance(value, Mapping):
            return {name: plain(part) for name, part in value.items()}
        if isinstance(value, array):
            return _in_short(value)
        if isinstance(value, str):
            return without_passwords(value)
        return value if _is_plain(value) else _name_of(value)

    return {name: plain(value) for name, value in _values(options).items()}


def changed(options: Any, usual: Any) -> dict[str, str]:
    """The fields that differ from those of `usual`, each as it would be written.

    Functions and objects stand by their names, long values are cut, and passwords are left out.
    """
    now, before = describe(options), describe(usual)
    return {name: written(options, name) for name in now if now[name] != before[name]}


def written(options: Any, name: str) -> str:
    """The value of an option as it would be written, in short."""
    return shortened(_written(getattr(options, name)), MAX_CHARS)


def _written(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        comma = "," if len(value) == 1 else ""  # without it ('f1') would be text
        return f"({', '.join(map(_written, value))}{comma})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_written(part)}' for name, part in value.items())}}}"
    if isinstance(value, array):
        return _in_short(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = ", ".join(f"{n}={_written(part)}" for n, part in asdict(value).items())
        return f"{type(value).__name__}({parts})"
    # Not the repr of an object, which may be long, or hold what nobody should read.
    return without_passwords(repr(value)) if _is_plain(value) else _name_of(value)


def in_words(options: Any) -> str:
    """What `repr` shows of options: all but the passwords in URLs."""

    def shown(value: Any) -> str:
        return _in_short(value) if isinstance(value, array) else repr(value)

    values = (f"{one.name}={shown(getattr(options, one.name))}" for one in fields(options))
    return without_passwords(f"{type(options).__name__}({', '.join(values)})")


def _in_short(values: array[float]) -> str:
    """An array has a number for each sample: too many to be shown."""
    return f"<{len(values):,} numbers>"


def _values(options: Any) -> dict[str, Any]:
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {
        # `is_dataclass` is also true of the class itself, a callback say, which `asdict` refuses.
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in values.items()
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, array):  # of numbers, one for each sample
        return True
    return value is None or isinstance(value, (str, int, float, bool))


def _name_of(value: Any) -> str:
    name: str = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name.rpartition("<locals>.")[2]  # not the function that has made it
