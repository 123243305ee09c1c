"""One process under paddle.distributed.launch: sums rank + 1 over all processes by gloo."""

import os

import paddle
import paddle.distributed as dist

dist.init_parallel_env()
rank, world = dist.get_rank(), dist.get_world_size()
tensor = paddle.full([1000], float(rank + 1))
dist.all_reduce(tensor)
local = os.environ.get("PADDLE_LOCAL_RANK", "none")
print(f"rank={rank} world={world} node={os.environ['SWITCHYARD_NODE_RANK']} local={local} sum={int(tensor[0])} version={paddle.__version__}", flush=True)
