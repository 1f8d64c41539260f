import shutil
import tarfile
from pathlib import Path

import pytest
from small_shards import NUM_SHARDS, PER_SHARD, pair, write_tar

from vit.data.shards.info_file import make_info, read_sidecar, write_sidecar
from vit.data.shards.tar import scan_tar, write_idx
from vit.data.storage.opening import open_split
from vit.system.files import write_json


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made")
    names = [f"train-{k:05d}.tar" for k in range(NUM_SHARDS)]
    for shard, name in enumerate(names):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        tar = write_tar(
            root / name,
            [member for n in numbers for member in pair(f"key{n}", n)],
            format=tarfile.USTAR_FORMAT,
        )
        write_idx(tar, scan_tar(tar))
        write_sidecar(tar, PER_SHARD)
    sidecars = {name: read_sidecar(root / name) for name in names}
    about = {"source": "test", "options": {}, "class_names": list("abcd"), "num_classes": 4}
    write_json(root / "_info.json", make_info({"train": names}, sidecars, **about))
    # Opening the split writes its index to disk.
    open_split(root, "train")
    return root


@pytest.fixture
def root(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "root")
