"""Test that huggingface_hub's client fetches weights by name from a local hub.

The logits must match those of timm and transformers, which fetch the same weights from the local
hub.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
import transformers
import warm_python
from error_rows import Row, pattern_of, rows
from extras.deleted_extras import needs
from PIL import Image
from processes import TINY, call, environment, metrics, run
from servers import HubServer
from timm.models import save_for_hf

from vit.checkpoint.checkpoint import newest_checkpoint

ROWS = rows("Names of the Hugging Face hub")
PICKLED = "someone/pickled"
OTHER = "someone/vit"
GATED = "someone/gated"
NAME = "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"
"""The Hub repository with the weights from which configs/photos.yaml starts. The local hub serves a
small model under this name."""
SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def small_repository(folder: Path) -> dict[str, bytes]:
    """Return the files that timm uploads to the Hub, including a file with pickled weights."""
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", num_classes=3, **SIZES).eval()
    torch.nn.init.normal_(model.head.weight)
    save_for_hf(model, folder, model_args=SIZES, safe_serialization="both")
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("repositories")
    files = small_repository(folder / "timm")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "image_size": 16, "patch_size": 8, "num_labels": 3}
    torch.manual_seed(0)
    config = transformers.ViTConfig(**sizes, layer_norm_eps=1e-6)
    transformers.ViTForImageClassification(config).save_pretrained(folder / "vit")
    return {
        NAME: files,
        GATED: files,
        PICKLED: {name: data for name, data in files.items() if name != "model.safetensors"},
        OTHER: contents(folder / "vit"),
    }


@pytest.fixture
def hub(repositories, tmp_path, monkeypatch) -> Iterator[HubServer]:
    """Start a local hub, store its address in the environment, and use an empty cache."""
    with HubServer(repositories) as server:
        server.licenses[NAME] = "apache-2.0"
        server.gated.add(GATED)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


@pytest.fixture
def photo(tmp_path) -> Path:
    Image.effect_mandelbrot((40, 30), (-2, -1, 1, 1), 50).convert("RGB").save(tmp_path / "a.png")
    return tmp_path / "a.png"


def python(code: str) -> str:
    done = call([warm_python.python(environment()), "-c", code])
    assert done.returncode == 0, done.stderr
    return done.stdout


def predict(name: str, photo: Path):
    return run("launch/predict.py", "--checkpoint", name, photo)


@pytest.mark.slow
def test_logits_equal_those_of_timm_and_transformers_for_the_same_names(hub):
    code = f"""
import timm, torch, vit
from transformers import ViTForImageClassification
images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    theirs = timm.create_model("hf-hub:{NAME}", pretrained=True).eval()(images)
    for name in ("{NAME}", "hf-hub:{NAME}", "hf_hub:{NAME}@{hub.commit_of(NAME)}"):
        torch.testing.assert_close(vit.load(name)(images), theirs, rtol=0, atol=0)
    theirs = ViTForImageClassification.from_pretrained("{OTHER}").eval()(images).logits
    torch.testing.assert_close(vit.load("hf-hub:{OTHER}")(images), theirs)
print(vit.load("{NAME}").weights.source)
"""
    expected = {"repository": NAME, "commit": hub.commit_of(NAME), "license": "apache-2.0"}
    assert python(code) == f"{expected}\n"


@needs("export")
@pytest.mark.full
def test_two_ranks_fetch_once_and_the_run_and_its_card_name_the_source(
    hub, shards, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    line = ["--config", "configs/photos.yaml", *TINY, f"data.root={shards}", f"run.dir={run_dir}"]
    line += ["data.global_batch_size=12", "schedule.warmup_epochs=0", "train.epochs=1"]
    done = run("launch/train.py", *line, ranks=2)
    assert done.returncode == 0, done.stderr
    assert hub.downloads.count("model.safetensors") == 1
    source = {"repository": NAME, "commit": hub.commit_of(NAME), "license": "apache-2.0"}
    assert f"{NAME} on the Hugging Face hub, commit {source['commit'][:12]}, license" in done.stderr
    assert metrics(run_dir, "start")[-1]["init_source"] == source
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None
    assert checkpoint[1]["facts"]["init_source"] == source

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.rmtree(tmp_path / "cache")
    longer = ["--allow-change", "train.epochs", "--", "train.epochs=2"]
    resumed = run("launch/train.py", *line, *longer)
    assert resumed.returncode == 0, resumed.stderr
    assert metrics(run_dir, "start")[-1]["init_source"] == source
    exported = run("launch/export.py", run_dir, "--to", "timm", "--out", tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"base_model: {NAME}\n" in card
    assert "license:" not in card, (
        "the card must contain no license, which only the run's owner can choose"
    )
    assert f"| Started from | {NAME} on the Hugging Face hub, commit" in card


@needs("export")
@pytest.mark.slow
def test_commands_accept_names_and_work_offline_from_the_cache(
    hub, shards, photo, tmp_path, monkeypatch
):
    evaluated = run("launch/eval.py", NAME, "--data", shards, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["num_images"] == 23
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    predicted = predict(NAME, photo)
    assert predicted.returncode == 0, predicted.stderr
    assert "license not stated" in predicted.stderr
    monkeypatch.delenv("HF_HUB_OFFLINE")
    exported = run("launch/export.py", NAME, "--to", "npz", "--out", tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"base_model: {NAME}\nlicense: apache-2.0\n---\n# {NAME}\n" in card
    assert f"| From | {NAME} on the Hugging Face hub, commit" in card
    assert sorted(hub.downloads) == ["config.json", "model.safetensors"]
    assert not [path for path in hub.requests if path.endswith(".bin")]


@pytest.mark.slow
def test_a_local_folder_takes_precedence_over_the_hub(hub, photo, repositories, tmp_path):
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    for name, data in repositories[NAME].items():
        (folder / name).write_bytes(data)
    done = run("launch/predict.py", "--checkpoint", NAME, photo, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not hub.requests


NAMES = {
    "no network, or `HF_HUB_OFFLINE`": NAME,
    "a name that the hub does not have": "timm/vit_tiny_patch16_224",
    "a revision that the repository does not have": f"hf-hub:{OTHER}@v9",
    "a repository whose terms the user has not accepted": f"hf-hub:{GATED}",
    "a repository with pickled weights only": f"hf-hub:{PICKLED}",
    "no name of the hub": "hf-hub:vit",
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_the_command_prints_the_error_of_the_row(row: Row, hub, photo, monkeypatch):
    if row.what.startswith("no network"):
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = run("launch/predict.py", "--checkpoint", NAMES[row.what], photo)
    assert done.returncode == row.status, done.stderr
    assert re.search(f"(?m)^{pattern_of(row.printed)}\\s*\\Z", done.stderr), done.stderr
    assert len(re.findall(r"(?m)^error: ", done.stderr)) == 1
    assert not [path for path in hub.requests if path.endswith(".bin")]


def test_every_error_has_a_row():
    assert [row.what for row in ROWS] == list(NAMES)
