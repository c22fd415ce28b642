"""Settings that the datasets layer reads."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import Settings


class Columns(Settings):
    """Which column of a row is what; dots reach into nested columns. Empty means: look for the usual names.

    ``images``, ``videos`` and ``audios`` hold one item or a list; null means that there is no such column.
    """

    prompt: str = ""
    response: str = ""
    label: str = ""
    reference: str = ""
    data_source: str = ""
    id: str = ""
    images: str | None = ""
    videos: str | None = ""
    audios: str | None = ""


class AllowConfig(Settings):
    """The files and hosts that rows may name; see ``docs/trust.md``. Restrict both when others can write the rows."""

    paths: ClassVar[tuple[str, ...]] = ("roots",)

    roots: tuple[str, ...] = ("*",)
    """Folders whose files rows may name, also by way of links. ``*`` allows every file."""
    hosts: tuple[str, ...] = ("*",)
    """Hosts that URLs of rows may name: names, ``*.example.org``, addresses, or networks such as ``10.0.0.0/8``.

    ``*`` allows every host with a public address. A host with a private address is read only if it, or its network, is listed.
    """


class MediaConfig(Settings):
    """How pictures, video and sound of rows are found and decoded.

    ``root``: the folder that relative paths start from (empty: the folder of the source's file, and the working directory for
    other sources). ``downloads`` keeps what URLs name; ``offline`` takes only what is there already; ``timeout`` in seconds is
    for each download. ``min_pixels`` and ``max_pixels`` bound what the model gets of a picture or frame (empty: as its processor
    has it), ``max_source_pixels`` what is decoded at all. Of a video ``fps`` frames a second are taken (null: all), at most
    ``max_frames`` evenly over its length; a list of pictures counts as taken at that rate. ``max_seconds``: longer video or sound
    is a malformed row. ``resample: false`` makes sound of another rate than the model's one too. ``workers`` threads decode side
    by side; ``cache_mb`` is what decoded media may take up in memory to be used again.
    """

    paths: ClassVar[tuple[str, ...]] = ("root",)

    root: str = ""
    downloads: str = "~/.cache/lightrft/media"
    offline: bool = False
    timeout: float = Field(30.0, gt=0)
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    max_source_pixels: int = Field(64_000_000, ge=1)
    fps: float | None = Field(2.0, gt=0)
    max_frames: int = Field(64, ge=1)
    max_seconds: float | None = Field(None, gt=0)
    resample: bool = True
    workers: int = Field(4, ge=0)
    cache_mb: int = Field(256, ge=0)
    allow: AllowConfig = AllowConfig()
    """What rows may name."""
    max_file_mb: float = Field(4096, gt=0)
    """Largest file, download or value with media in it, in MiB. A larger one is a malformed row."""
    max_decoded_mb: float = Field(2048, gt=0)
    """Memory in MiB that decoding one item may take: 3 bytes a pixel of all its frames, 12 bytes a sample of sound.

    A larger item is a malformed row, and is not decoded. Raise it for long sound, or for long clips of large frames.
    """
    max_row_mb: float = Field(4096, gt=0)
    """Memory in MiB that decoding all items of one row may take. Checked before any of them is decoded."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> MediaConfig:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels = {self.min_pixels} is more than max_pixels = {self.max_pixels}")
        return self


class SourceConfig(Settings):
    """One source of rows.

    ``path``: a .jsonl, .json, .csv or .parquet file (or a glob, or a folder of them), a saved ``datasets`` folder, a data-set
    name of the hub, or ``module:function`` that yields rows and takes ``options`` as keywords. Text files may be compressed
    (``rows.jsonl.gz``, .bz2, .xz) or UTF-16. ``split`` chooses among the files
    of a folder, the parts of a saved or hub data set, and is passed to a function that takes it. ``reader`` names a row converter
    (a registered public data set, or ``module:function``) that takes ``reader_options`` as keywords. ``weight`` is the share of
    this source when several are blended. ``limit`` takes the first rows only. ``name`` is the data source of rows that name none.
    """

    paths: ClassVar[tuple[str, ...]] = ("path",)
    functions: ClassVar[tuple[str, ...]] = ("reader",)

    shorthand: ClassVar[str | None] = "path"

    path: str
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    reader: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    reader_options: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(1.0, gt=0)
    limit: int | None = Field(None, ge=1)


class DataConfig(Settings):
    """Rows to prompts or conversations.

    ``chat`` says whether prompts go through the tokenizer's chat template (``auto``: if it has one and there is no ``template``).
    ``chat_options`` are passed to the chat template. ``template`` writes the text of a text prompt (``{prompt}`` or
    ``{any_column}``; ``{{`` is a brace): all of it without a chat template, the user's message with one. ``system`` is put first
    when a row has no system message. ``special_tokens`` says what becomes of a special token that is spelled out in a row: plain
    ``text``, or ``control`` for rows that were rendered beforehand (a template's own are always control tokens). ``blend``:
    ``concat`` takes each source once; ``sample`` draws by weight until the first source ends (``sample_all``: until every one has
    been seen). ``overlong`` says what happens to prompts over ``max_prompt_tokens``; ``truncate`` cuts the start of the last
    message. ``malformed: skip`` passes over rows that cannot be read, and counts them. ``turns`` says which assistant turns of a
    conversation supervised training learns from: ``all`` in one example, only the ``last``, or ``each`` as an example of its own
    (for chat templates that write a turn differently once another follows).
    """

    sources: tuple[SourceConfig, ...] = ()
    columns: Columns = Columns()
    media: MediaConfig = MediaConfig()
    chat: bool | Literal["auto"] = "auto"
    chat_options: dict[str, Any] = Field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    special_tokens: Literal["text", "control"] = "text"
    blend: Literal["concat", "sample", "sample_all"] = "concat"
    shuffle: bool = True
    max_prompt_tokens: int = Field(1024, ge=1)
    overlong: Literal["drop", "error", "truncate"] = "drop"
    malformed: Literal["error", "skip"] = "error"
    turns: Literal["all", "last", "each"] = "all"
    token_cache: str | None = "~/.cache/lightrft/tokens"
    """The folder that keeps the token ids of files, so that the next start and every other rank map them into memory. ``null``
    tokenizes at every start. Entries belong to the content of files, tokenizer and settings; deleting them is always safe.
    Tokens are not kept of data sets of the hub, of functions and readers of your own, for models that read media, and of tokenizers
    that are slow or not part of transformers; ``log.txt`` says so."""
    token_cache_min_mb: float = Field(1.0, ge=0)
    """Smaller data, in MiB of all files together, is tokenized at every start, which takes about a second per MiB."""

    @model_validator(mode="before")
    @classmethod
    def _bare_sources(cls, tree: Any) -> Any:
        """``sources: a.jsonl`` and ``sources: [a.jsonl]`` stand for ``sources: [{path: a.jsonl}]``."""
        if isinstance(tree, dict) and "sources" in tree:
            given = tree["sources"]
            listed = [given] if isinstance(given, str | dict | SourceConfig) else given
            if isinstance(listed, list | tuple):
                listed = [{"path": s} if isinstance(s, str) else s for s in listed]
            tree = {**tree, "sources": listed}
        return tree

    @model_validator(mode="after")
    def _weights_mean_something(self) -> DataConfig:
        if self.blend == "concat" and len({s.weight for s in self.sources}) > 1:
            raise ValueError("sources have weights, but blend is 'concat', which takes each source once; set blend: sample")
        return self
