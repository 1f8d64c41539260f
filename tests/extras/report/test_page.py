"""Test that the report of any run is one self-contained page that agrees with the run's metrics."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from extras.report.browser import console_of, faults_in, needs_chromium
from PIL import Image
from processes import REPOSITORY, TINY, Background, metrics, run, train, write_config

from vit.config.hints import all_keys
from vit.config.io import load_config
from vit.data.augment.apply import Augment
from vit.data.batches import ImageFormat, TrainBatches
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.storage.opening import open_split
from vit.extras.report import facts, model_figures
from vit.extras.report.example_images import pick_images
from vit.extras.report.page import make_report, write_page
from vit.extras.report.pictures import PAINTERS, Pictures, draw_pictures
from vit.run_folder.lock import is_in_use
from vit.run_folder.paths import mark_stopped
from vit.training.metrics import interval95

CPU = torch.device("cpu")
HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"'><img src=http://evil.example/x onerror=alert(1)>",
    "{{ 7 * 191 }} & <b>bold</b> é",
]
PARTS = ("vit", "data_prep", "launch", "benchmarks", "docs")


class Page(HTMLParser):
    """A parsed HTML page with its text, its scripts, and its tags with their attributes."""

    def __init__(self, path: Path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.code: list[str] = []
        self.feed(self.html)
        self.close()
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data):
        self.words.append(data)
        if self.tags[-1:] and self.tags[-1][0] == "code":
            self.code.append(data)

    def attributes(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def values(self) -> list[str]:
        """Return the exact numbers from the <data> tags, because the displayed text is rounded."""
        return [attributes["value"] for attributes in self.attributes("data")]


def check_self_contained(page: Page) -> list[Image.Image]:
    """Assert that the page loads no external resources and runs only its own script. Return the
    page's images."""
    pictures = []
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "audio", "video"), (
            tag
        )
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            place = f"<{tag} {name}={value[:80]}>"
            if name in (
                "src",
                "href",
                "xlink:href",
                "srcset",
                "action",
                "data",
                "poster",
                "background",
            ):
                is_picture = tag == "img" and value.startswith("data:image/png;base64,")
                assert value.startswith("#") or is_picture or value == "mistakes.csv", place
            # Browsers never load namespaces, and only display the text of the other attributes.
            if name not in ("xmlns", "xmlns:xlink", "alt", "aria-label", "title"):
                assert not re.search("https?:|javascript:", value), place
    for attributes in page.attributes("img"):
        with Image.open(
            io.BytesIO(base64.b64decode(attributes["src"].partition(",")[2], validate=True))
        ) as image:
            image.load()
            assert image.format == "PNG"
            pictures.append(image)
    assert len(page.attributes("script")) == 1
    assert "@import" not in page.html
    assert set(re.findall(r"url\((.)", page.html)) <= {"#"}
    return pictures


def report_of(run_dir: Path) -> Page:
    """Write the report with the real command, and return the parsed page."""
    done = run("launch/report.py", run_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(run_dir / "report" / "index.html")
    return Page(run_dir / "report" / "index.html")


@pytest.fixture(scope="module")
def hostile(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile") / "shards"
    shutil.copytree(shards, root)
    info = json.loads((root / "_info.json").read_text())
    (root / "_info.json").write_text(json.dumps({**info, "class_names": HOSTILE}))
    return root


@pytest.fixture(scope="module")
def finished(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """Return a run that was started again after it had finished, and its report page."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, hostile, batch=48, steps=12)
    run_dir = folder / "a run <i>&amp; more"
    for _ in range(2):
        # The learning rate is far too high, so the model makes mistakes.
        more = ("log.norms_every_steps=5", "schedule.final_weight_decay=0.4")
        train(config, run_dir, "optim.lr=0.5", *more, ranks=0)
    return run_dir, report_of(run_dir)


def remade(run_dir: Path) -> Page:
    """Write the report in this process, and return the parsed page."""
    return Page(make_report(run_dir, CPU).page)


def copied(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to / "run", ignore=shutil.ignore_patterns("report"))
    return to / "run"


def set_key(run_dir: Path, key: str, value: str) -> None:
    path = run_dir / "config.yaml"
    path.write_text(
        re.sub(
            rf"^  {key}: .*$", lambda _: f"  {key}: {value}", path.read_text(), flags=re.MULTILINE
        )
    )


def test_one_file_holds_everything(finished):
    run_dir, page = finished
    pictures = check_self_contained(page)
    assert {path.stem for path in (run_dir / "report").glob("*.png")} == set(PAINTERS)
    assert len(pictures) == len(PAINTERS) - 1
    assert len(page.attributes("svg")) == 4, "each panel of the curves is an SVG element"
    assert [line["step"] for line in metrics(run_dir, "norms")] == [5, 10, 12]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"] for attributes in page.attributes("a")}
    assert "mistakes.csv" in targets
    assert {target[1:] for target in targets - {"mistakes.csv"}} <= set(ids)
    assert len(page.html) < 3e6


def test_the_table_of_mistakes_has_each_wrong_image_once(finished, hostile):
    run_dir, _ = finished
    with (run_dir / "report" / "mistakes.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    saved = np.load(run_dir / "predictions.npz")
    split = open_split(hostile, "val")
    expected = {
        (split.key(image), HOSTILE[label], HOSTILE[predicted])
        for image, (label, predicted) in enumerate(
            zip(saved["labels"], saved["predictions"], strict=True)
        )
        if label != predicted
    }
    assert expected
    assert len(rows) == len(expected)
    assert {(row["file"], row["true"], row["predicted"]) for row in rows} == expected
    shares = [float(row["probability"]) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert 1 / 3 <= min(shares) <= max(shares) <= 1


def test_the_numbers_equal_those_of_the_record(finished):
    run_dir, page = finished
    evaluations = metrics(run_dir, "eval")
    assert len(evaluations) == 2
    for line in evaluations:
        for name in ("top1", "loss", "top1_ema", "loss_ema"):
            assert repr(line[name]) in page.values(), name
    assert "top-5" not in page.text
    best = max(max(line["top1"], line["top1_ema"]) for line in evaluations)
    last = evaluations[-1]
    right = f"{last['correct_top1_ema']} of 23 images"
    assert f"Top-1, at the end {last['top1_ema']:.2f} % {right}" in page.text
    assert f"Top-1, best {best:.2f} %" in page.text
    low, high = interval95(last["correct_top1_ema"], 23)
    assert (
        f"{last['correct_top1_ema']} of 23 images; 95 % interval {low:.1f} to {high:.1f}"
        in page.text
    )
    assert "Finished at step 12 of 12." in page.text
    assert "576 images" in page.text


def test_every_restart_is_reported(finished):
    run_dir, page = finished
    starts = metrics(run_dir, "start")
    assert [line["restarts"] for line in starts] == [0, 1]
    attempts = page.text.partition("Attempts")[2].partition("Faults")[0]
    assert attempts.count("finished") == 2
    assert "0 – 12" in attempts
    assert "12 – 12" in attempts
    for line in starts:
        for key in ("command", "git", "python", "torch", "host"):
            assert line[key] in page.text, key


def test_every_setting_is_listed_and_changed_settings_come_first(finished):
    run_dir, page = finished
    config = load_config(run_dir / "config.yaml")
    keys = [
        f"{section}.{key}"
        for section in type(config).model_fields
        for key in type(getattr(config, section)).model_fields
    ]
    assert set(keys) <= set(page.code)
    assert set(keys) <= set(all_keys())
    first = page.html.partition("Different from the defaults")[2].partition("All settings")[0]
    for key in ("model.embed_dim", "data.root", "ema.decay", "augment.mixup_alpha", "run.dir"):
        assert f"<code>{key}</code>" in first, key
    for key in ("optim.eps", "augment.hflip_prob", "train.seed"):
        assert f"<code>{key}</code>" not in first, key


def test_hostile_names_are_escaped(finished):
    _, page = finished
    for name in HOSTILE:
        assert re.sub(r"\s+", " ", name) in page.text
    assert "1337" not in page.text
    assert "a run <i>&amp; more" in page.text
    # The folder's name contains <i>, which must be escaped. Only the bars of the report may be <i>
    # elements.
    assert not page.attributes("i") or all(
        "style" in attributes for attributes in page.attributes("i")
    )
    assert not page.attributes("b") or HOSTILE[2] not in page.html


def test_the_shown_augmented_images_equal_those_of_training(finished, monkeypatch, tmp_path):
    """The report decodes only a part of the batch. The expected images come from the whole batch on
    one rank."""
    run_dir, _ = finished
    seen = {}
    monkeypatch.setattr(
        model_figures,
        "plot_augmented",
        lambda inputs, targets, **rest: seen.update(inputs=inputs, targets=targets),
    )
    draw_pictures(copied(run_dir, tmp_path), CPU)
    config = load_config(run_dir / "config.yaml")
    split = open_split(config.data.root, "train")
    order = make_order(split.num_samples, 48, config.train.seed)
    batch = next(
        Loader(
            TrainBatches(split, order, config.augment, ImageFormat((16, 16), 3, "bilinear")), 0, 1
        )
    )
    inputs, targets = Augment(config.augment, 3, config.data.mean, config.data.std, CPU)(
        batch.images, batch.labels, batch.table
    )
    assert seen["inputs"].shape == (24, 3, 16, 16)
    assert torch.equal(seen["inputs"], inputs[:24])
    assert torch.equal(seen["targets"], targets[:24])
    assert (targets[:24].max(1).values < 0.99).any(), (
        "the config must mix images, or the test proves less"
    )


def test_tables_for_loggers_are_right_and_drawing_keeps_the_random_state(finished, tmp_path):
    run_dir, _ = finished
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drawn = draw_pictures(copied(run_dir, tmp_path), CPU)
    assert set(drawn.paths) == set(PAINTERS)
    assert torch.equal(torch.rand(3), expected)
    last = metrics(run_dir, "eval")[-1]
    assert [row.name for row in drawn.class_accuracies] == HOSTILE
    assert sum(row.num_images for row in drawn.class_accuracies) == 23
    assert sum(row.correct for row in drawn.class_accuracies) == last["correct_top1_ema"]
    assert sum(pair.num_mistaken for pair in drawn.confused_pairs) == 23 - last["correct_top1_ema"]


def test_without_the_data_the_rest_of_the_page_is_drawn(finished, tmp_path):
    run_dir = copied(finished[0], tmp_path)
    set_key(run_dir, "root", "/nowhere/at/all")
    page = remade(run_dir)
    # The page shows plots of norms, confusion, positions and filters.
    assert len(check_self_contained(page)) == 4
    assert page.text.count("Not drawn. /nowhere/at/all: no such directory") == 5
    # The class names are stored with the weights.
    assert HOSTILE[0] in page.text


def test_a_damaged_prediction_file_and_other_data_are_reported(finished, tmp_path):
    run_dir = copied(finished[0], tmp_path)
    predictions = run_dir / "predictions.npz"
    predictions.write_bytes(predictions.read_bytes()[:100])
    reasons = draw_pictures(run_dir, CPU).reasons
    assert set(reasons) == {"confusion", "confused"}
    assert "predictions.npz is damaged" in reasons["confusion"]
    zeros, ones = np.zeros(7, np.int64), np.ones(7, np.int64)
    np.savez(predictions, predictions=zeros, labels=ones, probabilities=np.ones(7), step=3)
    reasons = draw_pictures(run_dir, CPU).reasons
    assert set(reasons) == {"confused"}
    assert "has changed since the evaluation" in reasons["confused"]


def test_a_run_without_evaluation_has_a_page(config, tmp_path):
    train(config, tmp_path / "run", "train.steps=2")
    page = remade(tmp_path / "run")
    # The page shows no plots of mistakes, and its curves are SVG elements instead of images.
    assert len(check_self_contained(page)) == 6
    assert page.text.count("The run has not been evaluated yet.") == 4
    shutil.rmtree(tmp_path / "run" / "weights")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    reasons = make_report(tmp_path / "run", CPU).pictures.reasons
    assert {reasons[name] for name in ("attention", "positions")} == {
        "The run has not saved any weights yet."
    }
    assert "augmented" not in reasons, "augmented images need no weights"


def test_a_timm_model_without_attention_has_a_page(shards, tmp_path):
    pytest.importorskip("timm")
    config = tmp_path / "guest.yaml"
    config.write_text(
        f"model: {{name: timm/resnet10t, image_size: 32}}\ndata: {{root: {shards},"
        " global_batch_size: 12}\ntrain: {steps: 2}\neval: {every_steps: 2}\n"
    )
    overrides = [setting for setting in TINY if not setting.startswith("model.")]
    assert (
        run(
            "launch/train.py", "--config", config, f"run.dir={tmp_path / 'run'}", *overrides
        ).returncode
        == 0
    )
    page = remade(tmp_path / "run")
    mistaken = metrics(tmp_path / "run", "eval")[-1]["correct_top1"] < 23
    # The page shows augmented images, and a confusion matrix if the model makes mistakes.
    assert len(check_self_contained(page)) == 2 + mistaken
    assert ("No validation image was misclassified." in page.text) is not mistaken
    assert (
        "Not drawn. Attention rollout requires a grid of patches (this model has None)" in page.text
    )
    assert "Not drawn. ResNet has no position embeddings to compare." in page.text


@pytest.mark.full
def test_running_and_killed_runs_have_pages(config, tmp_path):
    run_dir = tmp_path / "run"
    training = Background(
        config, tmp_path / "run", "train.steps=100000", "eval.every_steps=2", ranks=0
    )
    try:
        training.wait_for_step(31)
        assert is_in_use(run_dir) is True
        # Pause training while the report is written.
        training.process.send_signal(signal.SIGSTOP)
        page = report_of(run_dir)
        assert training.process.poll() is None, "the report must not end the run"
    finally:
        training.kill_all()
    check_self_contained(page)
    assert re.search(
        r"running Running, at step \d+ of 100,000; the last line of metrics.jsonl is 0:0\d:\d\d"
        r" old\.",
        page.text,
    )
    assert (
        "All" in page.text.partition("Attention and features")[0].partition("averaged weights")[2]
    ), "many evaluations must be collapsed"
    assert is_in_use(run_dir) is False
    page = report_of(run_dir)
    check_self_contained(page)
    assert re.search(
        r"killed Killed after step \d+ of 100,000; the same command resumes from its newest"
        r" checkpoint\.",
        page.text,
    )


def page_text(folder: Path, *lines: dict | str, in_use: bool | None = None) -> str:
    """Return the text of the page for a run that has only metrics."""
    folder.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(texts))
    page = Page(make_report(folder, CPU, in_use=in_use).page)
    check_self_contained(page)
    return page.text


PLAN = {"total_steps": 90}
START = {
    "kind": "start",
    "step": 0,
    "time": 1e9,
    "restarts": 0,
    "world_size": 2,
    "device": "cpu",
    "git": "one",
    "plan": PLAN,
}
TRAIN = {
    "kind": "train",
    "step": 10,
    "time": 1e9 + 9,
    "loss": 1.0,
    "lr": 0.1,
    "images_per_s": 50.0,
    "data_wait_s": 1.0,
    "elapsed_s": 9.0,
}


def test_the_end_of_each_attempt_is_described(tmp_path):
    again = {**START, "step": 6, "time": 1e9 + 20, "restarts": 1, "git": "two", "world_size": 3}
    failed = {
        "kind": "end",
        "step": 8,
        "time": 1e9 + 30,
        "outcome": "error",
        "reason": "OSError: disk <full>",
    }
    text = page_text(tmp_path / "run", START, TRAIN, again, failed)
    assert "failed Failed at step 8 of 90: OSError: disk <full>" in text
    attempts = text.partition("Attempts")[2].partition("Faults")[0]
    assert (
        "killed 0 – 10 2 on cpu 0:00:09 50 metrics.jsonl ends without an `end` line; 4 steps"
        " repeated by the next attempt" in attempts
    )
    assert "failed 6 – 8 3 on cpu 0:00:10 – OSError: disk <full>" in attempts
    assert "one attempt 1 two attempt 2" in text
    stopped = {"kind": "end", "step": 10, "time": 1e9 + 10, "outcome": "stopped", "elapsed_s": 10.0}
    assert "Stopped at step 10 of 90 and saved" in page_text(
        tmp_path / "run", START, TRAIN, stopped
    )
    mark_stopped(tmp_path / "run", 10, "SIGTERM")
    assert "Stopped by SIGTERM at step 10 of 90" in page_text(
        tmp_path / "run", START, TRAIN, stopped
    )
    for in_use, expected in (
        (True, "Running, at"),
        (False, "Killed after"),
        (None, "Running or killed, at"),
    ):
        assert f"{expected} step 10 of 90" in page_text(
            tmp_path / "run", START, TRAIN, in_use=in_use
        )


def test_faults_are_reported(tmp_path):
    fault = {
        "kind": "fault",
        "step": 7,
        "time": 1e9 + 5,
        "reason": "gradient not finite, update skipped",
        "loss": None,
    }
    (tmp_path / "run" / "checkpoints" / "damaged_step_00000003_17").mkdir(parents=True)
    text = page_text(
        tmp_path / "run", START, fault, {**TRAIN, "updates_skipped": 1, "bad_images": 2}
    )
    assert "1 update skipped" in text
    assert "2 training images could not be decoded" in text
    assert "damaged_step_00000003_17" in text
    assert "gradient not finite, update skipped (loss not finite)" in text
    assert "None. No update was skipped" not in text
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "None. No update was skipped" in page_text(tmp_path / "run", START, TRAIN)


def test_curves_have_the_colors_of_the_page(tmp_path):
    page_text(tmp_path / "run", START, {**TRAIN, "top1": 5.0}, {**TRAIN, "step": 20})
    page = Page(tmp_path / "run" / "report" / "index.html")
    (curves,) = re.findall(r"<svg.*</svg>", page.html, re.DOTALL)
    assert {"var(--card)", "var(--ink)", "var(--blue)"} <= set(re.findall(r"var\(.*?\)", curves))
    assert not re.search(r"#[0-9a-f]{6}\b", curves), "a fixed color is invisible in dark mode"
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:href=\"|url\()#([^\")]+)", page.html)) <= set(ids)
    assert not {"text", "metadata"} & {tag for tag, _ in page.tags}


def test_a_truncated_damaged_or_empty_record_has_a_page(tmp_path):
    cut = page_text(tmp_path / "run", START, TRAIN, '{"kind": "train", "step": 2')
    assert "step 10 of 90" in cut
    assert "cannot be read" not in cut
    damaged = page_text(tmp_path / "run", START, "\x00\x00\n", '{"kind": "tr\n', "[1]\n", TRAIN)
    assert "3 lines of metrics.jsonl cannot be read and are skipped" in damaged
    assert "step 10 of 90" in damaged
    assert (tmp_path / "run" / "report" / "curves.png").is_file()
    assert "metrics.jsonl is still empty." in page_text(tmp_path / "run")
    assert "Running or killed, at step 0 of 90" in page_text(tmp_path / "run", START)


def test_an_invalid_config_is_shown_as_text(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: {nam: <vit>}\n")
    text = page_text(tmp_path / "run", START, TRAIN)
    assert "unknown key 'model.nam'; did you mean model.name?" in text
    assert "model: {nam: <vit>}" in text


def test_a_wrong_or_missing_run_folder_is_an_error_of_one_line(tmp_path):
    for folder in (tmp_path / "no", tmp_path):
        done = run("launch/report.py", folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {folder}: not a run folder: pass a folder")
        assert len(done.stderr.splitlines()) == 1
    done = run("launch/report.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no RUN was given, and runs/ contains none")


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    page_text(tmp_path / "run", START, TRAIN)
    page = tmp_path / "run" / "report" / "index.html"
    page.unlink()
    # Even root cannot replace a folder with a file.
    page.mkdir()
    with pytest.raises(ValueError, match=r"index\.html: cannot be written"):
        write_page(tmp_path / "run", Pictures())
    assert {path.name for path in page.parent.iterdir()} == {"index.html", "curves.png"}


def test_images_are_picked_from_all_classes_deterministically():
    labels = np.repeat(np.arange(10), 20)
    predictions = labels.copy()
    predictions[[3, 25, 26, 27, 28, 29, 190]] += 1
    chosen = pick_images(labels, predictions, 12, 4)
    assert chosen == pick_images(labels, predictions, 12, 4)
    assert len(set(chosen)) == 12
    assert [bool(predictions[n] == labels[n]) for n in chosen] == [True] * 8 + [False] * 4
    assert len({labels[n] for n in chosen[:8]}) == 8
    assert {labels[n] for n in chosen[8:]} == {0, 1, 9}
    assert len({labels[n] for n in pick_images(labels, None, 12, 4)}) == 10
    assert sorted(pick_images(labels[:3], predictions[:3], 12, 4)) == [0, 1, 2]
    assert pick_images(labels[:0], predictions[:0], 12, 4) == []


TROUBLED = [
    START,
    *({**TRAIN, "step": step, "time": 1e9 + step, "loss": 90.0 / step} for step in range(5, 60, 5)),
    *(
        {
            "kind": "eval",
            "step": step,
            "time": 1e9 + step,
            "num_images": 50_000,
            "num_images_ema": 50_000,
            "top1": 70.0 + step / 10,
            "top5": 90.0,
            "correct_top1": 35_000,
            "loss": 1.2345,
            "top1_ema": 71.0,
            "top5_ema": 91.0,
            "correct_top1_ema": 35_500,
            "loss_ema": 1.1,
            "a-long-name-of-an-evaluation-set/top1": 60.0,
        }
        for step in range(4, 60, 4)
    ),
    *(
        {"kind": "fault", "step": step, "time": 1e9 + step, "loss": 99.0, "grad_norm": 1e9}
        for step in range(10, 40, 3)
    ),
    *(
        {"kind": "checkpoint", "step": step, "time": 1e9 + step, "sha256": 16 * "1a2b"}
        for step in range(5, 60, 5)
    ),
    {**START, "step": 55, "time": 1e9 + 70, "restarts": 1, "git": 10 * "a long value "},
]
"""The record of a killed run with many evaluations, skipped updates and checkpoints."""
COUNT_MATCHES = """
const search = document.getElementById("search");
search.value = "label_smoothing"; search.dispatchEvent(new Event("input"));
const rows = [...document.querySelectorAll("#all tr[data-words]")];
const matches = rows.filter((row) => row.getClientRects().length).length;
if (matches !== 1) faults.push(`the search found ${matches} settings instead of one`);
"""


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_the_page_without_faults(finished, tmp_path):
    run_dir, _ = finished
    page = run_dir / "report" / "index.html"
    assert faults_in([page], tmp_path, COUNT_MATCHES) == {"index.html": []}


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_the_page_of_a_troubled_run_without_faults(tmp_path):
    """The page has long tables and long texts, but no pictures and no settings."""
    text = page_text(tmp_path / "run", *TROUBLED)
    assert "10 recorded" in text
    assert "All 13 evaluations" in text
    assert "35,500 of 50,000 images top-5 91.00 %" in text, "no interval for so many images"
    assert "All 11" in text, "many checkpoints must be collapsed"
    page = tmp_path / "run" / "report" / "index.html"
    assert faults_in([page], tmp_path) == {"index.html": []}


@pytest.mark.slow
@needs_chromium
def test_a_browser_runs_no_script_that_was_added_to_the_page(finished, tmp_path):
    foreign = tmp_path / "foreign.html"
    script = "<script>console.log('taken over')</script></body>"
    foreign.write_text(finished[1].html.replace("</body>", script))
    [refused] = console_of(foreign, tmp_path)
    assert "Content Security Policy" in refused


def test_every_kind_of_page_is_opened_in_a_browser():
    """Add a test with `faults_in` for each new template."""
    templates = {path.name for place in PARTS for path in (REPOSITORY / place).rglob("*.html*")}
    assert templates == {"page.html.j2", "samples.html.j2"}
    sources = [path for place in PARTS for path in (REPOSITORY / place).rglob("*.py")]
    assert not [path for path in sources if "<html" in path.read_text(encoding="utf-8")]


def test_the_smaller_loss_decides_between_equal_accuracies():
    row = {"epoch": 1.0, "num_images": 20, "correct_top1": 20, "top5": 100.0, "ece": None}
    names = ("num_images", "top1", "top5", "correct_top1", "loss", "ece", "by_top1", "by_loss")
    row |= {f"{name}_ema": None for name in names}
    rows = [
        row | {"step": step, "top1": top1, "loss": loss, "by_top1": top1, "by_loss": loss}
        for step, top1, loss in ((4, 100.0, 1.35), (8, 100.0, 0.43), (12, 95.0, 0.1))
    ]
    assert facts.headline(rows)["best"]["step"] == 8


def test_picking_images_of_large_classes_ends():
    """An algorithm whose time is quadratic in the size of a class would exceed pytest's limit."""
    labels = np.arange(300_000) % 2
    assert len(pick_images(labels, labels[::-1].copy(), 12, 4)) == 4, (
        "all chosen images must be mistakes"
    )
    assert len(pick_images(labels, labels, 12, 4)) == 12
