"""Write metrics to TensorBoard event files.

    runs/<name>/tensorboard/events.out.tfevents.*

Each attempt writes its own file. The file begins with a purge mark, which makes TensorBoard drop
older data, followed by the numbers of all valid lines of metrics.jsonl. Then the file of the
previous attempt is emptied. After a kill, no step is therefore missing or shown twice, and
TensorBoard may be turned on in the middle of a run. A thread of tensorboard writes the file, so
training does not wait for the disk. An error ends only the display in TensorBoard, not the
training.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vit.config.schema import Config, LogConfig
from vit.feature import Parts
from vit.loggers.lines import numbers_of, read_metrics
from vit.run_folder.paths import METRICS_FILE


def parts(config: Config) -> Parts:
    """Return the parts of a run that TensorBoard displays."""
    return Parts(create_loggers=(TensorboardView,))


class TensorboardView:
    """Displays numbers and pictures in TensorBoard. See `Logger`."""

    def __init__(self, run_dir: Path, config: LogConfig, log_line: Callable[[str], None]):
        self._log = log_line
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            folder = run_dir / "tensorboard"
            older_files = list(folder.glob("events.out.tfevents.*"))
            threading.excepthook = partial(_report, threading.excepthook)
            # purge_step writes the purge mark. Without a limit on the queue, training never waits
            # for the disk.
            self._writer = SummaryWriter(folder, purge_step=0, max_queue=0, flush_secs=2)
            for line in read_metrics(run_dir / METRICS_FILE):
                self.send(line["step"], line["time"], numbers_of(line))
            self._do("flush")
            if self._writer is not None:
                _discard(older_files)
        except ImportError:
            remedy = "pip install tensorboard, or log.tensorboard=false to silence this"
            log_line(f"tensorboard: not installed: metrics.jsonl only ({remedy})")
        except Exception as error:
            self._stop(error)

    def poll(self) -> None:
        """Do nothing, because TensorBoard never sends messages back."""

    def send(self, step: int, time_s: float, numbers: dict[str, float]) -> None:
        """See `Logger`."""
        for name, value in numbers.items():
            self._do("add_scalar", name, value, step, time_s)

    def send_pictures(self, step: int, pictures: dict[str, Path]) -> None:
        """See `Logger`."""
        import numpy as np
        from PIL import Image

        for name, path in pictures.items():
            try:
                pixels = np.asarray(Image.open(path).convert("RGB"))
            except OSError as error:
                self._log(f"tensorboard: cannot show {name} ({error})")
            else:
                self._do("add_image", name, pixels, step, None, "HWC")

    def send_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Do nothing, because TensorBoard has no tables."""

    def close(self, outcome: str) -> None:
        """Write all remaining numbers, and close the file."""
        self._do("close")

    def _do(self, method: str, *arguments: object) -> None:
        try:
            if self._writer is not None:
                getattr(self._writer, method)(*arguments)
        except Exception as error:  # an error in the thread, such as a full disk
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._writer = None
        self._log(f"tensorboard: stopped ({error}); metrics.jsonl has everything")


def _discard(files: list[Path]) -> None:
    """Empty the files, and remove those that are already empty.

    A TensorBoard that reads a file would wait forever if the file were removed now.
    """
    for path in files:
        if path.stat().st_size:
            os.truncate(path, 0)
        else:
            path.unlink()


def _report(before: Callable[[Any], object], args: Any) -> None:
    """Report a thread's error with `before`, unless the thread belongs to tensorboard (see
    `_do`)."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        before(args)
