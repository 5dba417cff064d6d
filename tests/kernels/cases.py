"""Problems of block-sparse attention that are small enough for the Triton interpreter."""

from dataclasses import replace

from diffsieve.kernels.testing import AttentionCase

BASE = AttentionCase(heads=2, kv_heads=2, dim=32, block_size=16, len_q=50, len_k=50)
TRITON_CASES = [
    replace(BASE, density=1.0),
    replace(BASE, variable=True),
    replace(BASE, len_q=1, len_k=1, heads=1, kv_heads=1, block_size=64),
    replace(BASE, len_q=33, len_k=100, batch=2, heads=4, kv_heads=2, variable=True, layout="blhd"),
    replace(BASE, len_q=100, len_k=64, block_size=32, dim=64, layout="fused_qkv"),
    replace(BASE, layout="fused_qkv", density=1.0),
    replace(BASE, layout="padded", density=1.0),
    replace(BASE, layout="padded", dim=20, variable=True),
    replace(BASE, dim=96, block_size=64, len_q=130, len_k=150, density=1.0),
    replace(BASE, dim=128, block_size=128, len_q=257, len_k=300, heads=1, kv_heads=1),
    replace(BASE, dim=256, heads=1, kv_heads=1),
    replace(BASE, gain=4.0),
    replace(BASE, gain=16.0),
]

_ONE_KEY = AttentionCase(kv_heads=1, len_q=130, len_k=200, gain=200.0)
ONE_KEY_CASES = [
    replace(_ONE_KEY, dim=dim, density=density, variable=variable)
    for dim, density, variable in ((64, 0.5, False), (64, 1.0, True), (128, 0.5, True), (128, 1.0, False))
]
