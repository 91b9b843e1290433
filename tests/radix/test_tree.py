"""The tree alone: token prefixes to block ids."""

import numpy as np
import pytest

from sapwood.radix import Node, RadixTree


def data(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def grown(block_size: int = 2) -> tuple[RadixTree, Node]:
    """A tree with one edge of six tokens."""
    tree = RadixTree(block_size)
    node = tree.append((), None, data(1, 2, 3, 4, 5, 6), blocks(*range(-(-6 // block_size))))
    node.last_used = 7
    return tree, node


def test_a_path_ends_where_the_tokens_do() -> None:
    tree, node = grown()
    path = tree.find((), data(1, 2, 3, 4, 5, 9), 6)
    assert (path.nodes, path.end, path.num_blocks, path.num_rows) == ([node], 2, 2, 1)
    assert path.block_ids.tolist() == [0, 1]
    assert path.row_block == 2
    assert path.num_tokens == 5
    path.drop_rows()
    assert (path.nodes, path.num_tokens, path.num_rows) == ([node], 4, 0)


def test_a_path_can_be_cut_short() -> None:
    tree, _ = grown()
    for max_tokens in range(-1, 7):
        path = tree.find((), data(1, 2, 3, 4, 5, 6), max_tokens)
        assert path.num_tokens == max(0, max_tokens)
        assert path.num_blocks == max(0, max_tokens) // 2


def test_a_path_of_rows_only_has_no_node_when_they_are_dropped() -> None:
    tree, node = grown(block_size=4)
    path = tree.find((), data(1, 2, 9), 3)
    assert (path.nodes, path.end, path.num_rows) == ([node], 0, 2)
    path.drop_rows()
    assert (path.nodes, path.end, path.num_tokens) == ([], 0, 0)
    assert path.block_ids.size == 0


def test_a_cut_leaves_the_lower_half_the_same_node() -> None:
    tree, node = grown()
    first_id = node.id
    upper = tree.split(node, 1)
    assert (node.id, bytes(node.tokens), node.blocks.tolist()) == (
        first_id,
        data(3, 4, 5, 6),
        [1, 2],
    )
    assert (bytes(upper.tokens), upper.blocks.tolist()) == (data(1, 2), [0])
    assert upper.last_used == node.last_used == 7
    assert node.parent is upper and upper.num_children == 1
    assert upper.notes is node.notes is None
    assert tree.node_ending_in(0) is upper
    assert tree.node_ending_in(1) is None
    assert tree.node_ending_in(2) is node
    tree.check()


def test_a_leaf_grows_and_an_inner_node_gets_a_child() -> None:
    tree, node = grown()
    assert tree.append((), node, data(7, 8), blocks(3)) is node
    assert tree.node_ending_in(2) is None
    upper = tree.split(node, 1)
    child = tree.append((), upper, data(0), blocks(4))
    assert child is not node and child.parent is upper
    assert [(depth, bytes(n.tokens)) for depth, n in tree.walk()] == [
        (0, data(1, 2)),
        (1, data(0)),
        (1, data(3, 4, 5, 6, 7, 8)),
    ]
    assert (tree.num_tokens, tree.num_blocks) == (9, 5)
    tree.check()


def test_a_leaf_is_trimmed_until_it_is_gone() -> None:
    tree, node = grown(block_size=4)
    assert tree.trim(node, 1).tolist() == [1]
    assert bytes(node.tokens) == data(1, 2, 3, 4)
    assert tree.node_ending_in(0) is node
    tree.check()
    assert tree.trim(node, 1).tolist() == [0]
    assert tree.node_ending_in(0) is None
    assert list(tree.walk()) == []
    assert (tree.num_tokens, tree.num_blocks) == (0, 0)
    tree.check()


def test_notes_are_cut_with_their_tokens() -> None:
    tree, node = grown()
    node.fill_notes(2, np.array([np.nan, 3, 4], np.float32))
    upper = tree.split(node, 1)
    assert upper.notes is None, "none of its notes is known"
    assert node.notes is not None
    assert np.array_equal(node.notes, [np.nan, 3, 4, np.nan], equal_nan=True)
    tree.check()
    tree.trim(node, 1)
    assert np.array_equal(node.notes, [np.nan, 3], equal_nan=True)
    assert node.notes.flags.owndata, "a view would keep all of the old edge's in memory"
    tree.append((), node, data(7), blocks(3))
    assert np.array_equal(node.notes, [np.nan, 3, np.nan], equal_nan=True)
    tree.check()
    tree.trim(node, 2)
    assert node.notes is None


def test_the_notes_of_a_path_are_those_of_its_edges() -> None:
    tree, node = grown()
    tree.split(node, 1)
    path = tree.find((), data(1, 2, 3, 9), 4)
    assert tree.row_notes(path) is None
    tree.fill_notes(path, np.array([1, np.nan, 3, 4], np.float32))
    assert np.array_equal(tree.notes(path), [1, np.nan, 3], equal_nan=True)
    assert np.array_equal(node.notes, [3, np.nan, np.nan, np.nan], equal_nan=True)
    rows = tree.row_notes(path)
    assert rows is not None and rows.tolist() == [3]
    path.drop_rows()
    assert tree.row_notes(path) is None
    assert np.array_equal(tree.notes(path), [1, np.nan], equal_nan=True)


def test_only_all_of_a_partly_filled_leaf_can_be_continued() -> None:
    tree, _ = grown(block_size=4)
    assert tree.ends_in_partial_leaf(tree.find((), data(1, 2, 3, 4, 5, 6, 7), 7))
    assert not tree.ends_in_partial_leaf(tree.find((), data(1, 2, 3, 4, 5, 9, 7), 7))
    assert not tree.ends_in_partial_leaf(tree.find((), data(1, 2, 3, 4), 4))
    assert not tree.ends_in_partial_leaf(tree.find((), data(1, 2), 2))
    assert not tree.ends_in_partial_leaf(tree.find((), data(9), 1))


def test_the_best_child_is_found_among_many() -> None:
    tree = RadixTree(8)
    draw = np.random.default_rng(0)
    prompts = np.unique(draw.integers(0, 3, (600, 8)).astype(np.int32) * 128, axis=0)
    for index, prompt in enumerate(prompts):
        tree.append((), None, prompt.tobytes(), blocks(index))
    tree.check()
    for query in draw.integers(0, 3, (200, 7)).astype(np.int32) * 128:
        equal = prompts[:, :7] == query
        longest = int(np.cumprod(equal, axis=1).sum(axis=1).max())
        assert tree.find((), query.tobytes(), 7).num_tokens == longest


def test_check_notices_what_is_wrong() -> None:
    def expect(tree: RadixTree, message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            tree.check()

    tree, node = grown()
    node.tokens[0] += 1
    expect(tree, "first block")
    tree, node = grown()
    node.blocks = node.blocks[:-1]
    expect(tree, "do not fit")
    tree, node = grown()
    node.num_children = 1
    expect(tree, "miscounted")
    tree, node = grown()
    tree.num_tokens += 1
    expect(tree, "tokens or blocks are miscounted")
    tree, node = grown()
    tree.split(node, 1)
    node.parent = None
    expect(tree, "nobody's child")
    tree, node = grown()
    node.notes = np.zeros(5, np.float32)
    expect(tree, "notes do not fit")
    tree, node = grown()
    node.notes = np.full(6, np.nan, np.float32)
    expect(tree, "none is known")
    tree = RadixTree(2)
    tree.append((), None, data(1), blocks(0))
    tree.append((), None, data(1, 2), blocks(1))
    expect(tree, "prefix of another")
