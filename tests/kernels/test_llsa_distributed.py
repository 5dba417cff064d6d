"""Data parallel training with LLSA: two processes have the gradients of one with both halves of the batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from diffsieve.kernels.llsa import llsa_attention


class Layer(nn.Module):
    """Projections around the attention, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            attended = llsa_attention(query, key, value, block_size=4, topk=3, levels=2)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x


def make() -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer().double(), torch.randn(4, 97, 8, dtype=torch.float64)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        model, x = make()
        parallel = nn.parallel.DistributedDataParallel(model)  # by name: without it the gradients stay apart
        parallel(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path):
    model, x = make()
    model(x).square().mean().backward()
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    halves = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for parameter, first, second in zip(model.parameters(), *halves, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, parameter.grad, rtol=1e-12, atol=1e-14)
