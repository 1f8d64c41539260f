"""Test that every setting has an effect.

For each setting, the tests build one run with the default and one with the value in
`other_values.VALUES`. Both runs train for two steps and evaluate. The two results must differ in
more than the stored configs. The tables below list the settings that need a different test, and the
reasons.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from functools import cache, partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from config.other_values import SETTINGS, VALUES, beside, changed
from extras.deleted_extras import needs
from PIL import ExifTags, Image
from processes import make_shards
from torch import Tensor

import vit.build
import vit.compose
from data_prep import imagefolder
from vit.checkpoint.checkpoint import read_info
from vit.checkpoint.state import RunState
from vit.config.base import Section
from vit.config.errors import LISTS
from vit.config.io import from_dict
from vit.config.schema import Config, EvalSetConfig
from vit.data.storage.opening import open_split
from vit.distributed.process_group import World
from vit.hooks.guard import GuardHook
from vit.loggers.record import Record
from vit.run import Run
from vit.train import train
from vit.training.step_result import NON_FINITE, SPIKE, StepValues

ALONE = World(0, 1, torch.device("cpu"))
ONLY_WHERE_OR_HOW_FAST = {
    "loader.cache_dir": "where blocks of shards are kept",
    "loader.cache_gib": "how much of them",
    "loader.patience_s": "how long a store is waited for",
    "loader.num_workers": "which processes make the batches",
    "loader.stall_timeout_s": "how long a worker is waited for",
    "train.device": "where it is computed; a machine without GPUs has one choice",
    "train.attention": "which kernel computes attention (tests/start/test_attention.py)",
    "train.compile": "how fast; a compilation takes seconds (tests/test_compile.py)",
    "train.deterministic": "which kernels GPUs use; CPUs have no others (tests/extras/planner/gpu)",
    "eval.batch_size": "how many images are evaluated at once",
    "run.dir": "where the run is",
    "run.local_dir": "where a run at a URL is worked on",
    "run.lease_s": "how long another job waits for a run at a URL",
    "run.hang_timeout_s": "how long a rank that stands still is waited for",
    "log.wandb": "where the record is shown",
    "log.tensorboard": "where the record is shown",
    "log.report": "where the record is shown",
}
ON_SEVERAL_RANKS = {
    "train.reduce_dtype": "how ranks add gradients (tests/distributed/test_reduce_dtype.py)"
}
"""Maps each setting that has no effect on one rank to its effect on several ranks and its test."""
REFUSED = {"distill.teacher_model": "its run stores the model: set distill.teacher_model=null"}
"""Maps each setting that these runs reject to the expected error message."""
IN_THE_LOOP: dict[str, dict[str, Any]] = {
    "checkpoint.every_steps": {"train.steps": 4},
    "eval.best_by": {"train.steps": 4},
}
"""Maps each setting that only the training loop reads to the other settings of a short run that
shows its effect."""
SEVERAL = {
    "model.image_size": {"batches", "evaluators", "step"},
    "model.in_chans": {"batches", "evaluators", "step"},
    "data.micro_batch_size": {"plan", "step"},
    "data.mean": {"step", "evaluators"},
    "data.interpolation": {"batches", "evaluators"},
    "schedule.image_sizes": {"batches", "step"},
    "train.seed": {"batches", "step"},
    "train.precision": {"step", "evaluators"},
}
"""Maps settings that affect several components of a run to the components that must change."""
BASE: dict[str, Any] = {
    "data.root": "{shards}",
    "data.global_batch_size": 24,
    "loader.num_workers": 0,
    "model.name": "vit_ti8",
    "model.image_size": 16,
    "model.embed_dim": 32,
    "model.depth": 2,
    "model.num_heads": 2,
    "train.steps": 240,
    "train.precision": "fp32",
    "eval.batch_size": 23,
    "log.wandb": "off",
    "log.report": False,
    "run.dir": "{folder}/run",
}
"""The settings of all runs in this file, which have two steps per epoch."""
NUM_STEPS = 2


# --- digests of the parts of a run ----------------------------------------------------------------


def parts(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """Yield the content of `value` as bytes. Config sections are skipped, because merely storing a
    setting does not count as an effect."""
    if isinstance(value, Section | World | Record | Path):
        return
    if isinstance(value, Tensor):
        plain = value.detach()
        yield f"{plain.dtype} {tuple(plain.shape)} {value.requires_grad}".encode()
        yield plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode() + value.tobytes()
    elif value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | type):
        yield repr(value).encode()
    elif id(value) not in seen:
        # Store the object to prevent Python from reusing its id.
        seen[id(value)] = value
        yield type(value).__name__.encode()
        for part in content(value):
            yield from parts(part, seen)


def content(value: Any) -> list[Any]:
    if isinstance(value, dict):
        # Skip integer keys, because torch numbers hooks across the whole process.
        return [*(key for key in value if not isinstance(key, int)), *value.values()]
    if isinstance(value, list | tuple | range):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    # Return only the value, because the memory address differs between runs.
    if isinstance(value, Synchronized):
        return [value.value]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__qualname__, value.__defaults__, *cells]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    return list(getattr(value, "__dict__", {}).items())


def digest(*values: Any) -> str:
    hasher = hashlib.sha256()
    seen: dict[int, Any] = {}
    for value in values:
        for part in parts(value, seen):
            hasher.update(part)
    return hasher.hexdigest()


def judged(config: Config, record: Record) -> list[str]:
    nothing = np.zeros(0, np.float32)
    recent = [[step, 9.0 - 0.01 * step] for step in range(200)]
    state = RunState(step=202, recent=recent)
    guard = GuardHook(config)
    batches = SimpleNamespace(exact=False)
    run: Any = SimpleNamespace(
        config=config, state=state, world=ALONE, record=record, batches=batches
    )
    guard.begin(run)
    verdicts = [*[SPIKE] * (config.guard.on_spike != "none"), *[NON_FINITE] * 6]
    decisions = [f"{guard.loss_limit(202)}"]
    for step, verdict in enumerate(verdicts, 202):
        values = (math.nan if verdict == NON_FINITE else 99.0, 9.0, 0.0, 0, verdict)
        problem = guard.read(step, StepValues(*values, nothing[None], nothing, nothing, None))
        decisions.append(f"{type(problem).__name__} {problem}")
    return decisions


def of_hook(run: Run, kind: str, name: str) -> Any:
    """Return an attribute of the run's hook of class `kind`, or None if the run does not have such
    a hook."""
    hooks = [hook for hook in run.hooks if type(hook).__name__ == kind]
    return getattr(hooks[0], name) if hooks else None


def built(config: Config) -> dict[str, str]:
    """Build a run, train for two steps and evaluate. Return digests of its components and
    results."""
    with vit.compose.build_run(config, ALONE) as run:
        digests = {
            "plan": digest(run.plan, of_hook(run, "ReferenceCurve", "_comparison")),
            "batches": digest(run.batches),
            "evaluators": digest(run.evaluators),
            "step": digest(run.train_step),
            "saver": digest(
                of_hook(run, "SamplesHook", "saved"), vars(run.saver)["_kept"].model_dump()
            ),
            "guard": " ".join(judged(config, run.record)),
        }
        if config.stream.urls is None:
            images = []
            with vit.train._open_loader(run) as loader:
                for step in range(2 * run.plan.steps_per_epoch):
                    batch = next(loader)
                    images.append(digest(batch))
                    if step < NUM_STEPS:
                        run.train_step.model.train()
                        run.train_step(batch, step)
            weights = {name: each.state_dict() for name, each in run.models().items()}
            results = [each.evaluate(run.models()) for each in run.evaluators]
            digests |= {
                "images": " ".join(images),
                "weights": digest(weights),
                "results": digest(results),
            }
    return digests


def trained(config: Config) -> dict[str, str]:
    """Train, and return a description of the checkpoints."""
    with vit.compose.build_run(config, ALONE) as run:
        train(run)
    states = []
    for folder in sorted((run.folder / "checkpoints").glob("step_*")):
        state = read_info(folder)
        states.append([folder.name, state["best_set"]])
    shutil.rmtree(run.folder)
    return {"checkpoints": repr(states)}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because several threads slow down operations on small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[str, str]:
    """Return the paths that replace the {placeholders} in settings."""
    folder = tmp_path_factory.mktemp("every_setting")
    (folder / "exclude.txt").write_text("label=1\n")
    (folder / "relabel.txt").write_text(f"{open_split(shards, 'train[:50%]').key(0)},label=2\n")
    (folder / "real.json").write_text(json.dumps({f"class{n % 3}_{n:04d}": [0] for n in range(23)}))
    own = {"folder": str(folder), "shards": str(shards)}
    own["other"] = str(make_shards(tmp_path_factory.mktemp("other"), seed=1))
    for name, number in (("two", 2), ("four", 4)):
        own[name] = str(make_shards(tmp_path_factory.mktemp(name), num_classes=number))
    images = Path(own["two"]).parent / "images"
    for path in images.rglob("val/**/*.jpg"):
        picture = Image.open(path)
        picture.getexif()[ExifTags.Base.Orientation] = 6
        picture.save(path, exif=picture.getexif())
    own["turned"] = str(folder / "turned")
    arguments = [str(images), "--out", own["turned"], "--num-shards", "1", "--no-apply-exif"]
    assert imagefolder.main(arguments) == 0
    for name, root in (("trained", "{shards}"), ("of_four", "{four}")):
        settings = {"train.steps": 1, "train.seed": 7, "data.root": root}
        own[name] = str(folder / name)
        with vit.compose.build_run(
            config_of(BASE | settings | {"run.dir": own[name]}, own), ALONE
        ) as run:
            train(run)
    return own


def filled(value: Any, places: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [filled(item, places) for item in value]
    if isinstance(value, dict):
        return {key: filled(item, places) for key, item in value.items()}
    return value.format(**places) if isinstance(value, str) else value


def config_of(settings: dict[str, Any], places: dict[str, str]) -> Config:
    tree: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = filled(value, places)
    return from_dict(tree, "test")


@pytest.fixture(scope="module")
def digest_of(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory):
    @cache
    def made(settings: str, owner: Any) -> dict[str, str]:
        config = config_of(json.loads(settings), places)
        return owner(config)

    def digest_of_settings(settings: dict[str, Any], owner: Any) -> dict[str, str]:
        return made(json.dumps(settings, sort_keys=True), owner)

    return digest_of_settings


@pytest.fixture
def without_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable metrics.jsonl, because writing it would take two thirds of the test's time."""

    def record_of_other_ranks(config, world, folder, lock, data, *rest):
        folder.mkdir(parents=True, exist_ok=True)
        return Record(folder, config.log, False, total_steps=data.plan.total_steps)

    monkeypatch.setattr(vit.build, "start_record", record_of_other_ranks)


TWO = [{"split": "train[:50%]"}, {"split": "train[50%:]"}]


def sources(**settings: Any) -> list[dict[str, Any]]:
    return [TWO[0] | settings, TWO[1]]


WITHIN: dict[str, tuple[Any, Any]] = {
    "data.sources.root": (TWO, sources(root="{other}")),
    "data.sources.split": (TWO, sources(split="train[:30%]")),
    "data.sources.weight": (
        [each | {"weight": 1.0} for each in TWO],
        [TWO[0] | {"weight": 3.0}, TWO[1] | {"weight": 1.0}],
    ),
    "data.sources.exclude": (TWO, sources(exclude="{folder}/exclude.txt")),
    "data.sources.relabel": (TWO, sources(relabel="{folder}/relabel.txt")),
    "data.sources.fraction": (TWO, sources(fraction=0.7)),
    "data.sources.fraction_of": (
        sources(fraction=0.72, exclude="{folder}/exclude.txt"),
        sources(fraction=0.72, exclude="{folder}/exclude.txt", fraction_of="class"),
    ),
    "data.sources.samples_per_class": (TWO, sources(samples_per_class=9)),
    "data.sources.subset_seed": (sources(fraction=0.7), sources(fraction=0.7, subset_seed=1)),
    "eval.sets.root": ({"a": {"split": "train"}}, {"a": {"split": "train", "root": "{other}"}}),
    "eval.sets.split": ({}, {"a": {"split": "train"}}),
    "eval.sets.labels": ({}, {"a": {"labels": "{folder}/real.json"}}),
    "eval.sets.classes": (
        {"a": {"root": "{two}", "split": "train"}},
        {"a": {"root": "{two}", "split": "train", "classes": "all"}},
    ),
    "schedule.image_sizes.until_epoch": (
        [{"until_epoch": 1, "image_size": 8}],
        [{"until_epoch": 2, "image_size": 8}],
    ),
    "schedule.image_sizes.image_size": (
        [{"until_epoch": 1, "image_size": 8}],
        [{"until_epoch": 1, "image_size": 24}],
    ),
}
"""Maps a setting inside a list to two versions of the list, which differ only in this setting."""


def case(tested: Any, settings: dict[str, Any], name: str) -> Any:
    """Return a test case, which is skipped if `settings` need a deleted folder of vit/extras/."""
    extras = ["stream"] if settings.get("stream.urls") else []
    extras += ["recipes"] if settings.get("eval.reference") else []
    return pytest.param(tested, id=name, marks=needs(*extras))


TESTED = [s for s in SETTINGS if s.key not in {**ONLY_WHERE_OR_HOW_FAST, **ON_SEVERAL_RANKS}]


def test_every_setting_has_a_second_value_or_a_reason_to_be_skipped():
    keys = {setting.key for setting in SETTINGS}
    assert VALUES.keys() | ONLY_WHERE_OR_HOW_FAST.keys() == keys
    assert not VALUES.keys() & ONLY_WHERE_OR_HOW_FAST.keys()


@pytest.mark.parametrize("setting", [case(s, beside(s) | changed(s), str(s)) for s in TESTED])
def test_a_setting_changes_a_part_of_the_run(setting, digest_of, request):
    owner = trained if setting.key in IN_THE_LOOP else built
    if owner is built:
        request.getfixturevalue("without_record")
    base = BASE | beside(setting) | IN_THE_LOOP.get(setting.key, {})
    if setting.key in REFUSED:
        with pytest.raises(ValueError, match=re.escape(REFUSED[setting.key])):
            digest_of(base | changed(setting), built)
        return
    before = digest_of(base, owner)
    after = digest_of(base | changed(setting), owner)
    differing = {part for part in before | after if before.get(part) != after.get(part)}
    assert differing, f"{setting} = {VALUES[setting.key]} has no effect"
    assert differing >= SEVERAL.get(setting.key, set()), (
        f"{setting} has no effect on a part that reads it"
    )


def test_every_setting_of_a_list_item_has_a_second_value():
    kinds: dict[str, type[Section]] = {**LISTS, "eval.sets": EvalSetConfig}
    assert WITHIN.keys() == {f"{key}.{name}" for key in kinds for name in kinds[key].model_fields}


@pytest.mark.parametrize("key", WITHIN)
def test_a_setting_of_a_list_item_changes_a_part_of_the_run(key, digest_of, without_record):
    setting = key.rpartition(".")[0]
    before, after = (digest_of(BASE | {setting: value}, built) for value in WITHIN[key])
    assert before != after, f"{key} has no effect"


BASES = {json.dumps(beside(setting), sort_keys=True): str(setting) for setting in TESTED}


@pytest.mark.parametrize(
    "settings", [case(settings, json.loads(settings), BASES[settings]) for settings in BASES]
)
def test_equal_settings_have_equal_digests(settings, places, digest_of, without_record):
    chosen = BASE | json.loads(settings)
    assert built(config_of(chosen, places)) == digest_of(chosen, built), (
        "equal runs must have equal digests, or the other tests prove nothing"
    )
