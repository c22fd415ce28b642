"""The verb ``lightrft doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.arguments import memory_errors, parse, quick_imports, set_threads, show_help
from lightrft.config.verbs import (
    DoctorConfig,
    DPOConfig,
    KTOConfig,
    RLConfig,
    SFTConfig,
    TrainingConfig,
)
from lightrft.utils.errors import ConfigError

MARK = "doctor."
CONFIGS: dict[str, type[TrainingConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
}
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


def config_of(verb: str, arguments: Sequence[str]) -> TrainingConfig:
    """Parse ``arguments`` as the config of ``verb``. With ``auto``, select the verb that fits them.

    Raises ``ConfigError`` if no verb fits.
    """
    if verb != "auto":
        return parse(CONFIGS[verb], arguments).settings
    found: dict[str, TrainingConfig] = {}
    problems: list[ConfigError] = []
    for name, cls in CONFIGS.items():
        try:
            found[name] = parse(cls, arguments).settings
        except ConfigError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    first = found.get("rl")
    if isinstance(first, RLConfig):
        reward, distill = first.reward, first.algorithm.distill
        if reward.terms or reward.per_source or distill.kind != "none":
            return first
    # A config without rewards and without a teacher parses as any: then it is one for SFT.
    if "sft" in found:
        return found["sft"]
    dpo = found.get("dpo")
    if isinstance(dpo, DPOConfig) and not reads_labels(dpo):
        return dpo
    return found.get("kto", next(iter(found.values())))


def reads_labels(config: DPOConfig) -> bool:
    """Return True if the losses are of labelled responses."""
    from lightrft.algorithms.preference.requirements import preference_requirements

    return preference_requirements(config.preference).kind == "labelled"
