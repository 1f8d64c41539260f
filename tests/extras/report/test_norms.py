"""Test the picture of norms."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from vit.extras.report import curves


def line(step: int, **changes) -> dict:
    layers = ("embed", "blocks.0", "blocks.1", "head")
    values = {key: dict.fromkeys(layers, 1.0) for key in curves.NORM_PANELS}
    values["max_attn_logit"] = {"blocks.0": 3.0, "blocks.1": 40.0}
    return {"step": step, "update_norm": dict.fromkeys(layers, 1e-3), **values, **changes}


def test_each_column_ends_at_its_step_and_gaps_are_grey(tmp_path, monkeypatch):
    drawn = {}
    plain = Figure.colorbar

    def colorbar(figure, mesh, ax, **options):
        drawn[ax.get_title(loc="left")] = mesh
        return plain(figure, mesh, ax=ax, **options)

    monkeypatch.setattr(Figure, "colorbar", colorbar)
    weights = {"embed": 2.0, "blocks.0": 4.0, "blocks.1": None, "head": 0.5}
    lines = [line(10), line(20, weight_norm=weights), line(25)]
    picture = curves.plot_norms(lines, tmp_path / "norms.png")
    assert list(drawn) == list(curves.NORM_PANELS.values())
    growth = drawn[curves.NORM_PANELS[curves.WEIGHT]]
    assert growth.get_coordinates()[0, :, 0].tolist() == [0, 10, 20, 25]
    expected = [[1, 2, 1], [1, 4, 1], [1, np.nan, 1], [1, 0.5, 1]]
    np.testing.assert_array_equal(growth.get_array().filled(np.nan), expected)
    logits = drawn[curves.NORM_PANELS[curves.LARGEST_LOGIT]]
    assert logits.get_array().tolist() == [[3.0] * 3, [40.0] * 3]
    with Image.open(picture) as image:
        assert image.width == 1400


def test_other_attention_and_missing_measurements_are_stated(tmp_path):
    lines = [{k: v for k, v in line(10).items() if k != "max_attn_logit"}]
    assert curves.plot_norms(lines, tmp_path / "norms.png").is_file()
    with pytest.raises(ValueError, match=r"log\.norms_every_steps"):
        curves.plot_norms([], tmp_path / "none.png")
