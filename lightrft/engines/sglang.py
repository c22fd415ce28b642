"""Generation by a served SGLang, over its own protocol.

SGLang computes log-probs after temperature and before filters, so filters are refused. A server
that the run starts gets new weights by memory that both share. Another one gets them by a folder
that both read, or by broadcasts.
"""

from __future__ import annotations

import base64
import io
import logging
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

# registers the reductions of tensors, by which they are shared and not copied
from torch.multiprocessing import reductions  # noqa: F401

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Fingerprint
from lightrft.engines.growing_response import GrowingResponse
from lightrft.engines.requests import ban_of, refuse_filters, response_room
from lightrft.engines.sending.sglang_weights import (
    BroadcastWeights,
    BucketWeights,
    FolderWeights,
    SGLangWeights,
    refuse_layout,
)
from lightrft.engines.sending.tensor_slices import ALIGNED
from lightrft.engines.served.served_engine import Piece, ServedEngine, failure
from lightrft.engines.served.sglang_options import check_package, command_of
from lightrft.engines.served.sglang_process import SGLangProcess
from lightrft.engines.served.start_checks import (
    check_tokenizer,
    client_of,
    probe_tokens,
    served_model,
)
from lightrft.utils.device_transfer import release_cached_memory
from lightrft.utils.errors import ConfigError, ModelError, ResourceError
from lightrft.utils.http_client.server_client import Passing, ServerClient, Unanswered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)

LARGEST_SEED = 2**31 - 1
PROBE_TOKENS = 8
CLOSE = 0.02
"""Share by which the ratio of two log-probs may differ from the ratio of temperatures."""
TAGS = {1: ("kv_cache",), 2: ("kv_cache", "weights")}
"""Memory that each level of sleep releases."""
MEMORY_TRIALS = 3
"""Trials of a request to release or resume memory of a server that the run has started."""


class SGLangEngine(ServedEngine):
    """An engine over a served SGLang, see ``ServedEngine``.

    Attributes:
        weights: Name of the weights that the server must have. Empty until some are sent.
    """

    server = "sglang"

    def __init__(
        self,
        client: ServerClient,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        ends: Sequence[int],
    ) -> None:
        super().__init__(client, tokenizer, config, ends)
        self.weights = ""
        self._first_weights = ""
        self._run = uuid.uuid4().hex[:12]
        self._server: Mapping[str, Any] = {}
        self._way: SGLangWeights | None = None
        self._can_sleep = False
        self._released: tuple[str, ...] = ()
        self._weights_lock = threading.Lock()
        # the server that this run has started, and the number of the start that released memory
        self._process: SGLangProcess | None = None
        self._released_by = 0

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        options: Sequence[str],
        vocabulary: int | None = None,
    ) -> Self:
        """Start an SGLang server, and return an engine over it, after checks. ``close`` ends it.

        Args:
            config: Settings of the engine.
            tokenizer: Tokenizer of the model.
            ends: Token ids that end a response.
            options: Options of the server.
            vocabulary: Number of token ids that the policy knows. ``None`` if that is unknown.

        Raises:
            ConfigError: SGLang is not installed, or the server fails a check, see ``connect``.
            ResourceError: The server cannot start, or has no memory for its cache.
        """
        check_package()
        log.info("starting %s", command_of(options))
        process = SGLangProcess(options, config.deadline)
        try:
            process.start()
            config = config.model_copy(update={"url": process.url})
            client = client_of(config, process.authorization, direct=True)
            engine = cls(client, tokenizer, config, ends)
        except BaseException:
            process.end()
            raise
        engine._process, engine.vocabulary = process, vocabulary
        return engine.checked()

    @property
    def where(self) -> str:
        """The server, for messages."""
        started = "engine.kind = sglang: the server that this run has started"
        return super().where if self._process is None else started

    @property
    def path(self) -> str:
        return "/generate"

    def check_sampling(self, sampling: SamplingConfig, key: str = "sampling") -> None:
        """See ``ServedEngine.check_sampling``."""
        refuse_filters(sampling, key)

    def shared_calls(self, responses: Sequence[GrowingResponse]) -> list[list[GrowingResponse]]:
        """See ``ServedEngine.shared_calls``. SGLang finds a known prompt in its cache."""
        return [[response] for response in responses]

    def body(self, responses: Sequence[GrowingResponse]) -> dict[str, Any]:
        """See ``ServedEngine.body``."""
        [response] = responses
        request, sampling = response.request, response.sampling
        return {
            "input_ids": response.fed_ids,
            "sampling_params": {
                "max_new_tokens": response_room(request, sampling),
                "min_new_tokens": response.min_tokens,
                "temperature": response.filters["temperature"],
                # not with ignore_eos, which ignores these too
                "stop_token_ids": sorted(self.ends(sampling)),
                "sampling_seed": response.seed & LARGEST_SEED,
                # before the log-probs, as the end tokens below min_new_tokens
                **({"logit_bias": ban_of(self.banned)} if self.banned else {}),
            },
            "return_logprob": True,
            "stream": True,
        }

    def pieces(self, event: Mapping[str, Any], known: Mapping[int, int]) -> list[Piece]:
        """See ``ServedEngine.pieces``. Events have all tokens so far, or the new ones."""
        about = event.get("meta_info") or {}
        self._check_weights(about)
        rows = about.get("output_token_logprobs")
        if rows is None:
            raise ConfigError(f"{self.where}: the answers have no output_token_logprobs")
        before, total = known.get(0, 0), int(about.get("completion_tokens", len(rows)))
        new = rows[before:] if len(rows) == total else rows
        if before + len(new) != total:
            raise ModelError(
                f"{self.where} reports {total} tokens, and sent {before + len(new)} log-probs"
            )
        reason = about.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        if kind is not None and self._process is not None:
            self._process.progressed()
        if kind == "abort":
            raise Passing(f"SGLang aborted the request: {reason}")
        ids, logprobs = [row[1] for row in new], [float(row[0]) for row in new]
        return [Piece(0, ids, logprobs, self.version, kind)]

    def _check_weights(self, about: Mapping[str, Any]) -> None:
        """Raise unless an answer comes from the weights of this run."""
        found = about.get("weight_version")
        if not self.weights or found == self.weights:
            return
        with self._weights_lock:
            held = self._held()
            if held == self._first_weights:
                log.warning("%s was restarted; its weights are sent again", self.where)
                self.counts["weights_resent"] += 1
                self._sender().resend()
            elif held != self.weights:
                raise ModelError(
                    f"{self.where} sampled from weights {found!r}, and the policy has "
                    f"{self.weights!r}: another run has updated this server, or it lags behind"
                )
        raise Passing(f"the weights {found!r} are not those of this run")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Send ``weights``: to ``engine.weights_dir``, by shared memory or by broadcasts.

        Adapters are merged. The fingerprint is of the tensors that were read for it. The check of
        log-probs on the batch that follows proves that the server computes with them.

        Raises:
            ConfigError: The server takes no broadcasts, and there is no folder.
            ModelError: It did not take the weights.
        """
        self.check_idle()
        read: Fingerprint = {}
        # the cache stays away until the next response
        self._restore("weights")
        self.version, self.weights = version, f"{self._run}-{version}"
        try:
            with self.cost.timed():
                self._sender().load(self.whole(weights, read), self.weights)
        except Unanswered as error:
            raise failure(error, self.where) from error
        if self._process is not None:
            self._process.progressed()
        return read

    def _sender(self) -> SGLangWeights:
        if self._way is None:
            about = (self.client, self.where, self._server, self._held, self.cost)
            if self.config.weights_dir is not None:
                self._way = FolderWeights(self.client, self.config.weights_dir, self.cost)
            elif self._process is not None:
                self._way = TensorWeights(*about)
            else:
                refuse_layout(self._server, self.where)
                self._way = BroadcastWeights(*about, self._run, self.config.timeout)
        return self._way

    def _held(self) -> str | None:
        """Return the name of the weights that the server holds."""
        return self._about("model_info").get("weight_version")

    def require_updates(self) -> None:
        """See ``ServedEngine.require_updates``."""
        self._sender()

    def take_counts(self) -> dict[str, float]:
        """See ``HasEventCounts``."""
        restarts = 0 if self._process is None else self._process.take_restarts()
        return {**super().take_counts(), **({"restarts": restarts} if restarts else {})}

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``. It needs ``--enable-memory-saver`` of the server.

        Level 1 releases the cache. A server that the run has started also moves its weights to host
        memory. Level 2 drops the weights, and the next update sends all of them.
        """
        if self.stays_awake:
            return
        if self._can_sleep and not self._released:
            # a server that the run has started copies its weights to host memory first
            tags = TAGS[level if self._process is None else 2]
            self._released_by = 0 if self._process is None else self._process.starts
            self._change_memory("release", tags)
            self._released = tags
            if level > 1 and self._way is not None:
                self._way.forget()
            if self._process is not None:
                self._process.rest()
        super().sleep(level)

    def wake(self) -> None:
        """See ``Engine.wake``. After ``sleep(2)``, weights must be loaded before a response."""
        self._restore(*self._released)
        super().wake()

    def _restore(self, *tags: str) -> None:
        """Resume those ``tags`` of the server's memory that it has released."""
        if self._process is not None:
            self._process.need()
        back = tuple(tag for tag in self._released if tag in tags)
        if back:
            # The server may share the device of this process.
            release_cached_memory()
            self._change_memory("resume", back)
            self._released = tuple(tag for tag in self._released if tag not in back)

    def _change_memory(self, change: str, tags: Sequence[str]) -> None:
        """Release or resume ``tags``. A server that was started again meanwhile has all memory."""
        body, path = {"tags": list(tags)}, f"/{change}_memory_occupation"
        process, start = self._process, self._released_by
        try:
            if process is None:
                self.client.ask("POST", path, body)
                return
            for trial in range(MEMORY_TRIALS):
                if process.has_ended(start, patience=0):
                    return
                try:
                    self.client.ask("POST", path, body, once=True)
                    return
                except Unanswered as error:
                    # SGLang ends if it is asked to resume what it had resumed
                    if process.has_ended(start):
                        return
                    if error.refused or trial == MEMORY_TRIALS - 1:
                        raise
        except Unanswered as error:
            raise failure(error, self.where) from error

    def close(self) -> None:
        """Close all connections, delete the weights of this run, and end the server it started."""
        try:
            if self._way is not None:
                self._way.close()
            super().close()
        finally:
            if self._process is not None:
                self._process.end()

    def check_server(self) -> None:
        """See ``ServedEngine.check_server``."""
        entry = served_model(self.client, self.config)
        self.model = str(entry["id"])
        limit = entry.get("max_model_len")
        self.context = None if limit is None else int(limit)
        self._first_weights = self._held()
        self._server = self._about("server_info")
        self._can_sleep = bool(self._server.get("enable_memory_saver"))
        self._check_cache()
        if not self._server.get("enable_deterministic_inference"):
            log.warning(
                "%s was started without --enable-deterministic-inference: seeds have no effect, "
                "and a response that is asked for again has other tokens",
                self.where,
            )
        check_tokenizer(self.client, self.config, self.tokenizer, self.model)
        self._check_temperature()

    def _about(self, name: str) -> Mapping[str, Any]:
        """Return what the server says about itself, by the newer or the older name of the path."""
        try:
            return self.client.ask("GET", f"/{name}")
        except Unanswered as error:
            if not error.refused:
                raise
            return self.client.ask("GET", f"/get_{name}")

    def _check_cache(self) -> None:
        """Raise ``ResourceError`` if a server that the run has started has a smaller cache."""
        found = self._server.get("max_total_num_tokens")
        wanted = self.config.max_cache_tokens
        if self._process is not None and found is not None and int(found) < wanted:
            raise ResourceError(
                f"SGLang has memory for {found} tokens of keys and values, and "
                f"engine.max_cache_tokens = {wanted}; lower it to {found}, or free memory"
            )

    def _check_temperature(self) -> None:
        """Raise ``ConfigError`` unless log-probs are of the distribution after temperature.

        At half the temperature, the log-probs of two tokens differ by twice as much.
        """
        hot, cold = self._gap(1.0), self._gap(0.5)
        if abs(cold - 2 * hot) > CLOSE * abs(cold):
            raise ConfigError(
                f"{self.where}: the two likeliest tokens differ by {hot:.4g} nats at temperature 1 "
                f"and by {cold:.4g} at 0.5, not by twice as much: log-probs are computed before "
                "temperature; start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    def _gap(self, temperature: float) -> float:
        """Return the difference of the log-probs of the two likeliest tokens after a probe."""
        body = {
            "input_ids": probe_tokens(self.tokenizer)[:PROBE_TOKENS],
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        about = self.client.ask("POST", "/generate", body).get("meta_info") or {}
        rows = about.get("output_top_logprobs") or [[]]
        if len(rows[0]) < 2:
            raise ConfigError(f"{self.where}: the answers have no output_top_logprobs")
        return float(rows[0][0][0]) - float(rows[0][1][0])


PATH = "/update_weights_from_tensor"


class TensorWeights(BucketWeights):
    """Sends handles of memory with the weights: CUDA IPC on a GPU, shared memory on a CPU.

    The server must run on the same device, with one process, and share the authentication key of
    ``multiprocessing`` with this process. Weights are copied into a bucket, since a handle is of a
    whole allocation, and since PyTorch keeps a record of each handle until its memory is freed.
    """

    _shared: Tensor | None = None

    def _send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        copies = self._copied(bucket)
        self._ask({"serialized_named_tensors": [serialized(copies)], "flush_cache": False})
        if self._device.type == "cuda":
            del copies
            # frees the bucket once SGLang has dropped its tensors
            torch.cuda.ipc_collect()

    def _finish(self) -> None:
        empty = {"serialized_named_tensors": [serialized([])]}
        self._ask({**empty, "flush_cache": True, "weight_version": self._version})

    def _ask(self, body: dict[str, Any]) -> None:
        # once: the handles of a bucket can be opened once
        answer = self.client.ask("POST", PATH, body, once=True)
        if not answer.get("success"):
            raise Unanswered(f"{self.client.url}: {answer.get('message')}")

    def _copied(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return copies of the tensors in memory that can be shared."""
        starts, size = [], 0
        for _, tensor in bucket:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        memory = self._memory(size)
        copies = []
        for start, (name, tensor) in zip(starts, bucket, strict=True):
            flat = memory[start : start + tensor.nbytes].view(tensor.dtype)
            copies.append((name, flat.view(tensor.shape).copy_(tensor)))
        return copies

    def _memory(self, size: int) -> Tensor:
        """Return ``size`` bytes of memory on the device of the weights."""
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        # One for all updates: a handle that a killed server did not open keeps its memory.
        if self._shared is None or self._shared.nbytes < size:
            self._shared = torch.empty(size, dtype=torch.uint8).share_memory_()
        return self._shared


def serialized(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Return handles of ``tensors`` with their names, in the form that SGLang reads.

    SGLang accepts tensors, their types and the functions that open a handle, and no other class.

    Args:
        tensors: Tensors by name. Their memory must stay until SGLang has answered.
    """
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(tensors))
    return base64.b64encode(buffer.getvalue()).decode("ascii")
