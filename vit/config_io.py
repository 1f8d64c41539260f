"""One strict YAML file and `key=value` overrides in, a checked `Config` out.

The data's story: the file is parsed with the line of every key; overrides are laid on top; pydantic
checks the result; whatever is wrong is turned back into `file:line: key: what was given, what is
allowed, the nearest key`, all problems at once, in one `ConfigError`. Defaults < file < command
line. There is no inheritance between files.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError

from vit.config import Config, RunConfig
from vit.sections import SourceConfig
from vit.system.urls import not_set, shown, shown_values, unset_variables

Key = tuple[str, ...]


RESOLVED: tuple[Key, ...] = (("data", "root"), ("data", "stream"), ("data", "sources"))
"""Settings in which `${NAME}` stands for a variable of the environment, whose value is used and not
recorded."""


class ConfigError(ValueError):
    """What is wrong with a configuration; one line for each problem."""


class _StrictLoader(yaml.SafeLoader):
    """YAML 1.1 without its traps: duplicate keys are errors, `1e-3` is a number,
    `on`/`off`/`yes`/`no` stay words."""


_StrictLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag
        not in (
            "tag:yaml.org,2002:bool",
            "tag:yaml.org,2002:float",
            "tag:yaml.org,2002:int",
            "tag:yaml.org,2002:timestamp",
        )
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.yaml_constructors = {  # what JSON can say: no !!binary, !!set, !!timestamp
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None
    or tag.rsplit(":", 1)[-1] in ("null", "bool", "int", "float", "str", "seq", "map")
}
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf")
)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    ),
    list("-+0123456789."),
)


def _parse(text: str, source: str) -> tuple[dict[str, Any], dict[Key, int]]:
    """Parse one YAML document into nested dicts and the line number of each key path."""
    lines: dict[Key, int] = {}
    problems: list[str] = []

    def build(node: yaml.Node, path: Key) -> Any:
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

    try:
        loader = _StrictLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}, lines
        if not isinstance(root, yaml.MappingNode):
            found = repr(root.value) if isinstance(root, yaml.ScalarNode) else "a list"
            raise ConfigError(
                f"{source}:1: expected sections such as 'data:' with keys below them, found {found}"
            )
        tree = build(root, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{source}:{line}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{source}:{line}: not valid YAML: control character {error.character:#04x}"
        ) from None
    if problems:
        raise ConfigError("\n".join(problems))
    return tree, lines


def _sections() -> dict[str, list[type[BaseModel]]]:
    """The classes behind each section of `Config`: one, or the members of a union."""
    sections: dict[str, list[type[BaseModel]]] = {}
    for name, field in Config.model_fields.items():
        members = [get_args(member)[0] for member in get_args(field.annotation)]
        sections[name] = members or [field.annotation]
    return sections


def all_keys() -> list[str]:
    """Every dotted key a file or an override may set, in the order of `vit.config`."""
    keys = (
        f"{section}.{key}"
        for section, classes in _sections().items()
        for cls in classes
        for key in cls.model_fields
    )
    return list(dict.fromkeys(keys))


WORDS = {
    "data.root": "data dataset data_dir data_path data_root dataset_dir",
    "data.global_batch_size": "batch_size bs global_batch total_batch_size train_batch_size",
    "data.micro_batch_size": "per_device_batch_size per_device_train_batch_size",
    "data.num_workers": "j n_workers workers",
    "data.aug_repeats": "repeated_aug repeats",
    "model.name": "arch architecture model model_name",
    "model.image_size": "img_size input_size res resolution",
    "model.num_classes": "classes n_classes nb_classes",
    "model.embed_dim": "dim hidden_dim hidden_size width",
    "model.depth": "layers n_layers num_layers",
    "model.num_heads": "heads n_heads",
    "model.drop_path_rate": "drop_path stochastic_depth",
    "model.proj_drop_rate": "drop drop_rate dropout",
    "model.init_values": "init_scale layer_scale layerscale",
    "augment.mixup_alpha": "mixup",
    "augment.cutmix_alpha": "cutmix",
    "augment.hflip_prob": "flip hflip",
    "augment.crop_scale": "scale",
    "augment.crop_ratio": "ratio",
    "augment.erasing_prob": "random_erase random_erasing reprob",
    "augment.randaugment_layers": "aa auto_augment randaug randaugment",
    "loss.label_smoothing": "smoothing",
    "optim.name": "opt optimizer",
    "optim.lr": "learning_rate max_lr peak_lr",
    "optim.weight_decay": "decay wd",
    "optim.betas": "opt_betas",
    "optim.eps": "epsilon opt_eps",
    "optim.clip_grad_norm": (
        "clip_grad clip_norm grad_clip gradient_clip_val max_grad_norm max_norm"
    ),
    "schedule.name": "lr_schedule lr_scheduler sched scheduler",
    "schedule.warmup_epochs": "warmup",
    "train.epochs": "epoch max_epochs n_epochs num_epochs num_train_epochs",
    "train.steps": "iterations iters max_iters max_steps num_steps total_steps",
    "train.seed": "manual_seed random_seed",
    "train.precision": "amp bf16 dtype fp16 half mixed_precision torch_dtype",
    "train.compile": "torchcompile torch_compile",
    "train.ema_decay": "ema model_ema model_ema_decay",
    "eval.every_epochs": "eval_freq eval_interval val_every val_interval",
    "checkpoint.every_steps": "ckpt_every save_every save_freq save_interval save_steps",
    "init.checkpoint": "ckpt finetune from_checkpoint init_from pretrained weights",
    "run.dir": "experiment log_dir out out_dir output output_dir save_dir work_dir",
    "log.every_steps": "log_every log_freq log_interval logging_steps print_freq",
    "log.wandb": "use_wandb",
}
"""What other programs (timm, DeiT, torchvision's references, Hugging Face's Trainer) call a
setting."""
ADVICE = dict.fromkeys(
    ("auto_resume", "resume"), "the same command again resumes, nothing else is needed"
)
ADVICE |= dict.fromkeys(
    ("devices", "gpus", "n_gpus", "num_gpus", "nproc_per_node"),
    "torchrun --nproc_per_node=N starts N ranks",
)
ADVICE |= dict.fromkeys(
    (
        "accum_iter",
        "accum_steps",
        "grad_accum",
        "grad_accum_steps",
        "gradient_accumulation_steps",
        "update_freq",
    ),
    "accumulation follows from data.micro_batch_size, the images in one forward pass of a rank",
)
"""What is no setting here, and what people want who look for it."""
OTHER_VALUES = (
    "data.aug_repeats",
    "augment.randaugment_layers",
    "optim.name",
    "schedule.name",
    "schedule.warmup_epochs",
    "train.precision",
    "train.compile",
    "train.ema_decay",
    "eval.every_epochs",
    "log.wandb",
)
"""Settings whose values other programs write in another way or unit."""
_MEANT_BY = {word: key for key, words in WORDS.items() for word in words.split()}


def meant_by(word: str) -> str:
    """The setting that other programs call `word` ("batch-size", "lr"), or ""."""
    return _MEANT_BY.get(word.lower().replace("-", "_"), "")


def nearest(given: str, known: Sequence[str]) -> str:
    """A hint with the settings that `given` may mean, or an empty string. Dotted keys are compared
    by their last part: what other programs call so comes first, then the same word in another
    section, then words like it, those of the same section first.
    """
    section, _, leaf = given.rpartition(".")
    if advice := ADVICE.get(leaf.lower().replace("-", "_")):
        return f"; {advice}"
    own = [key for key in known if key.rpartition(".")[0] == section]
    # each section's name is of something else
    others = [key for key in known if not (section and key.endswith(".name"))]
    same = [key for key in others if key.rpartition(".")[2] == leaf]
    matches = list(dict.fromkeys(key for key in (meant_by(leaf), *same) if key in known))
    for cutoff, candidates in ((0.65, own), (0.85 if section else 0.65, others)):
        leaves = {key.rpartition(".")[2]: key for key in reversed(candidates)}
        matches = matches or [
            leaves[close] for close in difflib.get_close_matches(leaf, leaves, n=1, cutoff=cutoff)
        ]
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def setting_for(option: str, value: str) -> str:
    """What to write for an unknown option of a command and its value ("" for none), in words, or
    "": `--lr`, `1e-3` -> optim.lr=1e-3."""
    word = option.lstrip("-").replace("-", "_")
    if advice := ADVICE.get(word.lower()):
        return advice
    keys = all_keys()
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys) if not key.endswith(".name")}
    key = word if word in keys else meant_by(word.rpartition(".")[2]) or leaves.get(word, "")
    if not key and (
        close := difflib.get_close_matches(
            word, keys if "." in word else [*leaves, *_MEANT_BY], n=1, cutoff=0.85
        )
    ):
        key = close[0] if close[0] in keys else meant_by(close[0]) or leaves[close[0]]
    shown = "VALUE" if key in OTHER_VALUES and word != key else value or "VALUE"
    return f"did you mean {key}={shown}?" if key else ""


def _set(tree: dict[str, Any], path: Key, value: Any) -> None:
    for part in path[:-1]:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            child = tree[part] = {}
        tree = child
    tree[path[-1]] = value


def _flatten(tree: Mapping[str, Any], path: Key = ()) -> Iterator[tuple[Key, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*path, key))
        else:
            yield (*path, key), value


_OTHER_FORM = {
    "train.epochs": "train.steps",
    "schedule.warmup_epochs": "schedule.warmup_steps",
    "eval.every_epochs": "eval.every_steps",
}
_OTHER_FORM |= {second: first for first, second in _OTHER_FORM.items()}


def _explain(error: ValidationError, origins: Mapping[Key, str], source: str) -> list[str]:
    """Pydantic's findings as lines for people."""
    keys = all_keys()
    lines = []
    seen = set()
    for item in error.errors(include_url=False):
        kind = item["type"]
        given = item["input"]
        context = item.get("ctx", {})
        location = tuple(str(part) for part in item["loc"])
        if location[:1] == ("optim",) and len(location) > 1 and location[1] in ("adamw", "sgd"):
            location = ("optim", *location[2:])
        if kind == "union_tag_invalid":
            location = ("optim", "name")
            given = context["tag"]
        path = next(
            (
                location[:n]
                for n in range(len(location), 0, -1)
                if ".".join(location[:n]) in keys or location[:n] in origins
            ),
            location,
        )
        dotted = ".".join(path)
        where = origins.get(path) or next(
            (o for p, o in origins.items() if path and p[: len(path)] == path), source
        )
        if kind == "value_error":  # ours, in dotted keys
            for line in str(context["error"]).splitlines():
                named = (
                    origins.get(tuple(key.split("."))) for key in re.findall(r"\w+\.\w+", line)
                )
                lines.append(f"{next(filter(None, named), where)}: {line}")
            continue
        if kind == "extra_forbidden":
            if path != location and len(item["loc"]) > len(path):  # of an item of a list
                text = (
                    f"{dotted}[{location[len(path)]}]: unknown key {location[-1]!r}; there are:"
                    f" {', '.join(SourceConfig.model_fields)}"
                )
            elif dotted in keys:  # a key of the other optimizer
                text = (
                    f"{dotted} has no effect with this optim.name: remove it, or change optim.name"
                )
            else:
                hint = nearest(dotted, keys if len(path) > 1 else [*_sections(), *keys])
                allowed = (
                    [key.partition(".")[2] for key in keys if key.partition(".")[0] == path[0]]
                    if len(path) > 1
                    else _sections()
                )
                text = f"unknown key {dotted!r}{hint or '; there are: ' + ', '.join(allowed)}"
        elif kind == "missing" and path == location:
            hint = {
                "data": "; data.root, for one",
                "train": "; train.epochs or train.steps, for one",
            }.get(dotted, "")
            where = source
            text = f"{dotted} is required{hint}"
        else:
            if kind == "missing":
                message = f"at least {len(given) + 1} values"
            elif kind == "too_long":
                message = f"at most {context['max_length']} values"
            elif kind == "union_tag_invalid":
                message = context["expected_tags"].replace(", ", " or ")
            elif kind == "model_type":
                message = "keys below it"
            else:
                message = (
                    item["msg"]
                    .removeprefix("Input should be ")
                    .removeprefix("a ")
                    .removeprefix("valid ")
                )
            place = (
                f"{dotted}[{location[-1]}]"
                if isinstance(item["loc"][-1], int) and kind != "missing"
                else dotted
            )
            if dotted == "data.sources" and kind != "missing":
                place = dotted + "".join(
                    f"[{part}]" if isinstance(part, int) else f".{part}"
                    for part in item["loc"][len(path) :]
                )
            if place in seen:  # the other member of a union
                lines[-1] += f" or {message}"
                continue
            seen.add(place)
            text = f"{place} is {json.dumps(given, default=str)}, expected {message}"
        lines.append(f"{where}: {text}")
    return lines


class LoadedConfig(NamedTuple):
    """A checked `config` with `origins`: dotted key -> "file:line" or "command line" for every key
    that was given."""

    config: Config
    origins: dict[str, str]


def recipes_folder() -> Path:
    """The folder of our recipes: next to `vit` in a checkout, inside it where it is installed."""
    installed = Path(__file__).with_name("configs")
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs"


def _find_config(path: Path) -> Path:
    """`path`, or our recipe of that name: `configs/vit_b16.yaml`, `vit_b16`."""
    recipe = recipes_folder() / f"{path.stem}.yaml"
    is_ours = str(path.parent) in (".", "configs") and path.suffix in ("", ".yaml")
    return recipe if is_ours and not path.exists() and recipe.is_file() else path


def load_config(
    path: str | Path, overrides: Iterable[str] = (), *, used_here: bool = True
) -> LoadedConfig:
    """Read `path`, lay `overrides` (`"train.steps=100"`) over it and check the result.

    An override of `train.steps` removes the file's `train.epochs`, as of each pair of which only
    one may be given. used_here: the variables in its addresses must be set; else it is only to be
    looked at. Without `run.dir` the run lives in `runs/<name of the file>`. Raises `ConfigError`
    with all problems found, one line each.
    """
    path = _find_config(Path(path))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        folder = path.parent if path.suffix and path.parent.is_dir() else recipes_folder()
        there = sorted(str(p) for p in folder.glob("*.yaml"))
        hint = f"; there are: {', '.join(there)}" if there else ""
        raise ConfigError(f"{path}: cannot read the config file ({error.strerror}){hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file") from None
    overrides = list(overrides)
    tree, line_of = _parse(text, str(path))
    origins: dict[Key, str] = {key: f"{path}:{line}" for key, line in line_of.items()}
    problems: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or "." not in key:
            hint = nearest(key, all_keys())
            problems.append(
                f"command line: {override!r} is not of the form section.key=value{hint}"
            )
            continue
        where = f"command line ({shown(override)})"
        try:
            parsed = _StrictLoader(value).get_single_data()
        except yaml.YAMLError:
            problems.append(f"{where}: {value!r} is not a YAML value; quote it if it is text")
            continue
        if (
            isinstance(parsed, dict)
            and tuple(key.split(".")) in RESOLVED
            and not value.startswith("{")
        ):
            parsed = value  # a command with a header, which looks like `key: value`
        _set(tree, tuple(key.split(".")), parsed)
        origins[tuple(key.split("."))] = where
        other = _OTHER_FORM.get(key)
        if other and parsed is not None and other not in {o.partition("=")[0] for o in overrides}:
            section, _, leaf = other.partition(".")
            tree.get(section, {}).pop(leaf, None)
            origins.pop((section, leaf), None)
    try:
        config = Config.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        problems += _explain(error, origins, str(path))
    for setting in RESOLVED if used_here else ():
        if unset := [
            name for text in _addresses(_get(tree, setting)) for name in unset_variables(text)
        ]:
            problems.append(
                f"{origins.get(setting, path)}: {'.'.join(setting)}:"
                f" {not_set(dict.fromkeys(unset))}"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    if config.run.dir is None:
        config = config.model_copy(update={"run": RunConfig(dir=f"runs/{path.stem}")})
        origins["run", "dir"] = "name of the config file"
    return LoadedConfig(
        config,
        {
            ".".join(key): where
            for key, where in origins.items()
            if not isinstance(_get(tree, key), dict)
        },
    )


def _addresses(value: Any) -> Iterator[str]:
    """The addresses in `value`: itself, or the `root` of each source."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _addresses(value.get("root"))
    elif isinstance(value, list):
        for inner in value:
            yield from _addresses(inner)


def _get(tree: Any, path: Key) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def to_dict(config: Config) -> dict[str, Any]:
    """`config` as nested plain values, JSON- and YAML-safe, for records: without the logins of URLs
    and commands (`urls.shown`)."""
    return shown_values(config.model_dump(mode="json"))


def from_dict(values: Mapping[str, Any], source: str) -> Config:
    """The config of such values; raises `ConfigError` naming `source`."""
    try:
        return Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, {}, source))) from None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two `to_dict` results: key -> (old, new)."""
    before, after = dict(_flatten(old)), dict(_flatten(new))
    keys = dict.fromkeys([*before, *after])
    return {
        ".".join(key): (before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key)
    }


def dump_yaml(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Nested values as YAML text that `load_config` reads back; `comments` (dotted key -> text) go
    to the ends of lines."""
    lines = []
    for section, group in values.items():
        lines.append(f"{section}:")
        for key, value in group.items():
            comment = (
                f"  # {comments[f'{section}.{key}']}"
                if comments and f"{section}.{key}" in comments
                else ""
            )
            lines.append(f"{f'  {key}: {_scalar(value)}':<44}{comment}".rstrip())
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """JSON is YAML; words stay bare where the strict loader reads them back as the same word."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_./][\w./-]*", value)
        and yaml.load(value, _StrictLoader) == value
    ):
        return value
    return json.dumps(value)
