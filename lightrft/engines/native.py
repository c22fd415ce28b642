"""Continuous batching over the policy itself, without a copy of the weights.

Each distinct prompt is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.engines.constrained.grammars import GrammarCompiler, request_constraint
from lightrft.engines.constrained.rows import ConstrainedRows, ConstrainedTokens
from lightrft.engines.decoder_protocol import (
    CompiledSteps,
    CompilingDecoder,
    DecoderProtocol,
    PrefixDecoder,
    PrefixSession,
    RollbackSession,
)
from lightrft.engines.fingerprint import checksums
from lightrft.engines.native_parts.compiled_steps import compile_where_it_pays
from lightrft.engines.native_parts.growing_rows import (
    CacheShape,
    GrowingExperts,
    GrowingRows,
    PromptRequests,
    to_host,
)
from lightrft.engines.native_parts.token_sampler import Places, TokenSampler
from lightrft.engines.requests import (
    check_requests,
    response_end,
    response_limit,
    response_room,
    rollout_of,
)
from lightrft.engines.speculative.drafter import (
    Acceptance,
    accepted_tokens,
    check_speculative,
    drafting,
    drafts_of,
    places_after,
    seen_after,
)
from lightrft.engines.stop_strings import StopStrings, end_ids, model_ends
from lightrft.types import FinishReason, Request, Rollout
from lightrft.utils.cpu import threads_for
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NativeEngine(Engine):
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
        draft: Draft model of ``config.speculative``. ``None`` without one.
        whole: Context manager that gathers the policy's shards. ``wake`` enters it and ``sleep``
            leaves it. ``None`` for weights that are never sharded: the engine then starts awake.
        tensor_parallel_size: Number of ranks that shard the model, see ``Engine``.
    """

    def __init__(
        self,
        decoder: DecoderProtocol,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        version: int = 0,
        *,
        shared: bool = True,
        draft: DecoderProtocol | None = None,
        whole: Callable[[], AbstractContextManager[None]] | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.config = config
        self.version = version
        self.shares_weights = shared
        self.tensor_parallel_size = tensor_parallel_size
        self.awake = whole is None
        self._whole, self._held = whole, ExitStack()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._grammars: GrammarCompiler | None = None
        self.draft = draft
        if config.speculative is not None:
            check_speculative(decoder, draft)
        sharded = whole is not None or tensor_parallel_size > 1
        self._compiles = compile_where_it_pays(decoder, config, sharded=sharded)
        self.size = sum(tensor.numel() for _, tensor in decoder.parameters())

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield responses, see ``Engine.generate``.

        Raise ``ResourceError`` at once for a request that exceeds ``max_cache_tokens``, and
        ``ConfigError`` for a constraint that cannot be followed.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: Called between tokens. ``True`` aborts unfinished responses.
        """
        wanted = list(requests)
        # checked here: the body of a generator would not run before the first response is asked for
        check_requests(wanted, sampling, self.config)
        for constraint in filter(None, (request_constraint(r, sampling) for r in wanted)):
            self.grammars().matcher(constraint)
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

    def keep_prefixes(self) -> bool:
        """Keep keys and values of finished sequences until ``load_weights`` or ``sleep``.

        A prompt that begins with the tokens of one computes only the rest. They take what open
        requests leave of ``max_cache_tokens``. For weights that change by ``load_weights`` alone.

        Returns:
            ``False`` if the model's keys and values cannot be reused.
        """
        return isinstance(self.decoder, PrefixDecoder) and self.decoder.keep_prefixes()

    @property
    def compiled(self) -> CompiledSteps | None:
        """Counts of compiled steps. ``None`` where none are compiled."""
        if not self._compiles:
            return None
        assert isinstance(self.decoder, CompilingDecoder)
        return self.decoder.compiled

    def stop_strings(self, stop: tuple[str, ...]) -> StopStrings:
        if stop not in self._stops:
            self._stops[stop] = StopStrings(self.tokenizer, stop)
        return self._stops[stop]

    def ends(self, sampling: SamplingConfig) -> np.ndarray:
        """Return ``[E]``, the sorted token ids that end a response."""
        ends = model_ends(self.tokenizer, self.decoder.eos_token_ids)
        return np.array(end_ids(self.tokenizer, ends, sampling), dtype=np.int64)

    def grammars(self) -> GrammarCompiler:
        """Return the compiler of constraints. Raises ``ConfigError`` if the model has none."""
        if self._grammars is None:
            eos = self.tokenizer.eos_token_id
            end = next(iter(self.decoder.eos_token_ids), None) if eos is None else eos
            self._grammars = GrammarCompiler(self.tokenizer, end)
        return self._grammars

    def constrained_tokens(
        self, rollouts: Sequence[Rollout], sampling: SamplingConfig
    ) -> ConstrainedTokens:
        """Return the tokens that the constraints of ``sampling`` allowed in ``rollouts``."""
        return ConstrainedTokens(self.grammars(), rollouts, sampling, self.ends(sampling))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Set the policy version, see ``Engine.load_weights``.

        Shared weights are current already: then ``weights`` is not read.
        """
        if self.shares_weights:
            self.decoder.forget()
        else:
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
        self.decoder.forget()
        self._held.close()

    def wake(self) -> None:
        if self._whole is not None and not self.awake:
            self._held.enter_context(self._whole())
        self.awake = True

    def close(self) -> None:
        self.sleep(2)


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
        self._device = engine.decoder.device
        self._session = engine.decoder.session()
        self._ends = engine.ends(sampling)
        self._constrained = ConstrainedRows(engine.grammars, sampling, self._ends)
        banned = engine.decoder.media_token_ids
        self._sampler = TokenSampler(sampling, self._ends, self._device, banned)
        self._stops = engine.stop_strings(sampling.stop) if sampling.stop else None
        self._waiting: deque[PromptRequests] = deque()
        self._open: list[PromptRequests] = []  # groups whose prompt is in the cache
        self._rows = GrowingRows()
        self._drafts = drafts_of(self._config, engine.draft, sampling, len(engine.tokenizer))
        self._threads = torch.get_num_threads()
        self._watched = 0  # the row whose ``Request.watch`` is being called
        self._last = torch.zeros(0, dtype=torch.long, device=self._device)
        self._seen: Tensor | None = None  # [R, V], kept only for the repetition penalty
        self.add(requests)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue ``requests``.

        They share the computation of a prompt with one another, but not with earlier requests.
        """
        groups: dict[object, PromptRequests] = {}
        for request in requests:
            prompt = request.prompt
            if request.partial is not None and request.num_generated:
                # the partial response is prefilled with its prompt, and generation resumes after it
                resumed = prompt.token_ids + request.partial.token_ids
                prompt = replace(prompt, token_ids=resumed)
            # Equal tokens share a prefill. Placeholder tokens do not identify media, so those go by
            # object.
            key = (id(request.prompt) if prompt.media else None, *prompt.token_ids)
            begun = request.num_generated
            plain = begun + request.prompt_response_tokens
            group = groups.setdefault(key, PromptRequests(prompt, begun, plain))
            group.waiting.append(request)
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
        self._threads = torch.get_num_threads()
        # a token costs about two operations per weight in each row
        threads = threads_for(2.0 * engine.size * width, engine.decoder.device)
        done: list[Rollout] = []
        with threads, engine.decoder.running(), drafting(engine.draft):
            while self.unfinished and not done and not stopped():
                done = self._advance()
        return done

    def _advance(self) -> list[Rollout]:
        """Generate a token for every row and every newly admitted request, or several where drafts
        are right. Return the responses that this finished."""
        drafts = self._propose()
        fed = len(self._rows)
        # Step before admission: the prefill of admitted rows already yields their first logits.
        parts = [self._step(drafts)] if fed else []
        admitted = self._admit()
        if admitted:
            parts.append(torch.stack(admitted))
            drafts = [*drafts, *([] for _ in admitted)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        sampled, logprobs = self._draw(logits, drafts)
        host_tokens, host_logprobs = to_host(sampled, logprobs)
        found = accepted_tokens(drafts, host_tokens)
        self._accept(sampled, found, fed)
        return self._take(host_tokens, host_logprobs, found)

    def _propose(self) -> list[list[int]]:
        """Return the drafted tokens of each row; none without speculative decoding."""
        rows = self._rows
        if self._drafts is None or not len(rows):
            return [[] for _ in range(len(rows))]
        places = Places(rows.keys, rows.steps, rows.greedy)
        drafts = self._drafts.propose(rows.limits - rows.steps, places)
        return [draft[: self._constrained.accepted(k, draft)] for k, draft in enumerate(drafts)]

    def _step(self, drafts: Sequence[Sequence[int]]) -> Tensor:
        """Feed the last token and the drafts of each row. Return the logits ``[T, V]`` after each
        of them."""
        if not any(drafts):
            return self._session.step(self._last)
        assert isinstance(self._session, RollbackSession)
        rows, flat = self._rows, []
        for row, draft in enumerate(drafts):
            flat += [int(rows.tokens[row, rows.steps[row] - 1]), *draft]
        counts = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
        return self._session.feed(to_device(torch.tensor(flat), self._device), counts)

    def _accept(self, sampled: Tensor, found: Acceptance, fed: int) -> None:
        """Keep the fed tokens that were sampled too, and drop the others.

        Args:
            sampled: ``[T]``. Sampled tokens.
            found: What each row takes of them.
            fed: Number of rows that were fed. Those after them were admitted in this step.
        """
        experts = self._session.experts
        if experts is not None:
            for row, own in enumerate(self._rows.experts[:fed]):
                one = [experts.rows[row]] if not found.is_drafted else experts.runs[row]
                own.tokens += one[: found.counts[row]]
        row_of, at = torch.arange(len(found.counts), device=self._device), None
        self._last = sampled
        if found.is_drafted:
            assert isinstance(self._session, RollbackSession)
            self._session.roll_back(found.rejected)
            ends = found.starts + found.counts
            self._last = sampled[to_device(torch.from_numpy(ends - 1), self._device)]
            spans = [np.arange(a, b) for a, b in zip(found.starts, ends)]
            at = to_device(torch.from_numpy(np.concatenate(spans)), self._device)
            counts = to_device(torch.from_numpy(found.counts), self._device)
            row_of = torch.repeat_interleave(row_of, counts)
        if self._seen is not None:
            self._seen[row_of, sampled if at is None else sampled[at]] = True

    def _take(self, tokens: np.ndarray, logprobs: np.ndarray, found: Acceptance) -> list[Rollout]:
        """Append the sampled tokens to the rows. Return the responses that this finished.

        Args:
            tokens: ``[T]``. Sampled tokens.
            logprobs: ``[T]``. Their log-probs.
            found: What each row takes of them.
        """
        own = found.taken(tokens)
        self._constrained.consume(own)
        if self._drafts is not None:
            self._drafts.take(found, own)
        growing = np.arange(len(own))
        done: dict[int, Rollout] = {}
        for ahead in range(int(found.counts.max())):
            growing = growing[found.counts[growing] > ahead]
            if not len(growing):
                break
            at = found.starts[growing] + ahead
            self._refuse_nan(growing, logprobs[at])
            self._rows.record(growing, tokens[at], logprobs[at], self._engine.version)
            done |= self._finish(growing, tokens[at])
            if done:
                growing = growing[~np.isin(growing, list(done))]
        if done:
            self._evict(np.array(sorted(done), dtype=np.int64))
        return [done[row] for row in sorted(done)]

    def _refuse_nan(self, rows: np.ndarray, logprobs: np.ndarray) -> None:
        # checked on the host, which has the numbers anyway; a check on the device would wait for it
        if np.isnan(logprobs).any():
            bad = self._rows.requests[rows[np.flatnonzero(np.isnan(logprobs))[0]]]
            raise ModelError(
                f"the policy gave logits that are not numbers after prompt {bad.prompt.id!r}; "
                "its weights have diverged"
            )

    def abort(self) -> list[Rollout]:
        """Return the unfinished responses as they are."""
        aborted = [self._rollout(row, "abort", None) for row in range(len(self._rows))]
        for group in self._waiting:
            for request in group.waiting:
                prompt = request.prompt
                empty = Rollout(prompt, [], [], [], [], "abort", request.seed, request.sample)
                aborted.append(request.partial or empty)
        return aborted

    def _draw(self, logits: Tensor, drafts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Sample a token after the last token of each row, and after each of its drafts."""
        rows = self._rows
        places, seen = Places(rows.keys, rows.steps, rows.greedy), self._seen
        if any(drafts):
            places, seen = places_after(places, drafts), seen_after(seen, drafts)
        allowed = self._constrained.allowed(logits.shape[1], self._device, drafts)
        return self._sampler.sample(logits, places, seen, allowed)

    def _admit(self) -> list[Tensor]:
        """Admit the waiting requests that fit, in order. Return the logits ``[V]`` of each new
        row's first token."""
        entering: list[tuple[PromptRequests, Request]] = []
        fresh: list[PromptRequests] = []
        shape = CacheShape(
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

    def _prefill(self, fresh: list[PromptRequests]) -> None:
        if not fresh:
            return
        prompts, begun = [g.prompt for g in fresh], [g.plain for g in fresh]
        # more threads than a decoding step: it has all tokens at once
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        with threads_for(2.0 * self._engine.size * tokens, self._device, self._threads):
            handles, logits = self._session.prefill(prompts, begun)
        for group, handle, row in zip(fresh, handles, logits):
            group.handle, group.logits = handle, row
        self._open += fresh

    def _enter(self, entering: list[tuple[PromptRequests, Request]]) -> list[Tensor]:
        groups = [group for group, _ in entering]
        requests = [request for _, request in entering]
        logits = [group.logits for group in groups if group.logits is not None]
        self._rows.append(requests, groups, [response_end(r, self._sampling) for r in requests])
        self._constrained.append(requests)
        if self._drafts is not None:
            rooms = [response_room(r, self._sampling) for r in requests]
            self._drafts.append([group.prompt for group in groups], rooms)
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

    def _finish(self, growing: np.ndarray, tokens: np.ndarray) -> dict[int, Rollout]:
        """Return the responses that end, by row.

        Args:
            growing: ``[n]``. Rows that got a token.
            tokens: ``[n]``. Their newest tokens.
        """
        rows, steps = self._rows, self._rows.steps[growing]
        # before the minimum, no end token is sampled unless a constraint leaves nothing else
        stopped = (tokens[:, None] == self._ends).any(1)
        # stop strings can occur in any text
        searched = ~stopped & (steps >= self._sampling.min_new_tokens)
        cuts = self._cuts(growing[searched], tokens[searched])
        if cuts:
            stopped |= np.isin(growing, list(cuts))
        ended = stopped | (steps >= rows.limits[growing])
        done: dict[int, Rollout] = {}
        for row in growing[stopped].tolist():
            done[row] = self._rollout(row, "stop", cuts.get(row))
        for row in growing[ended & ~stopped].tolist():
            limit = response_limit(rows.requests[row], self._sampling)
            # a row before its limit was paused, and can be resumed
            done[row] = self._rollout(row, "length" if rows.steps[row] >= limit else "abort", None)
        for row in growing[~ended].tolist():
            watch, self._watched = rows.requests[row].watch, row
            if watch is not None and not watch(rows.tokens[row, : rows.steps[row]].tolist()):
                done[row] = self._rollout(row, "abort", None)
        return done

    def watched_logprobs(self) -> list[float]:
        """Return the log-probs of the response whose ``Request.watch`` is being called."""
        rows, row = self._rows, self._watched
        return rows.logprobs[row, : rows.steps[row]].tolist()

    def _cuts(self, growing: np.ndarray, tokens: np.ndarray) -> dict[int, str]:
        """Return the text before a stop string of each row of ``growing [n]`` whose newest token
        of ``tokens [n]`` ends in one."""
        cuts: dict[int, str] = {}
        if self._stops is None:
            return cuts
        for row, token in zip(growing.tolist(), tokens.tolist()):
            # decoding a response is slow, and most tokens cannot end a stop string
            if not self._stops.may_end(token):
                continue
            cut = self._stops.cut(self._rows.tokens[row, : self._rows.steps[row]])
            if cut is not None:
                cuts[row] = cut
        return cuts

    def _rollout(self, row: int, reason: FinishReason, text: str | None) -> Rollout:
        rows, request = self._rows, self._rows.requests[row]
        length = int(rows.steps[row])
        token_ids = rows.tokens[row, :length].tolist()
        logprobs, versions = rows.logprobs[row, :length], rows.versions[row, :length]
        found = rollout_of(
            request,
            token_ids,
            logprobs.tolist(),
            versions.tolist(),
            reason,
            text,
            self._engine.tokenizer,
        )
        if rows.experts:
            found.experts = rows.experts[row].choices(length)
        if isinstance(self._session, PrefixSession):
            found.reused_tokens = self._session.reused.get(rows.groups[row].handle, 0)
        if self._drafts is not None:
            begun = request.partial
            found.drafted = int(self._drafts.drafted[row]) + (begun.drafted if begun else 0)
            found.accepted = int(self._drafts.accepted[row]) + (begun.accepted if begun else 0)
        return found

    def _evict(self, finished: np.ndarray) -> None:
        """Free the finished rows. The last rows move into their places, so that rows stay
        contiguous."""
        groups = {id(g): g for g in (self._rows.groups[row] for row in finished.tolist())}
        for row in finished.tolist():
            group, length = self._rows.groups[row], int(self._rows.steps[row])
            group.rows -= 1
            if isinstance(self._session, PrefixSession):
                own = self._rows.tokens[row, group.begun : length].tolist()
                self._session.remember(row, group.prompt, own)
        kept = len(self._rows) - len(finished)
        staying = np.setdiff1d(np.arange(kept, len(self._rows)), finished)
        moves = list(zip(finished[finished < kept].tolist(), staying.tolist()))
        # cache and host state must move alike: both know a response by its row number
        self._session.evict(moves, kept)
        self._rows.evict(moves, kept)
        self._constrained.evict(moves, kept)
        if self._drafts is not None:
            self._drafts.evict(moves, kept)
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
