"""Continuous batching over the policy itself, without a copy of the weights.

Each distinct prompt is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.engines import sampling as draws
from lightrft.engines.base import Fingerprint, never_stop
from lightrft.engines.decoder_protocol import DecoderProtocol
from lightrft.engines.fingerprint import INTEGERS, checksums
from lightrft.engines.growing_experts import GrowingExperts
from lightrft.engines.requests import (
    check_requests,
    response_end,
    response_limit,
    response_room,
    rollout_of,
)
from lightrft.engines.stop_strings import StopStrings
from lightrft.types import FinishReason, Prompt, Request, Rollout
from lightrft.utils.cpu_threads import threads_for
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NativeEngine:
    """The reference engine. A response depends on its request alone, up to floating-point rounding.

    Any number of ``generate`` iterators may be open, each with a separate cache. An iterator that
    is dropped early frees its cache.

    Args:
        decoder: The policy to sample from.
        tokenizer: Decodes responses and finds stop strings.
        config: Row and token limits of the cache.
        version: Version of the weights that ``decoder`` holds.
        shared: ``decoder`` holds the policy's weights, so ``load_weights`` copies nothing. If
            ``False``, it holds the weights of the last ``load_weights``.
        whole: Context manager that gathers the policy's shards. ``wake`` enters it and ``sleep``
            leaves it. ``None`` for weights that are never sharded: the engine then starts awake.
        together: Number of ranks that shard the model, see ``Engine``.
    """

    shared_by_all_ranks = False

    def __init__(
        self,
        decoder: DecoderProtocol,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        version: int = 0,
        *,
        shared: bool = True,
        whole: Callable[[], AbstractContextManager[None]] | None = None,
        together: int = 1,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.config = config
        self.version = version
        self.shares_weights = shared
        self.tensor_parallel_size = together
        self.awake = whole is None
        self._whole, self._held = whole, ExitStack()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self.size = sum(tensor.numel() for _, tensor in decoder.parameters())

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield responses, see ``Engine.generate``.

        Raise ``ResourceError`` at once for a request that exceeds ``max_cache_tokens``.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: Called between tokens. ``True`` aborts unfinished responses.
        """
        wanted = list(requests)
        # checked here: the body of a generator would not run before the first response is asked for
        check_requests(wanted, sampling, self.config)
        return self._answers(wanted, sampling, stopped)

    def _answers(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool],
    ) -> Iterator[Rollout]:
        drawing = GenerationBatch(self, requests, sampling)
        while drawing.unfinished:
            if stopped():
                yield from drawing.abort()
                return
            yield from drawing.advance(stopped)

    def stop_strings(self, stop: tuple[str, ...]) -> StopStrings:
        if stop not in self._stops:
            self._stops[stop] = StopStrings(self.tokenizer, stop)
        return self._stops[stop]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Set the policy version, see ``Engine.load_weights``.

        Shared weights are current already: then ``weights`` is not read.
        """
        if not self.shares_weights:
            self.decoder.load(weights)
        self.version = version
        # of the weights that the decoder holds, not of the ones sent: the caller compares the two
        return checksums(self.decoder.parameters())

    def sleep(self, level: int) -> None:
        """Release gathered weights.

        No memory is kept between calls, at either level. Open iterators raise ``RuntimeError`` at
        their next step.
        """
        self.awake = False
        self._held.close()

    def wake(self) -> None:
        if self._whole is not None and not self.awake:
            self._held.enter_context(self._whole())
        self.awake = True

    def close(self) -> None:
        self.sleep(2)


@dataclass(slots=True, eq=False)
class _Group:
    """The requests of one prompt. ``logits [V]`` of its first response token are kept while some
    requests wait.

    The last ``begun`` tokens of ``prompt`` are a response that is resumed.
    """

    prompt: Prompt
    # 0 for a prompt without a response
    begun: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    rows: int = 0
    # the session's handle, -1 until the prompt is computed
    handle: int = -1
    logits: Tensor | None = None


class _CacheShape(NamedTuple):
    """Shape of the cache. Prompts are padded to the longest prompt, responses to the longest
    response."""

    prompts: int
    prompt_tokens: int
    rows: int
    answer_tokens: int


@dataclass(slots=True)
class _Rows:
    """The host's state of growing responses, by row."""

    requests: list[Request] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    greedy: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    limits: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # number of response tokens so far; it also counts the tokens of a resumed response
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    # of each row, the experts of its tokens; empty if they are not recorded
    experts: list[GrowingExperts] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)

    def append(self, requests: list[Request], groups: list[_Group], limits: list[int]) -> None:
        first = len(self)
        self.requests += requests
        self.groups += groups
        self.keys = np.concatenate([self.keys, draws.seed_keys([r.seed for r in requests])])
        self.greedy = np.concatenate(
            [self.greedy, np.array([r.greedy for r in requests], dtype=bool)]
        )
        self.limits = np.concatenate([self.limits, np.array(limits, dtype=np.int64)])
        held = np.array([r.num_generated for r in requests], dtype=np.int64)
        self.steps = np.concatenate([self.steps, held])
        self._resize(len(self), max(self.tokens.shape[1], int(held.max(initial=0))))
        for row, request in enumerate(requests, start=first):
            if request.partial is not None:
                count = request.num_generated
                self.tokens[row, :count] = request.partial.token_ids
                self.logprobs[row, :count] = request.partial.logprobs
                self.versions[row, :count] = request.partial.versions

    def record(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append one token to every row."""
        if int(self.steps.max()) >= self.tokens.shape[1]:
            # doubling keeps the total cost of copies linear in the length of the responses
            self._resize(len(self), max(64, 2 * self.tokens.shape[1]))
        at = np.arange(len(self)), self.steps
        self.tokens[at], self.logprobs[at], self.versions[at] = tokens, logprobs, version
        self.steps += 1

    def evict(self, moves: list[tuple[int, int]], rows: int) -> None:
        for dst, src in moves:
            self.requests[dst], self.groups[dst] = self.requests[src], self.groups[src]
            self.experts[dst : dst + 1] = self.experts[src : src + 1]
        del self.requests[rows:], self.groups[rows:], self.experts[rows:]
        to = [dst for dst, _ in moves]
        of = [src for _, src in moves]
        for name in ("keys", "greedy", "limits", "steps", "tokens", "logprobs", "versions"):
            column = getattr(self, name)
            column[to] = column[of]
            setattr(self, name, column[:rows])

    def _resize(self, rows: int, columns: int) -> None:
        for name in ("tokens", "logprobs", "versions"):
            old = getattr(self, name)
            new = np.zeros((rows, columns), dtype=old.dtype)
            new[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, new)


def _to_host(tokens: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Copy ``tokens [R]`` and ``logprobs [R]`` to the host in one transfer, since each transfer
    waits for the device."""
    bits = logprobs.view(INTEGERS[logprobs.element_size()])
    both = torch.stack([tokens, bits.long()]).cpu()
    return both[0].numpy(), both[1].to(bits.dtype).view(logprobs.dtype).numpy()


class GenerationBatch:
    """Responses in progress, advanced by the caller. More requests may join at any time.

    It holds the waiting requests, the growing rows and their cache.
    """

    def __init__(
        self,
        engine: NativeEngine,
        requests: Sequence[Request],
        sampling: SamplingConfig,
    ) -> None:
        self._engine, self._sampling, self._config = engine, sampling, engine.config
        # settings of greedy rows: temperature 0 turns every filter off
        self._likeliest = sampling.model_copy(update={"temperature": 0.0})
        self._device = engine.decoder.device
        self._session = engine.decoder.session()
        # the tokenizer may name another end token than the model's configs
        eos = () if engine.tokenizer.eos_token_id is None else (engine.tokenizer.eos_token_id,)
        ends = [*engine.decoder.eos_token_ids, *eos, *sampling.stop_token_ids]
        self._ends = np.unique(np.array(ends, dtype=np.int64))
        self._stops = engine.stop_strings(sampling.stop) if sampling.stop else None
        self._waiting: deque[_Group] = deque()
        self._open: list[_Group] = []  # groups whose prompt is in the cache
        self._rows = _Rows()
        self._watched = 0  # the row whose ``Request.watch`` is being called
        self._last = torch.zeros(0, dtype=torch.long, device=self._device)
        self._seen: Tensor | None = None  # [R, V], kept only for the repetition penalty
        self.add(requests)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue ``requests``.

        They share the computation of a prompt with one another, but not with earlier requests.
        """
        groups: dict[object, _Group] = {}
        for request in requests:
            prompt = request.prompt
            if request.partial is not None and request.num_generated:
                # the partial response is prefilled with its prompt, and generation resumes after it
                resumed = prompt.token_ids + request.partial.token_ids
                prompt = replace(prompt, token_ids=resumed)
            # Equal tokens share a prefill. Placeholder tokens do not identify media, so those go by
            # object.
            key = (id(request.prompt) if prompt.media else None, *prompt.token_ids)
            groups.setdefault(key, _Group(prompt, request.num_generated)).waiting.append(request)
        self._waiting.extend(groups.values())

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting) or len(self._rows) > 0

    def advance(self, stopped: Callable[[], bool] = never_stop) -> list[Rollout]:
        """Return the next finished responses.

        Return none once ``stopped`` returns ``True``. It is called between tokens. The policy is
        back in its training state whenever the caller has control.
        """
        engine = self._engine
        if not engine.awake:
            problem = "the engine was put to sleep or closed while responses were being generated"
            raise RuntimeError(f"{problem}; call wake() first")
        # rows that grow, now or once the first requests are admitted
        waiting = sum(len(group.waiting) for group in self._waiting)
        width = len(self._rows) or min(self._config.max_num_seqs, waiting)
        # a token costs about two operations per weight in each row
        threads = threads_for(2.0 * engine.size * width, engine.decoder.device)
        done: list[Rollout] = []
        with threads, engine.decoder.running():
            while self.unfinished and not done and not stopped():
                done = self._advance()
        return done

    def _advance(self) -> list[Rollout]:
        """Generate one token for every row and every newly admitted request. Return the responses
        that this finished."""
        # Step before admission: the prefill of admitted rows already yields their first logits.
        parts = [self._session.step(self._last)] if len(self._rows) else []
        if self._session.experts is not None and parts:
            for row, experts in enumerate(self._rows.experts):
                experts.append(self._session.experts.rows[row])
        admitted = self._admit()
        if admitted:
            parts.append(torch.stack(admitted))
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._last, logprobs = self._draw(logits)
        host_tokens, host_logprobs = _to_host(self._last, logprobs)
        # checked on the host, which has the numbers anyway; a check on the device would wait for it
        if np.isnan(host_logprobs).any():
            bad = self._rows.requests[int(np.flatnonzero(np.isnan(host_logprobs))[0])]
            raise ModelError(
                f"the policy gave logits that are not numbers after prompt {bad.prompt.id!r}; "
                "its weights have diverged"
            )
        self._rows.record(host_tokens, host_logprobs, self._engine.version)
        return self._finish(host_tokens)

    def abort(self) -> list[Rollout]:
        """Return the unfinished responses as they are."""
        aborted = [self._rollout(row, "abort", None) for row in range(len(self._rows))]
        for group in self._waiting:
            for request in group.waiting:
                prompt = request.prompt
                empty = Rollout(prompt, [], [], [], [], "abort", request.seed, request.sample)
                aborted.append(request.partial or empty)
        return aborted

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._rows
        sampling = self._sampling
        suppress = self._suppressed(logits)
        if sampling.temperature == 0 or rows.greedy.all():
            processed = draws.process(logits, self._likeliest, self._seen, suppress)
            tokens, logprobs = draws.greedy(processed)
        else:
            u = to_device(torch.from_numpy(draws.uniforms(rows.keys, rows.steps)), self._device)
            tokens, logprobs = draws.sample_tokens(
                draws.process(logits, sampling, self._seen, suppress), u
            )
            # one call may mix both kinds: greedy rows replace the tokens sampled for them
            if rows.greedy.any():
                at = to_device(torch.from_numpy(np.flatnonzero(rows.greedy)), self._device)
                part = [None if mask is None else mask[at] for mask in (self._seen, suppress)]
                processed = draws.process(logits[at], self._likeliest, *part)
                tokens[at], logprobs[at] = draws.greedy(processed)
        if self._seen is not None:
            self._seen[torch.arange(len(rows), device=self._device), tokens] = True
        return tokens, logprobs

    def _suppressed(self, logits: Tensor) -> Tensor | None:
        """Return ``[R, V]`` bool, the ends that rows below ``min_new_tokens`` must not sample."""
        least = self._sampling.min_new_tokens
        if not least or not len(self._ends):
            return None
        early = self._rows.steps < least
        if not early.any():
            return None
        # built on the host, where the steps are, and copied in one transfer
        mask = np.zeros(tuple(logits.shape), dtype=bool)
        mask[np.ix_(early, self._ends)] = True
        return to_device(torch.from_numpy(mask), self._device)

    def _admit(self) -> list[Tensor]:
        """Admit the waiting requests that fit, in order. Return the logits ``[V]`` of each new
        row's first token."""
        entering: list[tuple[_Group, Request]] = []
        fresh: list[_Group] = []
        shape = _CacheShape(
            prompts=len(self._open),
            prompt_tokens=max((len(group.prompt.token_ids) for group in self._open), default=0),
            rows=len(self._rows),
            answer_tokens=max(
                (response_room(r, self._sampling) for r in self._rows.requests), default=0
            ),
        )
        while self._waiting and shape.rows < self._config.max_num_seqs:
            group = self._waiting[0]
            request = group.waiting[0]
            new = group.handle < 0 and (not fresh or fresh[-1] is not group)
            room = max(shape.answer_tokens, response_room(request, self._sampling))
            larger = shape._replace(rows=shape.rows + 1, answer_tokens=room)
            if new:
                longest = max(shape.prompt_tokens, len(group.prompt.token_ids))
                larger = larger._replace(prompts=shape.prompts + 1, prompt_tokens=longest)
            # in order: if requests that fit overtook it, a long request might wait forever
            if self._session.tokens(*larger) > self._config.max_cache_tokens:
                break
            shape = larger
            if new:
                fresh.append(group)
            entering.append((group, group.waiting.popleft()))
            if not group.waiting:
                self._waiting.popleft()
        if not entering:
            return []
        self._session.reserve(*shape, self._config.max_cache_tokens)
        self._prefill(fresh)
        sealed = {group.handle for group, _ in entering if not group.waiting}
        self._session.admit([group.handle for group, _ in entering], sorted(sealed))
        return self._enter(entering)

    def _prefill(self, fresh: list[_Group]) -> None:
        if not fresh:
            return
        handles, logits = self._session.prefill([g.prompt for g in fresh], [g.begun for g in fresh])
        for group, handle, row in zip(fresh, handles, logits):
            group.handle, group.logits = handle, row
        self._open += fresh

    def _enter(self, entering: list[tuple[_Group, Request]]) -> list[Tensor]:
        groups = [group for group, _ in entering]
        requests = [request for _, request in entering]
        logits = [group.logits for group in groups if group.logits is not None]
        self._rows.append(requests, groups, [response_end(r, self._sampling) for r in requests])
        if self._session.experts is not None:
            for group, request in entering:
                prompt = self._session.experts.prompts[group.handle]
                self._rows.experts.append(GrowingExperts.of(request, prompt))
        if self._sampling.repetition_penalty != 1:
            shape = (len(groups), logits[0].shape[0])
            seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            for row, group in zip(seen, groups):
                prompt_ids = torch.tensor(group.prompt.token_ids, dtype=torch.long)
                row[to_device(prompt_ids, self._device)] = True
            self._seen = seen if self._seen is None else torch.cat([self._seen, seen])
        for group in groups:
            group.rows += 1
            # the logits are kept while a request of the group still waits
            if not group.waiting:
                group.logits = None
        return logits

    def _finish(self, tokens: np.ndarray) -> list[Rollout]:
        rows = self._rows
        # end tokens are suppressed before the minimum, but stop strings can occur in any text
        late = rows.steps >= self._sampling.min_new_tokens
        stopped = np.isin(tokens, self._ends) & late
        cuts = self._cuts(tokens, ~stopped & late)
        stopped[list(cuts)] = True
        ended = stopped | (rows.steps >= rows.limits)
        finished = np.flatnonzero(ended | self._abandoned(ended))
        if not len(finished):
            return []
        done = []
        for row in finished.tolist():
            reason: FinishReason = "stop"
            if not stopped[row]:
                limit = response_limit(rows.requests[row], self._sampling)
                # a row before its limit was paused, and can be resumed, or nobody watches it
                reason = "length" if rows.steps[row] >= limit else "abort"
            done.append(self._rollout(row, reason, cuts.get(row)))
        self._evict(finished)
        return done

    def _abandoned(self, ended: np.ndarray) -> np.ndarray:
        """Return ``[R]`` bool, the growing rows that nobody waits for. See ``Request.watch``."""
        rows = self._rows
        found = np.zeros(len(rows), dtype=bool)
        for row, request in enumerate(rows.requests):
            if request.watch is not None and not ended[row]:
                self._watched = row
                found[row] = not request.watch(rows.tokens[row, : rows.steps[row]].tolist())
        return found

    def watched_logprobs(self) -> list[float]:
        """Return the log-probs of the response whose ``Request.watch`` is being called."""
        rows, row = self._rows, self._watched
        return rows.logprobs[row, : rows.steps[row]].tolist()

    def _cuts(self, tokens: np.ndarray, searched: np.ndarray) -> dict[int, str]:
        """Return the text before a stop string of each ``searched`` row that ends in one."""
        cuts: dict[int, str] = {}
        if self._stops is None:
            return cuts
        for row in np.flatnonzero(searched).tolist():
            # decoding a response is slow, and most tokens cannot end a stop string
            if not self._stops.may_end(int(tokens[row])):
                continue
            cut = self._stops.cut(self._rows.tokens[row, : self._rows.steps[row]])
            if cut is not None:
                cuts[row] = cut
        return cuts

    def _rollout(self, row: int, reason: FinishReason, text: str | None) -> Rollout:
        rows, request = self._rows, self._rows.requests[row]
        length = int(rows.steps[row])
        token_ids = rows.tokens[row, :length].tolist()
        if text is None:
            text = str(self._engine.tokenizer.decode(token_ids, skip_special_tokens=True))
        logprobs, versions = rows.logprobs[row, :length], rows.versions[row, :length]
        found = rollout_of(request, token_ids, logprobs.tolist(), versions.tolist(), reason, text)
        if rows.experts:
            found.experts = rows.experts[row].choices(length)
        return found

    def _evict(self, finished: np.ndarray) -> None:
        """Free the finished rows. The last rows move into their places, so that rows stay
        contiguous."""
        groups = {id(g): g for g in (self._rows.groups[row] for row in finished.tolist())}
        for row in finished.tolist():
            self._rows.groups[row].rows -= 1
        kept = len(self._rows) - len(finished)
        staying = np.setdiff1d(np.arange(kept, len(self._rows)), finished)
        moves = list(zip(finished[finished < kept].tolist(), staying.tolist()))
        # cache and host state must move alike: both know a response by its row number
        self._session.evict(moves, kept)
        self._rows.evict(moves, kept)
        left = np.arange(kept)
        left[[dst for dst, _ in moves]] = [src for _, src in moves]
        # the tensors on the device are reordered in the same way
        index = to_device(torch.from_numpy(left), self._device)
        self._last = self._last[index]
        self._seen = None if self._seen is None else self._seen[index]
        for group in groups.values():
            if not group.rows and not group.waiting:
                self._session.release(group.handle)
                self._open.remove(group)
