"""Compare accuracy with torch's top-k and with manual counts. Results must be bit-identical for
every order of the samples and every partition into batches."""

import math
import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from vit.distributed.process_group import World
from vit.training.metrics import (
    Accuracy,
    AccuracyCounter,
    correct_in_top_k,
    interval95,
    paired_difference,
)

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


def examples(num: int, num_classes: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 5 * torch.randn(num, num_classes, generator=generator), torch.randint(
        num_classes, (num,), generator=generator
    )


def counted(*batches: tuple[torch.Tensor, ...]) -> Accuracy:
    counter = AccuracyCounter(CPU)
    for logits, labels, *weights in batches:
        counter.add(logits, labels, weights[0] if weights else torch.ones(len(labels)))
    return counter.result(ALONE)


# --- top k ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 5, 12])
def test_without_ties_top_k_equals_torch(k):
    logits, labels = examples(500)
    expected = (logits.topk(k).indices == labels[:, None]).any(1)
    assert torch.equal(correct_in_top_k(logits, labels, k), expected)


def test_a_head_of_zeros_scores_as_chance():
    labels = torch.arange(100)
    for k in (1, 5):
        assert torch.equal(correct_in_top_k(torch.zeros(100, 100), labels, k), labels < k)


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=8), st.integers(1, 6))
def test_ties_go_to_the_smaller_class_so_that_exactly_k_classes_are_right(logits, k):
    num_classes = len(logits)
    right = correct_in_top_k(
        torch.tensor([logits] * num_classes, dtype=torch.float32), torch.arange(num_classes), k
    )
    ranking = sorted(range(num_classes), key=lambda c: (-logits[c], c))
    assert set(right.nonzero().flatten().tolist()) == set(ranking[:k])


@pytest.mark.parametrize("nan_at", [0, 2, 4])
def test_a_row_with_nan_is_wrong(nan_at):
    logits = torch.arange(5.0).repeat(5, 1)
    labels = torch.arange(5)
    logits[:, nan_at] = float("nan")
    assert not correct_in_top_k(logits, labels, 5).any()


def test_an_infinite_logit_of_the_label_is_right():
    logits = torch.tensor([[0.0, float("inf"), 1.0], [0.0, float("-inf"), 1.0]])
    assert correct_in_top_k(logits, torch.tensor([1, 1]), 1).tolist() == [True, False]


# --- sums -----------------------------------------------------------------------------------------


def test_the_result_is_the_plain_mean():
    logits, labels = examples(300)
    result = counted((logits[:100], labels[:100]), (logits[100:], labels[100:]))
    assert result.num_images == 300
    assert result.correct_top1 == (logits.argmax(1) == labels).sum()
    assert result.correct_top5 == (logits.topk(5).indices == labels[:, None]).any(1).sum()
    assert result.top1 == pytest.approx(100 * result.correct_top1 / 300)
    assert result.top5 == pytest.approx(100 * result.correct_top5 / 300)
    assert result.loss == pytest.approx(F.cross_entropy(logits.double(), labels).item(), abs=1e-6)


@given(
    st.integers(1, 200),
    st.integers(0, 1000),
    st.lists(st.integers(0, 200), max_size=10),
    st.randoms(),
)
def test_sums_are_equal_for_any_order_and_any_partition(num, seed, borders, shuffle: random.Random):
    logits, labels = examples(num, seed=seed)
    rows = torch.tensor(shuffle.sample(range(num), num))
    cuts = [0, *sorted(min(border, num) for border in borders), num]
    batches = [(logits[rows[low:high]], labels[rows[low:high]]) for low, high in pairwise(cuts)]
    assert counted(*batches) == counted((logits, labels))


def test_does_not_count_filler_rows():
    logits, labels = examples(60)
    filler = logits.clone()
    weights = torch.ones(60)
    weights[1::2] = 0
    filler[1::4] = float("nan")
    filler[3::4] = 1e30
    assert counted((filler, labels, weights)) == counted((logits[::2], labels[::2]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_logit_makes_the_loss_nan_but_does_not_affect_the_counts(bad):
    logits, labels = examples(20)
    logits[7, (labels[7] + 1) % 12] = bad
    result = counted((logits, labels))
    without_nan = counted((logits[:7], labels[:7]), (logits[8:], labels[8:]))
    assert math.isnan(result.loss)
    assert result.num_images == 20
    assert 0 <= result.correct_top1 - without_nan.correct_top1 <= 1


def test_calibration_follows_guo_with_fifteen_bins_and_adds_up_in_any_order():
    """For comparison, the test evaluates the formula for the calibration error (Equation 3 in Guo
    et al., 2017) image by image."""
    logits, labels = examples(400, num_classes=6)
    confidence, predicted = logits.double().softmax(1).max(1)
    error = 0.0
    for low in range(15):
        inside = [i for i in range(400) if low / 15 < confidence[i] <= (low + 1) / 15]
        right = sum(int(predicted[i] == labels[i]) for i in inside)
        error += abs(right - sum(confidence[i].item() for i in inside)) / 400
    whole = counted((logits, labels))
    assert whole.ece == pytest.approx(100 * error, abs=1e-4)
    assert error > 0.05
    parts = counted(*[(logits[i : i + 30], labels[i : i + 30]) for i in range(390, -1, -30)])
    assert parts.ece == whole.ece
    logits[3, 0] = math.nan
    assert math.isnan(counted((logits, labels)).ece)


def test_certain_predictions_are_calibrated_only_if_they_are_right():
    logits = torch.tensor([[200.0, 0.0], [200.0, 0.0]])
    assert counted((logits, torch.tensor([0, 0]))).ece == 0
    assert counted((logits, torch.tensor([1, 1]))).ece == 100


def test_any_of_several_right_classes_is_accepted_but_padding_is_not():
    logits, labels = examples(200, num_classes=12)
    generator = torch.Generator().manual_seed(1)
    accepted = torch.randint(-1, 12, (200, 3), generator=generator)
    accepted[:, 0] = labels
    counter = AccuracyCounter(CPU)
    counter.add(logits, torch.zeros_like(labels), torch.ones(200), accepted)
    result = counter.result(ALONE)
    rows = [{label for label in row if label >= 0} for row in accepted.tolist()]
    top5 = logits.topk(5).indices.tolist()
    assert result.correct_top1 == sum(top[0] in row for top, row in zip(top5, rows, strict=True))
    assert result.correct_top5 == sum(
        bool({*top} & row) for top, row in zip(top5, rows, strict=True)
    )
    shares = logits.double().softmax(1)
    loss = [-math.log(sum(share[c] for c in row)) for share, row in zip(shares, rows, strict=True)]
    assert result.loss == pytest.approx(sum(loss) / 200, rel=1e-5)
    single = AccuracyCounter(CPU)
    single.add(logits, labels, torch.ones(200), labels[:, None])
    assert single.result(ALONE).correct_top5 == counted((logits, labels)).correct_top5


def test_zero_images_do_not_divide_by_zero():
    assert counted() == Accuracy(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0)


def test_fewer_than_five_classes_are_allowed():
    logits, labels = examples(10, num_classes=3)
    assert counted((logits, labels)).top5 == 100


def test_half_precision_logits_count_as_their_fp32_values():
    logits, labels = examples(50)
    assert counted((logits.bfloat16(), labels)) == counted((logits.bfloat16().float(), labels))


# --- the paired difference ------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_the_paired_difference_counts_images_that_only_one_model_has_right(pairs):
    first, second = (torch.tensor(column) for column in zip(*pairs, strict=True))
    result = paired_difference(first, second)
    assert result.only_first == sum(a and not b for a, b in pairs)
    assert result.only_second == sum(b and not a for a, b in pairs)
    assert result.points == pytest.approx(
        100 * (sum(b for _, b in pairs) - sum(a for a, _ in pairs)) / len(pairs)
    )
    assert result.low <= result.high
    mirrored = paired_difference(second, first)
    assert (mirrored.low, mirrored.high) == pytest.approx((-result.high, -result.low))


@pytest.mark.parametrize(("only_first", "only_second"), [(0.01, 0.01), (0.03, 0.01), (0.2, 0.3)])
def test_the_interval_covers_the_truth_at_its_stated_rate(only_first, only_second):
    """The test simulates 2,000 experiments with 400 images each. The tolerance is 4 standard errors
    around 95 %, plus the small error of the Wald interval."""
    generator = torch.Generator().manual_seed(0)
    truth = 100 * (only_second - only_first)
    covered = 0
    for _ in range(2000):
        draw = torch.rand(400, generator=generator)
        first = draw < only_first
        second = (draw >= only_first) & (draw < only_first + only_second)
        result = paired_difference(first, second)
        covered += result.low <= truth <= result.high
    assert 0.93 <= covered / 2000 <= 0.985


@pytest.mark.parametrize("total", [1, 20, 1795, 50_000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9855, 1.0])
def test_the_interval_of_an_accuracy_is_the_wilson_interval(total, share):
    right = round(share * total)
    expected = binomtest(right, total).proportion_ci(0.95, method="wilson")
    assert interval95(right, total) == pytest.approx(
        (100 * expected.low, 100 * expected.high), abs=1e-4
    )


def test_few_images_are_shown_with_their_interval():
    few, many = (Accuracy(n, n, n, 100.0, 100.0, 0.25, 0.0, 6) for n in (20, 5000))
    assert (
        str(few)
        == "top-1 100.00 % (20 of 20; 95 % interval 83.9 to 100.0), top-5 100.00 % (20), loss"
        " 0.2500"
    )
    assert str(many) == "top-1 100.00 % (5000), top-5 100.00 % (5000), loss 0.2500"
    assert "interval" not in str(Accuracy(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0))


def test_prints_top5_only_with_more_than_five_classes():
    for num_classes in (2, 5, 6):
        logits, labels = torch.randn(8, num_classes), torch.arange(8) % num_classes
        accuracy = counted((logits, labels))
        assert ("top-5" in str(accuracy)) == (num_classes == 6)
        assert {"top5", "correct_top5"} < accuracy.to_dict().keys()
        assert "num_classes" not in accuracy.to_dict()
