"""Test that commands do not leak login data. Each test uses one kind of login, and searches for it
in all output and in all files."""

from __future__ import annotations

import base64
import json
import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_python
from extras.deleted_extras import DELETED, needs
from processes import TINY, call, environment, make_shards, run, write_config
from servers import WebServer

PASSWORD = "pass/w0rd+x"
SIGNATURE = "0badc0ffee0badc0ffee"
HEADER = "tok-5ecr3t"
FOR_OTHERS = "0ther-t0ken"
IN_NETRC = "netrc-pa55word"
SECRETS = {
    "password": PASSWORD,
    "signature": SIGNATURE,
    "header": HEADER,
    "header of the environment": FOR_OTHERS,
    ".netrc": IN_NETRC,
    "HF_TOKEN": "hf_AbCdEfGhIjKl",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEJr",
}
LOGIN = f"me:{urllib.parse.quote(PASSWORD, safe='')}@"


def forms(secret: str) -> set[bytes]:
    plain = {
        secret,
        urllib.parse.quote(secret),
        urllib.parse.quote(secret, safe=""),
        base64.b64encode(f"me:{secret}".encode()).decode(),
    }
    return {
        form.encode()
        for text in plain
        for form in (text, json.dumps(text)[1:-1], text.replace("/", "\\/"))
    }


def leaks(place: Path, *printed: str) -> list[str]:
    contents = {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
    contents |= {f"output {number}": text.encode() for number, text in enumerate(printed)}
    return [
        f"{name} in {file}"
        for file, content in contents.items()
        for name, secret in SECRETS.items()
        if any(form in content for form in forms(secret))
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"), num_train=24, num_val=12)


@pytest.fixture
def web(shards) -> Iterator[WebServer]:
    with WebServer({f"/p/{path.name}": path.read_bytes() for path in shards.iterdir()}) as server:
        yield server


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / "netrc").write_text(f"machine elsewhere.example.org login me password {IN_NETRC}\n")
    for name, value in {
        "NETRC": str(tmp_path / "netrc"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "VIT_HTTP_HEADER": f"elsewhere.example.org X-Key: {FOR_OTHERS}",
        **{name: value for name, value in SECRETS.items() if name.isupper()},
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "left").mkdir()
    return tmp_path / "left"


def trained(config: Path, run_dir: Path, *settings: str, ranks: int = 0, cold: bool = False):
    tiny_settings = [
        setting for setting in TINY if setting.partition("=")[0] not in ("log.wandb", "log.report")
    ]
    run_settings = {
        "train.steps": 2,
        "log.wandb": "offline",
        "log.report": "false" if "report" in DELETED else "true",
        "run.dir": run_dir,
    }
    return run(
        "launch/train.py",
        "--config",
        config,
        *tiny_settings,
        *(f"{key}={value}" for key, value in run_settings.items()),
        *settings,
        ranks=ranks,
        cold=cold,
    )


def with_login(web: WebServer, path: str = "/p") -> str:
    return f"{web.url.replace('://', f'://{LOGIN}')}{path}"


@needs("report")
@pytest.mark.full  # the tests below cover logins in a header and in a query
def test_a_run_from_a_url_with_a_login_leaks_no_secret(web, place, shards):
    web.login = f"me:{PASSWORD}"
    config = write_config(place, shards, steps=2)
    done = trained(config, place / "run", f"data.root={with_login(web)}", ranks=1)
    assert done.returncode == 0, done.stderr
    assert leaks(place, done.stdout, done.stderr) == []
    assert (
        f"root: {json.dumps(web.url.replace('://', '://***@') + '/p')}"
        in (place / "run" / "config.yaml").read_text()
    )
    assert (place / "run" / "report" / "augmented.png").exists(), (
        "the report must use the login, which is no longer in config.yaml"
    )

    refused = run("launch/eval.py", place / "run")
    assert refused.returncode == 2
    assert "was not recorded: give data.root=" in refused.stderr
    evaluated = run("launch/eval.py", place / "run", "--data", with_login(web))
    assert evaluated.returncode == 0, evaluated.stderr
    with Path(os.environ["NETRC"]).open("a") as netrc:
        netrc.write(f"machine 127.0.0.1 login me password {PASSWORD}\n")
    from_netrc = run("launch/eval.py", place / "run")
    assert from_netrc.returncode == 0, from_netrc.stderr
    assert (
        leaks(
            place,
            *(
                text
                for one in (refused, evaluated, from_netrc)
                for text in (one.stdout, one.stderr)
            ),
        )
        == []
    )


@pytest.mark.slow
def test_a_signed_address_in_the_environment_and_another_signature_for_the_same_run(
    web, place, shards, monkeypatch
):
    config = write_config(place, shards, steps=2)
    for number, signature in enumerate((SIGNATURE, f"another-{SIGNATURE}")):
        web.signature = f"X-Amz-Credential=AKIA%2F1&X-Amz-Signature={signature}"
        monkeypatch.setenv("SIGNED_QUERY", web.signature)
        done = trained(
            config,
            place / "run",
            f"data.root={web.url}/p?${{SIGNED_QUERY}}",
            f"checkpoint.keep_last={number + 1}",
        )
        assert done.returncode == 0, done.stderr
        assert leaks(place, done.stdout, done.stderr) == []
    assert (
        f"root: {json.dumps(web.url + '/p?${SIGNED_QUERY}')}"
        in (place / "run" / "config.yaml").read_text()
    )
    done = run("launch/eval.py", place / "run")
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv("SIGNED_QUERY")
    unset = trained(
        config, place / "run", f"data.root={web.url}/p?${{SIGNED_QUERY}}", "model.dept=3"
    )
    assert unset.returncode == 2
    assert "data.root: ${SIGNED_QUERY} not set in the environment: export" in unset.stderr
    assert "unknown key 'model.dept'" in unset.stderr, "all mistakes must be reported together"


def streaming(web: WebServer, name: str = "train-{00000..00002}.tar") -> list[str]:
    command = f'pipe:curl -fsS -H "Authorization: Bearer {HEADER}" {web.url}/p/{name}'
    return [f"stream.urls={command}", "stream.num_samples=24", "loader.num_workers=1"]


@needs("stream")
@pytest.mark.slow
def test_a_run_from_a_command_with_a_header(web, place, shards):
    web.header = "Authorization", f"Bearer {HEADER}"
    config = write_config(place, shards, steps=2)
    done = trained(config, place / "run", *streaming(web))
    assert done.returncode == 0, done.stderr
    again = trained(
        config, place / "run", *(text.replace(HEADER, f"{HEADER}-2") for text in streaming(web))
    )
    assert again.returncode == 0, again.stderr
    printed = run("launch/train.py", "--config", config, "--print-config", *TINY, *streaming(web))
    assert printed.returncode == 0, printed.stderr
    failed = trained(config, place / "failed", *streaming(web, "lost.tar"), ranks=1)
    assert failed.returncode == 1
    assert "the stream was interrupted" in failed.stderr
    assert "Authorization: ***" in failed.stderr
    assert (
        leaks(
            place,
            *(text for one in (done, again, printed, failed) for text in (one.stdout, one.stderr)),
        )
        == []
    )


@pytest.mark.slow
def test_a_rejected_url_under_torchrun_leaks_no_secret(web, place, shards):
    web.login, address = "somebody:else", f"{with_login(web)}?X-Amz-Signature={SIGNATURE}"
    done = trained(
        write_config(place, shards), place / "run", f"data.root={address}", ranks=2, cold=True
    )
    assert done.returncode == 1
    assert "the server answers 401 Unauthorized; the login is wrong or has expired" in done.stderr
    assert "traceback : error: http://127.0.0.1" in done.stderr, "torchrun must report the error"
    assert leaks(place, done.stdout, done.stderr) == []


@pytest.mark.slow
def test_messages_about_mistakes_contain_no_secret(web, place):
    web.login, address = "somebody:else", f"{with_login(web)}?X-Amz-Signature={SIGNATURE}"
    for done in (
        run("launch/eval.py", address, address),
        run("launch/train.py", "--config", address),
        run("launch/train.py", "--config", "x.yaml", "--root", address),
        prepared("data_prep.index", "--outt", address),
        prepared("data_prep.imagefolder", address, "--out", address),
        prepared("data_prep.verify", address),
        prepared("vit.data.warm", address.replace("http", "htp")),
    ):
        assert done.returncode == 2
        assert "error: " in done.stderr
        assert leaks(place, done.stdout, done.stderr) == []


@pytest.mark.slow
def test_an_index_of_shards_at_an_address_with_a_login(web, place):
    web.login = f"me:{PASSWORD}"
    web.signature = f"X-Amz-Credential=AKIA&X-Amz-Signature={SIGNATURE}"
    tars = [
        f"{with_login(web, '/p')}/{name}.tar?{web.signature}"
        for name in ("train-{00000..00002}", "val-{00000..00001}")
    ]
    done = prepared("data_prep.index", *tars, "--out", place / "index")
    assert done.returncode == 0, done.stderr
    assert json.loads((place / "index" / "_info.json").read_text())["shards_at"] == f"{web.url}/p"
    again = prepared(
        "data_prep.index",
        *(tar.replace(SIGNATURE, f"{SIGNATURE}2") for tar in tars),
        "--out",
        place / "index",
    )
    assert "the server answers 403 Forbidden; the login is wrong or has expired" in again.stderr, (
        "a different signature must not count as a different dataset"
    )
    assert leaks(place, *(text for one in (done, again) for text in (one.stdout, one.stderr))) == []

    web.signature = ""
    with Path(os.environ["NETRC"]).open("a") as netrc:
        netrc.write(f"machine 127.0.0.1 login me password {PASSWORD}\n")
    trains = trained(write_config(place, place / "index", steps=2), place / "run")
    assert trains.returncode == 0, trains.stderr
    assert leaks(place, trains.stdout, trains.stderr) == []


def prepared(module: str, *arguments: object):
    return call([warm_python.python(environment()), "-m", module, *map(str, arguments)])
