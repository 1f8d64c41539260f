"""Test that no source file calls a function that could execute its input as code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORBIDDEN = {
    *("eval", "exec", "__import__", "builtins.eval", "builtins.exec", "tempfile.mktemp"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_shell", "shutil.unpack_archive", "torch.hub.load"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("shelve.open", "joblib.load", "dill.load", "dill.loads", "pandas.read_pickle"),
    *("torch.jit.load", "torch.export.load", "torch.distributed.checkpoint.load"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"),
}
METHODS = {
    # These methods of tarfile and zipfile write archive members to disk.
    *("extract", "extractall"),
    # These functions of torch.distributed unpickle messages from other ranks.
    *("broadcast_object_list", "scatter_object_list", "recv_object_list"),
    *("all_gather_object", "gather_object"),
}
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash"}
SUSPECT = re.compile(
    r"\b(?:eval|exec|__import__)\b|\b(?:system|popen|getoutput|getstatusoutput)\b|pickle|marshal"
    r"|shelve|joblib|dill|mktemp|torch\.(?:load|jit|hub|export|distributed\.checkpoint)"
    r"|import (?:load|jit|hub)\b|yaml|extract|unpack|shell|trust_remote|_object"
    r"|[\"'/](?:ba)?sh[\"']"
)
"""A regular expression that matches every dangerous call. Only the files that match are parsed,
because parsing is slow."""


def imported(tree: ast.Module) -> dict[str, str]:
    """Map each imported name to its origin. For example, `from os import system as run` maps `run`
    to `os.system`."""
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            origins |= {each.asname: f"{origin}{each.name}" for each in node.names if each.asname}
            if origin:
                origins |= {each.name: f"{origin}{each.name}" for each in node.names}
    return origins


def dangers(source: str) -> list[str]:
    lines = []
    tree = ast.parse(source)
    meanings = imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = ast.unparse(node.func).partition(".")
        name = f"{meanings.get(first, first)}{dot}{rest}"
        keywords = {word.arg: word.value for word in node.keywords}
        text = ast.unparse(node) if name in ("torch.load", "yaml.load", "yaml.load_all") else ""
        if (
            name in FORBIDDEN
            or name.rpartition(".")[2] in METHODS
            or (name == "torch.load" and "weights_only=True" not in text)
            or (name.startswith("yaml.load") and "Safe" not in text and "Strict" not in text)
            or keywords.keys() & {"trust_remote_code"}
            or any(
                getattr(keywords[word], "value", True) is not False
                for word in keywords.keys() & {"shell", "allow_pickle"}
            )
            or any(
                isinstance(argument, ast.List)
                and argument.elts
                and ast.unparse(argument.elts[0])[1:-1] in SHELLS
                for argument in node.args
            )
        ):
            lines.append(f"line {node.lineno}: {ast.unparse(node)[:80]}")
    return lines


def test_no_source_runs_its_input_as_code():
    files = [
        path for room in ("vit", "data_prep", "launch") for path in (ROOT / room).rglob("*.py")
    ]
    assert len(files) > 200
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    calls = {path: dangers(source) for path, source in sources.items() if SUSPECT.search(source)}
    assert {path: lines for path, lines in calls.items() if lines} == {}


@pytest.mark.parametrize(
    "call",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "0; import pickle as p; p.loads(data)",
        "0; from torch import load; load(path)",
        "0; from os import system as run; run(line)",
        "torch.distributed.all_gather_object(found, value)",
        "shutil.unpack_archive(path)",
        "subprocess.getoutput(line)",
        "subprocess.run(['bash', '-c', line])",
        "np.load(path, allow_pickle=True)",
        "pickle.loads(data)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.load(text, yaml.UnsafeLoader)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "eval(setting)",
        "tar.extractall(folder)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_detects_each_dangerous_call(call):
    assert SUSPECT.search(call)
    assert dangers(f"x = {call}")
