"""Test that a saved config loads unchanged, and can be compared with the configs of older runs."""

import copy
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vit.config.io import ConfigError, differences, dump_yaml, from_dict, load_config, to_dict

BASE = """\
data:
  root: shards
train:
  epochs: 3
"""


# --- round trips ----------------------------------------------------------------------------------


texts = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=12
)


traps = st.sampled_from(
    [
        "null",
        "Null",
        "~",
        "true",
        "off",
        ".5",
        "1e3",
        "12",
        "#",
        "-",
        "'",
        '"',
        "=",
        "<<",
        "a#b",
        "a: b",
        " a ",
        "\n",
    ]
)


numbers = st.floats(min_value=1e-12, max_value=1e9)


@given(
    root=texts | traps,
    folder=traps,
    lr=numbers,
    epochs=numbers,
    seed=st.integers(0, 2**63 - 1),
    size=st.integers(1, 4096) | st.tuples(st.integers(1, 99), st.integers(1, 99)).map(list),
    checkpoint=st.none() | texts,
    optimizer=st.sampled_from(
        [{}, {"name": "sgd", "nesterov": True}, {"betas": [0.5, 0.25], "clip_grad_norm": None}]
    ),
)
def test_a_dumped_config_loads_as_the_same_config(
    tmp_path_factory, root, folder, lr, epochs, seed, size, checkpoint, optimizer
):
    values = {
        "data": {"root": root},
        "run": {"dir": folder},
        "loader": {"cache_dir": folder},
        "optim": {"lr": lr, **optimizer},
        "train": {"epochs": epochs, "seed": seed},
        "model": {"image_size": size},
        "init": {"checkpoint": checkpoint},
    }
    config = from_dict(values, "test")
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(
        dump_yaml(to_dict(config), {"data.root": "run.yaml:2", "optim.lr": "command line"}),
        encoding="utf-8",
    )
    assert load_config(path) == config
    assert from_dict(to_dict(config), "test") == config
    assert yaml.safe_load(path.read_text("utf-8"))["train"]["seed"] == seed


def test_origins_are_comments_at_the_end_of_each_line():
    text = dump_yaml(
        {"train": {"steps": 3, "seed": 0}, "log": {"wandb": "off"}}, {"train.steps": "run.yaml:4"}
    )
    assert re.fullmatch(r"train:\n  steps: 3 +# run\.yaml:4\n  seed: 0\nlog:\n  wandb: off\n", text)


def test_unknown_fields_in_the_config_of_an_older_run_are_refused():
    values = to_dict(from_dict(yaml.safe_load(BASE), "test"))
    values["train"]["sead"] = 3
    with pytest.raises(
        ConfigError,
        match=r"^runs/old/config\.yaml: unknown key 'train\.sead'; did you mean train\.seed\?$",
    ):
        from_dict(values, "runs/old/config.yaml")


def test_differences_are_reported_by_dotted_key():
    old = to_dict(from_dict(yaml.safe_load(BASE), "test"))
    new = copy.deepcopy(old)
    assert differences(old, new) == {}
    new["train"]["epochs"] = 4.0
    new["model"]["image_size"] = [32, 32]
    new["optim"] = to_dict(
        from_dict({**yaml.safe_load(BASE), "optim": {"name": "sgd", "lr": 1e-3}}, "test")
    )["optim"]
    changed = differences(old, new)
    assert changed["train.epochs"] == (3.0, 4.0)
    assert changed["model.image_size"] == (224, [32, 32])
    assert changed["optim.name"] == ("adamw", "sgd")
    assert changed["optim.betas"] == ([0.9, 0.999], None), (
        "the field `betas` does not exist for SGD"
    )
    assert changed["optim.momentum"] == (None, 0.9)
    assert "optim.lr" not in changed
