"""Find the policy that a run has saved, load its weights and export it as a Hugging Face folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedTokenizerBase

from lightrft.config.base import Tree, build
from lightrft.config.data import MediaConfig
from lightrft.config.model import ModelConfig, loading_settings
from lightrft.config.verbs import ExportConfig
from lightrft.engines.sending.merged_adapters import whole_weights
from lightrft.models.actor import Actor
from lightrft.models.loading.adapter_base import saved_adapters
from lightrft.models.loading.adapter_folder import lora_of
from lightrft.models.loading.export_check import check_adapters, check_export, probe_logits
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.loading.save_model import save_model
from lightrft.models.processors import Processor, load_processor
from lightrft.models.processors.written import check_processor
from lightrft.models.training_mode import evaluation_mode
from lightrft.strategy.checkpoint import CheckpointStore
from lightrft.strategy.manifest import MANIFEST, load_manifest, verify
from lightrft.strategy.single import load_weights
from lightrft.utils.atomic_files import whole_folder
from lightrft.utils.cpu import return_freed_memory
from lightrft.utils.errors import CheckpointError, ConfigError
from lightrft.utils.yaml_text import parse_yaml

log = logging.getLogger(__name__)

POLICY = "policy"
"""The folder of the policy inside a checkpoint."""


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """A policy in an intact checkpoint.

    ``model`` are the model settings of the run, including adapters and frozen modules. ``media``
    are its settings of media, whose limits of pixels belong to the model.
    """

    checkpoint: Path
    step: int
    model: ModelConfig
    media: MediaConfig = field(default_factory=MediaConfig)

    @property
    def weights(self) -> Path:
        """The folder of the trained weights."""
        return self.checkpoint / POLICY


def is_saved(path: Path) -> bool:
    """Return True if ``path`` is a checkpoint or a run folder, and not a model folder."""
    if (path / MANIFEST).is_file():
        return True
    # A model folder of Hugging Face has config.json. Some have a config.yaml of another program.
    return (path / "config.yaml").is_file() and not (path / "config.json").exists()


def saved_policy(path: Path, which: str = "auto", step: int | None = None) -> SavedPolicy:
    """Find the policy of a run or of a checkpoint, and verify every file of the checkpoint.

    Args:
        path: run folder, or folder of a checkpoint.
        which: ``best`` by the run's ``checkpoint.best``, ``last``, or ``auto``. ``auto`` is the
            best if the run names a metric, else the last.
        step: step of the checkpoint, instead of ``which``. None uses ``which``.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or its run is unknown.
        ConfigError: ``path`` is no such folder, or the run names no metric for ``best``.
    """
    if not is_saved(path):
        raise ConfigError(
            f"{path} is neither a run folder (with config.yaml) nor a checkpoint (with {MANIFEST}); "
            "a model folder is used as it is; lightrft convert changes its type"
        )
    if (path / MANIFEST).is_file():
        if which != "auto" or step is not None:
            raise ConfigError(
                f"{path} is one checkpoint: leave out which and step, or name the run folder"
            )
        verify(path)
        checkpoint = path
    else:
        checkpoint = _chosen(path, which, step)
    tree = _config_of(checkpoint)
    if not (checkpoint / POLICY).is_dir():
        raise ConfigError(
            f"{path} is a run of a reward model, which generates nothing; its model for "
            "reward.models is the folder model/ of the run"
        )
    settings = build(ModelConfig, loading_settings(tree["model"]))
    # a run that another version wrote may have settings that are unknown here
    given = (tree.get("data") or {}).get("media") or {}
    limits = {name: given[name] for name in ("min_pixels", "max_pixels") if name in given}
    media = build(MediaConfig, limits)
    return SavedPolicy(checkpoint, load_manifest(checkpoint).step, settings, media)


def media_of(saved: SavedPolicy | None) -> MediaConfig | None:
    """Return the settings of media of a saved policy, or None for a model folder."""
    return None if saved is None else saved.media


def _chosen(run: Path, which: str, step: int | None) -> Path:
    """Return the selected checkpoint of ``run``, verified."""
    best = (_read(run / "config.yaml").get("checkpoint") or {}).get("best")
    if which == "best" and not best:
        raise ConfigError(
            f"which = 'best': the run {run} has no checkpoint.best; take which=last, or a step"
        )
    store = CheckpointStore(run / "checkpoints", keep=1, best=best)
    steps = store.steps()
    if step is not None:
        if step not in steps:
            raise CheckpointError(
                f"{run} has no checkpoint of step {step}; it has "
                f"{', '.join(map(str, steps)) or 'none'}"
            )
        verify(steps[step])
        return steps[step]
    if best and which != "last":
        found = store.best_intact()
        if found is not None:
            return found
        log.warning("%s: no checkpoint has the metric %s; the last one is taken", run, best)
    found = store.last_intact()
    if found is not None:
        return found
    # A demo writes its runs into one folder, whose name is easily given for that of a run.
    inside = sorted(file.parent.name for file in run.glob("*/config.yaml"))
    runs = f"; the folder holds several runs: {', '.join(inside)}" if inside else ""
    raise CheckpointError(f"{run} has no intact checkpoint{runs}")


def _config_of(checkpoint: Path) -> Tree:
    """Return the config of the run that wrote ``checkpoint``, from its copy or the run folder."""
    for file in (checkpoint / "config.yaml", checkpoint.parent.parent / "config.yaml"):
        if file.is_file():
            return _read(file)
    raise CheckpointError(
        f"{checkpoint} has no config.yaml, and is in no run folder: its model is not known"
    )


def _read(file: Path) -> Tree:
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(tree, dict) or "model" not in tree:
        raise CheckpointError(f"{file} is not the config of a run: it has no branch 'model'")
    return tree


def resolved(model: ModelConfig) -> tuple[ModelConfig, SavedPolicy | None]:
    """Replace a run folder or a checkpoint in ``model.path`` by the start model of that run.

    Settings of ``model`` that the user gave override the settings of the run.

    Returns:
        The model to load, and the policy whose weights to load into it. The policy is None for a
        model folder or a model name.
    """
    folder = Path(model.path).expanduser()
    if not model.path or not is_saved(folder):
        return model, None
    # A finished run whose checkpoints were deleted to free space still has its exported model.
    has_weights = (folder / MANIFEST).is_file() or any(folder.glob("checkpoints/step_*"))
    if not has_weights and (folder / "model").is_dir():
        log.warning(
            "model.path = %r: the run has no checkpoints; using its folder model/", model.path
        )
        return model.model_copy(update={"path": str(folder / "model"), "base": None}), None
    saved = saved_policy(folder)
    if saved.checkpoint != folder:
        log.warning("model.path = %r: using the checkpoint of step %d", model.path, saved.step)
    given = {name: getattr(model, name) for name in model.model_fields_set if name != "path"}
    return saved.model.model_copy(update=given), saved


def write_policy(
    model: ModelConfig,
    weights: Path,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    *,
    merge: bool = True,
) -> None:
    """Write trained weights as a Hugging Face folder, atomically. A folder at ``path`` is replaced.

    Args:
        model: the model that the run started from.
        weights: folder of the trained weights in a checkpoint, written by any strategy and number
            of ranks.
        path: folder to write.
        tokenizer: tokenizer to save with the weights.
        processor: processor to save with the weights, or None for a text-only model.
        merge: True merges adapters into the weights. False writes an adapter folder for PEFT.

    Raises:
        CheckpointError: the weights are not of this model.
        ConfigError: ``merge`` is False and the model has no adapters.
        ModelError: the start model cannot be loaded, or an adapter cannot be merged.
    """
    actor = Actor.load(model)
    if not merge and not actor.has_adapters:
        raise ConfigError(
            "adapters = 'keep' changes nothing: the run trained no adapters (model.lora); leave "
            "it out"
        )
    load_weights(actor, weights)
    if merge and model.load_in_4bit:
        actor = _whole(actor)
    save_checked(actor, path, tokenizer, processor, merge=merge)


@torch.no_grad()
def _whole(policy: Actor) -> Actor:
    """Return the start model with the weights that ``policy``, in 4 bits, computes with."""
    found = saved_adapters(policy.config)
    start = policy.config if found is None else found.base
    plain = Actor.load(start.model_copy(update={"load_in_4bit": False, "lora": None}))
    parameters = dict(plain.model.named_parameters())
    own = policy.model.named_parameters()
    for name, weight in whole_weights(own, lora_of(policy.config)):
        parameters[name].copy_(weight)
    return plain


def save_checked(
    actor: Actor,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    *,
    merge: bool = True,
) -> None:
    """Write ``actor`` as a Hugging Face folder, atomically, once transformers reads it as written.

    Args:
        actor: the model to write.
        path: folder to write. A folder that is there is replaced.
        tokenizer: tokenizer to save with the weights.
        processor: processor to save with the weights, or None for a text-only model.
        merge: True merges adapters into the weights. False writes an adapter folder for PEFT.

    Raises:
        ModelError: transformers reads another model, the folder reads media otherwise, or the
            adapters cannot be merged.
    """
    # the check loads the model a second time, into what training has freed
    return_freed_memory()
    with whole_folder(path) as temporary:
        save_model(actor, tokenizer, temporary, processor=processor, merge=merge)
        if merge:
            actor.use_attention("padded")
            if actor.experts is not None:
                actor.experts.replay(None)
            with evaluation_mode(actor):
                expected = probe_logits(actor.model)
            check_export(temporary, expected, tokenizer)
        else:
            check_adapters(temporary, actor.model)
        if processor is not None:
            start = tokenizer.name_or_path if merge else None
            trusted = actor.config.trust_remote_code
            check_processor(temporary, processor, tokenizer, start, trust_remote_code=trusted)


def run_export(config: ExportConfig) -> tuple[Path, SavedPolicy]:
    """Export the policy of ``config`` as a Hugging Face folder. Return folder and policy."""
    if not config.path:
        raise ConfigError(
            "path is empty; name a run folder or a checkpoint, e.g. lightrft export runs/my_run"
        )
    saved = saved_policy(Path(config.path).expanduser(), config.which, config.step)
    model = saved.model
    if config.base is not None:
        model = model.model_copy(update={"path": config.base})
    run = saved.checkpoint.absolute().parent
    # A checkpoint may have been moved out of its run. It is exported next to itself then.
    if run.name == "checkpoints":
        run = run.parent
    output = run / "export" / saved.checkpoint.name
    if config.output is not None:
        output = Path(config.output).expanduser()
    if output.exists():
        check_replaceable(output, config.overwrite)
    tokenizer = load_tokenizer(model)
    processor = load_processor(model, tokenizer, saved.media)
    merge = config.adapters == "merge"
    write_policy(model, saved.weights, output, tokenizer, processor, merge=merge)
    return output, saved


def check_replaceable(output: Path, overwrite: bool) -> None:
    """Raise ``ConfigError`` unless ``output`` is a model folder that may be overwritten."""
    # The whole folder is replaced, so ``overwrite`` must not delete anything but a model.
    names = ("config.json", "adapter_config.json")
    is_model = output.is_dir() and any((output / name).is_file() for name in names)
    if not is_model:
        raise ConfigError(f"output {output} exists and is no model folder; choose another output")
    if not overwrite:
        raise ConfigError(
            f"output {output} exists; set overwrite=true to replace it, or choose another output"
        )
