"""Test how URLs with login data are displayed and requested, and which server receives which login
data."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
from servers import WebServer

from vit.data.storage.http import WebFile
from vit.system import redact, urls
from vit.system.files import ShardError
from vit.system.retry import RetryPolicy

SIGNED = "https://bucket.s3.amazonaws.com/p/train-{0..9}.tar?X-Amz-Credential=AKIA%2F20260101&X-Amz-Signature=0a1b2c3d4e5f"


@pytest.fixture(autouse=True)
def nobody_logs_in(monkeypatch, tmp_path):
    for name in ("VIT_HTTP_HEADER", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(redact, "_known", {})
    monkeypatch.setattr(urls, "_lost_login", set())


def test_hides_secrets_in_a_text():
    for text, expected in {
        "https://user:p%40ss@host:8080/p/{0..9}.tar?sv=1&sig=x%3D": (
            "https://***@host:8080/p/{0..9}.tar?***"
        ),
        SIGNED: "https://bucket.s3.amazonaws.com/p/train-{0..9}.tar?***",
        "https://p@ss:w@rd@host/x": "https://***@host/x",
        "https://user:p/w@host/x": "https://***@host/x",
        "http:/user:pw@host/x?Signature=abc: no such file": "http:/***@host/x?***: no such file",
        "/x?Signature=abc: no such file": "/x?Signature=***: no such file",
        "s3://key:secret@bucket/x::https://token@host": "s3://***@bucket/x::https://***@host",
        '{"root": "https://u:p@h/x?y=z", "n": 1}': '{"root": "https://***@h/x?***", "n": 1}',
        "exceeded with url: /a.tar?X-Amz-Signature=abc (Caused by": (
            "exceeded with url: /a.tar?X-Amz-Signature=*** (Caused by"
        ),
        "no such file (https://h/a.tar?sig=abc); see https://h/b?c=d.": (
            "no such file (https://h/a.tar?***); see https://h/b?***."
        ),
        """pipe:curl -H "Authorization: Bearer abc" https://h/a""": (
            """pipe:curl -H "Authorization: ***" https://h/a"""
        ),
        """pipe:curl -H 'X-Api-Key: abc' https://h/a""": (
            """pipe:curl -H 'X-Api-Key: ***' https://h/a"""
        ),
        "pipe:curl -H Authorization:abc https://h/a": "pipe:curl -H Authorization:*** https://h/a",
        r"curl -H Authorization:\ Bearer\ abc https://h/a": (
            r"curl -H Authorization:\ Bearer\ *** https://h/a"
        ),
        "{'Authorization': 'Basic YWJj'}": "{'Authorization': '***'}",
        "pipe:curl -u me:pw https://h/a": "pipe:curl -u *** https://h/a",
        "pipe:curl --user=me:pw --cookie 'a=b' https://h/a": (
            "pipe:curl --user=*** --cookie *** https://h/a"
        ),
        "pipe:AWS_SECRET_ACCESS_KEY=abc aws s3 cp s3://b/a -": (
            "pipe:AWS_SECRET_ACCESS_KEY=*** aws s3 cp s3://b/a -"
        ),
        "pipe:gsutil -o Credentials:gs_secret_access_key=abc cat gs://b/a m.class_token=1": (
            "pipe:gsutil -o Credentials:gs_secret_access_key=*** cat gs://b/a m.class_token=1"
        ),
    }.items():
        assert redact.shown(text) == expected
        assert redact.shown(expected) == expected, (
            "hiding secrets twice must equal hiding them once"
        )
        as_json = json.dumps(text)
        assert redact.shown(as_json) == json.dumps(expected), "secrets must be hidden inside JSON"


def test_keeps_text_that_is_not_a_secret():
    for text in (
        "https://host:8080/a@b/c.tar",
        "http://[::1]:8000/x",
        "/data/imagenet",
        "model.num_tokens=196 token: 5",
        "did you mean optim.lr?",
        "https://${NAME}:${PASSWORD}@host/a?sig=${SAS}",
        'pipe:curl -H "Authorization: Bearer $TOKEN" https://h/a',
        "data.root=s3://a/b",
        "python -u launch/train.py --config a.yaml data.root=/x",
        "step 604800: loss 1.5, 3 keys",
        "see https://docs.x.org/page?)",
    ):
        assert redact.shown(text) == text


def test_never_shows_a_secret_that_was_used(monkeypatch):
    urls.resolve("https://me:pass%2Fword@host/x?sig=abcdefghijklmnop")
    encoded = base64.b64encode(b"me:pass/word").decode()
    assert redact.shown(f"pass/word pass%2Fword abcdefghijklmnop {encoded}") == "*** *** *** ***"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUt/nFEMI")
    assert (
        redact.shown("signed by wJalrXUt/nFEMI, wJalrXUt%2FnFEMI")
        == "signed by ${AWS_SECRET_ACCESS_KEY}, ${AWS_SECRET_ACCESS_KEY}"
    )


def test_names_of_variables_become_their_values(monkeypatch):
    monkeypatch.setenv("SAS", "sig=1")
    monkeypatch.delenv("LOST", raising=False)
    assert (
        urls.resolve("https://host/${SAS}/x?${SAS}::/data/$${SAS}")
        == "https://host/sig=1/x?sig=1::/data/${SAS}"
    )
    assert (
        urls.resolve("pipe:for f in a b; do cat ${f}; done")
        == "pipe:for f in a b; do cat ${f}; done"
    ), "the shell's own variables must not change"
    assert (
        urls.resolve("https://***@host/a?***::https://host/b") == "https://host/a::https://host/b"
    ), "the placeholders in a recorded URL must be removed"
    with pytest.raises(ShardError, match="the login was not recorded: repeat the command"):
        urls.resolve("pipe:curl -u *** https://host/a")
    with pytest.raises(ShardError, match=r"\$\{LOST\}, \$\{GONE\} not set in the environment"):
        urls.resolve("https://${LOST}:${SAS}@${GONE}/${LOST}")


def test_a_dataset_has_the_same_name_with_any_login():
    assert urls.bare(SIGNED) == urls.bare(redact.shown(SIGNED)) == urls.bare(f"{SIGNED}9")
    assert urls.bare("https://me:pw@host/x?a=b") == "https://host/x"


def test_requests_omit_userinfo_and_append_the_signature():
    assert (
        urls.address("https://me:pw@host:81/a/b/?sig=1%3D", "train-0.tar")
        == "https://host:81/a/b/train-0.tar?sig=1%3D"
    )
    assert urls.address("https://host/a.tar?x=1") == "https://host/a.tar?x=1"


def basic(login: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}


def test_the_first_login_found_for_a_host_is_used(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text(
        "machine host login net password rc-secret\nmachine host:81 login other password"
        " port-secret\n"
    )
    assert urls.credentials("https://host/x") == basic("net:rc-secret")
    assert urls.credentials("https://host:81/x") == basic("other:port-secret")
    monkeypatch.setenv(
        "VIT_HTTP_HEADER", "host Authorization: Bearer abcdef\n*.host X-Key: ghijkl\n"
    )
    assert urls.credentials("https://host/x") == {"Authorization": "Bearer abcdef"}
    assert urls.credentials("https://a.host/x") == {"X-Key": "ghijkl"}
    assert urls.credentials("https://me:p%40w@host/x") == basic("me:p@w")
    assert "rc-secret" not in redact.shown("net:rc-secret")
    assert "ghijkl" not in redact.shown("X ghijkl")


def test_no_other_host_gets_a_login(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text(
        "machine host login net password rc-secret\ndefault login any password thing\n"
    )
    monkeypatch.setenv("VIT_HTTP_HEADER", "data.host Authorization: Bearer abc")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    for url in (
        "https://evil/x",
        "https://host.evil/x",
        "https://data.host.evil/x",
        "https://huggingface.co.evil/x",
        "http://huggingface.co/x",
    ):
        assert urls.credentials(url) == {}, url
    assert urls.credentials("https://huggingface.co/datasets/x") == {
        "Authorization": "Bearer hf_abc"
    }


def test_reports_an_unreadable_login_without_printing_it(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_HTTP_HEADER", "Authorization: Bearer topsecret")
    with pytest.raises(
        ShardError, match="expected lines with a host, a header and its value"
    ) as caught:
        urls.credentials("https://host/x")
    assert "topsecret" not in str(caught.value)
    monkeypatch.delenv("VIT_HTTP_HEADER")
    (tmp_path / "netrc").write_text("machine host\nlogin me passwort topsecret\n")
    with pytest.raises(ShardError, match=r"netrc: cannot be read \(line 2") as caught:
        urls.credentials("https://host/x")
    assert "topsecret" not in str(caught.value)


def test_warns_once_of_a_login_in_plain_text(caplog):
    for _ in range(2):
        urls.credentials("http://me:pw@plain.example.org/x")
        urls.credentials("http://me:pw@localhost:80/x")
    assert [record.getMessage() for record in caplog.records] == [
        "http://plain.example.org: the login is sent without encryption; use https://"
    ]


def test_explains_how_to_give_a_server_a_login():
    assert "was not recorded: give data.root=..." in urls.login_hint(
        urls.resolve("https://***@recorded/x")
    )
    assert "is wrong or has expired" in urls.login_hint("https://me:pw@localhost/x")
    assert "VIT_HTTP_HEADER='host Authorization: Bearer ...' (docs/data.md)" in urls.login_hint(
        "https://host/x"
    )


@pytest.mark.parametrize("kind", ["address", "header", ".netrc"])
def test_a_login_stays_with_its_server_when_it_redirects(kind, monkeypatch, tmp_path):
    with WebServer({"/q/a": b"here"}) as first, WebServer({"/b": b"there"}) as second:
        first.redirects = {"/p/a": "/q/a", "/p/b": f"{second.url}/b"}
        host = first.url.removeprefix("http://")
        url = f"{first.url}/p"
        if kind == "header":
            first.header = "X-Key", "tok-5ecr3t"
            monkeypatch.setenv("VIT_HTTP_HEADER", f"{host} X-Key: tok-5ecr3t")
        else:
            first.login = "me:pa55word"
        if kind == ".netrc":
            (tmp_path / "netrc").write_text(f"machine {host} login me password pa55word\n")
        elif kind == "address":
            url = url.replace("://", "://me:pa55word@")
        for name, content in (("a", b"here"), ("b", b"there")):
            with WebFile(url, name, RetryPolicy(0)) as file:
                assert file.read1() == content
        assert first.headers
        assert not {"Authorization", "X-Key"} & second.headers[0].keys()


def test_a_secret_is_hidden_in_all_output_of_a_process():
    program = """
import logging, sys, threading, warnings
from vit.system import redact, urls
redact.guard_console()
redact.guard_console()
print("out https://me:pw@host/x?sig=1")
logging.getLogger("urllib3").warning("Retrying: /x?Signature=abc of https://me:pw@host/x")
warnings.warn("https://me:pw@host/x")
def fail(): raise ValueError("https://me:pw@host/x?sig=1")
thread = threading.Thread(target=fail); thread.start(); thread.join()
sys.stdout.flush()
fail()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "out https://***@host/x?***\n"
    assert "Retrying: /x?Signature=*** of https://***@host/x" in done.stderr
    assert done.stderr.count("ValueError: https://***@host/x?***") == 2
    assert "pw@" not in done.stderr
