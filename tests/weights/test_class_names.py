"""Test that the classes of the data are selected by name if the model's head has more classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run, train, write_config
from safetensors.torch import save_file
from torchvision.models._meta import _IMAGENET_CATEGORIES

from vit.model import create_model
from vit.system.files import WeightsError
from vit.weights.class_names import class_mismatch, imagenet_names, select_classes
from vit.weights.files import LoadedWeights, load_weights, read_weights
from vit.weights.formats import read_content

NAMES = ["ant", "bee", "cat", "dog", "elk"]


def loaded_of(names: list[str] | None = NAMES, path: Path = Path("w.pth")) -> LoadedWeights:
    model = create_model("vit_ti8", 16, 5, embed_dim=32, depth=1, num_heads=2)
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.head.bias)
    return LoadedWeights(path, model.state_dict(), num_classes=5, class_names=names)


def test_the_selected_head_gives_the_logits_of_the_named_classes():
    loaded = loaded_of()
    chosen = select_classes(loaded, ["dog", "ant", "bee"])
    assert (chosen.num_classes, chosen.class_names) == (3, ["dog", "ant", "bee"])
    assert chosen.notes == ("3 of 5 classes selected by name",)
    models = []
    for source in (loaded, chosen):
        models.append(
            create_model("vit_ti8", 16, source.num_classes, embed_dim=32, depth=1, num_heads=2)
        )
        load_weights(models[-1].eval(), source.weights)
    images = torch.randn(4, 3, 16, 16)
    with torch.inference_mode():
        every, three = (model(images) for model in models)
    torch.testing.assert_close(three, every[:, [3, 0, 1]])


def test_class_names_beside_the_weights_of_another_program_are_used(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"id2label": dict(enumerate(NAMES))}))
    loaded = loaded_of(None, tmp_path / "model.safetensors")
    assert torch.equal(
        select_classes(loaded, ["cat"]).weights["head.bias"], loaded.weights["head.bias"][2:3]
    )


def imagenet_weights(**more) -> LoadedWeights:
    rows = torch.arange(1000.0)
    weights = {"head.weight": rows[:, None].expand(-1, 4), "head.bias": rows}
    return LoadedWeights(Path("vit_b_16.pth"), weights, **more)


def test_other_names_than_those_of_a_published_models_classes_are_reported():
    """A user of raoyongming/DynamicViT (issue 17) named validation folders by the numbers in
    ILSVRC2012_validation_ground_truth.txt, and measured .08 %."""
    loaded = imagenet_weights(num_classes=1000)
    numbers = [str(number) for number in range(1, 1001)]
    assert class_mismatch(loaded, numbers, 1000).startswith(
        "label 0 is '1' in the data, but probably 'n01440764' or 'tench, Tinca tinca' or 'tench'"
        " in the model: the accuracy is meaningless, unless only the names differ"
    )
    assert "label 0 is 'airplane' in the data" in class_mismatch(loaded, ["airplane", "cat"], 2)

    labels = [str(label) for label in range(1000)]  # ImageNet-V2's folders
    for names in (labels, imagenet_names()["first words"], [], labels[:200]):
        assert class_mismatch(loaded, names, len(names)) == ""


@pytest.mark.parametrize(
    ("data_names", "rows", "kind"),
    [
        (["n02123045", "n01440764"], [281, 0], "WordNet ids"),
        (["tabby, tabby cat", "goldfish, Carassius auratus"], [281, 1], "words"),
        (["tench", "tabby", "great white shark"], [0, 281, 2], "first words"),
    ],
)
def test_a_head_of_1000_unnamed_classes_has_the_names_of_imagenet(data_names, rows, kind):
    """The expected numbers come from the published list of ImageNet classes: 0 is tench, 1 is
    goldfish, and 281 is tabby."""
    chosen = select_classes(imagenet_weights(), data_names)
    assert chosen.weights["head.bias"].tolist() == rows
    [note] = chosen.notes
    assert note == (
        f"{len(rows)} of 1,000 classes selected by name, assumed to be ImageNet-1k's ({kind})"
    )


def test_imagenet_classes_are_in_the_order_of_their_ids_and_of_torchvision():
    name_lists = imagenet_names()
    ids = name_lists["WordNet ids"]
    assert ids == sorted(set(ids))
    assert len(ids) == 1000
    first_words = name_lists["first words"]
    same = sum(
        ours == theirs for ours, theirs in zip(first_words, _IMAGENET_CATEGORIES, strict=True)
    )
    assert same > 900, "torchvision must rename only some classes, such as the two cranes"


def test_ambiguous_imagenet_names_are_refused():
    with pytest.raises(WeightsError, match="several classes called crane"):
        select_classes(imagenet_weights(), ["crane", "tench"])
    with pytest.raises(
        WeightsError, match=r"\(fox news\); its classes are n01440764, .* or tench, Ti"
    ):
        select_classes(imagenet_weights(), ["fox news"])
    with pytest.raises(WeightsError, match="has no class names"):
        select_classes(imagenet_weights(step=3, class_names=[]), ["tench"])
    own = [f"mine {label}" for label in range(1000)]
    chosen = select_classes(imagenet_weights(class_names=own), ["mine 7"])
    assert chosen.weights["head.bias"].tolist() == [7]
    assert chosen.notes == ("1 of 1,000 classes selected by name",)


@pytest.mark.parametrize(
    ("class_names", "data_names", "message"),
    [
        (
            NAMES,
            ["ant", "fox", "gnu"],
            r"lacks 2 of the data's 3 classes \(fox, gnu\); its classes are ant, bee",
        ),
        (None, ["ant"], r"w.pth has no class names"),
        (NAMES, [], r"the data have no class names"),
        (["ant", "ant", "bee", "cat", "dog"], ["ant"], "several classes called ant"),
        (["ant"], ["ant"], "1 class names, but its head has 5 rows"),
    ],
)
def test_impossible_selections_are_refused(class_names, data_names, message):
    with pytest.raises(WeightsError, match=message):
        select_classes(replace(loaded_of(), class_names=class_names), data_names)


@pytest.mark.slow
def test_evaluation_and_training_reorder_the_classes_of_the_head(tmp_path, shards):
    config = write_config(tmp_path, shards)
    train(config, tmp_path / "run", "ema.decay=null", "train.steps=3")
    expected = run("launch/eval.py", tmp_path / "run", "--json")
    path = tmp_path / "run" / "weights" / "last.safetensors"
    content = read_content(path)
    names = json.loads(content.metadata["class_names"])
    order = [2, 0, 1]
    weights = dict(content.tensors)
    for name in ("head.weight", "head.bias"):
        own = weights[name]
        weights[name] = torch.cat((own[:1] * 0 + 9, own[order], own[:1] * 0 + 9))
    more = {"class_names": json.dumps(["x", *(names[n] for n in order), "y"]), "num_classes": "5"}
    save_file(weights, tmp_path / "more.safetensors", content.metadata | more)
    done = run("launch/eval.py", tmp_path / "more.safetensors", "--json", "--select-classes")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(expected.stdout)
    assert "3 of 5 classes selected by name" in done.stderr

    start = f"init.checkpoint={tmp_path / 'more.safetensors'}"
    settings = (start, "init.select_classes=true", "init.freeze=backbone", "optim.lr=1e-30")
    train(config, tmp_path / "next", *settings, "train.steps=1", "ema.decay=null")
    again = read_weights(tmp_path / "next").weights
    assert all(torch.equal(again[name], content.tensors[name]) for name in again)
