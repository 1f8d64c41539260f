"""TensorBoard's event files, one more view of the record.

    runs/<name>/tensorboard/events.out.tfevents.*

Each attempt writes a file of its own. It begins with the numbers of all lines of the record that
still count, after a mark that makes a TensorBoard that is running forget what it has shown; the
file of the attempt before is then emptied. So no step is there twice or missing after a kill, and
the view may be switched on in the middle of a run. A thread of tensorboard's writes the file:
neither training nor the record waits for it, and what goes wrong there ends the view alone.
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

    lines: (step, time in seconds, numbers by name), what the record holds so far. say: prints a
    line for people.
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
            # purge_step: the mark. max_queue: without a limit, so that nobody waits for the disk.
            self._writer = SummaryWriter(folder, purge_step=0, max_queue=0, flush_secs=2)
            for line in lines:
                self.send(*line)
            self._do("flush")
            for path in before if self._writer is not None else ():
                # A TensorBoard that is reading it would wait for ever for one that is gone.
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
        """Write what is left."""
        self._do("close")

    def _do(self, method: str, *arguments: object) -> None:
        try:
            if self._writer is not None:
                getattr(self._writer, method)(*arguments)
        except Exception as error:  # a full disk, which its thread has met
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._writer = None
        self._say(f"tensorboard: stopped ({error}); metrics.jsonl has everything")


def _report(before: Callable[[Any], object], args: Any) -> None:
    """Print what a thread raises as `before` does, but of tensorboard's: the view says it."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        before(args)
