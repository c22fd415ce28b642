"""The settings of commands that read configs or results: data, import-config and compare."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from lightrft.config.base import Names, Settings


class ImportConfig(Settings):
    """The settings of ``lightrft import-config``: a config of another framework as a config of
    this one. ``path`` may stand without its key, and ``--from trl`` for ``framework=trl``."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that are paths."""
    path: str = ""
    """YAML or JSON file of options, or a shell script with the command. Of several commands in a
    script, the one with most options is taken."""
    framework: Literal[
        "auto", "trl", "verl", "openrlhf", "llamafactory", "ms-swift", "lightrft"
    ] = "auto"
    """Framework that the file is for. ``auto`` finds it by the command, or by options that it alone
    has."""
    verb: Literal["auto", "rl", "sft", "dpo", "kto", "rm", "distill"] = "auto"
    """Verb of the result. ``auto`` finds it by the command, the stage, or options that one kind of
    training alone has."""
    processes: int | None = Field(None, ge=1)
    """Number of processes of the run. Set it where the file counts rows of a device, and another
    file or command has the number of devices. ``null`` takes the number in the file, or 1."""
    output: str | None = None
    """YAML file to write; ``null`` prints the config."""
    overwrite: bool = False
    """Replace ``output`` if it exists."""


class ShowConfig(Settings):
    """The settings of ``lightrft data`` itself, written as ``show.rows=5``. All others are of the
    config whose rows it prints."""

    verb: Literal[
        "auto", "rl", "sft", "dpo", "kto", "rm", "prm", "distill", "grm-sft", "grm-rl", "grm-dpo"
    ] = "auto"
    """Verb whose config this is. ``auto`` takes the verb whose settings fit."""
    rows: int = Field(3, ge=0)
    """Number of rows to show of each section of data."""
    read: int = Field(200, ge=1)
    """Number of rows to read of each source, for the counts of columns, lengths, duplicates and
    overlap. Raise it to compare whole files."""
    color: Literal["auto", "always", "never"] = "auto"
    """Color the trained tokens. ``auto`` does so on a terminal. Without colors, they are between
    ``[[`` and ``]]``."""
    page: str | None = None
    """HTML file to write with the same content. An existing file is replaced. ``null`` writes
    none."""

    @field_validator("page")
    @classmethod
    def _is_html(cls, given: str | None) -> str | None:
        # It is replaced, and may not be a file of rows.
        if given is not None and not given.lower().endswith((".html", ".htm")):
            raise ValueError(f"{given!r} is no HTML file; end its name in .html")
        return given


class SavedEvalConfig(Settings):
    """A saved evaluation."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that are paths."""
    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""
    path: str = ""
    """Run folder of ``lightrft eval`` or of a run with evaluations, or a file ``eval_*.jsonl`` of
    its ``rollouts/``."""
    step: int | None = Field(None, ge=0)
    """Step of the evaluation; ``null`` takes the last one."""


class CompareConfig(Settings):
    """The settings of ``lightrft compare``: two evaluations of the same prompts. ``baseline`` and
    ``candidate`` may stand without their keys, in this order."""

    baseline: SavedEvalConfig = SavedEvalConfig()
    """Evaluation to compare with."""
    candidate: SavedEvalConfig = SavedEvalConfig()
    """Evaluation that may be better or worse."""
    prompts: Literal["equal", "common"] = "equal"
    """``equal`` refuses evaluations of different prompts. ``common`` compares the prompts that both
    have."""
    success: Names = ()
    """Names of the terms that say if a response is right, as in ``reward.success``. Empty takes
    those of each run."""
    threshold: float | None = None
    """Value of that term that a response must reach to count as right; ``null`` takes
    ``eval.threshold`` of each run."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Coverage of the intervals. A p-value above 1 minus this number is within noise."""
    show: int = Field(3, ge=0)
    """Number of prompts to print that became wrong, and that became right."""
    output: str | None = None
    """JSON file for the result and all prompts whose score changed. An existing file is replaced.
    ``null`` writes none."""
