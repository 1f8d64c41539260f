"""Test that a run path that looks like a misspelled URL is rejected."""

from __future__ import annotations

import pytest

BASE = "data: {root: shards}\ntrain: {epochs: 3}\n"


@pytest.mark.parametrize("slip", ["s3:/b/x", "S3://b/x", "s3://", "gs:b/x", "s3//b/x", "file:/b"])
def test_a_mistyped_url_is_not_a_folder(problems, slip):
    [line] = problems(BASE, f"run.dir={slip}")
    assert f"run.dir={slip} looks like a misspelled URL" in line


def test_folders_and_urls_are_accepted_and_a_query_is_refused(load, problems):
    for place in ("runs/a:b", "gs/x", "/a/s3:/b", "s3://b/x", "file:///x", "memory://x"):
        assert load(BASE, f"run.dir={place}").config.run.dir == place
    [line] = problems(BASE, "run.dir=s3://b/x?versionId=3")
    assert "run.dir: the URL of a run must not have a query" in line
