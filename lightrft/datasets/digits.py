"""Handwritten and spoken digits that ship with the package.

Their sources and licenses are in ``data``.
"""

from __future__ import annotations

import random
from importlib import resources

from lightrft.utils.errors import ConfigError

DIGITS = "0123456789"
BLANKS = ("?", ".", "-")
"""Readings without a digit."""
MOST_MALFORMED = 8
"""Largest number of malformed readings of a digit."""


def handwritten(
    *, split: str = "train", guesses: float = 0.0, seed: int = 0
) -> list[dict[str, object]]:
    """Return handwritten digits as rows with ``image``, ``label`` and ``id``.

    Images have 8 x 8 grey pixels. There are 1,437 rows in ``train`` and 360 in ``test``.

    Args:
        split: ``train`` or ``test``.
        guesses: fraction of rows whose ``response`` is a random digit instead of the label. Such
            rows teach the form of a response and nothing about the image.
        seed: seed of the random digits.

    Raises:
        ConfigError: there is no such split, or ``guesses`` is outside [0, 1].
    """
    return _rows("digits", split, guesses, seed)


def spoken(*, split: str = "train", guesses: float = 0.0, seed: int = 0) -> list[dict[str, object]]:
    """Return spoken digits as rows with ``audio``, ``label`` and ``id``.

    Recordings are sampled at 8 kHz, by six speakers, and take 0.1 to 2.3 seconds. There are 1,200
    rows in ``train`` and 300 in ``test``.

    Args:
        split: ``train`` or ``test``.
        guesses: fraction of rows whose ``response`` is a random digit instead of the label.
        seed: seed of the random digits.

    Raises:
        ConfigError: there is no such split, or ``guesses`` is outside [0, 1].
    """
    return _rows("spoken_digits", split, guesses, seed)


def readings(
    *, kind: str, split: str = "train", wrong: int = 3, malformed: int = 0, seed: int = 0
) -> list[dict[str, object]]:
    """Return a right and some wrong readings of each digit, for reward models.

    A row has ``image`` or ``audio``, and ``completions`` with their ranks. The right digit is
    better than wrong ones, and these are better than malformed readings: of two digits, or of none.

    Args:
        kind: ``handwritten`` or ``spoken``.
        split: ``train`` or ``test``.
        wrong: number of wrong digits, from 1 to 9.
        malformed: number of malformed readings.
        seed: seed of the readings.

    Raises:
        ConfigError: there is no such kind or split, or a number is out of range.
    """
    kinds = {"handwritten": handwritten, "spoken": spoken}
    if kind not in kinds:
        raise ConfigError(f"kind = {kind!r} must be one of {', '.join(kinds)}")
    if not 1 <= wrong < len(DIGITS):
        raise ConfigError(f"wrong = {wrong} must be a number of wrong digits from 1 to 9")
    if not 0 <= malformed <= MOST_MALFORMED:
        raise ConfigError(f"malformed = {malformed} must be from 0 to {MOST_MALFORMED}")
    found: list[dict[str, object]] = []
    for row in kinds[kind](split=split):
        chance = random.Random(f"readings {row['id']} {seed}")
        kept = {key: value for key, value in row.items() if key not in ("response", "label")}
        ranked = _ranked(chance, str(row["label"]), wrong, malformed)
        found.append({**kept, "completions": ranked})
    return found


def _ranked(
    chance: random.Random, right: str, wrong: int, malformed: int
) -> list[dict[str, object]]:
    """Return readings of the digit ``right`` with their ranks."""
    others = [digit for digit in DIGITS if digit != right]
    doubled = [right + digit for digit in DIGITS] + [digit + right for digit in others]
    wrong_digits = chance.sample(others, wrong)
    shapes = chance.sample([*doubled, *BLANKS], malformed)
    return [
        {"rank": rank, "completion": reading}
        for rank, readings_of_rank in enumerate(([right], wrong_digits, shapes))
        for reading in readings_of_rank
    ]


def _rows(name: str, split: str, guesses: float, seed: int) -> list[dict[str, object]]:
    if not 0 <= guesses <= 1:
        raise ConfigError(f"{name}: guesses = {guesses} must be a share from 0 to 1")
    chance = random.Random(f"{name} {split} {seed}")
    rows = []
    for row in _table(name, split):
        label = str(row["label"])
        response = chance.choice(DIGITS) if chance.random() < guesses else label
        rows.append(
            {
                **row,
                "prompt": "Which digit?",
                "response": response,
                "label": label,
                "data_source": name,
            }
        )
    return rows


def _table(name: str, split: str) -> list[dict[str, object]]:
    import pyarrow.parquet

    folder = resources.files("lightrft.datasets") / "data" / name
    with resources.as_file(folder / f"{split}.parquet") as file:
        if not file.is_file():
            raise ConfigError(f"{name}: there is no split {split!r}; there are train and test")
        return pyarrow.parquet.read_table(file).to_pylist()
