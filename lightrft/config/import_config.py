"""The settings of ``lightrft import-config``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lightrft.config.base import Settings


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
