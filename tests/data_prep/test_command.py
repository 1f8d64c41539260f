"""Flags that all sources share: a wrong value is an error before the source is touched."""

import pytest

from data_prep import imagefolder


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--shards", "abc", "'abc' is neither A-B, such as 100-199, nor I/N"),
        ("--shards", "5-1", "'5-1' is neither A-B"),
        ("--shards", "3/2", "'3/2' is neither A-B"),
        ("--shards", "0/0", "'0/0' is neither A-B"),
        ("--jpeg-quality", "101", "'101' is not an integer from 1 to 100"),
    ],
)
def test_wrong_values_are_found_before_the_source_is_read(tmp_path, capsys, flag, value, message):
    with pytest.raises(SystemExit):
        imagefolder.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out"), flag, value])
    error = capsys.readouterr().err
    assert error.startswith(f"error: argument {flag}: {message}")
    assert error.endswith("--help lists the options)\n")
