"""Report the error that ends a process of a run to the launcher that started the process."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from lightrft.utils.errors import RankError, UserError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path where torchelastic expects the error report of a process."""
SPEAKER = "LIGHTRFT_LAUNCHER"
"""Environment variable set by a launcher that prints the error itself."""

Listener = Callable[[BaseException], None]
_listeners: list[Listener] = []


@contextmanager
def error_listener(listener: Listener) -> Generator[None]:
    """Within this context, pass the error that ends this process to ``listener`` to report it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report_error(error: BaseException) -> bool:
    """Report the ``error`` that ends this process and return True if the launcher prints it.

    The report goes to the first listener of ``error_listener``, else to the file named by
    ``ERROR_FILE``. Without either, nothing is written and the process prints the error itself.
    """
    if _listeners:
        _listeners[0](error)
        return True
    file = os.environ.get(ERROR_FILE)
    if not file:
        return False
    text = str(error)
    if isinstance(error, RankError):  # before ``UserError``, of which it is a subclass
        kind = "rank"
    elif isinstance(error, UserError):
        kind = "user"
    else:
        kind = "bug"
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        text = f"{type(error).__name__}: {error}{where}"
    # The keys are torchelastic's, whose launcher reads the file. Only ``kind`` is ours.
    details = {"py_callstack": text, "timestamp": str(int(time.time())), "kind": kind}
    Path(file).write_text(
        json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8"
    )
    # A bug is printed by the process too, since the launcher's one line has no traceback.
    return SPEAKER in os.environ and isinstance(error, UserError)
