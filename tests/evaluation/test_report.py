"""Result documents: nothing is lost on the way through JSON, and unlike things are not compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ciar.errors import DataError, InputError, NumericalError
from ciar.evaluation.bootstrap import Estimate
from ciar.evaluation.report import (
    Figure,
    MetricPreset,
    Result,
    compare,
    digest_of_files,
    digest_of_prompts,
    markdown,
)
from ciar.version import __version__

PRESET = MetricPreset(
    name="emoji-2000",
    encoder="dual encoder 64 px",
    encoder_digest="e" * 64,
    resize="average to 64 px",
    crop="none",
    reference="training pictures",
    reference_digest="f" * 64,
    options={"captions": 100, "k": 3, "rule": "strict"},
)


def make_result(**changes) -> Result:
    base = Result(
        title="base",
        preset=PRESET,
        count=2000,
        prompts="held-out captions",
        prompts_sha256=digest_of_prompts(["a cat", "a cow"]),
        seeds=[0, 1],
        settings={"strategy": "base", "guidance": 3.0, "top_k": 200},
        weights_digest="a" * 64,
        figures={
            "frechet": Figure(0.05, "squared distance", False, 0.045, 0.056, 0.95),
            "retrieval": Figure(0.64, "share", True),
        },
        not_run={"clip": "ciar eval --metric clip --weights PATH"},
        notes=["The distance is biased upwards."],
    )
    return replace(base, **changes)


def test_document_holds_the_whole_set_up():
    """LlamaGen #48 and others: published figures were not reproduced, for their set-up was not kept."""
    document = json.loads(make_result().to_json())
    assert document["preset"]["resize"] == "average to 64 px"
    assert document["preset"]["crop"] == "none"
    assert document["preset"]["options"] == {"captions": 100, "k": 3, "rule": "strict"}
    assert document["count"] == 2000
    assert document["seeds"] == [0, 1]
    assert document["weights_digest"] == "a" * 64
    assert document["code_version"] == __version__
    assert document["settings"]["strategy"] == "base"
    assert len(document["prompts_sha256"]) == 64


def test_result_is_read_back_as_it_was(tmp_path: Path):
    result = make_result()
    result.save(tmp_path / "some" / "result.json")
    assert Result.load(tmp_path / "some" / "result.json") == result


def test_same_preset_is_compared_figure_by_figure():
    after = make_result(
        title="ciar",
        settings={"strategy": "ciar", "guidance": 3.0, "top_k": 200},
        figures={
            "frechet": Figure(0.06, "squared distance", False),
            "retrieval": Figure(0.66, "share", True),
        },
    )
    found = compare(make_result(), after)
    assert found.changes["frechet"].absolute == pytest.approx(0.01)
    assert found.changes["frechet"].relative == pytest.approx(0.2)
    assert list(found.differences) == ["Setting strategy: 'base' and 'ciar'."]
    lines = found.markdown().splitlines()
    assert lines[0] == "| figure | base | ciar | change | relative |  |"
    assert lines[2] == "| frechet | 0.05 [0.045, 0.056] | 0.06 | +0.01 | +20.0% | worse |"
    assert lines[3].endswith("| better |")


@pytest.mark.parametrize(
    ("part", "value", "word"),
    [
        ("name", "other", "name: 'emoji-2000' and 'other'"),
        ("encoder_digest", "0" * 64, "encoder_digest"),
        ("resize", "LANCZOS to 64 px", "resize: 'average to 64 px' and 'LANCZOS to 64 px'"),
        ("crop", "centre", "crop"),
        ("reference_digest", "0" * 64, "reference_digest"),
        ("options", {"captions": 100, "k": 3, "rule": "inclusive"}, "option rule: 'strict' and 'inclusive'"),
        ("options", {"captions": 100, "k": 3}, "option rule: 'strict' and None"),
    ],
)
def test_different_presets_are_refused(part: str, value, word: str):
    other = make_result(preset=replace(PRESET, **{part: value}))
    with pytest.raises(InputError, match="cannot be compared") as error:
        compare(make_result(), other)
    assert word in str(error.value)


def test_different_prompts_counts_and_units_are_refused():
    base = make_result()
    with pytest.raises(InputError, match="digests differ"):
        compare(base, make_result(prompts_sha256=digest_of_prompts(["a cow", "a cat"])))
    with pytest.raises(InputError, match="pictures: 2000 and 500"):
        compare(base, make_result(count=500))
    with pytest.raises(InputError, match="unit of retrieval: 'share' and 'points'"):
        compare(base, make_result(figures={"retrieval": Figure(64.0, "points", True)}))
    with pytest.raises(InputError, match="no figure in common"):
        compare(base, make_result(figures={"other": Figure(64.0, "points", True)}))


def test_every_difference_is_named_at_once():
    other = make_result(preset=replace(PRESET, crop="centre", resize="none"), count=7)
    with pytest.raises(InputError) as error:
        compare(make_result(), other)
    assert all(word in str(error.value) for word in ("crop", "resize", "pictures"))


def test_differences_that_may_stand_are_told():
    other = make_result(seeds=[5, 6], weights_digest="b" * 64, code_version="9.9")
    told = " ".join(compare(make_result(), other).differences)
    assert "seeds differ" in told
    assert "aaaaaaaaaaaa and bbbbbbbbbbbb" in told
    assert f"{__version__} and 9.9" in told
    assert list(compare(make_result(), make_result()).differences) == []
    # A tuple of seeds is the list that JSON gives back.
    assert list(compare(make_result(), make_result(seeds=(0, 1))).differences) == []


def test_zero_reference_has_no_relative_change():
    zero = make_result(figures={"frechet": Figure(0.0, "squared distance", False)})
    table = compare(zero, make_result()).markdown()
    assert compare(zero, make_result()).changes["frechet"].relative is None
    assert "| +0.05 |  | worse |" in table


def test_table_says_what_was_not_run_and_how_to_run_it():
    table = markdown([make_result(), make_result(title="a | b", not_run={})])
    lines = table.splitlines()
    assert lines[0] == "| run | N | frechet | retrieval | clip |"
    assert lines[2] == "| base | 2000 | 0.05 [0.045, 0.056] | 0.64 | not run |"
    assert lines[3].startswith("| a \\| b | 2000 |")
    assert "clip was not run; to run it: `ciar eval --metric clip --weights PATH`" in table
    assert "guidance 3.0" in table


def test_table_keeps_presets_in_columns_of_their_own():
    other = make_result(title="other", preset=replace(PRESET, crop="centre"), not_run={})
    header, _, first, second, *_ = markdown([make_result(not_run={}), other]).splitlines()
    assert header.count("frechet (emoji-2000, preset ") == 2
    assert first == "| base | 2000 | 0.05 [0.045, 0.056] | 0.64 |  |  |"
    assert second == "| other | 2000 |  |  | 0.05 [0.045, 0.056] | 0.64 |"
    with pytest.raises(InputError):
        markdown([])


def test_estimate_becomes_a_figure():
    figure = Figure.of(Estimate(0.5, 0.4, 0.6, 0.9, 10, 100, 0), "share", True)
    assert figure == Figure(0.5, "share", True, 0.4, 0.6, 0.9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_figures_are_not_written(value: float):
    with pytest.raises(NumericalError, match="frechet"):
        make_result(figures={"frechet": Figure(value, "squared distance", False)}).to_json()
    with pytest.raises(NumericalError):
        make_result(settings={"guidance": value}).to_json()


def broken(**changes) -> str:
    document = json.loads(make_result().to_json())
    return json.dumps({key: value for key, value in (document | changes).items() if value is not None})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        broken(schema=2),
        broken(preset=None),
        broken(preset={"name": "x"}),
        broken(figures=None),
        broken(figures=[1]),
        broken(figures={"frechet": {"value": 1.0, "unit": "x", "higher_is_better": True, "extra": 1}}),
        broken(figures={"frechet": {"unit": "x", "higher_is_better": True}}),
        broken(temperature=1.0),
        broken(count=None),
    ],
)
def test_documents_that_are_none_are_refused(text: str):
    with pytest.raises(DataError):
        Result.from_json(text)


def test_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be read"):
        Result.load(tmp_path / "none.json")


def test_digests_depend_on_names_bytes_and_boundaries(tmp_path: Path):
    one, two = tmp_path / "one.bin", tmp_path / "two.bin"
    one.write_bytes(b"ab")
    two.write_bytes(b"c")
    first = digest_of_files([one, two])
    assert first == digest_of_files([two, one])
    one.write_bytes(b"a")
    two.write_bytes(b"bc")
    assert digest_of_files([one, two]) != first
    with pytest.raises(DataError, match="does not exist"):
        digest_of_files([tmp_path / "none"])
    with pytest.raises(DataError):
        digest_of_files([])
    assert digest_of_prompts(["a", "b"]) != digest_of_prompts(["a b"])
    assert digest_of_prompts(["a", "b"]) != digest_of_prompts(["b", "a"])
