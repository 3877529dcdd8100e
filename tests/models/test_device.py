"""The device model: an untrained feature map is silent, a trained one reads the interval."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from tiny import TINY_GPT, tiny_device

from ciar.intervals.interfuse import creinn
from ciar.models.device import DeviceConfig, DeviceModel, DeviceTrunk
from ciar.models.text import TextFeatures, rows_of


def test_config_survives_json() -> None:
    config = DeviceConfig.for_cloud(TINY_GPT, layers=2, radius_rank=None)
    assert config.trunk == replace(TINY_GPT, n_layer=2)
    assert config.feature_dim == TINY_GPT.dim
    assert DeviceConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_untrained_feature_map_changes_nothing() -> None:
    torch.manual_seed(0)
    model = DeviceModel(DeviceConfig.for_cloud(TINY_GPT, radius_rank=8))
    features = model.features(torch.randn(5, TINY_GPT.dim))
    assert features.shape == (5, TINY_GPT.dim)
    assert (features == 0).all()


def test_features_are_those_of_the_formula() -> None:
    """phi of (hidden, expected embedding under lower and upper bounds, width, spread, entropy), top 8."""
    model = tiny_device()
    hidden = torch.randn(3, TINY_GPT.dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        law = model.head(hidden)
        interval = creinn(law.centre, law.radius)
        table = model.trunk.tok_embeddings.weight
        rows = []
        for i in range(3):
            best = law.centre[i].argsort(descending=True)[:8]
            width = (interval.upper[i] - interval.lower[i])[best]
            p = law.centre[i].softmax(-1)[best]
            rest = 1.0 - p.sum()
            rows.append(
                torch.cat(
                    [
                        hidden[i],
                        interval.lower[i, best] @ table[best],
                        interval.upper[i, best] @ table[best],
                        width.sum()[None],
                        width.std(correction=0)[None] * 8**0.5,
                        -((p * p.log()).sum() + rest * rest.log())[None],
                    ]
                )
            )
        brief = torch.stack(rows)
        expected = model.phi.up(torch.nn.functional.silu(model.phi.down(brief)))
        torch.testing.assert_close(model.features(hidden), expected, atol=1e-5, rtol=1e-5)


def test_the_trunk_has_no_second_head() -> None:
    names = set(tiny_device().state_dict())
    assert not any(name.startswith("trunk.output") for name in names)
    assert "head.centre.weight" in names


def test_the_reader_is_added_to_the_text_and_padding_changes_nothing() -> None:
    device = tiny_device()
    assert device.reader is not None
    features = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[True] * 3, [False, True, True]])
    found = device.embed_text(features, mask)
    alone = device.embed_text(features[1:, 1:], mask[1:, 1:])
    torch.testing.assert_close(found[1:, 1:], alone, atol=1e-5, rtol=0.0)
    with torch.no_grad():
        device.reader.out.weight.zero_()
    assert torch.equal(device.embed_text(features, mask), device.trunk.embed_text(features))


def test_the_trunk_decodes_what_was_trained() -> None:
    """Two prompts of different lengths, read together, against whole sequences."""
    device = tiny_device()
    trunk = DeviceTrunk(device)
    features = torch.zeros(2, 8, 16)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    for row, length in enumerate((5, 2)):
        features[row, -length:] = torch.randn(length, 16, generator=torch.Generator().manual_seed(row))
        mask[row, -length:] = True
    prompt = trunk.read(rows_of(features, mask), None, False)
    assert prompt.mask is not None
    codes = torch.randint(64, (2, 4), generator=torch.Generator().manual_seed(9))
    whole = device.train_hidden(features, mask, codes)
    lone = trunk.read([TextFeatures(features[1], mask[1])], None, False)
    assert lone.mask is None
    hidden = trunk.forward(lone.x, TINY_GPT.text_len - 2, lone.cache)[:, -1:]
    more = trunk.forward(trunk.embed_tokens(codes[1:]), TINY_GPT.text_len, lone.cache)
    torch.testing.assert_close(torch.cat([hidden, more], dim=1), whole[1:], atol=1e-5, rtol=0.0)
    torch.testing.assert_close(prompt.x[1:, -2:], lone.x, atol=1e-5, rtol=0.0)
