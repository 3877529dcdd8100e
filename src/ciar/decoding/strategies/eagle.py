"""``eagle1-static`` and ``eagle2``: the cloud's own features draft trees, which it judges in one pass.

The drafter runs beside the cloud model, or on the device, whereto the features then travel.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, ClassVar

from ciar.decoding.acceptance import Speculative
from ciar.decoding.feature_rows import FORMATS
from ciar.decoding.halves import listen, make_patch, stream
from ciar.decoding.options import Option, OptionValues
from ciar.decoding.strategy import (
    CloudHalf,
    CloudRun,
    Commit,
    DeviceHalf,
    DeviceRun,
    Receive,
    Send,
    Strategy,
    TakeFeatures,
    TellFeatures,
    register,
)
from ciar.decoding.trees import (
    MOST_NODES,
    Tree,
    best_tree,
    drawn_tree,
    laws_of_drawn,
    tell_deciders,
    tree_laws,
    walk_chosen,
    walk_drawn,
)
from ciar.decoding.verify import sample_own
from ciar.errors import InputError
from ciar.protocol.messages import Draft, Patch, Settings

PLACEMENT = Option(
    "placement",
    "colocated",
    "where the drafter runs: beside the cloud model, or split from it, on the device",
    choices=("colocated", "split"),
)
FEATURES = Option(
    "features",
    "float16",
    "how the drafter reads the cloud's features, which travel when it is split from it",
    choices=FORMATS,
)


class Eagle(Strategy):
    """An EAGLE drafter drafts trees: beside the cloud model, or on the device with its features.

    Split, a tree goes up with each node's parent, and down come, beside the tokens, the cloud's features of
    what is new: first the text's, then those of each known token. The drafter reads features as they
    travel wherever it runs, so both placements draft the same trees.
    """

    exact = True
    training = "EAGLE drafter"
    uses_device = False
    uses_eagle = True

    def drafts_trees(self, settings: Settings) -> bool:
        return self.values(settings).word("placement") == "split"

    def features_kind(self, settings: Settings) -> str:
        return self.values(settings).word("features")

    def draft_tree(self, run: CloudRun | DeviceRun, end: int) -> Generator[Any, Any, Tree]:
        """Drafts a tree behind the known tokens, with paths that reach to ``end`` at most."""
        raise NotImplementedError

    def judge_tree(self, run: CloudRun, tree: Tree, end: int) -> Generator[Any, Any, None]:
        """Has the cloud judge a tree, and makes known what stands."""
        raise NotImplementedError

    def learn_laws(self, run: CloudRun, tree: Tree) -> Generator[Any, Any, Tree]:
        """Adds what judging needs to a tree that the device has drafted."""
        yield from ()
        return tree

    def device(self, run: DeviceRun) -> DeviceHalf:
        return self._split_device(run) if self.drafts_trees(run.settings) else listen(run)

    def cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        if self.drafts_trees(run.settings):
            return self._split_cloud(run, draft)
        end = draft.start + draft.want

        def advance() -> Generator[Any, Any, None]:
            # Position 0 is predicted by the text, which the prefill has read.
            return self.tree_round(run, end) if run.tokens else sample_own(run, 1)

        return stream(run, draft, advance)

    def tree_round(self, run: CloudRun, end: int) -> Generator[Any, Any, None]:
        """Drafts a tree, has the cloud judge it, and makes known what stands."""
        tree = yield from self.draft_tree(run, end)
        yield from self.judge_tree(run, tree, end)

    def _split_device(self, run: DeviceRun) -> DeviceHalf:
        # The cloud makes a token of its own, and tells the features of all that it has read.
        if len(run.tokens) < run.total:
            yield Send(Draft(run.next_step(), len(run.tokens), want=1))
            yield from self._answer(run)
        while len(run.tokens) < run.total:
            known = len(run.tokens)
            tree = yield from self.draft_tree(run, run.total)
            flags = (False,) * len(tree.ids)
            parents = tuple(tree.parents)
            yield Send(Draft(run.next_step(), known, tuple(tree.ids), flags, parents=parents))
            yield from self._answer(run)
            drafted = sum(one in ("accepted", "replaced") for one in run.decided[known:])
            run.discarded += len(tree.ids) - drafted

    def _answer(self, run: DeviceRun) -> Generator[Any, Any, None]:
        """Takes the patches of one draft; features may come in several."""
        known = len(run.tokens)
        while len(run.tokens) == known:
            patch: Patch = yield Receive()
            run.apply(patch)
            if patch.features:
                yield TakeFeatures(patch.features, self.features_kind(run.settings))
        yield Commit(len(run.tokens))

    def _split_cloud(self, run: CloudRun, draft: Draft) -> CloudHalf:
        if draft.parents:
            start = len(run.tokens)
            tree = yield from self.learn_laws(run, Tree(list(draft.ids), list(draft.parents)))
            yield from self.judge_tree(run, tree, run.total)
            tell_deciders(run, tree, start)
        else:
            yield from sample_own(run, draft.want)
        waiting = b""
        while len(run.tokens) < run.total:  # nobody drafts behind the last token
            told = run.kept or 0
            count, data = yield TellFeatures(told, self.features_kind(run.settings))
            if not count:
                break
            if waiting:
                yield Patch(draft.step, draft.start, (), (), draft.start, features=waiting)
            run.kept, waiting = told + count, data
        yield replace(make_patch(run, draft, draft.start), features=waiting)


@register
class EagleStatic(Eagle):
    name = "eagle1-static"
    summary = "the cloud's own features draft trees of a fixed shape, drawn; it judges a tree in a pass"
    source = "EAGLE, arXiv 2401.15077, sections 3 and 4"
    grid: ClassVar[tuple[str, ...]] = (
        *("branch=2,depth=2", "branch=2,depth=4"),
        *("branch=4,depth=2", "branch=6,depth=3"),
    )
    options: ClassVar[tuple[Option, ...]] = (
        PLACEMENT,
        FEATURES,
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
            if nodes > MOST_NODES:
                raise InputError(
                    f"branch {values.whole('branch')} and depth {values.whole('depth')} make a tree of more "
                    f"than {MOST_NODES} tokens. Lower one of them."
                )
            level = below
        return values

    def draft_tree(self, run: CloudRun | DeviceRun, end: int) -> Generator[Any, Any, Tree]:
        values = self.values(run.settings)
        depth = min(values.whole("depth"), end - len(run.tokens))
        return drawn_tree(run, values.whole("branch"), depth)

    def learn_laws(self, run: CloudRun, tree: Tree) -> Generator[Any, Any, Tree]:
        return laws_of_drawn(run, tree)

    def judge_tree(self, run: CloudRun, tree: Tree, end: int) -> Generator[Any, Any, None]:
        p = yield from tree_laws(run, tree)
        yield from walk_drawn(run, tree, p, Speculative(), end)


@register
class Eagle2(Eagle):
    name = "eagle2"
    summary = "the cloud's own features draft trees that grow where they are sure; the pictures of base"
    source = "EAGLE-2, arXiv 2406.16858, section 4"
    grid: ClassVar[tuple[str, ...]] = (
        *("nodes=16,branch=4,depth=3", "nodes=32,branch=8,depth=4"),
        "nodes=128,branch=16,depth=5",
    )
    options: ClassVar[tuple[Option, ...]] = (
        PLACEMENT,
        FEATURES,
        Option("nodes", 59, "drafted tokens of a tree", low=1, high=1024),
        Option("branch", 10, "children of a token, and tokens of a level that get any", low=1, high=256),
        Option("depth", 5, "tokens of a tree's longest path", low=1, high=64),
    )

    def values(self, settings: Settings) -> OptionValues:
        """The options, and whether a server can hold what their trees feed the drafter.

        Raises:
            InputError: as for every strategy, or a tree would feed too many tokens.
        """
        values = super().values(settings)
        branch, depth = values.whole("branch"), values.whole("depth")
        # The best tokens of every level but the last are fed, however few of them the tree keeps.
        if branch * (depth - 1) > MOST_NODES:
            raise InputError(
                f"branch {branch} and depth {depth} feed the drafter more than {MOST_NODES} tokens a tree. "
                "Lower one of them."
            )
        return values

    def draft_tree(self, run: CloudRun | DeviceRun, end: int) -> Generator[Any, Any, Tree]:
        values = self.values(run.settings)
        depth = min(values.whole("depth"), end - len(run.tokens))
        return best_tree(run, values.whole("nodes"), values.whole("branch"), depth)

    def judge_tree(self, run: CloudRun, tree: Tree, end: int) -> Generator[Any, Any, None]:
        p = yield from tree_laws(run, tree)
        yield from walk_chosen(run, tree, p, end)
