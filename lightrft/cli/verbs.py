"""Run a verb of the table of verbs, and print its results."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightrft.api.progress import finish, watching, with_report
from lightrft.api.start import function_of, memory_errors, program, started
from lightrft.api.verbs import fitting, plain_settings
from lightrft.cli.arguments import file_first, parse, positional, settings_of, with_origin
from lightrft.config.base import Loaded
from lightrft.config.verbs import RLConfig, TrainingConfig
from lightrft.trainer.checks.check_rollout import check_algorithm
from lightrft.verbs import VERBS, Verb


def run_verb(name: str, arguments: Sequence[str]) -> int:
    """Run a verb of the kind ``training``, ``call`` or ``server``, and return the exit status."""
    verb = VERBS[name]
    if verb.kind == "training":
        return train(name, verb, arguments)
    return (serve if verb.kind == "server" else run_here)(name, verb, arguments)


def config_of(verb: str, arguments: Sequence[str]) -> Loaded[TrainingConfig]:
    """Parse ``arguments`` as the config of a verb that trains; see ``api.verbs.fitting``."""
    return fitting(verb, lambda cls: parse(cls, arguments))


def train(verb: str, row: Verb, arguments: Sequence[str], method: tuple[str, ...] = ()) -> int:
    """Train in this process, with torchrun, or on a Ray cluster, and return the exit status.

    Args:
        verb: name of the verb.
        row: definition of the verb.
        arguments: YAML files and ``key=value``.
        method: words between the verb and its arguments.
    """
    parsed = settings_of(" ".join((verb, *method)), row.settings_class(), arguments, row.purpose)
    if parsed is None:
        return 0
    config = plain_settings(parsed)
    if isinstance(config, RLConfig):  # done here too: reject a wrong name before importing torch
        check_algorithm(config)
    if (status := started(verb, [*method, *arguments], config)) is not None:
        return status
    with memory_errors(), watching(config.run) as observer:
        summary = program(row.function, config)(config, observer)
    return finish(config.run, summary)


def run_here(verb: str, row: Verb, arguments: Sequence[str]) -> int:
    """Call the function of the verb, print its result and return the exit status.

    Args:
        verb: name of the verb.
        row: definition of the verb.
        arguments: YAML files and ``key=value``.
    """
    if row.origin:
        arguments = with_origin(arguments, row.origin)
    if row.path == "file":
        words = file_first(arguments, row.path_setting)
    else:
        words = positional(arguments, row.path_setting, several=row.path == "folders")
    config = settings_of(verb, row.settings_class(), words, row.purpose)
    if config is None:
        return 0
    function = function_of(row, config)
    with memory_errors():
        result = function(config)
    if row.notes is not None:
        sys.stderr.write(row.notes(result) + "\n")
    if row.has_report:
        sys.stderr.write("\n".join(with_report(config.run, [])) + "\n")
    sys.stdout.write(row.lines(config, result) + "\n")
    return 0


def serve(verb: str, row: Verb, arguments: Sequence[str]) -> int:
    """Print the address of a server, answer until it is stopped, and return the exit status.

    Args:
        verb: name of the verb.
        row: definition of the verb.
        arguments: YAML files and ``key=value``.
    """
    words = positional(arguments, row.path_setting)
    config = settings_of(verb, row.settings_class(), words, row.purpose)
    if config is None:
        return 0
    with memory_errors():
        server = function_of(row, config)(config)
        sys.stdout.write(server.ready_line() + "\n")
        sys.stdout.flush()
        server.run()
    return 0
