"""``ciar generate`` on a pipeline without models: what it asks for, writes and prints."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ciar.cli.generate import read_prompts, write_picture
from ciar.cli.inspect import picture_settings
from ciar.cli.main import build_parser
from ciar.errors import CheckpointError, CloudUnavailable, InputError

from .conftest import FakePipeline

Ciar = Callable[..., tuple[int, str, str]]
KEYS = {"prompt", "seed", "strategy", "tokens", "file", "ledger"}
LEDGER_KEYS = {
    *("tokens", "cloud_passes", "token_rows", "cloud_ms", "device_ms", "total_ms", "text_ms", "pixels_ms"),
    *(
        "round_trips",
        "critical_round_trips",
        "bytes_up",
        "bytes_down",
        "device_steps",
        "discarded",
        "decided",
    ),
}


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_picture(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    code, out, err = ciar("generate", "a cat", "--seed", "7")
    assert (code, err) == (0, "")
    assert files(folder) == ["ciar-a-cat-7.png"]
    rows = [line.split() for line in out.splitlines()]
    assert ["seed", "7"] in rows
    assert ["file", "ciar-a-cat-7.png"] in rows
    assert rows[[row[:1] for row in rows].index(["device"])][1:3] == ["2", "50"]
    assert ["total", "12", "ms"] in rows
    loaded = {"backbone": "emoji", "cloud": None, "token": None, "device": "cpu", "device_model": None}
    assert pipeline.loaded == loaded


def test_options_reach_the_pipeline(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    words = "--negative-prompt dull --seed 3 --n 2 --guidance 0 --temperature 0 --top-k 9 --top-p 1"
    words += " --strategy lossless --threshold inf --prefix-rate 0 --window 1024 --action verify"
    words += " --payload features --backbone other --device cuda:1 --cloud wss://host:1 --token s"
    words += " --score random --device-model small"
    assert ciar("generate", "a cat", *words.split())[0] == 0
    loaded = {"backbone": "other", "cloud": "wss://host:1", "token": "s", "device": "cuda:1"}
    assert pipeline.loaded == loaded | {"device_model": "small"}
    assert pipeline.calls == [
        {
            "prompt": "a cat",
            "n": 2,
            "seed": 3,
            "negative_prompt": "dull",
            "guidance_scale": 0.0,
            "temperature": 0.0,
            "top_k": 9,
            "top_p": 1.0,
            "score": "random",
            "threshold": math.inf,
            "prefix_rate": 0.0,
            "window": 1024,
            "action": "verify",
            "payload": "features",
            "options": None,
            "output_type": "pil",
        }
    ]


def test_what_is_left_out_is_the_backbones_default(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    ciar("generate", "a cat", "--seed", "0")
    settings = {k: v for k, v in pipeline.calls[0].items() if k not in ("prompt", "n", "seed", "output_type")}
    assert set(settings.values()) == {None}


def test_options_are_those_of_the_real_pipeline() -> None:
    import inspect

    from ciar.pipeline import Pipeline

    call = inspect.signature(Pipeline.__call__).parameters
    asked = {"negative_prompt", "guidance_scale", "num_images_per_prompt", "seed", "strategy", "temperature"}
    asked |= {
        "top_k",
        "top_p",
        "score",
        "threshold",
        "prefix_rate",
        "window",
        "action",
        "payload",
        "output_type",
    }
    assert asked | {"callback_on_step_end"} <= call.keys()
    assert {"cloud", "token", "device", "device_model"} <= inspect.signature(
        Pipeline.from_pretrained
    ).parameters.keys()


def test_json_is_one_document_and_nothing_else(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    pipeline.warnings = ["The prompt was cut."]
    code, out, err = ciar("generate", "a cat", "a dog", "--n", "2", "--seed", "5", "--json", "--out", "x.png")
    assert code == 0
    assert err == "warning: The prompt was cut.\n" * 2  # once a prompt
    images = json.loads(out)["images"]
    assert [image.keys() for image in images] == [KEYS] * 4
    assert [image["ledger"].keys() for image in images] == [LEDGER_KEYS] * 4
    assert [image["prompt"] for image in images] == ["a cat", "a cat", "a dog", "a dog"]
    assert [image["file"] for image in images] == ["x-1.png", "x-2.png", "x-3.png", "x-4.png"]
    assert [image["tokens"] for image in images] == [[0, 1, 2, 3], [1, 1, 2, 3]] * 2
    assert images[0]["ledger"]["decided"] == {"prefix": 1, "device": 2, "accepted": 0, "replaced": 1}
    assert all((folder / image["file"]).exists() for image in images)


def test_several_pictures_are_a_row_each(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    _, out, _ = ciar("generate", "a cat", "--n", "3", "--seed", "5")
    lines = out.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("ciar-a-cat-5-1.png  a cat")
    assert lines[1].split()[-12:] == ["5", "50", "%", "25", "%", "2", "40", "B", "30", "B", "12", "ms"]


def test_quiet_prints_the_files(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    code, out, err = ciar("generate", "a cat", "--n", "2", "--seed", "1", "--quiet", "--heatmap")
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"ciar-a-cat-1-{i}{suffix}.png" for i in (1, 2) for suffix in ("", "-heat")]
    assert set(out.splitlines()) == set(files(folder))


def test_a_drawn_seed_is_told_and_makes_the_same_pictures(
    ciar: Ciar, pipeline: FakePipeline, folder: Path
) -> None:
    _, out, err = ciar("generate", "a cat", "--json", "--out", "a.png")
    seed = json.loads(out)["images"][0]["seed"]
    assert f"--seed {seed}" in err
    _, table, _ = ciar("generate", "a cat")
    shown = int(next(line for line in table.splitlines() if line.startswith("seed")).split()[1])
    assert [call["seed"] for call in pipeline.calls] == [seed, shown]
    assert seed != shown


def test_the_heat_map_shows_who_decided(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    _, out, _ = ciar("generate", "a cat", "--seed", "1", "--heatmap", "h.png", "--out", "p.png", "--json")
    assert json.loads(out)["images"][0]["heatmap"] == "h.png"
    with Image.open("h.png") as heat, Image.open("p.png") as picture:
        assert picture.size == (8, 8)
        quarter = heat.width // 4
        # Four tokens, two rows: prefix, device / device, replaced; three colours over one grey.
        corners = [heat.getpixel((x * quarter, y * quarter)) for y in (1, 3) for x in (1, 3)]
    assert corners[1] == corners[2]
    assert len(set(corners)) == 3


def test_settings_travel_in_the_picture(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    ciar("generate", "a cat 猫", "--n", "2", "--seed", str(2**64 - 1), "--threshold", "inf", "--out", "p.png")
    found = picture_settings(Path("p-2.png"))
    assert found.pop("version")
    assert found == {
        "prompt": "a cat 猫",
        "seed": 2**64 - 1,
        "image": 1,
        "strategy": "ciar",
        "threshold": "inf",
        "backbone": "emoji",
    }


def test_nothing_is_replaced_without_force(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    (folder / "p.png").write_bytes(b"mine")
    code, _, err = ciar("generate", "a cat", "--out", "p.png")
    assert code == 2
    assert "--force" in err
    assert (folder / "p.png").read_bytes() == b"mine"
    assert pipeline.loaded == {}
    assert ciar("generate", "a cat", "--out", "p.png", "--force")[0] == 0
    assert (folder / "p.png").read_bytes() != b"mine"


@pytest.mark.parametrize(
    "words",
    [
        ["--out", "missing/p.png"],
        ["--out", "missing/"],
        ["--out", "p.txt"],
        ["--heatmap", "missing/h.png"],
        ["--heatmap", "p.png", "--out", "p.png"],
        ["--token", "secret"],
    ],
)
def test_bad_paths_are_refused_before_anything_is_loaded(
    ciar: Ciar, pipeline: FakePipeline, folder: Path, words: list[str]
) -> None:
    code, out, err = ciar("generate", "a cat", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert pipeline.loaded == {}
    assert files(folder) == []


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--seed", ["-1", str(2**64), "1.5", "x", "", "nan", "9" * 5000]),
        ("--n", ["0", "1001", "-3", "1.0"]),
        ("--guidance", ["-0.1", "nan", "inf", "-inf", "x", ""]),
        ("--temperature", ["-1", "nan", "inf"]),
        ("--top-k", ["-1", "2.5"]),
        ("--top-p", ["0", "1.01", "nan", "-0.5"]),
        ("--threshold", ["-0.1", "nan", "-inf"]),
        ("--prefix-rate", ["-0.1", "1.1", "nan"]),
        ("--window", ["0", "1025"]),
        ("--action", ["accept", ""]),
        ("--payload", ["all"]),
        ("--cloud", ["http://h:1", "localhost:80", "ws://", "ws://h:99999", "ws://h:x", "ws://[::1", ""]),
    ],
)
def test_ranges(ciar: Ciar, pipeline: FakePipeline, folder: Path, option: str, values: list[str]) -> None:
    for value in values:
        code, out, err = ciar("generate", "a cat", f"{option}={value}")
        assert (code, out) == (2, ""), value
        assert err.startswith(f"error: {option}: "), err
        assert err.count("\n") == 1
    assert pipeline.loaded == {}


@given(st.integers(0, 2**64 - 1), st.integers(1, 1000), st.floats(0, allow_infinity=False, allow_nan=False))
def test_every_value_in_range_is_taken(seed: int, count: int, number: float) -> None:
    words = ["generate", "x", "--seed", str(seed), "--n", str(count), f"--guidance={number!r}"]
    options = build_parser().parse_args([*words, f"--threshold={number!r}"])
    assert (options.seed, options.n, options.guidance, options.threshold) == (seed, count, number, number)


def test_prompts_from_standard_input(
    ciar: Ciar, pipeline: FakePipeline, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, "\ufeffa cat\r\n\n   \na 猫\n".encode())
    assert ciar("generate", "-", "--seed", "1")[0] == 0
    assert [call["prompt"] for call in pipeline.calls] == ["a cat", "a 猫"]


@pytest.mark.parametrize(
    ("words", "data", "message"),
    [
        ([], b"", "There is no prompt"),
        ([""], b"", "Prompt 1 is empty"),
        (["a", " \t"], b"", "Prompt 2 is empty"),
        (["-"], b"", "holds no prompt"),
        (["-"], b"\n \n", "holds no prompt"),
        (["-"], b"a cat\n\xff\n", "not UTF-8 (byte 6)"),
        (["-", "a cat"], b"x", "Give it alone"),
    ],
)
def test_bad_prompts(monkeypatch: pytest.MonkeyPatch, words: list[str], data: bytes, message: str) -> None:
    stdin(monkeypatch, data)
    with pytest.raises(InputError) as caught:
        read_prompts(words)
    assert message in str(caught.value)


def test_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="closed"):
        read_prompts(["-"])


def test_a_prompt_swallowed_by_heatmap_is_explained(ciar: Ciar, pipeline: FakePipeline) -> None:
    code, _, err = ciar("generate", "--heatmap", "a cat")
    assert code == 2
    assert "--heatmap took 'a cat'" in err


def test_unquoted_words_are_pointed_out(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    _, _, err = ciar("generate", "a", "smiling", "cat", "--seed", "1")
    assert err == "3 prompts of one word each; put quotes around a prompt of several words\n"


def test_prompts_cannot_move_the_cursor(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    pipeline.warnings = ["bad \x1b[31m"]
    _, out, err = ciar("generate", "a \x1b[2J\u202ecat\ud800", "--seed", "1")
    assert not {"\x1b", "\u202e", "\ud800"} & set(out + err)


@pytest.mark.parametrize(
    ("variable", "option", "sent"), [("v", None, "v"), ("v", "o", "o"), ("", None, None)]
)
def test_token_of_option_or_environment(
    ciar: Ciar,
    pipeline: FakePipeline,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    option: str | None,
    sent: str | None,
) -> None:
    monkeypatch.setenv("CIAR_TOKEN", variable)
    words = ["--token", option] if option else []
    ciar("generate", "a cat", "--cloud", "ws://h:1", *words)
    assert pipeline.loaded["token"] == sent


def test_the_environments_token_stays_here_without_a_cloud(
    ciar: Ciar, pipeline: FakePipeline, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CIAR_TOKEN", "v")
    assert ciar("generate", "a cat")[0] == 0
    assert pipeline.loaded["token"] is None


def test_missing_weights_and_a_dead_cloud(ciar: Ciar, pipeline: FakePipeline, folder: Path) -> None:
    pipeline.failures["load"] = CheckpointError("w")
    assert ciar("generate", "a cat") == (4, "", "error: w\n")
    pipeline.failures = {"a dog": CloudUnavailable("gone")}
    code, out, err = ciar("generate", "a cat", "a dog", "--seed", "1", "--json")
    assert (code, out, err) == (6, "", "error: gone\n")
    assert files(folder) == ["ciar-a-cat-1-1.png"]  # what was finished is kept


def test_a_full_disk_leaves_nothing_behind(folder: Path) -> None:
    class FullDisk(Image.Image):
        def convert(self, *args: Any, **options: Any) -> Any:
            return self

        def save(self, path: Any, *args: Any, **options: Any) -> None:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"p\.png could not be written: No space left"):
        write_picture(Path("p.png"), FullDisk())
    assert files(folder) == []


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg", ".webp", ".PNG"])
def test_every_format_that_is_offered_can_be_written(folder: Path, suffix: str) -> None:
    write_picture(Path(f"p{suffix}"), Image.new("RGBA", (8, 8), (10, 200, 30, 255)), {"seed": 1})
    with Image.open(f"p{suffix}") as picture:
        assert picture.size == (8, 8)
    assert files(folder) == [f"p{suffix}"]
