"""Log handlers of the program."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

ROOT = "lightrft"
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
FILE_ONLY = {"file_only": True}
"""``extra`` of a message that goes to the log file only.

The terminal shows the content of such a message in another way.
"""

UNUSED_KERNELS = "bitsandbytes.backends.cpu.ops"
"""Logger that warns about a missing CPU kernel for 4-bit weights.

Training does not use this kernel: it needs weights in a layout without gradients.
"""


class LogFile(logging.FileHandler):
    """A log file that counts the lines it could not write.

    ``lost`` is the number of lost lines. The first loss is reported on standard error.
    """

    lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        # Python's own method prints a traceback for each record.
        self.lost += 1
        if self.lost == 1:
            sys.stderr.write(f"{self.baseFilename} cannot be written: {sys.exception()}\n")

    def close(self) -> None:
        """Close the file. Buffered lines are lost if the disk is full."""
        try:
            super().close()
        except OSError:
            self.lost += 1


def log_to_file(path: Path) -> LogFile:
    """Append all messages of this package from level INFO to ``path``.

    Detach the returned handler with ``stop_logging``.
    """
    # Appends, because a resumed run continues the log.
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.setLevel(logging.INFO)
    _attach(handler)
    return handler


def log_to_terminal(level: int = logging.WARNING) -> logging.Handler:
    """Show messages from ``level`` on standard error.

    On a terminal, messages appear above a live progress bar. Elsewhere, each message is a plain
    line. Messages with ``FILE_ONLY`` are left out. Detach the returned handler with
    ``stop_logging``.
    """
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(
            console=Console(stderr=True), show_path=False, show_time=False, markup=False
        )
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.setLevel(level)
    handler.addFilter(lambda record: not any(hasattr(record, key) for key in FILE_ONLY))
    logging.getLogger(UNUSED_KERNELS).setLevel(logging.ERROR)
    return _attach(handler)


def stop_logging(handler: logging.Handler) -> None:
    """Detach and close a handler that this module created."""
    logging.getLogger(ROOT).removeHandler(handler)
    handler.close()


def _attach(handler: logging.Handler) -> logging.Handler:
    logger = logging.getLogger(ROOT)
    # A program that uses this package as a library may have set a level itself.
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler
