"""Test that unsupported optimizers of other programs are rejected, and that their learning rates
are not imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from vit.extras.recipes.importing import import_recipe

CONFIGS = Path(__file__).parent / "configs"
BIG_VISION = CONFIGS / "big_vision" / "vit_s16_i1k.py"
REFUSED = "is not available: use AdamW with a learning rate that suits AdamW"


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --model vit_base_patch16_224 --lr 6.4 --opt lars",
        "python train.py --model vit_base_patch16_224 --lr 1e-4 --opt lion",
        "python train.py --model efficientnet_b2 --lr .016 --opt rmsproptf --opt-eps .001",
        "python main.py --lr 6.4 --opt lars",
        "python train.py --model vit_b_16 --lr 1 --opt rmsprop --lr-warmup-epochs 5",
    ],
)
def test_an_unsupported_optimizer_is_refused(command):
    with pytest.raises(ValueError, match=REFUSED):
        import_recipe(command)


def test_an_unsupported_optimizer_of_a_config_is_refused(tmp_path):
    child = tmp_path / "lion.py"
    child.write_text(
        BIG_VISION.read_text().replace("'scale_by_adam'", "'big_vision.scale_by_lion'")
    )
    with pytest.raises(ValueError, match=f"scale_by_lion.* {REFUSED}"):
        import_recipe(str(child))


def test_adam_with_a_decay_becomes_adamw_at_its_rate_with_a_note():
    imported = import_recipe("python main.py --opt adam --unscale-lr --lr 1e-3")
    (finding,) = (f for f in imported.reading.findings if "opt" in f.theirs)
    assert finding.verdict == "cannot"
    assert "decay" in finding.text
    assert imported.config().optim.name == "adamw"
    assert imported.config().optim.lr == 1e-3


@pytest.mark.parametrize(("rate", "is_reported"), [(0.8, False), (0.7, True)])
def test_another_decay_rate_of_adafactor_is_reported(rate, is_reported, tmp_path):
    child = tmp_path / "adafactor.py"
    text = BIG_VISION.read_text().replace("'scale_by_adam'", "'big_vision.scale_by_adafactor'")
    child.write_text(text.replace("dict(mu_dtype='bfloat16')", f"dict(decay_rate={rate})"))
    imported = import_recipe(str(child))
    assert imported.settings["optim.name"] == "adafactorbv"
    reported = [f.text for f in imported.reading.findings if f.verdict == "cannot"]
    assert (f"config.optax.decay_rate = {rate} is not supported" in reported) == is_reported


def test_an_override_of_a_config_may_be_written_as_on_a_command_line():
    command = f"python -m big_vision.train --config {BIG_VISION} --config.wd=1e-3"
    assert import_recipe(command, num_gpus=1).config().optim.weight_decay > 0
