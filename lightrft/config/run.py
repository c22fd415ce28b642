"""Settings of the run directory, checkpoints and logs."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from lightrft.config.base import Settings


class RunConfig(Settings):
    """The run folder, ``dir``/``name``, and how a run starts."""

    paths: ClassVar[tuple[str, ...]] = ("resume",)
    """The settings of this section that are paths."""
    name: str = "run"
    """Name of the run folder below ``dir``."""
    dir: str = "runs"
    """Folder of runs, relative to the working directory."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all random numbers of the run."""
    resume: str = "auto"
    """``auto`` resumes from the newest checkpoint of a folder with an equal config. ``never``
    refuses a folder that holds a run. A path resumes from that checkpoint."""
    overwrite: bool = False
    """Replace the run in the folder, and start from step 0. It is restored if this run ends before
    it has metrics."""
    threads: int = Field(0, ge=0)
    """Number of CPU threads; 0 leaves it to torch."""
    progress: bool = True
    """Show a progress bar."""

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.dir).expanduser() / self.name

    @field_validator("name")
    @classmethod
    def _below_dir(cls, name: str) -> str:
        path = PurePath(name)
        # ``overwrite`` deletes the folder, so it must never be outside ``dir``.
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(
                f"{name!r} is no folder below run.dir; give a name such as 'first' or "
                "'trials/first', and set run.dir"
            )
        return name


class CheckpointConfig(Settings):
    """When a run saves a checkpoint, and which ones stay. It also saves at its end and when it is
    stopped."""

    every: int = Field(0, ge=0)
    """Save after every so many steps; 0 leaves it to ``every_minutes``. Set it to resume from, or
    export, certain steps."""
    every_minutes: float = Field(10.0, ge=0)
    """Save after the first step that ends so many minutes after the last save; 0 turns it off. A
    kill loses at most this time and one step. Raise it where a save takes minutes itself."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints that stay on disk. Raise it to export earlier steps."""
    best: str | None = None
    """Metric whose best checkpoint stays too and is the one in ``model/``, e.g. ``eval/accuracy``;
    with a minus in front, less is better. A step that improves on all checkpoints is saved. Without
    it ``model/`` holds the last step."""


class HubConfig(Settings):
    """Repository of the Hugging Face Hub that the model is pushed to, with a card."""

    repo: str = ""
    """Repository such as ``me/model``, which is made if there is none. The model is pushed when the
    run ends. Empty pushes nothing. The account is that of ``hf auth login`` or of ``HF_TOKEN``."""
    push_every: int = Field(0, ge=0)
    """Push the model of every so many steps too; 0 pushes at the end alone."""
    private: bool | None = None
    """Who sees a new repository; ``null`` takes the account's default."""

    @model_validator(mode="after")
    def _has_repo(self) -> HubConfig:
        if not self.repo and (self.push_every or self.private is not None):
            name = "push_every" if self.push_every else "private"
            raise ValueError(f"hub.{name} changes nothing without hub.repo, such as me/model")
        return self


class LogConfig(Settings):
    """Metrics, rollouts and batches that a run writes."""

    tensorboard: bool = True
    """Write metrics for TensorBoard, in ``tensorboard/`` of the run folder."""
    wandb: str | None = None
    """Weights & Biases project to log to; needs the extra ``wandb``. ``null`` logs nothing
    there."""
    mlflow: str | None = None
    """MLflow experiment to log to; needs the extra ``mlflow``. ``MLFLOW_TRACKING_URI`` names the
    server. ``null`` logs nothing there."""
    trackio: str | None = None
    """Trackio project to log to; needs the extra ``trackio``. It is on this machine unless
    ``TRACKIO_SPACE_ID`` names a space of the hub. ``null`` logs nothing there."""
    swanlab: str | None = None
    """SwanLab project to log to; needs the extra ``swanlab``. ``SWANLAB_MODE=offline`` writes to
    ``swanlog/`` of the run folder alone. ``null`` logs nothing there."""
    rollouts_every: int = Field(1, ge=0)
    """Write the rollouts of every so many steps, in ``rollouts/``; 0 writes none."""
    samples: int = Field(0, ge=0)
    """Number of prompts of each step whose best and worst sampled response are printed, with label,
    reward and terms. The trackers above get them too."""
    batches_every: int = Field(0, ge=0)
    """Write the batch of every so many steps, with all columns computed for it, in ``batches/``; 0
    writes none. ``lightrft.diagnostics.replay`` runs any phase on them again."""
    entropy: bool = True
    """Measure the policy's entropy also where no loss term needs it."""
    repetition: bool = False
    """Measure how much of each response repeats an earlier part of it: the share of its substrings
    that occurred before, as ``response/repetition``. It takes some milliseconds for each thousand
    characters."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of the device in TFLOP/s, for ``perf/mfu``. ``null`` takes the dense peak in bfloat16 of
    a GPU that is known, and measures no ``perf/mfu`` on other devices."""
