"""The peers of the network benchmark on PyTorch: gloo's all-reduce, DDP and FSDP.

Usage: python torch_network.py ROLE; ROLE is JSON. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment,
as torchrun sets them. Rank 0 prints JSON lines. One thread per rank; the launcher pins it.
"""
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def slowest(seconds):
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def all_reduce(role):
    for size, calls in role["sizes"]:
        buffer = torch.empty(size // 4)
        seconds = []
        for _ in range(calls + 1):
            buffer.fill_(1.0)
            dist.all_reduce(torch.zeros(1))
            start = time.perf_counter()
            dist.all_reduce(buffer)
            seconds.append(slowest(time.perf_counter() - start))
            assert buffer[-1].item() == dist.get_world_size(), "wrong sum"
        report({"bytes": size, "seconds": seconds[1:]})


def train(role):
    """Mean seconds of a step, of the slowest rank; with `exchange` off, without any communication."""
    kind, layers, width, batch = role["kind"], role["layers"], role["width"], role["batch"]
    sizes = [role["features"]] + [width] * layers
    modules = [module for a, b in zip(sizes, sizes[1:]) for module in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*modules, nn.Linear(width, role["classes"]))
    if role["exchange"] and kind == "FSDP":
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        model = FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
        )
    elif role["exchange"]:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if kind == "DDP f16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    inputs, targets = torch.randn(batch, sizes[0]), torch.randint(0, role["classes"], (batch,))
    times = []
    for _ in range(role["warmUps"] + role["steps"]):
        dist.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        times.append(slowest(time.perf_counter() - start))
    times = times[role["warmUps"] :]
    report({"stepSeconds": sum(times) / len(times), "torch": torch.__version__})


def report(value):
    if dist.get_rank() == 0:
        print(json.dumps(value), flush=True)


if __name__ == "__main__":
    role = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    {"allReduce": all_reduce, "train": train}[role["role"]](role)
    dist.barrier()
    # Tearing gloo down aborts now and then; all results are printed.
    sys.stdout.flush()
    os._exit(0)
