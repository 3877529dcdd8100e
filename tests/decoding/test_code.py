"""``code``: whose law each token has, what one round trip costs, and which device model finishes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from table_cloud import (
    LENGTH,
    BankNoise,
    LawTable,
    NoiseBank,
    drawing_from,
    law_p_value,
    laws_of,
    make_picture,
)
from tiny import tiny_device

from ciar.decoding.sampling import SamplingLaw
from ciar.decoding.strategies.code import cloud_tokens
from ciar.errors import InputError
from ciar.models.bundle import Bundle
from ciar.models.checkpoint import save_tensors, write_manifest
from ciar.pipeline import Pipeline
from ciar.protocol.messages import Settings

TABLE = LawTable.random(1)
DEVICE = TABLE.near(2)


def mixed_joint(first: int) -> np.ndarray:
    """The law of a picture whose first tokens are the table's and whose others are the device's."""
    law = SamplingLaw()
    out = np.ones(1)
    start = 0
    for n in range(LENGTH):
        p = (TABLE if n < first else DEVICE).conditionals(law)[start : start + 8**n]
        out = (out[:, None] * p).reshape(-1)
        start += 8**n
    return out.reshape((8,) * LENGTH)


@pytest.mark.parametrize(("share", "first"), [(0.3, 2), (0.5, 2), (0.75, 3), (0.0, 0), (1.0, 4)])
def test_each_token_has_the_law_of_who_made_it(share: float, first: int) -> None:
    count = 4000
    bank = NoiseBank(count, seed=first)
    drafter = drawing_from(laws_of(DEVICE, SamplingLaw()))
    settings = Settings("code", options=(("share", share),))
    runs = [make_picture(TABLE, settings, BankNoise(bank, i), drafter) for i in range(count)]
    pictures = np.array([device.tokens for device, _ in runs])
    assert law_p_value(pictures, mixed_joint(first)) > 1e-3
    if first < LENGTH:
        assert law_p_value(pictures, TABLE.joint(SamplingLaw())) < 1e-6
    for device, session in runs[:3]:
        assert device.decided == ["prefix"] * first + ["device"] * (LENGTH - first)
        assert len(session.passes) == max(0, first - 1)  # the prefill gives the first token


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 1.0])
def test_what_it_costs(tiny_bundle: Bundle, share: float) -> None:
    pipe = Pipeline(tiny_bundle)
    made = pipe("a red cat", seed=4, strategy="code", options={"share": share}, output_type="tokens")
    base = pipe("a red cat", seed=4, strategy="base", output_type="tokens")
    ledger, first = made.ledgers[0], math.ceil(share * 16)
    assert made.tokens[0][:first] == base.tokens[0][:first]
    assert ledger.counts == {"prefix": first, "device": 16 - first, "accepted": 0, "replaced": 0}
    assert ledger.upload_share == 0
    # The prefill is a pass of its own, which also gives the first token; guidance doubles the rows.
    assert ledger.cloud_passes == max(first, 1)
    assert ledger.token_rows <= 2 * ledger.cloud_passes
    assert ledger.round_trips == 1 + (first > 0)  # the opening, and one request for all of them
    assert ledger.device_steps == (0 if first == 16 else 15)
    assert ledger.discarded == 0


def test_the_default_share_is_the_papers(tiny_bundle: Bundle) -> None:
    made = Pipeline(tiny_bundle)("a cat", seed=1, strategy="code", output_type="tokens")
    assert made.ledgers[0].counts["prefix"] == 5  # ceil(0.3 * 16)
    with pytest.raises(InputError, match="share"):
        Pipeline(tiny_bundle)("a cat", strategy="code", options={"share": 1.5})


def test_a_share_is_rounded_up_and_not_by_its_own_rounding() -> None:
    assert [cloud_tokens(share, 256) for share in (0, 0.3, 0.5, 1)] == [0, 77, 128, 256]
    assert cloud_tokens(0.1, 30) == 3  # 0.1 * 30 is 3.0000000000000004
    assert cloud_tokens(0.07, 100) == 7


def test_the_device_model_is_chosen_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    """The variant whose device model is trained for its part: the same strategy, another model."""
    folder = tmp_path / "two"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["devices"]["tail"] = config["devices"]["device"]
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(tiny_device(9), folder / "tail.safetensors")
    write_manifest(folder)

    def tokens(**values: str) -> list[int]:
        pipe = Pipeline.from_pretrained(folder, **values)
        return pipe("a red cat", seed=4, strategy="code", output_type="tokens").tokens[0]

    own, named, tail = tokens(), tokens(device_model="device"), tokens(device_model="tail")
    assert own == named
    assert own[:5] == tail[:5]
    assert own[5:] != tail[5:]
    with pytest.raises(InputError, match=r"no device model 'head'\. It has: device, tail"):
        tokens(device_model="head")
