"""How a long run says where it is, and how it ends before all is done."""

from collections.abc import Callable

Say = Callable[[str, float], None]  # what is being done, and the share of all that is done


def silent(what: str, share: float) -> None:
    """Say nothing."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint cannot be used, and the run goes on from the one before."""


class OutOfTimeError(Exception):
    """The time given was spent; a checkpoint is saved, and the same command goes on from it."""


class JobsFailedError(Exception):
    """Some jobs of a sweep failed while the others went on; the same command tries them again."""
