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


def run(arguments: Sequence[str]) -> int:
    """Print the needs and problems of a run before it starts. The exit status is 2 for a bad
    finding.
    """
    if {"-h", "--help"} & set(arguments):
        show_help(
            "doctor",
            DoctorConfig(),
            "What a run of this config needs, and what is off, before it begins.",
        )
        return 0
    own = [a.removeprefix(MARK) for a in arguments if a.startswith(MARK)]
    options = parse(DoctorConfig, own).settings
    config = config_of(options.verb, [a for a in arguments if not a.startswith(MARK)])
    with quick_imports():
        set_threads(config.run.threads)
        from lightrft.diagnostics.doctor import run_doctor, to_json, to_text
    from lightrft.utils.atomic_files import write_atomic

    with memory_errors():
        report = run_doctor(config, options)
    sys.stdout.write(to_text(report) + "\n")
    if options.output is not None:
        write_atomic(Path(options.output).expanduser(), json.dumps(to_json(report), indent=1) + "\n")
    return 2 if report.bad else 0


def config_of(verb: str, arguments: Sequence[str]) -> RLConfig | SFTConfig:
    """Parse ``arguments`` as the config of ``verb``. With ``auto``, select the verb that fits them.

    Raises ``ConfigError`` if neither verb fits.
    """
    found: dict[str, RLConfig | SFTConfig] = {}
    problems: list[ConfigError] = []
    for name, cls in (("rl", RLConfig), ("sft", SFTConfig)):
        if verb in ("auto", name):
            try:
                found[name] = parse(cls, arguments).settings
            except ConfigError as error:
                problems.append(error)
    if not found:
        raise problems[0]
    rl = found.get("rl")
    rewarded = isinstance(rl, RLConfig) and bool(rl.reward.terms or rl.reward.per_source or rl.algorithm.distill.kind != "none")
    return found["sft"] if "sft" in found and not rewarded else found["rl"]
