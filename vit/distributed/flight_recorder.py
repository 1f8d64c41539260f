"""Keep a record of the last NCCL collectives, and write it to a file if a rank hangs.

torch records collectives in memory (its flight recorder). NCCL writes the record if a collective
times out. The watchdog ends the run earlier, so `dump` writes the record itself. `torchfrtrace`,
which is part of torch, compares the files of all ranks. gloo has no such record.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

PREFIX = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""The environment variable that contains the path of the files, without the rank at the end of each
file name."""
FILE_PREFIX = "nccl_trace_rank_"
WRITTEN_WITHIN_S = 10.0


def start_recording() -> None:
    """Turn on the recording. Call this before the NCCL process group is created.

    Variables that the user has set take precedence.
    """
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def write_to(folder: Path) -> None:
    """Make NCCL and `dump` write their files to `folder`, unless the user has set another path."""
    if _uses_nccl():
        os.environ.setdefault(PREFIX, str(folder.absolute() / FILE_PREFIX))


def dump() -> str:
    """Write this rank's record. Return its path without the rank, or "" if there is no record."""
    prefix = os.environ.get(PREFIX)
    if prefix is None or not _uses_nccl():
        return ""

    # Reading the record may wait for the CUDA driver, which may also hang.
    path = Path(f"{prefix}{dist.get_rank()}")
    writer = threading.Thread(target=_write, args=(path,), daemon=True)
    writer.start()
    writer.join(WRITTEN_WITHIN_S)
    return "" if writer.is_alive() else prefix


def _write(path: Path) -> None:
    with suppress(OSError):  # the disk may be full
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(torch._C._distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]


def _uses_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"
