"""Test `launch/export.py --to hub`. huggingface_hub uploads the model to a local hub, and the model
is then loaded from there."""

from __future__ import annotations

import json
import re
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from error_rows import Row, pattern_of, rows
from extras.export.test_export import ORIGIN, VIEWS, own_logits, photo, subject_of
from huggingface_hub import ModelCard
from PIL import Image
from processes import call, environment, run, train, write_config
from servers import HubServer
from transformers import AutoModelForImageClassification

from vit.config.io import from_dict
from vit.extras.export.export import export
from vit.inference.predictor import load
from vit.weights.files import read_weights

ROWS = rows("Exports to the Hugging Face hub")
NAME = "someone/digits"
TOKEN = "hf_aSecretThatNobodyMayRead"
FILES = {"README.md", "app.py", "config.json", "model.safetensors", "requirements.txt"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(write_config(folder, shards), folder / "run")
    return folder / "run"


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    """Return a run folder without earlier exports."""
    return Path(subprocess.check_call(["cp", "-r", trained, tmp_path]) or tmp_path / "run")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[HubServer]:
    with HubServer({}) as server:
        server.writers = {TOKEN: "someone", "hf_readOnlyToken": ""}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


def push(run_dir: Path, name: str = NAME):
    return run("launch/export.py", run_dir, "--to", "hub", name)


@pytest.mark.slow
def test_the_pushed_repository_gives_the_logits_of_the_run(hub, run_dir):
    (run_dir / "report").mkdir(exist_ok=True)
    for name in ("curves", "confused"):
        Image.new("RGB", (8, 8)).save(run_dir / "report" / f"{name}.png")
    done = push(run_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"pushed to {hub.url}/{NAME}\n")
    pushed = dict(hub.repositories[NAME])
    assert {*pushed} == {".gitattributes", *FILES, "curves.png"}, "confused.png shows photos"
    assert pushed.items() >= contents(run_dir / "export" / "hub").items()
    assert not [name for name, data in pushed.items() if TOKEN.encode() in data]
    assert TOKEN not in done.stdout + done.stderr
    code = f"""
import timm, torch, vit
images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
close = torch.testing.assert_close
with torch.no_grad():
    own = vit.load("{run_dir}")(images)
    close(vit.load("hf-hub:{NAME}")(images), own, rtol=0, atol=0)
    close(timm.create_model("hf-hub:{NAME}", pretrained=True).eval()(images), own)
"""
    guest = AutoModelForImageClassification.from_pretrained(run_dir / "export" / "hub").eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(guest(images).logits, load(run_dir)(images))
    opened = call([warm_python.python(environment()), "-c", code])
    assert opened.returncode == 0, opened.stderr
    assert check_card(pushed["README.md"].decode(), run_dir) == ["curves.png"]


@pytest.mark.slow
def test_the_same_command_updates_the_repository(hub, run_dir):
    for _ in range(2):
        done = push(run_dir)
        assert done.returncode == 0, done.stderr
        assert hub.repositories[NAME].items() >= contents(run_dir / "export" / "hub").items()
    assert {*hub.repositories[NAME]} == {".gitattributes", *FILES}
    assert len(hub.uploads) == 1, "unchanged weights must not be sent again"
    assert sum(path.endswith("/commit/main") for path in hub.requests) == 2


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_card(text: str, run_dir: Path) -> list[str]:
    """Check the front matter with the Hub's own reader, and return the card's pictures."""
    card = ModelCard(text)
    data: Any = card.data
    line = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    line = [each for each in line if each["kind"] == "eval"][-1]
    [result] = data.eval_results
    assert result.metric_type == "accuracy"
    assert result.metric_value == round(line["correct_top1_ema"] / line["num_images"], 6)
    assert result.dataset_name == Path(from_run(run_dir).data.root).name
    assert data.library_name == "timm"
    assert data.pipeline_tag == "image-classification"
    assert data.license is None
    assert f'timm.create_model("hf-hub:{NAME}", pretrained=True)' in card.text
    assert f"hf download {NAME} --local-dir model\n" in card.text
    return re.findall(r"!\[[^]]+\]\((.+?)\)", card.text)


def from_run(run_dir: Path):
    return from_dict(read_weights(run_dir).config, "test")


@pytest.mark.parametrize("view", [*VIEWS, "exif", "gray"])
def test_the_page_gives_our_probabilities(view, tmp_path):
    sections = VIEWS.get(view, VIEWS["center"])
    model = {}
    if view == "gray":
        model = {"in_chans": 1}
        sections = {"data": {"root": "-", "mean": [0.5], "std": [0.5]}}
    if view == "exif":
        sections = sections | {"eval": {**sections["eval"], "apply_exif": True}}
    subject = subject_of(model, **sections)
    photo(tmp_path / "upright.jpg")
    exif = Image.Exif()
    exif[274] = 6
    picture = Image.open(tmp_path / "upright.jpg")
    picture.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    page = page_of(subject, tmp_path)
    shares = page["classify"](str(tmp_path / "photo.jpg"))
    expected = own_logits(subject, tmp_path / "photo.jpg").log_softmax(-1)[0]
    assert list(shares) == [subject.labels[n] for n in expected.argsort(descending=True)]
    actual = torch.tensor([shares[name] for name in subject.labels]).log()
    # torch and Pillow round differently when resizing, so pixel values may differ by one.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.02)


def page_of(subject, tmp_path: Path) -> dict:
    export("timm", subject, replace(ORIGIN, repository=NAME), tmp_path / "page")
    assert {path.name for path in (tmp_path / "page").iterdir()} == FILES
    return runpy.run_path(str(tmp_path / "page" / "app.py"))


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["crane", "fig", "crane"], {"crane (0)", "fig", "crane (2)"}), ([], {"class 0", "class 1"})],
)
def test_the_page_shows_every_class(names, expected, tmp_path):
    subject = replace(subject_of(), class_names=names, num_classes=len(names) or 2)
    subject.model.head = torch.nn.Linear(48, subject.num_classes)
    photo(tmp_path / "photo.jpg")
    shares = page_of(subject, tmp_path)["classify"](tmp_path / "photo.jpg")
    assert shares.keys() == expected
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.slow
def test_gradio_opens_the_page(tmp_path, monkeypatch):
    client = pytest.importorskip("gradio_client")
    subject = subject_of()
    photo(tmp_path / "photo.jpg")
    expected = page_of(subject, tmp_path)["classify"](tmp_path / "photo.jpg")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**environment(), "GRADIO_SERVER_PORT": str(port)}
    with subprocess.Popen([sys.executable, tmp_path / "page" / "app.py"], env=env) as server:
        try:
            while not answers(f"http://127.0.0.1:{port}"):
                assert server.poll() is None, "app.py ended"
                time.sleep(0.2)
            page = client.Client(f"http://127.0.0.1:{port}", verbose=False)
            shown = page.predict(client.handle_file(tmp_path / "photo.jpg"), api_name="/classify")
        finally:
            server.terminate()
    assert {row["label"]: row["confidence"] for row in shown["confidences"]} == expected


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url).status == 200
    except OSError:
        return False


def test_an_export_replaces_only_an_earlier_one(tmp_path):
    subject = subject_of()
    folder = tmp_path / "hub"
    export("timm", subject, ORIGIN, folder)
    (folder / "old.png").touch()
    export("timm", subject, replace(ORIGIN, repository=NAME), folder, replaces=True)
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["hub"], "the earlier folder must be gone"


def no_repository(hub, run_dir, monkeypatch):
    return run("launch/export.py", run_dir, "--to", "hub")


def invalid_name(hub, run_dir, monkeypatch):
    return push(run_dir, "someone/my--model")


def name_without_hub(hub, run_dir, monkeypatch):
    return run("launch/export.py", run_dir, "--to", "timm", NAME)


def not_logged_in(hub, run_dir, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    return push(run_dir)


def reader(hub, run_dir, monkeypatch):
    hub.repositories[NAME] = {"app.py": b""}
    monkeypatch.setenv("HF_TOKEN", "hf_readOnlyToken")
    return push(run_dir)


def another_model(hub, run_dir, monkeypatch):
    hub.repositories[NAME] = {"config.json": b"{}"}
    return push(run_dir)


def no_network(hub, run_dir, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return push(run_dir)


def full(hub, run_dir, monkeypatch):
    """The login is stored in a file, and the server's answer contains the login."""
    hub.refused["/commit/main"] = 413
    monkeypatch.delenv("HF_TOKEN")
    cache = run_dir.parent / "cache"
    cache.mkdir()
    (cache / "token").write_text(TOKEN)
    done = push(run_dir)
    assert "not for the login ***" in done.stderr
    return done


def no_library(hub, run_dir, monkeypatch):
    (run_dir / "huggingface_hub").mkdir()
    (run_dir / "huggingface_hub" / "__init__.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(run_dir))
    return run("launch/export.py", run_dir, "--to", "hub", NAME, cold=True)


MISTAKES = {
    "no name of a repository": no_repository,
    "a name that the hub does not allow": invalid_name,
    "a repository for another program": name_without_hub,
    "no login, or an invalid token": not_logged_in,
    "a token that may only read, or an owner of somebody else": reader,
    "a repository with another model": another_model,
    "no network to upload": no_network,
    "an upload that the hub refuses": full,
    "huggingface_hub is not installed": no_library,
}


@pytest.mark.slow
@pytest.mark.parametrize("row", [row.case() for row in ROWS])
def test_the_mistake_leaves_a_complete_folder_or_none(row: Row, hub, run_dir, monkeypatch):
    done = MISTAKES[row.what](hub, run_dir, monkeypatch)
    assert done.returncode == row.status, done.stderr
    assert re.search(f"(?m)^{pattern_of(row.printed)}\\s*\\Z", done.stderr), done.stderr
    assert len(re.findall(r"(?m)^error: ", done.stderr)) == 1
    assert TOKEN not in done.stdout + done.stderr
    folder = run_dir / "export" / "hub"
    assert "README.md" not in hub.repositories.get(NAME, {}), "half of a push is visible"
    if "is complete" not in row.printed:
        assert not folder.parent.exists()
        return
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["hub"]
    if command := re.search(r"run `(hf upload .*)`", done.stderr):
        check_later_upload(command[1], hub, folder, monkeypatch)


def check_later_upload(command: str, hub: HubServer, folder: Path, monkeypatch) -> None:
    """Run the command that the message gave, after the mistake was corrected."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refused.clear()
    later = call([str(Path(sys.executable).parent / "hf"), *command.split()[1:]])
    assert later.returncode == 0, later.stderr
    assert hub.repositories[NAME].items() >= contents(folder).items()


def test_every_mistake_has_a_row():
    assert [row.what for row in ROWS] == list(MISTAKES)
