"""Test the rows of errors/rows.yaml that describe runs at URLs and folders that are not runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import Future

import pytest
from error_rows import Place, Row, Scenarios
from servers import S3Server

from vit.data.storage.object_store import ObjectStore

scenario = Scenarios()

WITHOUT_RENAMES = r"""
#include <errno.h>
int rename(const char *from, const char *to) { errno = ENOSYS; return -1; }
int renameat(int a, const char *from, int b, const char *to) { errno = ENOSYS; return -1; }
"""


def at(place: Place, name: str = "copy") -> list[str]:
    """Return settings for a run at a URL. With these settings, the local folder contains only the
    files that the table row describes."""
    local = place.folder.with_name(f"{place.folder.name}_{name}")
    return [f"run.dir=file://{place.folder}/there", f"run.local_dir={local}", "run.lease_s=1"]


@scenario("`run.dir` on the web")
def _(place):
    place.train("run.dir=https://example.org/run")


@scenario("a slip in the URL of `run.dir`")
def _(place):
    place.train("run.dir=s3:/bucket/run")


@scenario("`run.dir` in a bucket that does not exist", slow=True)
def _(place):
    with S3Server():
        place.train("run.dir=s3://misspelt-bucket/run", *at(place)[1:])


@scenario("shards in a bucket that does not exist", slow=True)
def _(place):
    with S3Server():
        place.train("data.root=s3://misspelt-bucket/shards")


@scenario("`run.local_dir` of a run in a folder")
def _(place):
    place.train("run.local_dir=/tmp/elsewhere")


@scenario("`run.dir` at a URL that a live job uses")
def _(place):
    Lease = pytest.importorskip("vit.extras.remote_runs.lease").Lease
    lease = Lease(ObjectStore(f"file://{place.folder}/there"), 5.0)
    lease.acquire("another")
    try:
        place.train(*at(place))
    finally:
        lease.release()
    for files in (place.before, place.after):
        files.pop("there/lease.json")  # ignore the lease file, because it changes constantly


@scenario("a working copy that holds something else")
def _(place):
    shutil.copytree(place.finished, place.run_dir)
    url, _, lease_s = at(place)
    place.train(url, f"run.local_dir={place.run_dir}", lease_s)


@scenario("a run that was removed from its URL")
def _(place):
    url, _, lease_s = at(place)
    shutil.copytree(place.finished, place.run_dir)
    same = {"url": url.removeprefix("run.dir="), "same": {}}
    (place.run_dir / ".copy_of.json").write_text(json.dumps(same))
    place.train(url, f"run.local_dir={place.run_dir}", lease_s)


@scenario("keys that may not write to `run.dir`", slow=True)
def _(place):
    with S3Server() as server:
        url = f"run.dir={server.new_bucket()}/run"
        with server.only("s3:ListBucket", "s3:GetObject"):
            place.train(url, *at(place)[1:])


@scenario("a run folder where folders cannot be renamed", slow=True)
def _(place):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (place.folder / "no.c").write_text(WITHOUT_RENAMES)
    library = place.folder / "no.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, place.folder / "no.c"], check=True)
    place.run_dir.mkdir()
    place.train(LD_PRELOAD=str(library))


@pytest.mark.full
@pytest.mark.parametrize("row", scenario.rows())
def test_the_mistake_has_the_stated_result(row: Row, happened: dict[str, Future[Place]]):
    scenario.check(row, happened[row.what].result())
