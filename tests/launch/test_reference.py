"""Test `launch/explain.py` and the reference pages that are generated from the code."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from extras.deleted_extras import DELETED
from processes import run, train, write_config

from vit.config.hints import all_keys
from vit.config.io import load_config, to_dict
from vit.config.reference import recipes, settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_is_described_with_its_default():
    every = settings()
    assert list(every) == all_keys()
    assert all(each.sentence.endswith((".", ")")) for each in every.values())
    for section, fields in to_dict(load_config("vit_b16")).items():
        for name, value in fields.items():
            default = every[f"{section}.{name}"].default.partition(" (")[0]
            if f"{section}.{name}" not in recipes()["vit_b16"] and name != "dir":
                assert default in (json.dumps(value), value), f"{section}.{name}"


def test_the_page_of_settings_has_each_in_its_section(reference):
    page = reference.settings_page()
    sections = page.split("\n## ")
    for key in all_keys():
        section = next(part for part in sections if part.startswith(key.partition(".")[0] + "\n"))
        assert f"\n| `{key}` | " in section
    assert "Only with `stream.urls=null`, and with `aug_repeats!=1`." in page
    assert "Only with `mixup_alpha` or `cutmix_alpha`." in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {7}


def test_the_python_page_has_the_signatures(reference):
    page = reference.python_page()
    assert "vit.open_split(\n    root: Path | str,\n    split: str,\n" in page
    assert "vit.create_model(\n" in page
    assert "    **fields: Any,\n) -> ImageModel" in page


def test_the_record_has_the_keys_of_its_page_and_no_others(reference, shards, tmp_path):
    config = write_config(tmp_path, shards, steps=6)
    overrides = ["log.norms_every_steps=3", "loader.num_workers=1"]
    train(config, tmp_path / "run", *overrides)
    keys = reference.RECORD
    kinds = set()
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        kinds.add(line["kind"])
        documented = keys[line["kind"]].keys() | keys["every line"].keys()
        assert {key.removesuffix("_ema") for key in line} <= documented
    assert kinds == {"start", "ready", "train", "norms", "eval", "epoch", "checkpoint", "end"}
    written = "".join(
        path.read_text()
        for folder in ("vit/hooks", "vit/checkpoint", "vit/loggers", "vit/extras/recipes")
        for path in (ROOT / folder).glob("*.py")
    )
    elsewhere = {"reference"} if "recipes" in DELETED else set[str]()
    for kind in keys.keys() - {"every line", *kinds} - elsewhere:
        assert f'"{kind}"' in written, f"nothing writes lines of {kind}"


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        (["optim.lr"], 0, r"optim\.lr: number above 0; default 0\.001 .*\n    Peak learning", ""),
        (["guard"], 0, r"guard\.on_nonfinite: skip \| stop; default skip\n", ""),
        (["layer_decay"], 0, r"optim\.layer_decay: .*\n(.*\n)+optim\.layer_decay_form: ", ""),
        (["aug_repeats_form"], 0, r"(.*\n)+ +Only with stream\.urls=null, and with aug_rep", ""),
        (
            ["wamup_epochs"],
            2,
            "",
            "error: no setting contains 'wamup_epochs'; did you mean schedule.warmup_epochs",
        ),
    ],
)
def test_settings_are_explained(arguments, status, out, err):
    done = run("launch/explain.py", *arguments)
    assert done.returncode == status
    assert re.match(out or "$", done.stdout), done.stdout
    assert done.stderr.startswith(err)
