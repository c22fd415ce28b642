"""Data of a library that the tests of rewards make for themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrft.rewards.rules.ifeval import checks


@pytest.fixture
def sentence_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A sentence model of nltk, trained here on a few sentences."""
    import nltk
    from nltk.tokenize.punkt import PunktTrainer, save_punkt_params

    trained = PunktTrainer("Dr. Day sees Dr. Dee. He is in. Dr. Do is out. " * 20).get_params()
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    # nltk writes and reads only below these folders.
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    save_punkt_params(trained, str(folder))
    checks._sentence_model.cache_clear()
    yield
    checks._sentence_model.cache_clear()
