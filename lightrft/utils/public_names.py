"""Names under which programs written for LightRFT import classes and functions.

``NAMES`` has a row for each of LightRFT's modules. A module of that name that exists here passes
its unknown names to ``resolver``. The others are built by ``NamedModules`` when they are imported.
Classes and functions are in ``lightrft.compat``, and are imported on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LOSSES = (
    "DPOLoss",
    "GPTLMLoss",
    "HPSLoss",
    "KDLoss",
    "KTOLoss",
    "LogExpLoss",
    "LogSigmoidLoss",
    "PRMLoss",
    "PairWiseLoss",
    "PolicyLoss",
    "ValueLoss",
    "VanillaKTOLoss",
)
SCORED_PAIRS = ("AttentionPooling", "concatenated_forward")
KL_CONTROLLERS = ("AdaptiveKLController", "FixedKLController")

EXPERIENCES = ("Experience", "ExperienceVL")
BUFFERS = ("NaiveReplayBuffer", "NaiveReplayBufferVL")
BUFFER_PARTS = (
    "BufferItem",
    "BufferItemVL",
    "is_vl_experience",
    "make_experience_batch",
    "remove_padding_in_sequences",
    "split_experience_batch",
    "zero_pad_sequences",
)
STRATEGIES = ("get_strategy", "is_engine")
CALCULATORS = (
    "AdvantageCalculator",
    "BaseREINFORCECalculator",
    "CPGDCalculator",
    "GAECalculator",
    "GroupNormCalculator",
    "REINFORCEBaselineCalculator",
    "RLOOCalculator",
    "get_advantage_calculator",
    "normalize_advantages_cross_batch",
)

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "lightrft.models": {
        "losses": LOSSES,
        "scored_pairs": (*SCORED_PAIRS, "get_vlm_for_sequence_regression"),
    },
    "lightrft.models.loss": {"losses": LOSSES},
    "lightrft.models.utils": {"scored_pairs": SCORED_PAIRS},
    "lightrft.models.model": {"scored_pairs": ("get_vlm_for_sequence_regression",)},
    "lightrft.strategy": {"strategies": (*STRATEGIES, "StrategyBase", "StrategyConfig")},
    "lightrft.strategy.config": {"strategies": ("StrategyConfig",)},
    "lightrft.strategy.fake_strategy": {"strategies": ("FakeStrategy", "get_fake_strategy")},
    "lightrft.strategy.strategy": {"strategies": STRATEGIES},
    "lightrft.strategy.strategy_base": {"strategies": ("StrategyBase",)},
    "lightrft.trainer": {
        "advantage_calculator": CALCULATORS,
        "controllers": KL_CONTROLLERS,
        "experience": (*EXPERIENCES, *BUFFER_PARTS),
        "replay_buffer": BUFFERS,
    },
    "lightrft.trainer.advantage_calculator": {"advantage_calculator": CALCULATORS},
    "lightrft.trainer.experience_maker": {"experience": EXPERIENCES},
    "lightrft.trainer.experience_maker_vl": {"experience": EXPERIENCES},
    "lightrft.trainer.kl_controller": {"controllers": KL_CONTROLLERS},
    "lightrft.trainer.replay_buffer": {"replay_buffer": BUFFERS},
    "lightrft.trainer.replay_buffer_utils": {"experience": (*EXPERIENCES, *BUFFER_PARTS)},
    "lightrft.trainer.replay_buffer_vl": {"replay_buffer": BUFFERS},
}
"""LightRFT's modules: the file of ``lightrft.compat`` of each of their names."""


def names_in(module: str) -> list[str]:
    """Return the names in the row of ``module``."""
    return sorted(name for names in NAMES[module].values() for name in names)


def resolver(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``module``, which imports the names of its row."""
    home_of = {name: home for home, names in NAMES[module].items() for name in names}

    def resolve(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(f"lightrft.compat.{home_of[name]}"), name)

    return resolve


class NamedModules:
    """A finder of the modules that only ``NAMES`` knows."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of ``NAMES``, or ``None``.

        Args:
            name: Full name of the module.
            path: Not read.
            target: Not read.
        """
        return ModuleSpec(name, NamedModules) if name in NAMES else None  # ty: ignore[invalid-argument-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave the creation of the module to Python."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Add the names of the module's row."""
        module.__doc__ = "Names of this module in LightRFT, see ``lightrft.utils.public_names``."
        # ``__all__`` and ``__getattr__`` are read by Python itself.
        vars(module).update(
            __all__=names_in(module.__name__), __getattr__=resolver(module.__name__)
        )


def install() -> None:
    """Make the modules of ``NAMES`` importable. Modules in files come first."""
    if NamedModules not in sys.meta_path:
        sys.meta_path.append(NamedModules)
