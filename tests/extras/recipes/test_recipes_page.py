"""Test that docs/recipes.md lists every recipe and known model, and that all settings on the page
exist."""

from __future__ import annotations

import re
from pathlib import Path

from vit.config.io import load_config, recipe_name
from vit.weights.published_models import KNOWN, KnownModel

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def test_the_page_has_every_recipe_and_its_published_result():
    for path in CONFIGS:
        name = recipe_name(path)
        assert f"`{name}`" in PAGE
        if published := re.search(r"^# published ((?:.*\n)(?:#   .*\n)*)", path.read_text(), re.M):
            (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.M)
            accuracies = re.findall(r"\d\d\.\d", re.sub(r"arXiv [\d.]+", "", published[1]))
            assert set(accuracies) == set(re.findall(r"\d\d\.\d", row.split("|")[4])), name


def test_the_table_of_deit_options_has_valid_settings(tmp_path):
    """Each cell of the table has the form `section.key: value`. A key without a section belongs to
    the section of the previous key."""
    table = PAGE.partition("| DeiT `main.py` |")[2].partition("\n\n")[0]
    values = {}
    section = ""
    for setting in re.findall(r"`([\w.]+: [^`]+)`", table):
        key, _, value = setting.partition(": ")
        section = key.partition(".")[0] if "." in key else section
        values[key if "." in key else f"{section}.{key}"] = value
    assert len(values) == 21
    config = load_config(
        ROOT / "configs" / "vit_b16.yaml", [f"{key}={value}" for key, value in values.items()]
    )
    assert (config.optim.lr, config.optim.clip_grad_norm, config.optim.betas) == (
        1e-3,
        None,
        (0.9, 0.999),
    )
    assert (config.order.aug_repeats, config.order.aug_repeats_form, config.ema.decay) == (
        3,
        "sampler",
        0.99996,
    )
    assert (config.model.dist_token, config.distill.distill_type) == (True, "hard")


def test_the_page_and_the_program_have_the_same_table():
    def line(row: KnownModel) -> str:
        names = [row.name, *row.files]
        side = f"{row.image_size[0]}, {row.crop_pct:g}"
        return (
            f"| {', '.join(f'`{name}`' for name in names)} | {side} | {row.top1:.2f} |"
            f" {row.top5:.2f} |"
        )

    page = PAGE.partition("## Known models")[2]
    shown = [text for text in page.splitlines() if text.startswith("| `")]
    expected = [line(row) for row in KNOWN]
    assert shown == expected, "docs/recipes.md must contain this table:\n" + "\n".join(expected)
    assert {row.source for row in KNOWN} == set(re.findall(r"[\w-]+/[\w-]+@\w+:[\w/.-]+\w", page))
