"""The device model: an untrained feature map is silent, a trained one reads the interval."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from tiny import TINY_GPT, tiny_device

from ciar.intervals.interfuse import creinn
from ciar.models.device import DeviceConfig, DeviceModel


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
