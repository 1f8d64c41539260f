"""Run the C code on corrupt files with sanitizers. The code must access only its own memory, and
both implementations must return the same results.

To fuzz for longer, run `python tests/native/fuzz.py --minutes 10`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from native import fuzz

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> Path:
    return fuzz.write_seeds(tmp_path_factory.mktemp("fuzz") / "seeds")


def built(folder: Path, sources: Path = fuzz.SOURCES) -> Path:
    try:
        return fuzz.build(folder, sources)
    except fuzz.NoSanitizer as error:
        if os.environ.get("VIT_REQUIRE_NATIVE") == "1":
            pytest.fail(f"VIT_REQUIRE_NATIVE=1, but {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("program"))


def test_twenty_thousand_damaged_files_break_nothing(program, seeds):
    status, printed = fuzz.run(program, seeds, seed=1, files=20_000)
    assert status == 0, printed
    counts = {
        operation: dict(re.findall(r"(\d+):(\d+)", line))
        for operation, line in re.findall(r"(windows|transcoded) by status(.*)", printed)
    }
    for operation, least in (("windows", 20_000), ("transcoded", 2_000)):
        assert int(counts[operation]["0"]) > least, printed
        assert int(counts[operation]["1"]) > least, printed


def test_results_do_not_depend_on_the_previous_content_of_memory(program, seeds):
    printed = [fuzz.run(program, seeds, seed=2, files=4_000, fill=fill) for fill in (0x00, 0xA5)]
    assert printed[0] == printed[1]
    assert printed[0][0] == 0, printed[0][1]


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        (
            "bits.h",
            "JPEG_PADDING = 64 * 31 / 8 + 8 + 8",
            "JPEG_PADDING = 64 * 31 / 8",
            "AddressSanitizer",
        ),
        ("pixels_avx2.h", "_mm256_set1_epi16(7)", "_mm256_set1_epi16(8)", "FAILED: other pixels"),
        ("scan.h", "if (n && index == 63 &&", "if (n && index >= 60 &&", "FAILED: transcoding"),
    ],
)
def test_the_fuzzer_detects_planted_bugs(tmp_path, seeds, file, right, wrong, message):
    sources = shutil.copytree(fuzz.SOURCES, tmp_path / "native")
    text = (sources / file).read_text()
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong))
    status, printed = fuzz.run(built(tmp_path, sources), seeds, seed=3, seconds=120)
    assert status != 0
    assert message in printed
    assert (seeds.parent / "fuzz-failure.jpg").stat().st_size > 0
