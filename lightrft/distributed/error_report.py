"""What a process of a run leaves behind for the launcher that started it, when it ends with an error."""

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
"""Where torch's launcher looks for what a process has failed with."""
SPEAKER = "LIGHTRFT_LAUNCHER"
"""Set where the launcher says itself what went wrong."""

Listener = Callable[[BaseException], None]
_listeners: list[Listener] = []


@contextmanager
def heard_by(listener: Listener) -> Generator[None]:
    """While this is entered, ``listener`` gets the error that ends this process, and says it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(error: BaseException) -> bool:
    """Leave the ``error`` that ends this process where its launcher finds it; whether that one will say it."""
    if _listeners:
        _listeners[0](error)
        return True
    file = os.environ.get(ERROR_FILE)
    if not file:
        return False
    kind = "rank" if isinstance(error, RankError) else "user" if isinstance(error, UserError) else "bug"
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}{_where(error)}"
    details = {"py_callstack": text, "timestamp": str(int(time.time())), "kind": kind}
    Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")
    return SPEAKER in os.environ and isinstance(error, UserError)


def _where(error: BaseException) -> str:
    """The last line of code that ``error`` went through."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
