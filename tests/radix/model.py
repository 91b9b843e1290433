"""A naive model of the prefix cache, and a world of sequences that drives both.

The model keeps one entry for each block of the tree, under the whole prefix that the block ends,
and does everything by looking at all entries. It predicts every result exactly: hits, refusals,
what eviction takes, block tables, notes. The world also keeps a simulated KV memory in which
every row holds the prefix it was computed for, so that sharing the wrong block, copying too late
or writing a row that somebody counts is seen at once.

Everything random comes through `choose(n)`, an integer below n.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from sapwood.radix import (
    Lease,
    Namespace,
    NamespaceKind,
    NamespacePart,
    PrefixCache,
    WarmPrefix,
)

Choose = Callable[[int], int]
Tokens = tuple[int, ...]
Prefix = tuple[Namespace, Tokens]
Notes = tuple[float | None, ...]
Row = Prefix | None

# The bytes of 0 and 256 begin alike, and 256 sorts before 1: an index that took bytes for tokens
# would fail.
ALPHABET = (0, 1, 256)
NAMESPACES: tuple[Namespace, ...] = (
    (NamespacePart(NamespaceKind.TENANT, "x"),),
    (NamespacePart(NamespaceKind.ADAPTER, "x"),),
)
OPERATIONS = {
    "start": 5,
    "copied": 2,
    "launch": 5,
    "land": 3,
    "chunk": 10,
    "decode": 6,
    "draft": 2,
    "publish": 8,
    "fork": 3,
    "finish": 4,
    "preempt": 2,
    "resume": 3,
    "abort": 3,
    "warm": 2,
    "cool": 1,
    "evict": 1,
    "flush": 0.5,
}


@dataclass
class Entry:
    """A block of the tree, as the model sees it."""

    block: int
    stamp: int
    notes: Notes
    """One for each token in the block, None where it is not known."""
    num_warm: int = 0
    """How many warm prefixes it is part of."""


@dataclass(eq=False)
class Warm:
    """A warm prefix: its whole blocks as they were, of which some may have been evicted."""

    handle: WarmPrefix
    prefix: Prefix
    entries: list[Entry]


@dataclass(eq=False)
class Sequence:
    """A request: its tokens, and what is known of its lease while it has one."""

    namespace: Namespace
    tokens: Tokens
    lease: Lease | None = None
    table: list[int] = field(default_factory=list)
    source: int | None = None
    num_copied: int = 0
    num_settled: int = 0
    last_step: int = 0

    def prefix(self, num_tokens: int) -> Prefix:
        return self.namespace, self.tokens[:num_tokens]

    @property
    def live(self) -> Lease:
        assert self.lease is not None
        return self.lease


def array(tokens: Tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def note_array(notes: Notes | None) -> np.ndarray | None:
    return None if notes is None else np.array(notes, np.float32)


def note_tuple(notes: np.ndarray) -> Notes:
    return tuple(None if np.isnan(note) else float(note) for note in notes)


def filled(known: Notes, given: Notes) -> Notes:
    """The known notes, the given ones where they are not, as many as the longer has."""
    pairs = itertools.zip_longest(known, given)
    return tuple(new if old is None else old for old, new in pairs)


def num_common(a: Tokens, b: Tokens) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


def fingerprint(cache: PrefixCache) -> object:
    """Everything the cache consists of, as a value."""
    pool, tree = cache._pool, cache._tree
    nodes = [
        (depth, n.id, n.parent and n.parent.id, n.namespace, bytes(n.tokens), n.blocks.tolist(),
         n.last_used, n.num_children, n.num_warm, n.entry and n.entry[:-1],
         n.notes is not None and n.notes.tobytes())
        for depth, n in tree.walk()
    ]  # fmt: skip
    return (
        pool.refs.tolist(), pool.in_tree.tolist(), pool._free[: pool.num_free].tolist(),
        pool.num_evictable, pool.num_tree_blocks, nodes, list(tree._children), tree._next_id,
        [(ns, root.id, root.num_children) for ns, root in tree._roots.items()],
        tree.num_tokens, tree.num_blocks, [entry[:-1] for entry in cache._queue._entries],
        tree.num_warm_blocks, [(node.id, len(ends)) for node, ends in cache._warm.items()],
        cache.version, cache._num_uses, len(cache._leases),
        [(n, [each.block_ids.tolist() for each in held]) for n, held in cache._fenced.items()],
    )  # fmt: skip


class World:
    """A cache, its naive model, the sequences that use it and the memory they write.

    Every public method but `check` and `end` is one operation; those that have nothing to act on
    do nothing.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cache = PrefixCache(num_blocks, block_size)
        self.block_size = block_size
        self.entries: dict[Prefix, Entry] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.warmed: list[Warm] = []
        self.fenced: list[tuple[int, set[int]]] = []  # (step, blocks that it still needs)
        self.num_launched = self.num_landed = 0
        self.memory: list[list[Row]] = [[None] * block_size for _ in range(num_blocks)]
        self.num_uses = 0
        self.num_notes = 0

    def operate(self, name: str, choose: Choose) -> None:
        """One of OPERATIONS, then everything compared."""
        before, version = set(self.entries), self.cache.version
        getattr(self, name)(choose)
        self.check()
        has_changed = before != set(self.entries)
        assert (self.cache.version != version) == has_changed, (
            "the version moved without a change, or not"
        )

    # Operations

    def start(self, choose: Choose) -> None:
        """A prompt that often begins like one that is running, waiting or in the tree."""
        known = [s.prefix(len(s.tokens)) for s in (*self.running, *self.waiting)]
        known += self.entries
        namespace, tokens = NAMESPACES[choose(2)], ()
        if known and choose(4):
            namespace, tokens = known[choose(len(known))]
            tokens = tokens[: choose(len(tokens) + 1)] if choose(2) else tokens
        num_new = choose(2 * self.block_size + 1) or not tokens
        tokens += tuple(ALPHABET[choose(3)] for _ in range(num_new))
        sequence = Sequence(namespace, tokens)
        room = max(0, len(tokens) + choose(4) - 1)
        self._acquire(sequence, room, self._choose_cap(sequence, choose))

    def copied(self, choose: Choose) -> None:
        if pending := [s for s in self.running if s.source is not None]:
            self._copy(pending[choose(len(pending))])

    def launch(self, choose: Choose) -> None:
        """A step of some of those that run is in flight."""
        self.num_launched += 1
        for sequence in self.running:
            if choose(2):
                sequence.live.launched(self.num_launched)
                sequence.last_step = self.num_launched

    def land(self, choose: Choose) -> None:
        """The oldest step in flight ends."""
        if self.num_landed < self.num_launched:
            self.num_landed += 1
            self.cache.ended(self.num_landed)
            self.fenced = [each for each in self.fenced if each[0] > self.num_landed]

    def chunk(self, choose: Choose) -> None:
        if sequence := self._pick(choose):
            room = min(len(sequence.tokens), len(sequence.table) * self.block_size)
            self._compute(
                sequence, min(room, sequence.num_settled + 1 + choose(2 * self.block_size))
            )

    def decode(self, choose: Choose) -> None:
        sequence = self._pick(choose)
        if sequence is None:
            return
        num_tokens = len(sequence.tokens) + 1
        if self._extend(sequence, num_tokens):
            sequence.tokens += (ALPHABET[choose(3)],)
            self._compute(sequence, num_tokens)

    def draft(self, choose: Choose) -> None:
        """Write a row that will be rejected: behind the settled ones whatever may be."""
        if (sequence := self._pick(choose)) and sequence.source is None:
            index, row = divmod(sequence.num_settled, self.block_size)
            if index < len(sequence.table):
                self._write(sequence.table[index], row, None)

    def publish(self, choose: Choose) -> None:
        if sequence := self._pick(choose):
            self._publish(sequence, choose)

    def fork(self, choose: Choose) -> None:
        if sequence := self._pick(choose):
            tokens = sequence.tokens[: sequence.num_settled]
            child = Sequence(sequence.namespace, tokens + (ALPHABET[choose(3)],))
            notes = self._choose_notes(sequence, choose)
            self._predict_publish(sequence, notes)
            expected = self._predict_acquire(child, len(tokens), len(tokens) + 1)
            lease = sequence.live.fork(array(tokens), note_array(notes))
            self._check_lease(child, lease, expected)

    def finish(self, choose: Choose) -> None:
        if sequence := self._pick(choose):
            self._publish(sequence, choose)
            self._release(sequence)

    def preempt(self, choose: Choose) -> None:
        if sequence := self._pick(choose):
            self._publish(sequence, choose)
            self._release(sequence)
            self.waiting.append(sequence)

    def resume(self, choose: Choose) -> None:
        if self.waiting:
            sequence = self.waiting.pop(choose(len(self.waiting)))
            cap = self._choose_cap(sequence, choose)
            if not self._acquire(sequence, len(sequence.tokens), cap):
                self.waiting.append(sequence)

    def abort(self, choose: Choose) -> None:
        if sequence := self._pick(choose):
            self._release(sequence)

    def warm(self, choose: Choose) -> None:
        known = [s.prefix(len(s.tokens)) for s in (*self.running, *self.waiting)]
        known += self.entries
        if not known:
            return
        namespace, tokens = known[choose(len(known))]
        tokens = tokens[: choose(len(tokens)) + 1] if choose(2) else tokens
        entries = self._whole_entries(namespace, tokens)
        for entry in entries:
            entry.num_warm += 1
        handle = self.cache.warm(array(tokens), namespace)
        assert (handle is not None) == bool(entries), "what is not cached was warmed, or not"
        if handle is not None:
            prefix = namespace, tokens[: len(entries) * self.block_size]
            self.warmed.append(Warm(handle, prefix, entries))

    def cool(self, choose: Choose) -> None:
        if self.warmed:
            warm = self.warmed.pop(choose(len(self.warmed)))
            for entry in warm.entries:
                entry.num_warm -= 1
            self.cache.cool(warm.handle)

    def evict(self, choose: Choose) -> None:
        num_blocks = choose(self.cache.num_blocks + 1)
        expected = min(num_blocks, self.cache.num_evictable_blocks)
        self._predict_evict(expected)
        assert self.cache.evict(num_blocks) == expected

    def flush(self, choose: Choose) -> None:
        self._predict_evict(self.cache.num_evictable_blocks)
        self.cache.flush()
        assert self.cache.num_evictable_blocks == 0

    def end(self) -> None:
        """End everything; nothing may be left."""
        for sequence in list(self.running):
            self._release(sequence)
            self.check()
        while self.num_landed < self.num_launched:
            self.land(lambda n: 0)
            self.check()
        assert not self.cache._fenced, "a fence was left behind"
        assert self.cache.num_evictable_blocks == self.cache.num_tree_blocks
        while self.warmed:
            self.cool(lambda n: 0)
            self.check()
        assert self.cache.num_warm_blocks == 0
        self.flush(lambda n: 0)
        self.check()
        assert self.cache.num_free_blocks == self.cache.num_blocks
        assert not self.cache._tree._roots and not self.cache._leases and not self.entries

    # What an operation does to cache, model and memory

    def _acquire(self, sequence: Sequence, num_tokens: int, cap: int | None) -> bool:
        max_cached = len(sequence.tokens) - 1
        if cap is not None:
            max_cached = min(max_cached, cap)
        longest = self._longest(sequence.namespace, sequence.tokens[:max_cached])
        prompt = array(sequence.tokens)
        found = self.cache.match(prompt, sequence.namespace, max_cached=cap)
        assert (found.num_tokens, found.num_whole_blocks) == (longest, longest // self.block_size)
        before = fingerprint(self.cache)
        expected = self._predict_acquire(sequence, max_cached, num_tokens)
        lease = self.cache.acquire(prompt, num_tokens, sequence.namespace, max_cached=cap)
        if lease is None:
            assert fingerprint(self.cache) == before, "a refusal left a trace"
        return self._check_lease(sequence, lease, expected)

    def _copy(self, sequence: Sequence) -> None:
        """What the device does in a step, and the end of that step."""
        copy = sequence.live.copy
        assert copy is not None
        for row in range(copy.num_rows):
            self._write(copy.target, row, self.memory[copy.source][row])
        sequence.live.copied()
        sequence.num_settled += sequence.num_copied
        sequence.source, sequence.num_copied = None, 0

    def _compute(self, sequence: Sequence, end: int) -> None:
        if sequence.source is not None:
            self._copy(sequence)
        for position in range(sequence.num_settled, end):
            index, row = divmod(position, self.block_size)
            self._write(sequence.table[index], row, sequence.prefix(position + 1))
        sequence.num_settled = max(sequence.num_settled, end)

    def _write(self, block: int, row: int, value: Row) -> None:
        counted = {counted for counted, _ in self._counted_rows()}
        assert (block, row) not in counted, "a row that is counted was written again"
        self.memory[block][row] = value

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.block_size) - len(sequence.table)
        before = fingerprint(self.cache)
        fits = missing <= self.cache.num_blocks - len(self._held())
        if fits:
            self._predict_evict(missing - self._num_free())
        assert sequence.live.extend(num_tokens) == fits, "an extension was refused or not"
        if missing <= 0 or not fits:
            assert fingerprint(self.cache) == before
            return fits
        self._take_new(sequence, missing)
        return True

    def _publish(self, sequence: Sequence, choose: Choose) -> None:
        epoch, table = sequence.live.epoch, list(sequence.table)
        notes = self._choose_notes(sequence, choose)
        self._predict_publish(sequence, notes)
        settled = array(sequence.tokens[: sequence.num_settled])
        sequence.live.publish(settled, note_array(notes))
        assert (sequence.live.epoch != epoch) == (sequence.table != table)

    def _release(self, sequence: Sequence) -> None:
        self._let_go(sequence, {*sequence.table, sequence.source})
        sequence.live.release()
        sequence.last_step = 0
        self.running.remove(sequence)
        sequence.lease, sequence.table, sequence.source = None, [], None
        sequence.num_copied = sequence.num_settled = 0

    # The model

    def _predict_acquire(
        self, sequence: Sequence, max_cached: int, num_tokens: int
    ) -> tuple[int, int] | None:
        """Change the model as an acquisition must: (new blocks, rows to copy), None if refused."""
        namespace, query = sequence.prefix(max_cached)
        size = self.block_size
        shared = self._whole_entries(namespace, query)
        num_whole = len(shared) * size
        source, num_rows = self._closest(namespace, query[:num_whole], query[num_whole:][:size])
        assert num_whole + num_rows == self._longest(namespace, query)

        held = self._held() | {entry.block for entry in shared}
        room = self.cache.num_blocks - len(held)

        def num_new() -> int:
            return -(-max(num_tokens, num_whole + num_rows) // size) - len(shared)

        if source is not None and num_new() > room - (source.block not in held):
            source, num_rows = None, 0
        if num_new() > room:
            return None
        self._touch(shared + ([source] if source else []))
        sequence.table = [entry.block for entry in shared]
        sequence.source = source.block if source else None
        sequence.num_copied = num_rows
        sequence.num_settled = num_whole
        self.running.append(sequence)
        self._predict_evict(num_new() - self._num_free())
        return num_new(), num_rows

    def _whole_entries(self, namespace: Namespace, query: Tokens) -> list[Entry]:
        """The whole blocks that are cached of a query, from its beginning."""
        found: list[Entry] = []
        while (end := (len(found) + 1) * self.block_size) <= len(query):
            if (entry := self.entries.get((namespace, query[:end]))) is None:
                break
            found.append(entry)
        return found

    def _check_lease(
        self, sequence: Sequence, lease: Lease | None, expected: tuple[int, int] | None
    ) -> bool:
        """Compare an acquisition with its prediction, and take in the blocks it got."""
        assert (lease is None) == (expected is None), "a request was refused that fits, or not"
        if lease is None or expected is None:
            return False
        num_new, num_rows = expected
        sequence.lease = lease
        assert lease.num_cached == sequence.num_settled + num_rows
        assert (lease.copy.num_rows if lease.copy else 0) == num_rows
        self._take_new(sequence, num_new)
        if lease.copy:
            assert lease.copy.source == sequence.source
            assert lease.copy.target == sequence.table[sequence.num_settled // self.block_size]
        return True

    def _take_new(self, sequence: Sequence, num_blocks: int) -> None:
        """Believe the cache which blocks a lease got, if they were free; they come ascending."""
        table = sequence.live.block_table.tolist()
        new = table[len(sequence.table) :]
        assert len(new) == num_blocks and new == sorted(set(new))
        assert not set(new) & (self._held() | self._in_tree()), "a block was given away twice"
        sequence.table += new

    def _predict_publish(self, sequence: Sequence, notes: Notes | None) -> None:
        if sequence.source is not None:
            return
        namespace, tokens = sequence.prefix(sequence.num_settled)
        size = self.block_size
        used: list[Entry] = []
        for index in range(-(-len(tokens) // size)):
            start, prefix = index * size, tokens[: (index + 1) * size]
            given = (notes or (None,) * len(tokens))[start : len(prefix)]
            entry = self.entries.get((namespace, prefix))
            closest, num_rows = self._closest(namespace, prefix[:start], prefix[start:])
            if len(prefix) % size:
                entry = closest if num_rows == len(given) else None
            elif entry is not None:
                if sequence.table[index] != entry.block:
                    self._let_go(sequence, {sequence.table[index]})
                sequence.table[index] = entry.block
            if entry is None:
                for end in range(start + 1, len(prefix)):
                    self.entries.pop((namespace, prefix[:end]), None)
                known = closest.notes[:num_rows] if closest else ()
                entry = self.entries[namespace, prefix] = Entry(sequence.table[index], 0, known)
            entry.notes = filled(entry.notes, given)
            used.append(entry)
        self._touch(used)

    def _predict_evict(self, num_blocks: int) -> None:
        """Take out, one after the other, the least recently used block that ends the tree.

        Those that are warm come last.
        """
        for _ in range(num_blocks):
            held = self._held()
            inner = {(ns, tokens[: self._start(tokens)]) for ns, tokens in self.entries}
            *_, prefix = min(
                (entry.num_warm > 0, entry.stamp, prefix)
                for prefix, entry in self.entries.items()
                if prefix not in inner and entry.block not in held
            )
            del self.entries[prefix]

    def _touch(self, entries: list[Entry]) -> None:
        self.num_uses += 1
        for entry in entries:
            entry.stamp = self.num_uses

    def _notes(self, namespace: Namespace, query: Tokens) -> Notes:
        """What is known of the longest prefix of `query` that is in the tree."""
        notes: Notes = ()
        size = self.block_size
        while (end := len(notes) + size) <= len(query):
            if (entry := self.entries.get((namespace, query[:end]))) is None:
                break
            notes += entry.notes
        above, rest = query[: len(notes)], query[len(notes) :]
        closest, num_rows = self._closest(namespace, above, rest[:size])
        return notes + closest.notes[:num_rows] if closest else notes

    def _longest(self, namespace: Namespace, query: Tokens) -> int:
        """The longest prefix of `query` that was published and not evicted."""
        return max((num_common(query, t) for ns, t in self.entries if ns == namespace), default=0)

    def _closest(
        self, namespace: Namespace, above: Tokens, rest: Tokens
    ) -> tuple[Entry | None, int]:
        """The block behind `above` that begins most like `rest`; of two, the lower neighbour."""
        key = array(rest).tobytes()
        children = {
            array(tokens[len(above) :]).tobytes(): tokens
            for ns, tokens in self.entries
            if ns == namespace
            and tokens[: len(above)] == above
            and self._start(tokens) == len(above)
        }
        lower = [k for k in sorted(children) if k <= key][-1:]
        upper = [k for k in sorted(children) if k >= key][:1]
        near = [children[k] for k in lower + upper]
        best = max(near, key=lambda tokens: num_common(tokens[len(above) :], rest), default=None)
        num_rows = num_common(best[len(above) :], rest) if best else 0
        return (self.entries[namespace, best], num_rows) if best and num_rows else (None, 0)

    def _start(self, tokens: Tokens) -> int:
        """Where the block that ends a prefix begins."""
        return (len(tokens) - 1) // self.block_size * self.block_size

    def _let_go(self, sequence: Sequence, blocks: set[int | None]) -> None:
        """Blocks that a sequence no longer holds and steps in flight may still use."""
        if sequence.last_step > self.num_landed:
            self.fenced.append((sequence.last_step, {b for b in blocks if b is not None}))

    def _held(self) -> set[int]:
        """The blocks that leases hold, and those behind a fence."""
        sources = {s.source for s in self.running if s.source is not None}
        fenced = [blocks for _, blocks in self.fenced]
        return sources.union(*fenced, *(s.table for s in self.running))

    def _in_tree(self) -> set[int]:
        return {entry.block for entry in self.entries.values()}

    def _num_free(self) -> int:
        return self.cache.num_blocks - len(self._held() | self._in_tree())

    def _counted_rows(self) -> Iterator[tuple[tuple[int, int], Prefix]]:
        """Each row that the tree or a lease counts on, and what must be in it."""
        for (namespace, tokens), entry in self.entries.items():
            start = self._start(tokens)
            for row in range(len(tokens) - start):
                yield (entry.block, row), (namespace, tokens[: start + row + 1])
        for sequence in self.running:
            for position in range(sequence.num_settled):
                index, row = divmod(position, self.block_size)
                yield (sequence.table[index], row), sequence.prefix(position + 1)
            for row in range(sequence.num_copied):
                assert sequence.source is not None
                yield (sequence.source, row), sequence.prefix(sequence.num_settled + row + 1)

    def _pick(self, choose: Choose) -> Sequence | None:
        return self.running[choose(len(self.running))] if self.running else None

    def _choose_cap(self, sequence: Sequence, choose: Choose) -> int | None:
        return choose(len(sequence.tokens) + 1) if choose(3) == 0 else None

    def _choose_notes(self, sequence: Sequence, choose: Choose) -> Notes | None:
        """Notes that were never given before for some of the settled tokens, or for none."""
        if not choose(3):
            return None
        self.num_notes += sequence.num_settled
        is_known = choose(1 << sequence.num_settled)
        return tuple(
            float(self.num_notes - i) if is_known >> i & 1 else None
            for i in range(sequence.num_settled)
        )

    # Comparison

    def check(self) -> None:
        """Compare everything that can be seen, and look into the memory."""
        cache = self.cache
        cache.check()
        self._check_tree()
        held, in_tree = self._held(), self._in_tree()
        assert cache.num_free_blocks == self._num_free()
        assert cache.num_evictable_blocks == len(in_tree - held)
        assert cache.num_tree_blocks == len(in_tree) == len(self.entries)
        num_warm = sum(entry.num_warm > 0 for entry in self.entries.values())
        assert cache.num_warm_blocks == num_warm, "other blocks are warm"
        holders = [set(s.table) | {s.source} for s in self.running]
        for index, sequence in enumerate(self.running):
            lease = sequence.live
            fenced = [blocks for _, blocks in self.fenced]
            others = set().union(*fenced, *holders[:index], *holders[index + 1 :])
            assert lease.block_table.tolist() == sequence.table
            assert lease.num_exclusive_blocks == len(set(sequence.table) - others)
            assert lease.num_shared_blocks == self._num_shared(sequence)
        for block in range(cache.num_blocks):
            if block not in held | in_tree:
                self.memory[block] = [None] * self.block_size
        for sequence in self.running + self.waiting:
            actual = cache.notes(array(sequence.tokens), sequence.namespace)
            expected = self._notes(sequence.namespace, sequence.tokens)
            assert note_tuple(actual) == expected, "other notes than were given"
            self._check_warm_prefixes(sequence)
        for (block, row), prefix in self._counted_rows():
            assert self.memory[block][row] == prefix, "a counted row holds something else"

    def _check_warm_prefixes(self, sequence: Sequence) -> None:
        """Those found are the ones whose end is still the cached one, longest first."""
        reached = [id(e) for e in self._whole_entries(sequence.namespace, sequence.tokens)]
        expected = [warm for warm in self.warmed if id(warm.entries[-1]) in reached]
        expected.sort(key=lambda warm: -len(warm.entries))
        found = self.cache.warm_prefixes(array(sequence.tokens), sequence.namespace)
        assert found == [warm.handle for warm in expected]

    def _check_tree(self) -> None:
        """The tree holds the model's blocks and notes, each last used when the model says."""
        actual: dict[Prefix, Entry] = {}
        num_tokens = 0
        path: list[Tokens] = []
        for depth, node in self.cache._tree.walk():
            above = sum(path[:depth], ())
            edge = tuple(np.frombuffer(bytes(node.tokens), np.int32).tolist())
            path[depth:] = [edge]
            num_tokens += len(edge)
            notes = (None,) * len(edge) if node.notes is None else note_tuple(node.notes)
            for index, block in enumerate(node.blocks.tolist()):
                start, end = index * self.block_size, (index + 1) * self.block_size
                entry = Entry(block, node.last_used, notes[start:end], node.num_warm)
                actual[node.namespace, above + edge[:end]] = entry
        assert actual == self.entries, "the tree holds something else than was published"
        assert num_tokens == self.cache.num_cached_tokens

    def _num_shared(self, sequence: Sequence) -> int:
        for index, block in enumerate(sequence.table):
            entry = self.entries.get(sequence.prefix((index + 1) * self.block_size))
            is_whole = (index + 1) * self.block_size <= len(sequence.tokens)
            if entry is None or not is_whole or entry.block != block:
                return index
        return len(sequence.table)
