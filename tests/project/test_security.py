"""Test the promises in SECURITY.md that affect more than one module.

A shell must never execute a setting as code. File names must not control the terminal. Temporary
paths must be private.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import yaml
from extras.deleted_extras import needs
from PIL import Image
from processes import TINY, environment, write_config

from vit.config.io import load_config
from vit.data.decode.images import decode
from vit.data.shards.index_file import open_index
from vit.extras.report.drawing import drawing
from vit.hooks.sample_losses import read_epoch
from vit.system import host, redact
from vit.system.files import private_folder

ROOT = Path(__file__).parents[2]

# --- no code from files or settings is run --------------------------------------------------------


class Trap:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, sprung: Path):
        self.sprung = sprung

    def __reduce__(self):
        return os.mkdir, (str(self.sprung),)


def objects(trap: Trap) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([trap], dtype=object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("place", ["index", "losses", "predictions"])
def test_arrays_of_objects_are_not_opened(place, tmp_path):
    ReportSource = pytest.importorskip("vit.extras.report.source").ReportSource
    trap = Trap(tmp_path / "sprung")
    path = tmp_path / "predictions.npz"
    path.write_bytes(objects(trap))
    if place == "predictions":
        np.savez(path, predictions=np.array([trap], dtype=object))
    read = {
        "index": lambda: open_index(path),
        "losses": lambda: read_epoch(path, 1, 1),
        "predictions": lambda: ReportSource(tmp_path, None).predictions,
    }
    with pytest.raises(ValueError, match=r"damaged|another format|has no losses"):
        read[place]()
    assert not trap.sprung.exists()
    np.load(io.BytesIO(objects(trap)), allow_pickle=True)
    assert trap.sprung.exists(), "the trap must work, or this test proves nothing"


@pytest.mark.parametrize("source", ["file", "setting"])
def test_a_config_makes_no_objects(source, tmp_path):
    value = f"!!python/object/apply:os.mkdir ['{tmp_path / 'harm'}']"
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {{dir: {value}}}\n" if source == "file" else "model: {}\n")
    with pytest.raises(ValueError, match="python/object"):
        load_config(path, [f"run.dir={value}"] if source == "setting" else [])
    assert not (tmp_path / "harm").exists()


def test_no_picture_starts_a_program():
    """Pillow passes PostScript files to Ghostscript, and supports dozens of other formats that are
    rarely tested."""
    drawing = io.BytesIO()
    Image.new("RGB", (4, 4)).save(drawing, "EPS")
    data = drawing.getvalue()
    assert Image.open(io.BytesIO(data)).format == "EPS", (
        "Pillow must accept the file, or this test proves nothing"
    )
    with pytest.raises(ValueError, match="not an image; expected one of JPEG"):
        decode(data)


# --- no shell -------------------------------------------------------------------------------------

HOSTILE = [
    "data.root=/a b; touch HARM",
    "run.dir=$(touch HARM)",
    "run.name=`touch HARM`",
    'data.split=\'"; touch HARM; "',
    "data.files=*",
    "loader.cache_dir=a && touch HARM | touch HARM > HARM",
]
PROGRAMS = {
    "scontrol": "echo node0",
    "scancel": ":",
    "nvidia-smi": ":",
    "squeue": "echo node0",
    "getent": ":",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    # The scripts run Python to read the config, to find the run's folder, and to train.
    "python": 'printf "%s\\0" "$@" >> words; printf "\\n" >> words\n'
    'case "$*" in *--print-config*) echo "# derived";; -c*) cat >/dev/null; echo run;; esac',
}
"""Maps each cluster program that the scripts call to its fake."""


@pytest.fixture
def cluster(tmp_path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, lines in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    return tmp_path


def batch(cluster: Path, script: str, *arguments: str, **variables: str) -> list[list[str]]:
    environ = {
        **os.environ,
        "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(cluster),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_NNODES": "1",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_ARRAY_TASK_COUNT": "1",
        **variables,
    }
    done = subprocess.run(
        ["bash", ROOT / "slurm" / script, *arguments], env=environ, capture_output=True, text=True
    )
    assert not list(cluster.rglob("HARM*")), done.stdout + done.stderr
    if not (cluster / "words").exists():
        return []
    calls = (cluster / "words").read_text().split("\0\n")
    return [line.split("\0") for line in calls if line]


@pytest.mark.parametrize("script", ["train.sh", "sweep.sh"])
def test_batch_scripts_pass_settings_unchanged(script, cluster):
    stage = "/st age; touch HARM $(touch HARM)"
    calls = batch(
        cluster, script, *HOSTILE, STAGE=stage, SRUN_ARGS="--container-image=$(touch${IFS}HARM)"
    )
    trained = [call for call in calls if "launch/train.py" in call and "-m" in call]
    assert len(trained) == 1
    arguments = trained[0][trained[0].index("launch/train.py") + 1 :]
    for setting in [*HOSTILE, f"loader.cache_dir={stage}"]:
        assert setting in arguments
    if script == "sweep.sh":
        assert arguments[-2].startswith("run.dir=$(touch HARM)/0")


def test_lines_of_a_sweep_are_not_run_as_commands(cluster):
    line = (
        "optim.lr=$(touch${IFS}HARM) model.depth=`touch`;touch 'data.files=[a, \"$(touch HARM)\"]'"
    )
    (cluster / "rates.txt").write_text(f"{line}\r\n")
    calls = batch(cluster, "sweep.sh", "run.dir=runs", SWEEP="rates.txt")
    arguments = next(call for call in calls if "launch/train.py" in call)
    expected = [*line.split()[:2], 'data.files=[a, "$(touch HARM)"]', "run.dir=runs/0"]
    assert arguments[arguments.index(expected[0]) :][:4] == expected


def test_splits_srun_arguments_as_a_shell_does(cluster):
    container = cluster / "my container"
    container.write_text('#!/bin/bash\necho "$1" >> in_container\nexec "$@"\n')
    container.chmod(0o755)
    batch(cluster, "train.sh", SRUN_ARGS=f"--mpi=none\n'{container}'")
    programs = (cluster / "in_container").read_text().split()
    assert programs == ["python", "python", "bash"], (
        "the container must run the commands for the config, the folder and torchrun"
    )


@pytest.mark.parametrize("ranks", ["a[$(touch HARM)]", "08"])
def test_rejects_a_number_of_ranks_that_is_not_a_number(ranks, cluster):
    """In arithmetic expressions, bash executes embedded commands, and rejects 08 as an invalid
    octal number."""
    assert batch(cluster, "train.sh", RANKS_PER_NODE=ranks) == []
    assert batch(cluster, "train.sh", SRUN_ARGS="'not closed") == []


def test_the_spot_script_passes_settings_unchanged(cluster):
    task = yaml.safe_load((ROOT / "deploy" / "sky.yaml").read_text())
    program = cluster / "bin" / "vitline"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    (cluster / ".venv" / "bin").mkdir(parents=True)
    (cluster / ".venv" / "bin" / "activate").touch()
    variables = {
        "DATA": "/a b;touch HARM *",
        "RUNS": "$(touch HARM)",
        "SKYPILOT_NODE_IPS": "1.2.3.4",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        env={**os.environ, **variables, "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}"},
        cwd=cluster,
        capture_output=True,
        text=True,
    )
    assert f"data.root={variables['DATA']}" in done.stdout.splitlines(), done.stderr
    assert "run.dir=$(touch HARM)/vit_b16" in done.stdout.splitlines()
    assert not (cluster / "HARM").exists()


# --- the terminal ---------------------------------------------------------------------------------


def test_a_name_cannot_control_the_terminal(tmp_path):
    """A file name may contain control codes that change the window title, write to the clipboard or
    clear the screen."""
    name = "a\x1b]0;title\x07\x1b]52;c;aGFybQ==\x07\x1b[2J\x9b2J\u202e.jpg"
    done = subprocess.run(
        [sys.executable, "-m", "data_prep.verify", str(tmp_path / name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert r"a\x1b]0;title\x07\x1b]52;c;aGFybQ==\x07\x1b[2J\x9b2J\u202e.jpg" in done.stderr
    assert not set("\x1b\x07\x9b\u202e") & set(done.stdout + done.stderr)


def test_printed_text_keeps_colors_and_loses_other_terminal_codes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", redact._Guarded(sys.stdout, is_view=False))
    print("\x1b[1mbold\x1b[0m 50 %\r\x1b[2K größe\t猫 \x1b]0;title\x07 \x1bP \x9b \b")
    assert capsys.readouterr().out == (
        "\x1b[1mbold\x1b[0m 50 %\r\x1b[2K größe\t猫 \\x1b]0;title\\x07 \\x1bP \\x9b \\x08\n"
    )


def test_a_drawing_holds_names_as_text(tmp_path):
    name = "--></svg><script>alert(1)</script> US$ & ]]>"
    with drawing(tmp_path / "a.svg", 1) as figure:
        figure.suptitle(name)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert not [element for element in root.iter() if "script" in str(element.tag)]
    assert "<script" not in (tmp_path / "a.svg").read_text()


# --- temporary paths ------------------------------------------------------------------------------


def test_a_predictable_temporary_path_is_private(tmp_path):
    path = tmp_path / "vit-0-name"
    before = os.umask(0)
    try:
        assert private_folder(path) == path
        assert path.stat().st_mode & 0o777 == 0o700
        path.chmod(0o777)
        private_folder(path)
        assert path.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    path.rmdir()
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError) as caught:
        private_folder(path)
    assert caught.value.errno == errno.EPERM
    if os.geteuid() == 0:
        path.unlink()
        path.mkdir()
        shutil.chown(path, 12345)
        with pytest.raises(PermissionError):
            private_folder(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change the owner of a folder")
def test_ignores_a_cache_made_by_another_user(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "is_shared", lambda kind: False)
    monkeypatch.setattr(host, "file_system", lambda path, root: "ext4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    guessed = tmp_path / f"vit-{os.getuid()}"
    assert host.default_folder() == guessed
    guessed.mkdir()
    shutil.chown(guessed, 12345)
    assert host.default_folder() == tmp_path / "mine" / "vit"


# --- the network, and files left in TMPDIR --------------------------------------------------------

WATCHED = """
import os, runpy, sys

def watch(event, given):
    if event == "socket.connect" and not isinstance(given[1], (str, bytes)):
        report_write_errors(f"connects to {given[1]}")
    elif event == "socket.getaddrinfo" and given[0] not in (None, "localhost", "127.0.0.1"):
        report_write_errors(f"asks for {given[0]}")
    elif event == "os.mkdir" and is_new(given[0]) and given[1] & 0o077:
        report_write_errors(f"makes {given[0]} with mode {given[1]:o}")
    elif event == "open" and given[2] & os.O_CREAT and is_temporary(given[0]):
        created.append(given[0])

def is_new(path):
    return is_temporary(path) and not os.path.isdir(path)

def is_temporary(path):
    return os.path.dirname(os.fsdecode(path) if isinstance(path, (str, bytes)) else "") == place

def report_write_errors(what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{sys.argv}: {what}\\n")

created = []
place = os.environ["TMPDIR"]
os.umask(0)
sys.addaudithook(watch)
runner, *sys.argv = sys.argv[1:]
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "launch")]
try:
    if runner == "module":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    for path in created:
        if os.path.exists(path) and os.stat(path).st_mode & 0o077:
            report_write_errors(f"leaves {path} for others to read")
"""


def watched(folder: Path, *arguments: object) -> list[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    variables = {
        name: value for name, value in environment().items() if "proxy" not in name.lower()
    }
    variables |= {"TOLD": str(folder / "told"), "TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *map(str, arguments)],
        env={**variables, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "told").read_text().splitlines() if (folder / "told").exists() else []


def test_the_watch_detects_a_connection_and_an_open_folder(tmp_path):
    code = "import os, socket; os.mkdir(os.environ['TMPDIR'] + '/a'); socket.socket().connect_ex"
    (tmp_path / "it.py").write_text(f"{code}(('127.0.0.1', 9))\n")
    seen = watched(tmp_path, "file", tmp_path / "it.py")
    assert [line.partition(": ")[2].split()[0] for line in seen] == ["makes", "connects"]


@needs("export", "report")
@pytest.mark.full
def test_commands_open_no_connection_and_leave_no_readable_folder(tmp_path):
    """The test runs preparation, training with a report, evaluation, prediction and export."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), np.uint8)
    for number, image in enumerate(pixels):
        path = tmp_path / "images" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    data = tmp_path / "data"
    prep = ("module", "data_prep.imagefolder", tmp_path / "images", "--out", data)
    assert watched(tmp_path, *prep) == []
    config = write_config(tmp_path, data, steps=2)
    run_dir = tmp_path / "run"
    settings = [word for word in TINY if not word.startswith("log.report")]
    for arguments in (
        ("launch/train.py", "--config", config, f"run.dir={run_dir}", *settings),
        ("launch/eval.py", run_dir),
        ("launch/predict.py", "--checkpoint", run_dir, tmp_path / "images"),
        ("launch/export.py", run_dir, "--to", "timm"),
    ):
        assert watched(tmp_path, "file", *arguments) == [], arguments
    assert list((tmp_path / "tmp").iterdir()) == []
