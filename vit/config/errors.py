"""Format each Pydantic error about a config as one line: key, value and allowed values."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from vit.config.base import Section, SourceConfig
from vit.config.checks import Contradictions
from vit.config.hints import all_keys, nearest, sections, union_tags
from vit.config.schema import EvalSetConfig, ImageSizeStage

Key = tuple[str, ...]
LISTS: dict[str, type[Section]] = {
    "data.sources": SourceConfig,
    "schedule.image_sizes": ImageSizeStage,
}
"""The settings whose value is a list of sections."""
_EXPECTED = {
    "too_long": "at most {max_length} values",
    "string_pattern_mismatch": "a name of letters, digits, _ and -",
    "model_type": "a mapping of keys",
}
"""Maps each Pydantic error type to the allowed values in words."""
_REQUIRED_HINTS = {"data": ": set data.root", "train": ": set train.epochs or train.steps"}


def explain(error: ValidationError, origins: Mapping[Key, str], source: str) -> list[str]:
    """Return one line per error.

    Args:
        origins: Maps a key to the line or argument that sets it.
        source: The config file.
    """
    lines: list[str] = []
    wrong_values = set[str]()
    for item in error.errors(include_url=False):
        kind = item["type"]
        path, rest = _split(item["loc"], origins)
        if kind == "union_tag_invalid":
            path = (path[0], "name")
        origin = _origin(path, origins, source)

        if kind == "value_error":  # raised by vit.config.checks
            for line in str(item["ctx"]["error"]).splitlines():
                lines.append(f"{_origin_of_keys(line, origins) or origin}: {line}")
        elif kind == "extra_forbidden":
            lines.append(f"{origin}: {_unknown_key(path, rest, item['loc'])}")
        elif kind == "missing" and not rest:
            dotted = ".".join(path)
            lines.append(f"{source}: {dotted} is required{_REQUIRED_HINTS.get(dotted, '')}")
        elif kind == "missing" and ".".join(path) in LISTS:
            lines.append(f"{origin}: {_place(path, rest, '')} is required")
        else:
            place = _place(path, rest, kind)
            value = item["ctx"]["tag"] if kind == "union_tag_invalid" else item["input"]
            if place in wrong_values:  # Pydantic reports a value once for each type in a union.
                lines[-1] += f" or {_expected(item)}"
            else:
                wrong_values.add(place)
                lines.append(
                    f"{origin}: {place} is {json.dumps(value, default=str)}, expected"
                    f" {_expected(item)}"
                )

    return lines


def void_settings(error: ValidationError) -> Iterator[tuple[Key, Key]]:
    """Yield pairs of a setting that has no effect and a setting that may be the cause."""
    for item in error.errors(include_url=False):
        contradictions = item.get("ctx", {}).get("error")
        if isinstance(contradictions, Contradictions):
            for problem in contradictions.problems:
                for key, cause in itertools.product(problem.void, problem.because):
                    yield tuple(key.split(".")), tuple(cause.split("."))
        elif item["type"] == "extra_forbidden":
            path, _ = _split(item["loc"], {})
            if ".".join(path) in all_keys():  # a key of another optimizer
                yield path, ("optim", "name")


def _split(
    location: tuple[int | str, ...], origins: Mapping[Key, str]
) -> tuple[Key, tuple[int | str, ...]]:
    """Split the location of a Pydantic error into a setting's key and the position in its value."""
    if location[1:2] and location[1] in union_tags(str(location[0])):
        location = (location[0], *location[2:])  # Pydantic inserts the tag of the union member.

    names = tuple(map(str, location))
    keys = all_keys()
    for length in range(len(names), 0, -1):
        path = names[:length]
        if ".".join(path) in keys or path in origins:
            return path, location[length:]
    return names, ()


def _origin(path: Key, origins: Mapping[Key, str], source: str) -> str:
    """Return the origin of `path`, or of the first key below it; else `source`."""
    if path in origins:
        return origins[path]
    below = (origin for key, origin in origins.items() if path and key[: len(path)] == path)
    return next(below, source)


def _origin_of_keys(line: str, origins: Mapping[Key, str]) -> str:
    """Return the origin of the first dotted key in `line` that is set; "" if none is set."""
    keys = (tuple(key.split(".")) for key in re.findall(r"\w+\.\w+", line))
    return next(filter(None, (_origin(key, origins, "") for key in keys)), "")


def _unknown_key(path: Key, rest: tuple[int | str, ...], location: tuple[int | str, ...]) -> str:
    """Return a message about a key that its section does not have: a key of a list or of an
    evaluation set, a key of another optimizer, or a misspelled key.
    """
    dotted = ".".join(path)
    if len(rest) > 1 and dotted in LISTS:
        allowed_keys = ", ".join(LISTS[dotted].model_fields)
        return f"{dotted}[{rest[0]}]: unknown key {str(rest[-1])!r}; known keys: {allowed_keys}"

    if path[:2] == ("eval", "sets"):
        allowed_keys = ", ".join(EvalSetConfig.model_fields)
        name = ".".join(map(str, (*path, *rest)))
        return f"unknown key {name!r}; the keys of an evaluation set are {allowed_keys}"

    keys = all_keys()
    if dotted in keys:
        names = [
            " or ".join(get_args(kind.model_fields["name"].annotation))
            for kind in sections()["optim"]
            if path[1] in kind.model_fields
        ]
        return (
            f"{dotted} has no effect with optim.name={location[1]}: remove {dotted}, or set"
            f" optim.name={' or '.join(names)}"
        )

    if len(path) > 1:
        allowed = [key.partition(".")[2] for key in keys if key.partition(".")[0] == path[0]]
        hint = nearest(dotted, keys)
    else:
        allowed = list(sections())
        hint = nearest(dotted, [*allowed, *keys])
    return f"unknown key {dotted!r}{hint or '; known keys: ' + ', '.join(allowed)}"


def _place(path: Key, rest: tuple[int | str, ...], kind: str) -> str:
    """Return the key, with the index of the wrong element if the value is a list."""
    dotted = ".".join(path)
    if kind == "missing" or not rest:
        return dotted
    if dotted in LISTS:
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest[:2]]
        return dotted + "".join(parts)
    # All other parts of `rest` name members of a union of types.
    return f"{dotted}[{rest[-1]}]" if isinstance(rest[-1], int) else dotted


def _expected(item: Mapping[str, Any]) -> str:
    """Describe in words what a Pydantic error expected in place of the wrong value."""
    context = item.get("ctx", {})
    if item["type"] == "missing":
        return f"at least {len(item['input']) + 1} values"
    if item["type"] == "union_tag_invalid":
        return str(context["expected_tags"]).replace(", ", " or ")
    if item["type"] in _EXPECTED:
        return _EXPECTED[item["type"]].format(**context)
    return re.sub(r"^(Input should be )?(a )?(valid )?", "", item["msg"])
