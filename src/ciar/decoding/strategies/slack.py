"""``slack`` and ``scd-slack``: every token is checked, and stands when it is good enough.

A token's slack says how far it is from the cloud's own choice under the picture's noise. Allowing a
little of it at every token keeps drafts that differ from plain AR's without being worse by much.
"""

from __future__ import annotations

from ciar.decoding.options import Option
from ciar.decoding.strategies.lossless import Windows
from ciar.decoding.strategies.scd import Scd
from ciar.decoding.strategy import register
from ciar.protocol.messages import Settings

ALLOWANCE = Option("allowance", 2.0, "slack with which a token stands, in nats; 0 is lossless", high=1e6)


@register
class Slack(Windows):
    name = "slack"
    summary = "device drafts windows, cloud keeps what is within an allowance of its own choice"
    source = "relaxed verification under shared noise, as in the design notes"
    drift = "TV <= 1 - exp(-allowance) a token"
    options = (
        ALLOWANCE,
        Option(
            "allowed",
            "all",
            "which tokens have the allowance; with certain, the others have none",
            choices=("all", "certain"),
        ),
    )

    def asks_gate(self, settings: Settings) -> bool:
        return self.values(settings).word("allowed") == "certain"

    def allowances(self, settings: Settings, certain: tuple[bool, ...]) -> list[float]:
        values = self.values(settings)
        everywhere = values.word("allowed") == "all"
        return [values.real("allowance") if everywhere or sure else 0.0 for sure in certain]


@register
class ScdSlack(Scd):
    name = "scd-slack"
    summary = "scd with an allowance: the cloud alone, good guesses stand; no device model"
    source = "relaxed verification under shared noise, as in the design notes"
    exact = False
    drift = Slack.drift
    options = (*Scd.options, ALLOWANCE)

    def allowance(self, settings: Settings) -> float:
        return self.values(settings).real("allowance")
