"""Settings that the datasets layer reads."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lightrft.utils.settings import Settings


class Columns(Settings):
    """Which column of a row is what; dots reach into nested columns. Empty means: look for the usual names."""

    prompt: str = ""
    response: str = ""
    label: str = ""
    reference: str = ""
    data_source: str = ""
    id: str = ""


class SourceConfig(Settings):
    """One source of rows.

    ``path``: a .jsonl, .json, .csv or .parquet file (or a glob, or a folder of them), a saved ``datasets`` folder, a data-set
    name of the hub, or ``module:function`` that yields rows. ``reader`` names a row converter (a registered public data set, or
    ``module:function``). ``weight`` is the share of this source when several are blended.
    """

    shorthand: ClassVar[str | None] = "path"

    path: str
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    reader: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(1.0, gt=0)
    limit: int | None = Field(None, ge=1)


class DataConfig(Settings):
    """Rows to prompts or conversations.

    ``template`` wraps a text prompt when no chat template is used (``{prompt}`` or ``{any_column}``); ``chat`` says whether
    prompts go through the tokenizer's chat template (``auto``: where it has one). ``system`` is put first when a row has no
    system message. ``blend``: ``concat`` takes each source once; ``sample`` draws by weight until the first source ends
    (``sample_all``: until every one has been seen). ``overlong`` says what happens to prompts over ``max_prompt_tokens``.
    """

    sources: tuple[SourceConfig, ...] = ()
    columns: Columns = Columns()
    chat: bool | Literal["auto"] = "auto"
    template: str | None = None
    system: str | None = None
    blend: Literal["concat", "sample", "sample_all"] = "concat"
    shuffle: bool = True
    max_prompt_tokens: int = Field(1024, ge=1)
    overlong: Literal["drop", "error", "truncate"] = "drop"
    malformed: Literal["error", "skip"] = "error"
