"""One process under torchrun, or without it: sums rank + 1 over all processes by gloo."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
tensor = torch.full((1000,), float(rank + 1))
dist.all_reduce(tensor)
assert tensor.min() == tensor.max(), tensor
local = os.environ.get("LOCAL_RANK", "none")
print(f"rank={rank} world={world} node={os.environ['SWITCHYARD_NODE_RANK']} local={local} sum={int(tensor[0])} version={torch.__version__}", flush=True)
dist.destroy_process_group()
