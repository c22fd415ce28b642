"""The verb ``lightrft doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrft.api.start import memory_errors, quick_imports, set_threads
from lightrft.cli.arguments import HELP, show_help, split_settings
from lightrft.cli.verbs import config_of
from lightrft.config.verbs import DoctorConfig
from lightrft.verbs import VERBS

MARK = f"{VERBS['doctor'].section}."


def run(arguments: Sequence[str]) -> int:
    """Print the needs and problems of a run before it starts. The exit status is 2 for a bad
    finding.
    """
    if not HELP.isdisjoint(arguments):
        show_help("doctor", DoctorConfig(), VERBS["doctor"].purpose, prefix=MARK)
        return 0
    options, others = split_settings(DoctorConfig, MARK, arguments)
    config = config_of(options.verb, others).settings
    with quick_imports():
        set_threads(config.run.threads)
        from lightrft.diagnostics.doctor import run_doctor, to_json, to_text
    from lightrft.utils.atomic_files import write_atomic

    with memory_errors():
        report = run_doctor(config, options)
    sys.stdout.write(to_text(report) + "\n")
    if options.output is not None:
        output = Path(options.output).expanduser()
        write_atomic(output, json.dumps(to_json(report), indent=1) + "\n")
    return 2 if report.bad else 0
