"""Test that any file that cannot be opened causes a one-line error."""

import pytest

from data_prep.errors import PrepError
from data_prep.read.archives import walk_tar


def test_a_file_that_cannot_be_opened_gives_one_line(tmp_path):
    (tmp_path / "loop.tar").symlink_to("loop.tar")
    for name, message in (
        ("a.tar", "No such file"),
        ("n" * 300, "File name too long"),
        ("loop.tar", "Too many levels of symbolic links"),
    ):
        with pytest.raises(PrepError, match=message):
            next(walk_tar(tmp_path / name))
