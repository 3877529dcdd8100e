"""``adt-tree``: EAGLE-2's trees, with depth and width from how the tree at the token beside went.

A reconstruction: the paper says that a tree begins with the state of the horizontally adjacent token and is
refined by bisection on acceptance, and the public repository does not hold the rule. Here a tree that stood
to its end makes the next one deeper and narrower, half the way to the limits; one that did not makes it as
deep as halfway to what stood, and wider. A row of the picture begins halfway.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, NamedTuple

from ciar.decoding.options import Option
from ciar.decoding.strategies.eagle import FEATURES, Eagle2
from ciar.decoding.strategy import CloudRun, register
from ciar.decoding.trees import best_tree
from ciar.protocol.messages import Settings


class Shape(NamedTuple):
    """Depth and width of a tree."""

    depth: int
    width: int


def adapted(shape: Shape, stood: int, whole: bool, limits: Shape) -> Shape:
    """The shape for the neighbour's tree.

    Args:
        shape: of a tree that was judged.
        stood: tokens of it that stand.
        whole: whether these are as many as its longest path.
        limits: largest depth and width.
    """
    if whole:
        return Shape((shape.depth + limits.depth + 1) // 2, (shape.width + 1) // 2)
    return Shape(max(1, (shape.depth + stood) // 2), (shape.width + limits.width + 1) // 2)


@register
class AdtTree(Eagle2):
    name = "adt-tree"
    summary = "eagle2 whose trees are deep where the one beside stood, and wide where it fell"
    source = "ADT-Tree, arXiv 2512.21857, a reconstruction"
    grid = ("depth=4", "depth=12", "nodes=32", "nodes=128,branch=16")
    options: ClassVar[tuple[Option, ...]] = (
        FEATURES,
        Option("nodes", 59, "drafted tokens of a tree", low=1, high=1024),
        Option("branch", 10, "largest width of a tree", low=1, high=256),
        Option("depth", 8, "largest depth of a tree", low=1, high=64),
    )

    def drafts_trees(self, settings: Settings) -> bool:
        return False

    def tree_round(self, run: CloudRun, end: int) -> Generator[Any, Any, None]:
        values = self.values(run.settings)
        limits = Shape(values.whole("depth"), values.whole("branch"))
        shapes: dict[int, Shape] = run.kept or {}
        position = len(run.tokens)
        halfway = Shape((limits.depth + 1) // 2, (limits.width + 1) // 2)
        shape = shapes.get(position - 1, halfway) if position % run.grid else halfway
        depth = min(shape.depth, end - position)
        tree = yield from best_tree(run, values.whole("nodes"), shape.width, depth)
        yield from self.judge_tree(run, tree, end)
        stood = run.fed - position
        shapes |= dict.fromkeys(
            range(position, len(run.tokens)), adapted(shape, stood, stood >= depth, limits)
        )
        run.kept = shapes
