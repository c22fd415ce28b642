"""The experts of the tokens of a growing response."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrft.types import ExpertChoices, Request


@dataclass(slots=True)
class GrowingExperts:
    """The experts of a prompt, and of the tokens of its response that were fed to the model.

    Attributes:
        prompt: ``[T, layers, k]``, of the prompt.
        tokens: ``[layers, k]`` of each token of the response.
    """

    prompt: Tensor
    tokens: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(request: Request, prefill: Tensor) -> GrowingExperts:
        """Return the experts of a new row.

        A resumed response keeps the experts that it was sampled with. Only its last token gets the
        experts of the prefill, since it was not fed to the model before.

        Args:
            request: The request.
            prefill: ``[T, layers, k]``, of the prompt and the tokens of a resumed response.
        """
        begun = request.num_generated
        if not begun:
            return GrowingExperts(prefill)
        prompt, resumed = prefill[:-begun], prefill[-begun:]
        earlier = None if request.partial is None else request.partial.experts
        if earlier is not None:
            prompt = earlier.prompt
            resumed = torch.cat([earlier.response[:-1], resumed[-1:]])
        return GrowingExperts(prompt, list(resumed.unbind()))

    def choices(self, length: int) -> ExpertChoices:
        """Return the experts of a response of ``length`` tokens; -1 for tokens that were not
        fed."""
        # a response may end before the last of several tokens that were fed in one step
        kept = self.tokens[: length - 1]
        with torch.inference_mode(False):
            missing = torch.full((length - len(kept), *self.prompt.shape[1:]), -1)
            fed = torch.stack(kept) if kept else self.prompt[:0]
            return ExpertChoices(self.prompt, torch.cat([fed, missing.to(fed.dtype)]))
