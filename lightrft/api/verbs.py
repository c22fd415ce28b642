"""The table of verbs: each with its settings, its function and the lines that it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.config.base import Loaded
from lightrft.config.config_tools import ImportConfig
from lightrft.config.generation.serving import ServeConfig, ServeRMConfig, ServeTinkerConfig
from lightrft.config.model import ConvertConfig, MergeConfig
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
    stands for.
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
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class ServingVerb:
    """A verb that answers requests until it is stopped.

    ``function``, given as ``module:name``, takes the settings, and returns a server that listens.
    ``path_setting`` is the setting for a folder that is given without a key.
    """

    settings: type[ServeConfig | ServeRMConfig | ServeTinkerConfig]
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
        origin="layout",
    ),
    "import-config": OneProcessVerb(
        ImportConfig,
        "Write a config of TRL, verl, OpenRLHF, LLaMA-Factory, ms-swift or LightRFT as a config of "
        "lightrft, with a comment for each difference: lightrft import-config FILE --from trl",
        "lightrft.diagnostics.importing.writing:run_import",
        "path",
        lambda config, result: result.lines(config.output),
        takes_file=True,
        origin="framework",
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
    "serve-tinker": ServingVerb(
        ServeTinkerConfig,
        "Train and sample for programs that use tinker's client: lightrft serve-tinker MODEL "
        "http.port=8000",
        "lightrft.serving.tinker.tinker_server:open_tinker_server",
        "model.path",
    ),
}


def plain_settings(config: TrainingConfig) -> TrainingConfig:
    """Return the settings of the verb that trains: a judge's are settings of another verb."""
    if isinstance(config, JudgeSFTConfig | JudgeRLConfig | JudgeDPOConfig):
        return config.plain()
    return config


def fitting(
    verb: str, load: Callable[[type[TrainingConfig]], Loaded[TrainingConfig]]
) -> Loaded[TrainingConfig]:
    """Return the settings of a verb that trains.

    Args:
        verb: name of the verb. ``auto`` selects the verb whose settings fit.
        load: returns the given settings as those of a class.

    Raises:
        ConfigError: there is no such verb, or the settings do not fit.
    """
    method = verb.removeprefix("grm-")
    if method != verb and method in JUDGE:
        judge = load(JUDGE[method].settings)
        return replace(judge, settings=plain_settings(judge.settings))
    if verb != "auto":
        if verb not in TRAINING:
            raise ConfigError(
                f"there is no verb {verb!r} that trains{did_you_mean(verb, TRAINING)}"
            )
        return load(TRAINING[verb].settings)
    found: dict[str, Loaded[TrainingConfig]] = {}
    problems: list[ConfigError] = []
    for name, row in TRAINING.items():
        try:
            found[name] = load(row.settings)
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
