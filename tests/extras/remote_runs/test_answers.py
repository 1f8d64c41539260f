"""Test S3 servers whose responses differ from Amazon's, and objects that are replaced during a
read."""

from __future__ import annotations

import json
import os

import boto3
import pytest

from vit.data.storage.object_store import ObjectStore
from vit.extras.remote_runs.lease import Lease
from vit.run_folder.copying import LEASE_FILE
from vit.system.retry import RetryPolicy


def store_of(url: str) -> ObjectStore:
    return ObjectStore(f"{url}/run", RetryPolicy(10.0))


@pytest.mark.parametrize("answer", ["412 PreconditionFailed", "501 NotImplemented"])
def test_a_conditional_write_is_refused_or_falls_back_to_a_plain_write(s3, proxy, answer):
    """Some servers refuse to replace a file but do not name the condition that failed. Other
    servers do not support conditions, so the file must be written without a condition."""
    store = store_of(s3.new_bucket())
    assert store.write("a", b"1", only_new=True)
    assert not store.write("a", b"2", only_new=True)
    assert store.read_all("a") == b"1"
    puts = []

    def fault(method: str, path: str) -> str | None:
        puts.extend([path] if method == "PUT" else [])
        return answer if method == "PUT" and len(puts) == 1 else None

    proxy.fault = fault
    knows = answer.startswith("412")
    assert store.write("a", b"2", only_new=True) != knows
    assert store.read_all("a") == (b"1" if knows else b"2")


def test_a_lease_is_acquired_on_a_server_without_conditions(s3, proxy):
    """The server refuses each conditional write but accepts the unconditional retry."""
    store = store_of(s3.new_bucket())
    is_refused = False

    def fault(method: str, path: str) -> str | None:
        nonlocal is_refused
        if method == "PUT":
            is_refused = not is_refused
        return "501 NotImplemented" if method == "PUT" and is_refused else None

    proxy.fault = fault
    lease = Lease(store, 8.0)
    lease.acquire("a")
    proxy.is_good()
    lease.confirm()
    assert json.loads(store.read_all(LEASE_FILE))["place"] == "a"
    lease.release()


@pytest.mark.full
def test_an_object_replaced_during_a_download_arrives_whole(s3, proxy, tmp_path):
    url = s3.new_bucket()
    one = os.urandom(20 << 20)
    two = os.urandom(20 << 20)
    # The test's own S3 client bypasses the proxy, like a client on another machine.
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3.port}")
    client.put_object(Bucket=url[5:], Key="run/weights", Body=one)
    ranges = []

    def fault(method: str, path: str) -> str | None:
        ranges.extend([path] if method == "GET" and "weights" in path else [])
        if len(ranges) == 3:
            client.put_object(Bucket=url[5:], Key="run/weights", Body=two)
        return None

    proxy.fault = fault
    path = tmp_path / "weights"
    store_of(url).download("weights", path)
    assert path.read_bytes() == two
    assert len(ranges) == 6, "the object must be requested twice"
