"""The verb ``lightrft doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.arguments import memory_errors, parse, quick_imports, set_threads, show_help
from lightrft.config.verbs import DoctorConfig, RLConfig, SFTConfig
from lightrft.utils.errors import ConfigError

MARK = "doctor."
CONFIGS: dict[str, type[RLConfig | SFTConfig]] = {"rl": RLConfig, "sft": SFTConfig}
"""Config of each verb that can be examined. ``auto`` tries them in this order."""


def run(arguments: Sequence[str]) -> int:
    """Print the needs and problems of a run before it starts. The exit status is 2 for a bad
    finding.
    """
    if {"-h", "--help"} & set(arguments):
        about = (
            "Estimate the memory and time of a run of this config, and find problems, before it "
            "starts."
        )
        show_help("doctor", DoctorConfig(), about)
        return 0
    own = []
    others = []
    for argument in arguments:
        if argument.startswith(MARK):
            own.append(argument.removeprefix(MARK))
        else:
            others.append(argument)
    options = parse(DoctorConfig, own).settings
    config = config_of(options.verb, others)
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


def config_of(verb: str, arguments: Sequence[str]) -> RLConfig | SFTConfig:
    """Parse ``arguments`` as the config of ``verb``. With ``auto``, select the verb that fits them.

    Raises ``ConfigError`` if neither verb fits.
    """
    if verb != "auto":
        return parse(CONFIGS[verb], arguments).settings
    found: list[RLConfig | SFTConfig] = []
    problems: list[ConfigError] = []
    for cls in CONFIGS.values():
        try:
            found.append(parse(cls, arguments).settings)
        except ConfigError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    first = found[0]
    if isinstance(first, RLConfig):
        reward, distill = first.reward, first.algorithm.distill
        if reward.terms or reward.per_source or distill.kind != "none":
            return first
    # A config without rewards and without a teacher parses as either: then it is one for SFT.
    return found[-1]
