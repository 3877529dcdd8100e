"""``slack`` and ``scd-slack``: every token is checked, and stands when it is good enough.

A token's slack says how far it is from the cloud's own choice under the picture's noise. Allowing a
little of it at every token keeps drafts that differ from plain AR's without being worse by much.
"""

from __future__ import annotations

from ciar.decoding.budget import Budget, Judge, budgeted, within
from ciar.decoding.options import Option
from ciar.decoding.strategies.lossless import Windows
from ciar.decoding.strategies.scd import Scd
from ciar.decoding.strategy import CloudRun, register
from ciar.protocol.messages import Settings

ALLOWANCE = Option("allowance", 2.0, "slack with which a token stands, in nats; 0 is lossless", high=1e6)
BUDGET = Option(
    "budget", 0.1, "tokens other than the cloud's choice that may stand, as a share of the picture", high=1
)


@register
class Slack(Windows):
    name = "slack"
    summary = "device drafts windows, cloud keeps what is within an allowance of its own choice"
    source = "relaxed verification under shared noise, as in the design notes"
    drift = "TV <= 1 - exp(-allowance) a token"
    grid = ("window=16", "window=32", "window=32,allowance=1", "window=32,allowance=3")
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
    grid = ("window=16", "window=32", "window=32,allowance=1", "window=32,allowance=3")
    options = (
        *Scd.options,
        Option(
            "policy",
            "slack",
            "what a token is allowed: the allowance, or what is left of a budget, and no more than it",
            choices=("slack", "budget"),
        ),
        ALLOWANCE,
        BUDGET,
    )

    def judge(self, run: CloudRun) -> Judge:
        values = self.values(run.settings)
        allowance = values.real("allowance")
        if values.word("policy") == "slack":
            return within([allowance] * run.total)
        run.kept = Budget(values.real("budget"), run.total - len(run.tokens), allowance)
        return budgeted(run.kept)
