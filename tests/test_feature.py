"""Test that features can be added, with two that exist only in this test: a logger of gradient
noise, and a loss."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from processes import TINY, metrics

from vit.build import build
from vit.compose import FEATURES, Core
from vit.config.io import load_config
from vit.distributed.process_group import World
from vit.feature import Parts, combine
from vit.run import Hook, Run
from vit.start.host_check import HostCheck
from vit.train import train
from vit.training.objective import Objective

ALONE = World(0, 1, torch.device("cpu"))


@dataclass
class GradientNoise(Hook):
    """An example of a logger. It writes how much the gradient norm varies between steps."""

    norms: list[float] = field(default_factory=list)

    def begin(self, run: Run) -> None:
        self.record = run.record

    def read(self, step, values):
        self.norms.append(values.grad_norm)
        if len(self.norms) > 1:
            self.record.write("noise", step, noise=statistics.pstdev(self.norms))


class SquaredLoss(Objective):
    """An example of a loss, the squared error of the probabilities (the Brier score)."""

    def __init__(self):
        super().__init__(lambda logits, targets: (logits.softmax(1) - targets).square().sum(1))


def brier(config, data, world) -> Objective:
    return SquaredLoss()


def noise_of(run_dir: Path) -> list[float]:
    return [line["noise"] for line in metrics(run_dir, "noise")]


def trained(config: Path, run_dir: Path, *features: Core) -> list[dict]:
    unmixed = ("augment.mixup_alpha=0", "augment.cutmix_alpha=0", "loss.label_smoothing=0")
    settings = load_config(config, [*TINY, f"run.dir={run_dir}", "log.every_steps=1", *unmixed])
    parts = combine((*FEATURES, *features), settings)
    assert train(build(settings, ALONE, (), parts)) == "finished"
    return metrics(run_dir, "train")


def test_a_made_up_logger_and_a_made_up_loss_are_one_entry_each(config, tmp_path):
    plain = trained(config, tmp_path / "plain")
    noise = Core(1000, lambda config: True, lambda config: Parts(hooks=(GradientNoise(),)))
    loss = Core(1010, lambda config: True, lambda config: Parts(create_objective=brier))
    lines = trained(config, tmp_path / "both", noise, loss)
    norms = [line["grad_norm"] for line in lines]
    assert noise_of(tmp_path / "both") == pytest.approx(
        [statistics.pstdev(norms[:number]) for number in range(2, len(norms) + 1)], rel=1e-3
    )
    # The Brier score of three equal probabilities is 2/3, and their cross-entropy is log 3.
    assert lines[0]["loss"] == pytest.approx(2 / 3, abs=0.1)
    assert plain[0]["loss"] == pytest.approx(1.1, abs=0.1)
    assert noise_of(tmp_path / "plain") == []


def test_the_lines_of_a_feature_are_logged_before_the_first_step(config, tmp_path, capsys):
    said = Core(1020, lambda config: True, lambda config: Parts(lines=("a line of a feature",)))
    trained(config, tmp_path / "run", said)
    log = capsys.readouterr().err
    assert 0 < log.index("a line of a feature") < log.index("step 1/")


def test_hooks_are_called_in_the_order_of_their_numbers(config):
    settings = load_config(config, [*TINY, "run.dir=unused"])
    first = Core(5, lambda config: True, lambda config: Parts(hooks=(GradientNoise(),)))
    off = Core(6, lambda config: False, lambda config: Parts(hooks=(GradientNoise(),)))
    names = [type(hook) for hook in combine((*FEATURES, first, off), settings).hooks]
    assert names[:2] == [GradientNoise, HostCheck]
    assert names.count(GradientNoise) == 1


def test_two_features_with_the_same_part_are_refused(config):
    settings = load_config(config, [*TINY, "run.dir=unused"])
    one = Core(1, lambda config: True, lambda config: Parts(create_objective=brier))
    assert combine([one], settings).create_objective is brier
    with pytest.raises(ValueError, match="two features replace create_objective"):
        combine([one, replace(one, order=2)], settings)
