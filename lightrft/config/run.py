"""Settings of the run directory, checkpoints and logs."""

from __future__ import annotations

from pathlib import PurePath
from typing import ClassVar

from pydantic import Field, field_validator

from lightrft.config.base import Settings


class RunConfig(Settings):
    """The run folder, ``dir``/``name``, and how a run starts.

    ``resume``: ``auto`` goes on from the newest checkpoint of a folder whose config is equal, ``never`` refuses a folder that
    exists, a path goes on from that checkpoint. ``overwrite`` starts anew in a folder that exists. ``threads`` 0 leaves the
    number of CPU threads to the program.
    """

    paths: ClassVar[tuple[str, ...]] = ("resume",)
    name: str = "run"
    dir: str = "runs"
    seed: int = Field(0, ge=0)
    resume: str = "auto"
    overwrite: bool = False
    threads: int = Field(0, ge=0)
    progress: bool = True

    @field_validator("name")
    @classmethod
    def _below_dir(cls, name: str) -> str:
        path = PurePath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(
                f"{name!r} is no folder below run.dir; give a name such as 'first' or 'trials/first', and set run.dir"
            )
        return name


class CheckpointConfig(Settings):
    """When a run saves a checkpoint, and which ones stay. It also saves at its end and when it is stopped."""

    every: int = Field(0, ge=0)
    """Save after every so many steps; 0 leaves it to ``every_minutes``. Set it to resume from, or export, certain steps."""
    every_minutes: float = Field(10.0, ge=0)
    """Save after the first step that ends so many minutes after the last save; 0 turns it off. A kill loses at most this time
    and one step. Raise it where a save takes minutes itself."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints that stay on disk. Raise it to export earlier steps."""
    best: str | None = None
    """Metric whose best checkpoint stays too and is the one in ``model/``, e.g. ``eval/accuracy``; with a minus in front, less
    is better. A step that improves on all checkpoints is saved. Without it ``model/`` holds the last step."""


class LogConfig(Settings):
    """Where metrics and rollouts go. ``wandb`` names a project; ``rollouts_every`` counts steps, 0 writes none; ``batches_every`` too,
    for batches with all columns that were computed of them, which ``lightrft.diagnostics.replay`` puts through any phase again.

    ``entropy`` measures the policy's entropy also where no loss term needs it.
    """

    tensorboard: bool = True
    wandb: str | None = None
    rollouts_every: int = Field(1, ge=0)
    batches_every: int = Field(0, ge=0)
    entropy: bool = True
