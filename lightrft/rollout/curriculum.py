"""Prompts drawn by weights that follow how often their answers pass.

``CURRICULA[name](rates [P], epoch, **options) -> weights [P]``, each 0 or more: ``rates`` are running pass rates, nan for prompts that
have not been answered yet, and ``epoch`` is how many prompts were drawn over how many there are. Options that mean nothing raise
``ConfigError``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from lightrft.algorithms.group_filters import pass_rate_of
from lightrft.config.rollout import CurriculumConfig
from lightrft.datasets.mixing import generator
from lightrft.types import Rollout
from lightrft.utils.errors import CheckpointError, ConfigError
from lightrft.utils.lazy_imports import np, torch
from lightrft.utils.registry import Registry

Weights = Callable[..., "np.ndarray"]
CURRICULA: Registry[Weights] = Registry("curriculum")


@CURRICULA.register(
    "priority",
    formula="weight = p (1 - p) + floor, 1/4 + floor for prompts not seen yet",
    latex=r"w=p(1-p)+\epsilon",
    paper="learnability, arXiv 2502.12272",
)
def priority(rates: np.ndarray, epoch: float, *, floor: float = 0.05) -> np.ndarray:
    """Prompts of which some answers pass and some do not. ``floor`` keeps the others in sight, since their rates change."""
    _floor("priority", floor)
    return np.where(np.isnan(rates), 0.25, rates * (1 - rates)) + floor


@CURRICULA.register(
    "failures",
    formula="weight = 1 - p + floor, 1 + floor for prompts not seen yet",
    latex=r"w=1-p+\epsilon",
    paper="prioritized sampling of Kimi k1.5, arXiv 2501.12599",
)
def failures(rates: np.ndarray, epoch: float, *, floor: float = 0.0) -> np.ndarray:
    """The more often a prompt fails, the more often it comes."""
    _floor("failures", floor)
    return np.where(np.isnan(rates), 1.0, 1 - rates) + floor


@CURRICULA.register(
    "easy_to_hard",
    formula="weight = exp(-((p - m) / width)^2 / 2) + floor,  m from start to end over epochs; 1 + floor for prompts not seen yet",
    latex=r"w=\exp\!\big(-\tfrac12((p-m)/\sigma)^2\big)+\epsilon,\quad m=a+(b-a)\min(1,e/E)",
)
def easy_to_hard(
    rates: np.ndarray,
    epoch: float,
    *,
    epochs: float,
    start: float = 0.8,
    end: float = 0.2,
    width: float = 0.2,
    floor: float = 0.01,
) -> np.ndarray:
    """Prompts whose pass rate is near a mark, which moves from easy to hard."""
    _floor("easy_to_hard", floor)
    for name, value in (("epochs", epochs), ("width", width)):
        if not value > 0:
            raise ConfigError(f"curriculum easy_to_hard: options.{name} is {value}; it must be positive")
    mark = start + (end - start) * min(1.0, epoch / epochs)
    return np.where(np.isnan(rates), 1.0, np.exp(-(((rates - mark) / width) ** 2) / 2)) + floor


class Curriculum:
    """Draws positions in a data set, none twice in a step while others are left, and learns between steps.

    What is drawn depends on the seed, the number of the draw and the pass rates only. An epoch is as many prompts as there are.
    """

    def __init__(self, config: CurriculumConfig, ids: Sequence[str], seed: int) -> None:
        if not ids:
            raise ValueError("there are no prompts to sample from")
        self.config = config
        self.seed = seed
        self.draws = 0
        self.drawn = 0
        self.rates = np.full(len(ids), np.nan)
        self._place = {name: i for i, name in enumerate(ids)}
        self._out = np.zeros(len(ids), dtype=bool)  # drawn in this step
        self._about = hashlib.blake2b("\n".join(ids).encode(), digest_size=8).hexdigest()

    def next(self, count: int) -> list[int]:
        """``count`` positions by weight, without replacement, as far as the data set goes."""
        weights = self._weights()
        taken: list[int] = []
        while len(taken) < count:
            if self._out.all():
                self._out[:] = False
            part = self._pick(weights, np.flatnonzero(~self._out), count - len(taken))
            self._out[part] = True
            taken += part.tolist()
        self.drawn += count
        return taken

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """Take in the scored answers of a step, group by group, and begin another. What is known then: the share of prompts
        ``seen``, their mean ``pass_rate``, and the ``epoch``."""
        momentum, threshold = self.config.momentum, self.config.threshold
        for group in groups:
            if group:
                i, share = self._place[group[0].prompt.id], pass_rate_of(group, threshold)
                old = self.rates[i]
                self.rates[i] = share if np.isnan(old) else momentum * old + (1 - momentum) * share
        self._out[:] = False
        seen = self.rates[~np.isnan(self.rates)]
        known = {"seen": len(seen) / len(self.rates), "epoch": self.epoch}
        return {**known, "pass_rate": float(seen.mean())} if len(seen) else known

    @property
    def epoch(self) -> float:
        """Prompts drawn, over how many there are."""
        return self.drawn / len(self.rates)

    def state_dict(self) -> dict[str, Any]:
        seen = np.flatnonzero(~np.isnan(self.rates))
        return {
            "about": self._about,
            "draws": self.draws,
            "drawn": self.drawn,
            "seen": torch.from_numpy(seen),
            "rates": torch.from_numpy(self.rates[seen]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, at the beginning of a step. Raises ``CheckpointError`` when it is of other prompts."""
        if state["about"] != self._about:
            raise CheckpointError("the checkpoint's pass rates are of other prompts than data.sources has now")
        self.draws, self.drawn = state["draws"], state["drawn"]
        self.rates[:] = np.nan
        self.rates[state["seen"].numpy()] = state["rates"].numpy()
        self._out[:] = False

    def _weights(self) -> np.ndarray:
        name = self.config.name
        weights = np.asarray(CURRICULA[name](self.rates.copy(), self.epoch, **self.config.options), dtype=np.float64)
        if weights.shape != self.rates.shape or not np.isfinite(weights).all() or (weights < 0).any():
            raise ConfigError(
                f"rollout.curriculum: {name!r} must give {len(self.rates)} finite weights that are not negative, one for each prompt"
            )
        return weights

    def _pick(self, weights: np.ndarray, free: np.ndarray, count: int) -> np.ndarray:
        """Weighted sampling without replacement by the Gumbel top-k trick (arXiv 1903.06059); of weight 0 only when all others are
        gone."""
        noise = generator(self.seed, 3, self.draws).gumbel(size=len(weights))[free]
        self.draws += 1
        given = weights[free]
        keys = np.where(given > 0, np.log(np.maximum(given, np.finfo(np.float64).tiny)), -1e6) + noise
        best = np.argpartition(-keys, count - 1)[:count] if count < len(keys) else np.arange(len(keys))
        return free[best[np.argsort(-keys[best], kind="stable")]]


def _floor(name: str, floor: float) -> None:
    if floor < 0:
        raise ConfigError(f"curriculum {name}: options.floor is {floor}; a weight cannot be negative")
