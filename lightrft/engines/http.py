"""Generation by a server with completions as in the API of OpenAI that returns token ids.

``lightrft serve`` and vLLM are such servers. ``lightrft serve`` can also take new weights.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import HeldDtypes, changed_weights, dtype_of
from lightrft.engines.growing_response import GrowingResponse
from lightrft.engines.requests import ban_of, response_room
from lightrft.engines.sending.vllm_weights import FIRST_NAME
from lightrft.engines.served.media_wire import media_to_base64
from lightrft.engines.served.served_engine import Piece, ServedEngine, failure
from lightrft.engines.served.start_checks import (
    check_tokenizer,
    is_paused,
    probe_tokens,
    served_model,
)
from lightrft.engines.served.weight_buckets import weight_buckets
from lightrft.engines.vllm import check_sampling
from lightrft.types import Prompt, Request
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.utils.http_client.server_client import (
    Passing,
    ServerClient,
    Unanswered,
    check_digest,
)
from lightrft.utils.lazy_imports import httpx

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

LARGEST_CALL = 32
"""Most responses to a prompt that are asked for in one call."""
UPDATE_TRIALS = 5
"""Trials of a weight update that the server interrupts, e.g. since it was restarted."""
PROBE_TOKENS = 8
"""Tokens of the prompt and of the response that check log-probs."""
ROUNDING = 1e-3
"""A log-prob of a point mass may differ from 0 by so much."""
LOWEST_BIAS = -100.0
"""Lowest bias of a logit in OpenAI's protocol. Servers raise a lower one to it."""
UPDATED = "update:"
"""Start of the digest of weights that a run sent to ``lightrft serve``."""
WAY_OUT = (
    "use lightrft serve, or a vLLM server started with --logprobs-mode processed_logprobs, or set "
    "engine.kind=native"
)


class TextAlone(ConfigError):
    """The endpoint returns text and no token ids.

    Args:
        message: The message.
        model: Name of the served model.
    """

    def __init__(self, message: str, model: str) -> None:
        super().__init__(message)
        self.model = model


class HTTPEngine(ServedEngine):
    """An engine behind HTTP, see ``ServedEngine``.

    Attributes:
        is_own: The server is ``lightrft serve``.
        is_vllm: The server is vLLM.
        digest: Digest of the weights that the server must have. Empty for other servers.
        layout: Digest of names, types and shapes of its weights. Empty for other servers.
        is_paused: The server answers nobody. A run updates its weights, or ended while it did.
            ``lightrft serve`` shows it to those alone who may update the weights.
    """

    server = "lightrft"

    def __init__(
        self,
        client: ServerClient,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        ends: Sequence[int],
    ) -> None:
        super().__init__(client, tokenizer, config, ends)
        self.is_own = self.is_vllm = self.is_paused = False
        self.digest = self.layout = ""
        self._first_digest = ""
        self._updates = False
        # what the server holds after a restart (empty if unknown), what it must hold now, and
        # copies of the weights that ever differed from the former
        self._first: Fingerprint = {}
        self._dtypes = HeldDtypes()
        self._sums: Fingerprint = {}
        self._kept: dict[str, Tensor] = {}
        self._weights_lock = threading.Lock()

    @property
    def path(self) -> str:
        return "/v1/completions"

    def check_sampling(self, sampling: SamplingConfig, key: str = "sampling") -> None:
        """See ``ServedEngine.check_sampling``."""
        if not self.is_own:
            check_sampling(sampling, key)

    def refuse_media(self, what: str, kinds: Collection[str]) -> None:
        """See ``ServedEngine.refuse_media``. ``lightrft serve`` gets media as tensors."""
        if not self.is_own:
            raise ConfigError(
                f"{self.where} is not lightrft serve, and cannot generate for {what}: completions "
                "of other servers take no media with token ids; use lightrft serve, or set "
                "engine.kind=vllm or engine.kind=native"
            )

    def shared_calls(self, responses: Sequence[GrowingResponse]) -> list[list[GrowingResponse]]:
        """See ``ServedEngine.shared_calls``.

        ``lightrft serve`` computes the prompt of a call once. vLLM finds it in its cache.
        """
        most = min(LARGEST_CALL, self.config.max_num_seqs) if self.is_own else 1
        groups: dict[object, list[GrowingResponse]] = {}
        calls: list[list[GrowingResponse]] = []
        for response in responses:
            request = response.request
            # alone: what is watched may end early, and what is resumed has a longer prompt
            is_alone = request.watch is not None or request.num_generated > 0
            room = response_room(request, response.sampling)
            key = (id(request.prompt), room, request.greedy)
            group = groups.get(key)
            if is_alone or group is None or len(group) >= most:
                group = []
                calls.append(group)
                if not is_alone:
                    groups[key] = group
            group.append(response)
        return calls

    def body(self, responses: Sequence[GrowingResponse]) -> dict[str, Any]:
        """See ``ServedEngine.body``."""
        first = responses[0]
        request, sampling = first.request, first.sampling
        shared: dict[str, Any] = {
            "model": self.model,
            "prompt": first.fed_ids,
            "max_tokens": response_room(request, sampling),
            "min_tokens": first.min_tokens,
            **first.filters,
            "stop_token_ids": sorted(self.ends(sampling)),
            "return_token_ids": True,
            "stream": True,
        }
        if self.is_own:
            if request.prompt.media:
                shared["media"] = media_to_base64(request.prompt.media)
                # the policy may have sampled placeholders, which stand for no media
                shared["response_tokens"] = request.num_generated
            # the same stop strings as here, so that the server does not go on
            return {**shared, "stop": sampling.stop, "seeds": [one.seed for one in responses]}
        if self.banned:
            shared["logit_bias"] = ban_of(self.banned, LOWEST_BIAS)
        return {**shared, "seed": first.seed, "ignore_eos": True, "logprobs": 0}

    def pieces(self, event: Mapping[str, Any], known: Mapping[int, int]) -> list[Piece]:
        """See ``ServedEngine.pieces``."""
        if self.digest and event.get("system_fingerprint") != self.digest:
            self._renew(str(event.get("system_fingerprint")))
        return [self._piece(choice) for choice in event.get("choices") or ()]

    def _piece(self, choice: Mapping[str, Any]) -> Piece:
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        if ids is None:
            raise TextAlone(
                f"{self.where}: the answers have no token_ids; {WAY_OUT}. Evaluation can do with "
                "their text: set engine.check_logprobs=false",
                self.model,
            )
        logprobs = choice.get("sampled_logprobs")
        if logprobs is None:
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        version = int(choice.get("policy_version") or 0)
        if self._sums and version != self.version:
            raise ModelError(
                f"{self.where} sampled from weights of version {version}, and the policy has "
                f"version {self.version}: the server lags behind; restart it, and resume the run"
            )
        # with fixed weights, every token has the version that this run began with
        return Piece(choice.get("index", 0), ids, logprobs, self.version, reason)

    def _renew(self, found: str) -> None:
        """Send the weights again to a server that was restarted.

        Args:
            found: Digest of the weights that an answer came from.

        Raises:
            Passing: The call must be repeated.
            ModelError: Somebody else has replaced the weights.
        """
        with self._weights_lock:
            if self._sums and self._held()["digest"] == self._first_digest != self.digest:
                log.warning("%s was restarted; its weights are sent again", self.where)
                self.counts["weights_resent"] += 1
                self._send()
            elif not self._sums or self._held()["digest"] != self.digest:
                raise ModelError(
                    f"{self.where}: the weights {self.digest} were replaced by {found}; let no "
                    "other run update this server, and resume"
                )
        raise Passing(f"the weights {found} are not those of this run")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Send to the server what differs from its weights, see ``Engine.load_weights``.

        A copy of what ever differed stays in the memory of this process, for a server that is
        restarted. Tensors are read, copied and sent bucket by bucket, so a bucket is all that is
        held twice. Adapters are merged. The fingerprint is then of the tensors that were merged.

        Raises:
            ConfigError: The server takes no weights.
            ModelError: It did not take these.
        """
        self.check_idle()
        if not self._updates:
            raise ConfigError(self.no_updates())
        read: Fingerprint = {}
        with self._weights_lock:
            before, self.version = self.version, version
            try:
                # without adapters, the only checksums are those of ``_kept_anew``
                with self.cost.timed():
                    found = self._send(weights if self.lora is None else self.whole(weights, read))
            except BaseException as error:
                # The copies are of two versions: none may reach a server, which has a part too.
                self._first, self._kept, self._sums, self.version = {}, {}, {}, before
                if isinstance(error, Unanswered):
                    raise failure(error, self.where) from error
                raise
        return found if self.lora is None else read

    def _held(self) -> Mapping[str, Any]:
        """Return what the server says about its weights."""
        return self.client.ask("GET", "/v1/weights")

    def _kept_anew(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Copy the ``weights`` that changed, and yield the copies. A copy replaces the one before.

        Weights that the server starts with are never copied until they change.
        """
        # what is in ``_sums`` and was not kept equals ``_first``
        changed = changed_weights(weights, self._sums, self._dtypes, start=self._first)
        for name, tensor in changed:
            old = self._kept.get(name)
            if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                self._kept[name] = tensor.to("cpu", copy=True)
            else:
                old.copy_(tensor)
            yield name, self._kept[name]

    def _send(self, weights: Iterable[tuple[str, Tensor]] = ()) -> Fingerprint:
        """Send the ``weights`` that the server lacks, and those of earlier updates."""
        problem: Unanswered | None = None
        fresh = self._kept_anew(weights)
        for _ in range(UPDATE_TRIALS):
            try:
                found = self._sent(fresh)
                self.digest = found["digest"]
                return self._checked(found["fingerprint"])
            except Unanswered as error:
                # a restarted server does not know the update
                if not error.refused:
                    raise
                problem = error
                # the next trial sends the copies
                deque(fresh, maxlen=0)
        raise ModelError(
            f"{self.where} did not take the weights of version {self.version}: {problem}"
        )

    def _sent(self, fresh: Iterator[tuple[str, Tensor]]) -> Mapping[str, Any]:
        begun = self.client.ask("POST", "/v1/weights/begin", {"version": self.version})
        update, held = begun["update"], begun["fingerprint"]
        sent: set[str] = set()

        def lacks() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in chain(fresh, self._kept.items()):
                if name not in sent and held.get(name) != self._sums[name]:
                    sent.add(name)
                    yield name, tensor

        buckets = weight_buckets(self.cost.counted(lacks()), int(begun["largest"]))
        for number, bucket in enumerate(buckets):
            _put(self.client, update, number, bucket)
        return self.client.ask("POST", "/v1/weights/end", {"update": update})

    def _checked(self, found: Mapping[str, str]) -> Fingerprint:
        """Return ``found``, the checksums of the server's weights.

        Raises ``ModelError`` if one is not that of the weights that were sent.
        """
        for name, total in self._sums.items():
            if found.get(name) != total:
                raise ModelError(
                    f"weights of version {self.version} were not transferred: {self.where} holds "
                    f"another {name!r} than the trainer"
                )
        return dict(found)

    def require_updates(self) -> None:
        """Raise ``ConfigError`` unless the server takes new weights from this run."""
        try:
            held = self._held()
        except Unanswered as error:
            if not error.refused:
                raise failure(error, self.where) from error
            if error.status == httpx.codes.UNAUTHORIZED and self.config.api_key_env is not None:
                raise ConfigError(
                    f"engine.api_key_env = {self.config.api_key_env!r}: {self.where} does not let "
                    f"this key update its weights: {error}; name a key of its weights_token_file"
                ) from error
            raise ConfigError(f"{self.no_updates()} ({error})") from error
        self._first_digest, found = held["start_digest"], held["fingerprint"]
        self._dtypes = HeldDtypes({name: dtype_of(total) for name, total in found.items()})
        # an earlier run may have updated this server
        self._first = dict(found) if held["digest"] == self._first_digest else {}
        self._updates = True

    def no_updates(self) -> str:
        """Return the message that refuses a run which trains."""
        return (
            f"{self.where} takes no new weights, and this run trains them: start lightrft serve "
            "with weights_token_file, and name a token of it by engine.api_key_env; or set "
            "engine.kind=vllm or engine.kind=native"
        )

    def check_server(self) -> None:
        """See ``ServedEngine.check_server``."""
        entry = served_model(self.client, self.config)
        self.model = str(entry["id"])
        self.is_own = entry.get("owned_by") == "lightrft"
        self.is_vllm = entry.get("owned_by") == "vllm"
        self.layout = str(entry.get("weights_layout") or "")
        self.digest = self._first_digest = str(entry.get("digest") or "")
        check_digest(self.config.digest, self.digest, self.model, "engine")
        limit = entry.get("max_model_len")
        self.context = None if limit is None else int(limit)
        check_tokenizer(self.client, self.config, self.tokenizer, self.model)
        if self.is_own:
            self.is_paused = self._is_updated()
        elif self.is_vllm:
            self.is_paused = is_paused(self.client)
        if not self.is_paused:
            self.check_generated()

    def _is_updated(self) -> bool:
        """Return whether an update of the weights of ``lightrft serve`` is open."""
        # it is shown to those alone who may update the weights
        return not self._shown("/v1/weights").get("is_whole", True)

    def update_name(self) -> str:
        """Return the name of the weights that a run sent to the server; empty if it knows none."""
        if self.is_own:
            return self.digest if self.digest.startswith(UPDATED) else ""
        if not self.is_vllm:
            return ""
        held = self._shown("/weight_info").get("weight_version")
        return "" if held in (None, FIRST_NAME) else str(held)

    def shown_fingerprint(self) -> Fingerprint:
        """Return the checksums of the server's weights; empty if it does not show them."""
        return dict(self._shown("/v1/weights").get("fingerprint") or {})

    def _shown(self, path: str) -> Mapping[str, Any]:
        """Return the server's answer, which is empty if it refuses the request."""
        try:
            return self.client.ask("GET", path)
        except Unanswered as error:
            if not error.refused:
                raise failure(error, self.where) from error
            return {}

    def check_generated(self) -> None:
        """Raise ``ConfigError`` unless log-probs are of the distribution that is sampled from.

        With ``top_k`` = 1 that is a point mass, whose log-probs are 0.
        """
        text = probe_tokens(self.tokenizer)
        room = PROBE_TOKENS if self.context is None else min(PROBE_TOKENS, self.context // 2)
        request = Request(Prompt("probe", text[:room]), 1)
        settings = SamplingConfig(
            temperature=0.5, top_k=1, max_new_tokens=room, min_new_tokens=room
        )
        [found] = self.generate([request], settings)
        far = [logprob for logprob in found.logprobs if abs(logprob) > ROUNDING]
        # two tokens may be equally likely in half precision
        if 2 * len(far) > len(found.logprobs):
            raise ConfigError(
                f"{self.where}: with temperature 0.5 and top_k 1 the log-probs of its tokens must "
                f"be 0, and are {far[0]:.3g}: they are not those of the distribution that is "
                f"sampled from; {WAY_OUT}"
            )


def _put(client: ServerClient, update: str, number: int, bucket: bytes) -> None:
    """Send a bucket of weights."""
    kind = {"Content-Type": "application/octet-stream"}
    path = f"/v1/weights/bucket?update={update}&number={number}"
    client.ask("POST", path, headers=kind, data=bucket)
