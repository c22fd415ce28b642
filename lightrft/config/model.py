"""Settings that the models layer reads."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lightrft.config.base import Settings

Layout = Literal["prefix_shared", "packed", "padded"]
DType = Literal["float32", "bfloat16", "float16", "auto"]
Part = Literal["language", "tower", "projector"]


class LoRAConfig(Settings):
    """Low-rank adapters (arXiv 2106.09685); ``dora`` adds weight decomposition (arXiv 2402.09353). ``targets`` name modules, of the
    named ``parts`` of the model only."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | tuple[str, ...] = "all-linear"
    parts: tuple[Part, ...] = Field(("language",), min_length=1)
    dora: bool = False


class ModelConfig(Settings):
    """Where a model comes from and how it runs.

    ``path`` is a Hugging Face folder or name; ``tokenizer`` is another one, where the model's own is not to be used.
    ``chat_template`` is a Jinja template or a file that holds one. ``attention`` names a transformers implementation for the
    ``padded`` layout. ``freeze`` names what is not trained: parts (``language``, ``tower``, ``projector``) or prefixes of
    parameters' names. ``logits_mb`` bounds the logits that exist at one time, in MiB.
    ``check_layout`` compares the layout with ``padded`` on a run's first batch and falls back, with a warning, where they differ.
    """

    paths: ClassVar[tuple[str, ...]] = ("path", "tokenizer", "chat_template")

    shorthand: ClassVar[str | None] = "path"

    path: str = ""
    tokenizer: str | None = None
    chat_template: str | None = None
    revision: str | None = None
    dtype: DType = "auto"
    attention: str | None = None
    layout: Layout = "prefix_shared"
    check_layout: bool = True
    lora: LoRAConfig | None = None
    load_in_4bit: bool = False
    gradient_checkpointing: bool = False
    logits_mb: int = Field(64, ge=1)
    trust_remote_code: bool = False
    unproved_family: Literal["refuse", "allow"] = "refuse"
    """Load a language model of a family that no test proves, or refuse it.

    ``refuse`` stops at start. ``allow`` runs the model by its own forward, in padded rows, and by its own cache. Allow it for
    custom code and for new families, and watch ``policy/sampler_gap``.
    """
    freeze: tuple[str, ...] = ()
