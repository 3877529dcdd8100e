"""What trees ask of the engine: laws of an EAGLE drafter, passes over a tree, a path that is kept."""

from __future__ import annotations

from torch import Tensor

from ciar.cloud.engine import CloudEngine, Slot
from ciar.decoding.eagle import EagleDrafter, keep_cells, tree_forward
from ciar.decoding.sampling import guide_rows
from ciar.decoding.strategy import GrowTree, KeepPath, TellFeatures, TreeOp
from ciar.errors import InputError
from ciar.models.eagle import EagleModel
from ciar.models.gpt import GPT
from ciar.models.inference import InferenceGPT


def attach_eagle(
    engine: CloudEngine, slot: Slot, eagle: EagleModel, cloud: GPT, kind: str = "float32"
) -> None:
    """Gives a slot that has just read its prompt an EAGLE drafter.

    Args:
        engine: of ``cloud``.
        eagle: the drafter, trained on ``cloud``.
        cloud: the cloud model as it is stored.
        kind: format in which the drafter reads features, see ``decoding.feature_rows``.
    """
    assert slot.text is not None
    rows, hidden = slot.text
    with engine.turn(slot):
        slot.eagle = EagleDrafter(
            eagle,
            cloud,
            slot.scale,
            folded=_decoding(engine).norm is None,
            text=rows,
            hidden=hidden,
            text_mask=slot.text_mask,
            kind=kind,
        )


#: Logits, or features and how many, or nothing.
TreeReply = Tensor | tuple[int, bytes] | None


def answer_tree(engine: CloudEngine, slot: Slot, op: TreeOp, tokens: list[int]) -> TreeReply:
    """Does what a strategy asks about a tree.

    Args:
        tokens: the known tokens.

    Returns:
        What the operation is answered with.
    """
    model, drafter = _decoding(engine), slot.eagle
    assert drafter is not None, "a strategy that grows trees is given a drafter"
    with engine.turn(slot):
        if isinstance(op, GrowTree):
            return drafter.grow(tokens, op)
        if isinstance(op, TellFeatures):
            return drafter.tell(op)
        if isinstance(op, KeepPath):
            keep_cells(slot.cache, model.config.text_len, op.known, op.nodes)
            drafter.keep(op.nodes)
            return None
        known, fed = len(op.ids), len(op.ids) + len(op.nodes)
        slot.cache = slot.cache.with_room(model.config.text_len + op.start + fed)
        hidden = tree_forward(model, slot.cache, op, slot.text_mask)
        drafter.saw(op.start, hidden[:, :known])
        drafter.hold(hidden[:, known:])
        logits = model.head(hidden[:, known - 1 :])
        slot.passes += 1
        slot.token_rows += fed * len(logits)
        return guide_rows(logits, slot.scale)


def _decoding(engine: CloudEngine) -> InferenceGPT:
    if not isinstance(engine.model, InferenceGPT):
        raise InputError("EAGLE drafters are for backbones of the LlamaGen family; use another strategy.")
    return engine.model
