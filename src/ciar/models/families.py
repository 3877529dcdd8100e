"""The families of models that there are."""

from __future__ import annotations

from torch import nn

from ciar.models.chameleon import CHAMELEON
from ciar.models.family import CloudModel, Family
from ciar.models.llamagen import LLAMAGEN

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMAGEN, CHAMELEON)}


def for_decoding(model: nn.Module | CloudModel) -> CloudModel:
    """An AR model as it is decoded with; itself where it is that already.

    Raises:
        TypeError: it is of no family.
    """
    if not isinstance(model, nn.Module):
        return model
    for family in FAMILIES.values():
        if isinstance(model, family.model):
            return family.decoding(model)
    raise TypeError(f"{type(model).__name__} is the model of no family")
