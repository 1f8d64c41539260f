"""Test that the losses of distillation from a teacher match those of timm and DeiT, and that the
teacher sees the correct images."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from plain_step import plain_step
from processes import (
    TINY,
    as_by_another_program,
    final_state,
    metrics,
    run_here,
    train,
    write_config,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.task import LogitDistillationTask, TokenDistillationTask
from torch import nn
from torchvision.transforms.v2.functional import resize

from vit.config.io import from_dict
from vit.data.augment.apply import create_augment
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.inference.predictor import load
from vit.model import create_model
from vit.optim.optimizer import create_optimizer
from vit.training.plan import make_plan
from vit.training.teacher import Teacher, load_teacher
from vit.weights.class_names import select_classes
from vit.weights.files import LoadedWeights, fingerprint, load_weights, read_weights

ALONE = World(0, 1, torch.device("cpu"))
NAMES = ["class0", "class1", "class2"]
MODEL = {"name": "vit_ti8", "image_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}


def settings(model=(), data=(), **distill):
    return from_dict(
        {
            "model": {**MODEL, **dict(model)},
            "data": {"root": ".", **dict(data)},
            "train": {"steps": 1, "precision": "fp32"},
            "distill": distill,
        },
        "test",
    )


class Says(nn.Module):
    """A model with timm's interface that always returns the logits passed to its constructor."""

    def __init__(self, *logits: torch.Tensor):
        super().__init__()
        self.logits = nn.ParameterList(logits)
        self.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
        self.num_classes = logits[0].shape[1]
        self.in_chans = 3

    def set_distilled_training(self, enable: bool) -> None:
        """Do nothing."""

    def forward(self, images: torch.Tensor):
        return tuple(self.logits) if len(self.logits) > 1 else self.logits[0]


def blended(student, teacher, **distill):
    """Return the loss and the gradient that a teacher's `blend` method computes. `student` contains
    the logits of one or two heads."""
    heads = [logits.clone().requires_grad_() for logits in student]
    ours = Teacher(Says(teacher), settings(), settings(teacher="x", **distill))
    task = F.cross_entropy(heads[0], LABELS, reduction="none")
    loss = ours.blend(task, heads[-1], teacher).mean()
    loss.backward()
    return loss.detach(), [head.grad for head in heads]


LABELS = torch.tensor([0, 4, 2, 2, 1, 3])


def some_logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))


def expect_equal(actual, expected) -> None:
    # The tolerance covers the rounding errors of about twelve fp32 operations on values up to ten.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [(0.3, 0.7), (1.0, 5.0)], ids=["complementary", "independent"])
@pytest.mark.parametrize("kind", ["logit", "token soft", "token hard"])
def test_loss_and_gradients_equal_timm(kind, weights):
    student = [some_logits(0), some_logits(1)][: 2 if "token" in kind else 1]
    says = Says(*(logits.clone() for logits in student))
    options = {
        "criterion": nn.CrossEntropyLoss(),
        "task_loss_weight": weights[0],
        "distill_loss_weight": weights[1],
        "temperature": 2.5,
        "verbose": False,
    }
    if "token" in kind:
        options["distill_type"] = kind.removeprefix("token ")
    task = (TokenDistillationTask if "token" in kind else LogitDistillationTask)(
        says, Says(some_logits(2)), **options
    )
    theirs = task(torch.zeros(6, 3, 4, 4), LABELS)["loss"]
    theirs.backward()
    hard = (
        {"distill_type": "hard"} if "hard" in kind else {"distill_type": "soft", "temperature": 2.5}
    )
    loss_of_ours, gradients = blended(
        student, some_logits(2), task_loss_weight=weights[0], distill_loss_weight=weights[1], **hard
    )
    expect_equal(loss_of_ours, theirs.detach())
    expect_equal(gradients, [logits.grad for logits in says.logits])


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_loss_and_gradients_equal_deit(kind):
    """The formulas and their names come from facebookresearch/deit@7e160fe4:losses.py."""
    alpha, tau = 0.4, 3.0
    heads = [some_logits(0).requires_grad_(), some_logits(1).requires_grad_()]
    teacher = some_logits(2)
    if kind == "soft":
        theirs = F.kl_div(
            F.log_softmax(heads[1] / tau, dim=1),
            F.log_softmax(teacher / tau, dim=1),
            reduction="sum",
            log_target=True,
        )
        theirs = theirs * tau**2 / heads[1].numel()
    else:
        theirs = F.cross_entropy(heads[1], teacher.argmax(dim=1))
    loss = F.cross_entropy(heads[0], LABELS) * (1 - alpha) + theirs * alpha
    loss.backward()
    fields = {"distill_loss_weight": alpha}
    if kind == "soft":
        fields = {"distill_loss_weight": alpha / 5, "temperature": tau}
    loss_of_ours, gradients = blended(
        [head.detach() for head in heads],
        teacher,
        distill_type=kind,
        task_loss_weight=1 - alpha,
        **fields,
    )
    expect_equal(loss_of_ours, loss.detach())
    expect_equal(gradients, [head.grad for head in heads])


def test_a_teacher_sees_the_same_images_at_its_own_size_and_normalization():
    own = settings(model={"image_size": 24}, data={"mean": [0.5], "std": [0.25]})
    student = settings(teacher="x")
    model = create_model(own.model, num_classes=3)
    nn.init.normal_(model.head.weight)
    pixels = torch.rand(4, 3, 16, 16)
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (student.data.mean, student.data.std)
    )
    answers = Teacher(model, own, student)((pixels - mean) / std)
    enlarged = resize(pixels, [24, 24], interpolation=3, antialias=True)
    torch.testing.assert_close(answers, model((enlarged - 0.5) / 0.25), rtol=1e-4, atol=1e-4)
    assert not answers.requires_grad
    assert not model.training


def weights_file(path, names=NAMES, data=(), **model):
    """Write the weights of an untrained model whose head is not zero, in the format of a run."""
    torch.manual_seed(3)
    config = settings(model=model, data=data)
    network = create_model(config.model, num_classes=len(names))
    nn.init.normal_(network.head.weight)
    values = {
        "config": config.model_dump(mode="json"),
        "num_classes": len(names),
        "grid_size": network.grid_size,
        "averaged": False,
        "step": 7,
        "class_names": names,
    }
    save_file(network.state_dict(), path, {key: json.dumps(value) for key, value in values.items()})
    return path


def test_classes_are_found_by_name(tmp_path):
    path = weights_file(tmp_path / "w.safetensors", ["dog", "class2", "class0", "class1"])
    teacher = load_teacher(settings(teacher=str(path)), NAMES, 3, ALONE)
    images = torch.randn(2, 3, 16, 16)
    # With fewer rows, a kernel may sum values in a different order.
    expect_equal(teacher(images), load(path)(images)[:, [2, 3, 1]])
    assert any("selected by name" in line for line in teacher.notes.lines)
    assert teacher.notes.record["teacher"]["step"] == 7


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["ant", "bee", "cow"], "lacks 3 of the data's 3 classes .*are dog, class2"),
        ([], "has 4 classes, but the data have 3, and there are no class names"),
    ],
)
def test_other_classes_are_refused(tmp_path, names, problem):
    path = weights_file(tmp_path / "w.safetensors", ["dog", "class2", "class0", "class1"])
    with pytest.raises(ValueError, match=problem):
        load_teacher(settings(teacher=str(path)), names, 3, ALONE)


def test_other_channels_are_refused(tmp_path):
    path = weights_file(tmp_path / "w.safetensors", in_chans=1, data={"mean": [0.5], "std": [0.5]})
    with pytest.raises(ValueError, match=r"in_chans=1, but model.in_chans is 3"):
        load_teacher(settings(teacher=str(path)), NAMES, 3, ALONE)


def test_the_planner_counts_the_weights_of_a_missing_teacher():
    step_memory = pytest.importorskip("vit.extras.planner.memory").step_memory
    config = settings(teacher="deit_tiny_patch16_224-a1311bcf.pth")
    plan = replace(make_plan(config, 2048, 1)[0], global_batch_size=4, micro_batch_size=4)
    with_teacher = step_memory(config, plan, 3)
    without = step_memory(settings(), plan, 3)
    tiny = create_model("vit_ti16", num_classes=3)
    assert with_teacher.teacher == sum(4 * p.numel() for p in tiny.parameters())
    assert with_teacher.weights == without.weights
    assert with_teacher.total > without.total + with_teacher.teacher, (
        "the peak of memory must include the teacher's pass"
    )


def test_the_distilled_model_equals_timm(tmp_path):
    """The parameter names, the logits of both heads, and the conversion to and from timm's layout
    must match exactly."""
    with torch.random.fork_rng():
        guest = timm.create_model("deit_tiny_distilled_patch16_224", depth=2, num_classes=7)
    for value in guest.parameters():
        nn.init.normal_(value, std=0.1)
    model = create_model("vit_ti16", num_classes=7, depth=2, dist_token=True)
    weights = model.state_dict()
    assert list(weights) == list(guest.state_dict())
    assert model.no_weight_decay() >= guest.no_weight_decay()
    assert not load_weights(model, guest.state_dict())
    images = torch.randn(2, 3, 224, 224)
    assert torch.equal(model.eval()(images), guest.eval()(images))
    model.distilled_training = guest.distilled_training = True
    assert torch.equal(model(images), guest(images)), (
        "the logits of both heads must be separate only in training"
    )
    logits, expected = model.train()(images), guest.train()(images)
    assert all(map(torch.equal, logits, expected))
    assert len(logits) == 2
    loaded = LoadedWeights(tmp_path, weights, num_classes=7, step=1, class_names=list("abcdefg"))
    chosen = select_classes(loaded, ["c", "a"]).weights
    for head in ("head", "head_dist"):
        assert torch.equal(chosen[f"{head}.weight"], weights[f"{head}.weight"][[2, 0]])


def test_the_second_head_learns_from_the_teacher_and_the_first_from_labels():
    torch.manual_seed(0)
    config = settings(model={"dist_token": True}, teacher="x", distill_loss_weight=0.3)
    model = create_model(config.model, num_classes=3)
    says = torch.tensor([[0.0, 5.0, 0.0]]).repeat(4, 1)
    augment = create_augment(config.augment, config.data, 3, ALONE.device)
    step = plain_step(
        model,
        model,
        create_optimizer(model, config.optim),
        augment,
        ALONE,
        lr_at=lambda step: 1e-3,
        micro_batch_size=4,
        teacher=Teacher(Says(says), settings(), config),
    )
    table = torch.zeros(4, table_layout(config.augment).width)
    labels = torch.tensor([2, 2, 2, 2])
    images = torch.randint(0, 255, (4, 3, 16, 16), dtype=torch.uint8)
    batch = Batch(images, labels, torch.ones(4), table, torch.arange(4))
    model.train()
    losses, margins = step._losses(batch)
    losses.sum().backward()
    # If a head is zero, each class has a probability of 1/3, so the gradient of a bias is either
    # 1/3 or 1/3 - 1.
    third = torch.full((3,), 1 / 3)
    torch.testing.assert_close(model.head.bias.grad, 4 * 0.5 * (third - torch.eye(3)[2]))
    torch.testing.assert_close(model.head_dist.bias.grad, 4 * 0.3 * (third - torch.eye(3)[1]))
    assert margins.shape == (4,)


OFF = ("model.drop_path_rate=0", "model.proj_drop_rate=0")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return weights_file(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


def test_any_number_of_ranks_learns_the_same_and_no_checkpoint_has_the_teacher(
    tmp_path, shards, teacher
):
    config = write_config(tmp_path, shards, steps=3)
    soft = [
        *OFF,
        f"distill.teacher={teacher}",
        "distill.distill_type=soft",
        "distill.temperature=2",
    ]
    arguments = ["--config", config, f"run.dir={tmp_path / 'one'}", *TINY, *soft]
    run_here("launch/train.py", *arguments)
    done = train(config, tmp_path / "two", *soft, ranks=2)
    losses = [
        [line["loss"] for line in metrics(tmp_path / name, "train")] for name in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4), (
        "the number of ranks may affect only rounding"
    )
    assert "not counted in MFU; soft at temperature 2" in done.stderr
    (start,) = metrics(tmp_path / "two", "start")
    loaded = read_weights(teacher)
    sha256 = fingerprint(loaded.weights)
    assert start["teacher"]["sha256"] == sha256
    newest = tmp_path / "two" / "checkpoints" / "step_00000003"
    with safe_open(newest / "state.safetensors", framework="pt") as file:
        model_names = {name for name in file.keys() if name.startswith("model.")}  # noqa: SIM118
    assert len(model_names) == len(loaded.weights)

    # only the teacher is different in this run
    other = tmp_path / "other.safetensors"
    weights = load_file(teacher)
    weights["head.bias"] += 1
    with safe_open(teacher, framework="pt") as file:
        save_file(weights, other, as_by_another_program(file.metadata()))
    with pytest.raises(ValueError, match=f"teacher: weights {sha256[:12]} there, "):
        run_here("launch/train.py", *arguments, f"distill.teacher={other}")


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        ["distill.distill_type=hard"],
        [
            "distill.distill_type=soft",
            "data.micro_batch_size=2",
            "train.activation_checkpointing=block",
        ],
        ["distill.distill_type=hard", "train.compile=true", "train.precision=bf16"],
    ],
    ids=["hard", "accumulated", "compiled"],
)
def test_resumed_equals_uninterrupted(more, tmp_path, shards, teacher):
    config = write_config(tmp_path, shards, steps=6)
    settings_of_run = [f"distill.teacher={teacher}", *more]
    train(config, tmp_path / "run", *settings_of_run, ranks=2)
    whole = final_state(tmp_path / "run", 6)
    newest = tmp_path / "run" / "checkpoints" / "step_00000006" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    done = train(config, tmp_path / "run", *settings_of_run, ranks=2)
    assert "resumed at step 3 of 6" in done.stderr
    assert final_state(tmp_path / "run", 6) == whole
