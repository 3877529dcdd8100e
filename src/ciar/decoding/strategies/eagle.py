"""``eagle1-static`` and ``eagle2``: the cloud alone; its own features draft trees, judged in one pass."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

from ciar.decoding.acceptance import Speculative
from ciar.decoding.halves import listen, stream
from ciar.decoding.options import Option, OptionValues
from ciar.decoding.strategy import CloudHalf, CloudRun, DeviceHalf, DeviceRun, Strategy, register
from ciar.decoding.trees import best_tree, drawn_tree, tree_laws, walk_chosen, walk_drawn
from ciar.decoding.verify import sample_own
from ciar.errors import InputError
from ciar.protocol.messages import Draft, Settings

#: Most tokens of a tree: more would take a server's memory for one client.
_MOST_NODES = 1024


class Eagle(Strategy):
    """An EAGLE drafter beside the cloud model drafts trees."""

    exact = True
    training = "EAGLE drafter"
    uses_device = False
    uses_eagle = True

    def tree_round(self, run: CloudRun, end: int) -> Generator[Any, Any, None]:
        """Drafts a tree, has the cloud judge it, and makes known what stands."""
        raise NotImplementedError

    def device(self, run: DeviceRun) -> DeviceHalf:
        return listen(run)

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        end = draft.start + draft.want

        def advance() -> Generator[Any, Any, None]:
            # Position 0 is predicted by the text, which the prefill has read.
            return self.tree_round(run, end) if run.tokens else sample_own(run, 1)

        return stream(run, draft, advance)


@register
class EagleStatic(Eagle):
    name = "eagle1-static"
    summary = "the cloud's own features draft trees of a fixed shape, drawn; it judges a tree in a pass"
    source = "EAGLE, arXiv 2401.15077, sections 3 and 4"
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            "branch",
            4,
            "drafted tokens at the head of a tree; its r-th has branch / r behind it",
            low=1,
            high=64,
        ),
        Option("depth", 4, "tokens of a tree's longest path", low=1, high=64),
    )

    def values(self, settings: Settings) -> OptionValues:
        """The options, and whether their tree is of a size that a server can judge.

        Raises:
            InputError: as for every strategy, or the tree has too many nodes.
        """
        values = super().values(settings)
        # Counted by the product of the ranks along a path, which the branch at the head bounds.
        level, nodes = {values.whole("branch"): 1}, 0
        for _ in range(values.whole("depth")):
            below: dict[int, int] = {}
            for children, count in level.items():
                nodes += children * count
                for rank in range(1, children + 1):
                    below[children // rank] = below.get(children // rank, 0) + count
            if nodes > _MOST_NODES:
                raise InputError(
                    f"branch {values.whole('branch')} and depth {values.whole('depth')} make a tree of more "
                    f"than {_MOST_NODES} tokens. Lower one of them."
                )
            level = below
        return values

    def tree_round(self, run: CloudRun, end: int) -> Generator[Any, Any, None]:
        values = self.values(run.settings)
        depth = min(values.whole("depth"), end - len(run.tokens))
        tree = yield from drawn_tree(run, values.whole("branch"), depth)
        p = yield from tree_laws(run, tree)
        yield from walk_drawn(run, tree, p, Speculative(), end)


@register
class Eagle2(Eagle):
    name = "eagle2"
    summary = "the cloud's own features draft trees that grow where they are sure; the pictures of base"
    source = "EAGLE-2, arXiv 2406.16858, section 4"
    options: ClassVar[tuple[Option, ...]] = (
        Option("nodes", 59, "drafted tokens of a tree", low=1, high=1024),
        Option("branch", 10, "children of a token, and tokens of a level that get any", low=1, high=256),
        Option("depth", 5, "tokens of a tree's longest path", low=1, high=64),
    )

    def tree_round(self, run: CloudRun, end: int) -> Generator[Any, Any, None]:
        values = self.values(run.settings)
        depth = min(values.whole("depth"), end - len(run.tokens))
        tree = yield from best_tree(run, values.whole("nodes"), values.whole("branch"), depth)
        p = yield from tree_laws(run, tree)
        yield from walk_chosen(run, tree, p, end)
