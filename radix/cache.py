"""The prefix cache: leases on blocks, and the tree through which leases share them.

    LeaseReleased   a verb was called on a lease that has ended

Knows nothing of tensors, requests or devices, and reads no clock: time is a count of uses.
The idea of keeping finished requests' blocks in a radix tree is from Zheng et al. 2024, §3;
reference-counted blocks and copy on write are from Kwon et al. 2023, §4.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sapwood.radix.eviction import LRU, EvictionPolicy, EvictionQueue
from sapwood.radix.namespace import Namespace, check_namespace
from sapwood.radix.pool import BlockIds, BlockPool
from sapwood.radix.tree import TOKEN_BYTES, Node, Notes, Path, RadixTree, TokenBytes

TokenIds: TypeAlias = npt.NDArray[np.int32]
_Indices: TypeAlias = npt.NDArray[np.intp]
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


class LeaseReleased(RuntimeError):
    """A verb was called on a lease that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the tree holds of a prompt; at least its last token is left to compute."""

    num_tokens: int
    num_whole_blocks: int
    """How many blocks would be shared; the rows beyond them would be copied."""
    num_held_blocks: int
    """How many of those some lease holds already, so that sharing them takes up no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy the first `num_rows` rows of block `source` to block `target`, in every layer."""

    source: int
    target: int
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class WarmPrefix:
    """Whole blocks that are evicted last; made by `PrefixCache.warm`, ended by its `cool`."""

    node: Node
    """The node that it ends with, also if that has been evicted."""
    last_block: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it was evicted."""
        return bool(self.node.blocks.size) and self.node.last_block == self.last_block


@dataclass(frozen=True, slots=True, eq=False)
class _Fenced:
    """What a lease has let go of and a step in flight may still read or write: held meanwhile."""

    block_ids: BlockIds
    ends: tuple[int, ...]
    """Those of the blocks that a leaf of the tree may end in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node of the tree as it was when walked over."""

    depth: int
    """How many nodes are above it in its namespace."""
    namespace: Namespace
    token_ids: TokenIds
    """Read-only, int32 `[num_tokens]`."""
    num_blocks: int
    num_holders: int
    """How many leases hold its first block; further down there can only be fewer."""
    last_used: int
    """The count of uses, an order and not a time."""
    is_leaf: bool


class PrefixCache:
    """A pool of blocks, and the tree of what their keys and values were computed from.

    Not thread-safe. Token ids are one-dimensional int32 arrays; anything else raises TypeError
    or ValueError. Costs below leave out O(log(nodes of the tree)) for every node on a path.

    Beside each cached token the tree can keep a note, an opaque float32 that whoever publishes
    may give; NaN is an unknown one. Notes take four bytes for each token of an edge that has a
    known one, and nothing elsewhere. They leave with their tokens.

    Steps may be in flight: a lease is told of each (`Lease.launched`), the cache of its end
    (`ended`). What a lease lets go of before that stays behind a fence: it is held as if the lease
    still did, neither free nor evictable, until the last step that knew the lease has ended.

    Invariants: a block's count in the pool is the number of leases that hold it, one for the tree,
    and one for each time it is behind a fence; whoever holds a block of the tree holds those before
    it, so counts never grow towards the leaves; the queue holds exactly the leaves whose last block
    the tree alone holds; a node is warm if and only if a warm prefix ends with it or below it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        policy: Callable[[], EvictionPolicy] = LRU,
        enabled: bool = True,
    ) -> None:
        """`block_size` is in tokens; `policy` makes the policy, one for each cache.

        Without `enabled` nothing is kept: no match, no sharing, leases as ever.
        """
        self.block_size = block_size
        self.enabled = enabled
        self.version = 0
        """Changes whenever a match could; notes change no match."""
        self._pool = BlockPool(num_blocks, block_size)
        self._tree = RadixTree(block_size)
        self._queue = EvictionQueue(policy())
        self._leases: set[Lease] = set()
        self._fenced: dict[int, list[_Fenced]] = {}  # by the step whose end lets go of them
        self._num_ended_steps = 0  # the number of the last one
        self._warm: dict[Node, list[WarmPrefix]] = {}  # by the node they end with
        self._num_uses = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that the tree alone holds: exactly as many as `evict` can free. O(1)."""
        return self._pool.num_evictable

    @property
    def num_tree_blocks(self) -> int:
        return self._pool.num_tree_blocks

    @property
    def num_warm_blocks(self) -> int:
        """Blocks of the tree that are part of a warm prefix, held by leases or not. O(1)."""
        return self._tree.num_warm_blocks

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the tree, each counted once however many prompts share it."""
        return self._tree.num_tokens

    def match(
        self, token_ids: TokenIds, namespace: Namespace = (), *, max_cached: int | None = None
    ) -> Match:
        """What `acquire` would find now. Changes nothing. O(tokens)."""
        check_namespace(namespace)
        tokens = _to_bytes(token_ids)
        path = self._tree.find(namespace, tokens, _hit_limit(token_ids, max_cached))
        return Match(
            num_tokens=path.num_tokens,
            num_whole_blocks=path.num_blocks,
            num_held_blocks=self._pool.num_shared(path.block_ids),
        )

    def notes(self, token_ids: TokenIds, namespace: Namespace = ()) -> Notes:
        """The notes of the longest cached prefix of all of `token_ids`, its last token included.

        Float32 `[num_tokens]` of that prefix, a copy, NaN where a note is not known. If several
        blocks begin with its last tokens, each has notes of its own, and these are of one of
        them: the one that a publication of `token_ids` would take them over from. Changes nothing.
        O(tokens).
        """
        check_namespace(namespace)
        path = self._tree.find(namespace, _to_bytes(token_ids), len(token_ids))
        return self._tree.notes(path)

    def acquire(
        self,
        token_ids: TokenIds,
        num_tokens: int,
        namespace: Namespace = (),
        *,
        max_cached: int | None = None,
    ) -> "Lease | None":
        """Lease the longest cached prefix of `token_ids` and room up to `num_tokens` tokens.

        The prefix leaves at least the last token to compute, and is no longer than `max_cached`
        tokens if that is given. Inside a block it ends in a copy, whatever ends it.

        The lease has blocks for `num_tokens` tokens in all, or for the cached ones if they are
        more. Evicts as many blocks as it lacks. None if they cannot be had now, and then nothing
        has changed. If only holding the block to copy from is in the way, the lease goes
        without the copy. O(tokens + blocks).
        """
        check_namespace(namespace)
        tokens = _to_bytes(token_ids)
        limit = _hit_limit(token_ids, max_cached)
        return self._acquire(tokens, limit, num_tokens, namespace)

    def evict(self, num_blocks: int) -> int:
        """Take blocks that no lease holds out of the tree, leaves first, in the policy's order.

        Returns how many it freed: `num_blocks`, or all there were. O(1) nodes for each leaf.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot evict {num_blocks} blocks; ask for zero or more")
        num_freed, freed = 0, []
        while num_freed < num_blocks and (leaf := self._queue.first()) is not None:
            last = leaf.blocks[num_freed - num_blocks :]
            if self._pool.refs[last[0]] > 1:
                # Counts never grow along an edge: what leases hold comes first.
                last = last[self._pool.num_shared(last) :]
            freed.append(self._tree.trim(leaf, len(last)))
            num_freed += len(last)
            self._requeue(leaf)
            if not leaf.blocks.size:
                self._requeue(leaf.parent)
        if freed:
            self._pool.leave_tree(np.concatenate(freed))
            self.version += 1
        return num_freed

    def warm(self, token_ids: TokenIds, namespace: Namespace = ()) -> WarmPrefix | None:
        """Have the cached whole blocks of `token_ids` evicted after all that is not warm.

        Until `cool`. That is an order and not a hold: it takes room from nobody, and what is
        evicted all the same has gone. What is added behind the prefix is not warm. None if no
        whole block is cached. O(tokens).
        """
        check_namespace(namespace)
        path = self._tree.find(namespace, _to_bytes(token_ids), len(token_ids))
        path.drop_rows()
        if not path.nodes:
            return None
        self._cut(path)
        prefix = WarmPrefix(path.nodes[-1], path.nodes[-1].last_block)
        self._tree.warm(prefix.node)
        self._requeue(prefix.node)
        self._warm.setdefault(prefix.node, []).append(prefix)
        return prefix

    def cool(self, prefix: WarmPrefix) -> None:
        """End the warmth of a prefix. Raises ValueError if it is not warm (any more). O(depth)."""
        ending = self._warm.get(prefix.node, [])
        if prefix not in ending:
            raise ValueError("the prefix is not warm in this cache; cool each once")
        ending.remove(prefix)
        if not ending:
            del self._warm[prefix.node]
        self._tree.cool(prefix.node)
        node: Node | None = prefix.node
        while node is not None and not node.blocks.size:
            node = node.parent  # its own end was evicted
        self._requeue(node)

    def warm_prefixes(self, token_ids: TokenIds, namespace: Namespace = ()) -> list[WarmPrefix]:
        """The warm prefixes that `token_ids` begin with and that are still whole, longest first.

        Of those that end alike the first that was warmed comes first. Changes nothing. O(tokens).
        """
        if not self._warm:
            return []
        check_namespace(namespace)
        path = self._tree.find(namespace, _to_bytes(token_ids), len(token_ids))
        path.drop_rows()
        nodes = path.nodes
        if nodes and path.end < len(nodes[-1].blocks):
            nodes = nodes[:-1]  # left before its end
        ending = (prefix for node in reversed(nodes) for prefix in self._warm.get(node, ()))
        return [prefix for prefix in ending if prefix.is_whole]

    def ended(self, step: int) -> None:
        """Say that a step has ended, and with it every one before: no more reads, no more writes.

        Lets go of what was fenced for it. Raises ValueError if it had ended before. O(blocks).
        """
        if step <= self._num_ended_steps:
            raise ValueError(f"step {step} ended before step {self._num_ended_steps} did")
        self._num_ended_steps = step
        for number in [number for number in self._fenced if number <= step]:
            for fenced in self._fenced.pop(number):
                self._let_go(fenced.block_ids, fenced.ends)

    def flush(self) -> None:
        """Drop everything that no lease holds; leases, and steps in flight, keep what they have."""
        self.evict(self.num_evictable_blocks)

    def walk(self) -> Iterator[NodeView]:
        """Every node, depth first, siblings in a fixed order; nothing may change meanwhile."""
        for depth, node in self._tree.walk():
            yield NodeView(
                depth=depth,
                namespace=node.namespace,
                token_ids=np.frombuffer(bytes(node.tokens), np.int32),
                num_blocks=len(node.blocks),
                num_holders=int(self._pool.refs[node.blocks[0]]) - 1,
                last_used=node.last_used,
                is_leaf=node.num_children == 0,
            )

    def check(self) -> None:
        """Assert every invariant, down to who holds each block. O(tokens + blocks)."""
        pool = self._pool
        for part in (pool, self._tree, self._queue):
            part.check()
        nodes = [node for _, node in self._tree.walk()]
        candidates = {node for node in nodes if self._is_candidate(node)}
        assert candidates == set(self._queue), "the candidates for eviction differ"
        blocks = np.sort(np.concatenate([[], *(node.blocks for node in nodes)]))
        assert np.array_equal(blocks, np.flatnonzero(pool.in_tree)), (
            "the flags differ from the tree"
        )

        before = np.full(pool.num_blocks, -1)
        for node in nodes:
            before[node.blocks[1:]] = node.blocks[:-1]
            if node.parent is not None and node.parent.blocks.size:
                before[node.blocks[0]] = node.parent.last_block
        self._check_warm(nodes)
        assert all(number > self._num_ended_steps for number in self._fenced), "an old fence"
        fenced = [each.block_ids for by_step in self._fenced.values() for each in by_step]
        refs = pool.in_tree.astype(np.int32)
        for held in [*(lease.held_blocks() for lease in self._leases), *fenced]:
            refs += np.bincount(held, minlength=pool.num_blocks).astype(np.int32)
            above = before[held[pool.in_tree[held]]]
            assert np.isin(above, [-1, *held]).all(), "a lease holds a block but not one above it"
        for lease in self._leases:
            shared = lease.block_table[: lease.num_shared_blocks]
            assert pool.in_tree[shared].all(), "a shared block is not in the tree"
            assert (before[shared[1:]] == shared[:-1]).all(), "the shared blocks are no path"
        assert np.array_equal(refs, pool.refs), "the counts differ from the holders"

    def _check_warm(self, nodes: list[Node]) -> None:
        num_warm: Counter[Node] = Counter()
        for ending, prefixes in self._warm.items():
            assert prefixes, "a node is noted as the end of no warm prefix"
            node: Node | None = ending
            while node is not None:
                num_warm[node] += len(prefixes)
                node = node.parent
        num_blocks = 0
        for node in nodes:
            assert node.num_warm == num_warm[node], "warm prefixes are miscounted"
            num_blocks += len(node.blocks) if node.num_warm else 0
        assert self._tree.num_warm_blocks == num_blocks, "warm blocks are miscounted"

    def _acquire(
        self, tokens: TokenBytes, max_cached: int, num_tokens: int, namespace: Namespace
    ) -> "Lease | None":
        num_blocks = self._num_blocks_for(num_tokens)
        path = self._tree.find(namespace, tokens, max_cached)
        shared = path.block_ids
        # Held first, so that what is left of free + evictable is what the rest may take.
        self._pool.hold(shared)
        if path.num_rows:
            source = np.array([path.row_block], np.int32)
            self._pool.hold(source)
            if not self._fits(self._num_new_blocks(path, num_blocks)):
                self._pool.release(source)
                path.drop_rows()
        num_new = self._num_new_blocks(path, num_blocks)
        if not self._fits(num_new):
            self._pool.release(shared)
            return None
        self._use(path)
        own = self._allocate(num_new)
        lease = Lease(self, namespace, path, np.concatenate((shared, own)))
        self._leases.add(lease)
        return lease

    def _num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks tokens take. Raises ValueError for a negative number of them."""
        if num_tokens < 0:
            raise ValueError(f"cannot make room for {num_tokens} tokens; ask for zero or more")
        return -(-num_tokens // self.block_size)

    def _num_new_blocks(self, path: Path, num_blocks: int) -> int:
        """How many blocks of its own a lease on `path` needs, to have `num_blocks` or its rows."""
        return max(num_blocks, self._num_blocks_for(path.num_tokens)) - path.num_blocks

    def _fits(self, num_blocks: int) -> bool:
        return num_blocks <= self._pool.num_free + self._pool.num_evictable

    def _allocate(self, num_blocks: int) -> BlockIds:
        """Take blocks that fit, evicting what is missing."""
        missing = num_blocks - self._pool.num_free
        if missing > 0:
            self.evict(missing)
        return self._pool.allocate(num_blocks)

    def _use(self, path: Path) -> None:
        """Make a path's blocks the last used; cut the last node where the use ends."""
        self._num_uses += 1
        if not path.nodes:
            return
        self._cut(path)
        for node in path.nodes:
            node.last_used = self._num_uses
        self._requeue(path.nodes[-1])

    def _cut(self, path: Path) -> None:
        """Cut the last node of a path where the path ends, behind the block its rows are in."""
        last = path.nodes[-1]
        num_used = path.end + (path.num_rows > 0)
        if num_used < len(last.blocks):
            path.nodes[-1] = self._tree.split(last, num_used)
            self._requeue(last)

    def _publish(self, lease: "Lease", tokens: TokenBytes, notes: Notes | None) -> None:
        """Adopt the tree's blocks for a lease's settled tokens and add what the tree lacks."""
        num_tokens = len(tokens) // TOKEN_BYTES
        path = self._tree.find(lease.namespace, tokens, num_tokens)
        own = lease.block_table[path.num_blocks : self._num_blocks_for(num_tokens)]
        if path.num_tokens == num_tokens:
            own = own[:0]
        theirs = path.block_ids
        (differing,) = (theirs != lease.block_table[: path.num_blocks]).nonzero()
        self._check_same_sequence(lease, path, differing, own)
        if differing.size:
            self._adopt(lease, differing, theirs[differing])
        if own.size:
            self._insert(lease, path, tokens, own, notes)
        else:
            self._use(path)
        if notes is not None:
            self._tree.fill_notes(path, notes)
        num_shared = num_tokens // self.block_size if own.size else path.num_blocks
        lease.num_shared_blocks = max(lease.num_shared_blocks, num_shared)

    def _check_same_sequence(
        self, lease: "Lease", path: Path, differing: _Indices, own: BlockIds
    ) -> None:
        """Raise ValueError if the tokens of `path` are not those the lease has in the tree."""
        is_same = not differing.size or differing[0] >= lease.num_shared_blocks
        if own.size and self._pool.in_tree[own[0]]:
            # A block of ours that is in the tree already can only be the partly filled one that
            # we published, and only have grown.
            is_grown = self._tree.ends_in_partial_leaf(path) and path.row_block == own[0]
            is_same = is_same and is_grown
        if not is_same:
            raise ValueError(
                "the tokens differ from those that this lease was acquired for or has published; "
                "publish one growing sequence under a lease"
            )

    def _adopt(self, lease: "Lease", indices: _Indices, block_ids: BlockIds) -> None:
        """Take the tree's blocks in place of equal ones of the lease's own."""
        table = lease.block_table
        own = table[indices]
        self._pool.hold(block_ids)
        table[indices] = block_ids
        self._let_go_after(lease, own)
        lease.epoch += 1

    def _insert(
        self, lease: "Lease", path: Path, tokens: TokenBytes, own: BlockIds, notes: Notes | None
    ) -> None:
        """Add the blocks `own` behind the whole blocks of `path`, which it is shortened to.

        What is known of its rows goes over to the block that takes their place, or that begins
        with the same tokens.
        """
        row_notes = self._tree.row_notes(path)
        if self._tree.ends_in_partial_leaf(path):
            # Ours continues it: it is taken out, and enters again grown if it is the same block.
            leaf = path.nodes[-1]
            self._pool.leave_tree(self._tree.trim(leaf, 1))
            self._requeue(leaf)
        path.drop_rows()
        self._use(path)
        above = path.nodes[-1] if path.nodes else None
        rest = tokens[path.num_tokens * TOKEN_BYTES :]
        node = self._tree.append(lease.namespace, above, rest, own)
        node.last_used = self._num_uses
        start = node.num_tokens - len(rest) // TOKEN_BYTES
        if row_notes is not None:
            node.fill_notes(start, row_notes)
        if notes is not None:
            node.fill_notes(start, notes[path.num_tokens :])
        self._pool.enter_tree(own)
        self.version += 1

    def _let_go_after(
        self, lease: "Lease", block_ids: BlockIds, ends: tuple[int, ...] = ()
    ) -> None:
        """Let go of a lease's blocks once no step in flight may read or write them."""
        if lease.last_step > self._num_ended_steps:
            self._fenced.setdefault(lease.last_step, []).append(_Fenced(block_ids, ends))
        else:
            self._let_go(block_ids, ends)

    def _let_go(self, block_ids: BlockIds, ends: tuple[int, ...]) -> None:
        """Take a holder from blocks; `ends` are those that a leaf of the tree may end in."""
        self._pool.release(block_ids)
        for block_id in ends:
            self._requeue(self._tree.node_ending_in(block_id))

    def _requeue(self, node: Node | None) -> None:
        """Bring a node's place among the candidates up to date. O(log(candidates))."""
        if node is not None:
            self._queue.update(node, self._is_candidate(node))

    def _is_candidate(self, node: Node) -> bool:
        """Whether a node is a leaf of the tree whose last block no lease holds."""
        if node.num_children or not node.blocks.size:
            return False
        return bool(self._pool.refs[node.blocks[-1]] == 1)


class Lease:
    """A request's blocks: a prefix that it shares through the tree, then blocks of its own.

    Made by `PrefixCache.acquire` and `fork`, ended by `release`; any verb after that raises
    LeaseReleased.

    Invariants: the first `num_shared_blocks` blocks are the tree's for the lease's tokens, are
    whole and are never written; the rows of a block of its own that the tree counts are never
    written again.
    """

    __slots__ = (
        "_cache",
        "_table",
        "_is_released",
        "copy",
        "epoch",
        "last_step",
        "namespace",
        "num_blocks",
        "num_cached",
        "num_shared_blocks",
    )

    def __init__(
        self, cache: PrefixCache, namespace: Namespace, path: Path, block_ids: BlockIds
    ) -> None:
        """`block_ids` are those of `path` and the lease's own; it holds them and path's rows."""
        self.namespace = namespace
        self.num_blocks = len(block_ids)
        self.num_cached = path.num_tokens
        """Tokens that need not be computed, with those of the copy."""
        self.copy: BlockCopy | None = None
        """To be done before anything reads the block; None if there is none, or it is done."""
        self.epoch = 0
        """Changes whenever entries of the block table did."""
        self.last_step = 0
        """The last step launched that reads or writes the blocks; 0: none was."""
        self.num_shared_blocks = path.num_blocks
        """Leading blocks of the table that are in the tree, where others may read them."""
        if path.num_rows:
            target = int(block_ids[path.num_blocks])
            self.copy = BlockCopy(source=path.row_block, target=target, num_rows=path.num_rows)
        self._cache = cache
        self._table = block_ids
        self._is_released = False

    @property
    def block_table(self) -> BlockIds:
        """The blocks in order of position, int32 `[num_blocks]`: a view, for this moment only."""
        return self._table[: self.num_blocks]

    @property
    def num_exclusive_blocks(self) -> int:
        """Blocks that no other lease holds: what its release makes free or evictable. O(blocks)."""
        return self._cache._pool.num_exclusive(self.block_table)

    def launched(self, step: int) -> None:
        """Say that a step was launched that reads or writes the blocks. O(1).

        Until the cache is told that it has `ended`, none of the blocks as they are now gets free:
        neither by `release`, nor where `publish` takes the tree's in place of one. Steps have
        growing numbers. Raises ValueError for one that has ended, or is older than the last.
        """
        self._check_live()
        if step < self.last_step or step <= self._cache._num_ended_steps:
            raise ValueError(f"step {step} was launched after a later one, or has ended")
        self.last_step = step

    def copied(self) -> None:
        """Say that `copy` is done in a finished step: its source is let go, its rows are settled.

        Does nothing if no copy is pending. O(1).
        """
        self._check_live()
        if self.copy is not None:
            source, self.copy = self.copy.source, None
            self._cache._let_go(np.array([source], np.int32), (source,))

    def extend(self, num_tokens: int) -> bool:
        """Have blocks for `num_tokens` tokens in all; False if they cannot be had now.

        Evicts as many blocks as it lacks; changes nothing when it fails or the room is there.
        O(blocks added), amortised.
        """
        self._check_live()
        num_blocks = self._cache._num_blocks_for(num_tokens)
        missing = num_blocks - self.num_blocks
        if missing <= 0:
            return True
        if not self._cache._fits(missing):
            return False
        if num_blocks > len(self._table):
            table = np.empty(max(num_blocks, 2 * len(self._table)), np.int32)
            table[: self.num_blocks] = self.block_table
            self._table = table
        self._table[self.num_blocks : num_blocks] = self._cache._allocate(missing)
        self.num_blocks = num_blocks
        return True

    def publish(self, token_ids: TokenIds, notes: Notes | None = None) -> None:
        """Offer all settled tokens of the sequence, from position 0, and their notes to the tree.

        Afterwards the tree holds them, in this lease's blocks or, where it had equal ones, in its
        own, which the lease adopts (see `epoch`). A partly filled last block that the tree does
        not need stays private. While a copy is pending nothing beyond the shared blocks is
        settled, and nothing happens, to notes neither. Allocates no block and cannot be refused.

        `notes` is float32 `[num_tokens]`. Afterwards the tree knows of every token the note that it
        knew before, or else the one that is given here, if that is not NaN; so it is also where
        it held the tokens already.

        Raises ValueError if the tokens do not fit the lease's blocks or contradict what it
        shares already, or if notes are not one for each token; TypeError if they are not float32.
        O(tokens) as a memcmp, and O(new blocks). Notes, given or kept, cost a pass over the four
        bytes of each.
        """
        self._check_live()
        tokens = _to_bytes(token_ids)
        if notes is not None:
            _check_notes(notes, len(token_ids))
        room = self.num_blocks * self._cache.block_size
        if len(token_ids) > room:
            raise ValueError(
                f"{len(token_ids)} tokens were published, the lease has room for {room}; "
                "extend it before they are computed"
            )
        if self._cache.enabled and self.copy is None:
            self._cache._publish(self, tokens, notes)

    def fork(self, token_ids: TokenIds, notes: Notes | None = None) -> "Lease | None":
        """A second lease on the same settled tokens with room for one more: publish, then acquire.

        The two share blocks only through the tree. None if the second does not fit now; what was
        published stays. Raises as `publish` does.
        """
        self.publish(token_ids, notes)
        num_tokens = len(token_ids)
        return self._cache._acquire(
            _to_bytes(token_ids), num_tokens, num_tokens + 1, self.namespace
        )

    def release(self) -> None:
        """End the lease: every block it holds has one holder less, once no step in flight uses it.

        O(blocks).
        """
        self._check_live()
        # Of its path a leaf can end in the last block only: the last whole one, or the partly
        # filled one behind it if that was published.
        last = self.block_table[: self.num_shared_blocks + 1][-2:].tolist()
        if self.copy is not None:
            last.append(self.copy.source)
        self._cache._let_go_after(self, self.held_blocks(), tuple(last))
        self._cache._leases.remove(self)
        self._is_released = True
        self.num_blocks = self.num_shared_blocks = 0
        self.copy = None

    def held_blocks(self) -> BlockIds:
        """Every block the lease counts as a holder of: its table, and the source of its copy."""
        if self.copy is None:
            return self.block_table
        return np.append(self.block_table, np.int32(self.copy.source))

    def _check_live(self) -> None:
        if self._is_released:
            raise LeaseReleased("the lease was released; acquire another one")


def _hit_limit(token_ids: TokenIds, max_cached: int | None) -> int:
    """How many tokens may be a hit. Raises ValueError for a negative `max_cached`."""
    limit = len(token_ids) - 1
    if max_cached is None:
        return limit
    if max_cached < 0:
        raise ValueError(f"cannot take {max_cached} tokens from the cache; ask for zero or more")
    return min(limit, max_cached)


def _check_notes(notes: Notes, num_tokens: int) -> None:
    """Raise TypeError or ValueError unless there is one float32 for each token."""
    if not isinstance(notes, np.ndarray) or notes.dtype != _FLOAT32:
        kind = getattr(notes, "dtype", type(notes).__name__)
        raise TypeError(
            f"notes must be a numpy array of float32, got {kind}; "
            "convert them once, where they are made, with np.asarray(notes, np.float32)"
        )
    if notes.shape != (num_tokens,):
        raise ValueError(
            f"notes of shape {notes.shape} were given for {num_tokens} tokens; "
            "give one for each token, NaN where it is not known"
        )


def _to_bytes(token_ids: TokenIds) -> memoryview:
    """The tokens as the tree compares them, a view if they are contiguous."""
    if not isinstance(token_ids, np.ndarray) or token_ids.dtype != _INT32:
        kind = getattr(token_ids, "dtype", type(token_ids).__name__)
        raise TypeError(
            f"token ids must be a numpy array of int32, got {kind}; "
            "convert them once, where they are made, with np.asarray(token_ids, np.int32)"
        )
    if token_ids.ndim != 1:
        raise ValueError(
            f"token ids must be one-dimensional, got shape {token_ids.shape}; pass one sequence"
        )
    return np.ascontiguousarray(token_ids).view(np.uint8).data
