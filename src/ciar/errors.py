"""Every error that ciar raises on purpose. Each message says what to do next.

::

    CiarError
    ├── InputError            what the user asked for cannot be done as asked
    ├── DataError             a data set or prompt file is missing or malformed
    ├── CheckpointError       weights are missing, damaged or do not fit the model
    ├── NumericalError        a model produced NaN or infinity
    └── RemoteError           talking to a cloud server failed
        ├── CloudUnavailable  no server answers, or it went away and could not be resumed
        ├── ServerBusy        the server is at its limit; try again after ``retry_after_s``
        └── ProtocolError     the other side sent something that the protocol does not allow
"""

from __future__ import annotations


class CiarError(Exception):
    """Base of all errors that ciar raises on purpose. ``exit_code`` is the CLI's."""

    exit_code = 1


class InputError(CiarError, ValueError):
    """A setting, prompt or option is not usable; the message names the valid range."""

    exit_code = 2


class DataError(CiarError):
    """A data set, prompt file or picture package is missing or malformed."""

    exit_code = 3


class CheckpointError(CiarError):
    """Weights are missing, damaged, or do not fit the model."""

    exit_code = 4


class NumericalError(CiarError):
    """A model produced NaN or infinity; the message names the position."""

    exit_code = 5


class RemoteError(CiarError):
    """Talking to a cloud server failed."""

    exit_code = 6


class CloudUnavailable(RemoteError):
    """No server answers at the address, or it went away and the session could not be resumed."""


class ServerBusy(RemoteError):
    """The server is at its session limit.

    Attributes:
        retry_after_s: seconds after which to try again.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ProtocolError(RemoteError):
    """The other side sent something that the protocol does not allow."""
