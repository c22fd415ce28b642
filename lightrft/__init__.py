"""Reinforcement-learning fine-tuning of language, vision-language and audio-language models."""

from __future__ import annotations

from typing import Any

from lightrft import verbs
from lightrft.utils.public_names import install

VERBS = tuple(name.replace("-", "_") for name, row in verbs.VERBS.items() if row.function)
"""Verbs that are functions of this module."""

ERRORS = ("ConfigError", "UserError")
"""Errors that a caller may catch."""

__all__ = ["Policy", "Run", "__version__", "here", *ERRORS, *VERBS]

install()


def __getattr__(name: str) -> Any:
    # Imported on first use: the settings take a fifth of a second, the version a tenth.
    if name == "Run":
        from lightrft.api import Run

        return Run
    if name == "Policy":
        # By its path: it imports torch, which the other names need later or never.
        from lightrft.api.policy import Policy

        return Policy
    if name in ERRORS:
        from lightrft.utils import errors

        return getattr(errors, name)
    if name == "here":
        from lightrft.rewards.program_function import here

        return here
    if name in VERBS:
        from lightrft.api import signed

        return signed(name)
    if name != "__version__":
        hint = "" if name.startswith("_") else _hint(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    from importlib import metadata

    try:
        return metadata.version("lightrft-rl")
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        return "0+source"


def _hint(name: str) -> str:
    """Return the function here for a class of another framework, as ``GRPOTrainer``, or ""."""
    from lightrft.config.presets import meant_verb
    from lightrft.utils.errors import closest

    verb, setting, value = meant_verb(name.removesuffix("Config").removesuffix("Trainer").lower())
    function = closest(verb.replace("-", "_"), VERBS)
    others = f', {setting}="{value}"' if setting else ""
    return f"; did you mean lightrft.{function}(model=..., data=...{others})?" if function else ""


def __dir__() -> list[str]:
    return [*globals(), *__all__]
