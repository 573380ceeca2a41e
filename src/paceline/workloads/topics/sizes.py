"""Sizes that the fit uses and the planner prices, without torch."""

from dataclasses import dataclass

SPARSE_BELOW = 0.1
"""Share of nonzeros below which counts are kept as such: one takes five bytes and its arithmetic is irregular."""
INDEX_BYTES = 4
POINTER_BYTES = 8
DEFAULT_PASSES = 1000
NEWTON_TOPICS = 64  # with more, mixtures of new documents are found by EM steps

CORE_BLOCK_BYTES, SCANNED_BYTES = 32 << 20, 128 << 20
"""On cores: of a block of nonzeros, and of rows whose nonzeros are found as they are read, which come to far less."""
BLOCKS = 4  # in memory at a time: waiting, being read, worked on, and the one before it

DEVICE_SHARE, HOST_SHARE = 0.7, 0.5  # shares of the free memory that the fit takes for counts
BLOCK_BYTES = 256 << 20  # of the counts that are on their way to a device; there are two of them
PAD = 256  # rows and columns of dense counts on a device come in multiples of it: whole tiles, whatever their size
SORT_BYTES = 4
"""Beside each byte of nonzeros on a GPU, to sort them by terms; their second copy, which stays, is a quarter of it."""
FUSED_TOPICS = 64
"""With more topics the sums for the terms outweigh a second read of the counts: they are read twice in a pass."""
L_COPIES, F_COPIES = 4, 5
"""Kept in fp32: the point, the image before, the next point, what is being computed; of F the statistic besides."""


@dataclass(frozen=True, kw_only=True)
class CountsSize:
    documents: int
    terms: int
    nonzeros: float  # counts that a pass works on: where dense, all of them
    sparse: bool
    element_bytes: int
    stored_bytes: float
    resident: bool  # read whole by every rank, as .npz and .mtx are; otherwise a rank reads its own documents


def pad_to_tile(size: int) -> int:
    return -(-size // PAD) * PAD


def pad_core_topics(k: int) -> int:
    return -(-k // 8) * 8


def pad_device_topics(k: int) -> int:
    """Return the topics of operands on a GPU: sixteen, or a power of two."""
    return max(16, 1 << (k - 1).bit_length())
