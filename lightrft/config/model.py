"""Settings that the models layer reads."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lightrft.config.base import Settings

Layout = Literal["prefix_shared", "packed", "padded"]
DType = Literal["float32", "bfloat16", "float16", "auto"]
Part = Literal["language", "tower", "projector"]


class LoRAConfig(Settings):
    """Low-rank adapters (arXiv 2106.09685)."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: their product counts ``alpha / rank`` times."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapters, in [0, 1)."""
    targets: str | tuple[str, ...] = "all-linear"
    """Modules that get adapters: ``all-linear``, a regular expression of whole names, or a list of
    last parts of names."""
    # Without a part, a run would train nothing.
    parts: tuple[Part, ...] = Field(("language",), min_length=1)
    """Parts of the model that get adapters: ``language``, ``tower``, ``projector``."""
    dora: bool = False
    """Add weight decomposition (DoRA, arXiv 2402.09353)."""


class ModelConfig(Settings):
    """The model: where it comes from and how it runs."""

    paths: ClassVar[tuple[str, ...]] = ("path", "tokenizer", "chat_template")
    """The settings of this section that are paths."""

    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str = ""
    """Hugging Face folder, or name on the hub."""
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
    """Load weights in 4 bits (NF4, by bitsandbytes). Needs the extra ``quant``."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    logits_mb: int = Field(64, ge=1)
    """Bound in MiB of the logits that exist at once. Lower it when memory runs out."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    unproved_family: Literal["refuse", "allow"] = "refuse"
    """Load a language model of a family that no test proves, or refuse it. ``refuse`` stops at
    start. ``allow`` runs the model by its own forward, in padded rows, and by its own cache. Allow
    it for custom code and for new families, and watch ``policy/rollout_logprob_diff``."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: parts (``language``, ``tower``, ``projector``) or prefixes
    of parameters' names."""
