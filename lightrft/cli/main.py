"""The command ``lightrft <verb> [config.yaml ...] [a.b=value ...]``."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from logging import ERROR, WARNING

from lightrft.distributed.error_report import report_error
from lightrft.distributed.process_group import first_rank
from lightrft.observability.logging_setup import log_to_terminal, stop_logging
from lightrft.utils.atomic_files import disk_problem, path_problem
from lightrft.utils.cpu_threads import set_thread_policy
from lightrft.utils.errors import UserError, did_you_mean
from lightrft.utils.stop_signal import Terminated, raise_at_termination

VERBS = {
    "demo": "train a model from random weights by reinforcement learning, and write a report",
    "rl": "train by reinforcement learning from rewards",
    "sft": "fine-tune on conversations",
    "dpo": "train on preferred and rejected responses: DPO and its family",
    "kto": "train on responses labelled as desirable or not: KTO, BCO",
    "rm": "train a reward model on compared, ranked or rated responses",
    "prm": "train a process reward model on responses whose steps have labels",
    "grm": "train a judge of responses, by sft, rl or dpo on judgements",
    "distill": "train towards the distributions of a teacher",
    "iterate": "repeat: generate, select by reward, train; e.g. rejection sampling, iterative DPO",
    "eval": "measure the accuracy of a model on an eval set",
    "eval-rm": "measure how well a reward model orders given responses",
    "compare": "compare two evaluations of the same prompts, with an interval",
    "generate": "generate responses to a file of prompts, or training rows from them",
    "label-steps": "label the steps of solutions by responses that continue them",
    "chat": "talk to a model",
    "serve": "answer requests for text by a model, as OpenAI and Anthropic do",
    "serve-rm": "answer requests for scores of a reward model",
    "serve-tinker": "train and sample for programs that use tinker's client",
    "export": "write a Hugging Face folder from a run or a checkpoint",
    "merge": "write one model folder from several models, or from adapters",
    "convert": "write a model folder with another type of weights, or size of files",
    "import-config": "write a config of TRL, verl, OpenRLHF, LLaMA-Factory ... as one of lightrft",
    "report": "write a page about a run: curves, groups, advantages and responses",
    "data": "print the first rows of a config as a run reads them, with the trained tokens",
    "settings": "search the settings of all verbs; print their JSON Schema for editors",
    "completion": "print a script by which bash, zsh or fish complete verbs and settings",
    "explain": "print the objective of a preset or a config",
    "doctor": "estimate memory and time, and find problems, before a run starts",
    "check": "test a function of the user against the contract of its kind",
}
"""Description of each verb in the help."""

IN_TABLE = (
    *("rl", "sft", "dpo", "kto", "rm", "prm", "distill"),
    *("eval", "eval-rm", "generate", "label-steps", "export", "merge", "convert", "import-config"),
    *("serve", "serve-rm", "serve-tinker"),
)
"""Verbs with a row in ``lightrft.cli.verbs``.

Each other verb is a module with ``run(arguments) -> exit status``.
"""


OTHER_VERBS: dict[str, str] = {
    **dict.fromkeys(("train", "train_rl", "train-rl", "rlhf"), "rl"),
    **dict.fromkeys(("grpo", "ppo", "dapo", "rloo", "reinforce"), "rl"),
    **dict.fromkeys(("finetune", "fine-tune", "fine_tune", "train_sft", "train-sft"), "sft"),
    **dict.fromkeys(("preference", "train_dpo", "train-dpo", "simpo", "ipo", "orpo", "cpo"), "dpo"),
    **dict.fromkeys(("train_kto", "train-kto", "bco"), "kto"),
    **dict.fromkeys(("reward", "reward-model", "reward_model", "train_rm", "train-rm"), "rm"),
    **dict.fromkeys(("train_prm", "train-prm", "process-reward", "process_reward"), "prm"),
    **dict.fromkeys(("judge", "generative-reward-model", "genrm", "train_grm"), "grm"),
    **dict.fromkeys(("gkd", "kd", "distillation", "knowledge-distillation"), "distill"),
    **dict.fromkeys(("evaluate", "test", "validate", "benchmark"), "eval"),
    **dict.fromkeys(("eval_rm", "evaluate-rm", "rewardbench", "reward-bench"), "eval-rm"),
    **dict.fromkeys(("diff", "compare-runs", "significance"), "compare"),
    **dict.fromkeys(("infer", "inference", "predict", "sample", "rollout"), "generate"),
    **dict.fromkeys(("best_of_n", "best-of-n", "batch_inference", "batch-inference"), "generate"),
    **dict.fromkeys(("raft", "rft", "rejection-sampling", "rejection_sampling"), "iterate"),
    **dict.fromkeys(("iterative-dpo", "iterative_dpo", "iter_dpo", "spin", "star"), "iterate"),
    **dict.fromkeys(("label_steps", "math-shepherd", "omegaprm", "mc-labels"), "label-steps"),
    **dict.fromkeys(("talk", "repl", "ask"), "chat"),
    **dict.fromkeys(("vllm-serve", "vllm", "api-server", "api", "server"), "serve"),
    **dict.fromkeys(("serve_rm", "reward-server", "serve-reward", "get_reward"), "serve-rm"),
    **dict.fromkeys(("serve_tinker", "tinker"), "serve-tinker"),
    **dict.fromkeys(("plan", "estimate", "diagnose", "dry-run"), "doctor"),
    **dict.fromkeys(("describe", "formula"), "explain"),
    **dict.fromkeys(("search", "find", "options", "config", "setting"), "settings"),
    **dict.fromkeys(("import", "import_config", "translate", "migrate"), "import-config"),
    **dict.fromkeys(("show", "rows", "inspect", "preview", "dataset", "preprocess"), "data"),
    **dict.fromkeys(("merge-lora", "merge_lora", "mergekit", "mergekit-yaml", "soup"), "merge"),
}
"""Name that another tool uses for a verb, to the verb, for suggestions."""


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
        with nullcontext() if "WORLD_SIZE" in os.environ else raise_at_termination():
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


def verb_hint(word: str) -> str:
    """Return ``; did you mean ...?`` for a word that is no verb, or ""."""
    verb, setting, value = meant_verb(word)
    if setting:
        return f"; did you mean 'lightrft {verb} {setting}={value}'?"
    return did_you_mean(verb, VERBS)


def meant_verb(word: str) -> tuple[str, str, str]:
    """Return the verb that a word of another tool means, and a setting with its value, or "".

    Another word is returned as it is.
    """
    from lightrft.config.preference.presets import PREFERENCE_PRESETS
    from lightrft.config.presets import PRESETS

    name = word.lower()
    if name in PRESETS:
        return "rl", "algorithm", name
    if name in PREFERENCE_PRESETS and name not in VERBS:
        return "kto" if name == "bco" else "dpo", "preference", name
    return OTHER_VERBS.get(name, word), "", ""


def run_verb(verb: str, arguments: Sequence[str]) -> int:
    """Import the module of ``verb``, run the verb and return the exit status."""
    # Imported here: the help and the errors of one verb need not wait for torch.
    if verb not in ("check", "explain", "settings"):  # they have options that are no settings
        arguments = importlib.import_module("lightrft.cli.arguments").without_dashes(arguments)
    if verb in IN_TABLE:
        return importlib.import_module("lightrft.cli.verbs").run_verb(verb, arguments)
    return importlib.import_module(f"lightrft.cli.{verb}").run(arguments)


def usage() -> str:
    """Return the table of verbs."""
    rows = "\n".join(f"  {verb:<13} {what}" for verb, what in VERBS.items())
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
