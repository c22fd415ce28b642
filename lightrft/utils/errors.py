"""Errors that are a user's to fix: the command line shows their text without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the program is wrong; the message names it, its value and the way out."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, or at odds with another."""


class DataError(UserError):
    """A data file, row or column is missing or malformed."""


class ModelError(UserError):
    """A model or tokenizer folder cannot be used as asked."""


class RewardError(UserError):
    """A reward function cannot be found, or returns what is not a reward. With several processes all of them raise it."""

    shared_by_ranks = True


class CheckpointError(UserError):
    """A checkpoint is missing, truncated, or belongs to another run or model."""


class DamagedError(CheckpointError):
    """The files of a checkpoint are not what was saved, or are not a checkpoint."""


class RankError(UserError):
    """Another process of the run failed, or did not answer in time."""


class LostRankError(RankError):
    """The connection to other processes of the run is gone."""


class WorkerError(UserError):
    """A process that a role of the run lives in cannot be kept alive."""


class NothingTrained(UserError):
    """A run has ended and learned nothing in any of its steps."""


class ResourceError(UserError):
    """Memory or disk ran out; the message says what to lower or free."""


def first_line(error: BaseException) -> str:
    """What ``error`` says, in short; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Interrupted(Exception):
    """The run was asked to stop while answers were being drawn; nothing of the step has been used."""

    shared_by_ranks = True
