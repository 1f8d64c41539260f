"""Where a run may be: what is wrong with `run.dir` and `run.local_dir`.

A slip in a URL makes a folder of it, in which the run would be trained, and lost with the machine.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit.config.schema import RunConfig

_URL = re.compile(r"[a-z][a-z0-9+.-]+://.")
_SLIP = re.compile(r"\s*(?:[a-z][a-z0-9+.-]+:/|(?:s3a?|gs|gcs):|(?:s3a?|gs|gcs)//)", re.IGNORECASE)
"""`s3:/bucket`, `S3://bucket`, `s3://`, `s3:bucket`, `s3//bucket`."""


def run_rules(run: RunConfig) -> dict[str, bool]:
    """What may be wrong in `run`, in dotted keys and with a remedy -> whether it is."""
    place = run.dir or ""
    is_url = _URL.match(place) is not None
    return {
        f"run.dir={place} is no URL, and a folder of that name is hardly meant: expected a folder,"
        " or a URL such as s3://bucket/runs/name": not is_url and _SLIP.match(place) is not None,
        "run.dir: a run's URL has no query (?...): remove it": is_url and "?" in place,
        "run.local_dir has no effect where run.dir is a folder: give a URL, or leave it out": (
            run.local_dir is not None and "://" not in place
        ),
    }
