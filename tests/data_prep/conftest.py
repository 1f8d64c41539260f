"""Shards as other tools write them."""

from pathlib import Path

import pytest
import webdataset
from small_shards import jpeg


@pytest.fixture
def foreign(tmp_path) -> Path:
    """Shards by webdataset's own writer, named as timm's ImageNet shards are; labels up to 4 in
    train, 2 in validation."""
    root = tmp_path / "foreign"
    root.mkdir()
    for split, num_shards in (("train", 3), ("validation", 1)):
        for shard in range(num_shards):
            with webdataset.TarWriter(str(root / f"imagenet1k-{split}-{shard:04d}.tar")) as tar:
                for n in range(4):
                    number = shard * 4 + n
                    tar.write(
                        {
                            "__key__": f"{split}{number}",
                            "jpg": jpeg(number),
                            "cls": number % (5 if split == "train" else 3),
                            "json": {"n": n},
                        }
                    )
    return root
