"""Test that, for every kind of source, a wrong flag raises an error before the source is read."""

import pytest

from data_prep import imagefolder


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--shard-mib", "0", "'0' is not a positive integer"),
        ("--minival", "1", "'1' is not a number in [0, 1)"),
        ("--minival", "x", "invalid fraction value: 'x'"),
        ("--check", "pixels", "invalid choice: 'pixels'"),
    ],
)
def test_wrong_values_are_found_before_the_source_is_read(tmp_path, capsys, flag, value, message):
    with pytest.raises(SystemExit):
        imagefolder.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out"), flag, value])
    error = capsys.readouterr().err
    assert error.startswith(f"error: argument {flag}: {message}")
    assert error.endswith("--help lists the options)\n")
