"""The peer of the step benchmark: the example's GPT in PyTorch, one thread per process, as its guides say to tune it on CPUs
(fused AdamW, causal scaled_dot_product_attention, DDP over gloo with gradients as bucket views).

Usage: python torch_step.py PROCESSES STEPS; prints one JSON object with the median ms per step of rank 0.
"""
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH = 4, 128, 4, 128, 256, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).split(WIDTH, 2)
        q, k, v = (part.view(BATCH, CONTEXT, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(BATCH, CONTEXT, WIDTH)
        x = x + self.project(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight)))


def rank_main(rank, processes, steps, port):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if processes > 1:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    model = Model()
    parameters = list(model.parameters())
    if processes > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    inputs, targets = (torch.randint(0, VOCABULARY, (BATCH, CONTEXT)) for _ in range(2))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = F.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - start)
    if rank == 0:
        times = sorted(times[steps // 5 :])
        print(json.dumps({"stepMs": 1e3 * times[len(times) // 2], "torch": torch.__version__}), flush=True)
    if processes > 1:
        dist.barrier()
        # Tearing gloo down aborts now and then; what was asked for is printed.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    processes, steps = int(sys.argv[1]), int(sys.argv[2])
    if processes == 1:
        rank_main(0, 1, steps, 0)
    else:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(rank_main, (processes, steps, port), nprocs=processes)
