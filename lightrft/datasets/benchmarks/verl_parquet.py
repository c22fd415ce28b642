"""Readers of the parquet layout of verl and the JSON-in-a-string layout of lmm-r1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightrft.datasets.row_readers import READERS


@READERS.register("verl")
def verl(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``{data_source, prompt: messages, reward_model: {ground_truth}, extra_info}``.

    ``extra_info`` is ``{split, index, ...}``.
    """
    extra = row.get("extra_info") or {}
    truth = row["reward_model"]["ground_truth"]
    solution = next((extra[k] for k in ("answer", "reference") if extra.get(k) is not None), truth)
    source = row.get("data_source") or ""
    named = {"prompt": row["prompt"], "label": truth, "reference": solution, "data_source": source}
    if extra.get("index") is not None:
        named["id"] = "/".join(
            str(part)
            for part in (
                source,
                extra.get("split"),
                extra["index"],
            )
            if part not in (None, "")
        )
    return {**row, **named}


@READERS.register("lmm_r1")
def lmm_r1(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``{message: "[{...}]", answer, datasource?}``, with messages as a JSON string.

    Raises ``ValueError`` if it is not JSON.
    """
    message = row["message"]
    prompt = json.loads(message) if isinstance(message, str) else message
    return {
        **row,
        "prompt": prompt,
        "label": row["answer"],
        "data_source": row.get("datasource") or "",
    }


vermulti = READERS.register("vermulti")(lmm_r1)
"""VerMulti (arXiv 2503.07536) has the same layout."""
