"""Sample prompts with weights that depend on their pass rates.

``CURRICULA[name](rates, epoch, **options) -> weights [P]``. Weights are 0 or more. Options that
make no sense raise ``ConfigError``.

Args:
    rates: ``[P]``. Running pass rates; NaN for prompts without responses so far.
    epoch: Number of sampled prompts divided by the number of prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from lightrft.algorithms.group_filters import pass_rate_of
from lightrft.config.rollout import CurriculumConfig
from lightrft.types import Rollout
from lightrft.utils.errors import CheckpointError, ConfigError
from lightrft.utils.lazy_imports import np, torch
from lightrft.utils.registry import Registry
from lightrft.utils.seeding import RandomStream, numpy_generator
from lightrft.utils.state_io import State

Weights = Callable[..., "np.ndarray"]
CURRICULA: Registry[Weights] = Registry("curriculum")


@CURRICULA.register(
    "priority",
    formula="weight = p (1 - p) + floor, 1/4 + floor for prompts not seen yet",
    latex=r"w=p(1-p)+\epsilon",
    paper="learnability, arXiv 2502.12272",
)
def priority(rates: np.ndarray, epoch: float, *, floor: float = 0.05) -> np.ndarray:
    """Prefer prompts of which some responses pass and some do not.

    Args:
        floor: Added to every weight, so that other prompts stay in use, since their pass rates
            change.
    """
    _floor("priority", floor)
    return np.where(np.isnan(rates), 0.25, rates * (1 - rates)) + floor


@CURRICULA.register(
    "failures",
    formula="weight = 1 - p + floor, 1 + floor for prompts not seen yet",
    latex=r"w=1-p+\epsilon",
    paper="prioritized sampling of Kimi k1.5, arXiv 2501.12599",
)
def failures(rates: np.ndarray, epoch: float, *, floor: float = 0.0) -> np.ndarray:
    """Sample prompts in proportion to their failure rate.

    Args:
        floor: Added to every weight.
    """
    _floor("failures", floor)
    return np.where(np.isnan(rates), 1.0, 1 - rates) + floor


@CURRICULA.register(
    "easy_to_hard",
    formula="weight = exp(-((p - m) / width)^2 / 2) + floor,  m from start to end over epochs; 1 + "
    "floor for prompts not seen yet",
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
    """Prefer prompts whose pass rate is near a target that moves from easy to hard.

    Args:
        epochs: Number of epochs until the target reaches ``end``.
        start: First target pass rate.
        end: Last target pass rate.
        width: Standard deviation of the weights around the target.
        floor: Added to every weight.

    Raises:
        ConfigError: If ``epochs`` or ``width`` is not positive.
    """
    _floor("easy_to_hard", floor)
    for name, value in (("epochs", epochs), ("width", width)):
        if not value > 0:
            raise ConfigError(
                f"curriculum easy_to_hard: options.{name} is {value}; it must be positive"
            )
    mark = start + (end - start) * min(1.0, epoch / epochs)
    return np.where(np.isnan(rates), 1.0, np.exp(-(((rates - mark) / width) ** 2) / 2)) + floor


class Curriculum:
    """Samples positions in a data set by weight and learns pass rates between steps.

    No position repeats within a step while unused positions remain. The result depends only on the
    seed, the number of earlier calls and the pass rates. An epoch is as many samples as there are
    prompts.

    Args:
        config: The settings ``rollout.curriculum``.
        ids: Ids of the prompts, by position.
        seed: Determines the samples.

    Raises:
        ValueError: If there are no prompts.
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
        self._out = np.zeros(len(ids), dtype=bool)  # sampled in this step
        # Pass rates are stored by position, so a checkpoint must belong to the same prompts.
        self._about = hashlib.blake2b("\n".join(ids).encode(), digest_size=8).hexdigest()

    def next(self, count: int) -> list[int]:
        """Sample ``count`` positions by weight, without replacement while unused ones remain."""
        weights = self._weights()
        taken: list[int] = []
        while len(taken) < count:
            # A step that needs more prompts than there are begins to repeat them.
            if self._out.all():
                self._out[:] = False
            part = self._pick(weights, np.flatnonzero(~self._out), count - len(taken))
            self._out[part] = True
            taken += part.tolist()
        self.drawn += count
        return taken

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """Update the pass rates from the scored responses of a step, and begin another step.

        Returns:
            The fraction of prompts ``seen``, their mean ``pass_rate``, and the ``epoch``.
        """
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
        """Return the number of sampled prompts divided by the number of prompts."""
        return self.drawn / len(self.rates)

    def state_dict(self) -> State:
        """Return the pass rates and the number of samples so far."""
        seen = np.flatnonzero(~np.isnan(self.rates))
        return {
            "about": self._about,
            "draws": self.draws,
            "drawn": self.drawn,
            "seen": torch.from_numpy(seen),
            "rates": torch.from_numpy(self.rates[seen]),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from ``state`` at the beginning of a step.

        Raises:
            CheckpointError: If it belongs to other prompts.
        """
        if state["about"] != self._about:
            raise CheckpointError(
                "the checkpoint's pass rates are of other prompts than data.sources has now"
            )
        self.draws, self.drawn = state["draws"], state["drawn"]
        self.rates[:] = np.nan
        self.rates[state["seen"].numpy()] = state["rates"].numpy()
        self._out[:] = False

    def _weights(self) -> np.ndarray:
        name = self.config.name
        weights = np.asarray(
            CURRICULA[name](self.rates.copy(), self.epoch, **self.config.options), dtype=np.float64
        )
        is_valid = weights.shape == self.rates.shape and np.isfinite(weights).all()
        if not is_valid or (weights < 0).any():
            raise ConfigError(
                f"rollout.curriculum: {name!r} must give {len(self.rates)} finite weights that "
                "are not negative, one for each prompt"
            )
        return weights

    def _pick(self, weights: np.ndarray, free: np.ndarray, count: int) -> np.ndarray:
        """Sample by weight without replacement, with the Gumbel top-k trick (arXiv 1903.06059).

        Positions of weight 0 are sampled only when all others are used.
        """
        generator = numpy_generator(self.seed, RandomStream.CURRICULUM, self.draws)
        # For all positions, so that the noise of one does not depend on which others are free.
        noise = generator.gumbel(size=len(weights))[free]
        # Part of the seed, so that two samplings of one step differ.
        self.draws += 1
        given = weights[free]
        # ``where`` computes both sides, and the logarithm of 0 would warn.
        positive = np.maximum(given, np.finfo(np.float64).tiny)
        # -1e6 is far below any noise, so that positions of weight 0 come last.
        keys = np.where(given > 0, np.log(positive), -1e6) + noise
        if count < len(keys):
            best = np.argpartition(-keys, count - 1)[:count]
        else:
            best = np.arange(len(keys))
        # The order of ``argpartition`` within the best is not defined.
        return free[best[np.argsort(-keys[best], kind="stable")]]


def _floor(name: str, floor: float) -> None:
    if floor < 0:
        raise ConfigError(
            f"curriculum {name}: options.floor is {floor}; a weight cannot be negative"
        )
