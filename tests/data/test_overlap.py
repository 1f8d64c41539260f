"""Test that evaluation on training images is rejected, or is reported with the number of these
images if the overlap may be intended."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit.config.base import Selection, SourceConfig
from vit.config.schema import Config
from vit.data.open_data import open_split, open_train_set
from vit.data.overlap import count_equal
from vit.data.shards.split import Split
from vit.data.shards.split_slice import SplitSlice
from vit.data.shards.tar import INDEX_DTYPE
from vit.data.sources import train_set_of


def config_of(root, **settings) -> Config:
    return Config(data={"root": str(root), **settings}, train={"steps": 1})


def opened(root, **settings):
    config = config_of(root, **settings)
    return open_train_set(config, open_split(config, config.data.val_split))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"val_split": "train[90%:]"},
            "data.val_split=train[90%:]: 6 of its 6 images are also training images of"
            " data.train_split=train: ",
        ),
        (
            {"train_split": "train[:60%]", "val_split": "train[50%:]"},
            "data.val_split=train[50%:]: 6 of its 30 images are also training images of"
            " data.train_split=train[:60%]: ",
        ),
        (
            {
                "sources": (
                    SourceConfig(split="val"),
                    SourceConfig(split="train[:55%]"),
                    SourceConfig(split="train[40%:60%]"),
                ),
                "val_split": "train[50%:]",
            },
            "data.val_split=train[50%:]: 6 of its 30 images are also training images of"
            " data.sources[1].split=train[:55%], data.sources[2].split=train[40%:60%]: ",
        ),
        (
            {"val_split": "train"},
            "60 of its 60 images are also training images of data.train_split=train: ",
        ),
    ],
)
def test_evaluation_on_trained_images_is_refused(shards, settings, message):
    with pytest.raises(ValueError, match=re.escape(message) + "hold them out, for "):
        opened(shards, **settings)


def test_a_link_to_the_folder_is_the_same_data(shards, tmp_path):
    (tmp_path / "link").symlink_to(shards)
    source = SourceConfig(root=str(tmp_path / "link"), split="train")
    with pytest.raises(
        ValueError, match=r"also training images of data\.sources\[0\]\.split=train: "
    ):
        opened(shards, sources=(source,), val_split="train[90%:]")


def test_evaluation_on_held_out_images_is_accepted(shards, tmp_path):
    assert opened(shards, train_split="train[:90%]", val_split="train[90%:]").num_draws == 54
    held_out = open_split(config_of(shards), "train[90%:]")
    (tmp_path / "held_out.txt").write_text("\n".join(held_out.key(i) for i in range(6)))
    by_key = {"exclude": str(tmp_path / "held_out.txt")}
    assert opened(shards, val_split="train[90%:]", **by_key).num_draws == 54


def with_checksums(checksums, root="nowhere") -> Split:
    index = np.zeros(len(checksums), INDEX_DTYPE)
    index["crc32c"] = checksums
    index["size"] = 7
    return Split(root, "train", ["t.tar"], [len(index)], index, 1, [])


@given(
    trained=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    evaluated=st.lists(st.integers(0, 9), min_size=1, max_size=20),
)
def test_equal_images_in_other_data_sets_are_counted_by_checksum(trained, evaluated):
    train_set = train_set_of(with_checksums(trained), Selection())
    count = count_equal(train_set, with_checksums(evaluated, "elsewhere"))
    assert count == sum(image in trained and image != 0 for image in evaluated), (
        "images with checksum 0 (unknown) must not match"
    )


def test_only_selected_images_of_a_copy_are_counted(shards, tmp_path):
    copy = shutil.copytree(shards, tmp_path / "copy")
    train_set = opened(shards, train_split="train[:90%]", fraction=0.5)
    trained = {train_set.split.key(number) for number in train_set.shares[0].chosen.tolist()}
    elsewhere = open_split(config_of(copy), "train[50%:]")
    assert isinstance(elsewhere, SplitSlice)
    common = trained & {elsewhere.key(i) for i in range(30)}
    assert 0 < count_equal(train_set, elsewhere) == len(common) < 30
