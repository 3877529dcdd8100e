"""Features of pictures and captions, in batches, as NumPy arrays for the metrics.

Knows the dual encoder and the text encoder; knows nothing of the metrics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ciar.errors import CheckpointError, InputError
from ciar.models.dual_encoder import DualEncoder
from ciar.models.text import StaticTextEncoder
from ciar.models.vq import from_uint8


def text_digest(encoder: StaticTextEncoder) -> str:
    """SHA-256, in hexadecimal, of a text encoder's vocabulary and table."""
    digest = hashlib.sha256("\n".join(encoder.vocabulary).encode())
    digest.update(np.ascontiguousarray(encoder.table.float().cpu().numpy()).tobytes())
    return digest.hexdigest()


@torch.no_grad()
def image_features(model: DualEncoder, pictures: NDArray[np.uint8], batch: int = 256) -> NDArray[np.float32]:
    """Unit vectors of pictures.

    The encoder's mode (training or evaluation) is set to evaluation for the call, so a picture's
    features do not depend on the others of its batch.

    Args:
        pictures: [pictures, edge, edge, 3] uint8; may be memory-mapped.

    Returns:
        float32 [pictures, feature_dim].

    Raises:
        InputError: the pictures have another shape or dtype.
    """
    if pictures.ndim != 4 or pictures.shape[-1] != 3 or pictures.dtype != np.uint8:
        raise InputError(
            f"Pictures must be uint8 [pictures, edge, edge, 3]; these are {pictures.dtype} "
            f"{list(pictures.shape)}."
        )
    out = np.empty((len(pictures), model.config.feature_dim), dtype=np.float32)
    device = model.log_scale.device
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(pictures), batch):
            block = torch.from_numpy(np.array(pictures[start : start + batch])).to(device)
            out[start : start + batch] = model.encode_pictures(from_uint8(block)).float().cpu().numpy()
    finally:
        model.train(was_training)
    return out


@torch.no_grad()
def caption_features(
    model: DualEncoder, encoder: StaticTextEncoder, captions: Sequence[str], batch: int = 512
) -> NDArray[np.float32]:
    """Unit vectors of captions.

    Returns:
        float32 [captions, feature_dim].

    Raises:
        CheckpointError: the dual encoder was trained on another text encoder.
        InputError: a caption is empty or has no known word.
    """
    if model.config.text_digest not in ("", text_digest(encoder)):
        raise CheckpointError(
            "The dual encoder was trained on another text encoder than this one. Pass the text encoder of "
            "its training, or train the dual encoder anew: ciar train dual-encoder."
        )
    encoder = encoder.without_registers()
    out = np.empty((len(captions), model.config.feature_dim), dtype=np.float32)
    device = model.log_scale.device
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(captions), batch):
            encoded = [encoder.encode(caption) for caption in captions[start : start + batch]]
            features = torch.stack([one.features for one in encoded]).to(device)
            mask = torch.stack([one.mask for one in encoded]).to(device)
            out[start : start + batch] = model.encode_captions(features, mask).float().cpu().numpy()
    finally:
        model.train(was_training)
    return out
