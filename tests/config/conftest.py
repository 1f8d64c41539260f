from pathlib import Path

import pytest

from vit.config.io import ConfigError, LoadedConfig, load_with_origins


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str) -> LoadedConfig:
        Path("run.yaml").write_text(text)
        return load_with_origins("run.yaml", overrides)

    return load_text


@pytest.fixture
def problems(load):
    def problems_of(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value).splitlines()

    return problems_of
