"""Test that files are written completely or not at all, in a folder and on a real S3 server."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from servers import S3Server, cable, forget_clients

from data_prep.errors import PrepError
from data_prep.write.output import Output, temporary_folder
from vit.system.files import ShardError, locked_folder
from vit.system.retry import RetryPolicy, num_retries


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(s3) -> str:
    return s3.new_bucket()


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Use short pauses, an empty TMPDIR, and no clients from earlier tests."""
    forget_clients()
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (1.0, 0.05, 0.1))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)  # Clear the cached path.


@pytest.fixture(params=["folder", "s3"])
def output(request, tmp_path) -> Output:
    made = Output(
        tmp_path / "deep" / "root"
        if request.param == "folder"
        else f"{request.getfixturevalue('bucket')}/deep/root/"
    )
    made.make()
    return made


def made_file(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


# ---- folders and stores --------------------------------------------------------------------------


def test_files_are_published_fetched_overwritten_and_removed(output, tmp_path):
    assert output.sizes() == {}
    for content in (b"first", b"second, and longer"):
        with output.staging() as folder:
            output.publish(made_file(folder, "a.bin", content))
        assert output.size("a.bin") == len(content)
        with temporary_folder() as folder:
            assert output.fetch("a.bin", folder).read_bytes() == content
            assert output.fetch("a.bin", folder).name == "a.bin"
    output.publish(made_file(tmp_path, "b.bin", b"from elsewhere"))
    assert not (tmp_path / "b.bin").exists()
    assert output.sizes() == {"a.bin": 18, "b.bin": 14}
    output.remove("a.bin")
    output.remove("a.bin")
    assert output.sizes() == {"b.bin": 14}
    assert output.size("a.bin") == -1


def test_only_files_directly_in_the_folder_are_listed(output):
    output.write_json("a.json", {})
    deeper = Output(f"{output}/a")
    deeper.make()
    deeper.write_json("b.json", {})
    assert output.sizes().keys() == {"a.json"}
    assert output.size("a") <= 0 or output.local


def test_json_is_written_and_read(output):
    assert output.read_json("_info.json") is None
    for content in ({"a": [1, "é"]}, {"b": {}}):
        output.write_json("_info.json", content)
        assert output.read_json("_info.json") == content
    for damaged, message in (
        (b"{", "not valid JSON"),
        (b"[1]", "expected a JSON object, found list"),
    ):
        with output.staging() as folder:
            output.publish(made_file(folder, "x.json", damaged))
        with pytest.raises(ShardError, match=f"x.json: {message}"):
            output.read_json("x.json")


def test_files_of_other_writers_are_found(output):
    assert output.sizes() == {}
    theirs = pickle.loads(pickle.dumps(output))
    assert (theirs.url, theirs.local, str(theirs)) == (output.url, output.local, str(output))
    program = (
        "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1])).write_json('theirs.json',"
        " {'a': 1})"
    )
    subprocess.run(
        [sys.executable, "-c", program, pickle.dumps(output).hex()], check=True, timeout=240
    )
    assert output.size("theirs.json") == output.sizes()["theirs.json"] > 0
    assert output.read_json("theirs.json") == {"a": 1}


# ---- folders -------------------------------------------------------------------------------------


def test_a_folder_is_its_own_staging(tmp_path):
    output = Output(f"file://{tmp_path}")
    assert output.local == tmp_path
    with output.staging() as folder:
        assert folder == tmp_path
        output.publish(made_file(folder, "a", b"x"))
    assert (tmp_path / "a").read_bytes() == b"x"
    assert output.fetch("a", Path("/nowhere")) == tmp_path / "a"


def test_free_space_is_known_before_the_folder_exists(tmp_path, bucket):
    free = shutil.disk_usage(tmp_path).free
    assert abs(Output(tmp_path / "a" / "b").free_bytes() - free) < free / 2
    assert not (tmp_path / "a").exists()
    assert Output(bucket).free_bytes() is None


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", "File exists"),
        ("file/below", "Not a directory"),
        ("forbidden/root", "Permission denied"),
        ("forbidden", "Permission denied"),
    ],
)
def test_unwritable_folders_are_reported(place, message, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "forbidden").mkdir()
    (tmp_path / "forbidden").chmod(0o555)
    program = f"from data_prep.write.output import Output; Output({str(tmp_path / place)!r}).make()"
    if os.geteuid() == 0:  # Root ignores permissions.
        for folder in (tmp_path, *tmp_path.parents):
            # Other users cannot read the folders of pytest.
            if folder.stat().st_mode & 0o055 != 0o055:
                folder.chmod(0o755)
        program = f"import data_prep.write.output, os; os.setuid(65534); {program}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    expected = (
        f"PrepError: {tmp_path / place}: cannot be written ({message}); choose another folder, or"
        " fix the permissions"
    )
    assert done.stderr.strip().endswith(expected)
    (tmp_path / "forbidden").chmod(0o755)


# ---- stores --------------------------------------------------------------------------------------


def test_an_upload_in_parts_arrives_complete(bucket, s3, tmp_path):
    content = os.urandom(1 << 20) * 34  # files of 32 MiB and more are uploaded in parts
    path = made_file(tmp_path, "big.tar", content)
    output = Output(f"{bucket}/shards")
    output.publish(path)
    assert not path.exists()
    assert output.size("big.tar") == len(content)
    assert s3.objects(bucket) == {"shards/big.tar": content}


def test_make_leaves_nothing(bucket, s3):
    Output(f"{bucket}/a").make()
    assert s3.objects(bucket) == {}


def test_a_cut_upload_is_repeated(bucket, s3, tmp_path, monkeypatch):
    content = os.urandom(3 << 20)
    before = num_retries()
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (60.0, 0.05, 0.1))
    # Each attempt opens one to ten connections. s3fs makes up to four retries, and aiohttp
    # sometimes retries each of these attempts twice.
    with (
        cable(s3.port, carries=1 << 20, then="cut", times=12) as (port, _),
        monkeypatch.context() as patch,
    ):
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        forget_clients()
        Output(bucket).publish(made_file(tmp_path, "a.tar", content))
    forget_clients()
    assert s3.objects(bucket) == {"a.tar": content}
    assert num_retries() > before


def test_a_killed_upload_leaves_no_visible_object(bucket, s3, tmp_path):
    output = Output(bucket)
    output.write_json("before.json", {})
    path = made_file(tmp_path, "a.tar", os.urandom(3 << 20))
    program = """
import pickle, pathlib, shutil, sys
output = pickle.loads(bytes.fromhex(sys.argv[1]))
with output.staging() as folder:
    shutil.copy(sys.argv[2], folder)
    print("made", flush=True)
    output.publish(folder / "a.tar")
"""
    with cable(s3.port, carries=1 << 20, then="hangs") as (port, stopped):
        environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        arguments = [sys.executable, "-c", program, pickle.dumps(output).hex(), str(path)]
        with subprocess.Popen(
            arguments, env=environment, stdout=subprocess.PIPE, text=True
        ) as worker:
            assert worker.stdout.readline() == "made\n"
            assert stopped.wait(60)
            worker.kill()
    assert output.sizes().keys() == {"before.json"}
    left = list(Path(os.environ["TMPDIR"]).iterdir())
    assert [folder.name.split(".")[1] for folder in left] == ["vit_staging"]
    with output.staging() as folder:  # the next call cleans up
        assert list(Path(os.environ["TMPDIR"]).iterdir()) == [folder]
        output.publish(Path(shutil.copy(path, folder)))
    assert list(Path(os.environ["TMPDIR"]).iterdir()) == []
    assert output.sizes()["a.tar"] == 3 << 20


def test_folders_of_live_processes_and_other_hosts_stay():
    folder = Path(os.environ["TMPDIR"])
    ours, descriptor = locked_folder(folder / "vit_staging")
    theirs = folder / ".vit_staging.another-host.1.tmp"
    theirs.mkdir()
    with temporary_folder():
        assert ours.exists()
        assert theirs.exists()
    os.close(descriptor)  # as the system does when the process exits
    with temporary_folder():
        assert not ours.exists()


def test_staging_files_are_removed_if_their_writer_fails(bucket):
    def fail() -> None:
        with Output(bucket).staging() as folder:
            made_file(folder, "half", b"x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(Path(os.environ["TMPDIR"]).iterdir()) == []


def test_missing_files_are_reported(bucket):
    with temporary_folder() as folder:
        with pytest.raises(PrepError, match=r"s3://.*/a.tar: no such file: write or copy it again"):
            Output(bucket).fetch("a.tar", folder)
        assert list(folder.iterdir()) == []
    with pytest.raises(
        ShardError,
        match=r"s3://no-such-bucket/a: the bucket does not exist .*: correct the URL, or create",
    ):
        Output("s3://no-such-bucket/a").make()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://bucket/a", "expected a folder or one of s3://, s3a://, gs://, gcs://"),
        ("memory://a", "URLs of this kind are read-only, or show incomplete files"),
        ("https://host/a", "URLs of this kind are read-only, or show incomplete files"),
        ("s3://", "expected a folder or a URL such as s3://bucket/folder"),
        ("s3://not a bucket/x", "Invalid bucket name"),
    ],
)
def test_urls_that_cannot_be_written_are_refused(url, message):
    with pytest.raises((PrepError, ShardError)) as caught:
        Output(url).make()
    assert str(caught.value).startswith(f"{url}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_insufficient_credentials_are_reported(s3, bucket, monkeypatch):
    Output(bucket).write_json("a.json", {"a": 1})
    with s3.only("s3:ListBucket", "s3:GetObject"):
        assert Output(bucket).sizes() == {"a.json": 12}
        assert Output(bucket).read_json("a.json") == {"a": 1}
        with pytest.raises(
            (PrepError, ShardError),
            match=r"no permission to do this .* credentials come from AWS_ACCESS_KEY_ID",
        ):
            Output(bucket).make()
    with s3.only("s3:*"):
        Output(bucket).make()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
        forget_clients()
        with pytest.raises((PrepError, ShardError), match=r"no permission to do this"):
            Output(bucket).make()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    forget_clients()
    with pytest.raises(
        (PrepError, ShardError),
        match=r"Unable to locate credentials; .* AWS_ACCESS_KEY_ID .*FSSPEC_S3_ANON=true",
    ):
        Output(bucket).make()


def test_public_files_are_read_without_credentials(bucket):
    Output(bucket).write_json("a.json", {"a": 1})
    boto3.client("s3").put_object_acl(
        Bucket=bucket.removeprefix("s3://"), Key="a.json", ACL="public-read"
    )
    program = (
        f"from data_prep.write.output import Output; print(Output({bucket!r}).read_json('a.json'))"
    )
    environment = {**os.environ, "FSSPEC_S3_ANON": "true"}
    del environment["AWS_ACCESS_KEY_ID"]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout == "{'a': 1}\n"


def test_an_unreachable_store_is_reported(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    forget_clients()
    with pytest.raises(
        (PrepError, ShardError),
        match=rf"^{bucket}: cannot be reached \(.*127.0.0.1:9.*\), \d+ times in \d+ s",
    ):
        Output(bucket).make()
