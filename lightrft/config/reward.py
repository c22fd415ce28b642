"""Settings of the reward."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from lightrft.config.base import Settings, _full_parts


class RewardTerm(Settings):
    """One term of a reward. ``function``: a registered name, ``package.module:function`` or ``file.py:function``;
    ``options`` are passed to it as keywords. The reward of an answer is the weighted sum of its terms, each logged by ``name``."""

    functions: ClassVar[tuple[str, ...]] = ("function",)
    shorthand: ClassVar[str | None] = "function"

    function: str
    weight: float = 1.0
    name: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Settings):
    """How answers are scored. ``per_source`` gives rows of one data source terms of their own.

    Functions run in ``workers`` processes, each call under ``deadline`` seconds and ``memory_mb`` MiB on top of what a
    worker needs to start. A call that fails in any way fails its samples only: they are counted and never trained on.
    """

    terms: tuple[RewardTerm, ...] = ()
    per_source: dict[str, tuple[RewardTerm, ...]] = Field(default_factory=dict)
    workers: int = Field(1, ge=1)
    deadline: float = Field(10.0, gt=0)
    memory_mb: int = Field(2048, ge=64)

    @model_validator(mode="before")
    @classmethod
    def _bare_names(cls, tree: Any) -> Any:
        """``terms: [math]`` stands for ``terms: [{function: math}]``."""

        if isinstance(tree, dict):
            tree = dict(tree)
            if "terms" in tree:
                tree["terms"] = _full_parts(tree["terms"], "function")
            if isinstance(tree.get("per_source"), dict):
                tree["per_source"] = {k: _full_parts(v, "function") for k, v in tree["per_source"].items()}
        return tree
