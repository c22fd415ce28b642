"""The command ``lightrft <verb> [config.yaml ...] [a.b=value ...]``."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from logging import ERROR, WARNING

from lightrft.distributed.error_report import report_error
from lightrft.distributed.process_group import first_rank
from lightrft.distributed.torchrun import FROM_PYTHON
from lightrft.observability.logging_setup import log_to_terminal, stop_logging
from lightrft.utils.atomic_files import disk_problem, path_problem
from lightrft.utils.cpu import set_thread_policy
from lightrft.utils.errors import UserError, did_you_mean
from lightrft.utils.stop_signal import Terminated, raise_at_termination
from lightrft.verbs import VERBS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit status.

    It is 0, 2 for errors the user can fix, 130 after Ctrl-C, and 128 plus the
    number of another signal that stopped it, such as 143 after SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A response may have characters that the terminal cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    if words[0] in ("-V", "--version"):
        from lightrft import __version__

        sys.stdout.write(f"lightrft {__version__}\n")
        return 0
    verb, *rest = words
    if verb not in VERBS:
        sys.stderr.write(f"{usage()}\nlightrft: there is no verb {verb!r}{verb_hint(verb)}\n")
        return 2
    # Before the import of torch, as is any import of a verb.
    set_thread_policy()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    quieten_deepspeed()
    shown = log_to_terminal(WARNING if first_rank() else ERROR)
    try:
        # A launcher ends its ranks at once. No exception reaches one that waits inside torch.
        with (
            nullcontext() if "WORLD_SIZE" in os.environ else raise_at_termination(),
            messages_for_starter(shown),
        ):
            return run_verb(verb, rest)
    except UserError as error:
        if not report_error(error):
            sys.stderr.write(f"lightrft {verb}: {error}\n")
        return 2
    except MemoryError:
        sys.stderr.write(
            f"lightrft {verb}: out of memory; lower train.max_tokens_per_micro_batch, "
            "engine.max_cache_tokens or model.logits_mb\n"
        )
        return 2
    except Terminated as error:
        return 128 + error.number
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # Libraries raise errors of the disk in classes of their own.
        if problem := disk_problem(error):
            sys.stderr.write(
                f"lightrft {verb}: a file cannot be written or read ({problem}); free some "
                "space, or choose another disk\n"
            )
            return 2
        if problem := path_problem(error):
            sys.stderr.write(
                f"lightrft {verb}: a file or folder cannot be written or read ({problem}); choose "
                "another path\n"
            )
            return 2
        report_error(error)
        raise
    finally:
        stop_logging(shown)


@contextmanager
def messages_for_starter(shown: logging.Handler) -> Generator[None]:
    """Write messages in the form of Python in a process that a function of Python has started.

    Args:
        shown: The handler of warnings.
    """
    if FROM_PYTHON not in os.environ:
        yield
        return
    from lightrft.config.texts.python_form import PythonFormatter, error_in_python

    shown.setFormatter(PythonFormatter(shown.formatter))
    try:
        yield
    except UserError as error:
        raise error_in_python(error) from error.__cause__


def verb_hint(word: str) -> str:
    """Return ``; did you mean ...?`` for a word that is no verb, or ""."""
    from lightrft.config.presets import meant_verb

    verb, setting, value = meant_verb(word)
    if setting:
        return f"; did you mean 'lightrft {verb} {setting}={value}'?"
    return did_you_mean(verb, VERBS)


def run_verb(verb: str, arguments: Sequence[str]) -> int:
    """Import the module of ``verb``, run the verb and return the exit status."""
    # Imported here: the help and the errors of one verb need not wait for torch.
    if verb not in ("check", "explain", "settings"):  # they have options that are no settings
        arguments = importlib.import_module("lightrft.cli.arguments").without_dashes(arguments)
    if VERBS[verb].kind in ("training", "call", "server"):
        return importlib.import_module("lightrft.cli.verbs").run_verb(verb, arguments)
    return importlib.import_module(f"lightrft.cli.{verb}").run(arguments)


def usage() -> str:
    """Return the table of verbs."""
    rows = "\n".join(f"  {name:<13} {verb.about}" for name, verb in VERBS.items())
    return (
        f"usage: lightrft <verb> [config.yaml ...] [key=value ...]\n\n{rows}\n\nlightrft <verb> "
        "--help lists its settings.\n"
    )


def quieten_deepspeed() -> None:
    """Suppress a message of DeepSpeed on standard output.

    transformers imports DeepSpeed if it is installed, and without a GPU it prints the message.
    """
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: "Setting accelerator to CPU" not in record.getMessage()
    )


if __name__ == "__main__":
    sys.exit(main())
