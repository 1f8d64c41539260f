"""Test the public names of the Python interface and their arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import TINY, metrics, write_config
from torchvision import transforms

import vit
from vit.config.schema import IMAGENET_MEAN, IMAGENET_STD

SIGNATURES = {
    "create_loader": "split global_batch_size image_size epochs start seed augment mean std"
    " interpolation rank world_size num_workers device",
    "create_model": "name image_size num_classes fields",
    "evaluate_model": "model split image_size crop_pct mean std interpolation batch_size precision"
    " num_workers",
    "fit": "config allow_change world",
    "load": "path name device settings class_names",
    "load_config": "path overrides used_here",
    "open_split": "root split cache_dir cache_gib retry is_checked versions",
}
"""The arguments that users pass by name. The release notes must list every change to these
arguments."""


def test_the_interface_has_these_names_and_arguments():
    for module in ("vit.train", "vit.evaluation.evaluate", "vit.build", "vit.model"):
        importlib.import_module(module)
    assert set(vit.__all__) == {*SIGNATURES, "__version__"}
    assert set(vit.__all__) <= set(dir(vit))
    for name, arguments in SIGNATURES.items():
        assert list(inspect.signature(getattr(vit, name)).parameters) == arguments.split(), name
        assert inspect.getdoc(getattr(vit, name))
    assert vit.__version__ == version("vitline")
    assert inspect.ismodule(vit.train)
    with pytest.raises(AttributeError, match="'vit' has no attribute 'lode'"):
        vit.lode  # noqa: B018


def test_importing_the_package_imports_no_torch():
    code = "import sys, vit; dir(vit); vit.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.full
def test_a_type_checker_sees_the_interface(tmp_path: Path):
    (tmp_path / "user.py").write_text(
        "import vit\n"
        "loader = vit.create_loader(vit.open_split('data', 'train'), 32)\n"
        "vit.open_split('data')\n"
        "reveal_type(loader.__next__())\n"
        "vit.fit(vit.load_config('a.yaml'), rank=1)\n"
    )
    no_cache = ("--config-file=", "--cache-dir=/dev/null")
    arguments = ["-m", "mypy", *no_cache, "--follow-imports=silent", "user.py"]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(Path(vit.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert "tuple[torch._tensor.Tensor, torch._tensor.Tensor]" in done.stdout
    assert 'Missing positional argument "split" in call to "open_split"' in done.stdout
    assert 'Unexpected keyword argument "rank" for "fit"' in done.stdout


def test_a_single_rank_gets_each_sample_once_per_epoch(shards):
    split = vit.open_split(shards, "train")
    plain = {"image_size": 16, "augment": {"hflip_prob": 0.0}, "epochs": 2, "seed": 3}
    with vit.create_loader(split, 12, **plain) as loader:
        whole = list(loader)
    assert len(whole) == len(loader) == 2 * loader.steps_per_epoch == 2 * (len(split) // 12)
    parts = []
    for rank in range(3):
        with vit.create_loader(split, 12, rank=rank, world_size=3, num_workers=1, **plain) as part:
            parts.append(list(part))
    for number, (inputs, targets) in enumerate(whole):
        assert torch.equal(inputs, torch.cat([part[number][0] for part in parts]))
        assert torch.equal(targets, torch.cat([part[number][1] for part in parts]))
    with vit.create_loader(split, 12, start=7, **plain) as later:
        assert torch.equal(next(later)[0], whole[7][0])
    for epoch in (whole[:5], whole[5:]):
        labels = torch.cat([targets.argmax(1) for _, targets in epoch])
        expected = np.bincount(split.index["label"], minlength=3)
        assert labels.bincount(minlength=3).tolist() == expected.tolist()


def test_parts_of_a_split_have_no_sample_in_common(shards):
    whole = vit.open_split(shards, "train")
    first, second = vit.open_split(shards, "train[:75%]"), vit.open_split(shards, "train[75%:]")
    keys = [{part.key(i) for i in range(len(part))} for part in (whole, first, second)]
    assert keys[1] | keys[2] == keys[0]
    assert not keys[1] & keys[2]


def test_rejects_a_batch_that_ranks_or_groups_do_not_divide(shards):
    split = vit.open_split(shards, "train")
    with pytest.raises(ValueError, match=r"global_batch_size=10 is not a multiple of 8.*choose 8"):
        vit.create_loader(split, 10, augment={"mixup_alpha": 0.2}, rank=0, world_size=2)
    with pytest.raises(ValueError, match="mixup"):
        vit.create_loader(split, 10, augment={"mixup": 0.2})
    with pytest.raises(ValueError, match=r"erasing_mode has no effect with .*erasing_prob=0"):
        vit.create_loader(split, 10, augment={"erasing_mode": "rand"})
    vit.create_loader(split, 10, augment={"mixup_alpha": 0.2, "mix_group_size": 2}).close()


def test_a_model_is_evaluated_on_every_image_once(shards):
    torch.manual_seed(0)
    split = vit.open_split(shards, "val")
    model = vit.create_model("vit_ti8", 16, 3, embed_dim=32, depth=1, num_heads=2).train()
    result = vit.evaluate_model(model, split, image_size=16, batch_size=8, num_workers=1)
    assert model.training
    assert result.num_images == len(split) == 23
    view = transforms.Compose(
        [
            transforms.Resize(18, transforms.InterpolationMode.BICUBIC, antialias=True),
            transforms.CenterCrop(16),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    images, labels = zip(*(split[i] for i in range(len(split))), strict=True)
    with torch.no_grad():
        logits = model.eval()(torch.stack([view(image) for image in images]))
    expected = F.cross_entropy(logits, torch.tensor(labels))
    assert result.loss == pytest.approx(expected.item(), abs=0.01)


def test_fit_trains_as_the_command_does(shards, tmp_path):
    path = write_config(tmp_path, shards, steps=6)
    config = vit.load_config(path, [*TINY, f"run.dir={tmp_path / 'run'}", "train.device=cpu"])
    assert vit.fit(config) == "finished"
    assert metrics(tmp_path / "run", "eval")[-1]["num_images"] == 23
    assert vit.load(tmp_path / "run").class_names
