"""The manifest of a checkpoint.

It lists the files with a digest of each, and has a digest of the list itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import CheckpointError, DamagedError

FORMAT = "lightrft-checkpoint/2"
WITHOUT_DIGEST = "lightrft-checkpoint/1"
"""The format of earlier versions, whose manifest has no digest."""
MANIFEST = "manifest.json"
FIELDS = frozenset({"format", "step", "about", "metrics", "files"})
PART = 2**24
"""Bytes that are read at once."""


class FileEntry(TypedDict):
    """Size and digest of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        step: Step of the checkpoint.
        files: Size and digest by relative path.
        about: Identifies the run and the model that the checkpoint belongs to.
        metrics: The value by which a checkpoint may be the best.
    """

    step: int
    files: Mapping[str, FileEntry]
    about: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Return the size of all files."""
        return sum(entry["bytes"] for entry in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` with its digest. From then on ``folder`` is a checkpoint."""
    document: dict[str, object] = {
        "format": FORMAT,
        "step": manifest.step,
        "about": dict(manifest.about),
        "metrics": dict(manifest.metrics),
        "files": dict(manifest.files),
    }
    document["digest"] = _digest_of(document)
    write_atomic(folder / MANIFEST, json.dumps(document, indent=1))


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of ``folder``. Check its digest, and the step in the folder's name.

    Raises ``DamagedError`` for a folder without an intact manifest of this program,
    ``CheckpointError`` for an unreadable file.
    """
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        inner = sorted(folder.glob("checkpoints/*"))
        hint = f"; did you mean {inner[-1]}?" if inner else ""
        problem = f"{folder} is not a complete checkpoint: it has no {MANIFEST}{hint}"
        raise DamagedError(problem) from None
    except PermissionError as error:
        raise CheckpointError(
            f"{folder / MANIFEST} cannot be read: {error.strerror}; give this user the right to"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(
            f"{folder} is damaged: its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
        ) from None
    if not isinstance(document, dict) or document.get("format") not in (FORMAT, WITHOUT_DIGEST):
        raise DamagedError(
            f"{folder} is not a complete checkpoint: its {MANIFEST} is not of the format {FORMAT}"
        )
    # A flipped byte must not turn one format into the other: each has exactly the fields that it
    # was written with.
    intact = True
    if document["format"] == FORMAT:
        digest = document.pop("digest", None)
        intact = digest == _digest_of(document)
    if not intact or document.keys() != FIELDS:
        raise DamagedError(f"{folder} is damaged: its {MANIFEST} is not what was saved")
    # ``CheckpointStore`` sorts folders by the step in their names.
    named = re.fullmatch(r"\.?(?:[a-z]+_)?step_(\d+)(\.\d+)?", folder.name)
    if named and int(named[1]) != document["step"]:
        raise DamagedError(
            f"{folder} is damaged: its {MANIFEST} is of step {document['step']}, which its name "
            "is not"
        )
    return Manifest(document["step"], document["files"], document["about"], document["metrics"])


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a complete checkpoint; ``None`` for any other folder."""
    try:
        return load_manifest(folder)
    except CheckpointError:
        return None


def verify(
    path: Path,
    about: Mapping[str, object] | None = None,
    at_work: Callable[[], None] = lambda: None,
) -> Manifest:
    """Compare every file of the checkpoint ``path`` with the manifest.

    Args:
        path: The folder of the checkpoint.
        about: Entries of the manifest's ``about`` that the checkpoint must have.
        at_work: Called between parts of files.

    Returns:
        The manifest.

    Raises:
        CheckpointError: ``about`` differs from the saved values, or a file may not be read.
        DamagedError: The manifest or a file is missing, truncated or changed.
    """
    manifest = load_manifest(path)
    _check_about(path, manifest, about or {})
    for name, entry in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != entry["bytes"]:
                raise DamagedError(
                    f"{path} is damaged: {file} has {size} bytes, {entry['bytes']} were saved"
                )
            if digest_file(file, at_work) != entry["sha256"]:
                raise DamagedError(
                    f"{path} is damaged: {file} has the right size but not the content that was "
                    "saved"
                )
        except FileNotFoundError:
            raise DamagedError(f"{path} is damaged: {file} is missing") from None
        except PermissionError as error:
            raise CheckpointError(
                f"{file} cannot be read: {error.strerror}; give this user the right to"
            ) from None
        except OSError as error:
            raise DamagedError(
                f"{path} is damaged: {file} cannot be read ({error.strerror})"
            ) from error
    return manifest


def digest_file(path: Path, at_work: Callable[[], None]) -> str:
    """Return the SHA-256 of a file. ``at_work`` is called between its parts."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(PART):
            found.update(part)
            at_work()
    return found.hexdigest()


def _check_about(path: Path, manifest: Manifest, about: Mapping[str, object]) -> None:
    # Through JSON, as the saved values were: a tuple would differ from the list that it became.
    expected = json.loads(json.dumps(dict(about)))
    differing = [
        f"  {key}: {manifest.about.get(key)!r} in the checkpoint, {value!r} here"
        for key, value in expected.items()
        if manifest.about.get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"{path} belongs to something else; give the model and settings that it was saved "
            "with, or set run.resume to another checkpoint. They differ in:\n"
            + "\n".join(differing)
        )


def _digest_of(document: Mapping[str, object]) -> str:
    """Return the SHA-256 of a manifest without its digest, independent of white space and of the
    order of keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
