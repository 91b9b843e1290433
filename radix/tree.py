"""The radix tree: token prefixes to block ids. Knows nothing of holders, leases or eviction.

Tokens are kept and compared as the bytes of int32 arrays: equal prefixes cost one memcmp, and
whole tokens are four bytes, so a common prefix in bytes, rounded down, is one in tokens.

Beside each token an edge can keep a note: an opaque float32, NaN where it is not known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from sapwood.radix.namespace import Namespace
from sapwood.radix.pool import BlockIds

TokenBytes: TypeAlias = bytes | memoryview
"""Token ids as the bytes of an int32 array; a slice of a memoryview copies nothing."""
TOKEN_BYTES = 4
Notes: TypeAlias = npt.NDArray[np.float32]
"""One opaque value for each token, NaN where it is not known."""
_ID_BYTES = 8
_NO_BLOCKS: BlockIds = np.empty(0, np.int32)
_NO_BLOCKS.flags.writeable = False


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """An edge of the tree and the point it leads to. Only `RadixTree` changes its shape.

    Invariants: in the tree, a node has at least one block, whole ones but for a leaf's last,
    and it is the only one under its parent to begin with its first block's tokens; taken out, it
    has none. Notes, where there are any, are one for each token, at least one of them known.
    """

    id: int
    """Unique in the tree's life and growing: the order of creation."""
    parent: "Node | None"
    """None for a namespace's root, which has no tokens."""
    namespace: Namespace
    tokens: bytearray
    """The edge's token ids, int32."""
    blocks: BlockIds
    """One block for every `block_size` tokens begun."""
    notes: Notes | None = None
    """Float32 `[num_tokens]`, four bytes a token; None while none is known."""
    last_used: int = 0
    """The cache's count of uses when this node was last part of one."""
    num_children: int = 0
    num_warm: int = 0
    """How many warm prefixes end in this node or below it, or did before that was evicted."""
    entry: "tuple[bool, Any, int, Node] | None" = None
    """Where the node waits to be evicted; kept by `EvictionQueue`."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def last_block(self) -> int:
        return int(self.blocks[-1])

    def fill_notes(self, start: int, notes: Notes) -> None:
        """Take the notes of the edge's tokens from `start` on that are not known yet.

        One that is known stays. O(notes), and O(length of the edge) for the first known one.
        """
        if self.notes is None:
            if np.isnan(notes).all():
                return
            self.notes = _unknown_notes(self.num_tokens)
        own = self.notes[start : start + len(notes)]
        np.copyto(own, notes, where=np.isnan(own))


@dataclass(slots=True)
class Path:
    """How far a sequence of tokens goes in the tree.

    The whole blocks of `nodes`, of the last one only the first `end`, hold the first
    `num_blocks` blocks of the sequence. If `num_rows` is not 0, the next block of the last node,
    which may be its first, begins with the `num_rows` tokens that follow. Together these are
    `num_tokens`.
    """

    nodes: list[Node]
    end: int
    num_blocks: int
    num_rows: int
    num_tokens: int

    @property
    def block_ids(self) -> BlockIds:
        """The blocks taken whole, int32 `[num_blocks]`. O(nodes + blocks)."""
        if not self.nodes:
            return _NO_BLOCKS
        *inner, last = self.nodes
        return np.concatenate([node.blocks for node in inner] + [last.blocks[: self.end]])

    @property
    def row_block(self) -> int:
        """The block that the `num_rows` tokens are in."""
        return int(self.nodes[-1].blocks[self.end])

    def drop_rows(self) -> None:
        """Shorten the path to its whole blocks."""
        self.num_tokens -= self.num_rows
        self.num_rows = 0
        if self.nodes and self.end == 0:
            self.nodes.pop()
            self.end = len(self.nodes[-1].blocks) if self.nodes else 0


class RadixTree:
    """Token prefixes to opaque block ids, a radix tree for each namespace.

    Edges are whole blocks, except that a leaf may end in a partly filled one. All children are
    in one sorted map under (parent, first block's tokens): the child that shares the longest
    part of a block is a neighbour of the key, and a node without children costs nothing.

    Invariants: no sibling is a prefix of another; a namespace has a root while it has tokens.
    """

    def __init__(self, block_size: int) -> None:
        """`block_size` is in tokens."""
        self.num_tokens = 0
        self.num_blocks = 0
        self.num_warm_blocks = 0
        """Blocks of the nodes that are part of a warm prefix."""
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._children: SortedDict = SortedDict()
        self._roots: dict[Namespace, Node] = {}
        self._node_by_last_block: dict[int, Node] = {}
        self._next_id = 0

    def find(self, namespace: Namespace, tokens: TokenBytes, max_tokens: int) -> Path:
        """The longest path for the first `max_tokens` of `tokens`; changes nothing.

        O(nodes * log(nodes of the tree)) and a memcmp of the tokens.
        """
        nodes: list[Node] = []
        position, common, limit = 0, 0, max_tokens * TOKEN_BYTES
        node = self._roots.get(namespace)
        while node is not None and (node := self._child(node, tokens, position, limit)):
            nodes.append(node)
            edge = node.tokens
            rest = tokens[position : min(position + len(edge), limit)]
            if len(rest) == len(edge) and edge.startswith(rest):
                common = len(edge)
            else:
                common = _num_common_bytes(rest, edge)
            position += common
            if common < len(edge) or common % self._block_bytes:
                break
        num_blocks, num_bytes = divmod(position, self._block_bytes)
        end = common // self._block_bytes
        return Path(nodes, end, num_blocks, num_bytes // TOKEN_BYTES, position // TOKEN_BYTES)

    def ends_in_partial_leaf(self, path: Path) -> bool:
        """Whether the rows of a path are all that a partly filled block has. O(1)."""
        if not path.num_rows:
            return False
        num_tokens = path.end * self._block_size + path.num_rows
        return num_tokens * TOKEN_BYTES == len(path.nodes[-1].tokens)

    def notes(self, path: Path) -> Notes:
        """The notes of a path's tokens, float32 `[path.num_tokens]`, a copy. O(tokens)."""
        notes = _unknown_notes(path.num_tokens)
        start = 0
        for node in path.nodes:
            rest = notes[start : start + node.num_tokens]
            if node.notes is not None:
                rest[:] = node.notes[: len(rest)]
            start += len(rest)
        return notes

    def row_notes(self, path: Path) -> Notes | None:
        """The notes of a path's rows, a view; None if it has none or its edge none. O(1)."""
        if not path.num_rows or (notes := path.nodes[-1].notes) is None:
            return None
        start = path.end * self._block_size
        return notes[start : start + path.num_rows]

    def fill_notes(self, path: Path, notes: Notes) -> None:
        """Take the notes of a path's tokens that are not known yet; one that is known stays.

        Float32, at least `[path.num_tokens]`; what is beyond the path is left out. O(tokens).
        """
        notes = notes[: path.num_tokens]
        for node in path.nodes:
            node.fill_notes(0, notes[: node.num_tokens])
            notes = notes[node.num_tokens :]

    def node_ending_in(self, block_id: int) -> Node | None:
        """The node whose last block this is; None if it is inside an edge or in no tree. O(1)."""
        return self._node_by_last_block.get(block_id)

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut the first `num_blocks` blocks, not all, off into a new node above; returns it.

        The given node keeps its id, children and end; both have its `last_used` and warmth.
        O(length of the edge) in bytes copied.
        """
        num_bytes = num_blocks * self._block_bytes
        upper = self._new_node(
            node.parent, node.namespace, node.tokens[:num_bytes], node.blocks[:num_blocks].copy()
        )
        upper.last_used = node.last_used
        upper.num_children = 1
        upper.num_warm = node.num_warm
        upper.notes = _known_part(node.notes, 0, upper.num_tokens)
        node.notes = _known_part(node.notes, upper.num_tokens, node.num_tokens)
        self._children[self._key(node.parent, upper)] = upper
        self._node_by_last_block[upper.last_block] = upper
        del node.tokens[:num_bytes]
        node.blocks = node.blocks[num_blocks:].copy()
        node.parent = upper
        self._children[self._key(upper, node)] = node
        return upper

    def append(
        self, namespace: Namespace, node: Node | None, tokens: TokenBytes, blocks: BlockIds
    ) -> Node:
        """Add tokens behind a node that ends in a whole block, None for the namespace's root.

        A leaf grows, unless it is warm, which what comes after it is not; under any other node
        begins a new one. Returns the node that ends with the tokens; their notes are unknown.
        O(log(nodes of the tree)) and the copy of the node's blocks and notes.
        """
        self.num_tokens += len(tokens) // TOKEN_BYTES
        self.num_blocks += len(blocks)
        if node is not None and node.num_children == 0 and node.num_warm == 0:
            del self._node_by_last_block[node.last_block]
            node.tokens += tokens
            if node.notes is not None:
                num_new = len(tokens) // TOKEN_BYTES
                node.notes = np.concatenate((node.notes, _unknown_notes(num_new)))
            node.blocks = np.concatenate((node.blocks, blocks))
            self._node_by_last_block[node.last_block] = node
            return node
        if node is None:
            node = self._roots.get(namespace)
        if node is None:
            node = self._new_node(None, namespace, bytearray(), _NO_BLOCKS)
            self._roots[namespace] = node
        child = self._new_node(node, namespace, bytearray(tokens), blocks.copy())
        self._children[self._key(node, child)] = child
        self._node_by_last_block[child.last_block] = child
        node.num_children += 1
        return child

    def trim(self, leaf: Node, num_blocks: int) -> BlockIds:
        """Take the last `num_blocks` blocks off a leaf, and the leaf out if none is left.

        Returns their ids; the notes of their tokens are forgotten. O(log(nodes of the tree)) and
        the copy of the blocks and notes that stay.
        """
        keep = len(leaf.blocks) - num_blocks
        removed = leaf.blocks[keep:]
        if keep == 0:
            self._detach(leaf)
        del self._node_by_last_block[leaf.last_block]
        leaf.blocks = leaf.blocks[:keep].copy()
        num_tokens = leaf.num_tokens
        del leaf.tokens[keep * self._block_bytes :]
        leaf.notes = _known_part(leaf.notes, 0, leaf.num_tokens)
        if keep:
            self._node_by_last_block[leaf.last_block] = leaf
        self.num_tokens -= num_tokens - leaf.num_tokens
        self.num_blocks -= num_blocks
        if leaf.num_warm:
            self.num_warm_blocks -= num_blocks
        return removed

    def warm(self, node: Node) -> None:
        """Count one more warm prefix that ends with a node, all the way up. O(depth)."""
        for on_path in _upwards(node):
            if not on_path.num_warm:
                self.num_warm_blocks += len(on_path.blocks)
            on_path.num_warm += 1

    def cool(self, node: Node) -> None:
        """Take back one `warm` of this node, which may have left the tree since. O(depth)."""
        for on_path in _upwards(node):
            on_path.num_warm -= 1
            if not on_path.num_warm:
                self.num_warm_blocks -= len(on_path.blocks)

    def walk(self) -> Iterator[tuple[int, Node]]:
        """Every node with its depth, 0 under a root: depth first, siblings in order of bytes.

        The tree must not change meanwhile.
        """
        for root in self._roots.values():
            stack = [(0, child) for child in reversed(self._children_of(root))]
            while stack:
                depth, node = stack.pop()
                yield depth, node
                if node.num_children:
                    stack += [(depth + 1, child) for child in reversed(self._children_of(node))]

    def check(self) -> None:
        """Assert every invariant of the shape. O(tokens)."""
        num_tokens = num_blocks = 0
        num_children: dict[Node, int] = dict.fromkeys(self._roots.values(), 0)
        previous = b""
        for key, node in self._children.items():
            assert key == self._key(node.parent, node), "a key is not its child's first block"
            assert previous < key, "the children are not sorted"
            assert not (previous and key.startswith(previous)), "a sibling is a prefix of another"
            length = node.num_tokens
            assert len(node.tokens) % TOKEN_BYTES == 0, "a token is cut"
            assert len(node.blocks) == -(-length // self._block_size) > 0, "blocks do not fit"
            assert not (node.num_children and length % self._block_size), "an inner edge is cut"
            assert node.namespace == node.parent.namespace, "namespaces meet"
            if node.notes is not None:
                is_note = node.notes.dtype == np.float32 and node.notes.shape == (length,)
                assert is_note, "notes do not fit the tokens"
                assert not np.isnan(node.notes).all(), "notes are kept though none is known"
            num_children[node.parent] = num_children.get(node.parent, 0) + 1
            num_tokens += length
            num_blocks += len(node.blocks)
            previous = key
        visited = [node for _, node in self.walk()]
        assert len(visited) == len(self._children), "a node is out of reach"
        for node in [*self._roots.values(), *visited]:
            assert node.num_children == num_children.get(node, 0), "children are miscounted"
        ends = {node.last_block: node for node in visited}
        assert self._node_by_last_block == ends, "a node is not found by its last block"
        for namespace, root in self._roots.items():
            is_root = root.parent is None and root.namespace == namespace and not root.tokens
            assert is_root and root.notes is None, "a root is none"
            assert root.num_children, "an empty namespace has a root"
        counted = self.num_tokens, self.num_blocks
        assert (num_tokens, num_blocks) == counted, "tokens or blocks are miscounted"

    def _child(self, node: Node, tokens: TokenBytes, position: int, limit: int) -> Node | None:
        """The child that shares the most of the block at `position`, None if not one token."""
        if not node.num_children or position >= limit:
            return None
        end = min(position + self._block_bytes, limit)
        key = node.id.to_bytes(_ID_BYTES, "big") + tokens[position:end]
        child: Node | None = self._children.get(key)
        if child is not None:
            return child
        first_token = key[: _ID_BYTES + TOKEN_BYTES]
        # Most misses end here: no child begins with that token.
        if not next(self._children.irange(minimum=first_token), b"").startswith(first_token):
            return None
        neighbours = (
            next(self._children.irange(maximum=key, reverse=True), b""),
            next(self._children.irange(minimum=key), b""),
        )
        near = [other for other in neighbours if other.startswith(first_token)]
        best: Node = self._children[max(near, key=lambda other: _num_common_bytes(key, other))]
        return best

    def _children_of(self, node: Node) -> list[Node]:
        """The node's children in order. O(children + log(nodes of the tree))."""
        first, beyond = ((node.id + i).to_bytes(_ID_BYTES, "big") for i in (0, 1))
        return [self._children[key] for key in self._children.irange(first, beyond)]

    def _key(self, parent: Node | None, child: Node) -> bytes:
        assert parent is not None, "a root is nobody's child"
        return parent.id.to_bytes(_ID_BYTES, "big") + child.tokens[: self._block_bytes]

    def _new_node(
        self, parent: Node | None, namespace: Namespace, tokens: bytearray, blocks: BlockIds
    ) -> Node:
        self._next_id += 1
        return Node(
            id=self._next_id, parent=parent, namespace=namespace, tokens=tokens, blocks=blocks
        )

    def _detach(self, leaf: Node) -> None:
        """Take a leaf from its parent, and drop a root that has no other child."""
        parent = leaf.parent
        del self._children[self._key(parent, leaf)]
        assert parent is not None, "a root is nobody's child"
        parent.num_children -= 1
        if parent.parent is None and parent.num_children == 0:
            del self._roots[parent.namespace]


def _upwards(node: Node | None) -> Iterator[Node]:
    """A node and all above it. One that was taken out still knows its parent of then, above which
    the path may have been split but not joined anew."""
    while node is not None:
        yield node
        node = node.parent


def _unknown_notes(num_tokens: int) -> Notes:
    return np.full(num_tokens, np.nan, np.float32)


def _known_part(notes: Notes | None, start: int, stop: int) -> Notes | None:
    """A copy of the notes from `start` to `stop`; None if none of them is known."""
    if notes is None or np.isnan(notes[start:stop]).all():
        return None
    return notes[start:stop].copy()


def _num_common_bytes(a: TokenBytes, b: bytes | bytearray) -> int:
    """Bytes of the longest common prefix of whole tokens; neither may be empty. O(tokens)."""
    count = min(len(a), len(b)) // TOKEN_BYTES
    differs = np.frombuffer(a, np.int32, count) != np.frombuffer(b, np.int32, count)
    first = int(differs.argmax())
    return (first if differs[first] else count) * TOKEN_BYTES
