"""Sizes at which a fit changes its way, and how much memory it takes: what it does, and what a plan of it prices."""

SPARSE_BELOW = 0.1
"""Share of nonzeros below which counts are kept as such: one takes five bytes, and its arithmetic is irregular."""
PAD = 256
"""Dense counts on a device are padded to multiples of it: whole tiles, whatever their size."""
SORT_BYTES = 4
"""Per byte of sparse counts on a device: what bringing them into the order of the terms takes beside them."""
NEWTON_K = 64
"""With more topics, the quadratic model of one document no longer fits into registers, and the fit takes EM steps."""
FUSED_K = 64
"""With more topics, the sums for the terms outweigh a second read of the counts."""
DEVICE_SHARE, HOST_SHARE = 0.7, 0.5
"""Of the memory that is free: what is taken for counts."""
DEVICE_BLOCK_BYTES = 256 << 20
"""Of the counts that are on their way to a device."""
STREAM_BYTES, SCANNED_BYTES = 32 << 20, 128 << 20
"""Of a block of counts on cores; rows whose nonzeros are found as they are read come to far less."""
BLOCKS_AHEAD = 2
"""That a thread reads; memory holds two more."""
MOST_PASSES = 1000
