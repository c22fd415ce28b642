"""Updates of an SGLang server that fail: the cause is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.engines.sending.sglang_weights import BucketWeights
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.utils.errors import ModelError


class Server:
    """Opens and closes updates, and shows no checksums."""

    url = "http://127.0.0.1:1"

    def ask(self, *_: object, **__: object) -> Mapping[str, Any]:
        return {}


class Silent(BucketWeights):
    """Its buckets are not answered in time."""

    def _send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        # as ``Future.result`` raises it
        raise TimeoutError

    def _finish(self) -> None:
        pass


def test_an_error_without_a_message_is_named_by_its_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    where = "engine.url = 'http://127.0.0.1:1'"
    sending = Silent(Server(), where, {}, lambda: None, UpdateCost())  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"did not take the weights 'run-1': TimeoutError; set"):
        sending.load([("lm_head.weight", torch.ones(2, 2))], "run-1")
    assert f"weights did not reach {where} (TimeoutError); all are sent again" in caplog.text
