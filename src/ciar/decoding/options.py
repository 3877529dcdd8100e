"""Options of strategies: what each may be told, checked wherever it arrives.

A strategy declares its options beside its code, so that a new strategy with new settings is still one
file. They travel by name in ``Settings.options``; whoever receives them reads them through here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ciar.decoding.sampling import SamplingLaw
from ciar.errors import InputError
from ciar.models.bundle import Defaults
from ciar.protocol.messages import OptionValue, Settings


@dataclass(frozen=True)
class Option:
    """One setting of a strategy.

    Attributes:
        name: lower case, words joined by underscores.
        default: what holds where nothing is given; its type is the option's: a whole number, a
            number, or one word of ``choices``.
        help: one line for users.
        low, high: range of a number, both ends included.
        choices: words that a word may be.
    """

    name: str
    default: OptionValue
    help: str
    low: float = 0.0
    high: float = 1e6
    choices: tuple[str, ...] = ()

    def check(self, value: object) -> OptionValue:
        """The value in the option's type.

        Raises:
            InputError: it has another type or is out of range; the message says what is possible.
        """
        if self.choices:
            if isinstance(value, str) and value in self.choices:
                return value
            raise InputError(f"{self.name} is {value!r}; it must be one of {', '.join(self.choices)}.")
        kind = "whole number" if isinstance(self.default, int) else "number"
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            whole = float(value).is_integer()
            if self.low <= value <= self.high and (whole or kind == "number"):
                return int(value) if kind == "whole number" else float(value)
        raise InputError(f"{self.name} is {value!r}; it must be a {kind} from {self.low:g} to {self.high:g}.")


class OptionValues:
    """Checked values by name, read in the type that the option declares."""

    def __init__(self, values: Mapping[str, OptionValue]) -> None:
        self._values = dict(values)

    def real(self, name: str) -> float:
        return float(self._values[name])

    def whole(self, name: str) -> int:
        return int(self._values[name])

    def word(self, name: str) -> str:
        return str(self._values[name])


#: Options that every strategy takes: the law that tokens are drawn from, see :class:`SamplingLaw`.
COMMON: tuple[Option, ...] = (
    Option("entropy_heat", 0.0, "entropy-adaptive temperature, heat of sure positions; 0 = off", high=100),
    Option("entropy_scale", 3.0, "entropy-adaptive temperature, nats a fall by 1/e", low=0.01, high=100),
    Option("entropy_floor", 0.6, "entropy-adaptive temperature, its least value", low=0.01, high=100),
)


def read_options(
    strategy: str, declared: tuple[Option, ...], given: tuple[tuple[str, OptionValue], ...]
) -> OptionValues:
    """Checks what was given against what a strategy declares.

    Args:
        strategy: its name, for the message.
        declared: its options, beside :data:`COMMON`.
        given: names and values, as in ``Settings.options``.

    Raises:
        InputError: an option is unknown, comes twice or is out of its range.
    """
    known = {option.name: option for option in (*declared, *COMMON)}
    values = {name: option.default for name, option in known.items()}
    seen: set[str] = set()
    for name, value in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise InputError(
                f"Strategy {strategy!r} has no option {name!r}.{hint} Its options are: {', '.join(known)}."
            )
        if name in seen:
            raise InputError(f"The option {name} is given twice. Give it once.")
        seen.add(name)
        values[name] = known[name].check(value)
    return OptionValues(values)


def law_of(settings: Settings) -> SamplingLaw:
    """The sampling law that settings ask for, the same on both sides.

    Raises:
        InputError: a number is out of its range.
    """
    names = {option.name for option in COMMON}
    common = read_options("", (), tuple(pair for pair in settings.options if pair[0] in names))
    return SamplingLaw(
        settings.temperature,
        settings.top_k,
        settings.top_p,
        common.real("entropy_heat"),
        common.real("entropy_scale"),
        common.real("entropy_floor"),
    )


def default_settings(defaults: Defaults, strategy: str) -> Settings:
    """What a backbone's pictures are made with where nothing else is asked for."""
    return Settings(
        strategy=strategy,
        guidance=defaults.guidance,
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
        prefix_rate=defaults.prefix_rate,
        window=defaults.window,
        injection=defaults.injection,
    )
