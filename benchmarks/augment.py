"""Compare the augmentation's speed with that of another commit, on the same images and random
numbers.

    python benchmarks/augment.py                 compare with the previous commit
    python benchmarks/augment.py --against v1.2  compare with any other commit

Each version runs in a separate process with one thread, and the versions take turns. A figure is
the number of images per second of CPU time, which other programs disturb least. Both versions must
produce identical bits. The script requires git, and a commit whose augmentation has the same
interface.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from measure import CORES, create_parser, keep, machine, rows_of, take_turns

ROOT = Path(__file__).parents[1]
POLICIES: dict[str, dict[str, Any]] = {
    "flip": {},
    "timm's RandAugment, MixUp and CutMix": {
        "randaugment_layers": 2,
        "mixup_alpha": 0.8,
        "cutmix_alpha": 1.0,
    },
    "torchvision's RandAugment": {"randaugment_layers": 2, "randaugment_ops": "torchvision"},
    "big_vision's RandAugment": {"randaugment_layers": 2, "randaugment_ops": "big_vision"},
    "3-Augment and jitter": {
        "crop": "simple",
        "auto_augment": "three_augment",
        "color_jitter": (0.3, 0.3, 0.3, 0.0),
    },
}
SIZE = (224, 224)
SERVE = "--serve"


class Version:
    """A process that augments images with the package in the folder `tree`."""

    def __init__(self, tree: Path):
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, __file__, SERVE]
        self._process = subprocess.Popen(
            line, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        used = Path(self._ask("where"))
        assert used.is_relative_to(tree.resolve()), f"{used} is not in {tree}"

    def _ask(self, question: str) -> str:
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise SystemExit("a version failed: see its message above")
        return answer

    def images_per_cpu_s(self, policy: str, num_images: int) -> float:
        """Augment a batch once, and return images per CPU second."""
        return num_images / json.loads(self._ask(json.dumps([policy, num_images])))[0]

    def digest(self, policy: str, num_images: int) -> str:
        """Return a hash over all bits of the augmented batch."""
        digest: str = json.loads(self._ask(json.dumps([policy, num_images])))[1]
        return digest

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    """Answer requests on stdin, one per line, using the package on this process's path."""
    import numpy as np
    import torch

    import vit.data.augment.apply as apply
    from vit.config.schema import AugmentConfig
    from vit.data.augment.draw import draw_mix, draw_table, sample_keys

    torch.set_num_threads(1)
    device = torch.device("cpu")
    for line in sys.stdin:
        if line.strip() == "where":
            print(Path(apply.__file__).resolve(), flush=True)
            continue
        policy, num = json.loads(line)
        config = AugmentConfig(**POLICIES[policy])
        widths = np.full(num, 500)
        table = draw_table(config, sample_keys(0, 0, np.arange(num)), widths, widths, SIZE)
        draw_mix(config, table, np.ones(num, np.float32), 0, 0, 0, SIZE, epoch=0)
        noise = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (num, *SIZE, 3), dtype=torch.uint8, generator=noise)
        augment = apply.Augment(config, 10, (0.5,) * 3, (0.25,) * 3, device)
        labels = torch.arange(num) % 10
        began_s = time.process_time()
        inputs, _ = augment(images.permute(0, 3, 1, 2), labels, torch.from_numpy(table))
        taken_s = time.process_time() - began_s
        digest = hashlib.sha256(inputs.contiguous().numpy().tobytes()).hexdigest()
        print(json.dumps([taken_s, digest]), flush=True)


def unpack(commit: str, folder: Path) -> Path:
    """Extract the package of `commit` to a subfolder of `folder`. Return the subfolder."""
    git = ["git", "-C", str(ROOT)]
    number = subprocess.check_output([*git, "rev-parse", "--short", commit], text=True).strip()
    tree = folder / number
    if not tree.is_dir():
        packed = subprocess.check_output([*git, "archive", number, "vit"])
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(tree, filter="data")
    return tree


def main() -> None:
    assert __doc__ is not None
    parser = create_parser(__doc__, "augment")
    parser.add_argument("--against", default="HEAD~1", metavar="COMMIT", help="default: HEAD~1")
    parser.add_argument("--images", type=int, default=64, metavar="N", help="default: %(default)s")
    args = parser.parse_args()

    rounds = 1 if args.quick else args.rounds
    num_images = 8 if args.quick else args.images
    load = os.getloadavg()[0]
    before = unpack(args.against, args.data)
    versions = {f"before ({before.name})": Version(before), "now": Version(ROOT)}
    base = next(iter(versions))

    results: dict[str, Any] = {}
    for policy in POLICIES:
        digests = {version.digest(policy, num_images) for version in versions.values()}
        contestants = {
            name: partial(version.images_per_cpu_s, policy, num_images)
            for name, version in versions.items()
        }
        title = f"{policy}: {'the same bits' if len(digests) == 1 else 'OTHER BITS'}"
        result = take_turns(title, "images/CPU-s", contestants, rounds, [base])
        results[title] = result

    for version in versions.values():
        version.close()

    report = {
        "machine": machine(args.data, ["torch", "numpy"]),
        "data": f"{num_images} images of {SIZE[0]} px, noise, one of {CORES} core(s).",
        "rounds": rounds,
        "load": load,
        "tables": results,
    }
    keep(args.out, "augment", report, {title: rows_of(result) for title, result in results.items()})


if __name__ == "__main__":
    serve() if SERVE in sys.argv else main()
