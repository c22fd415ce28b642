"""The fields of requests of tinker's client, and the messages that answer them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from lightrft.config.strategy import SamplingConfig
from lightrft.serving.chat.request_fields import sampling_problem
from lightrft.serving.chat.token_logprobs import TokenLogprobs
from lightrft.serving.field_table import (
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    TEXT,
    RequestFields,
    Types,
    list_of,
    object_of,
)
from lightrft.serving.problems import HTTPProblem, bad
from lightrft.serving.tinker.adapters import Sampled, SamplingJob
from lightrft.serving.tinker.protobuf import encode
from lightrft.serving.tinker.training_data import FLOAT32
from lightrft.types import Prompt, Request
from lightrft.utils.seeding import derive_seed
from lightrft.workers.scoring.reward_wire import checked_ids

MOST_SAMPLES = 1024
"""Largest ``num_samples`` of a request."""
MOST_LIKELY = 1024
"""Largest number of likely tokens of a request."""
MISSING = -99999.0
"""Log-prob of a likely token at a place that has none, as the client reads it."""


_TYPES: dict[str, Types] = {
    "bool": (BOOLEAN,),
    "int": (INTEGER,),
    "number": (NUMBER,),
    "object": (OBJECT,),
    "stop": (TEXT, list_of(TEXT, INTEGER)),
    "text": (TEXT,),
    "texts": (list_of(TEXT),),
    "tokens": (list_of(INTEGER),),
}


def _fields(
    read: str,
    neutral: Mapping[str, object] | None = None,
    unread: Sequence[str] = ("type",),
    **objects: RequestFields,
) -> RequestFields:
    """Return the fields of a request.

    Args:
        read: Name and type of each field, with ``?`` after the type if it may be ``null``.
        neutral: See ``RequestFields``.
        unread: See ``RequestFields``.
        objects: Fields that are objects, to their own fields.
    """
    found: dict[str, Types] = {name: (object_of(own), NULL) for name, own in objects.items()}
    for pair in read.split():
        name, kind = pair.split(":")
        found[name] = _TYPES[kind.rstrip("?")] + ((NULL,) if kind.endswith("?") else ())
    return RequestFields(found, unread, neutral or {})


_OPTIMIZER = _fields("", {"type": "adamw"}, ())
_CHUNK = _fields("tokens:tokens", {"type": "encoded_text"}, ())
_PROMPT = RequestFields({"chunks": (list_of(object_of(_CHUNK)),)})
FIELDS = {
    "create_session": _fields(
        "tags:texts display_name:text? user_metadata:object?",
        {"project_id": None},
        ("type", "sdk_version"),
    ),
    "create_model": _fields(
        "session_id:text model_seq_id:int base_model:text user_metadata:object?",
        lora_config=_fields("rank:int seed:int? train_unembed:bool train_mlp:bool train_attn:bool"),
        optimizer_config=_OPTIMIZER,
    ),
    "optim_step": _fields(
        "model_id:text seq_id:int",
        {"optimizer_params": None},
        adam_params=_fields(
            "learning_rate:number beta1:number beta2:number eps:number weight_decay:number "
            "grad_clip_norm:number"
        ),
    ),
    "save_weights": _fields(
        "model_id:text seq_id:int path:text overwrite:bool user_metadata:object?",
        {"ttl_seconds": None},
    ),
    "save_weights_for_sampler": _fields(
        "model_id:text seq_id:int path:text? sampling_session_seq_id:int? user_metadata:object?",
        {"ttl_seconds": None, "kind": "snapshot"},
    ),
    "load_weights": _fields(
        "model_id:text? seq_id:int? session_id:text? model_seq_id:int? base_model:text? path:text "
        "optimizer:bool user_metadata:object?",
        {"weights_access_token": None},
        optimizer_config=_OPTIMIZER,
    ),
    "create_sampling_session": _fields(
        "session_id:text sampling_session_seq_id:int base_model:text? model_path:text?"
    ),
    "asample": _fields(
        "sampling_session_id:text seq_id:int num_samples:int prompt_logprobs:bool? "
        "topk_prompt_logprobs:int topk_sample_logprobs:int prompt_logprobs_last_n:int?",
        {
            "base_model": None,
            "model_path": None,
            "target_prompt_logprobs": None,
            "prompt_alt_tokens_k": 0,
            "record_stability_info": False,
        },
        prompt=_PROMPT,
        sampling_params=_fields(
            "max_tokens:int? seed:int? stop:stop? temperature:number top_k:int top_p:number"
        ),
    ),
    "retrieve_future": _fields("request_id:text", unread=("allow_metadata_only",)),
    "session_heartbeat": _fields("session_id:text"),
    "get_info": _fields("model_id:text"),
    "weights_info": _fields("tinker_path:text"),
}
"""Fields of the requests to each address."""
_ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""The client's own values."""


class Body(dict[str, Any]):
    """The fields of a request, or of an object in it."""

    def __missing__(self, name: str) -> Any:
        raise bad(f"the request has no {name!r}")


def tinker_error(problem: HTTPProblem) -> dict[str, object]:
    """Return the body of a refusal, whose text the client shows."""
    return {"error": str(problem), "category": "user" if problem.status < 500 else "server"}


def adam_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the settings of a step of AdamW, and the largest norm of the gradient or 0.

    Raises ``HTTPProblem`` for a number that AdamW cannot take.
    """
    values = {name: float(given.get(name, default)) for name, default in _ADAM.items()}
    for name, value in values.items():
        most = 1 if name.startswith("beta") else math.inf
        if not 0 <= value < most:
            raise bad(f"adam_params.{name} = {value:g}: it must be a number from 0, below {most}")
    settings = {
        "lr": values["learning_rate"],
        "betas": (values["beta1"], values["beta2"]),
        "eps": values["eps"],
        "weight_decay": values["weight_decay"],
    }
    return settings, values["grad_clip_norm"]


def read_samples(
    body: Mapping[str, Any], vocabulary: int, room: int
) -> tuple[SamplingJob, SamplingConfig]:
    """Return what a request for samples asks for, and the settings that it shares with others.

    Args:
        body: The request.
        vocabulary: Number of token ids that the model knows.
        room: Most tokens of a prompt with its response.

    Raises:
        HTTPProblem: A field has a value that this server cannot follow.
        DataError: A token is not one of the model.
    """
    chunks = Body(body["prompt"] or {})["chunks"]
    tokens = [int(token) for chunk in chunks for token in Body(chunk)["tokens"]]
    checked_ids(tokens, vocabulary, "prompt")
    given = body["sampling_params"] or {}
    settings: dict[str, Any] = {
        name: given[name] for name in ("temperature", "top_p") if name in given
    }
    top_k = given.get("top_k", -1)
    if top_k == 0:
        raise bad("sampling_params.top_k = 0: it would leave no token; -1 keeps all")
    settings["top_k"] = 0 if top_k == -1 else top_k
    stop = given.get("stop")
    if stop == []:
        raise bad(
            "sampling_params.stop = []: this server always ends a response at the end token; leave "
            "out stop"
        )
    words = [stop] if isinstance(stop, str) else stop or []
    settings["stop"] = tuple(word for word in words if isinstance(word, str))
    ids = [word for word in words if not isinstance(word, str)]
    settings["stop_token_ids"] = tuple(checked_ids(ids, vocabulary, "stop") if ids else ())
    try:
        sampling = SamplingConfig.model_validate({**settings, "max_new_tokens": room})
    except ValidationError as error:
        raise bad(f"sampling_params: {sampling_problem(error, {})}") from error
    left = room - len(tokens)
    limit = given.get("max_tokens")
    if left < 1 or (limit is not None and not 1 <= limit <= left):
        raise bad(
            f"sampling_params.max_tokens = {limit} after {len(tokens)} tokens: a prompt with its "
            f"response has 1 to {room} tokens here (engine.max_cache_tokens, or the context of the "
            "model)"
        )
    count = int(body.get("num_samples", 1))
    if not 1 <= count <= MOST_SAMPLES:
        raise bad(f"num_samples = {count}: it must be from 1 to {MOST_SAMPLES}")
    prompt = Prompt("prompt", tokens)
    seed = given.get("seed")
    seed = secrets.randbits(63) if seed is None else seed
    requests = [
        Request(prompt, derive_seed(seed, "choice", k), k, left if limit is None else int(limit))
        for k in range(count)
    ]
    numbers = [int(body.get(f"topk_{kind}_logprobs", 0)) for kind in ("prompt", "sample")]
    if not all(0 <= number <= min(MOST_LIKELY, vocabulary) for number in numbers):
        raise bad(f"topk_prompt_logprobs and topk_sample_logprobs must be 0 to {MOST_LIKELY}")
    likely, last = numbers[0], body.get("prompt_logprobs_last_n")
    shown = body.get("prompt_logprobs") or likely
    if last is not None and not (body.get("prompt_logprobs") and 1 <= last < len(tokens)):
        raise bad(
            f"prompt_logprobs_last_n = {last}: it needs prompt_logprobs, and must be from 1 to the "
            f"number of prompt tokens without the first, {len(tokens) - 1}"
        )
    return SamplingJob(requests, likely if shown else None, numbers[1]), sampling


def samples_answer(body: Mapping[str, Any], found: Sampled) -> bytes:
    """Return the message of the responses to the request ``body``."""
    sequences = []
    for k, rollout in enumerate(found.rollouts):
        likely = None if found.likely is None else found.likely[k].likely
        sequences.append(
            {
                "stop_reason": int(rollout.finish_reason == "length"),
                "tokens": np.array(rollout.token_ids, "<i4").tobytes(),
                "logprobs": np.array(rollout.logprobs, "<f4").tobytes(),
                "topk_sampled_logprobs": None if likely is None else _likely(likely),
            }
        )
    answer: dict[str, Any] = {"sequences": sequences}
    if found.prompt is not None:
        tokens = len(found.rollouts[0].prompt.token_ids)
        skipped = tokens - (body.get("prompt_logprobs_last_n") or tokens - 1)
        answer |= _of_prompt(body, found.prompt, tokens, skipped)
    return encode("SampleResponse", answer)


def _of_prompt(
    body: Mapping[str, Any], scores: TokenLogprobs, tokens: int, skipped: int
) -> dict[str, Any]:
    """Return log-probs and likely tokens of a prompt.

    Args:
        body: The request.
        scores: Those of its tokens after the first, and of later ones.
        tokens: Number of its tokens.
        skipped: Number of its first tokens that get none.
    """
    answer: dict[str, Any] = {}
    places = slice(skipped - 1, tokens - 1)
    if body.get("prompt_logprobs"):
        row = [math.nan] * skipped + scores.chosen[places]
        answer["prompt_logprobs"] = np.array(row, "<f4").tobytes()
    if k := body.get("topk_prompt_logprobs"):
        none = [[(0, MISSING)] * k] * skipped
        answer["topk_prompt_logprobs"] = _likely(none + scores.likely[places])
    return answer


def _likely(rows: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Return the message of the likely tokens at each place."""
    return {
        "token_ids": np.array([[id for id, _ in row] for row in rows], "<i4").tobytes(),
        "logprobs": np.array([[value for _, value in row] for row in rows], "<f4").tobytes(),
        "k": len(rows[0]) if rows else 0,
        "length": len(rows),
    }


def losses_answer(logprobs: Sequence[np.ndarray], total: float) -> bytes:
    """Return the message of a forward pass.

    Args:
        logprobs: Log-probs of the targets of each datum.
        total: Sum of the loss.
    """
    records = []
    for own in logprobs:
        data = own.astype("<f4").tobytes()
        tensor = {
            "data": data,
            "offsets": np.array([0, len(data)], "<i8").tobytes(),
            "dtype": FLOAT32,
            "trailing_shape": own.shape[1:],
        }
        records.append({"fields": [{"key": "logprobs", "value": tensor}], "num_datums": 1})
    answer = {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": records,
        "metrics": [{"key": "loss:sum", "value": total}],
    }
    return encode("ForwardBackwardOutput", answer)
