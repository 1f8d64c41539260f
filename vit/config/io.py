"""Read a strict YAML file and `key=value` overrides, and return a checked `Config`.

The parser records the line number of every key. Overrides replace values in the file, and Pydantic
checks the result. Values in the file that have no effect because of an override are dropped with a
note. One `ConfigError` reports all problems, each as `file:line: key: value, allowed values, the
nearest key` (`vit.config.errors`). The command line overrides the file, and the file overrides the
defaults. A file cannot inherit from another file.
"""

import difflib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from vit.config.checks import EXCLUSIVE
from vit.config.errors import Key, explain, void_settings
from vit.config.hints import all_keys, nearest
from vit.config.schema import Config, RunConfig
from vit.system.redact import shown, shown_values
from vit.system.urls import not_set, unset_variables

RESOLVED: tuple[Key, ...] = (
    ("data", "root"),
    ("stream", "urls"),
    ("data", "sources"),
    ("eval", "sets"),
    ("run", "dir"),
)
"""The settings in which `${NAME}` refers to an environment variable. The variable's value is never
recorded."""
_ALTERNATIVE: dict[Key, Key] = {
    **{(section, first): (section, second) for section, first, second in EXCLUSIVE},
    **{(section, second): (section, first) for section, first, second in EXCLUSIVE},
}


class ConfigError(ValueError):
    """All problems of a configuration, one line each."""


class LoadedConfig(NamedTuple):
    """A checked config, and the origin of each key that was set.

    `origins`: dotted key -> "file:line" or "command line (...)".
    """

    config: Config
    origins: dict[str, str]


_KEPT_TYPES = ("null", "merge", "value")
_JSON_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")


class _StrictLoader(yaml.SafeLoader):
    """A YAML 1.1 loader in which `1e-3` is a number, and `on`, `off`, `yes` and `no` are text."""


_PREFIX = "tag:yaml.org,2002:"
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag[len(_PREFIX) :] in _KEPT_TYPES]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.yaml_constructors = {  # only the types that JSON has: no !!binary, !!set, !!timestamp
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag[len(_PREFIX) :] in _JSON_TYPES
}
for _type, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        "-+0123456789.",
    ),
):
    _StrictLoader.add_implicit_resolver(
        _PREFIX + _type, re.compile(rf"^(?:{_pattern})$"), list(_first)
    )


def load_config(
    path: str | Path, overrides: Iterable[str] = (), *, used_here: bool = True
) -> Config:
    """Read and check a config file, or a shipped recipe given by its name.

    Args:
        path: A YAML file, or the name of a recipe such as `vit_b16`.
        overrides: Settings that replace those in the file, such as `"train.steps=100"`.
        used_here: Pass False for a config that is only displayed, whose addresses may contain unset
            environment variables.

    Raises:
        ConfigError: The config has problems. The error lists all of them, one line each.
    """
    return load_with_origins(path, overrides, used_here=used_here).config


def load_with_origins(
    path: str | Path, overrides: Iterable[str] = (), *, used_here: bool = True
) -> LoadedConfig:
    """Read a config like `load_config`, and also return the origin of each value.

    For each pair in `EXCLUSIVE`, such as `train.steps` and `train.epochs`, an override of one
    setting removes the other setting from the file's settings. Settings in the file that have no
    effect because of an override, such as `optim.nesterov` beside `optim.name=adamw`, are dropped,
    and rank 0 prints a note. Without `run.dir`, the run folder is `runs/<name of the file>`; for
    the recipe `deit3/vit_b16_800ep` it is `runs/deit3_vit_b16_800ep`.
    """
    path = _find_config(Path(path))
    tree, line_of = _parse(_read(path), str(path))
    origins: dict[Key, str] = {key: f"{path}:{line}" for key, line in line_of.items()}
    overrides = list(overrides)
    problems = _apply(overrides, tree, origins)

    chosen = {tuple(override.partition("=")[0].split(".")) for override in overrides}
    try:
        config = _resolve(tree, chosen, origins, str(path))
    except ConfigError as error:
        problems.append(str(error))

    if used_here:
        problems += _unset_variables(tree, origins, path)
    if problems:
        raise ConfigError("\n".join(problems))

    if config.run.dir is None:
        name = recipe_name(path) or path.stem
        config = config.model_copy(update={"run": RunConfig(dir=f"runs/{name.replace('/', '_')}")})
        origins["run", "dir"] = "name of the config file"

    return LoadedConfig(
        config,
        {
            ".".join(key): origin
            for key, origin in origins.items()
            if not isinstance(_get(tree, key), dict)
        },
    )


def _unset_variables(tree: dict[str, Any], origins: Mapping[Key, str], path: Path) -> Iterator[str]:
    """Yield a message for each setting that refers to environment variables that are not set."""
    for setting in RESOLVED:
        unset: dict[str, None] = {}
        for address in _addresses(_get(tree, setting)):
            unset |= dict.fromkeys(unset_variables(address))
        if unset:
            yield f"{origins.get(setting, path)}: {'.'.join(setting)}: {not_set(unset)}"


def _resolve(
    tree: dict[str, Any], chosen: set[Key], origins: dict[Key, str], source: str
) -> Config:
    """Return the config of `tree`. Raises ConfigError, which lists all problems.

    Settings that have no effect because of a setting in `chosen` (from the command line) are
    removed from `tree` with a note. The removed settings then also count as chosen, because other
    settings may need them.
    """
    try:
        return Config.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        overridden = [
            (key, cause)
            for key, cause in void_settings(error)
            if cause in chosen and key not in chosen
        ]
        void = {key: cause for key, cause in overridden if _get(tree, key) is not None}
        if not void:
            raise ConfigError("\n".join(explain(error, origins, source))) from None

    notes = []
    for key, cause in void.items():
        tree[key[0]].pop(key[1])
        origin = origins.get(key, source)
        origins[key] = f"default, {origin} was dropped"
        reason = f"{'.'.join(cause)}={shown(_scalar(_get(tree, cause)))}"
        notes.append(f"note: {'.'.join(key)} of {origin} has no effect with {reason}: dropped")

    config = _resolve(tree, {*chosen, *void}, origins, source)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(notes), file=sys.stderr)
    return config


def recipes_folder() -> Path:
    """Return the recipes folder: next to `vit` in a checkout, inside `vit` in a package."""
    installed = Path(__file__).parents[1] / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def recipe_name(path: Path) -> str | None:
    """Return the name of a recipe, such as `deit3/vit_b16_800ep`; None for other files."""
    path = path.resolve()
    folder = recipes_folder().resolve()
    if not path.is_relative_to(folder):
        return None
    return path.relative_to(folder).with_suffix("").as_posix()


def _find_config(path: Path) -> Path:
    """Return `path`, or the recipe with that name: `vit_b16`,
    `configs/deit3/vit_b16_800ep.yaml`."""
    may_be_recipe = path.suffix in ("", ".yaml") and not path.is_absolute()
    if path.exists() or not may_be_recipe:
        return path
    recipe = recipes_folder() / path.with_suffix(".yaml").as_posix().removeprefix("configs/")
    return recipe if recipe.is_file() else path


def _read(path: Path) -> str:
    """Return the text of a config file. Raises ConfigError, which suggests names that exist."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        if path.suffix and path.parent.is_dir():
            problem = f"cannot read the config file ({error.strerror})"
            names = sorted(str(file) for file in path.parent.glob("*.yaml"))
            owner = "files in that folder"
        else:
            problem = "neither a file nor a recipe has this name"
            names = sorted(str(recipe_name(file)) for file in recipes_folder().rglob("*.yaml"))
            owner = f"recipes in {recipes_folder()}"

        close = difflib.get_close_matches(str(path.with_suffix("")), names, n=3, cutoff=0)
        hint = f"; nearest of the {len(names)} {owner}: {', '.join(close)}" if names else ""
        raise ConfigError(f"{path}: {problem}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file: expected YAML in UTF-8") from None


def _parse(text: str, source: str) -> tuple[dict[str, Any], dict[Key, int]]:
    """Parse one YAML document. Return nested dictionaries and the line number of each key.

    Raises ConfigError, which names `source`.
    """
    try:
        return _build(_StrictLoader(text), source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{place}: not valid YAML: {problem}") from None


def _build(loader: _StrictLoader, source: str) -> tuple[dict[str, Any], dict[Key, int]]:
    """Return the result of `_parse` for the document of `loader`.

    Raises ConfigError if the document is not a mapping or gives keys twice, and YAMLError if it is
    not valid YAML.
    """
    root = loader.get_single_node()
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode):
        content = repr(root.value) if isinstance(root, yaml.ScalarNode) else "a list"
        raise ConfigError(
            f"{source}:1: expected sections such as 'data:' with keys below them, found {content}"
        )

    lines: dict[Key, int] = {}
    problems: list[str] = []

    def build(node: yaml.Node, path: Key) -> Any:
        """Return the value of a node, and add its keys to `lines` and `problems`."""
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node, deep=True)

        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in result:
                problems.append(
                    f"{source}:{line}: {'.'.join((*path, key))} is given twice (first in line"
                    f" {lines[(*path, key)]}): keep one"
                )
            lines[(*path, key)] = line
            result[key] = build(value_node, (*path, key))
        return result

    tree: dict[str, Any] = build(root, ())
    if problems:
        raise ConfigError("\n".join(problems))
    return tree, lines


def _apply(overrides: list[str], tree: dict[str, Any], origins: dict[Key, str]) -> list[str]:
    """Apply `key=value` overrides to `tree` and `origins`. Return a message for each invalid
    override."""
    problems = []
    overridden = {override.partition("=")[0] for override in overrides}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or "." not in dotted:
            problems.append(
                f"command line: {override!r} is not of the form section.key=value"
                f"{nearest(dotted, all_keys())}"
            )
            continue

        origin = f"command line ({shown(override)})"
        try:
            value = _StrictLoader(text).get_single_data()
        except yaml.YAMLError:
            problems.append(f"{origin}: {text!r} is not a YAML value; quote it if it is text")
            continue

        key = tuple(dotted.split("."))
        # YAML parses a command with an HTTP header as a mapping.
        is_command = isinstance(value, dict) and key in RESOLVED and not text.startswith("{")
        _set(tree, key, text if is_command else value)
        origins[key] = origin

        other = None if value is None else _ALTERNATIVE.get(key)
        if other and ".".join(other) not in overridden:
            tree[key[0]].pop(other[1], None)
            origins.pop(other, None)
    return problems


def _set(tree: dict[str, Any], path: Key, value: object) -> None:
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[path[-1]] = value


def _flatten(tree: Mapping[str, Any], path: Key = ()) -> Iterator[tuple[Key, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*path, key))
        else:
            yield (*path, key), value


def _addresses(value: object) -> Iterator[str]:
    """Yield each address in `value`: the value itself, or the `root` of each source or set."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key == "root" or isinstance(inner, dict):
                yield from _addresses(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _addresses(inner)


def _get(tree: Any, path: Key) -> object:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def to_dict(config: Config) -> dict[str, Any]:
    """Return `config` as nested plain values to record, with logins removed from URLs and
    commands."""
    return shown_values(config.model_dump(mode="json"))


def from_dict(values: Mapping[str, Any], source: str) -> Config:
    """Return the config for values from `to_dict`. Raises ConfigError, which names `source`."""
    return _resolve(dict(values), set(), {}, source)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return `config` with changed values. settings: dotted key -> value."""
    values = config.model_dump(mode="json")
    for key, value in settings.items():
        _set(values, tuple(key.split(".")), value)
    origins = {tuple(key.split(".")): "command line" for key in settings}
    return _resolve(values, set(origins), origins, "the run")


def read_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Parse `key=value` arguments into settings for `with_settings`. Raises ConfigError."""
    tree: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    if problems := _apply(list(overrides), tree, origins):
        raise ConfigError("\n".join(problems))
    return {".".join(key): _get(tree, key) for key in origins}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two results of `to_dict`: dotted key -> (old,
    new)."""
    before, after = dict(_flatten(old)), dict(_flatten(new))
    return {
        ".".join(key): (before.get(key), after.get(key))
        for key in before | after
        if before.get(key) != after.get(key)
    }


def dump_yaml(
    values: Mapping[str, Any],
    comments: Mapping[str, str] | None = None,
    sentences: Mapping[str, str] | None = None,
) -> str:
    """Return nested values as YAML text that `load_config` reads back.

    `comments` (dotted key -> text) are appended to lines, and `sentences` are written above lines.
    """
    lines = []
    for section, group in values.items():
        lines.append(f"{section}:")
        for key, value in group.items():
            lines += textwrap.wrap(
                (sentences or {}).get(f"{section}.{key}", ""),
                96,
                initial_indent="  # ",
                subsequent_indent="  # ",
                break_on_hyphens=False,
            )

            line = f"  {key}: {_scalar(value)}"
            # YAML would parse a second line as content, so a comment must stay on one line.
            comment = " ".join((comments or {}).get(f"{section}.{key}", "").split())
            lines.append(f"{line:<44}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    """Return `value` as JSON, or as unquoted text if YAML reads the text back unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./-]*", value):
        return value if yaml.load(value, _StrictLoader) == value else json.dumps(value)
    return json.dumps(value)
