"""Train a model from scratch: random weights, supervised warm-up, RL or DPO, and a report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from lightrft.config.demo import DemoConfig, StartModelConfig
from lightrft.config.run import RunConfig
from lightrft.config.verbs import DPOConfig, IterateConfig, RLConfig, RMConfig, SFTConfig
from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny import MEDIA_FAMILIES, save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.trainer.pipelines.iterate import run_iterate
from lightrft.trainer.preference.run import run_preference
from lightrft.trainer.rl import run_rl
from lightrft.trainer.run_summary import finished_summary
from lightrft.trainer.sft import run_sft
from lightrft.utils.atomic_files import disk_errors, write_atomic, write_json
from lightrft.utils.errors import ConfigError

C = TypeVar("C", RLConfig, SFTConfig, IterateConfig, DPOConfig, RMConfig)
RUN: Mapping[str, Callable[..., Summary]] = {
    "sft": run_sft,
    "iterate": run_iterate,
    "rl": run_rl,
    "dpo": run_preference,
}
"""Training of each phase."""


def run_demo(config: DemoConfig, observer: Observer | None = None) -> Summary:
    """Run the remaining phases of the demo, write ``summary.json`` and return it.

    It also writes the files that a report reads. An interrupted demo resumes where it stopped, and
    finished phases are skipped.
    """
    base = config.run.folder
    with disk_errors(base, "free some space, or set run.overwrite=true to start over"):
        model = config.start or str(base / "start")
        if not config.start and (config.run.overwrite or not (base / "start/config.json").exists()):
            make_start(config, base / "start", config.run.seed)
        warm_up = "sft" if config.iterate is None else "iterate"
        phases: dict[str, Summary] = {}
        for name in (warm_up, "rl" if config.dpo is None else "dpo"):
            settings = phase_of(config.run, getattr(config, name), base, name, model)
            phases[name] = finished(base / name, config.run) or RUN[name](settings, observer)
            if not phases[warm_up].get("finished"):
                return {**phases[warm_up], "verb": "demo"}
            model = phases[name].get("model", str(base / name / "model"))
        return sum_up(base, phases)


def make_start(config: StartModelConfig, folder: Path, seed: int) -> None:
    """Write a model with random weights and its tokenizer, atomically.

    Args:
        config: settings of the model.
        folder: where to write it.
        seed: seed of the weights.

    Raises:
        ConfigError: a setting is given that the model family does not read.
    """
    if config.family not in MEDIA_FAMILIES and (config.tower or config.processor):
        raise ConfigError(
            f"family = {config.family!r} reads text alone: tower and processor change nothing; "
            "leave them out, or take one of " + ", ".join(MEDIA_FAMILIES)
        )
    # Renamed once complete: a demo that resumes takes an existing folder for the whole model.
    temporary = folder.with_name(".start.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    if config.family in MEDIA_FAMILIES:
        save_tiny_media(
            config.family,
            temporary,
            seed=seed,
            tower=config.tower,
            processor=config.processor,
            whole_roles=True,
            **config.model,
        )
    else:
        tokenizer = tiny_tokenizer(whole_roles=True)
        sizes: dict[str, Any] = {**config.model, "vocab_size": len(tokenizer)}
        save_model(tiny_model(config.family, seed=seed, **sizes), tokenizer, temporary)
    temporary.rename(folder)


def finished(folder: Path, run: RunConfig) -> Summary | None:
    """Return the summary of a phase that is complete, else None."""
    return None if run.overwrite else finished_summary(folder)


def phase_of(demo: RunConfig, phase: C, base: Path, name: str, model: str | Path) -> C:
    """Return the settings of a phase.

    Args:
        demo: settings of the demo's run.
        phase: settings of the phase.
        base: folder of the demo.
        name: name of the phase, and of its folder.
        model: model that it starts from.
    """
    run = RunConfig(**{**demo.model_dump(), "dir": str(base), "name": name})
    settings = phase.model.model_copy(update={"path": str(model)})
    return phase.model_copy(update={"run": run, "model": settings})


NEXT = {
    "rl": ("lightrft explain grpo", "lightrft rl recipes/gsm8k_grpo.yaml model=path/to/your/model"),
    "dpo": (
        "lightrft explain dpo",
        "lightrft dpo model={base}/sft/model run.name=ipo preference=ipo "
        "data.sources=lightrft.datasets.synthetic.arithmetic:pairs",
    ),
}
"""Commands to try after the demo, by its last phase."""


def sum_up(
    base: Path, phases: Mapping[str, Summary], more: Mapping[str, object] = MappingProxyType({})
) -> Summary:
    """Join the results of all phases for the report and return the summary.

    The headline is the accuracy on the eval set before the last phase and after it, or before the
    rounds of ``iterate``.

    Args:
        base: folder of the demo.
        phases: summaries of the phases by name, in order.
        more: further numbers of the summary. They replace numbers of the last phase.
    """
    last = list(phases)[-1]
    files = [base / name / "metrics.jsonl" for name in phases]
    rows = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    write_atomic(base / "metrics.jsonl", "".join(rows))
    shutil.copyfile(base / last / "config.yaml", base / "config.yaml")
    model = base / last / "model"
    first = "iterate" if "iterate" in phases else last
    samples = {
        side: json.loads((base / name / "samples.json").read_text(encoding="utf-8"))[side]
        for side, name in (("before", first), ("after", last))
    }
    write_json(base / "samples.json", samples)
    answers = samples["before"] or samples["after"]
    # The report of the demo shows the media of these responses alone.
    shutil.rmtree(base / "media", ignore_errors=True)
    for answer in answers:
        for name in answer["attachments"]:
            (base / "media").mkdir(exist_ok=True)
            shutil.copyfile(base / last / "media" / name, base / "media" / name)
    given = f"give it a file of {base / 'media'} and " if answers[0]["attachments"] else ""
    # Read from the file, where secrets are redacted.
    saved = json.loads((base / last / "summary.json").read_text(encoding="utf-8"))
    changed = saved.get("changed", {})
    measured = {k: v for k, v in phases[first].items() if k == "heldout_before"}
    summary = {
        **phases[last],
        **measured,
        "verb": "demo",
        "seconds": sum(summary["seconds"] for summary in phases.values()),
        **{f"seconds_{name}": summary["seconds"] for name, summary in phases.items()},
        "changed": changed,
        **more,
        "next": [
            f"lightrft chat model={model}  # {given}ask {answers[0]['prompt']}; /clear between "
            "questions",
            *(command.format(base=base) for command in NEXT[last]),
        ],
    }
    write_json(base / "summary.json", summary)
    return summary
