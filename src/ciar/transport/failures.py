"""Exceptions to ``Error`` messages and back. Every transport uses these two functions and no others."""

from __future__ import annotations

from ciar.errors import (
    CiarError,
    InputError,
    NumericalError,
    ProtocolError,
    RemoteError,
    ServerBusy,
)
from ciar.protocol.codec import MAX_SENTENCE_CHARS
from ciar.protocol.messages import Error

#: What a device is told when the cloud failed for a reason of its own. The reason itself stays in the
#: server's log: it may hold paths, and nothing in it helps the user.
INTERNAL_MESSAGE = (
    "The cloud failed while it worked on this picture. Try again; if it happens again, the server's log "
    "has the reason."
)


class VersionMismatch(ProtocolError):
    """Device and cloud do not run the same backbone or weights."""


def error_message(error: BaseException) -> Error:
    """The ``Error`` that tells a device about an exception.

    Args:
        error: what the cloud raised, or what is wrong with what the device sent.

    Returns:
        The code and sentence of a ciar error that is about the device's request; for everything else the
        code ``internal`` and a sentence that gives nothing away.
    """
    sentence = str(error)[:MAX_SENTENCE_CHARS].encode("utf-8", "replace").decode()
    match error:
        case ServerBusy():
            return Error("busy", sentence, max(0.0, float(error.retry_after_s)))
        case VersionMismatch():
            return Error("version", sentence)
        case ProtocolError():
            return Error("protocol", sentence)
        case InputError():
            return Error("input", sentence)
        case NumericalError():
            return Error("numerical", sentence)
        case _:
            return Error("internal", INTERNAL_MESSAGE)


def exception_for(message: Error) -> CiarError:
    """The exception that a device raises for an ``Error`` of the cloud."""
    match message.code:
        case "busy":
            return ServerBusy(message.message, message.retry_after_s)
        case "input":
            return InputError(message.message)
        case "protocol":
            return ProtocolError(message.message)
        case "version":
            return VersionMismatch(message.message)
        case "numerical":
            return NumericalError(message.message)
        case _:
            return RemoteError(message.message)
