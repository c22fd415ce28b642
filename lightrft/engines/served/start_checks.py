"""Checks of a server before its first response: its model, its tokenizer, and who may ask it."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightrft.config.engine import EngineConfig
from lightrft.utils.errors import ConfigError, did_you_mean
from lightrft.utils.http_client.server_client import ALIVE, ServerClient, Unanswered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SPARE_CONNECTIONS = 8
"""Connections in addition to one for each response."""
PROBE = "The 3 quick foxes' caf\u00e9:\n\tfor i in range(10): \u4f60\u597d, x_1 = 2**i # \U0001f98a"
"""A text whose tokens differ between tokenizers."""
SHOWN_TOKENS = 8
"""Most tokens of a text in a message."""


def open_client(config: EngineConfig) -> ServerClient:
    """Return a client of ``engine.url``.

    Raises ``ConfigError`` if the variable ``engine.api_key_env`` is not set.
    """
    header = functools.partial(bearer, config)
    header()
    return client_of(config, header)


def client_of(
    config: EngineConfig, header: Callable[[], dict[str, str]], *, direct: bool = False
) -> ServerClient:
    """Return a client of ``engine.url``.

    Args:
        config: Settings of the engine.
        header: Returns the header with the key, for each trial of a request.
        direct: Use no proxy that the environment names.
    """
    url = str(config.url).rstrip("/").removesuffix("/v1")
    # a key in the environment of this process stays the same: 401 does not pass
    passing = [status for status in ALIVE if status != 401]
    most = config.max_num_seqs + SPARE_CONNECTIONS
    return ServerClient(url, config.deadline, most, header, passing, direct=direct)


def bearer(config: EngineConfig) -> dict[str, str]:
    """Return the header with the key of ``engine.api_key_env``.

    Raises ``ConfigError`` if the variable is not set.
    """
    if config.api_key_env is None:
        return {}
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"engine.api_key_env = {config.api_key_env!r}: this environment variable is not set; "
            "set it to the key of engine.url"
        )
    return {"Authorization": f"Bearer {key}"}


def served_model(client: ServerClient, config: EngineConfig) -> Mapping[str, Any]:
    """Return what the server says about the model ``engine.served_model``, or its only one.

    Adapters, whose ``parent`` is a model, are found by their names alone.

    Args:
        client: Sends requests to the server.
        config: Settings of the engine.

    Raises:
        ConfigError: It serves no such model, or several.
    """
    listed = client.ask("GET", "/v1/models").get("data") or []
    models = {str(entry.get("id")): entry for entry in listed}
    whole = [name for name, entry in models.items() if not entry.get("parent")]
    name = config.served_model
    if name is None and len(whole) != 1:
        raise ConfigError(
            f"engine.url = {config.url!r} serves {len(whole)} models "
            f"({', '.join(whole) or 'none'}); name one by engine.served_model"
        )
    if name is not None and name not in models:
        raise ConfigError(
            f"engine.served_model = {name!r}: engine.url = {config.url!r} does not serve it"
            f"{did_you_mean(name, models)}"
        )
    return models[name or whole[0]]


def is_paused(client: ServerClient) -> bool:
    """Return whether a vLLM server is paused, and answers nobody.

    Args:
        client: Sends requests to the server.
    """
    try:
        return bool(client.ask("GET", "/is_paused").get("is_paused"))
    except Unanswered as error:
        if not error.refused:
            raise
        # only a server that takes new weights tells, and can be paused
        return False


def check_tokenizer(
    client: ServerClient, config: EngineConfig, tokenizer: PreTrainedTokenizerBase, model: str
) -> None:
    """Raise ``ConfigError`` if the server reads a text as other tokens.

    Args:
        client: Sends requests to the server.
        config: Settings of the engine.
        tokenizer: Tokenizer of ``model.path``.
        model: Name of the served model.
    """
    ours = probe_tokens(tokenizer)
    body = {"model": model, "prompt": PROBE, "add_special_tokens": False}
    try:
        theirs = client.ask("POST", "/tokenize", body).get("tokens")
    except Unanswered as error:
        if not error.refused:
            raise
        log.warning(
            "engine.url = %r has no /tokenize: its tokenizer is not compared (%s)",
            config.url,
            error,
        )
        return
    if theirs != ours:
        raise ConfigError(
            f"engine.url = {config.url!r} serves {model!r} with another tokenizer: a probe has "
            f"the tokens {_shown(theirs or [])} there and {_shown(ours)} with the tokenizer of "
            "model.path; serve the model of model.path"
        )


def probe_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text that differ between tokenizers."""
    return list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])


def _shown(tokens: Sequence[int]) -> str:
    """Return the first of ``tokens``, and their number."""
    first = ", ".join(map(str, tokens[:SHOWN_TOKENS]))
    return f"[{first}, ...] ({len(tokens)})" if len(tokens) > SHOWN_TOKENS else f"[{first}]"
