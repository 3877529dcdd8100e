"""``ciar generate --set``: options of strategies on the command line, in the pipeline and in the picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ciar.cli.inspect import picture_settings
from ciar.errors import InputError
from ciar.models.bundle import Bundle
from ciar.pipeline import Pipeline

from .conftest import FakePipeline

Ciar = Callable[..., tuple[int, str, str]]


def test_options_reach_the_pipeline_and_the_picture(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    words = ["--strategy", "slack", "--set", "allowance=2.5", "--set", "allowed=certain", "--set", "n=3"]
    assert ciar("generate", "a cat", "--seed", "1", *words)[0] == 0
    given = {"allowance": 2.5, "allowed": "certain", "n": 3}
    assert pipeline.calls[0]["options"] == given
    assert type(pipeline.calls[0]["options"]["n"]) is int
    assert picture_settings(folder / "ciar-a-cat-1.png")["options"] == given
    assert "options" in inspect.signature(Pipeline.__call__).parameters


@pytest.mark.parametrize("words", [["allowance"], ["=2"], ["allowance="], [""]])
def test_what_is_no_option(ciar: Ciar, pipeline: FakePipeline, folder: Path, words: list[str]) -> None:
    code, out, err = ciar("generate", "a cat", "--set", *words)
    assert (code, out) == (2, "")
    assert "NAME=VALUE" in err
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("slack", {"alowance": 1.0}, "Did you mean allowance"),
        ("slack", {"allowance": -1.0}, "must be a number from 0"),
        ("base", {"allowance": 1.0}, "no option 'allowance'"),
        ("base", {"entropy_heat": "hot"}, "must be a number"),
    ],
)
def test_the_pipeline_refuses(
    tiny_bundle: Bundle, strategy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Pipeline(tiny_bundle)("a cat", strategy=strategy, options=options)


def test_an_option_changes_the_picture(tiny_bundle: Bundle) -> None:
    pipe = Pipeline(tiny_bundle)

    def made(**values: Any) -> list[int]:
        return pipe("a cat", seed=4, output_type="tokens", **values).tokens[0]

    exact = made(strategy="base")
    assert made(strategy="slack", options={"allowance": 0}) == exact
    assert made(strategy="slack", options={"allowance": 50.0}) != exact
    assert made(strategy="scd", options={"guess": "random"}) == exact
