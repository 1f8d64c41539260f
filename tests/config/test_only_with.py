"""Test that a setting marked with `OnlyWith` is rejected if the setting that it requires is
missing."""

from __future__ import annotations

from typing import Any

import pytest
from config.other_values import SETTINGS, Setting, beside, changed, without

from vit.config.base import OnlyWith
from vit.config.io import ConfigError, from_dict

NEEDY = [
    pytest.param(setting, needed, id=f"{setting}-{'|'.join(needed.conditions)}")
    for setting in SETTINGS
    for needed in setting.needs
]


def problems_of(settings: dict[str, Any]) -> list[str]:
    tree: dict[str, dict[str, Any]] = {"data": {"root": "x"}, "train": {"steps": 300}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    try:
        from_dict(tree, "test")
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(("setting", "needed"), NEEDY)
def test_a_setting_is_refused_without_its_partner_and_accepted_with_it(
    setting: Setting, needed: OnlyWith
):
    own = changed(setting)
    complaint = f"{setting.key} has no effect with "
    section = setting.key.partition(".")[0]
    partners = [condition.partition("=")[0].rstrip("!") for condition in needed.conditions]
    names = [name if "." in name else f"{section}.{name}" for name in partners]
    lines = [
        line
        for line in problems_of(without(setting, needed) | own)
        if complaint in line and all(name in line for name in names)
    ]
    assert len(lines) == 1, problems_of(without(setting, needed) | own)
    assert f": set {'' if '!=' not in needed.conditions[0] else 'another '}{names[0]}" in lines[0]
    assert f", or {setting.key}=" in lines[0]
    assert problems_of(beside(setting) | own) == []
    default = {setting.key: setting.default()}
    assert not [
        line for line in problems_of(without(setting, needed) | default) if complaint in line
    ], "a default value must not count as set by the user"
