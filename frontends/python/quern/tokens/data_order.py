"""The order in which quern reads a token file, in Python: micro-batches as `quern train` gets them with one device.

A pass over the file is a permutation of its windows of `sequence` + 1 tokens at stride `sequence`, keyed by seed and
pass: a Feistel network over Philox 4x32-10, as core/src/data/sources/permutation.cpp has it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from quern.tokens.token_file import Array, TokenFile

MASK32 = 0xFFFFFFFF
SHUFFLE = 2  # RandomPurpose::shuffle
ROUNDS = 8


def philox(counter: Sequence[int], key: tuple[int, int]) -> list[int]:
    """Four words of Philox 4x32-10 (Salmon et al., 2011)."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & MASK32, (p0 >> 32) ^ c[3] ^ k1, p0 & MASK32]
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c


def permuted(index: int, count: int, seed: int, epoch: int) -> int:
    """The element at place `index` < count of the order that `seed` and `epoch` choose."""
    if count < 2:
        return index
    half_bits = max(2, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    key = (seed & MASK32, seed >> 32)
    while True:
        left, right = index >> half_bits, index & mask
        for number in range(ROUNDS):
            word = philox((right & MASK32, (right >> 32) ^ (SHUFFLE << 24), epoch, number), key)[0]
            left, right = right, left ^ (word & mask)
        index = left << half_bits | right
        if index < count:
            return index


def window(corpus: TokenFile, index: int, sequence: int) -> tuple[Array, Array]:
    """(tokens, targets) of a window, (sequence,) int64. A target of -1 does not count."""
    first = index * sequence
    tokens = np.asarray(corpus.tokens[first : first + sequence + 1]).astype(np.int64)
    targets = tokens[1:].copy()
    if corpus.loss_mask is not None:
        targets[~np.asarray(corpus.loss_mask[first + 1 : first + sequence + 1], dtype=bool)] = -1
    return tokens[:-1], targets


def micro_batches(corpus: TokenFile, batch: int, sequence: int, seed: int) -> Iterator[tuple[Array, Array]]:
    """Yields (tokens, targets), (batch, sequence) int64, without end."""
    windows = (len(corpus.tokens) - 1) // sequence
    place = 0
    while True:
        order = (permuted(at % windows, windows, seed, at // windows) for at in range(place, place + batch))
        rows = [window(corpus, index, sequence) for index in order]
        place += batch
        yield np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
