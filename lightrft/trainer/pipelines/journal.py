"""Responses of an unfinished generation on disk, so that the same command can resume it."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lightrft.config.base import Settings
from lightrft.observability.observer import NullObserver, Observer
from lightrft.observability.redaction import MARK, check_complete
from lightrft.observability.run_directory import (
    check_same_settings,
    release_lock,
    saved_yaml,
    take_lock,
)
from lightrft.types import Prompt
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import DataError

Group = list[dict[str, Any]]
"""The responses to one prompt, as lines of the output."""


class Journal:
    """The folder ``.NAME.partial`` next to the output: settings, and a line for each prompt.

    A line is written when all responses to its prompt are scored, or could not be. Only the
    positions of lines are kept in memory. Open it with ``open`` and close it with ``with``.

    Args:
        folder: the folder, which exists.
        lock: the lock of the folder.

    Attributes:
        observer: receives the number of complete prompts.
    """

    def __init__(self, folder: Path, lock: int | None) -> None:
        self.folder = folder
        self._lock = lock
        self.observer: Observer = NullObserver()
        self._offsets: dict[int, int] = {}
        self._prompts: dict[int, tuple[str, str]] = {}
        # Appending to a file that ends in the middle of a line would spoil the next one, too.
        self._file = (folder / "responses.jsonl").open("a+b")
        self._read()

    @classmethod
    def open(cls, output: Path, config: Settings, ignore: Collection[str]) -> Journal:
        """Open the journal of ``output``, or begin one.

        Args:
            output: the file that the generation will write.
            config: the settings of the generation.
            ignore: dotted keys, or branches of the settings, that may differ on a resume.

        Raises:
            ConfigError: another process has the journal, or it is of other settings.
        """
        check_complete(config)
        folder = output.with_name(f".{output.name}.partial")
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder)
        try:
            saved, responses = folder / "config.yaml", folder / "responses.jsonl"
            # A generation that failed at its start has no responses that could be mixed up.
            if saved.exists() and responses.exists() and responses.stat().st_size:
                problem = (
                    f"holds the unfinished generation of {output} with other settings; set "
                    "another output, "
                )
                check_same_settings(saved, config, ignore, problem)
            text = saved_yaml(config)
            write_atomic(saved, text, private=MARK in text)
            return cls(folder, lock)
        except BaseException:
            release_lock(lock)
            raise

    @staticmethod
    def discard(output: Path) -> None:
        """Delete the journal of ``output``, if there is one."""
        folder = output.with_name(f".{output.name}.partial")
        if folder.is_dir():
            lock = take_lock(folder)
            shutil.rmtree(folder)
            release_lock(lock)

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, index: int) -> bool:
        return index in self._offsets

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ``DataError`` if a prompt of the journal has another place now, or has changed."""
        for index, (name, digest) in self._prompts.items():
            # By place, not by name alone: a moved prompt would be generated twice or never.
            prompt = prompts[index] if index < len(prompts) else None
            if prompt is None or prompt.id != name or digest_of(prompt) != digest:
                raise DataError(
                    f"data.sources has changed since the generation began: its prompt {name!r} is "
                    "not there, is in another place, or has another text or label now; restore "
                    "the data, or set run.overwrite=true to start over"
                )

    def add(self, index: int, prompt: Prompt, group: Group) -> None:
        """Write the responses to one prompt.

        Args:
            index: index of the prompt.
            prompt: the prompt.
            group: its responses.
        """
        line = {"index": index, "id": prompt.id, "digest": digest_of(prompt), "responses": group}
        position = self._file.seek(0, 2)
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        # To the system, so that a killed process loses no prompt that is complete.
        self._file.flush()
        self._offsets[index] = position
        self.observer.update({"step": len(self)})

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Yield the id of each prompt with its responses, in the order of the prompts."""
        for index in sorted(self._offsets):
            line = self._line(index)
            yield line["id"], line["responses"]

    def __getitem__(self, index: int) -> Group:
        """Return the responses to prompt ``index``."""
        return self._line(index)["responses"]

    def _line(self, index: int) -> dict[str, Any]:
        self._file.seek(self._offsets[index])
        return json.loads(self._file.readline())

    def finish(self) -> None:
        """Delete the journal, once the output is complete."""
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        # A generation that failed at its start leaves nothing behind.
        if error is not None and not self._prompts and not self._offsets:
            shutil.rmtree(self.folder)
        release_lock(self._lock)

    def _read(self) -> None:
        """Find the lines of the file, and cut off a last line that was not written completely.

        Prompts with a response that was not scored count as missing, so that a judge that failed
        is asked again.
        """
        self._file.seek(0)
        end = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break
            try:
                line: Mapping[str, Any] = json.loads(raw)
            except ValueError as error:
                raise DataError(
                    f"{self._file.name}, byte {end}: not JSON ({error}), so the file is damaged; "
                    "set run.overwrite=true to start over"
                ) from None
            if not any(response.get("failed") for response in line["responses"]):
                self._offsets[line["index"]] = end
            self._prompts[line["index"]] = (line["id"], line["digest"])
            end += len(raw)
        self._file.truncate(end)


def digest_of(prompt: Prompt) -> str:
    """Return a hash of the tokens of a prompt and of what rewards read of its row."""
    seen = blake2b(array("q", prompt.token_ids).tobytes(), digest_size=8)
    read = (prompt.label, prompt.reference, prompt.data_source, dict(prompt.columns))
    # Of a value that is no JSON the type alone: its text may differ from process to process.
    seen.update(json.dumps(read, skipkeys=True, default=lambda v: type(v).__name__).encode())
    return seen.hexdigest()
