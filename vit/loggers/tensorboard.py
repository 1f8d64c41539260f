"""Show the record in TensorBoard's event files.

    runs/<name>/tensorboard/events.out.tfevents.*

Each attempt writes its own file. It begins with a mark that makes a running TensorBoard drop its
data, followed by the numbers of all valid lines of the record. Then the file of the previous
attempt is emptied. So after a kill no step is missing or shown twice, and TensorBoard may be
switched on in the middle of a run. A thread of tensorboard writes the file, so neither training nor
the record waits for it. Its errors end only this view.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any


class TensorboardView:
    """Shows numbers and pictures; no method raises.

    lines: (step, time in seconds, numbers by name) of the record so far. say: prints a line.
    """

    def __init__(
        self,
        run_dir: Path,
        lines: Iterable[tuple[int, float, dict[str, float]]],
        say: Callable[[str], None],
    ):
        self._say = say
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            folder = run_dir / "tensorboard"
            before = list(folder.glob("events.out.tfevents.*"))
            threading.excepthook = partial(_report, threading.excepthook)
            # purge_step is the mark. max_queue has no limit, so that training never waits for the
            # disk.
            self._writer = SummaryWriter(folder, purge_step=0, max_queue=0, flush_secs=2)
            for line in lines:
                self.send(*line)
            self._do("flush")
            for path in before if self._writer is not None else ():
                # Emptied, not removed, because a TensorBoard that reads the file would wait for it
                # forever.
                if path.stat().st_size:
                    os.truncate(path, 0)
                else:
                    path.unlink()
        except ImportError:
            remedy = "pip install tensorboard, or log.tensorboard=false to silence this"
            say(f"tensorboard: not installed: metrics.jsonl only ({remedy})")
        except Exception as error:
            self._stop(error)

    def send(self, step: int, time_s: float, numbers: dict[str, float]) -> None:
        """Show `numbers` by name at `step`."""
        for name, value in numbers.items():
            self._do("add_scalar", name, value, step, time_s)

    def send_pictures(self, step: int, pictures: dict[str, Path]) -> None:
        """Show PNG files by name."""
        import numpy as np
        from PIL import Image

        for name, path in pictures.items():
            try:
                pixels = np.asarray(Image.open(path).convert("RGB"))
            except OSError as error:
                self._say(f"tensorboard: cannot show {name} ({error})")
            else:
                self._do("add_image", name, pixels, step, None, "HWC")

    def close(self) -> None:
        """Write all remaining numbers, and close the file."""
        self._do("close")

    def _do(self, method: str, *arguments: object) -> None:
        try:
            if self._writer is not None:
                getattr(self._writer, method)(*arguments)
        except Exception as error:  # of the thread, such as a full disk
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._writer = None
        self._say(f"tensorboard: stopped ({error}); metrics.jsonl has everything")


def _report(before: Callable[[Any], object], args: Any) -> None:
    """Report an error of a thread by `before`, unless it is tensorboard's, which `_do` reports."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        before(args)
