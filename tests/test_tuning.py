"""Tuning: the rule of choice, what is tried, the document, and that nothing is tuned on what is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_tiny_bundle
from tiny_run import write_tiny_run, write_wide_bundle

from ciar import tuning as tuning_module
from ciar.cli.main import main
from ciar.compare import parse_run, runs_of
from ciar.decoding.strategy import Strategy, all_strategies, get_strategy
from ciar.errors import DataError, InputError
from ciar.models.bundle import Bundle
from ciar.models.text import StaticTextEncoder
from ciar.quality import Judge, evaluation_prompts
from ciar.tuning import Trial, candidates, choose, load_settings, prompts_digest, taken_over, tune


def trial(label: str, cost: float, loss: float) -> Trial:
    return Trial(label, cost, 0.0, cost, loss)


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "chosen"),
    [(0.05, "b"), (0.2, "c"), (0.01, "a"), (-0.5, "a")],
)
def test_the_cheapest_within_the_bound(bound: float, chosen: str) -> None:
    """Beyond every bound the least loss is taken."""
    tried = [trial("a", 1.0, 0.0), trial("b", 0.5, 0.05), trial("c", 0.2, 0.2)]
    assert choose(tried, bound).label == chosen


def test_equals_are_decided_by_loss_and_then_by_order() -> None:
    assert choose([trial("a", 0.5, 0.02), trial("b", 0.5, 0.01)], 0.1).label == "b"
    assert choose([trial("default", 0.5, 0.0), trial("other", 0.5, 0.0)], 0.1).label == "default"


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(-1.0, 1.0)), min_size=1, max_size=8),
    st.floats(-1.0, 1.0),
)
def test_no_other_choice_is_better(figures: list[tuple[float, float]], bound: float) -> None:
    tried = [trial(str(i), cost, loss) for i, (cost, loss) in enumerate(figures)]
    best = choose(tried, bound)
    if best.loss <= bound:
        assert all(best.cost <= one.cost for one in tried if one.loss <= bound)
    else:
        assert all(one.loss > bound and one.loss >= best.loss for one in tried)


@pytest.mark.parametrize("strategy", all_strategies(), ids=lambda one: one.name)
def test_every_declared_setting_can_be_asked_for(strategy: Strategy) -> None:
    labels = candidates(strategy)
    assert labels[0] == strategy.name
    assert len(set(labels)) == len(labels)
    found = [parse_run(label) for label in labels]
    assert all(run.settings["strategy"] == strategy.name for run in found)
    assert len({str((run.settings, run.threshold, run.score)) for run in found}) == len(labels)


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuning") / "run"
    write_tiny_run(folder)
    return folder


def test_calibration_and_comparison_share_no_name(work: Path) -> None:
    text = StaticTextEncoder.load(work / "text")
    compared = set(evaluation_prompts(work / "data", 500, text)[1])
    tuned = set(evaluation_prompts(work / "data", 500, text, calibration=True)[1])
    assert tuned
    assert compared
    assert not tuned & compared


def test_exact_strategies_are_chosen_by_their_cost_alone(work: Path, tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    text = StaticTextEncoder.load(work / "text")
    the_judge = Judge.from_data(work / "dual-encoder", text, work / "data")
    prompts, names = evaluation_prompts(work / "data", 16, text, calibration=True)
    document = tune(Bundle(tmp_path), the_judge, prompts, names, ["base", "lossless", "code"], row_cost=0.0)
    assert set(document["strategies"]) == {"lossless", "code"}
    assert document["prompts_sha256"] == prompts_digest(prompts)
    assert document["names"] == sorted(set(names))
    lossless = document["strategies"]["lossless"]
    assert lossless["within"]
    assert [one["loss"] for one in lossless["trials"]] == [0.0] * len(lossless["trials"])
    cheapest = min(lossless["trials"], key=lambda one: one["passes"])
    assert lossless["setting"] == cheapest["label"]
    assert cheapest["cost"] == cheapest["passes"] < 1.0
    for one in document["strategies"]["code"]["trials"]:
        assert one["loss"] == one["measured"][0]
    json.dumps(document, allow_nan=False)


def test_tuning_goes_on_where_it_was_stopped(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each strategy is kept as soon as it is tried; only what was made the same way is taken over."""
    write_tiny_bundle(tmp_path)
    text = StaticTextEncoder.load(work / "text")
    the_judge = Judge.from_data(work / "dual-encoder", text, work / "data")
    prompts, names = evaluation_prompts(work / "data", 16, text, calibration=True)
    bundle = Bundle(tmp_path)
    kept: list[Any] = []

    def keep(document: dict[str, Any]) -> None:
        kept.append(json.loads(json.dumps(document)))

    def tuned(strategies: list[str], **values: Any) -> dict[str, Any]:
        return tune(bundle, the_judge, prompts, names, strategies, keep=keep, **values)

    first = tuned(["sled", "code"])
    assert [list(one["strategies"]) for one in kept] == [["sled"], ["sled", "code"]]
    assert kept[1] == json.loads(json.dumps(first))
    made: list[str] = []
    judge_each = tuning_module.judge_each

    def counted(*values: Any, **named: Any) -> Any:
        made.extend(run.label for run in values[4])
        return judge_each(*values, **named)

    monkeypatch.setattr(tuning_module, "judge_each", counted)
    assert tuned(["sled", "code"], before=kept[1]) == kept[1]
    assert made == []
    assert json.loads(json.dumps(tuned(["sled", "code"], before=kept[0]))) == kept[1]
    assert made == ["base", *candidates(get_strategy("code"))]
    how = {name: value for name, value in first.items() if name != "strategies"}
    assert taken_over(how, kept[1]) == kept[1]["strategies"]
    for changed in (
        *({"weights": "other"}, {"seed": 1}, {"bound": 0.5}, {"row_cost": 0.5}, {"prompts_sha256": "other"}),
        *({"strategies": {"sled": {"trials": []}}}, {"strategies": {"unknown": kept[0]}}, {"strategies": 3}),
    ):
        assert taken_over(how, kept[1] | changed) == {}
    assert taken_over(how | {"weights": ""}, kept[1] | {"weights": ""}) == {}


def written(path: Path, **changes: object) -> Path:
    strategies = {"lossless": {"setting": "lossless:window=8"}, "code": {"setting": "code"}}
    path.write_text(json.dumps({"weights": "w", "names": ["cat"], "strategies": strategies} | changes))
    return path


def test_names_alone_take_the_tuned_settings(tmp_path: Path) -> None:
    tuned = load_settings(written(tmp_path / "t.json"), weights="w", names=["dog"])
    found = [run.label for run in runs_of("lossless code lossless:window=4 scd", None, tuned)]
    assert found == ["base", "lossless:window=8", "code", "lossless:window=4", "scd"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"weights": "other"}, InputError, "tuned for other weights"),
        ({"names": ["cat", "dog"]}, InputError, "on 1 names that are compared"),
        ({"strategies": []}, DataError, "no tuned settings"),
        ({"strategies": {"scd": {"setting": "code"}}}, DataError, "of another strategy"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load_settings(written(tmp_path / "t.json", **changes), weights="w", names=["dog"])


def test_missing_and_damaged_files_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    for name in ("none.json", "bad.json"):
        with pytest.raises(DataError, match="ciar compare --tune"):
            load_settings(tmp_path / name, weights="w", names=[])
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    for name in ("", "picture"):
        with pytest.raises(DataError, match=r"cannot be read|no tuned settings"):
            load_settings(tmp_path / name, weights="w", names=[])


def test_the_command_tunes_and_compares(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wide_bundle(tmp_path / "bundle")
    asked = ["--backbone", str(tmp_path / "bundle"), "--work", str(work), "--images", "16", "--seed", "3"]
    file = tmp_path / "new" / "tuned.json"
    assert main(["compare", *asked, "--strategies", "sled", "--tune", str(file)]) == 0
    assert "sled" in capsys.readouterr().out
    setting = json.loads(file.read_text())["strategies"]["sled"]["setting"]
    out = tmp_path / "out"
    words = ["--strategies", "sled", "--settings", str(file), "--timed", "1", "--out", str(out)]
    assert main(["compare", *asked, *words]) == 0
    document = json.loads((out / "compare.json").read_text())
    assert [row["label"] for row in document["rows"]] == ["base", setting]
    assert document["tuned"] == {"sled": setting}
    assert len(document["prompts_sha256"]) == 64
    assert main(["compare", *asked, "--strategies", "sled:window=2", "--tune", str(file)]) == 2
    assert "give names alone" in capsys.readouterr().err
