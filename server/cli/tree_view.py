"""The radix tree as a drawing for the terminal.

Takes what `Engine.tree()` gives and changes nothing. Knows nothing of the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TYPE_CHECKING, Protocol

from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    TokenIds = NDArray[np.int32]
    Decode = Callable[[TokenIds], str]


class TreeNode(Protocol):
    """One edge of the tree and what hangs below it, as the engine shows it."""

    @property
    def depth(self) -> int: ...
    @property
    def token_ids(self) -> TokenIds: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_holders(self) -> int: ...


@dataclass(slots=True)
class _Branch:
    node: TreeNode
    children: list[_Branch] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        below = sum(child.num_tokens for child in self.children)
        return len(self.node.token_ids) + below


def draw_tree(
    nodes: Sequence[TreeNode],
    decode: Decode,
    *,
    title: str,
    max_children: int = 6,
    text_width: int = 36,
) -> Tree:
    """Draw `nodes`, which come depth first: one line per edge with its tokens, blocks, holders.

    Of each edge the text is shown, shortened to `text_width` characters; among siblings it starts
    where they begin to differ. From a node with more than `max_children` children the rest are
    one line that counts them. O(tokens of the tree).
    """
    drawing = Tree(Text(title, style="bold"), guide_style="dim")
    _add(drawing, _nested(nodes), decode, max_children, text_width)
    return drawing


def _nested(nodes: Sequence[TreeNode]) -> list[_Branch]:
    top: list[_Branch] = []
    path: list[_Branch] = []
    for node in nodes:
        branch = _Branch(node)
        del path[node.depth :]
        (path[-1].children if path else top).append(branch)
        path.append(branch)
    return top


def _add(
    drawing: Tree, branches: list[_Branch], decode: Decode, max_children: int, text_width: int
) -> None:
    shown, hidden = branches[:max_children], branches[max_children:]
    num_common = num_common_tokens([branch.node.token_ids for branch in branches])
    for branch in shown:
        text = snippet(decode(branch.node.token_ids[num_common:]), text_width)
        label = _label(branch.node, f"…{text}" if num_common else text)
        _add(drawing.add(label), branch.children, decode, max_children, text_width)
    if hidden:
        num_tokens = sum(branch.num_tokens for branch in hidden)
        drawing.add(Text(f"… {len(hidden)} more with {_counted(num_tokens, 'token')}", style="dim"))


def _label(node: TreeNode, text: str) -> Text:
    held = f"{node.num_holders} holding" if node.num_holders else "free to evict"
    return Text.assemble(
        (_counted(len(node.token_ids), "token"), "bold cyan"),
        (f"  {_counted(node.num_blocks, 'block')}  ", "dim"),
        (held, "green" if node.num_holders else "dim"),
        "  ",
        (text, "italic"),
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def num_common_tokens(siblings: Sequence[TokenIds]) -> int:
    """How many first tokens all of several edges have in common; 0 for a single one.

    They can have some: edges part where a block begins, texts may go on together inside it.
    """
    if len(siblings) < 2:
        return 0
    return len(commonprefix([tokens.tolist() for tokens in siblings]))


def snippet(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, its middle left out if need be."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    tail = (width - 1) // 3
    return f"{line[: width - 1 - tail]}…{line[len(line) - tail :]}"
