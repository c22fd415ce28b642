"""Settings of the reward."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from lightrft.config.base import Settings, _full_parts, is_branch


class RewardTerm(Settings):
    """One term of a reward. The reward of a response is the weighted sum of its terms."""

    functions: ClassVar[tuple[str, ...]] = ("function",)
    """The settings of this section that name functions."""
    shorthand: ClassVar[str | None] = "function"
    """The setting that a bare string or number stands for."""

    function: str
    """Reward function: a registered name, ``package.module:function`` or ``file.py:function``."""
    weight: float = 1.0
    """Factor of this term in the sum."""
    name: str | None = None
    """Name of this term in metrics; ``null`` takes the name of the function."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class RewardConfig(Settings):
    """The scoring of responses. A call that fails in any way fails its samples only. Failed samples
    are counted and never trained on."""

    terms: tuple[RewardTerm, ...] = ()
    """Terms of the reward: one name, or a list of names and tables; see ``RewardTerm``."""
    per_source: dict[str, tuple[RewardTerm, ...]] = Field(default_factory=dict)
    """Data source to the terms of its rows, in place of ``terms``."""
    workers: int = Field(1, ge=1)
    """Number of processes that call the functions."""
    timeout: float = Field(10.0, gt=0)
    """Limit of each call in seconds."""
    memory_mb: int = Field(2048, ge=64)
    """Memory limit of a worker in MiB, on top of what it needs to start."""

    @model_validator(mode="before")
    @classmethod
    def _bare_names(cls, tree: object) -> object:
        """Accept ``terms: [math]``, short for ``terms: [{function: math}]``."""
        if not is_branch(tree):
            return tree
        full = dict(tree)  # the caller's tree stays as it is
        if "terms" in tree:
            full["terms"] = _full_parts(tree["terms"], "function")
        sources = tree.get("per_source")
        if is_branch(sources):
            full["per_source"] = {
                source: _full_parts(terms, "function") for source, terms in sources.items()
            }
        return full
