"""Training data of a request, and the losses that a client can name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightrft.config.algorithm import LossConfig
from lightrft.serving.problems import bad
from lightrft.utils.errors import did_you_mean
from lightrft.workers.scoring.reward_wire import checked_ids

FLOAT32, INT64 = 1, 2
"""Types of a tensor on the wire."""
_DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
_RL = ("target_tokens", "logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class TinkerLoss:
    """A loss of the client.

    Attributes:
        name: The policy loss that computes it.
        inputs: Tensors that each datum must have.
        bounds: Lower and upper bound of the ratio where a request gives none. ``None`` for a loss
            without bounds.
    """

    name: str
    inputs: tuple[str, ...]
    bounds: tuple[float, float] | None = None

    def settings(self, given: Mapping[str, float | str]) -> LossConfig:
        """Return the settings of the policy loss.

        Args:
            given: ``loss_fn_config`` of the request.

        Raises:
            HTTPProblem: A name or a value is not one of this loss.
        """
        names = () if self.bounds is None else ("clip_low_threshold", "clip_high_threshold")
        for name, value in given.items():
            where = f"loss_fn_config.{name} = {value!r}"
            if name not in names:
                near = did_you_mean(name, names) or "; leave it out"
                raise bad(f"{where}: this loss does not read it{near}")
            least = name == "clip_low_threshold"
            if isinstance(value, str) or not (0 <= value <= 1 if least else value >= 1):
                raise bad(f"{where}: it must be {'from 0 to 1' if least else 'at least 1'}")
        if self.bounds is None:
            return LossConfig(name=self.name)
        low, high = (float(given.get(n, b)) for n, b in zip(names, self.bounds, strict=True))
        return LossConfig(name=self.name, clip_low=1 - low, clip_high=high - 1)


LOSSES = {
    # The weights of cross-entropy are the advantages of REINFORCE.
    "cross_entropy": TinkerLoss("reinforce", ("target_tokens", "weights")),
    "importance_sampling": TinkerLoss("importance", _RL),
    "ppo": TinkerLoss("ppo_clip", _RL, (0.8, 1.2)),
    "cispo": TinkerLoss("cispo", _RL, (0.0, 4.0)),
}
"""Name in a request to the loss. Each is summed over tokens."""


def loss_of(name: str) -> TinkerLoss:
    """Return the loss of a request. Raises ``HTTPProblem`` if this server has none of this name."""
    if name not in LOSSES:
        raise bad(
            f"loss_fn = {name!r}: this server has {', '.join(LOSSES)}; forward_backward_custom of "
            "the client takes any other loss of log-probs"
        )
    return LOSSES[name]


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence to train on.

    Attributes:
        tokens: The N tokens that the model reads.
        targets: ``[N]`` or ``[N, K]`` tokens that are scored after each of them.
        old: ``[N]`` log-probs of the sampler. ``None`` for a loss that reads none.
        weights: Advantages or weights, as ``targets``.
    """

    tokens: list[int]
    targets: np.ndarray
    old: np.ndarray | None
    weights: np.ndarray


def read_data(data: Sequence[Mapping[str, Any]], loss: TinkerLoss, vocabulary: int) -> list[Datum]:
    """Return the data of a request.

    Args:
        data: The decoded messages.
        loss: The loss of the request.
        vocabulary: Number of token ids that the model knows.

    Raises:
        HTTPProblem: A datum is malformed, or has something that this server does not read.
        DataError: A token is not one of the model.
    """
    if not data:
        raise bad("the request has no data; give at least one datum")
    return [_datum(tree, loss, vocabulary, f"data.{k}") for k, tree in enumerate(data)]


def _datum(tree: Mapping[str, Any], loss: TinkerLoss, vocabulary: int, where: str) -> Datum:
    for name in ("model_input_spans", "loss_fn_input_spans"):
        if tree[name]:
            raise bad(f"{where}.{name} is not supported; leave it out")
    tokens: list[int] = []
    for chunk in tree["model_input"]:
        if "encoded_text" not in chunk:
            raise bad(f"{where}.model_input has {', '.join(chunk)}: this server reads tokens alone")
        tokens += np.frombuffer(chunk["encoded_text"].get("tokens", b""), "<i4").tolist()
    checked_ids(tokens, vocabulary, f"{where}.model_input")
    given = {pair.get("key", ""): pair.get("value", {}) for pair in tree["loss_fn_inputs"]}
    if set(given) != set(loss.inputs):
        raise bad(
            f"{where}.loss_fn_inputs has {', '.join(sorted(given)) or 'nothing'}, and this loss "
            f"reads exactly {', '.join(loss.inputs)}"
        )
    found = {name: _array(given[name], f"{where}.{name}") for name in loss.inputs}
    targets, *others = found.values()
    if targets.dtype.kind != "i":
        raise bad(f"{where}.target_tokens must be of int64")
    for name, array in found.items():
        if array.shape != targets.shape or len(array) != len(tokens):
            raise bad(
                f"{where}.{name} has the shape {list(array.shape)}, with {len(tokens)} tokens of "
                f"model_input and target_tokens of the shape {list(targets.shape)}; each token "
                "needs its own"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise bad(f"{where}.{name} has a value that is not finite")
    if targets.ndim == 2 and len(others) == 2:
        raise bad(f"{where}.target_tokens: several targets of a token are for cross_entropy alone")
    checked_ids(targets.reshape(-1).tolist(), vocabulary, f"{where}.target_tokens")
    old = found.get("logprobs")
    as_float = [None if one is None else one.astype(np.float32) for one in (old, others[-1])]
    return Datum(tokens, targets, as_float[0], as_float[1])  # ty: ignore[invalid-argument-type]


def _array(tree: Mapping[str, Any], where: str) -> np.ndarray:
    """Return a tensor of one or two axes, with 0 where a sparse one lists nothing."""
    dtype = _DTYPES.get(tree.get("dtype", 0))
    if dtype is None:
        raise bad(f"{where} must be of float32 or int64")
    sparse = tree.get("sparse_csr")
    data = tree.get("dense", b"") if sparse is None else sparse.get("values", b"")
    values = np.frombuffer(data, dtype)
    shape = tree["shape"] or [len(values)]
    if len(shape) > 2 or 0 in shape:
        raise bad(f"{where} has the shape {shape}; give one axis, or two without an empty one")
    if sparse is None:
        if np.prod(shape, dtype=object) != len(values):
            raise bad(f"{where} has {len(values)} values, and its shape is {shape}")
        return values.reshape(shape)
    starts, columns = (np.frombuffer(sparse.get(n, b""), "<i8") for n in _INDICES)
    counts = np.diff(starts)
    if (
        len(shape) != 2
        or len(counts) != shape[0]
        or (counts < 0).any()
        or not counts.sum() == len(columns) == len(values)
        or not ((columns >= 0) & (columns < shape[1])).all()
    ):
        raise bad(f"{where} has indices that do not fit its shape {shape}")
    found = np.zeros(shape, dtype)
    found[np.repeat(np.arange(shape[0]), counts), columns] = values
    return found


_INDICES = ("crow_indices", "col_indices")
