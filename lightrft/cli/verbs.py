"""Verbs that differ only in their settings, the function they call and the lines they print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.cli.arguments import (
    file_first,
    memory_errors,
    parse,
    positional,
    settings_of,
    with_origin,
)
from lightrft.cli.dispatch import import_function, program, started
from lightrft.cli.progress import finish, watching, with_report
from lightrft.config.base import Loaded
from lightrft.config.import_config import ImportConfig
from lightrft.config.model import ConvertConfig, MergeConfig
from lightrft.config.serving import ServeConfig, ServeRMConfig
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    EvalRMConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    JudgeDPOConfig,
    JudgeRLConfig,
    JudgeSFTConfig,
    KTOConfig,
    LabelStepsConfig,
    PRMVerbConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    TrainingConfig,
)
from lightrft.trainer.checks.check_rollout import check_algorithm
from lightrft.utils.errors import ConfigError, did_you_mean

FolderConfig: TypeAlias = ExportConfig | MergeConfig | ConvertConfig | ImportConfig
"""The settings of a verb that writes files, and runs no model."""


@dataclass(frozen=True, slots=True)
class TrainingVerb:
    """A verb that trains in a run directory.

    ``function``, given as ``module:name``, takes settings and an observer, and returns the summary.
    """

    settings: type[TrainingConfig]
    about: str
    function: str


@dataclass(frozen=True, slots=True)
class OneProcessVerb:
    """A verb that runs in this process.

    ``function``, given as ``module:name``, takes the settings. ``lines`` formats its result for
    standard output, and ``notes`` for standard error. ``path_setting`` is the setting for a folder
    that is given without a key, or for several with ``several_paths``. With ``has_report``, the
    report of the run folder is written. With ``takes_file``, the first word is a file for
    ``path_setting``, and none is a file of settings. ``origin`` is the setting that ``--from``
    stands for, and one of its values.
    """

    settings: type[EvaluateConfig | EvalRMConfig | GenerateConfig | LabelStepsConfig | FolderConfig]
    about: str
    function: str
    path_setting: str
    lines: Callable[[Any, Any], str]
    notes: Callable[[Any], str] | None = None
    several_paths: bool = False
    has_report: bool = False
    takes_file: bool = False
    origin: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ServingVerb:
    """A verb that answers requests until it is stopped.

    ``function``, given as ``module:name``, takes the settings, and returns a server that listens.
    ``path_setting`` is the setting for a folder that is given without a key.
    """

    settings: type[ServeConfig] | type[ServeRMConfig]
    about: str
    function: str
    path_setting: str


TRAINING = {
    "rl": TrainingVerb(
        RLConfig,
        "Train a model by reinforcement learning from rewards.",
        "lightrft.trainer.rl:run_rl",
    ),
    "sft": TrainingVerb(
        SFTConfig,
        "Fine-tune a model on conversations, with the loss on assistant tokens.",
        "lightrft.trainer.sft:run_sft",
    ),
    "dpo": TrainingVerb(
        DPOConfig,
        "Train a model on preferred and rejected, or ranked, responses: DPO and its family.",
        "lightrft.trainer.preference.run:run_preference",
    ),
    "kto": TrainingVerb(
        KTOConfig,
        "Train a model on responses that are labelled as desirable or not: KTO, BCO.",
        "lightrft.trainer.preference.run:run_preference",
    ),
    "rm": TrainingVerb(
        RMConfig,
        "Train a reward model on preferred and rejected, ranked or rated responses.",
        "lightrft.trainer.reward_model.run:run_reward_model",
    ),
    "prm": TrainingVerb(
        PRMVerbConfig,
        "Train a process reward model on responses whose steps have labels.",
        "lightrft.trainer.process_model.run:run_process_model",
    ),
    "distill": TrainingVerb(
        DistillVerbConfig,
        "Train a model towards a teacher's distributions, on given or on sampled responses.",
        "lightrft.trainer.distill.run:run_distill",
    ),
}
JUDGE = {
    "sft": TrainingVerb(
        JudgeSFTConfig,
        "Train a judge of responses on judgements, by supervised fine-tuning.",
        TRAINING["sft"].function,
    ),
    "rl": TrainingVerb(
        JudgeRLConfig,
        "Train a judge of responses by reinforcement learning: agreement with labels is rewarded.",
        TRAINING["rl"].function,
    ),
    "dpo": TrainingVerb(
        JudgeDPOConfig,
        "Train a judge of responses on preferred and rejected, or on sampled, judgements.",
        TRAINING["dpo"].function,
    ),
}
"""The methods of ``lightrft grm``."""
ONE_PROCESS = {
    "eval": OneProcessVerb(
        EvaluateConfig,
        "Generate responses to the eval set and score them.",
        "lightrft.trainer.inference:run_eval",
        "model.path",
        lambda config, result: json.dumps(result.metrics, indent=1),
        # Not on standard output, which is JSON for other programs.
        lambda result: result.table(),
    ),
    "eval-rm": OneProcessVerb(
        EvalRMConfig,
        "Score given responses with a reward model, and measure how well it orders them: lightrft "
        "eval-rm MODEL data.sources=rows.jsonl",
        "lightrft.trainer.reward_model.evaluate:run_eval_rm",
        "model.path",
        lambda config, result: json.dumps(result.metrics, indent=1),
        lambda result: result.table(),
        has_report=True,
    ),
    "generate": OneProcessVerb(
        GenerateConfig,
        "Generate responses to a file of prompts, as JSON lines.",
        "lightrft.trainer.pipelines.generate:run_generate",
        "model.path",
        lambda config, result: result.lines(config.output),
    ),
    "label-steps": OneProcessVerb(
        LabelStepsConfig,
        "Label the steps of solutions by the share of right responses that continue them.",
        "lightrft.trainer.pipelines.label_steps:run_label_steps",
        "model.path",
        lambda config, result: f"{result.rows} rows in {config.output}\n{result}",
    ),
    "export": OneProcessVerb(
        ExportConfig,
        "Write the policy of a run folder or a checkpoint as a Hugging Face folder: lightrft "
        "export RUN_OR_CHECKPOINT",
        "lightrft.trainer.saved_policy:run_export",
        "path",
        lambda config, result: (
            f"step {result[1].step} of {result[1].checkpoint}: {result[0]}\n  lightrft chat "
            f"model={result[0]}"
        ),
    ),
    "merge": OneProcessVerb(
        MergeConfig,
        "Write one model folder from several models, or from adapters: lightrft merge A B "
        "output=FOLDER",
        "lightrft.trainer.merge:run_merge",
        "models",
        lambda config, written: written.line(),
        several_paths=True,
    ),
    "convert": OneProcessVerb(
        ConvertConfig,
        "Write a model folder with weights of another type, in files of another size, of a GGUF "
        "file, or of a checkpoint of DeepSpeed or FSDP: lightrft convert MODEL dtype=bfloat16 "
        "output=FOLDER",
        "lightrft.trainer.merge:run_convert",
        "path",
        lambda config, written: written.line(),
        origin=("layout", "deepspeed"),
    ),
    "import-config": OneProcessVerb(
        ImportConfig,
        "Write a config of TRL, verl, OpenRLHF, LLaMA-Factory, ms-swift or LightRFT as a config of "
        "lightrft, with a comment for each difference: lightrft import-config FILE --from trl",
        "lightrft.diagnostics.importing.writing:run_import",
        "path",
        lambda config, result: result.lines(config.output),
        takes_file=True,
        origin=("framework", "trl"),
    ),
}
SERVING = {
    "serve": ServingVerb(
        ServeConfig,
        "Answer requests for text by a model, in the APIs of OpenAI and Anthropic: lightrft serve "
        "MODEL_OR_RUN http.port=8000",
        "lightrft.serving.generation_server:open_server",
        "model.path",
    ),
    "serve-rm": ServingVerb(
        ServeRMConfig,
        "Answer requests for scores of a reward model: lightrft serve-rm MODEL http.port=8000",
        "lightrft.serving.reward_server:open_reward_server",
        "model.path",
    ),
}


def run_verb(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb of this module's tables and return the exit status."""
    if verb in TRAINING:
        return train(verb, TRAINING[verb], arguments)
    if verb in SERVING:
        return serve(verb, SERVING[verb], arguments)
    return run_here(verb, ONE_PROCESS[verb], arguments)


def config_of(verb: str, arguments: Sequence[str]) -> Loaded[TrainingConfig]:
    """Parse ``arguments`` as the config of a verb that trains.

    ``auto`` selects the verb whose settings fit. Raises ``ConfigError`` if none fits.
    """
    method = verb.removeprefix("grm-")
    if method != verb and method in JUDGE:
        judge = parse(JUDGE[method].settings, arguments)
        return replace(judge, settings=plain_settings(judge.settings))
    if verb != "auto":
        if verb not in TRAINING:
            raise ConfigError(
                f"there is no verb {verb!r} that trains{did_you_mean(verb, TRAINING)}"
            )
        return parse(TRAINING[verb].settings, arguments)
    found: dict[str, Loaded[TrainingConfig]] = {}
    problems: list[ConfigError] = []
    for name, row in TRAINING.items():
        try:
            found[name] = parse(row.settings, arguments)
        except ConfigError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    first = found["rl"].settings if "rl" in found else None
    if isinstance(first, RLConfig):
        reward, distill = first.reward, first.algorithm.distill
        if reward.scores or distill.kind != "none":
            return found["rl"]
    # A config without rewards and without a teacher parses as any: then it is one for SFT.
    if "distill" in found and "sft" not in found:
        return found["distill"]
    dpo = found.get("dpo")
    if "sft" not in found and dpo is not None and isinstance(dpo.settings, DPOConfig):
        labelled = preference_requirements(dpo.settings.preference).kind == "labelled"
        return found["kto"] if labelled else dpo
    return found.get("sft", next(iter(found.values())))


def train(
    verb: str, row: TrainingVerb, arguments: Sequence[str], method: tuple[str, ...] = ()
) -> int:
    """Train in this process, with torchrun, or on a Ray cluster, and return the exit status.

    Args:
        verb: name of the verb.
        row: definition of the verb.
        arguments: YAML files and ``key=value``.
        method: words between the verb and its arguments.
    """
    parsed = settings_of(" ".join((verb, *method)), row.settings, arguments, row.about)
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


def plain_settings(config: TrainingConfig) -> TrainingConfig:
    """Return the settings of the verb that trains: a judge's are settings of another verb."""
    if isinstance(config, JudgeSFTConfig | JudgeRLConfig | JudgeDPOConfig):
        return config.plain()
    return config


def run_here(verb: str, row: OneProcessVerb, arguments: Sequence[str]) -> int:
    """Call the function of the verb, print its result and return the exit status.

    Args:
        verb: name of the verb.
        row: definition of the verb.
        arguments: YAML files and ``key=value``.
    """
    if row.origin is not None:
        arguments = with_origin(arguments, *row.origin)
    if row.takes_file:
        words = file_first(arguments, row.path_setting)
    else:
        words = positional(arguments, row.path_setting, several=row.several_paths)
    config = settings_of(verb, row.settings, words, row.about)
    if config is None:
        return 0
    # A verb that runs no model has no settings of a run.
    threads = 0 if isinstance(config, FolderConfig) else config.run.threads
    function = import_function(row.function, threads)
    with memory_errors():
        result = function(config)
    if row.notes is not None:
        sys.stderr.write(row.notes(result) + "\n")
    if row.has_report and not isinstance(config, FolderConfig):
        sys.stderr.write("\n".join(with_report(config.run, [])) + "\n")
    sys.stdout.write(row.lines(config, result) + "\n")
    return 0


def serve(verb: str, row: ServingVerb, arguments: Sequence[str]) -> int:
    """Print the address of a server, answer until it is stopped, and return the exit status.

    Args:
        verb: name of the verb.
        row: definition of the verb.
        arguments: YAML files and ``key=value``.
    """
    config = settings_of(verb, row.settings, positional(arguments, row.path_setting), row.about)
    if config is None:
        return 0
    with memory_errors():
        server = import_function(row.function, config.threads)(config)
        sys.stdout.write(server.ready_line() + "\n")
        sys.stdout.flush()
        server.run()
    return 0
