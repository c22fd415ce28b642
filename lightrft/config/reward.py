"""Settings of the reward."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import Names, Settings, changed_fields, strings_as
from lightrft.config.reward_model.judgement import COMPARED, QuestionConfig


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


def check_one_place(what: str, path: str, url: str | None) -> None:
    """Raise ``ValueError`` unless one of ``path`` and ``url`` is given, and is of its kind.

    Args:
        what: Name of the model, with its article.
        path: Folder of the model.
        url: Address of a server.
    """
    if path.startswith(("http://", "https://")):
        raise ValueError(f"path = {path!r} is an address; set url to it, and not path")
    if bool(path) == bool(url):
        raise ValueError(
            f"path = {path!r} and url = {url!r}; set one of them: the folder of {what}, or the "
            "address of a served one"
        )
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"url = {url!r} must begin with http:// or https://")


def check_place_settings(
    settings: Settings, url: str | Sequence[str] | None, local: Set[str], remote: Set[str]
) -> None:
    """Raise ``ValueError`` for settings that act only on a model elsewhere.

    Args:
        settings: The settings.
        url: Addresses of the served model. ``None`` or empty for a model in this process.
        local: Names of settings of a model in this process.
        remote: Names of settings of a served model.
    """
    given = set(changed_fields(settings))
    if url and given & local:
        raise ValueError(
            f"{', '.join(sorted(given & local))}: settings of a model in this process, and url is "
            "set; leave them out"
        )
    if not url and given & remote:
        raise ValueError(
            f"{', '.join(sorted(given & remote))}: settings of a served model, and path is set; "
            "leave them out"
        )


class ScoringModelConfig(Settings):
    """A reward model whose score is a term of the reward, in ``path`` or behind ``url``."""

    paths: ClassVar[tuple[str, ...]] = ("path", "token_file")
    """The settings of this section that are paths."""
    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str = ""
    """Folder that ``lightrft rm`` has written, or a reward model of another framework."""
    url: str | tuple[str, ...] | None = None
    """Address of ``lightrft serve-rm``, such as ``http://judge:8000``, in place of ``path``. With
    ``protocol: openrlhf`` or ``lightrft``, the whole address of a reward server, such as
    ``http://judge:5000/get_reward``. Several servers of one model are a list, or are separated by
    commas. Requests are spread over them, and a server that does not answer is left out."""
    protocol: Literal["serve-rm", "openrlhf", "lightrft"] = "serve-rm"
    """Form of the requests to ``url``. ``serve-rm`` sends token ids, or conversations. ``openrlhf``
    posts rendered texts as OpenRLHF does (``query``, ``prompts``, ``labels``), and ``lightrft`` as
    LightRFT does (``queries``, ``prompts``, ``references``, ``images``), to any server that answers
    with ``rewards`` or ``scores``. Other numbers of such an answer are reported as metrics."""
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
    """Render each conversation again, by the model's own chat template, tokenizer and processor.
    ``null`` does so where vocabulary or template differ from the policy's, and otherwise scores the
    tokens of the policy. A served model then gets the conversation in place of tokens."""
    offload: bool = False
    """Keep the model in host memory except while it scores."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Largest number of tokens that it scores at once, or that one request holds."""

    @model_validator(mode="after")
    def _has_one_place(self) -> ScoringModelConfig:
        for url in self.urls or (None,):
            check_one_place("a reward model", self.path, url)
        local = {"aggregate", "separator", "offload"}
        remote = {"protocol", "digest", "token_file", "deadline", "max_in_flight"}
        check_place_settings(self, self.urls, local, remote)
        unread = set(changed_fields(self)) & {"digest", "head", "reencode"}
        if self.protocol != "serve-rm" and unread:
            raise ValueError(
                f"{', '.join(sorted(unread))}: the protocol {self.protocol!r} has no such field; "
                "leave them out, or set protocol: serve-rm"
            )
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the servers; empty for a model in ``path``."""
        given = self.url.split(",") if isinstance(self.url, str) else self.url or ()
        return tuple(stripped for one in given if (stripped := one.strip()))

    @property
    def label(self) -> str | None:
        """Name of the term, if it is known before the model is loaded."""
        if self.protocol != "serve-rm":
            return self.name or "remote"
        return self.name or self.head


class JudgeConfig(QuestionConfig):
    """A generative reward model whose verdicts are a term of the reward of every row."""

    paths: ClassVar[tuple[str, ...]] = ("path", "template")
    """The settings of this section that are paths."""
    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str = ""
    """Folder or name of the judge, a language model of any family that reads the row's media."""
    url: str | None = None
    """Address of a server with chat completions as in the API of OpenAI, in place of ``path``, such
    as ``http://judge:8000``: ``lightrft serve-rm``, vLLM or a hosted one."""
    served_model: str | None = None
    """Name of the model that ``url`` must serve. ``null`` takes its only model."""
    digest: str | None = None
    """Digest of the model that ``url`` must serve, as the start line of ``lightrft serve-rm`` shows
    it, or its first 12 digits or more. ``null`` takes any, and holds on to it for the run."""
    api_key_env: str | None = None
    """Name of the environment variable with the key for ``url``, so that no file holds the key.
    ``null`` sends none."""
    deadline: float = Field(600.0, gt=0)
    """Time in seconds after which a request to ``url`` and all its repetitions have failed. Its
    samples then fail, and are counted."""
    max_in_flight: int = Field(8, ge=1)
    """Largest number of requests to ``url`` at once."""
    top_logprobs: int = Field(20, ge=1)
    """Number of likely tokens that ``url`` is asked for, where probabilities are read. A verdict
    that is not among them has probability 0, which is counted."""
    weight: float = 1.0
    """Factor of the score, from 0 to 1, in the reward."""
    name: str = "judge"
    """Name of this term in metrics."""
    against: Literal["group", "reference"] = "group"
    """Other responses of a comparison: those of the ``group`` to the same prompt, or the
    ``reference`` of the row."""
    both_orders: bool = True
    """Ask each comparison in both orders and take the mean, so that no place is better."""
    read: Literal["text", "probability", "after_reasons"] = "text"
    """``text`` samples judgements and reads their verdicts. ``probability`` takes the expected
    score under the probabilities of the verdict tokens, without reasons. ``after_reasons`` samples
    judgements, and takes the expected score under the probabilities at the token of the verdict."""
    samples: int = Field(1, ge=1)
    """Number of judgements of each question."""
    vote: Literal["mean", "majority"] = "mean"
    """Score of several judgements: the ``mean``, or the score of the most frequent verdict."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest judgement, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """Divisor of the logits; 0 is greedy."""
    offload: bool = False
    """Keep the judge in host memory except while it judges."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Largest number of tokens in a forward pass that reads probabilities."""

    @model_validator(mode="after")
    def _has_one_place(self) -> JudgeConfig:
        check_one_place("a judge", self.path, self.url)
        local = {"offload", "max_tokens_per_micro_batch"}
        remote = {"served_model", "digest", "api_key_env", "deadline", "max_in_flight"}
        check_place_settings(self, self.url, local, remote | {"top_logprobs"})
        if self.read == "text" and "top_logprobs" in changed_fields(self):
            raise ValueError(
                f"top_logprobs = {self.top_logprobs} changes nothing for read: text; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _can_read(self) -> JudgeConfig:
        if self.read != "text" and self.form not in ("pair", "best", "rating"):
            raise ValueError(
                f"read = {self.read!r} needs a verdict of one token; form: {self.form} has more, "
                "so set read: text"
            )
        if self.read != "text" and self.vote != "mean":
            raise ValueError(
                f"vote = {self.vote!r} changes nothing for read: {self.read}; leave it out"
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


Terms = Annotated[tuple[RewardTerm, ...], strings_as("function")]
"""Terms of one reward."""


class RewardConfig(Settings):
    """The scoring of responses. A call that fails in any way fails its samples only. Failed samples
    are counted and never trained on."""

    shorthand: ClassVar[str | None] = "terms"
    """The setting that a bare string or number stands for."""

    terms: Terms = ()
    """Terms of the reward: one name, or a list of names and tables; see ``RewardTerm``."""
    per_source: dict[str, Terms] = Field(default_factory=dict)
    """Data source to the terms of its rows, in place of ``terms``."""
    models: Annotated[tuple[ScoringModelConfig, ...], strings_as("path")] = ()
    """Reward models whose scores are added to the reward: a folder, or a list of folders and
    tables; see ``ScoringModelConfig``. Each rank holds a copy, or asks the server of ``url``."""
    judges: Annotated[tuple[JudgeConfig, ...], strings_as("path")] = ()
    """Generative reward models whose scores are added to the reward of every row: a model, or a
    list of models and tables; see ``JudgeConfig`` and ``docs/judges.md``. Each rank holds a
    copy, or asks the server of ``url``."""
    success: Names = ()
    """Name of the term that says if a response is right, which ``eval/accuracy`` counts: the name
    of a term, a model or a judge, or ``term/value`` of a function with several named values. A list
    names one for each data source. Empty takes the only term that says right or wrong. A cost of
    ``algorithm.lagrangian`` is never that term."""
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

    @model_validator(mode="after")
    def _has_one_name_each(self) -> RewardConfig:
        if problem := self.shared_name([model.label for model in self.models]):
            raise ValueError(problem)
        return self

    def shared_name(self, models: Sequence[str | None]) -> str:
        """Return the problem if two terms of different kinds have one name, or "".

        Args:
            models: Names of the reward models. ``None`` for those that are not known yet.
        """
        lists = {"terms": self.terms}
        lists |= {f"per_source.{source}": terms for source, terms in self.per_source.items()}
        known = {t.label: f"{key}.{i}" for key, terms in lists.items() for i, t in enumerate(terms)}
        others = {f"models.{i}": name for i, name in enumerate(models)}
        # two models, or two judges, are compared once they are loaded
        for group in (others, {f"judges.{i}": judge.name for i, judge in enumerate(self.judges)}):
            for key, name in group.items():
                if name in known:
                    return (
                        f"reward.{key} and reward.{known[name]} are both called {name!r}; set "
                        f"reward.{key}.name to tell them apart"
                    )
            known |= {name: key for key, name in group.items() if name is not None}
        return ""

    def term_names(self, models: Sequence[str | None] | None = None) -> set[str] | None:
        """Return the names of all terms, or ``None`` if a model must be loaded to know its name.

        Args:
            models: Names of the reward models, once they are loaded.
        """
        lists = (self.terms, *self.per_source.values())
        names = {term.label for terms in lists for term in terms}
        names |= {judge.name for judge in self.judges}
        models = [model.label for model in self.models] if models is None else models
        return None if None in models else names | {name for name in models if name is not None}

    def terms_of(self, source: str) -> Terms:
        """Return the terms of the rows of a data source."""
        return self.per_source.get(source) or self.terms

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
