"""Learning-rate schedules as a function of the step."""

from __future__ import annotations

import math
from fractions import Fraction

from lightrft.config.strategy import OptimizerConfig


def lr_factor(step: int, total: int, config: OptimizerConfig) -> float:
    """Return the factor of ``config.lr`` at optimizer step ``step`` (from 0) of ``total``.

    Linear warm-up reaches 1 at the step after the last warm-up step. The schedules cosine and
    linear then fall to ``min_lr_ratio`` at ``total``.

    Args:
        step: Optimizer step, from 0.
        total: Optimizer steps of the run.
        config: Schedule and warm-up.
    """
    # Use the decimal as written: in binary, 0.07 * 100 is 7.000000000000001, which rounds up to 8.
    warmup = config.warmup_steps or math.ceil(Fraction(str(config.warmup_ratio)) * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    fall = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fall
