"""Merge models into one folder, and convert a model's weights: the verbs ``merge`` and
``convert``."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from lightrft.config.model import TASK_VECTORS, ConvertConfig, MergeConfig, MergeInput, ModelConfig
from lightrft.models.families import family_of
from lightrft.models.loading.export_check import (
    check_export,
    fits_memory,
    folder_logits,
    probe_logits,
)
from lightrft.models.loading.from_pretrained import (
    has_tokenizer,
    load_model,
    load_tokenizer,
    model_settings,
    read_tokenizer,
    write_gguf_as_folder,
)
from lightrft.models.loading.older_readers import add_older_names
from lightrft.models.merging.methods import merge_tensors
from lightrft.models.merging.stored_model import (
    StoredModel,
    WeightWriter,
    copy_small_files,
    open_model,
    read_config,
    set_config_dtype,
    tokenizer_folder,
    without_tied_copies,
    written_specs,
)
from lightrft.models.merging.training_checkpoint import (
    TRAINING,
    Layout,
    layout_of,
    open_training_checkpoint,
)
from lightrft.models.processors import load_processor
from lightrft.models.processors.written import check_processor
from lightrft.models.reward.other_layouts import holds_other_head
from lightrft.models.reward.reward_model import RewardModel
from lightrft.observability.progress_bar import Progress
from lightrft.trainer.saved_policy import check_replaceable, is_saved, resolved, write_policy
from lightrft.types import Batch, Prompt, Segments
from lightrft.utils.atomic_files import human_bytes, whole_folder
from lightrft.utils.errors import ConfigError, ModelError, whole_message
from lightrft.utils.peft_folder import ADAPTER_CONFIG

log = logging.getLogger(__name__)

_RUNS = ".runs"
"""Folder of the exported policies of runs, while they are merged."""


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """A model folder that ``merge`` or ``convert`` has written."""

    folder: Path
    tensors: int
    files: int
    bytes: int
    about: str = ""

    def line(self) -> str:
        """Return a line about the folder, and the command to use it."""
        size = f"{self.tensors} tensors, {human_bytes(self.bytes)}"
        files = "1 file" if self.files == 1 else f"{self.files} files"
        about = f"  {self.about}\n" if self.about else ""
        # A classifier or a reward model has no head that writes text.
        names = read_config(self.folder, str(self.folder)).get("architectures") or ()
        scores = any(name.endswith("Classification") for name in names)
        scores = scores or holds_other_head(ModelConfig(path=str(self.folder)))
        command = "serve-rm " if scores else "chat model="
        return f"{self.folder}: {size} in {files}\n{about}  lightrft {command}{self.folder}"


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The opened models of a merge.

    ``first`` gives the config, the names and the types. ``base`` is None for methods that read no
    base model.
    """

    models: Sequence[StoredModel]
    base: StoredModel | None
    tokenizer: Path

    @property
    def first(self) -> StoredModel:
        return self.models[0] if self.base is None else self.base

    @property
    def all(self) -> list[StoredModel]:
        return list(self.models) if self.base is None else [self.base, *self.models]


def run_convert(config: ConvertConfig) -> WrittenModel:
    """Write the model of ``config.path`` in another dtype or in files of another size.

    The model may be in a checkpoint of DeepSpeed or FSDP, or in a GGUF file.

    Raises ``ConfigError`` and ``ModelError`` as ``run_merge`` does.
    """
    if not config.path:
        raise ConfigError("path is empty; name a model, e.g. lightrft convert path/to/a/model")
    layout = config.layout if config.layout != "auto" else layout_of(config.path)
    if config.base is not None and layout not in TRAINING:
        raise ConfigError(
            f"base = {config.base!r} changes nothing: {config.path} is no checkpoint of DeepSpeed "
            "or FSDP; leave it out"
        )
    if layout == "gguf":
        return _of_gguf(config)
    opened = _of_training(config, layout) if layout in TRAINING else None
    # The mean of one model is that model, bit for bit.
    merge = MergeConfig(
        models=(MergeInput(model=config.path),),
        dtype=config.dtype,
        max_shard_size=config.max_shard_size,
        output=config.output,
        overwrite=config.overwrite,
    )
    return run_merge(merge, title="convert", opened=opened)


def _of_gguf(config: ConvertConfig) -> WrittenModel:
    """Write the model of a GGUF file, which is written as a temporary folder first."""
    output = Path(config.output).expanduser()
    if output.exists():
        check_replaceable(output, config.overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".gguf-", dir=output.parent) as scratch:
        folder = Path(scratch) / "model"
        about = write_gguf_as_folder(config.path, folder)
        plain = config.model_copy(update={"path": str(folder), "layout": "model"})
        return replace(run_convert(plain), about=about)


def _of_training(config: ConvertConfig, layout: Layout) -> StoredModel:
    """Return the weights of a checkpoint of DeepSpeed or FSDP."""
    if config.base is None:
        raise ConfigError(
            f"{config.path} is a checkpoint of {layout}, which has no config and no tokenizer; set "
            "base to the model that the training started from"
        )
    return open_training_checkpoint(config.path, layout, config.base)


def run_merge(
    config: MergeConfig, title: str = "merge", opened: StoredModel | None = None
) -> WrittenModel:
    """Merge ``config.models`` into the folder ``config.output``. Return a description of it.

    One tensor of each model, and one file of the result, are in memory at a time. The folder
    appears when it is complete.

    Args:
        config: Models, method and output.
        title: Title of the progress line.
        opened: The only model of ``config``, if it is open already.

    Raises:
        ConfigError: No models are named, ``base_model`` is not read, or the output exists.
        ModelError: A model cannot be read, the models do not fit each other, or a value is too
            large for the written type.
        ResourceError: The disk has no room.
    """
    if not config.models:
        raise ConfigError(
            "models is empty; name models or a folder of adapters, e.g. lightrft merge A B"
        )
    output = Path(config.output).expanduser()
    if output.exists():
        check_replaceable(output, config.overwrite)
    config = _ordered(config)
    with whole_folder(output) as folder:
        if opened is None:
            inputs = _open(config, folder / _RUNS)
        else:
            inputs = _Inputs([without_tied_copies(opened)], None, opened.tokenizer)
        _check_models(inputs.all)
        _check_tokenizers(inputs)
        writer = WeightWriter(
            folder, written_specs(inputs.first.specs, config.dtype), config.max_shard_size
        )
        writer.check_space()
        copy_small_files(inputs.first.folder, inputs.tokenizer, folder)
        if config.dtype != "auto":
            tree = read_config(inputs.first.folder, inputs.first.name)
            set_config_dtype(folder / "config.json", tree, config.dtype)
        add_older_names(folder)
        _write(config, inputs, writer, title)
        # Nothing but the weights of a checkpoint tells its logits.
        if opened is not None and holds_other_head(ModelConfig(path=str(folder))):
            _check_scores(folder)
        else:
            check_export(folder, _expected(config, inputs) if opened is None else None)
        _check_media(config, inputs, folder)
        shutil.rmtree(folder / _RUNS, ignore_errors=True)
        files = len(list(folder.glob("*.safetensors")))
    return WrittenModel(output, len(writer.specs), files, writer.total_bytes)


@torch.no_grad()
def _check_scores(folder: Path) -> None:
    """Raise ``ModelError`` unless the folder is read as a reward model with finite scores."""
    if not fits_memory(folder):
        log.warning("%s is too large for the free memory; it is not checked", folder)
        return
    reward = RewardModel.open(folder)
    prompt = Prompt("probe", [k % reward.text_config.vocab_size for k in range(4, 12)], "")
    batch = Batch(Segments.of_prompts([prompt]), Segments.of([[]]), torch.tensor([0]))
    for name, found in reward(batch).items():
        if not bool(found.scores.isfinite().all()):
            raise ModelError(f"{folder}: the scores of its head {name} are not finite")


def _ordered(config: MergeConfig) -> MergeConfig:
    """Return ``config`` with the model at ``t = 0`` first, and without a task vector of the base.

    Configs of mergekit often list the base model among the models.
    """
    base = config.base_model
    own = [one for one in config.models if one.model == base]
    others = [one for one in config.models if one.model != base]
    if not own or not others:
        return config
    if config.merge_method == "slerp":
        return config.model_copy(update={"models": (*own, *others), "base_model": None})
    if config.merge_method in TASK_VECTORS:
        return config.model_copy(update={"models": tuple(others)})
    return config


def _open(config: MergeConfig, runs: Path) -> _Inputs:
    """Open the models of ``config``. Policies of runs are exported to the folder ``runs``."""
    base_path = config.base_model
    if base_path is not None:
        base_path = _exported(base_path, runs / "base")
    models = []
    for i, one in enumerate(config.models):
        path = _exported(one.model, runs / str(i))
        models.append(without_tied_copies(open_model(path, base_path, runs)))
    base = None
    if base_path is not None and config.merge_method in TASK_VECTORS:
        base = without_tied_copies(open_model(base_path))
    elif base_path is not None and not any(
        (Path(one.model).expanduser() / ADAPTER_CONFIG).is_file() for one in config.models
    ):
        raise ConfigError(
            f"base_model is not read by merge_method = {config.merge_method!r} without adapters; "
            f"leave it out, or take one of {', '.join(sorted(TASK_VECTORS))}"
        )
    tokenizer = (base or models[0]).tokenizer
    if config.tokenizer_source is not None:
        tokenizer = tokenizer_folder(_exported(config.tokenizer_source, runs / "tokenizer"))
    return _Inputs(models, base, tokenizer)


def _exported(model: str, folder: Path) -> str:
    """Return the path of ``model``, or of its export to ``folder`` if it is a run or checkpoint."""
    if not is_saved(Path(model).expanduser()):
        return model
    start, saved = resolved(ModelConfig(path=model))
    if saved is None:
        return start.path
    # Adapters cannot be added to quantised weights. They are added to those on disk.
    start = start.model_copy(update={"load_in_4bit": False})
    tokenizer = load_tokenizer(start)
    processor = load_processor(start, tokenizer, saved.media)
    write_policy(start, saved.weights, folder, tokenizer, processor)
    return str(folder)


def _expected(config: MergeConfig, inputs: _Inputs) -> Tensor | None:
    """Return the logits of the only model of a merge for the tiny input of ``check_export``.

    They are ``None`` for several models, and for a model that is not loaded a second time.
    """
    if len(inputs.models) > 1 or inputs.base is not None:
        return None
    (model,) = inputs.models
    if not fits_memory(model.folder):
        return None
    if not model.changes:
        return folder_logits(model.folder)
    adapted = ModelConfig(path=model.name, base=config.base_model, unproved_family="allow")
    return probe_logits(load_model(adapted))


def _check_media(config: MergeConfig, inputs: _Inputs, folder: Path) -> None:
    """Check that the merged model reads media as the model whose processor was copied."""
    is_adapters = (inputs.tokenizer / ADAPTER_CONFIG).is_file()
    is_whole = is_adapters or (inputs.tokenizer / "config.json").is_file()
    source = ModelConfig(
        path=str(inputs.tokenizer if is_whole else inputs.first.folder),
        base=config.base_model if is_adapters else None,
        unproved_family="allow",
    )
    try:
        if family_of(model_settings(source)).reader is None:
            return
        tokenizer = load_tokenizer(source)
        processor = load_processor(source, tokenizer)
    except (ModelError, OSError, ValueError) as error:
        log.warning("how the written model reads media is not checked: %s", whole_message(error))
        return
    if processor is not None:
        check_processor(folder, processor, tokenizer, None if is_adapters else source.path)


def _check_models(models: Sequence[StoredModel]) -> None:
    """Raise ``ModelError`` unless all models have the same tensors."""
    first = models[0]
    kind = read_config(first.folder, first.name).get("model_type")
    for other in models[1:]:
        other_kind = read_config(other.folder, other.name).get("model_type")
        if other_kind != kind:
            raise ModelError(
                f"{other.name} is of the type {other_kind}, and {first.name} of the type {kind}: "
                "only models of one architecture can be merged"
            )
        for one, another in ((first, other), (other, first)):
            missing = sorted(one.specs.keys() - another.specs.keys())
            if missing:
                raise ModelError(
                    f"{another.name} lacks {len(missing)} tensors of {one.name}, e.g. "
                    f"{missing[0]}: only models with the same tensors can be merged"
                )
        for name, spec in first.specs.items():
            shape = other.specs[name].shape
            if shape != spec.shape:
                raise ModelError(
                    f"{name} has the shape {list(spec.shape)} in {first.name} and {list(shape)} "
                    f"in {other.name}: only tensors of one shape can be merged"
                )


def _check_tokenizers(inputs: _Inputs) -> None:
    """Raise ``ModelError`` if a token has different ids in two models, or an id two tokens."""
    first = inputs.tokenizer
    others = {model.tokenizer for model in inputs.all} - {first}
    others = {folder for folder in others if has_tokenizer(folder)}
    if not others:
        return
    if not has_tokenizer(first):
        log.warning("%s holds no tokenizer, so none is written; set tokenizer_source", first)
        return
    vocabulary = _vocabulary(first)
    token_of = {index: token for token, index in vocabulary.items()}
    for folder in sorted(others):
        other = _vocabulary(folder)
        # Sorted, since the order of a vocabulary differs from call to call.
        for token, index in sorted(other.items(), key=lambda entry: entry[1]):
            if token_of.get(index, token) != token or vocabulary.get(token, index) != index:
                raise ModelError(
                    f"the tokenizers differ: {token!r} is token {index} in {folder}, and token "
                    f"{vocabulary.get(token)} in {first}, where {index} is "
                    f"{token_of.get(index)!r}; only models of one vocabulary can be merged"
                )
        added = len(other.keys() - vocabulary.keys())
        if added:
            log.warning(
                "%s has %d tokens that %s lacks; the merged model gets the tokenizer of the "
                "latter. Set tokenizer_source to take another",
                folder,
                added,
                first,
            )


def _vocabulary(folder: Path) -> Mapping[str, int]:
    """Return the id of each token."""
    return read_tokenizer(ModelConfig(path=str(folder)), str(folder)).get_vocab()


@torch.no_grad()
def _write(config: MergeConfig, inputs: _Inputs, writer: WeightWriter, title: str) -> None:
    with Progress(len(writer.specs), title) as progress:

        def made(name: str) -> Tensor:
            return _merged(config, inputs, name)

        writer.write(made, lambda: progress.update({"step": progress.done + 1}))


def _merged(config: MergeConfig, inputs: _Inputs, name: str) -> Tensor:
    """Return one tensor of the merged model, in float32 or float64, or an integer one as it is."""
    tensors = [model.read(name) for model in inputs.models]
    if not tensors[0].is_floating_point():
        _check_equal(name, tensors)
        return tensors[0]
    base = None if inputs.base is None else _wide(inputs.base.read(name))
    return merge_tensors(config, name, [_wide(tensor) for tensor in tensors], base)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check_equal(name: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors[1:]:
        if not torch.equal(tensors[0], tensor):
            raise ModelError(
                f"{name} is of the type {tensor.dtype} and differs between the models: integers "
                "cannot be merged"
            )
