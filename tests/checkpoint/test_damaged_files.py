"""Test that corrupt checkpoints and weights are never loaded.

Each test truncates, alters or removes one file. The run must then load the previous checkpoint, or
raise an error that names the file.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from processes import bytes_of
from torch import Tensor

from vit.checkpoint.checkpoint import (
    CheckpointError,
    newest_checkpoint,
    read_info,
    write_checkpoint,
)
from vit.checkpoint.seal import SEAL
from vit.checkpoint.state import RunState
from vit.config.io import from_dict
from vit.config.schema import CheckpointConfig
from vit.run_folder.lock import RunLock
from vit.run_folder.paths import weights_file
from vit.system.files import WeightsError
from vit.weights.files import LoadedWeights, read_weights
from vit.weights.formats import read_content
from vit.weights.save import save_weights

BEFORE, NEWEST = 3, 6
FACTS = {"num_classes": 2, "grid_size": [2, 2], "class_names": ["a", "b"]}
FILES = [
    f"checkpoints/step_{NEWEST:08d}/state.safetensors",
    f"checkpoints/step_{NEWEST:08d}/checkpoint.json",
    "checkpoints/latest",
    "weights/last.safetensors",
]


def tensors(step: int) -> dict[str, Tensor]:
    return {f"model.{name}": torch.full((3,), float(step)) for name in "ab"}


def plain(step: int) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in tensors(step).items()}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """Return a run folder with two checkpoints and the newer checkpoint's weights."""
    folder = tmp_path_factory.mktemp("pristine")
    for step in (BEFORE, NEWEST):
        state = asdict(RunState(step=step, best_top1=10.0 * step, facts=FACTS))
        write_checkpoint(
            folder, tensors(step), state, {"model": {"depth": 2}}, 1, CheckpointConfig(keep_last=2)
        )
    described = {
        **{key: json.dumps(value) for key, value in FACTS.items()},
        **{"config": "{}", "step": str(NEWEST), "averaged": "false"},
    }
    save_weights(weights_file(folder, "last"), plain(NEWEST), described, is_sealed=True)
    return folder


def cut(content: bytes) -> Iterator[bytes]:
    for length in {0, 1, 7, 8, 9, *range(16, len(content), 197), len(content) - 1}:
        yield content[:length]


def flipped(content: bytes) -> Iterator[bytes]:
    """Yield copies of `content` with one flipped bit in each of the first 16 bytes, and then in
    every 61st byte."""
    draw = random.Random(0)
    for place in {*range(16), *range(16, len(content), 61)}:
        if place < len(content):
            changed = bytearray(content)
            changed[place] ^= 1 << draw.randrange(8)
            yield bytes(changed)


def longer(content: bytes) -> Iterator[bytes]:
    yield content + b"\0"
    yield content + content


FAULTS: dict[str, Callable[[bytes], Iterator[bytes | None]]] = {
    "cut": cut,
    "flipped": flipped,
    "longer": longer,
    "removed": lambda content: iter([None]),
}


def is_equal(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return loaded.keys() == expected.keys() and all(
        bytes_of(loaded[name]) == bytes_of(expected[name]) for name in expected
    )


def weights_at(place: Path) -> tuple[LoadedWeights | None, str]:
    """Return the weights in `place`, or the error message that was raised while reading them."""
    try:
        return read_weights(place), ""
    except WeightsError as error:
        return None, str(error)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("file", FILES)
def test_no_damage_loads_other_weights(pristine, tmp_path, file, fault):
    infos = {}
    for step in (BEFORE, NEWEST):
        infos[step] = read_info(pristine / f"checkpoints/step_{step:08d}")
        del infos[step][SEAL]
    whole = (pristine / file).read_bytes()
    noticed = 0
    for number, content in enumerate(FAULTS[fault](whole)):
        folder = shutil.copytree(pristine, tmp_path / str(number))
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(content)

        # Evaluation, export and new runs call `read_weights`.
        for place in (folder, *([(folder / file).parent] if "step_" in file else [])):
            loaded, problem = weights_at(place)
            if loaded is None:
                assert str((folder / file).parent) in problem
                noticed += 1
            else:
                # If the info file of a checkpoint is missing, `read_weights` does not know the
                # model and returns the tensor names in the file unchanged.
                expected = tensors(NEWEST) if loaded.step is None else plain(loaded.step)
                assert is_equal(loaded.weights, expected)

        messages = list[str]()
        path, info = newest_checkpoint(folder, verify=True, log_line=messages.append)
        assert {key: info[key] for key in infos[BEFORE] if key != SEAL} == infos[info["step"]]
        assert is_equal(read_content(path / "state.safetensors").tensors, tensors(info["step"]))
        assert info["step"] in (BEFORE, NEWEST)
        if info["step"] == BEFORE:
            noticed += 1
            assert messages or not (folder / file).exists()
            assert all(str((folder / file).parent) in line for line in messages)
        shutil.rmtree(folder)
    assert noticed or "latest" in file or fault == "removed"


def test_reports_and_keeps_all_checkpoints_if_all_are_damaged(pristine, tmp_path):
    folder = shutil.copytree(pristine, tmp_path / "run")
    for path in folder.glob("checkpoints/step_*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    messages = list[str]()
    # An automatic restart must not silently start from step 0 when it tries a second time.
    for _ in range(2):
        with pytest.raises(CheckpointError, match="all checkpoints are damaged or missing"):
            newest_checkpoint(folder, verify=True, log_line=messages.append)
    assert len(list(folder.glob("checkpoints/damaged_*/state.safetensors"))) == len(messages) == 2
    shutil.rmtree(folder / "checkpoints")
    assert newest_checkpoint(folder, verify=True) is None


@pytest.mark.full
def test_a_run_at_a_url_does_not_start_over_if_all_checkpoints_are_damaged(pristine, tmp_path):
    RunStore = pytest.importorskip("vit.extras.remote_runs.store").RunStore
    copy_at_url = shutil.copytree(pristine, tmp_path / "there")
    for path in copy_at_url.glob("checkpoints/step_*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    values = {"run": {"dir": f"file://{copy_at_url}"}, "data": {"root": "-"}, "train": {"steps": 9}}
    for number in range(2):
        values["run"]["local_dir"] = str(tmp_path / str(number))
        store = RunStore(from_dict(values, "test"))
        lock = RunLock(store.folder)
        with pytest.raises(ValueError, match="all checkpoints are damaged or missing"):
            store.open(lock)
        lock.release()
        store.close()


@pytest.mark.skipif(
    not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails with EIO"
)
def test_an_unreadable_checkpoint_is_not_treated_as_damaged(pristine, tmp_path):
    folder = shutil.copytree(pristine, tmp_path / "run")
    info = folder / "checkpoints" / f"step_{NEWEST:08d}" / "checkpoint.json"
    whole = info.rename(tmp_path / "whole")
    # Reading /proc/self/mem from the start fails, because the first memory page is not mapped.
    info.symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Input/output error\)") as error:
        newest_checkpoint(folder, verify=True)
    assert str(info.parent) in str(error.value)
    whole.rename(info)
    assert newest_checkpoint(folder, verify=True)[1]["step"] == NEWEST
