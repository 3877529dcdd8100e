"""``strategy="auto"`` through the pipeline and the command line, on the tiny backbone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ciar.cli.inspect import picture_settings
from ciar.cli.main import main
from ciar.cloud.sessions import Cloud
from ciar.decoding.strategy import Proposal, all_strategies
from ciar.device.session import DeviceSession
from ciar.errors import CloudUnavailable, InputError
from ciar.models.bundle import Bundle
from ciar.pipeline import Pipeline
from ciar.planner.choose import Choice
from ciar.planner.conditions import Wish
from ciar.planner.cost import Prediction
from ciar.planner.measure import Metered
from ciar.planner.planner import Planner
from ciar.planner.plans import PLANS, Plan
from ciar.planner.probe import probe
from ciar.protocol.messages import Open, Settings
from ciar.transport.inprocess import InProcessTransport
from ciar.transport.threaded import ThreadedTransport

PROMPTS = ["a cat", "a red car", "a dog"]
NAMES = {strategy.name for strategy in all_strategies()}
BY_NAME = {plan.name: plan for plan in PLANS}


class Nowhere:
    """A cloud that cannot be reached."""

    def connect(self) -> Any:
        raise CloudUnavailable("No server answers at ws://nowhere.")


@pytest.fixture(params=["turns", "threads"])
def pipe(request: pytest.FixtureRequest, tiny_bundle: Bundle, tiny_cloud: Cloud) -> Pipeline:
    inner = InProcessTransport if request.param == "turns" else ThreadedTransport
    return Pipeline(tiny_bundle, inner(tiny_cloud))


def test_exact_pictures_are_plain_ar(pipe: Pipeline) -> None:
    base = pipe(PROMPTS, seed=3, strategy="base", output_type="tokens")
    found = pipe(PROMPTS, seed=3, strategy="auto", wish="exact", output_type="tokens")
    assert found.tokens == base.tokens
    for name, plans, why, ledger in zip(found.strategies, found.plans, found.why, found.ledgers, strict=True):
        assert NAMES.issuperset(name.split(", then "))
        assert name.split(", then ")[0] == plans[0].strategy
        assert why.startswith(plans[0].name)
        assert len(ledger.decided) == ledger.tokens == 16
    now = pipe.planner.conditions()
    assert min(now.pass_ms, now.step_ms) > 0
    assert pipe.planner.together == isinstance(pipe.transport, InProcessTransport)


def test_the_probe_is_the_beginning_of_the_picture(tiny_bundle: Bundle, tiny_cloud: Cloud) -> None:
    pipe = Pipeline(tiny_bundle)
    base = pipe("a cat", seed=3, strategy="base", output_type="tokens").tokens[0]
    planner = Planner(16)
    settings = Settings("base", seed=3)
    probed = probe(Metered(InProcessTransport(tiny_cloud), planner.meter), Open("tiny", "a cat", settings))
    assert probed.tokens == base[: len(probed.tokens)]
    assert 4 < len(probed.tokens) < 16
    assert planner.meter.knows_cloud
    assert probed.ledger.cloud_passes > 3
    assert planner.meter.conditions(16, together=True).prefill_ms > 0


NOTHING = Prediction(0, 0, 0, 0, 0, 0, 0)


# Not ``ciar-stream``, whose relaxed pictures depend on what arrives when.
@pytest.mark.parametrize(
    ("wish", "name"),
    [
        *(("balanced", "slack-16"), ("balanced", "scd-slack-8")),
        *(("cheapest", "scd-slack-4-16"), ("cheapest", "ciar")),
    ],
)
def test_other_wishes_give_what_the_named_plan_gives(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, wish: Wish, name: str
) -> None:
    plan = BY_NAME[name]
    assert plan.permits(wish)
    monkeypatch.setattr(Planner, "choose", lambda self, wish: Choice(plan, NOTHING, "chosen", ()))
    monkeypatch.setattr(Planner, "review", lambda self, wish, plan, done: None)
    pipe = Pipeline(tiny_bundle)
    found = pipe(PROMPTS, seed=5, strategy="auto", wish=wish, output_type="tokens")
    again = pipe(
        PROMPTS,
        seed=5,
        strategy=plan.strategy,
        window=plan.window,
        options=dict(plan.options),
        output_type="tokens",
    )
    assert found.plans == [(plan,)] * len(PROMPTS)
    assert found.tokens == again.tokens


def test_offline_needs_no_cloud_and_the_others_do(tiny_bundle: Bundle) -> None:
    pipe = Pipeline(tiny_bundle, Nowhere())
    alone = pipe("a cat", seed=3, strategy="auto", wish="offline", output_type="tokens")
    assert alone.strategies == ["device-only"]
    assert alone.tokens == pipe("a cat", seed=3, strategy="device-only", output_type="tokens").tokens
    for wish in ("exact", "balanced", "cheapest"):
        with pytest.raises(CloudUnavailable, match=r"No server answers .* wish for offline"):
            pipe("a cat", strategy="auto", wish=wish)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"strategy": "auto", "wish": "fast"}, "no wish 'fast'"),
        ({"strategy": "base", "wish": "exact"}, "A wish is for strategy 'auto'"),
        ({"strategy": "auto", "window": 8}, "chooses the window itself"),
        ({"strategy": "auto", "options": {"allowance": 1}}, "'auto' has no option 'allowance'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tiny_bundle: Bundle, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        Pipeline(tiny_bundle)("a cat", **values)


def test_common_options_reach_every_plan(tiny_bundle: Bundle) -> None:
    pipe = Pipeline(tiny_bundle)
    options = {"entropy_heat": 2.5}
    base = pipe("a cat", seed=3, strategy="base", options=options, output_type="tokens")
    found = pipe("a cat", seed=3, strategy="auto", wish="exact", options=options, output_type="tokens")
    assert found.tokens == base.tokens
    assert found.tokens != pipe("a cat", seed=3, strategy="base", output_type="tokens").tokens


STARTS = (
    Plan("lossless-3", "lossless", "split", 3, exact=True),
    Plan("ciar-stream", "ciar-stream", "split", 4, (("lag", 4), ("burst", 2)), exact=True, overlaps=True),
)


@pytest.mark.parametrize("start", STARTS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("end", ["base", "scd-8", "lossless-16", "ciar-stream"])
def test_a_picture_that_changes_its_plan_is_the_same(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, start: Plan, end: str
) -> None:
    monkeypatch.setattr(Planner, "needs_probe", lambda self, wish: False)
    monkeypatch.setattr(Planner, "choose", lambda self, wish: Choice(start, NOTHING, "first", ()))
    monkeypatch.setattr(
        Planner,
        "review",
        lambda self, wish, plan, done: (
            Choice(BY_NAME[end], NOTHING, f"at {done}", ()) if plan is start and done >= 4 else None
        ),
    )
    base = pipe("a cat", seed=3, strategy="base", output_type="tokens")
    found = pipe("a cat", seed=3, strategy="auto", wish="exact", output_type="tokens")
    assert found.tokens == base.tokens
    assert found.plans == [(start, BY_NAME[end])]
    names = dict.fromkeys((start.strategy, BY_NAME[end].strategy))
    assert found.strategies == [", then ".join(names)]
    (ledger,) = found.ledgers
    assert len(ledger.decided) == 16
    assert ledger.round_trips >= 2  # both openings
    assert ledger.bytes_up > 0
    assert found.why[0].startswith("first; at ")


def test_a_caller_may_stop(tiny_bundle: Bundle) -> None:
    seen: list[int] = []

    def stop(pipe: Pipeline, step: int, info: dict[str, Any]) -> bool:
        seen.append(step)
        return False

    out = Pipeline(tiny_bundle)("a cat", seed=1, strategy="auto", callback_on_step_end=stop)
    assert (out.tokens, len(seen)) == ([], 1)


def test_a_cold_first_step_is_not_the_price_of_a_step(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that were timed are in the ledger, and a plan without the device would never correct them."""
    monkeypatch.setattr(Planner, "choose", lambda self, wish: Choice(BY_NAME["base"], NOTHING, "base", ()))
    pipe = Pipeline(tiny_bundle)
    waits_s = [0.2]

    def cold(*values: Any) -> DeviceSession:
        session = DeviceSession(*values)
        if session.proposer is not None:
            propose = session.proposer.propose

            def slowly(*asked: Any) -> Proposal:
                time.sleep(waits_s.pop() if waits_s else 0.0)
                return propose(*asked)

            monkeypatch.setattr(session.proposer, "propose", slowly)
        return session

    monkeypatch.setattr(pipe, "session_of", cold)
    out = pipe("a cat", num_images_per_prompt=2, seed=1, strategy="auto", wish="exact", output_type="tokens")
    assert 0 < pipe.planner.meter.step_ms < 20
    first, second = out.ledgers
    assert (first.device_steps, first.discarded) == (7, 8)  # a token behind the last step is never fed
    assert first.device_ms > 200
    assert (second.device_steps, second.discarded, second.device_ms) == (0, 0, 0.0)


def test_a_table_beside_the_backbone_is_read(tiny_folder: Path, tiny_bundle: Bundle) -> None:
    path = tiny_folder / "agreement.json"
    try:
        path.write_text(json.dumps({"plans": {"base": {"passes": 1, "rows": 1, "trips": 7}}}))
        assert Pipeline(tiny_bundle).planner.table.plans["base"].trips == 7
        path.write_text("{")
        with pytest.raises(InputError, match=r"agreement\.json is no JSON"):
            _ = Pipeline(tiny_bundle).planner
        path.chmod(0)
        if not os.access(path, os.R_OK):  # root reads everything
            with pytest.raises(InputError, match=r"agreement\.json cannot be read"):
                _ = Pipeline(tiny_bundle).planner
    finally:
        path.unlink()


@pytest.fixture
def ciar(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["generate", "a cat", "--seed", "3", "--backbone", str(tiny_folder), *words])
        return (code, *capsys.readouterr())

    return run


def test_the_command_names_what_really_ran(ciar: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = ciar("--strategy", "auto", "--wish", "exact", "--json", "--out", "a.png", "--heatmap")
    assert code == 0
    (picture,) = json.loads(out)["images"]
    assert NAMES.issuperset(picture["strategy"].split(", then "))
    assert err.startswith("plan: ")
    recorded = picture_settings(Path("a.png"))
    assert recorded["strategy"] == picture["strategy"]
    _, out, _ = ciar("--strategy", "base", "--json", "--out", "b.png")
    assert json.loads(out)["images"][0]["tokens"] == picture["tokens"]


def test_the_command_refuses_a_wish_without_auto(ciar: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = ciar("--wish", "exact")
    assert (code, "--wish is for --strategy auto" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(("--window", "8"), "chooses the window itself"), (("--set", "allowance=1"), "no option 'allowance'")],
)
def test_the_command_refuses_what_auto_decides_before_a_model_is_loaded(
    ciar: Callable[..., tuple[int, str, str]], words: tuple[str, ...], sentence: str
) -> None:
    code, _, err = ciar("--strategy", "auto", *words, "--backbone", "nowhere")
    assert (code, sentence in err) == (2, True)
