"""Events of a run that trains, which callbacks of a program get.

A callback is a function of one event. It may ask the run for something, which the run does at the
end of the step. A callback that asks for nothing changes no number of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightrft.utils.errors import ConfigError, HintedAttributes, HintedRow

CHANGES = "changes.jsonl"
"""File of a run folder: the changed settings, one line each."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that changed after ``step``."""

    step: int
    name: str
    value: Any


def _allow(*_: object) -> None:
    """Allow every action."""


@dataclass(slots=True)
class Requests:
    """Requests of callbacks to a run since its last step.

    Attributes:
        stop: name of the event that asked to stop, or empty.
        save: write a checkpoint.
        evaluate: evaluate the run.
        changes: new values of settings, by name.
        settings: returns the current value of each setting that may change.
        missing: events that the run does not have, with the reason.
        check: raises ``ConfigError`` for an action that the run cannot do, with its arguments.
    """

    settings: Callable[[], Mapping[str, Any]] = dict
    check: Callable[..., None] = _allow
    missing: Mapping[str, str] = field(default_factory=dict)
    stop: str = ""
    save: bool = False
    evaluate: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what is done."""
        self.save = self.evaluate = False
        self.changes = {}

    def let_go(self) -> None:
        """Forget the run, whose models would stay in memory after its end, and keep its values."""
        self.settings, self.check = partial(dict, self.settings()), _allow


class _Settings(HintedRow):
    """Settings that a callback reads."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"settings are read; to change one, call event.change({name!r}, {value!r})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent(HintedAttributes):
    """An event of a run.

    Attributes:
        number: Number of completed steps, or of completed prompts of a generation.
        phase: The verb.
        requests: Requests of all callbacks. Use the methods instead.
    """

    number: int
    phase: str
    requests: Requests = field(repr=False, compare=False)

    name: ClassVar[str]
    """The keyword of its callback."""
    actions: ClassVar[tuple[str, ...]]
    """The methods that this event allows."""
    _meant: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("step", "global_step", "epoch"), "did you mean 'number'?"),
        **dict.fromkeys(("logs", "loss", "reward"), "did you mean 'metrics' of on_step?"),
        "rollouts": "on_rollouts has them",
    }

    @property
    def settings(self) -> Mapping[str, Any]:
        """The current value of each setting that may change, by name."""
        return _Settings(self.requests.settings())

    def stop(self) -> None:
        """Stop the run after this step. It writes a checkpoint, and can be resumed."""
        self._check("stop")
        self.requests.stop = self.requests.stop or self.name

    def save(self) -> None:
        """Write a checkpoint of this step."""
        self._check("save")
        self.requests.save = True

    def evaluate(self) -> None:
        """Evaluate the run after this step, unless that is due anyway."""
        self._check("evaluate")
        self.requests.evaluate = True

    def change(self, name: str, value: Any) -> None:
        """Change a setting from the next step on. The run folder records it for a resume.

        Args:
            name: A key of ``settings``, such as ``optimizer.lr``.
            value: The new value.

        Raises:
            ConfigError: The setting cannot change in this run, or not to this value.
        """
        self._check("change", name, value)
        self.requests.changes[name] = value

    def _check(self, action: str, *arguments: Any) -> None:
        if action not in self.actions:
            able = [name for name, event in EVENTS.items() if action in event.actions]
            raise ConfigError(f"{self.name} cannot {action}; call it in {' or '.join(able)}")
        self.requests.check(action, *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent(RunEvent):
    """The models are loaded, and the first step has not begun.

    Attributes:
        steps: Number of steps of the run.
    """

    name: ClassVar[str] = "on_start"
    actions: ClassVar[tuple[str, ...]] = ("stop", "change")
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsEvent(RunEvent):
    """Responses of a step are sampled and trained on, or those to a prompt are generated.

    Attributes:
        rollouts: The responses, with ``prompt``, ``text``, ``reward`` and ``terms``.
    """

    name: ClassVar[str] = "on_rollouts"
    actions: ClassVar[tuple[str, ...]] = ("stop", "save", "evaluate", "change")
    rollouts: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(RunEvent):
    """A step is done, and its checkpoint is not written yet.

    Attributes:
        metrics: Its metrics by name, without times. Those of an evaluation are among them.
    """

    name: ClassVar[str] = "on_step"
    actions: ClassVar[tuple[str, ...]] = ("stop", "save", "evaluate", "change")
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEvent(RunEvent):
    """The run is evaluated; after 0 steps if ``eval.at_start`` is set.

    Attributes:
        metrics: The metrics of the evaluation by name.
    """

    name: ClassVar[str] = "on_eval"
    actions: ClassVar[tuple[str, ...]] = ("stop", "save", "change")
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(RunEvent):
    """A checkpoint is written.

    Attributes:
        path: Its folder.
    """

    name: ClassVar[str] = "on_checkpoint"
    actions: ClassVar[tuple[str, ...]] = ("stop",)
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEvent(RunEvent):
    """The run has ended, and its summary is written.

    Attributes:
        summary: The content of ``summary.json``.
    """

    name: ClassVar[str] = "on_end"
    actions: ClassVar[tuple[str, ...]] = ()
    summary: Mapping[str, Any]


EVENTS: dict[str, type[RunEvent]] = {
    event.name: event
    for event in (StartEvent, RolloutsEvent, StepEvent, EvalEvent, CheckpointEvent, EndEvent)
}
"""Events by the keyword of their callbacks."""
OF_ROLLOUTS = ("rl", "dpo", "kto", "distill", "iterate", "generate", "grm-rl", "grm-dpo")
"""Verbs that have ``on_rollouts``."""
Callbacks = Mapping[str, Callable[[Any], object]]
"""Functions of events, by keyword."""
