"""Real digits that come with the package, handwritten and spoken. Their sources and licences lie beside them in ``data``."""

from __future__ import annotations

import random
from importlib import resources
from typing import Any

from lightrft.utils.errors import ConfigError

DIGITS = "0123456789"


def handwritten(*, split: str = "train", guesses: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    """Pictures of 8 x 8 grey pixels, 1,437 to train on and 360 held out (``test``), as rows with ``image``, ``label`` and ``id``.

    ``guesses`` is the share of rows whose ``response`` is a digit drawn by ``seed`` instead of the right one: it shows what an
    answer looks like and tells nothing about the picture. Raises ``ConfigError`` for a split that is not there.
    """
    return _rows("digits", split, guesses, seed)


def spoken(*, split: str = "train", guesses: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    """Recordings at 8 kHz by six speakers, 0.1 to 2.3 seconds, 1,200 to train on and 300 held out, as rows with ``audio``, ``label``
    and ``id``. ``guesses``, and what is raised, as in ``handwritten``."""
    return _rows("spoken_digits", split, guesses, seed)


def _rows(name: str, split: str, guesses: float, seed: int) -> list[dict[str, Any]]:
    if not 0 <= guesses <= 1:
        raise ConfigError(f"{name}: guesses = {guesses} must be a share from 0 to 1")
    chance = random.Random(f"{name} {split} {seed}")
    rows = []
    for row in _table(name, split):
        label = str(row["label"])
        response = chance.choice(DIGITS) if chance.random() < guesses else label
        rows.append({**row, "prompt": "Which digit?", "response": response, "label": label, "data_source": name})
    return rows


def _table(name: str, split: str) -> list[dict[str, Any]]:
    import pyarrow.parquet

    folder = resources.files("lightrft.datasets") / "data" / name
    with resources.as_file(folder / f"{split}.parquet") as file:
        if not file.is_file():
            raise ConfigError(f"{name}: there is no split {split!r}; there are train and test")
        return pyarrow.parquet.read_table(file).to_pylist()
