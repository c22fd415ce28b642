"""Compute the reference's log-probs of a dataset once, and keep them on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from lightrft.datasets.column_cache import ColumnCache, Entry
from lightrft.datasets.preference.preference_dataset import PreferenceDataset, PreferenceExample
from lightrft.datasets.sampler import in_order
from lightrft.distributed.process_group import ProcessGroup
from lightrft.engines.fingerprint import checksums
from lightrft.learner.forward_passes import compute_logprobs, verify_layouts
from lightrft.learner.preference_batch import preference_to_batch
from lightrft.models.actor import Actor
from lightrft.models.processors import Processor
from lightrft.roles import AdapterFreeReference, FrozenModel, Reference, Roles

log = logging.getLogger(__name__)

CHUNK = 128
"""Number of examples whose log-probs are computed together."""
COLUMN = "logprobs"
FORMAT = "2"
"""Version of the entries. It changes with the meaning of their numbers."""


@dataclass(frozen=True, slots=True)
class ReferenceLogprobs:
    """The reference's log-probs of all response tokens of a dataset.

    Attributes:
        values: ``[T]``. NaN for an example that could not be read.
        ends: ``[E]``. End of each example in ``values``.
    """

    values: np.ndarray
    ends: np.ndarray

    def column(self, examples: Sequence[PreferenceExample]) -> Tensor:
        """Return the log-probs of the response tokens of ``examples``, ``[N]``."""
        return torch.from_numpy(np.concatenate([self.values[self.place(e)] for e in examples]))

    def place(self, example: PreferenceExample) -> slice:
        """Return the place of ``example`` in ``values``."""
        start = int(self.ends[example.index - 1]) if example.index else 0
        return slice(start, int(self.ends[example.index]))


def cached_logprobs(
    roles: Roles,
    reference: FrozenModel | AdapterFreeReference,
    dataset: PreferenceDataset,
    max_tokens: int,
    folder: Path,
    progress: Callable[[int], None],
) -> ReferenceLogprobs:
    """Return the log-probs of ``dataset``, from the cache or by computing them.

    All ranks must call it.

    Args:
        roles: The policy and the strategy.
        reference: Computes the log-probs. Its weights are part of the key.
        dataset: The examples.
        max_tokens: Largest number of tokens of a micro-batch.
        folder: Folder of the entries.
        progress: Called with the number of examples that are done.
    """
    ranks = roles.strategy.ranks
    model = reference.model if isinstance(reference, FrozenModel) else reference.actor
    key = cache_key(dataset, model, roles)
    cache = ColumnCache(folder / f"{key}.arrow", "preference.reference.cache_dir")
    entry = cache.read()
    ends = np.cumsum(dataset.response_tokens)
    # A folder may be local to a machine, so that some ranks find an entry that others lack.
    found_by_all = all(ranks.gather(entry is not None))
    if entry is not None and found_by_all:
        log.info("the reference's log-probs are read from %s", cache.path)
        return ReferenceLogprobs(entry.columns[COLUMN], ends)
    found = ReferenceLogprobs(np.full(int(ends[-1]), np.nan, np.float32), ends)
    unread = compute_all(found, roles, reference, dataset, max_tokens, progress)
    if unread:
        # A later run may read them, and the entry would give it no log-probs of theirs.
        log.warning(
            "%d rows could not be read: preference.reference.cache_dir gets no entry, and the next "
            "run computes the reference's log-probs again",
            unread,
        )
        return found
    write_once(cache, Entry({COLUMN: found.values}, ()), ranks)
    return found


def write_once(cache: ColumnCache, entry: Entry, ranks: ProcessGroup) -> None:
    """Write ``entry`` on the first rank that gets to it; on others only if their folder lacks it.

    Args:
        cache: Place of the entry.
        entry: The entry, identical on all ranks.
        ranks: All ranks of the run.
    """
    with cache.locked():
        # The ranks of one machine, or of a shared folder, find what the first of them has written.
        if ranks.size == 1 or cache.read() is None:
            cache.write(entry)


def cache_key(dataset: PreferenceDataset, model: Actor, roles: Roles) -> str:
    """Return a digest of the tokens, the media, and the reference's settings and weights.

    It is the same on all ranks.

    Args:
        dataset: The examples.
        model: The reference.
        roles: The strategy, which places the reference, and the processor of media.
    """
    strategy = roles.strategy
    # Of a sharded model, each rank has its own part of the weights.
    weights = strategy.ranks.gather(sorted(checksums(strategy.shards(model)).items()))
    settings = model.base.config.to_dict()
    # The same model may lie in another folder.
    settings.pop("_name_or_path", None)
    media = "" if roles.processor is None else saved_settings(roles.processor)
    made_of = repr((FORMAT, dataset.digest(), weights, media))
    made_of += json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(made_of.encode(), digest_size=20).hexdigest()


def saved_settings(processor: Processor) -> str:
    """Return a digest of the files that ``processor`` saves."""
    found = hashlib.blake2b(digest_size=20)
    with TemporaryDirectory() as folder:
        processor.save(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                found.update(path.read_bytes())
    return found.hexdigest()


def compute_all(
    found: ReferenceLogprobs,
    roles: Roles,
    reference: Reference,
    dataset: PreferenceDataset,
    max_tokens: int,
    progress: Callable[[int], None],
) -> int:
    """Compute the log-probs of ``dataset`` into ``found``.

    Return the number of examples that cannot be read.

    Args:
        found: Receives the log-probs.
        roles: The policy and the strategy.
        reference: Computes the log-probs.
        dataset: The examples.
        max_tokens: Largest number of tokens of a micro-batch.
        progress: Called with the number of examples that are done.
    """
    size, read = len(dataset), 0
    progress(0)
    for part, examples in enumerate(in_order(dataset, CHUNK, roles.strategy.ranks), start=1):
        read += len(examples)
        if examples:
            batch = preference_to_batch(examples)
            verify_layouts(roles, batch)
            column = compute_logprobs(reference, batch, roles, max_tokens, 1.0).numpy()
            begin = 0
            for example in examples:
                place = found.place(example)
                end = begin + place.stop - place.start
                found.values[place] = column[begin:end]
                begin = end
        progress(min(part * CHUNK, size))
    return size - read
