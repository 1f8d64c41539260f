"""Test that weights files are recognized by their content. Each file must be read without running
code, or must be rejected with a one-line error."""

import argparse
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vit.model import VisionTransformer
from vit.system.files import WeightsError
from vit.weights.files import load_weights, read_weights
from vit.weights.formats import read_content
from vit.weights.save import save_weights

TINY = {"image_size": 64, "embed_dim": 32, "depth": 1, "num_heads": 2}


def tiny(seed: int = 0) -> VisionTransformer:
    torch.manual_seed(seed)
    return VisionTransformer(num_classes=10, **TINY)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".pth.tar"])
@pytest.mark.parametrize(
    "container", [(), ("state_dict",), ("model",), ("model_ema", "state_dict")]
)
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."]
)
def test_containers_and_prefixes_are_removed(tmp_path, suffix, container, prefix):
    expected = tiny().state_dict()
    content = {prefix + name: tensor for name, tensor in expected.items()}
    for key in reversed(container):
        content = {"epoch": 3, key: content}
    torch.save(content, tmp_path / f"w{suffix}")
    loaded = read_content(tmp_path / f"w{suffix}")
    weights = loaded.tensors
    assert loaded.metadata == {}
    assert loaded.notes == []
    assert list(weights) == list(expected)
    assert all(
        torch.equal(weights[name], expected[name]) and weights[name].device.type == "cpu"
        for name in expected
    )


def test_files_with_prefixes_inside_names_and_older_files_are_read(tmp_path):
    content = {"blocks.0._orig_mod.attn._checkpoint_wrapped_module.proj.bias": torch.ones(3)}
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    weights = read_content(str(tmp_path / "w.pth")).tensors
    assert list(weights) == ["blocks.0.attn.proj.bias"]
    torch.save({"module.a": torch.ones(3), "a": torch.zeros(3)}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="contains duplicate weights"):
        read_content(tmp_path / "w.pth")


def test_saved_weights_are_read_back_unchanged(tmp_path):
    weights = tiny().state_dict() | {"transposed": torch.arange(6.0).reshape(2, 3).t()}
    save_weights(tmp_path / "w.safetensors", weights, {"step": "12", "model": "vit_b16"})
    assert os.listdir(tmp_path) == ["w.safetensors"]
    (tmp_path / "ordinary").touch()
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    content = read_content(tmp_path / "w.safetensors")
    again = content.tensors
    assert content.metadata == {"step": "12", "model": "vit_b16"}
    assert again.keys() == weights.keys() == load_file(tmp_path / "w.safetensors").keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_a_failed_save_leaves_the_old_file_alone(tmp_path):
    save_weights(tmp_path / "w.safetensors", {"a": torch.ones(3)}, {})
    with pytest.raises(TypeError):
        save_weights(tmp_path / "w.safetensors", {"a": torch.zeros(3)}, {"step": 12})
    assert os.listdir(tmp_path) == ["w.safetensors"]
    assert torch.equal(read_content(tmp_path / "w.safetensors").tensors["a"], torch.ones(3))


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "old.pth"])
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_are_refused(tmp_path, name, fraction):
    path = tmp_path / name
    if name == "w.safetensors":
        save_weights(path, tiny().state_dict(), {})
    else:
        torch.save(tiny().state_dict(), path, _use_new_zipfile_serialization=name == "w.pth")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])
    with pytest.raises(WeightsError, match=f"{name} is truncated or not") as caught:
        read_content(path)
    assert "\n" not in str(caught.value)


class Harmful:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_argparse_namespace_beside_the_weights_is_ignored(tmp_path):
    """MAE's and DeiT's files contain the argparse namespace of the training command."""
    torch.save(
        {"model": tiny().state_dict(), "args": argparse.Namespace(lr=1, aa="rand-m9")},
        tmp_path / "namespace.pth",
    )
    assert read_content(tmp_path / "namespace.pth").tensors.keys() == tiny().state_dict().keys()


def test_pickled_objects_are_refused_and_not_run(tmp_path):
    torch.save(
        {"model": tiny().state_dict(), "args": argparse.Namespace(model=tiny())},
        tmp_path / "module.pth",
    )
    with pytest.raises(
        WeightsError, match=r"module.pth is refused, because it contains pickled objects \([\w.]+\)"
    ) as caught:
        read_content(tmp_path / "module.pth")
    assert "\n" not in str(caught.value)
    torch.save({"model": Harmful(tmp_path / "harm")}, tmp_path / "harmful.pth")
    with pytest.raises(WeightsError, match="pickled objects"):
        read_content(tmp_path / "harmful.pth")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "contains nothing"),
        ([1], "contains a list"),
        ({"epoch": 3, "a": torch.ones(1)}, r"also contains epoch \(int\)"),
    ],
)
def test_contents_that_are_not_a_state_dict_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=message):
        read_content(tmp_path / "w.pth")


def test_wrong_paths_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="does not exist"):
        read_content(tmp_path / "none.pth")
    with pytest.raises(WeightsError, match="is a folder"):
        read_content(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated or not a checkpoint .it is empty"),
        (b"<html>404</html>", "is not a checkpoint but a web page .HTML."),
        (b"\n <!DOCTYPE html>", "is not a checkpoint but a web page .HTML."),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "pointer of Git LFS"),
        (b"\x89HDF\r\n", "is not a checkpoint but HDF5"),
        (b"nonsense", "is truncated or not a checkpoint .it begins with b'nonsense'"),
        (b"PK\x03\x04", "is truncated or"),
        (b"\x80\x02}", "is truncated or not a checkpoint"),
    ],
)
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "w.npz"])
def test_the_format_is_detected_from_the_content(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    if name == "w.safetensors" and content in (b"", b"nonsense"):
        message = "is truncated or not"
    with pytest.raises(WeightsError, match=message) as caught:
        read_content(tmp_path / name)
    assert "weights_only" not in str(caught.value), (
        "the message must not repeat torch's advice to load unsafely"
    )
    assert "\n" not in str(caught.value)


def test_the_suffix_of_a_file_does_not_matter(tmp_path):
    expected = tiny().state_dict()
    save_weights(tmp_path / "weights.pth", expected, {})
    torch.save(expected, tmp_path / "weights.safetensors")
    np.savez(tmp_path / "weights", **expected)
    (tmp_path / "weights.npz").rename(tmp_path / "weights")
    for name in ("weights.pth", "weights.safetensors", "weights"):
        again = read_content(tmp_path / name).tensors
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[key], expected[key]) for key in expected)


class Canary:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_files_that_are_not_checkpoints_are_refused_without_warnings_or_running_code(
    tmp_path, recwarn
):
    """A plain pickle, a TorchScript program and a zip file of photos are not damaged, so the error
    must not advise users to copy the file again."""
    bird = tmp_path / "ran"
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"model": Canary(bird)}, protocol=4))
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as file:
        for name in ("script/data.pkl", "script/constants.pkl"):
            file.writestr(name, b"\x80\x02}.")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as file:
        file.writestr("a.jpg", b"")
    torch.save({1: torch.ones(2)}, tmp_path / "numbers.pth")
    messages = {
        "plain.pkl": "is a pickle of protocol 4, which can run code",
        "script.pt": "is a TorchScript program",
        "photos.zip": "is not a checkpoint but a zip of a.jpg",
        "numbers.pth": r"also contains 1 \(Tensor\)",
    }
    for name, message in messages.items():
        with pytest.raises(WeightsError, match=f"{name} {message}|{name}.*{message}") as caught:
            read_content(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not bird.exists()
    assert not recwarn.list


def test_the_metadata_of_a_runs_weights_is_validated(tmp_path):
    """If the number of classes, the grid or a class name is damaged, reading the file must raise
    the error, before other code uses the value."""
    good = {
        "config": "{}",
        "num_classes": "10",
        "grid_size": "[8, 8]",
        "averaged": "false",
        "step": "3",
        "class_names": json.dumps([str(n) for n in range(10)]),
    }
    path = tmp_path / "w.safetensors"
    save_weights(path, tiny().state_dict(), good)
    assert read_weights(path).grid_size == (8, 8)
    damaged = {
        "config": ["[]", "null", '{"model":'],
        "num_classes": ["ten", "0", "9"],  # the file has fewer classes than class names
        "grid_size": ['"8x8"', "[8]", "8"],
        "step": ["last"],
        "class_names": ["[1, 2]", '"a"'],
    }
    for key, values in damaged.items():
        for value in values:
            save_weights(path, tiny().state_dict(), good | {key: value})
            with pytest.raises(WeightsError, match="the metadata of its model are damaged"):
                read_weights(path)


def test_an_error_of_the_operating_system_is_one_line(tmp_path):
    """Tests may run as root, and root can read any file. The test therefore triggers errors that do
    not depend on permissions."""
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    for name, message in {"pipe": "is not a regular file", "loop": "is a broken link"}.items():
        with pytest.raises(WeightsError, match=f"{name}.pth {message}"):
            read_weights(tmp_path / f"{name}.pth")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_weights("a" * 300)  # a name that is too long for the file system


def test_quantised_weights_are_refused(tmp_path):
    """The scales are stored as separate tensors, and the integers are meaningless without these
    scales."""
    model = tiny()
    weights = {name: (10 * value).to(torch.int8) for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"are not floating-point numbers \(cls_token int8"):
        load_weights(model, weights)


def test_arrays_of_objects_are_refused(tmp_path):
    np.savez(tmp_path / "w.npz", a=np.array([Harmful(tmp_path / "harm")], dtype=object))
    with pytest.raises(
        WeightsError, match=r"w.npz is refused, because it contains pickled objects"
    ):
        read_content(tmp_path / "w.npz")
    assert not (tmp_path / "harm").exists()


def test_the_averaged_weights_are_chosen_as_in_timm(tmp_path):
    weights, average = tiny(0).state_dict(), tiny(1).state_dict()
    torch.save({"state_dict": weights, "state_dict_ema": average, "epoch": 3}, tmp_path / "w.pth")
    content = read_content(tmp_path / "w.pth")
    assert torch.equal(content.tensors["head.weight"], average["head.weight"])
    assert content.notes == ["state_dict_ema is used, state_dict in the same file is ignored"]


def test_sharded_weights_are_read_and_checked(tmp_path):
    expected = tiny().state_dict()
    names = list(expected)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_weights(tmp_path / file, {name: expected[name] for name in held}, {})
    places = {name: file for file, held in parts.items() for name in held}
    index = tmp_path / "model.safetensors.index.json"

    def write(weight_map: dict) -> None:
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    write(places)
    loaded = read_weights(tmp_path)
    assert loaded.path == index
    assert loaded.notes == ("read from 2 parts",)
    assert loaded.weights.keys() == expected.keys()
    assert all(torch.equal(loaded.weights[name], expected[name]) for name in expected)
    write(places | {"blocks.7.norm1.bias": "model-2-of-2.safetensors"})
    with pytest.raises(WeightsError, match=r"its parts do not contain blocks.7.norm1.bias"):
        read_weights(tmp_path)
    write(places | {"head.bias": "../model-2-of-2.safetensors"})
    with pytest.raises(WeightsError, match=r"outside its folder"):
        read_weights(tmp_path)
    write(places | {"head.bias": "model-3-of-3.safetensors"})
    with pytest.raises(WeightsError, match=r"model-3-of-3.safetensors are missing"):
        read_weights(tmp_path)
    index.write_text("{}")
    with pytest.raises(WeightsError, match="not an index of sharded weights"):
        read_weights(tmp_path)
