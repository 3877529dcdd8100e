"""Batches: every picture equals its lone run, whoever its mates are; and the law stays exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from table_cloud import CODES, LENGTH, LawTable, law_p_value
from tiny import sharpen
from torch import Tensor

import ciar.decoding.batch as batch_module
from ciar.decoding.batch import Batch, RaggedTrunk
from ciar.decoding.sampling import SamplingLaw
from ciar.decoding.strategy import get_strategy
from ciar.errors import InputError
from ciar.intervals.thresholds import ThresholdConfig
from ciar.models.bundle import Bundle
from ciar.models.device import DeviceConfig, DeviceModel
from ciar.models.gpt import GPT, GPTConfig
from ciar.models.inference import InferenceGPT
from ciar.models.llamagen import LlamaGen
from ciar.models.text import rows_of
from ciar.pipeline import Pipeline
from ciar.protocol.messages import Settings
from ciar.training.teacher import guided_logits

#: Prompts of 1, 8 and 2 word pieces.
PROMPTS = ["cat", "a red car with a smiling dog sunglasses", "a dog"]
CASES: list[dict[str, Any]] = [
    {"strategy": "base"},
    {"strategy": "base", "guidance": 1.0},
    {"strategy": "base", "temperature": 0.0},
    {"strategy": "lossless", "window": 5},
    {"strategy": "ciar"},
    {"strategy": "ciar", "guidance": 1.0, "prefix_rate": 0.0},
    {"strategy": "ciar", "action": "verify", "top_k": 20},
    {"strategy": "ciar", "injection": False, "temperature": 0.7, "top_p": 0.9},
    {"strategy": "device-only"},
]
THRESHOLD = ThresholdConfig("fixed", value=1.0)


def texts(bundle: Bundle, prompts: list[str]) -> tuple[Tensor, Tensor]:
    encoded = [bundle.text.encode(prompt) for prompt in prompts]
    return torch.stack([t.features for t in encoded]), torch.stack([t.mask for t in encoded])


def run_batch(bundle: Bundle, prompts: list[str], seeds: list[int], case: dict[str, Any]) -> Any:
    values = {"guidance": 3.0, "window": 4} | case
    strategy = get_strategy(values["strategy"])
    made = [Settings(**values, seed=seed) for seed in seeds]
    gates = [THRESHOLD.start(16) for _ in prompts]
    return Batch(bundle.gpt, bundle.device_model, *texts(bundle, prompts), made, strategy, gates).run()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_each_picture_equals_its_lone_run(tiny_bundle: Bundle, case: dict[str, Any]) -> None:
    """Known faults A6, B1 and B2: neither batch mates nor their padding change a picture."""
    made = run_batch(tiny_bundle, PROMPTS, [7, 8, 7], case)
    pipe = Pipeline(tiny_bundle)
    values = dict(case)
    scale = values.pop("guidance", 3.0)
    for prompt, seed, picture in zip(PROMPTS, [7, 8, 7], made, strict=True):
        alone = pipe(prompt, seed=seed, guidance_scale=scale, threshold=1.0, output_type="tokens", **values)
        ledger = alone.ledgers[0]
        assert picture.tokens == alone.tokens[0]
        assert picture.ledger.decided == ledger.decided
        assert picture.ledger.discarded == ledger.discarded == 0
        if ledger.round_trips > 1:  # a device that never asks never hears what the prefill cost
            assert picture.ledger.cloud_passes == ledger.cloud_passes
            assert picture.ledger.token_rows == ledger.token_rows


def test_mates_order_and_number_do_not_matter(tiny_bundle: Bundle) -> None:
    case = {"strategy": "ciar"}
    seeds = list(range(8))
    together = run_batch(tiny_bundle, ["a cat"] * 8, seeds, case)
    again = run_batch(tiny_bundle, ["a cat"] * 8, seeds[::-1], case)[::-1]
    assert [p.tokens for p in together] == [p.tokens for p in again]
    assert len({tuple(p.tokens) for p in together}) == 8
    for mate in ("dog", "a smiling cat with red sunglasses"):
        pair = run_batch(tiny_bundle, ["a cat", mate], [3, 5], case)
        assert pair[0].tokens == together[3].tokens


def test_a_batch_shares_its_law(tiny_bundle: Bundle) -> None:
    made = [Settings("base", guidance=1.0), Settings("base", guidance=2.0)]
    gates = [THRESHOLD.start(16)] * 2
    with pytest.raises(InputError, match="share guidance"):
        Batch(tiny_bundle.gpt, None, *texts(tiny_bundle, PROMPTS[:2]), made, get_strategy("base"), gates)


def test_ragged_blocks_equal_single_ones(tiny_bundle: Bundle) -> None:
    """Blocks of different starts and lengths in one forward, against one picture after the other."""
    model = InferenceGPT(tiny_bundle.gpt)
    features, mask = texts(tiny_bundle, PROMPTS)
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        trunk = RaggedTrunk(LlamaGen(tiny_bundle.gpt), rows_of(features, mask))
        every = torch.arange(3)
        trunk.feed(every, torch.zeros(3, dtype=torch.long), model.embed_tokens(tokens[:, :8]))
        rows, starts, widths = torch.tensor([0, 2]), torch.tensor([2, 7]), [6, 3]
        x = torch.zeros(2, 6, 32)
        for i, (row, start, width) in enumerate(zip(rows.tolist(), starts.tolist(), widths, strict=True)):
            x[i, :width] = model.embed_tokens(tokens[row, start : start + width])
        hidden = trunk.feed(rows, starts, x)
        for i, (row, start, width) in enumerate(zip(rows.tolist(), starts.tolist(), widths, strict=True)):
            valid = int(mask[row].sum())
            cache = model.new_cache(valid, 1)
            alone = model.forward(model.embed_text(features[row : row + 1, -valid:]), 8 - valid, cache)
            torch.testing.assert_close(trunk.first_hidden[row], alone[0, -1], atol=1e-5, rtol=0)
            alone = model.forward(model.embed_tokens(tokens[row : row + 1, : start + width]), 8, cache)
            torch.testing.assert_close(hidden[i, :width], alone[0, start:], atol=1e-5, rtol=0)


# --- exactness with real models: |V| = 8, T = 4 ---------------------------------------------------

TOY = GPTConfig(
    dim=16, n_layer=1, n_head=2, vocab_size=CODES, grid=2, text_len=3, caption_dim=8, multiple_of=16
)
FEATURES = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(9))
MASK = torch.tensor([[False, True, True]])
SCALE = 2.0


def toy_models() -> tuple[GPT, DeviceModel]:
    torch.manual_seed(0)
    cloud = sharpen(GPT(TOY), 11).eval()
    device = DeviceModel(DeviceConfig.for_cloud(TOY, radius_rank=4, feature_hidden=4, feature_top_k=4))
    sharpen(device.trunk, 12)
    with torch.no_grad():
        device.head.centre.weight.normal_(generator=torch.Generator().manual_seed(13)).mul_(0.4)
    return cloud, device.eval()


def toy_table(cloud: GPT) -> LawTable:
    """Guided logits after every prefix, by the uncached forward: another way than the batch goes."""
    grids = torch.cartesian_prod(*[torch.arange(CODES)] * LENGTH)  # [4096, 4]
    logits = guided_logits(
        cloud, FEATURES.expand(4096, -1, -1), MASK.expand(4096, -1), grids, SCALE
    )  # [4096, 4, 8]
    return LawTable(torch.cat([logits[:: CODES ** (LENGTH - n), n] for n in range(LENGTH)]))


def toy_pictures(count: int, **values: Any) -> np.ndarray:
    cloud, device = toy_models()
    strategy = get_strategy(values["strategy"])
    made = [Settings(**values, guidance=SCALE, prefix_rate=0.0, seed=seed) for seed in range(count)]
    gates = [ThresholdConfig("fixed", value=0.0).start(LENGTH) for _ in made]
    batch = Batch(
        cloud, device, FEATURES.expand(count, -1, -1), MASK.expand(count, -1), made, strategy, gates
    )
    return np.array([picture.tokens for picture in batch.run()])


TOY_LAW = SamplingLaw(temperature=0.8, top_k=6, top_p=0.95)
LAW_VALUES = {"temperature": 0.8, "top_k": 6, "top_p": 0.95}


@pytest.mark.parametrize(
    "values",
    [{"strategy": "base"}, {"strategy": "ciar", "action": "verify"}],
    ids=["base", "verify"],
)
def test_toy_model_has_the_exact_joint_law(values: dict[str, Any]) -> None:
    found = toy_pictures(1000, **values, **LAW_VALUES)
    assert law_p_value(found, toy_table(toy_models()[0]).joint(TOY_LAW)) > 1e-3


def test_lossless_toy_pictures_are_those_of_base() -> None:
    expected = toy_pictures(200, strategy="base", **LAW_VALUES)
    for window in (1, 2, 3, 4):
        found = toy_pictures(200, strategy="lossless", window=window, **LAW_VALUES)
        np.testing.assert_array_equal(found, expected)


def test_fault_guidance_on_one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cloud that samples without guidance what the law has with it: the statistic sees it."""
    joint = toy_table(toy_models()[0]).joint(TOY_LAW)
    monkeypatch.setattr(batch_module, "guide", lambda conditional, unconditional, scale: conditional)
    assert law_p_value(toy_pictures(1000, strategy="base", **LAW_VALUES), joint) < 1e-6


def test_fault_raw_device_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud's copy of the device law without temperature and top-k: the statistic sees it."""
    joint = toy_table(toy_models()[0]).joint(TOY_LAW)

    class Raw(Batch):
        def _device_law(self, job: Any) -> Tensor:
            kept, self.law = self.law, SamplingLaw()
            try:
                return super()._device_law(job)
            finally:
                self.law = kept

    monkeypatch.setitem(globals(), "Batch", Raw)
    found = toy_pictures(800, strategy="ciar", action="verify", **LAW_VALUES)
    assert law_p_value(found, joint) < 1e-6
