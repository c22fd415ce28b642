"""Settings that the datasets layer reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import Settings, deep_merge, is_branch, strings_as
from lightrft.config.reward_model.judgement import JudgementConfig

SpecialTokens = Literal["text", "responses", "control"]


class Columns(Settings):
    """The columns of a row. Dots reach into nested columns. An empty name looks for the usual
    names, without a column that is named here for another part of the row."""

    prompt: str = ""
    """Column of the prompt: text, or a conversation."""
    response: str = ""
    """Column of the response to learn or to compare with."""
    label: str = ""
    """Column of the label that reward functions compare with."""
    reference: str = ""
    """Column of a full reference solution."""
    data_source: str = ""
    """Column that names the data source of a row. ``reward.per_source`` and the metrics of ``eval``
    go by it."""
    id: str = ""
    """Column of the row's name."""
    images: str | None = ""
    """Column of one image or a list; ``null``: there is none."""
    videos: str | None = ""
    """Column of one video or a list; ``null``: there is none."""
    audios: str | None = ""
    """Column of one audio clip or a list; ``null``: there is none."""
    system: str | None = ""
    """Column of the system message, which comes before the prompt. Empty: ``system``,
    ``system_prompt`` or ``system_message``; ``null``: there is none."""
    history: str | None = ""
    """Column of the earlier turns of the conversation: pairs of question and answer, or messages.
    Empty: ``history``; ``null``: there is none."""
    tools: str | None = ""
    """Column of the tools that the chat template describes: a list of JSON schemas, or such a list
    as JSON text. Empty: ``tools``, if a chat template is in use; ``null``: there is none."""


class TrainingColumns(Columns):
    """The columns of a row that is learned. An empty name looks for the usual names."""

    weight: str = ""
    """Column of the weight of the row in the loss: a number above 0. Empty: ``example_weight`` or
    ``sample_weight``."""


class PreferenceColumns(TrainingColumns):
    """The columns of a row of preferences. An empty name looks for the usual names."""

    chosen: str = ""
    """Column of the better response of a pair. Empty: ``chosen``."""
    rejected: str = ""
    """Column of the worse response of a pair. Empty: ``rejected``."""
    layout: str = ""
    """Layout to take for rows whose columns fit several; see ``docs/preference-data.md``. Empty:
    such a row is malformed."""


class RewardColumns(PreferenceColumns):
    """The columns of a row that a reward model learns. An empty name looks for the usual names."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Column of the labels of each head, by the head's name. A head that is not listed reads the
    column of its own name. A label is a number, higher is better; see ``docs/reward-data.md``."""


class AllowConfig(Settings):
    """The files and hosts that rows may name; see ``docs/trust.md``. Restrict both when others can
    write the rows."""

    paths: ClassVar[tuple[str, ...]] = ("roots",)
    """The settings of this section that are paths."""

    roots: tuple[str, ...] = ("*",)
    """Folders whose files rows may name, also by way of links. ``*`` allows every file."""
    hosts: tuple[str, ...] = ("*",)
    """Hosts that URLs of rows may name: names, ``*.example.org``, addresses, or networks such as
    ``10.0.0.0/8``. ``*`` allows every host with a public address. A host with a private address is
    read only if it, or its network, is listed."""


class MediaConfig(Settings):
    """Images, video and audio of rows: their location and decoding."""

    paths: ClassVar[tuple[str, ...]] = ("root",)
    """The settings of this section that are paths."""

    root: str = ""
    """Folder that relative paths start from. Empty: the folder of the source's file, and the
    working directory for other sources."""
    downloads: str = "~/.cache/lightrft/media"
    """Folder that keeps the files that URLs name."""
    offline: bool = False
    """Read only files that are in ``downloads`` already. Set it on machines without a network."""
    timeout: float = Field(30.0, gt=0)
    """Limit of each download in seconds. A download that takes longer makes its row malformed."""
    min_pixels: int | None = Field(None, ge=1)
    """Smallest image or frame that the model gets, in pixels; ``null`` leaves it to the model's
    processor."""
    max_pixels: int | None = Field(None, ge=1)
    """Largest image or frame that the model gets, in pixels; ``null`` leaves it to the model's
    processor. Lower it for shorter prompts. Eval sets have it too, and it is saved with the
    model."""
    max_source_pixels: int = Field(64_000_000, ge=1)
    """Largest image or frame that is decoded at all, in pixels. A larger one is a malformed
    row."""
    marks: bool = True
    """Read ``<image>``, ``<video>``, ``<audio>`` and the model's own placeholders in the text of a
    row as the places of its media. Off, they are words, and media without a message part go before
    the first message of the user."""
    fps: float | None = Field(2.0, gt=0)
    """Frames taken per second of video; ``null`` takes all of them. A list of images counts as
    taken at that rate."""
    min_frames: int | None = Field(None, ge=1)
    """Fewest frames taken of one video, if it has so many; ``null`` leaves it to the model's
    processor."""
    max_frames: int = Field(64, ge=1)
    """Most frames taken of one video. They are spread evenly over its length if there would be
    more."""
    max_seconds: float | None = Field(None, gt=0)
    """Longest video or audio, in seconds. A longer one is a malformed row; ``null`` sets no
    limit."""
    resample: bool = True
    """Convert audio to the sampling rate of the model. Off, audio of another rate is a malformed
    row."""
    workers: int = Field(4, ge=0)
    """Threads that decode in parallel; 0 decodes in the calling thread."""
    cache_mb: int = Field(256, ge=0)
    """Memory in MiB for decoded media that may be needed again."""
    allow: AllowConfig = AllowConfig()
    """Files and hosts that rows may name."""
    max_file_mb: float = Field(4096, gt=0)
    """Largest file, download or value with media in it, in MiB. A larger one is a malformed row."""
    max_decoded_mb: float = Field(2048, gt=0)
    """Memory in MiB that decoding one item may take: 3 bytes a pixel of all its frames, 12 bytes a
    sample of audio. A larger item is a malformed row, and is not decoded. Raise it for long audio,
    or for long clips of large frames."""
    max_row_mb: float = Field(4096, gt=0)
    """Memory in MiB that decoding all items of one row may take. Checked before any of them is
    decoded."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> MediaConfig:
        low, high = self.min_pixels, self.max_pixels
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pixels = {low} is more than max_pixels = {high}")
        if self.min_frames is not None and self.min_frames > self.max_frames:
            raise ValueError(
                f"min_frames = {self.min_frames} is more than max_frames = {self.max_frames}"
            )
        return self


class SourceConfig(Settings):
    """One source of rows."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that are paths."""
    functions: ClassVar[tuple[str, ...]] = ("reader",)
    """The settings of this section that name functions."""

    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, a glob or a folder of them, a saved ``datasets``
    folder, or a data-set name of the hub. ``module:function`` yields rows and takes ``options`` as
    keywords. Text files may be compressed (``rows.jsonl.gz``, .bz2, .xz) or UTF-16."""
    name: str | None = None
    """Data source of rows that name none; ``null`` takes the name of ``path``."""
    subset: str | None = None
    """Configuration of a data set of the hub."""
    split: str = "train"
    """Files of a folder, or part of a saved or hub data set, to read. A function that has the
    parameter ``split`` gets it too."""
    reader: str | None = None
    """Function that converts each row: a registered public data set (see ``docs/readers.md``), or
    ``module:function``. ``null`` takes rows as they are."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of a function source. No other source takes any."""
    reader_options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of ``reader``."""
    weight: float = Field(1.0, gt=0)
    """Relative share of this source when several are blended by ``sample`` or ``sample_all``."""
    limit: int | None = Field(None, ge=1)
    """Read only this many rows, from the first."""


OWN_SETTINGS = ("sources", "columns", "judgement", "blend", "shuffle")
"""Settings of held-out data that do not follow those of the data to learn from."""


class DataConfig(Settings):
    """Rows to prompts or conversations."""

    shorthand: ClassVar[str | None] = "sources"
    """The setting that a bare string or list stands for."""
    texts: ClassVar[tuple[str, ...]] = ("system",)
    """The settings of this section that may be empty."""
    sources: Annotated[tuple[SourceConfig, ...], strings_as("path")] = ()
    """Sources of rows. One path, or a list of paths and tables; see ``SourceConfig``."""
    columns: Columns = Columns()
    """Columns of a row."""
    judgement: JudgementConfig | None = None
    """Turn rows of responses into questions to a judge; see ``docs/judges.md``. ``null`` takes rows
    as they are."""
    media: MediaConfig = MediaConfig()
    """Images, video and audio of rows."""
    apply_chat_template: bool | Literal["auto"] = "auto"
    """Write prompts by the chat template of the tokenizer. ``auto`` does so if there is one. Off,
    ``template`` alone writes the prompt."""
    chat_template_options: dict[str, object] = Field(default_factory=dict)
    """Arguments of the chat template. One that the template does not read is refused."""
    template: str | None = None
    """Text of a prompt, with ``{prompt}`` or ``{any_column}``; ``{{`` is a brace. It is the user's
    message in the chat template, or the last one of a conversation. Without a chat template it is
    the whole text."""
    prefill: bool | Literal["auto"] = "auto"
    """Have the response continue an assistant turn at the end of the prompt. ``auto`` does so in a
    column such as ``prompt``, not in ``messages`` or ``conversations``, whose last turn is the
    answer. Off, it is the answer in every column."""
    system: str | None = None
    """System message of rows that have none. It needs a chat template."""
    special_tokens: SpecialTokens = "text"
    """Encode a special token that a row spells out as plain ``text``, or as ``control``. Set
    ``responses`` for rows that a model sampled: turns of the assistant have control tokens, and
    other text has none. Set ``control`` for rows that were rendered beforehand. The template's own
    tokens are always control tokens."""
    blend: Literal["concat", "sample", "sample_all"] = "concat"
    """Order of several sources. ``concat`` takes each once. ``sample`` chooses by weight until the
    first source ends, ``sample_all`` until every source has been seen."""
    shuffle: bool = True
    """Take rows in a new random order in each epoch. Off, rows keep the order of the sources."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt, in tokens. Supervised data is limited by ``max_tokens`` instead."""
    overlong_prompts: Literal["drop", "error", "truncate"] = "drop"
    """What happens to a row that is too long: ``drop`` it, stop with an ``error``, or ``truncate``.
    A cut prompt loses the start of its last message, a cut conversation its end. Prompts with media
    are never cut."""
    bad_rows: Literal["error", "skip"] = "error"
    """Stop with an ``error`` at a row that cannot be read, or ``skip`` and count it."""
    turns: Literal["all", "last", "each"] = "all"
    """Assistant turns of a conversation that supervised training learns: ``all`` in one example,
    only the ``last``, or ``each`` as a separate example. Set ``each`` for chat templates that write
    a turn differently once another follows."""
    token_cache: str | None = "~/.cache/lightrft/tokens"
    """Folder that keeps the token ids of files, so that the next start and every other rank map
    them into memory. ``null`` tokenizes at every start. Entries belong to the content of files,
    tokenizer and settings; deleting them is always safe. Tokens are not kept of data sets of the
    hub, of functions and readers of your own, for models that read media, and of tokenizers that
    are slow or not part of transformers; ``log.txt`` says so."""
    token_cache_min_mb: float = Field(1.0, ge=0)
    """Smaller data, in MiB of all files together, is tokenized at every start, which takes about a
    second per MiB."""

    @model_validator(mode="after")
    def _weights_mean_something(self) -> DataConfig:
        weights = {source.weight for source in self.sources}
        if self.blend == "concat" and len(weights) > 1:
            raise ValueError(
                "sources have weights, but blend is 'concat', which takes each source once; set "
                "blend: sample"
            )
        return self


ENCODING = ("media", "chat_template_options", "special_tokens", "apply_chat_template")
"""Settings of ``data`` that decide which tokens a prompt has."""


class HeldOutSettings(Settings):
    """Settings with data to learn from, and held-out data that inherit what they do not set."""

    is_judge: ClassVar[bool] = False
    """True for settings of another verb that ``lightrft grm`` trains by."""

    @model_validator(mode="before")
    @classmethod
    def _inherit_data(cls, tree: object) -> object:
        """Put the given settings of ``data`` below those of ``eval.data`` and ``validation``."""
        if not is_branch(tree) or not (given := given_settings(tree.get("data"))):
            return tree
        full = dict(tree)
        inherited = {name: value for name, value in given.items() if name not in OWN_SETTINGS}
        if validation := given_settings(tree.get("validation")):
            full["validation"] = _with_inherited(validation, inherited)
        evaluation = given_settings(tree.get("eval"))
        if held_out := given_settings(evaluation.get("data")):
            # The eval set has prompts alone, so it has no settings of responses.
            prompts = {name: v for name, v in inherited.items() if name in DataConfig.model_fields}
            full["eval"] = {**evaluation, "data": _with_inherited(held_out, prompts)}
        return full


def given_settings(branch: object) -> Mapping[str, object]:
    """Return the settings of a branch that are given. Empty for anything else than a branch."""
    if isinstance(branch, Settings):
        return branch.model_dump(exclude_unset=True)
    return branch if is_branch(branch) else {}


def _with_inherited(
    held_out: Mapping[str, object], inherited: Mapping[str, object]
) -> Mapping[str, object]:
    """Return ``held_out`` over ``inherited`` settings if it has sources."""
    return deep_merge(inherited, held_out) if held_out.get("sources") else held_out


class SFTDataConfig(DataConfig):
    """Rows to conversations to learn."""

    columns: TrainingColumns = TrainingColumns()
    """Columns of a row."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens that carry loss: those of the ``assistant``, or ``all`` tokens but the placeholders of
    media. With ``all`` and without a chat template, rows need no response."""

    @model_validator(mode="after")
    def _turns_of_assistant(self) -> SFTDataConfig:
        if self.loss_on == "all" and self.turns != "all":
            raise ValueError(
                f"loss_on = 'all' trains on every turn, but turns = {self.turns!r}; set turns: all"
            )
        return self


class PreferenceDataConfig(DataConfig):
    """Rows to prompts with compared or labelled responses."""

    columns: PreferenceColumns = PreferenceColumns()
    """Columns of a row."""


class RewardDataConfig(PreferenceDataConfig):
    """Rows to prompts with responses that have labels of a reward model's heads."""

    columns: RewardColumns = RewardColumns()
    """Columns of a row."""


class ProcessDataConfig(DataConfig):
    """Rows to prompts with one response, whose steps have labels."""

    columns: TrainingColumns = TrainingColumns()
    """Columns of a row."""
    separator: str = Field("\n", min_length=1)
    """Text after each step. The model scores the step at the last token of it. Set a special token
    of the tokenizer, such as ``<extra_0>``, to mark steps without doubt."""
    placeholder: str = Field("ки", min_length=1)
    """Text after each step in rows that have question and steps in one column ``input``. The
    separator takes its place."""
