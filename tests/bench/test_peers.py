"""Adapters to the kernels of others: layouts and lists, against stand-ins that read them as those kernels do."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.bench import peers as room
from diffsieve.bench.operations.block_sparse import check_output
from diffsieve.bench.problem import passes
from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import flash4_backend
from tests.kernels import flash4_stand_in

BLOCK = 128
CASE = testing.AttentionCase(
    heads=3, kv_heads=3, len_q=5 * BLOCK, len_k=5 * BLOCK, dim=32, block_size=BLOCK, density=0.4
)


def _dense_blhd(query, key, value):
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
    return out.transpose(1, 2).contiguous()


def _flash4(query, key, value, **options):
    """(B, L, H, D) in, output and log-sum-exp out."""
    if options:
        return flash4_stand_in.flash_attn_fwd(query, key, value, **options)
    return _dense_blhd(query, key, value), None


def _fastvideo(query, key, value, block_map, sizes):
    """(B, H, L, D), a map of blocks of 64 tokens, and the tokens of each."""
    assert sizes.tolist() == [64] * (key.shape[2] // 64)
    tokens = block_map.repeat_interleave(64, 2).repeat_interleave(64, 3)
    return scaled_dot_product_attention(query, key, value, attn_mask=tokens), None


MODULES = {
    "fa3_fwd_interface": SimpleNamespace(flash_attn_func=_dense_blhd),
    "flash_attn.cute.interface": SimpleNamespace(_flash_attn_fwd=_flash4),
    "flash_attn.cute.block_sparsity": SimpleNamespace(BlockSparseTensorsTorch=flash4_stand_in.Lists),
    "fastvideo_kernel": SimpleNamespace(block_sparse_attn=_fastvideo),
}


def _inputs(peer):
    case = CASE if peer.sparse else testing.AttentionCase(**{**vars(CASE), "density": 1.0})
    return testing.make_inputs(case, dtype=torch.float32)


@pytest.mark.parametrize("peer", [peer for peer in room.PEERS if peer.module is not None], ids=lambda peer: peer.name)
def test_packages(monkeypatch, peer):
    for module in (room, flash4_backend):
        monkeypatch.setattr(module, "import_module", MODULES.__getitem__)
    inputs = _inputs(peer)
    assert passes(check_output(inputs, BLOCK, peer.make(inputs, BLOCK), poisoned=False))


@pytest.mark.slow
@pytest.mark.compiler
def test_flex_attention():
    """Compiled, since eager code does not look at the lists."""
    peer = next(peer for peer in room.PEERS if peer.name == "FlexAttention")
    inputs = _inputs(peer)
    assert passes(check_output(inputs, BLOCK, peer.make(inputs, BLOCK), poisoned=False))


def test_a_package_that_computes_something_else_gets_no_figure(monkeypatch):
    modules = MODULES | {"fa3_fwd_interface": SimpleNamespace(flash_attn_func=lambda q, k, v: v)}
    monkeypatch.setattr(room, "import_module", modules.__getitem__)
    peer = next(peer for peer in room.PEERS if peer.package == "fa3-fwd")
    inputs = _inputs(peer)
    assert not passes(check_output(inputs, BLOCK, peer.make(inputs, BLOCK), poisoned=False))
