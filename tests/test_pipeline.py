"""The pipeline: what users call. Each picture equals its lone run; bad input is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ciar
from ciar.cloud.sessions import Cloud
from ciar.decoding.strategy import all_strategies
from ciar.errors import CiarError, InputError
from ciar.models.bundle import Bundle
from ciar.models.vq import to_uint8
from ciar.pipeline import Pipeline, PipelineOutput, check_settings, draw_seed
from ciar.protocol.messages import Settings
from ciar.transport.inprocess import InProcessTransport

LONG = "a red car with a smiling dog sunglasses"


@pytest.fixture(scope="module")
def pipe(tiny_bundle: Bundle) -> Pipeline:
    return Pipeline(tiny_bundle)


def tokens_of(pipe: Pipeline, prompt: Any = "a red cat", **values: Any) -> list[list[int]]:
    return pipe(prompt, output_type="tokens", **({"seed": 3, "threshold": 1.0} | values)).tokens


# --- what comes out ---------------------------------------------------------------------------------


def test_pictures_tokens_and_ledgers_belong_together(pipe: Pipeline) -> None:
    out = pipe(["a cat", "a dog"], num_images_per_prompt=2, seed=9)
    assert out.prompts == ["a cat", "a cat", "a dog", "a dog"]
    assert out.seeds == [9] * 4
    assert out.strategies == ["ciar"] * 4
    assert [picture.size for picture in out.images] == [(16, 16)] * 4
    assert all(isinstance(picture, Image.Image) for picture in out.images)
    assert [len(tokens) for tokens in out.tokens] == [16] * 4
    for ledger in out.ledgers:
        assert ledger.total_ms >= ledger.pixels_ms > 0
        assert ledger.text_ms > 0
        assert ledger.total_ms >= ledger.device_ms + ledger.cloud_ms
    for tokens, picture in zip(out.tokens, out.images, strict=True):
        with torch.no_grad():
            pixels = to_uint8(pipe.bundle.vq.decode(torch.tensor([tokens])))[0].numpy()
        np.testing.assert_array_equal(np.asarray(picture), pixels)


def test_output_types(pipe: Pipeline) -> None:
    arrays = pipe("a cat", seed=1, output_type="np").images
    assert (arrays[0].shape, arrays[0].dtype) == ((16, 16, 3), np.uint8)
    pictures = pipe("a cat", seed=1, output_type="pil").images
    np.testing.assert_array_equal(np.asarray(pictures[0]), arrays[0])
    assert pipe("a cat", seed=1, output_type="tokens").images == []


@pytest.mark.parametrize("strategy", [s.name for s in all_strategies()])
def test_the_same_seed_gives_the_same_picture(pipe: Pipeline, strategy: str) -> None:
    first = tokens_of(pipe, strategy=strategy)
    torch.manual_seed(0)  # nothing may read the global generator
    again = tokens_of(pipe, strategy=strategy)
    assert first == again
    assert first != tokens_of(pipe, strategy=strategy, seed=4)


@pytest.mark.parametrize("strategy", [s.name for s in all_strategies()])
def test_each_picture_of_a_call_equals_its_lone_run(pipe: Pipeline, strategy: str) -> None:
    prompts = ["cat", LONG, "a dog"]
    together = tokens_of(pipe, prompts, strategy=strategy)
    assert together == [tokens_of(pipe, prompt, strategy=strategy)[0] for prompt in prompts]
    assert together == tokens_of(pipe, prompts[::-1], strategy=strategy)[::-1]


def test_seeds_in_any_order(pipe: Pipeline) -> None:
    """Known fault A6."""
    forward = [tokens_of(pipe, seed=seed) for seed in range(8)]
    backward = [tokens_of(pipe, seed=seed) for seed in reversed(range(8))]
    assert forward == backward[::-1]
    assert len({tuple(tokens[0]) for tokens in forward}) == 8


def test_pictures_of_one_prompt_differ(pipe: Pipeline) -> None:
    four = tokens_of(pipe, num_images_per_prompt=4)
    assert len({tuple(tokens) for tokens in four}) == 4
    assert four[:2] == tokens_of(pipe, num_images_per_prompt=2)


def test_lossless_is_base_through_the_front_door(pipe: Pipeline) -> None:
    for window in (1, 3, 16, 1000):
        found = tokens_of(pipe, ["cat", LONG], strategy="lossless", window=window, negative_prompt="dog")
        assert found == tokens_of(pipe, ["cat", LONG], strategy="base", negative_prompt="dog")


def test_settings_are_heard(pipe: Pipeline) -> None:
    """No argument is swallowed (known fault C8): each of them changes the tokens or the ledger."""
    plain = tokens_of(pipe, strategy="base")
    for change in (
        {"guidance_scale": 0.0},
        {"guidance_scale": 7.5},
        {"negative_prompt": "dog"},
        {"temperature": 0.2},
        {"top_k": 1},
        {"top_p": 0.05},
        {"seed": 4},
    ):
        assert tokens_of(pipe, **({"strategy": "base"} | change)) != plain, change
    for name, low, high in (
        ("threshold", 0.0, math.inf),
        ("prefix_rate", 0.0, 0.5),
        ("injection", False, True),
        ("action", "replace", "verify"),
    ):
        prompts = [LONG, "cat", "dog", "a red car", "sun", "sunglasses"]
        found = [tokens_of(pipe, prompts, seed=1, **{name: value}) for value in (low, high)]
        assert found[0] != found[1], name
    with pytest.raises(TypeError):
        pipe("a cat", guidance=3.0)  # type: ignore[call-arg]


def test_defaults_are_the_backbones(pipe: Pipeline) -> None:
    defaults = pipe.bundle.defaults
    explicit = pipe(
        "a cat",
        seed=2,
        guidance_scale=defaults.guidance,
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
        threshold=0.5,
        prefix_rate=defaults.prefix_rate,
        window=defaults.window,
        injection=defaults.injection,
        output_type="tokens",
    )
    assert pipe("a cat", seed=2, output_type="tokens").tokens == explicit.tokens


def test_temperature_0_ignores_the_seed(pipe: Pipeline) -> None:
    """Known fault B6."""
    found = [tokens_of(pipe, strategy="base", temperature=0.0, seed=seed) for seed in range(3)]
    assert found[0] == found[1] == found[2]
    assert tokens_of(pipe, strategy="lossless", temperature=0.0, seed=8) == found[0]
    assert tokens_of(pipe, strategy="base", top_k=1, seed=5) == found[0]


def test_guidance_1_computes_no_unconditional_row(pipe: Pipeline) -> None:
    guided = pipe("a cat", seed=1, strategy="base", guidance_scale=3.0, output_type="tokens").ledgers[0]
    plain = pipe("a cat", seed=1, strategy="base", guidance_scale=1.0, output_type="tokens").ledgers[0]
    assert (guided.token_rows, plain.token_rows) == (32, 16)


# --- seeds -------------------------------------------------------------------------------------------


def test_a_generator_draws_the_seed(pipe: Pipeline) -> None:
    seeds = [
        pipe("a cat", generator=torch.Generator().manual_seed(s), output_type="tokens").seeds[0]
        for s in (1, 1, 2)
    ]
    assert seeds[0] == seeds[1] != seeds[2]
    assert tokens_of(pipe, seed=seeds[0]) == tokens_of(
        pipe, seed=None, generator=torch.Generator().manual_seed(1)
    )


def test_without_a_seed_every_call_differs() -> None:
    assert len({draw_seed(None, None) for _ in range(20)}) == 20


def test_the_largest_seed(pipe: Pipeline) -> None:
    assert tokens_of(pipe, seed=2**64 - 1) != tokens_of(pipe, seed=0)


# --- callbacks ---------------------------------------------------------------------------------------


def test_callback_hears_every_step(pipe: Pipeline) -> None:
    heard: list[tuple[int, int, int]] = []

    def note(caller: Pipeline, step: int, info: dict[str, Any]) -> None:
        assert caller is pipe
        assert (info["total"], info["images"]) == (16, 2)
        assert len(info["ledger"].decided) == step == info["done"]
        heard.append((info["image"], step, info["total"]))

    pipe(["a cat", "a dog"], seed=1, strategy="device-only", callback_on_step_end=note)
    assert heard == [(image, step, 16) for image in (0, 1) for step in range(1, 17)]


def test_a_callback_that_says_false_stops_cleanly(pipe: Pipeline) -> None:
    """The picture that was stopped is left out; those before it stay."""

    def stop(caller: Pipeline, step: int, info: dict[str, Any]) -> bool:
        return (info["image"], step) < (1, 5)

    out = pipe("a cat", num_images_per_prompt=3, seed=1, callback_on_step_end=stop)
    assert len(out.images) == len(out.tokens) == len(out.ledgers) == 1
    assert out.tokens == tokens_of(pipe, "a cat", seed=1, threshold=0.5)


def test_an_exception_in_a_callback_is_the_users(pipe: Pipeline) -> None:
    def fail(caller: Pipeline, step: int, info: dict[str, Any]) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pipe("a cat", seed=1, callback_on_step_end=fail)
    assert len(tokens_of(pipe)) == 1


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", "  ", "\x00", "cat\ud800", ["a cat", ""], 5, ["a cat", None], None])
def test_prompts_that_are_none(pipe: Pipeline, prompt: Any) -> None:
    with pytest.raises(InputError):
        pipe(prompt, seed=1)


@pytest.mark.parametrize(
    "prompt", ["cat \U0001f431", "cat\x00dog", "\u202ecat", "cat " * 2500, " " * 9000 + "cat"]
)
def test_odd_prompts_that_work(pipe: Pipeline, prompt: str) -> None:
    out = pipe(prompt, seed=1, output_type="tokens")
    assert len(out.tokens[0]) == 16
    assert bool(out.warnings) == (prompt.count("cat") > 8 or "\U0001f431" in prompt)


def test_a_prompt_of_10000_characters_is_cut_the_same_on_both_sides(pipe: Pipeline) -> None:
    out = pipe("cat " * 2500, negative_prompt="dog " * 2500, seed=1, strategy="base", output_type="tokens")
    assert "first 2000 characters" in out.warnings[0]
    short = pipe("cat " * 8, negative_prompt="dog " * 8, seed=1, strategy="base", output_type="tokens")
    assert out.tokens == short.tokens


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "magic"}, "The strategies are: .*base, ciar"),
        ({"guidance_scale": -1.0}, "guidance_scale is -1.0; it must be 0 or more"),
        ({"guidance_scale": math.nan}, "guidance_scale"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"threshold": math.nan}, "threshold"),
        ({"prefix_rate": 1.5}, "prefix_rate"),
        ({"window": 0}, "window is 0"),
        ({"window": 5000}, "window"),
        ({"action": "guess"}, "replace or verify"),
        ({"payload": "pictures"}, "ids or features"),
        ({"output_type": "gif"}, "pil, np or tokens"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt is 0; it must be from 1 to 1000"),
        ({"num_images_per_prompt": 1001}, "num_images_per_prompt"),
        ({"num_images_per_prompt": True}, "num_images_per_prompt"),
        ({"num_images_per_prompt": 1.5}, "num_images_per_prompt"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"seed": True}, "seed"),
    ],
)
def test_bad_arguments_are_named(pipe: Pipeline, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipe("a cat", **({"seed": 1} | values))


def test_no_prompts_at_all(pipe: Pipeline) -> None:
    with pytest.raises(InputError, match="prompts is 0"):
        pipe([])


@pytest.mark.parametrize("field", ["guidance", "prefix_rate", "temperature", "top_p"])
def test_no_setting_may_be_nan(field: str) -> None:
    with pytest.raises(InputError):
        check_settings(Settings("base", **{field: math.nan}))  # type: ignore[arg-type]


def test_unknown_backbone_and_device() -> None:
    with pytest.raises(InputError, match="no backbone 'nothing'"):
        Pipeline.from_pretrained("nothing")
    with pytest.raises(InputError, match="Device 'abacus'"):
        Pipeline.from_pretrained("emoji", device="abacus")


# --- placement -------------------------------------------------------------------------------------------


def test_from_a_folder(tiny_folder: Any, pipe: Pipeline) -> None:
    other = ciar.Pipeline.from_pretrained(tiny_folder)
    assert tokens_of(other) == tokens_of(pipe)
    assert tokens_of(Pipeline.from_pretrained(str(tiny_folder))) == tokens_of(pipe)


def test_device_only_opens_no_connection(tiny_bundle: Bundle) -> None:
    class Unplugged:
        def connect(self) -> Any:
            raise AssertionError("a strategy without a cloud must not connect")

    pipe = Pipeline(tiny_bundle, Unplugged())
    assert len(tokens_of(pipe, strategy="device-only")[0]) == 16


def test_the_in_process_cloud_is_made_once_and_when_needed(tiny_bundle: Bundle) -> None:
    pipe = Pipeline(tiny_bundle)
    tokens_of(pipe, strategy="device-only")
    assert pipe._transport is None
    tokens_of(pipe, strategy="base")
    assert pipe.transport is pipe.transport


def test_every_failure_is_one_of_ours(tiny_bundle: Bundle) -> None:
    class Other(Cloud):
        def __init__(self, bundle: Bundle) -> None:
            super().__init__(bundle)
            self.backbone = "other"

    pipe = Pipeline(tiny_bundle, InProcessTransport(Other(tiny_bundle)))
    with pytest.raises(CiarError, match="other"):
        pipe("a cat", seed=1)


def test_exported_names() -> None:
    assert ciar.Pipeline is Pipeline
    output: Callable[[], PipelineOutput] = PipelineOutput
    assert output().images == []
