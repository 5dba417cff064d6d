"""Problems of block-sparse attention for the Hopper kernel, on the emulator and on a GPU."""

from dataclasses import replace

from diffsieve.kernels.testing import AttentionCase

BASE = AttentionCase(heads=2, kv_heads=2, dim=64, block_size=128, len_q=300, len_k=450)
HOPPER_CASES = [
    replace(BASE, density=1.0),
    replace(BASE, variable=True),
    replace(BASE, dim=128),
    replace(BASE, dim=128, density=1.0, len_q=257, len_k=640, heads=1, kv_heads=1),
    replace(BASE, len_q=1, len_k=1, heads=1, kv_heads=1),
    replace(BASE, dim=128, len_q=64, len_k=128, heads=1, kv_heads=1),
    replace(BASE, len_q=65, len_k=127, block_size=64, variable=True),
    replace(BASE, len_q=450, len_k=333, dim=128, block_size=64, variable=True),
    replace(BASE, len_q=300, len_k=700, block_size=256, density=1.0),
    replace(BASE, len_q=257, len_k=513, block_size=256, dim=128, variable=True),
    replace(BASE, len_q=127, len_k=900, batch=2, heads=4, kv_heads=2, layout="blhd", variable=True),
    replace(BASE, len_k=300, layout="fused_qkv", dim=128, density=1.0),
    replace(BASE, layout="padded", density=1.0),
    replace(BASE, layout="padded", dim=128, block_size=64, variable=True),
    replace(BASE, gain=4.0),
    replace(BASE, gain=16.0, dim=128),
    replace(BASE, gain=200.0),
    replace(BASE, gain=200.0, dim=128, block_size=64, variable=True),
]
