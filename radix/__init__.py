"""Prefix sharing: token prefixes to reference-counted KV blocks, with eviction.

A library of its own: it knows nothing of tensors, requests, devices or clocks.

    namespace.py   who may share with whom
    pool.py        blocks and their holders
    tree.py        token prefixes to block ids, and a note beside each token
    eviction.py    which leaf goes first
    cache.py       leases: a request's blocks, shared through the tree
"""

from sapwood.radix.cache import (
    BlockCopy,
    Lease,
    LeaseReleased,
    Match,
    NodeView,
    PrefixCache,
    WarmPrefix,
)
from sapwood.radix.eviction import LRU, EvictionPolicy
from sapwood.radix.namespace import Namespace, NamespaceKind, NamespacePart
from sapwood.radix.pool import BlockPool, OutOfBlocks
from sapwood.radix.tree import Node, RadixTree

__all__ = [
    "LRU",
    "BlockCopy",
    "BlockPool",
    "EvictionPolicy",
    "Lease",
    "LeaseReleased",
    "Match",
    "Namespace",
    "NamespaceKind",
    "NamespacePart",
    "Node",
    "NodeView",
    "OutOfBlocks",
    "PrefixCache",
    "RadixTree",
    "WarmPrefix",
]
