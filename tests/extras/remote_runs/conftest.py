from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.way import Way
from servers import S3Server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Way]:
    with Way(s3.port) as proxy:
        yield proxy
