"""Caption retrieval: is a picture's own caption the nearest of 100?

Works on unit features of pictures and captions; knows nothing of the network that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ciar.errors import InputError
from ciar.evaluation.bootstrap import Estimate, mean_estimate
from ciar.evaluation.checks import as_features


@dataclass(frozen=True)
class Retrieval:
    """Retrieval accuracy.

    Attributes:
        correct: bool [pictures], whether each picture's own caption came first.
        accuracy: share that did, in [0, 1], with its interval by picture.
        captions: captions that a picture chose among.
        seed: of the distractors.
    """

    correct: NDArray[np.bool_]
    accuracy: Estimate
    captions: int
    seed: int


def draw_distractors(
    names: Sequence[str], pool_names: Sequence[str], *, count: int = 99, seed: int = 0
) -> NDArray[np.int64]:
    """Draws for each picture captions that belong to other names, no two to one name.

    Picture i's distractors depend on the seed, i, its name and the pool, not on how many pictures
    there are; two sets made from the same prompts therefore face the same captions.

    Args:
        names: name of each picture.
        pool_names: name of each caption of the pool.
        count: distractors a picture.

    Returns:
        Indices into the pool, int64 [pictures, count].

    Raises:
        InputError: the pool has too few other names.
    """
    if count < 1:
        raise InputError(f"count is {count}; a picture needs at least one distractor.")
    by_name: dict[str, list[int]] = {}
    for index, name in enumerate(pool_names):
        by_name.setdefault(name, []).append(index)
    distinct = list(by_name)
    place = {name: i for i, name in enumerate(distinct)}
    out = np.empty((len(names), count), dtype=np.int64)
    for i, name in enumerate(names):
        others = len(distinct) - (name in place)
        if others < count:
            raise InputError(
                f"The pool has captions of {others} names other than {name!r}, and {count} are needed. Use a "
                "larger pool or fewer distractors."
            )
        generator = np.random.default_rng([seed, i])
        chosen = generator.choice(others, size=count, replace=False)
        if name in place:
            chosen = chosen + (chosen >= place[name])  # steps over the picture's own name
        groups = [by_name[distinct[int(j)]] for j in chosen]
        which = generator.random(count)
        out[i] = [group[int(u * len(group))] for group, u in zip(groups, which, strict=True)]
    return out


def retrieved(
    pictures: ArrayLike, own_captions: ArrayLike, pool: ArrayLike, distractors: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether each picture is nearer to its own caption than to every distractor; a tie is a miss.

    Args:
        pictures: [pictures, dim] unit features.
        own_captions: [pictures, dim] unit features of the captions that the pictures were made from.
        pool: [captions, dim] unit features.
        distractors: int64 [pictures, count], indices into the pool.

    Raises:
        InputError: the shapes do not fit together.
        NumericalError: features hold NaN or infinity.
    """
    images = as_features("picture", pictures).astype(np.float64)
    own = as_features("caption", own_captions).astype(np.float64)
    others = as_features("pool", pool).astype(np.float64)
    if images.shape != own.shape or images.shape[1] != others.shape[1] or len(distractors) != len(images):
        raise InputError(
            f"{list(images.shape)} picture, {list(own.shape)} caption and {list(others.shape)} pool features "
            f"with {len(distractors)} rows of distractors do not fit together. Give one caption and one row "
            "a picture, all from one encoder."
        )
    out = np.empty(len(images), dtype=np.bool_)
    for start in range(0, len(images), 512):
        block = images[start : start + 512]
        cosines = np.take_along_axis(block @ others.T, distractors[start : start + 512], axis=1)
        own_cosine = (block * own[start : start + 512]).sum(axis=1)
        # Two orders of summation differ in the last bits, so an equal caption must not win by rounding.
        out[start : start + 512] = own_cosine > cosines.max(axis=1) + 1e-12
    return out


def retrieval_accuracy(
    *,
    pictures: ArrayLike,
    own_captions: ArrayLike,
    names: Sequence[str],
    pool: ArrayLike,
    pool_names: Sequence[str],
    captions: int = 100,
    seed: int = 0,
    level: float = 0.95,
    replicates: int = 2000,
) -> Retrieval:
    """Top-1 accuracy of pictures among their own caption and ``captions - 1`` of other names.

    Args:
        pictures: [pictures, dim] unit features.
        own_captions: [pictures, dim] unit features of the captions that the pictures were made from.
        names: name of each picture; a caption of the same name is never its distractor.
        pool: [captions of the pool, dim] unit features.
        pool_names: name of each caption of the pool.
        captions: captions that a picture chooses among.
        seed: of the distractors and of the bootstrap.

    Raises:
        InputError: the pool is too small or shapes do not fit together.
    """
    if len(names) != len(np.asarray(pictures)) or len(pool_names) != len(np.asarray(pool)):
        raise InputError("There must be one name for each picture and one for each caption of the pool.")
    distractors = draw_distractors(names, pool_names, count=captions - 1, seed=seed)
    correct = retrieved(pictures, own_captions, pool, distractors)
    accuracy = mean_estimate(correct, level=level, replicates=replicates, seed=seed)
    return Retrieval(correct, accuracy, captions, seed)
