"""Test the confidence intervals of benchmarks/inputs/trainings.py, and that the project trains
exactly like a plain loop built from timm's components."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from processes import REPOSITORY
from scipy import stats

from vit.config.io import ConfigError, load_config

pytestmark = pytest.mark.full
BENCHMARKS = REPOSITORY / "benchmarks"
SEEDS = 5
ORIGINALS = 100
RENDERINGS = 3


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Simulate which images two equally good programs classify correctly."""
    hard = rng.normal(1.5, 1.5, ORIGINALS)
    both = []
    for _ in range(2):
        own = rng.normal(0, 0.8, ORIGINALS)
        luck = rng.normal(0, 0.6, (SEEDS, 1))
        logits = np.repeat(hard + own + luck, RENDERINGS, axis=1)
        both.append(rng.logistic(size=logits.shape) < logits)
    return both[0], both[1]


def test_the_interval_covers_the_true_difference_over_seeds_and_images(module):
    trainings = module("inputs.trainings")
    groups = np.repeat(np.arange(ORIGINALS), RENDERINGS)
    rng = np.random.default_rng(0)
    covered = 0
    by_images_alone = 0
    draws = 600
    for _ in range(draws):
        first, second = draw(rng)
        difference = trainings.difference(first, second, groups)
        covered += difference.low <= 0 <= difference.high
        gaps = (second.astype(float) - first).ravel()
        by_images_alone += abs(gaps.mean()) <= 1.96 * gaps.std() / gaps.size**0.5
    # If an interval covers the true value in 95 % of all cases, 79 of 80 tests with 600 simulations
    # each measure a coverage above 93 %.
    assert covered / draws >= 0.93
    # Intervals that treat all predictions as independent are too narrow.
    assert by_images_alone / draws < 0.85


def test_the_interval_is_never_narrower_than_that_of_seeds_or_images(module):
    trainings = module("inputs.trainings")
    groups = np.repeat(np.arange(ORIGINALS), RENDERINGS)
    rng = np.random.default_rng(1)
    for _ in range(20):
        first, second = draw(rng)
        difference = trainings.difference(first, second, groups)
        gaps = second.astype(float) - first
        assert difference.points == pytest.approx(100 * gaps.mean())
        assert difference.by_seed == pytest.approx(100 * gaps.mean(1))
        for parts in (gaps.mean(1), gaps.reshape(SEEDS, ORIGINALS, -1).mean((0, 2))):
            alone = stats.ttest_1samp(parts, 0).confidence_interval()
            assert difference.low <= 100 * alone.low + 1e-9
            assert difference.high >= 100 * alone.high - 1e-9


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "digits"
    line = [sys.executable, "-m", "data_prep.digits", "--out", out]
    subprocess.run(
        [*line, "--image-size", "24", "--renderings", "1", "--val-renderings", "2"],
        check=True,
        cwd=REPOSITORY,
    )
    return out


@pytest.fixture
def settings(module, digits):
    convergence: ModuleType = module("convergence")
    return [*convergence.SETTINGS, f"data.root={digits}", "train.device=cpu"]


def test_the_plain_loop_rejects_settings_that_it_does_not_support(module, settings):
    timm_loop, config_file = module("inputs.timm_loop"), module("convergence").CONFIG
    for word in (
        "optim.name=muon",
        "ema.decay=0.9",
        "augment.mix_group_size=4",
        "train.epochs=1.5",
        "train.precision=bf16",
    ):
        config = load_config(config_file, [*settings, word])
        with pytest.raises(ValueError, match=word.partition("=")[0]):
            timm_loop.check_known(config)
    config = load_config(config_file, settings)
    timm_loop.check_known(config)
    with pytest.raises(ConfigError):
        load_config(config_file, [*settings, "model.depht=3"])


def test_plain_loop_has_the_same_model_groups_and_images(module, settings, digits):
    from timm.optim import create_optimizer_v2

    from vit.data.batches import EvalBatches
    from vit.data.image_format import ImageFormat
    from vit.data.loader import Loader
    from vit.data.storage.opening import open_split
    from vit.model import create_model
    from vit.optim.groups import parameter_groups

    timm_loop = module("inputs.timm_loop")
    config = load_config(module("convergence").CONFIG, settings)
    theirs = timm_loop._model(config, 10).eval()
    ours = create_model(config.model, num_classes=10).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(4, 3, *config.model.height_width())
    torch.testing.assert_close(ours(images), theirs(images))

    optimizer = create_optimizer_v2(theirs, opt="adamw", lr=1e-3, weight_decay=0.05)
    decayed = [
        {p.shape for p in group["params"]}
        for group in optimizer.param_groups
        if group["weight_decay"]
    ]
    expected = [
        {p.shape for p in group["params"]}
        for group in parameter_groups(ours, config.optim)
        if group["weight_decay"]
    ]
    assert decayed == expected

    split = open_split(digits, "val")
    _, loader, _ = timm_loop._loaders(config)
    labels = [place.label for place in loader.dataset.places]
    assert labels == split.index["label"].tolist()
    image_format = ImageFormat.from_config(config.model, config.data)
    batches = EvalBatches(split, image_format, config.eval, 50, rank=0, world_size=1)
    with Loader(batches, 0, 1, num_workers=0, device=torch.device("cpu")) as own:
        batch = next(own)
        mean = torch.tensor(config.data.mean).view(3, 1, 1)
        std = torch.tensor(config.data.std).view(3, 1, 1)
        own_images = (batch.images / 255 - mean) / std
    their_images = torch.stack([loader.dataset[i][0] for i in range(50)])
    # Pillow and torch round differently, so some pixel values differ by 1/255 or 2/255.
    assert float((own_images - their_images).abs().mean()) < 2 / 255 / min(config.data.std)


@pytest.mark.slow
def test_both_benchmarks_run_resume_and_plot(tmp_path, digits):
    small = ["model.embed_dim=32", "model.depth=1", "train.epochs=2"]
    for name, count in (("convergence", 2 * 2), ("pairs", 3 * 4 + 4 * 2)):
        line = [sys.executable, BENCHMARKS / f"{name}.py", "--data", digits]
        line += ["--work", tmp_path / name, "--seeds", "2", "--out", tmp_path / f"{name}.json"]
        begun = subprocess.run([*line, *small], capture_output=True, text=True, timeout=500)
        assert begun.returncode == 0, begun.stderr[-500:]
        again = subprocess.run([*line, *small], capture_output=True, text=True, timeout=100)
        trained = [line for line in begun.stdout.splitlines() if "seed" in line and " s" in line]
        assert len([line for line in trained if line.endswith(" s")]) == count
        # The second run reuses stored results, so it must print the same timings as the first run.
        assert [line for line in again.stdout.splitlines() if line in trained] == trained
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert report["rounds"] == 2
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
