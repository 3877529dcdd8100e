"""What travels between device and cloud: the messages and their bytes. Knows neither models nor sockets."""

from ciar.protocol.codec import ERROR_CODES, MAX_TOKENS, check, decode, encode
from ciar.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_PROMPT_CHARS,
    SUBPROTOCOL,
    Cancel,
    Cost,
    Done,
    Draft,
    Error,
    LawRow,
    Message,
    Open,
    Opened,
    OptionValue,
    Patch,
    Settings,
)

__all__ = [
    "ERROR_CODES",
    "MAX_FRAME_BYTES",
    "MAX_PROMPT_CHARS",
    "MAX_TOKENS",
    "SUBPROTOCOL",
    "Cancel",
    "Cost",
    "Done",
    "Draft",
    "Error",
    "LawRow",
    "Message",
    "Open",
    "Opened",
    "OptionValue",
    "Patch",
    "Settings",
    "check",
    "decode",
    "encode",
]
