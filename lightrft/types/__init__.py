"""Define the data types that every layer shares.

Nothing is padded, and a prompt is stored once per group. Letters in shapes: P distinct prompts, B
responses, N response tokens of all B responses, concatenated.
"""

from lightrft.types.batch import (
    CORRUPTED,
    GOLD,
    Batch,
    Segments,
    cat_media,
    sample_column,
    token_column,
)
from lightrft.types.rollouts import (
    Attachment,
    ExpertChoices,
    Extent,
    FinishReason,
    Prompt,
    Request,
    Rollout,
)
from lightrft.types.tensors import HostCopy, Media, Ragged, rows_of

__all__ = [
    "CORRUPTED",
    "GOLD",
    "Attachment",
    "Batch",
    "ExpertChoices",
    "Extent",
    "FinishReason",
    "HostCopy",
    "Media",
    "Prompt",
    "Ragged",
    "Request",
    "Rollout",
    "Segments",
    "cat_media",
    "rows_of",
    "sample_column",
    "token_column",
]
