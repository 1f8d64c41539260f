"""Describe every setting: its type, default and meaning, and the recipes that set it.

classes of the sections -> `settings()` -> launch/explain.py, one setting in a terminal
                                        -> docs/reference.py, the page of all settings
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import yaml

from vit.config.base import MAY_CHANGE, OnlyWith, Section
from vit.config.hints import sections, union_tags
from vit.config.io import recipe_name, recipes_folder

BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "from",
    "maximum": "to",
    "exclusiveMaximum": "below",
}
"""Maps each limit in JSON Schema to its word in messages, in printed order."""


@dataclass(frozen=True)
class Setting:
    """The description of one setting."""

    key: str
    """The dotted key `section.name`, as in files and on command lines."""
    type: str
    """The allowed values, in words."""
    default: str
    """The default value in YAML, and the optimizers' defaults that differ from it."""
    sentence: str
    """The sentence that explains the setting."""
    may_change: bool
    """Whether a resumed run may change the value without `--allow-change`."""
    only_with: tuple[tuple[str, ...], ...]
    """Groups of conditions. The setting is rejected unless one condition in each group holds."""


@cache
def settings() -> dict[str, Setting]:
    """Return all settings by key, in schema order."""
    every: dict[str, Setting] = {}
    for section, classes in sections().items():
        for cls in classes:
            for described in _settings_of(section, cls):
                first = every.setdefault(described.key, described)
                # Optimizers share settings, but some have other defaults.
                if described.default != first.default.partition(" (")[0]:
                    optimizer = " or ".join(get_args(cls.model_fields["name"].annotation))
                    every[described.key] = replace(
                        first, default=f"{first.default} ({optimizer}: {described.default})"
                    )

    return every


def _settings_of(section: str, cls: type[Section]) -> Iterator[Setting]:
    """Yield the settings of a class of `section`."""
    schema = cls.model_json_schema()
    for name, field in cls.model_fields.items():
        content = (
            {"enum": union_tags(section), "default": union_tags(section)[0]}
            if name == "name" and union_tags(section)  # `optim.name`, which selects the class
            else schema["properties"][name]
        )

        conditions = [each.conditions for each in field.metadata if isinstance(each, OnlyWith)]
        yield Setting(
            f"{section}.{name}",
            type_in_words(content, schema.get("$defs", {})),
            default=as_yaml(content.get("default", "none, it must be given")),
            sentence=" ".join((field.description or "").split()),
            may_change=MAY_CHANGE in field.metadata,
            only_with=tuple(conditions),
        )


def as_yaml(value: object) -> str:
    """Return `value` in the notation of a config file."""
    return value if isinstance(value, str) else json.dumps(value)


def type_in_words(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe in words the values that a JSON Schema allows: `number above 0, or null`."""
    if "$ref" in schema:
        fields = definitions[schema["$ref"].rpartition("/")[2]]["properties"]
        return f"{{{', '.join(fields)}}}"
    for union in ("anyOf", "oneOf"):
        if union in schema:
            members = [type_in_words(member, definitions) for member in schema[union]]
            return ", or ".join(dict.fromkeys(members))

    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(as_yaml(value) for value in values)
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            items = [type_in_words(each, definitions) for each in schema["prefixItems"]]
            return f"[{', '.join(items)}]"
        return f"list of {type_in_words(schema['items'], definitions)}"

    if schema.get("type") == "object":
        values = schema.get("additionalProperties") or next(
            iter(schema["patternProperties"].values())
        )
        return f"mapping of names to {type_in_words(values, definitions)}"

    bounds = [f"{word} {schema[bound]:g}" for bound, word in BOUNDS.items() if bound in schema]
    return " ".join([schema.get("type", "value"), *bounds])


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """Return the settings that each shipped recipe sets: name -> key -> value."""
    given: dict[str, dict[str, Any]] = {}
    for path in sorted(recipes_folder().rglob("*.yaml")):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        given[str(recipe_name(path))] = {
            f"{section}.{name}": value
            for section, values in tree.items()
            for name, value in values.items()
        }
    return given
