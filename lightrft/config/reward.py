"""Settings of the reward."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import Settings, bare_names, changed_fields
from lightrft.config.judgement import COMPARED, QuestionConfig


class RewardTerm(Settings):
    """One term of a reward. The reward of a response is the weighted sum of its terms."""

    functions: ClassVar[tuple[str, ...]] = ("function",)
    """The settings of this section that name functions."""
    shorthand: ClassVar[str | None] = "function"
    """The setting that a bare string or number stands for."""

    function: str
    """Reward function: a registered name, ``package.module:function`` or ``file.py:function``."""
    weight: float = 1.0
    """Factor of this term in the sum."""
    name: str | None = None
    """Name of this term in metrics; ``null`` takes the name of the function."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def label(self) -> str:
        """Name of this term in metrics and in ``algorithm.lagrangian.costs``."""
        return self.name or self.function.rpartition(":")[2]


class ScoringModelConfig(Settings):
    """A reward model whose score is a term of the reward, in ``path`` or behind ``url``."""

    paths: ClassVar[tuple[str, ...]] = ("path", "token_file")
    """The settings of this section that are paths."""
    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str = ""
    """Folder that ``lightrft rm`` has written, or a reward model of another framework."""
    url: str | None = None
    """Address of ``lightrft serve-rm``, such as ``http://judge:8000``, in place of ``path``."""
    digest: str | None = None
    """Digest of the model that ``url`` must serve, as its start line shows it, or its first 12
    digits or more. ``null`` takes any model, and holds on to it for the run."""
    token_file: str | None = None
    """File with the bearer token for ``url``. It is read for each request, so tokens can be
    replaced. ``null`` sends none."""
    deadline: float = Field(600.0, gt=0)
    """Time in seconds after which a request to ``url`` and all its repetitions have failed. Its
    samples then fail, and are counted."""
    max_in_flight: int = Field(4, ge=1)
    """Largest number of requests to ``url`` at once."""
    weight: float = 1.0
    """Factor of the score in the reward."""
    name: str | None = None
    """Name of this term in metrics; ``null`` takes the name of the head."""
    head: str | None = None
    """Head whose score it is; ``null`` takes the first one, or the mixture of all if the model has
    one."""
    aggregate: Literal["min", "product", "mean", "last", "tokens"] | None = None
    """Score of a response from the scores of its steps, for a process reward model: the lowest, the
    product, the mean or the last one. ``tokens`` gives each step its own reward in ``rl``, at the
    last token of the step. ``null`` is for models that score whole responses."""
    separator: str = Field("\n", min_length=1)
    """Text between the steps of a response, for a process reward model."""
    sources: tuple[str, ...] = ()
    """Data sources whose rows it scores; empty: all."""
    reencode: bool | None = None
    """Render each conversation anew by the model's own chat template, tokenizer and processor.
    ``null`` does so where vocabulary or template differ from the policy's, and otherwise scores the
    tokens of the policy."""
    offload: bool = False
    """Keep the model in host memory except while it scores."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Largest number of tokens that it scores at once, or that one request holds."""

    @model_validator(mode="after")
    def _has_one_place(self) -> ScoringModelConfig:
        if self.path.startswith(("http://", "https://")):
            raise ValueError(f"path = {self.path!r} is an address; set url to it, and not path")
        if bool(self.path) == bool(self.url):
            raise ValueError(
                f"path = {self.path!r} and url = {self.url!r}; set one of them: the folder of a "
                "reward model, or the address of a served one"
            )
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} must begin with http:// or https://")
        local = set(changed_fields(self)) & {"aggregate", "separator", "reencode", "offload"}
        if self.url and local:
            raise ValueError(
                f"{', '.join(sorted(local))}: settings of a model in this process, and url is set; "
                "leave them out"
            )
        remote = set(changed_fields(self)) & {"digest", "token_file", "deadline", "max_in_flight"}
        if self.path and remote:
            raise ValueError(
                f"{', '.join(sorted(remote))}: settings of a served model, and path is set; leave "
                "them out"
            )
        return self

    @property
    def label(self) -> str | None:
        """Name of the term, if it is known before the model is loaded."""
        return self.name or self.head


class JudgeConfig(QuestionConfig):
    """A generative reward model whose verdicts are a term of the reward of every row."""

    paths: ClassVar[tuple[str, ...]] = ("path", "template")
    """The settings of this section that are paths."""
    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str
    """Folder or name of the judge, a language model of any family that reads the row's media."""
    weight: float = 1.0
    """Factor of the score, from 0 to 1, in the reward."""
    name: str = "judge"
    """Name of this term in metrics."""
    against: Literal["group", "reference"] = "group"
    """Other responses of a comparison: those of the ``group`` to the same prompt, or the
    ``reference`` of the row."""
    both_orders: bool = True
    """Ask each comparison in both orders and take the mean, so that no place is better."""
    read: Literal["text", "probability"] = "text"
    """``text`` samples judgements and reads their verdicts. ``probability`` takes the expected
    score under the probabilities of the verdict tokens, without reasons."""
    samples: int = Field(1, ge=1)
    """Number of judgements of each question."""
    vote: Literal["mean", "majority"] = "mean"
    """Score of several judgements: the ``mean``, or the score of the most frequent verdict."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest judgement, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """Divisor of the logits; 0 is greedy."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Largest number of tokens in a forward pass of ``read: probability``."""

    @model_validator(mode="after")
    def _can_read(self) -> JudgeConfig:
        if self.read == "probability" and self.form not in ("pair", "best", "rating"):
            raise ValueError(
                f"read = 'probability' needs a verdict of one token; form: {self.form} has more, "
                "so set read: text"
            )
        if self.read == "probability" and self.samples > 1:
            raise ValueError(
                f"samples = {self.samples} changes nothing for read: probability; leave it out"
            )
        if self.against != "group" and self.form not in COMPARED:
            raise ValueError(
                f"against = {self.against!r} changes nothing for form: {self.form}, which shows "
                "one response; leave it out"
            )
        return self


Terms = Annotated[tuple[RewardTerm, ...], bare_names("function")]
"""Terms of one reward."""


class RewardConfig(Settings):
    """The scoring of responses. A call that fails in any way fails its samples only. Failed samples
    are counted and never trained on."""

    terms: Terms = ()
    """Terms of the reward: one name, or a list of names and tables; see ``RewardTerm``."""
    per_source: dict[str, Terms] = Field(default_factory=dict)
    """Data source to the terms of its rows, in place of ``terms``."""
    models: Annotated[tuple[ScoringModelConfig, ...], bare_names("path")] = ()
    """Reward models whose scores are added to the reward: a folder, or a list of folders and
    tables; see ``ScoringModelConfig``. Each rank holds a copy, or asks the server of ``url``."""
    judges: Annotated[tuple[JudgeConfig, ...], bare_names("path")] = ()
    """Generative reward models whose scores are added to the reward of every row: a model, or a
    list of models and tables; see ``JudgeConfig`` and ``docs/judges.md``. Each rank holds a
    copy."""
    gates: dict[str, str] = Field(default_factory=dict)
    """Name of a term to the name of another one. The first counts only where the second reaches
    ``gate_threshold``, such as the length only of right responses."""
    gate_threshold: float = 1.0
    """Value that a term of ``gates`` must reach."""
    combine: Literal["sum", "worst"] = "sum"
    """Reward from the weighted terms: their ``sum``, or the ``worst`` of them, so that no term
    makes up for another."""
    workers: int = Field(1, ge=1)
    """Number of processes that call the functions."""
    timeout: float = Field(10.0, gt=0)
    """Limit of each call in seconds."""
    memory_mb: int = Field(2048, ge=64)
    """Memory limit of a worker in MiB, on top of what it needs to start."""

    @property
    def calls_functions(self) -> bool:
        """A reward function scores some responses."""
        return bool(self.terms or self.per_source)

    @property
    def combines(self) -> bool:
        """The reward is not the plain weighted sum."""
        return bool(self.gates) or self.combine != "sum"

    @property
    def scores(self) -> bool:
        """Something scores responses."""
        return self.calls_functions or bool(self.models or self.judges)
