"""Decoding steps of fixed shapes at fixed addresses, which can be captured once and replayed.

A step has few sizes that the host knows: rows, prompts, rows per prompt, and the columns of both
arrays. The first three are rounded up to powers of two, and the last are those of the arrays. All
else is in buffers on the device, so a new token changes no shape and no address.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightrft.models.decoding.plans import LaneMaps, Rectangle
from lightrft.utils.device_transfer import is_out_of_memory

log = logging.getLogger(__name__)

PROMPT_COLUMNS = 64
"""The columns of prompts are rounded up to a multiple of this, so that batches of prompts of
similar lengths have equal shapes."""


LONGEST_PAUSE = 64
"""Most sessions in a row that do not try to compile after one that could not."""

Step = Callable[[], Tensor]
StepCompiler = Callable[[Step], Step]
"""Returns a faster form of a step that has run before. Its arrays keep their addresses."""


def uncompiled(step: Step) -> Step:
    """Return the padded step as it is: the reference of the compilers."""
    return step


@dataclass(slots=True)
class CompileCount:
    """The compiled steps of a decoder, of all its sessions.

    Attributes:
        graphs: Number of compiled steps.
        seconds: Time that compiling them took, with the first run of each.
        steps: Number of steps that ran compiled.
        failures: Number of steps that could not be compiled.
        failure: Why the last of them could not. Empty if there are none.
    """

    graphs: int = 0
    seconds: float = 0.0
    steps: int = 0
    failures: int = 0
    failure: str = ""
    _pause: int = 0
    _paused: int = 0

    def may_compile(self) -> bool:
        """Return True if a new session may compile steps."""
        if self._paused == 0:
            return True
        self._paused -= 1
        return False

    def compiled(self, seconds: float) -> None:
        """Count a compiled step."""
        self.graphs += 1
        self.steps += 1
        self.seconds += seconds
        self._pause = 0

    def failed(self, cause: str, *, pauses: bool) -> None:
        """Count a step that could not be compiled.

        Args:
            cause: The error.
            pauses: The next sessions would fail too. Each such failure in a row doubles the number
                of sessions that do not try.
        """
        if cause != self.failure:
            log.warning("a decoding step is not compiled: %s", cause)
        self.failures += 1
        self.failure = cause
        if pauses:
            self._paused = self._pause
            self._pause = min(2 * self._pause or 1, LONGEST_PAUSE)


class StepShape(NamedTuple):
    """The sizes of a padded step.

    Attributes:
        rows: Number of rows.
        slots: Number of prompts.
        lanes: Most rows of a prompt.
        prompt_columns: Columns of the array of prompts.
        answer_columns: Columns of the array of responses.
    """

    rows: int
    slots: int
    lanes: int
    prompt_columns: int
    answer_columns: int


class StaticPlaces:
    """The places of rows in buffers of a fixed shape, see ``RowPlaces``.

    Added rows write to the first column of a row that nobody reads, and see only that.

    Args:
        shape: The sizes.
        device: Device of the buffers.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.device = device
        self.count, self.slots, self.lanes = shape.rows, shape.slots, shape.lanes
        self.prompt_columns = shape.prompt_columns
        self.longest = shape.answer_columns - 1
        self.tokens = torch.zeros(shape.rows, dtype=torch.long, device=device)
        self.prompt_end = torch.zeros_like(self.tokens)
        self.positions = torch.zeros_like(self.tokens)
        self.rotary = torch.zeros_like(self.tokens)
        self._grows = torch.zeros_like(self.tokens)
        # the next columns are on the device alone
        self.column = None
        self._maps: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._slot = np.zeros(0, dtype=np.int64)
        self._lane = np.zeros(0, dtype=np.int64)

    def fill(
        self,
        slots: np.ndarray,
        lanes: np.ndarray,
        prompt_lengths: np.ndarray,
        lengths: np.ndarray,
        shifts: np.ndarray,
    ) -> None:
        """Describe other rows.

        Args:
            slots: ``[R]``. Slot of each row's prompt.
            lanes: ``[R]``. Number of each row among the rows of its prompt.
            prompt_lengths: ``[R]``. Tokens of each row's prompt.
            lengths: ``[R]``. Tokens of each row's response.
            shifts: ``[R]``. Offset of each row from index to rotary position.
        """
        self._slot, self._lane = slots, lanes
        at = prompt_lengths + lengths
        columns = (self.prompt_end, prompt_lengths), (self.positions, at)
        for buffer, column in (*columns, (self.rotary, at + shifts), (self._grows, at >= 0)):
            padded = np.zeros(self.count, dtype=np.int64)
            padded[: len(column)] = column
            buffer.copy_(torch.from_numpy(padded))
        for kv_heads, (to_lane, from_lane, _) in self._maps.items():
            there, back = self._lanes(kv_heads)
            to_lane.copy_(torch.from_numpy(there))
            from_lane.copy_(torch.from_numpy(back))

    def advance(self) -> None:
        """Add a token to each row."""
        self.positions += self._grows
        self.rotary += self._grows

    def maps(self, kv_heads: int) -> LaneMaps:
        """Return the maps of ``RowPlaces.maps``, in buffers that ``fill`` overwrites."""
        found = self._maps.get(kv_heads)
        if found is None:
            arrays = *self._lanes(kv_heads), np.arange(self.count * kv_heads)
            there, back, index = (torch.from_numpy(x).to(self.device) for x in arrays)
            found = self._maps[kv_heads] = there, back, index
        return LaneMaps(*found)

    def _lanes(self, kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
        head, used = np.arange(kv_heads), len(self._slot) * kv_heads
        # the lane of an added row is that of row 0, whose scores the mask hides from it
        to_lane = np.zeros(self.count * kv_heads, dtype=np.int64)
        lanes = (self._slot[:, None] * kv_heads + head) * self.lanes + self._lane[:, None]
        to_lane[:used] = lanes.reshape(-1)
        from_lane = np.zeros(self.slots * kv_heads * self.lanes, dtype=np.int64)
        from_lane[to_lane[:used]] = np.arange(used)
        return to_lane, from_lane

    def hidden(self, window: int | None) -> Tensor:
        """Return ``[R, 1, prompt + response columns]``, ``True`` for keys that a row must not
        attend to."""
        end, at = self.prompt_end.unsqueeze(1), self.positions.unsqueeze(1)
        columns = torch.arange(self.prompt_columns, device=self.device)
        prompt_at = columns.expand(self.count, -1)
        answer_at = torch.arange(self.longest + 1, device=self.device) + end
        hidden = torch.cat([prompt_at >= end, answer_at > at], dim=1)
        if window is not None:
            # a token attends to the last ``window`` keys, itself included
            hidden = hidden | (torch.cat([prompt_at, answer_at], dim=1) <= at - window)
        return hidden.unsqueeze(1)


@dataclass(slots=True)
class _Padded:
    """A padded step, compiled when it runs for the second time."""

    places: StaticPlaces
    has_run: bool = False
    compiled: Step | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class StaticSteps:
    """The padded steps of a session, by shape.

    Attributes:
        compiler: Compiles steps.
        count: What was compiled.
    """

    compiler: StepCompiler
    count: CompileCount
    _steps: dict[StepShape, _Padded] = field(default_factory=dict)
    _limit: int = sys.maxsize
    _current: _Padded | None = None
    _rows: int = 0
    _moves: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not self.count.may_compile():
            self._limit = 0

    def forget(self) -> None:
        """Drop the steps, since the arrays or the weights that they read have moved."""
        self._steps.clear()
        self._current = None

    def changed(self) -> None:
        """Rows or prompts were added or removed: ``place`` must be called before a step."""
        self._current = None

    @property
    def placed(self) -> bool:
        return self._current is not None

    def place(
        self,
        arrays: tuple[Rectangle, Rectangle],
        slots: np.ndarray,
        prompt_lengths: np.ndarray,
        lengths: np.ndarray,
        shifts: np.ndarray,
        device: torch.device,
    ) -> None:
        """Choose the padded step of these rows.

        Args:
            arrays: Prompts and responses.
            slots: ``[R]``. Slot of each row's prompt.
            prompt_lengths: ``[P]``. Tokens of the prompts, by slot.
            lengths: ``[R]``. Tokens of each row's response.
            shifts: ``[P]``. Offset from index to rotary position, by slot.
            device: Device of the arrays.
        """
        prompts, answers = arrays
        if (moves := (prompts.moves, answers.moves)) != self._moves:
            self.forget()
            self._moves = moves
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots, minlength=len(prompt_lengths))
        lane = np.empty_like(slots)
        lane[order] = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = StepShape(
            rows=min(power_of_two(len(slots)), answers.rows),
            slots=min(power_of_two(len(prompt_lengths)), prompts.rows),
            lanes=power_of_two(int(counts.max())),
            prompt_columns=prompts.columns,
            answer_columns=answers.columns,
        )
        found = self._steps.get(shape)
        if found is None:
            found = self._steps[shape] = _Padded(StaticPlaces(shape, device))
        found.places.fill(slots, lane, prompt_lengths[slots], lengths, shifts[slots])
        self._current, self._rows = found, len(slots)

    def run(self, tokens: Tensor, step: Callable[[StaticPlaces], Tensor]) -> Tensor:
        """Feed ``tokens [R]`` to the rows. Return the logits ``[R, V]`` of the next.

        Args:
            tokens: The last token of each row.
            step: Computes the padded logits of places.
        """
        padded = self._current
        assert padded is not None
        places = padded.places
        places.tokens[: self._rows].copy_(tokens)
        if not padded.has_run:
            # a first step allocates what the next ones only read
            padded.has_run = True
            logits = step(places)
        else:
            logits = self._run_compiled(padded, lambda: step(places))
        places.advance()
        return logits[: self._rows]

    def _run_compiled(self, padded: _Padded, step: Step) -> Tensor:
        places = padded.places
        if padded.compiled is not None:
            self.count.steps += 1
            return padded.compiled()
        if places.count >= self._limit:
            return step()
        log.info("compiling the decoding step of %d rows", places.count)
        began = time.perf_counter()
        try:
            compiled = self.compiler(step)
            logits = compiled()
        except Exception as error:
            # A model may do on the host what cannot be captured. Memory may suffice for fewer rows.
            is_full = is_out_of_memory(error)
            self._limit = places.count if is_full else 0
            self.count.failed(_first_cause(error), pauses=not is_full)
        else:
            padded.compiled = compiled
            self.count.compiled(time.perf_counter() - began)
            return logits
        # After the error, whose frames keep the memory of the attempt.
        return step()


def _first_cause(error: BaseException) -> str:
    """Return the first line of the error that began a chain: a failed capture raises more."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def padded_shape(
    prompts: int, prompt_tokens: int, rows: int, answer_tokens: int, budget: int
) -> tuple[int, int, int, int]:
    """Round the sizes of a cache up, where ``budget`` allows it.

    Args:
        prompts: Number of prompts.
        prompt_tokens: Tokens of the longest prompt.
        rows: Number of responses.
        answer_tokens: Tokens that the longest response may reach.
        budget: Upper bound of cached tokens.
    """
    columns = -(-prompt_tokens // PROMPT_COLUMNS) * PROMPT_COLUMNS
    larger = power_of_two(prompts), columns, power_of_two(rows), answer_tokens
    if larger[0] * larger[1] + larger[2] * larger[3] <= budget:
        return larger
    return prompts, prompt_tokens, rows, answer_tokens


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least ``least``."""
    return 1 << max(0, least - 1).bit_length()
