"""Public helpers over rectangles ``[B, L]`` and packed rows, for code outside the training loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.models.logprobs import entropy_from_logits, log_probs_from_logits
from lightrft.models.lora import apply_lora_configuration, find_all_linear_modules
from lightrft.utils.public_names import names_in, resolver

__all__ = [
    "apply_lora_configuration",
    "compute_approx_kl",
    "compute_reward",
    "create_high_entropy_mask",
    "entropy_from_logits",
    "find_all_linear_modules",
    "log_probs_from_logits",
    "masked_mean",
    "pad_to_length",
    "process_sequences",
    "reset_position_ids",
    "unpacking_samples",
    *names_in(__name__),
]

__getattr__ = resolver(__name__)


def reset_position_ids(attention_mask: Tensor) -> Tensor:
    """Return positions ``[B, L]`` of packed rows, from 0 in each sample.

    ``attention_mask [B, L]`` holds 1..n for the samples of a row and 0 for padding, whose position
    is 0.
    """
    steps = torch.arange(attention_mask.shape[1], device=attention_mask.device).expand_as(
        attention_mask
    )
    starts = torch.ones_like(attention_mask, dtype=torch.bool)
    starts[:, 1:] = attention_mask[:, 1:] != attention_mask[:, :-1]
    # the running maximum carries each start to the end of its sample
    start_of = torch.where(starts, steps, 0).cummax(1).values
    return torch.where(attention_mask != 0, steps - start_of, 0)


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Return the mean of ``tensor`` where ``mask`` is set; 0 where nothing is set.

    Args:
        tensor: Any shape.
        mask: Same shape. ``None`` averages all elements.
        dim: The axis to reduce. ``None`` reduces all.
    """
    if mask is None:
        return tensor.mean() if dim is None else tensor.mean(dim)
    # not a product: NaN outside the mask times 0 is NaN
    kept = torch.where(mask.bool(), tensor, 0)
    # ``sum(None)`` reduces all axes
    return kept.sum(dim) / mask.bool().sum(dim).clamp(min=1)


def unpacking_samples(values: Tensor, packed_seqlens: Sequence[int]) -> list[Tensor]:
    """Split ``values [sum]`` or ``[1, sum]`` into pieces of lengths ``packed_seqlens``.

    Raises ``ValueError`` if the lengths do not add up.
    """
    flat = values.squeeze(0) if values.dim() > 1 else values
    if sum(packed_seqlens) != flat.shape[0]:
        problem = f"packed_seqlens add up to {sum(packed_seqlens)}"
        raise ValueError(f"{problem}, the values have {flat.shape[0]} places")
    return list(flat.split(list(packed_seqlens)))


def pad_to_length(tensor: Tensor, length: int, pad_value: float, dim: int = -1) -> Tensor:
    """Return ``tensor`` padded on the left of ``dim`` to ``length``.

    Longer tensors are returned as they are.

    Args:
        tensor: Any shape.
        length: Size of ``dim`` in the result.
        pad_value: Value of the new elements.
        dim: The axis to pad.
    """
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_full(shape, pad_value), tensor], dim=dim)


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    action_mask: Tensor | None = None,
    kl_estimator: str = "k1",
) -> Tensor:
    """Return an estimate of KL(policy || base) at each token.

    The tokens are sampled by the policy. The estimate is 0 where ``action_mask`` is 0. With d =
    log_probs - log_probs_base, ``k1`` = d, ``k2`` = d^2 / 2, ``k3`` = exp(-d) - 1 + d. Source:
    Schulman, "Approximating KL divergence", 2020.

    Args:
        log_probs: Log-probs of the tokens under the policy.
        log_probs_base: Log-probs of the same tokens under the base model.
        action_mask: 1 for actions. ``None`` means all.
        kl_estimator: ``k1``, ``k2`` or ``k3``.

    Raises:
        ValueError: ``kl_estimator`` is another name.
    """
    if log_probs.dtype != torch.float64:
        # the difference of two close numbers would lose most bits in half precision
        log_probs, log_probs_base = log_probs.float(), log_probs_base.float()
    d = log_probs - log_probs_base
    if action_mask is not None:
        # before the estimate, whose exponential may overflow at padding
        d = torch.where(action_mask.bool(), d, 0)
    if kl_estimator == "k1":
        return d
    if kl_estimator == "k2":
        return d.square() / 2
    if kl_estimator == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kl_estimator = {kl_estimator!r}: must be k1, k2 or k3")


def compute_reward(
    r: Tensor | float,
    kl_coef: float,
    kl: Tensor | Sequence[Tensor],
    action_mask: Tensor | None = None,
    num_actions: Sequence[int] | None = None,
    reward_clip_range: tuple[float, float] | None = None,
) -> Tensor | list[Tensor]:
    """Return token rewards: ``-kl_coef * kl``, plus the outcome reward at each row's last action.

    With ``action_mask``, ``kl`` and the result are ``[B, L]``, and a row without actions gets 0.
    Otherwise they are lists with one tensor per sample.

    Args:
        r: ``[B]`` outcome rewards, or one number for all.
        kl_coef: Weight of the KL penalty. Negative values count as 0.
        kl: KL estimates per token.
        action_mask: ``[B, L]``, 1 for actions. ``None`` for packed samples.
        num_actions: Actions of each packed sample, to check ``kl`` against. ``None`` skips the
            check.
        reward_clip_range: Bounds of ``r``. ``None`` for none.

    Raises:
        ValueError: ``num_actions`` does not match the lengths of ``kl``.
    """
    kl_coef = max(kl_coef, 0.0)
    rows = action_mask.shape[0] if action_mask is not None else len(kl)
    outcome = torch.as_tensor(r)
    outcome = outcome.clamp(*reward_clip_range) if reward_clip_range is not None else outcome
    outcome = outcome.reshape(-1).expand(rows) if outcome.numel() == 1 else outcome.reshape(rows)
    if action_mask is not None:
        assert isinstance(kl, Tensor)
        mask = action_mask.bool()
        rewards = torch.where(mask, -kl_coef * kl, 0.0)
        # argmax returns the first maximum, hence the last action of the flipped row
        last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
        given = torch.where(mask.any(1), outcome.to(rewards), 0.0)
        return rewards.scatter_add(1, last[:, None], given[:, None])
    if num_actions is not None and [len(k) for k in kl] != list(num_actions):
        raise ValueError(
            f"num_actions = {list(num_actions)} but kl has rows of {[len(k) for k in kl]}"
        )
    pieces = []
    for row, value in zip(kl, outcome, strict=True):
        piece = -kl_coef * row
        piece[-1:] += value.to(piece)
        pieces.append(piece)
    return pieces


def create_high_entropy_mask(
    entropy: Tensor,
    action_mask: Tensor | None,
    high_entropy_ratio: float = 0.2,
) -> Tensor:
    """Return a mask ``[B, L]`` of each row's actions with the highest entropy.

    It keeps a fraction of the actions, at least one (arXiv 2506.01939). A row without actions keeps
    none.

    Args:
        entropy: ``[B, L]``.
        action_mask: ``[B, L]``, 1 for actions. ``None`` means every token.
        high_entropy_ratio: Fraction to keep. A ratio outside (0, 1) keeps all actions.
    """
    if action_mask is None:
        action_mask = torch.ones_like(entropy, dtype=torch.long)
    if not 0 < high_entropy_ratio < 1:
        return action_mask
    mask = action_mask.bool()
    counts = mask.sum(1)
    keep = torch.where(counts > 0, (counts * high_entropy_ratio).long().clamp(min=1), 0)
    # stable, so that of equal entropies the earlier token is kept
    order = torch.where(mask, entropy.detach().to(torch.float64), -torch.inf).argsort(
        dim=1, descending=True, stable=True
    )
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return (mask & (rank < keep[:, None])).to(action_mask.dtype)


def process_sequences(
    sequences: Tensor,
    input_len: int,
    eos_token_id: int,
    pad_token_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return generated rows with their attention and action masks.

    The shapes are ``[B, L]``, ``[B, L]`` and ``[B, L - input_len]``. The row ends one place after
    its last token that is neither end nor pad, and an end token is written there. A row cut by the
    length limit has a real token in its last place, which is replaced by an end token. Ends and
    pads inside the text stay attended. An action counts if the token before it is neither end nor
    pad, so the end token itself is trained. The first action always counts. ``sequences`` is not
    changed in place.

    Args:
        sequences: ``[B, L]`` prompts and responses.
        input_len: Columns of the prompts.
        eos_token_id: The end token.
        pad_token_id: The padding token.
    """
    length = sequences.shape[1]
    real = (sequences != eos_token_id) & (sequences != pad_token_id)
    # clamped, so that the end token of a row without padding replaces its last token
    ends = length - real.long().flip(1).argmax(1, keepdim=True).clamp(min=1)
    sequences = sequences.scatter(1, ends, eos_token_id)
    first = real.long().argmax(1, keepdim=True)
    steps = torch.arange(length, device=sequences.device).expand_as(sequences)
    attention_mask = ((steps >= first) & (steps <= ends)).long()
    states = sequences[:, input_len - 1 : -1]
    action_mask = ((states != eos_token_id) & (states != pad_token_id)).long()
    if action_mask.shape[1]:
        action_mask[:, 0] = 1
    return sequences, attention_mask, action_mask
