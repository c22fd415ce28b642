"""The table of verbs. A verb is a row here, a page of ``docs/verbs``, and a function or a module.

The command line, the functions of Python, completion, doctor and the documentation read the table.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["training", "rounds", "call", "server", "module"]
"""Ways to run: ``training`` in a run folder, on one rank or several; ``rounds`` of trainings;
``call`` of a function in this process; ``server`` until it is stopped; ``module`` by own code."""


class Verb(NamedTuple):
    """A verb of the command line.

    A verb with a ``function`` is a function of Python too. All verbs of kind ``module`` or
    ``rounds`` are a module of ``lightrft.cli`` with ``run(arguments) -> exit status``.
    """

    kind: Kind
    about: str
    """Line of the table of verbs."""
    purpose: str = ""
    """First lines of the help of the verb. The first sentence describes its function."""
    settings: str = ""
    """Class of its settings, as ``module:name``."""
    function: str = ""
    """Function, as ``module:name``. It takes the settings. That of a verb that trains takes an
    observer too, and returns the summary. That of a server returns a server that listens."""
    others: str = ""
    """Names that other tools use for the verb, for suggestions."""
    path_setting: str = ""
    """Setting of a folder that is given without a name."""
    path: Literal["folder", "folders", "file"] = "folder"
    """Content of ``path_setting``. With ``file``, no word is a file of settings."""
    origin: str = ""
    """Setting that ``from=x`` and ``--from x`` stand for."""
    section: str = ""
    """Section of its own settings, for a verb about the config of another verb."""
    lines: Callable[[Any, Any], str] = lambda config, result: ""
    """Formats settings and result for standard output."""
    notes: Callable[[Any], str] | None = None
    """Formats the result for standard error."""
    has_report: bool = False
    """The report of the run folder is written."""
    methods: Mapping[str, Verb] = {}
    """Verbs that the second word names."""

    def settings_class(self) -> type[Any]:
        """Import and return the class of the settings."""
        module, _, name = self.settings.partition(":")
        return getattr(importlib.import_module(module), name)


def all_settings() -> dict[str, type[Any]]:
    """Return the class of the settings of each verb, such as ``grm sft``.

    Verbs without settings, and those about the config of another verb, are left out.
    """
    rows: dict[str, Verb] = {}
    for name, verb in VERBS.items():
        rows |= {f"{name} {method}": row for method, row in verb.methods.items()} or {name: verb}
    return {
        name: row.settings_class() for name, row in rows.items() if row.settings and not row.section
    }


def trains(verb: str) -> Verb | None:
    """Return the row of a verb that trains, such as ``rl``, ``grm-sft`` or ``iterate``, or None."""
    name, _, method = verb.partition("-")
    row = VERBS.get(name)
    if method and row is not None:
        return row.methods.get(method)
    return row if row is not None and row.kind in ("training", "rounds") else None


def of_kind(*kinds: Kind) -> dict[str, Verb]:
    """Return the verbs of some kinds by name."""
    return {name: verb for name, verb in VERBS.items() if verb.kind in kinds}


_JUDGES = {
    "sft": Verb(
        "training",
        "",
        "Train a judge of responses on judgements, by supervised fine-tuning.",
        "lightrft.config.verbs:JudgeSFTConfig",
        "lightrft.trainer.sft:run_sft",
    ),
    "rl": Verb(
        "training",
        "",
        "Train a judge of responses by reinforcement learning: agreement with labels is rewarded.",
        "lightrft.config.verbs:JudgeRLConfig",
        "lightrft.trainer.rl:run_rl",
    ),
    "dpo": Verb(
        "training",
        "",
        "Train a judge of responses on preferred and rejected, or on sampled, judgements.",
        "lightrft.config.verbs:JudgeDPOConfig",
        "lightrft.trainer.preference.run:run_preference",
    ),
}

VERBS: dict[str, Verb] = {
    "demo": Verb(
        "module",
        "train a model from random weights by reinforcement learning, and write a report",
        purpose=(
            "Train a model from random weights by rewards or preferences, and write a report."
        ),
        settings="lightrft.config.demo:DemoConfig",
    ),
    "rl": Verb(
        "training",
        "train by reinforcement learning from rewards",
        purpose="Train a model by reinforcement learning from rewards.",
        settings="lightrft.config.verbs:RLConfig",
        function="lightrft.trainer.rl:run_rl",
        others="train train-rl rlhf",
    ),
    "sft": Verb(
        "training",
        "fine-tune on conversations",
        purpose="Fine-tune a model on conversations, with the loss on assistant tokens.",
        settings="lightrft.config.verbs:SFTConfig",
        function="lightrft.trainer.sft:run_sft",
        others="finetune fine-tune train-sft pretrain",
    ),
    "dpo": Verb(
        "training",
        "train on preferred and rejected responses: DPO and its family",
        purpose=(
            "Train a model on preferred and rejected, or ranked, responses: DPO and its family."
        ),
        settings="lightrft.config.verbs:DPOConfig",
        function="lightrft.trainer.preference.run:run_preference",
        others="preference train-dpo online-dpo nash-md xpo",
    ),
    "kto": Verb(
        "training",
        "train on responses labelled as desirable or not: KTO, BCO",
        purpose="Train a model on responses that are labelled as desirable or not: KTO, BCO.",
        settings="lightrft.config.verbs:KTOConfig",
        function="lightrft.trainer.preference.run:run_preference",
        others="train-kto",
    ),
    "rm": Verb(
        "training",
        "train a reward model on compared, ranked or rated responses",
        purpose="Train a reward model on preferred and rejected, ranked or rated responses.",
        settings="lightrft.config.verbs:RMConfig",
        function="lightrft.trainer.reward_model.run:run_reward_model",
        others="reward reward-model train-rm bradley-terry",
    ),
    "prm": Verb(
        "training",
        "train a process reward model on responses whose steps have labels",
        purpose="Train a process reward model on responses whose steps have labels.",
        settings="lightrft.config.verbs:PRMVerbConfig",
        function="lightrft.trainer.process_model.run:run_process_model",
        others="train-prm process-reward process-reward-model",
    ),
    "grm": Verb(
        "module",
        "train a judge of responses, by sft, rl or dpo on judgements",
        settings="lightrft.config.verbs:JudgeRLConfig",
        function="lightrft.api.calls:grm",
        others="judge generative-reward-model genrm train-grm",
        methods=_JUDGES,
    ),
    "distill": Verb(
        "training",
        "train towards the distributions of a teacher",
        purpose=(
            "Train a model towards a teacher's distributions, on given or on sampled responses."
        ),
        settings="lightrft.config.verbs:DistillVerbConfig",
        function="lightrft.trainer.distill.run:run_distill",
        others="gkd kd distillation knowledge-distillation uld",
    ),
    "iterate": Verb(
        "rounds",
        "repeat: generate, select by reward, train; e.g. rejection sampling, iterative DPO",
        purpose=(
            "Repeat rounds: generate responses, select training rows by their rewards, "
            "and train. Rejection sampling, iterative DPO, best-of-n distillation and "
            "self-play."
        ),
        settings="lightrft.config.verbs:IterateConfig",
        function="lightrft.trainer.pipelines.iterate:run_iterate",
        others="rejection-sampling iterative-dpo iter-dpo spin star",
    ),
    "eval": Verb(
        "call",
        "measure the accuracy of a model on an eval set",
        purpose="Generate responses to the eval set and score them.",
        settings="lightrft.config.verbs:EvaluateConfig",
        function="lightrft.trainer.inference:run_eval",
        others="evaluate test validate benchmark",
        path_setting="model.path",
        lines=lambda config, result: json.dumps(result.metrics, indent=1),
        # Not on standard output, which is JSON for other programs.
        notes=lambda result: result.table(),
    ),
    "eval-rm": Verb(
        "call",
        "measure how well a reward model orders given responses",
        purpose=(
            "Score given responses with a reward model, and measure how well it orders "
            "them: lightrft eval-rm MODEL data.sources=rows.jsonl"
        ),
        settings="lightrft.config.verbs:EvalRMConfig",
        function="lightrft.trainer.reward_model.evaluate:run_eval_rm",
        others="evaluate-rm rewardbench reward-bench",
        path_setting="model.path",
        lines=lambda config, result: json.dumps(result.metrics, indent=1),
        notes=lambda result: result.table(),
        has_report=True,
    ),
    "compare": Verb(
        "module",
        "compare two evaluations of the same prompts, with an interval",
        purpose=(
            "Compare two evaluations of the same prompts: lightrft compare BASELINE "
            "CANDIDATE. Prints the paired difference with its interval, and says if it is"
            " within noise."
        ),
        settings="lightrft.config.config_tools:CompareConfig",
        others="diff compare-runs significance",
    ),
    "generate": Verb(
        "call",
        "generate responses to a file of prompts, or training rows from them",
        purpose="Generate responses to a file of prompts, as JSON lines.",
        settings="lightrft.config.verbs:GenerateConfig",
        function="lightrft.trainer.pipelines.generate:run_generate",
        others="infer inference predict sample rollout best-of-n batch-inference",
        path_setting="model.path",
        lines=lambda config, result: result.lines(config.output),
    ),
    "label-steps": Verb(
        "call",
        "label the steps of solutions by responses that continue them",
        purpose=(
            "Label the steps of solutions by the share of right responses that continue them."
        ),
        settings="lightrft.config.verbs:LabelStepsConfig",
        function="lightrft.trainer.pipelines.label_steps:run_label_steps",
        others="math-shepherd omegaprm mc-labels",
        path_setting="model.path",
        lines=lambda config, result: f"{result.rows} rows in {config.output}\n{result}",
    ),
    "chat": Verb(
        "module",
        "talk to a model",
        purpose=(
            "Talk to a model. /clear starts a new conversation, /exit leaves, /image path"
            " (or another kind) goes with the next message."
        ),
        settings="lightrft.config.verbs:ChatConfig",
        others="talk repl ask",
        path_setting="model.path",
    ),
    "serve": Verb(
        "server",
        "answer requests for text by a model, as OpenAI and Anthropic do",
        purpose=(
            "Answer requests for text by a model, in the APIs of OpenAI and Anthropic: "
            "lightrft serve MODEL_OR_RUN http.port=8000"
        ),
        settings="lightrft.config.generation.serving:ServeConfig",
        function="lightrft.serving.generation_server:open_server",
        others="vllm-serve vllm api-server api server",
        path_setting="model.path",
    ),
    "serve-rm": Verb(
        "server",
        "answer requests for scores of a reward model",
        purpose=(
            "Answer requests for scores of a reward model: lightrft serve-rm MODEL http.port=8000"
        ),
        settings="lightrft.config.generation.serving:ServeRMConfig",
        function="lightrft.serving.reward_server:open_reward_server",
        others="reward-server serve-reward get-reward",
        path_setting="model.path",
    ),
    "serve-tinker": Verb(
        "server",
        "train and sample for programs that use tinker's client",
        purpose=(
            "Train and sample for programs that use tinker's client: lightrft "
            "serve-tinker MODEL http.port=8000"
        ),
        settings="lightrft.config.generation.serving:ServeTinkerConfig",
        function="lightrft.serving.tinker.tinker_server:open_tinker_server",
        others="tinker",
        path_setting="model.path",
    ),
    "export": Verb(
        "call",
        "write a Hugging Face folder from a run or a checkpoint",
        purpose=(
            "Write the policy of a run folder or a checkpoint as a Hugging Face folder: "
            "lightrft export RUN_OR_CHECKPOINT"
        ),
        settings="lightrft.config.verbs:ExportConfig",
        function="lightrft.trainer.saved_policy:run_export",
        path_setting="path",
        lines=lambda config, result: (
            f"step {result[1].step} of {result[1].checkpoint}: {result[0]}\n  lightrft chat "
            f"model={result[0]}"
        ),
    ),
    "merge": Verb(
        "call",
        "write one model folder from several models, or from adapters",
        purpose=(
            "Write one model folder from several models, or from adapters: lightrft merge"
            " A B output=FOLDER"
        ),
        settings="lightrft.config.model:MergeConfig",
        function="lightrft.trainer.merge:run_merge",
        others="merge-lora mergekit mergekit-yaml soup",
        path_setting="models",
        path="folders",
        lines=lambda config, written: written.line(),
    ),
    "convert": Verb(
        "call",
        "write a model folder with another type of weights, or from a checkpoint",
        purpose=(
            "Write a model folder with weights of another type, in files of another size,"
            " of a GGUF file, or of a checkpoint of DeepSpeed or FSDP: lightrft convert "
            "MODEL dtype=bfloat16 output=FOLDER"
        ),
        settings="lightrft.config.model:ConvertConfig",
        function="lightrft.trainer.merge:run_convert",
        path_setting="path",
        origin="layout",
        lines=lambda config, written: written.line(),
    ),
    "import-config": Verb(
        "call",
        "write a config of TRL, verl, OpenRLHF, LLaMA-Factory ... as one of lightrft",
        purpose=(
            "Write a config of TRL, verl, OpenRLHF, LLaMA-Factory, ms-swift or LightRFT "
            "as a config of lightrft, with a comment for each difference: lightrft "
            "import-config FILE --from trl"
        ),
        settings="lightrft.config.config_tools:ImportConfig",
        function="lightrft.diagnostics.importing.writing:run_import",
        others="import translate migrate",
        path_setting="path",
        path="file",
        origin="framework",
        lines=lambda config, result: result.lines(config.output),
    ),
    "report": Verb(
        "module",
        "write a page about a run: curves, groups, advantages and responses",
    ),
    "data": Verb(
        "module",
        "print the first rows of a config as a run reads them, with the trained tokens",
        purpose="Print the first rows of a config as a run reads them: tokens, media, lengths.",
        settings="lightrft.config.config_tools:ShowConfig",
        function="lightrft.api.calls:data",
        others="show rows inspect preview dataset preprocess",
        section="show",
    ),
    "settings": Verb(
        "module",
        "search the settings of all verbs; print their JSON Schema for editors",
        others="search find options config setting",
    ),
    "completion": Verb(
        "module",
        "print a script by which bash, zsh or fish complete verbs and settings",
    ),
    "explain": Verb(
        "module",
        "print the objective of a preset or a config",
        others="describe formula",
        section="explain",
    ),
    "doctor": Verb(
        "module",
        "estimate memory and time, and find problems, before a run starts",
        purpose=(
            "Estimate the memory and time of a run of this config, and find problems, "
            "before it starts."
        ),
        settings="lightrft.config.verbs:DoctorConfig",
        others="plan estimate diagnose dry-run",
        section="doctor",
    ),
    "check": Verb(
        "module",
        "test a function of the user against the contract of its kind",
    ),
}
