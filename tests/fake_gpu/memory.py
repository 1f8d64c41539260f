"""Search for the largest micro-batch on a fake GPU with 2 GiB, as launch/bench.py does."""

from __future__ import annotations

from fake_gpu import log

from vit.config.io import load_config, recipes_folder
from vit.distributed.process_group import join_world
from vit.extras.planner.benchmark import bench
from vit.extras.planner.benchmark.subject import Wishes, look_at_subject

SETTINGS = (
    *("data.root=none", "model.name=vit_ti16", "model.depth=2"),
    *("train.compile=false", "train.precision=bf16"),
    *("data.global_batch_size=1024", "data.micro_batch_size=64"),
)
FIRST_TRIED = 1024


def main() -> None:
    log.set_memory(2 << 30)
    world = join_world("cuda")
    config = load_config(recipes_folder() / "vit_b16.yaml", SETTINGS)
    subject = look_at_subject(config, world, Wishes(seconds=1.0))
    step = bench._create(subject, compiled=False)
    print(bench._largest(subject, step, "eager", FIRST_TRIED))


if __name__ == "__main__":
    main()
