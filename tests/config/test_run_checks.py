"""Where a run may be: what looks like a slip in a URL is no folder."""

from __future__ import annotations

import pytest

BASE = "data: {root: shards}\ntrain: {epochs: 3}\n"


@pytest.mark.parametrize("slip", ["s3:/b/x", "S3://b/x", "s3://", "gs:b/x", "s3//b/x", "file:/b"])
def test_a_slip_in_a_url_is_no_folder(problems, slip):
    [told] = problems(BASE, f"run.dir={slip}")
    assert f"run.dir={slip} is no URL, and a folder of that name is hardly meant" in told


def test_folders_and_urls_of_runs(load, problems):
    for place in ("runs/a:b", "gs/x", "/a/s3:/b", "s3://b/x", "file:///x", "memory://x"):
        assert load(BASE, f"run.dir={place}").config.run.dir == place
    [told] = problems(BASE, "run.dir=s3://b/x?versionId=3")
    assert "run.dir: a run's URL has no query" in told
