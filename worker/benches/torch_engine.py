"""The PyTorch peer of `cargo xtask bench engine` and of `gpu-probe`: the same models in PyTorch.

Takes a configuration (JSON) as its only argument, then reads commands from standard input, one per
line:

    losses N   run N steps from the given weights on the given batches; return their losses
    steps N    run N more steps on the first batch; return wall-clock and CPU milliseconds of each, or
               on a GPU, which is synchronised only at the end, of their mean
    memory 0   return the peak bytes of GPU memory used by tensors

Without weights and batches in the configuration both are random, for runs that only measure time.

Every result is one line of JSON. The process sleeps between commands. OpenMP keeps its default
policy, because threads that sleep between two operators would slow PyTorch down; the caller waits
until they have stopped spinning.
"""

import json
import os
import sys
import time

CONFIG = json.loads(sys.argv[1]) if __name__ == "__main__" else {"threads": 1, "tuned": False}
os.environ["OMP_NUM_THREADS"] = str(CONFIG["threads"])

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

DEVICE = CONFIG.get("device", "cpu")

torch.set_num_threads(CONFIG["threads"])
torch.set_num_interop_threads(1)


def gelu(x):
    return F.gelu(x, approximate="tanh")


class Attention(nn.Module):
    def __init__(self, hidden, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal

    def forward(self, qkv):
        b, t, w = qkv.shape
        q, k, v = (x.view(b, t, self.heads, -1).transpose(1, 2) for x in qkv.split(w // 3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).reshape(b, t, w // 3)


class Gpt(nn.Module):
    def __init__(self, c):
        super().__init__()
        h = c["hidden"]
        self.c, self.attention = c, Attention(h, c["heads"], True)
        blocks = nn.ModuleList()
        for _ in range(c["layers"]):
            blocks.append(nn.ModuleDict({
                "ln_1": nn.LayerNorm(h), "ln_2": nn.LayerNorm(h),
                "attn": nn.ModuleDict({"c_attn": nn.Linear(h, 3 * h), "c_proj": nn.Linear(h, h)}),
                "mlp": nn.ModuleDict({"c_fc": nn.Linear(h, 4 * h), "c_proj": nn.Linear(4 * h, h)}),
            }))
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(c["vocabulary"], h), "wpe": nn.Embedding(c["context"], h), "h": blocks,
            "ln_f": nn.LayerNorm(h),
        })

    def forward(self, batch):
        t = self.transformer
        x = t["wte"](batch["tokens"]) + t["wpe"].weight
        for b in t["h"]:
            x = x + b["attn"]["c_proj"](self.attention(b["attn"]["c_attn"](b["ln_1"](x))))
            x = x + b["mlp"]["c_proj"](gelu(b["mlp"]["c_fc"](b["ln_2"](x))))
        logits = F.linear(t["ln_f"](x), t["wte"].weight)
        return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())


class Bert(nn.Module):
    def __init__(self, c):
        super().__init__()
        h = c["hidden"]
        self.attention = Attention(h, c["heads"], False)
        layers = nn.ModuleList()
        for _ in range(c["layers"]):
            layers.append(nn.ModuleDict({
                "attention": nn.ModuleDict({
                    "self": nn.ModuleDict({"qkv": nn.Linear(h, 3 * h)}),
                    "output": nn.ModuleDict({"dense": nn.Linear(h, h), "LayerNorm": nn.LayerNorm(h)}),
                }),
                "intermediate": nn.ModuleDict({"dense": nn.Linear(h, 4 * h)}),
                "output": nn.ModuleDict({"dense": nn.Linear(4 * h, h), "LayerNorm": nn.LayerNorm(h)}),
            }))
        self.bert = nn.ModuleDict({
            "embeddings": nn.ModuleDict({
                "word_embeddings": nn.Embedding(c["rows"], h), "position_embeddings": nn.Embedding(c["context"], h),
                "token_type_embeddings": nn.Embedding(2, h), "LayerNorm": nn.LayerNorm(h),
            }),
            "encoder": nn.ModuleDict({"layer": layers}),
        })
        self.cls = nn.ModuleDict({"predictions": nn.ModuleDict({
            "transform": nn.ModuleDict({"dense": nn.Linear(h, h), "LayerNorm": nn.LayerNorm(h)}),
            "decoder": nn.ParameterDict({"bias": nn.Parameter(torch.zeros(c["rows"]))}),
        })})

    def forward(self, batch):
        e = self.bert["embeddings"]
        x = e["word_embeddings"](batch["tokens"]) + e["position_embeddings"].weight
        x = e["LayerNorm"](x + e["token_type_embeddings"](batch["segments"]))
        for b in self.bert["encoder"]["layer"]:
            a = b["attention"]
            x = a["output"]["LayerNorm"](x + a["output"]["dense"](self.attention(a["self"]["qkv"](x))))
            x = b["output"]["LayerNorm"](x + b["output"]["dense"](gelu(b["intermediate"]["dense"](x))))
        p = self.cls["predictions"]
        x = x.flatten(0, 1)[batch["positions"]]
        x = p["transform"]["LayerNorm"](gelu(p["transform"]["dense"](x)))
        logits = F.linear(x, e["word_embeddings"].weight, p["decoder"]["bias"])
        return F.cross_entropy(logits.float(), batch["targets"])


class Block(nn.Module):
    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)] if bottleneck else [
            (inputs, width, 3, stride), (width, outputs, 3, 1)]
        self.count = len(shapes)
        for i, (a, b, k, s) in enumerate(shapes, 1):
            setattr(self, f"conv{i}", nn.Conv2d(a, b, k, s, k // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(b))
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        for i in range(1, self.count + 1):
            x = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x))
            x = F.relu(x + shortcut if i == self.count else x, inplace=True)
        return x


class ResNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        bottleneck, w, small = c["depth"] == 50, c["width"], c["small"]
        self.small = small
        self.conv1 = nn.Conv2d(c["channels"], w, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        self.bn1 = nn.BatchNorm2d(w)
        inputs = w
        for stage, blocks in enumerate([3, 4, 6, 3] if bottleneck else [2, 2, 2, 2]):
            layers = []
            for block in range(blocks):
                layers.append(Block(inputs, w << stage, 2 if stage and not block else 1, bottleneck))
                inputs = (w << stage) * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, c["classes"])

    def forward(self, batch):
        x = batch["pixels"].float().div(255)
        x = x.permute(0, 3, 1, 2)
        x = x.contiguous(memory_format=torch.channels_last if CONFIG["tuned"] else torch.contiguous_format)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        if not self.small:
            x = F.max_pool2d(x, 3, 2, 1)
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return F.cross_entropy(self.fc(x.mean((2, 3))).float(), batch["targets"])


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        sizes = c["sizes"]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, batch):
        x = batch["values"]
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return F.cross_entropy(self.layers[-1](x).float(), batch["targets"])


def given(model):
    """The engine's weights and batches."""
    from safetensors.torch import load_file

    missing, unexpected = model.load_state_dict(load_file(CONFIG["weights"]), strict=False)
    missing = [name for name in missing if "running_" not in name and "num_batches" not in name]
    assert not missing and not unexpected, (missing, unexpected)
    flat = load_file(CONFIG["batches"])

    def batch_of(index):
        of = {name.split(".", 1)[1]: value for name, value in flat.items() if name.startswith(f"{index}.")}
        return {name: value if name in ("pixels", "values") else value.long() for name, value in of.items()}

    return [batch_of(index) for index in range(CONFIG["batches_count"])]


def random(model):
    """Small weights, and a batch of noise."""
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    c, n = CONFIG["model"], CONFIG["samples"]
    if c["kind"] == "gpt":
        tokens, targets = torch.randint(c["vocabulary"], (2, n, c["context"]))
        return [{"tokens": tokens, "targets": targets}]
    if c["kind"] == "bert":
        t, each = c["context"], c["predictions"]
        rows = torch.arange(n)[:, None] * t + 1 + torch.arange(each)[None, :]
        return [{
            "tokens": torch.randint(c["rows"], (n, t)), "segments": torch.zeros(n, t, dtype=torch.long),
            "positions": rows.flatten(), "targets": torch.randint(c["rows"], (n * each,)),
        }]
    if c["kind"] == "resnet":
        pixels = torch.randint(256, (n, c["side"], c["side"], c["channels"]), dtype=torch.uint8)
        return [{"pixels": pixels, "targets": torch.randint(c["classes"], (n,))}]
    return [{"values": torch.randn(n, c["sizes"][0]), "targets": torch.randint(c["sizes"][-1], (n,))}]


def main():
    model = {"gpt": Gpt, "bert": Bert, "resnet": ResNet, "mlp": Mlp}[CONFIG["model"]["kind"]](CONFIG["model"])
    batches = given(model) if "weights" in CONFIG else random(model)
    batches = [{name: value.to(DEVICE) for name, value in batch.items()} for batch in batches]
    model = model.to(DEVICE)
    if CONFIG["model"]["kind"] == "resnet" and CONFIG["tuned"]:
        model = model.to(memory_format=torch.channels_last)
    model.train()
    # Matches the engine's exclusions: matrices and tables decay, biases and norms do not.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": CONFIG["decay"]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if CONFIG["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=CONFIG["rate"], betas=(0.9, 0.95), eps=1e-8, fused=CONFIG["tuned"])
    else:
        optimizer = torch.optim.SGD(groups, lr=CONFIG["rate"], momentum=0.9, fused=CONFIG["tuned"])
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(CONFIG["precision"])
    scaler = torch.amp.GradScaler(DEVICE, enabled=half == torch.float16)
    forward = torch.compile(model, mode=CONFIG["compile"]) if CONFIG.get("compile") else model

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype=half or torch.bfloat16, enabled=half is not None):
            loss = forward(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def timed(steps):
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step(batches[0])
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        return [1e3 * (time.perf_counter() - start) / steps, 1e3 * (time.process_time() - cpu) / steps]

    name = torch.backends.cpu.get_cpu_capability() if DEVICE == "cpu" else torch.cuda.get_device_name()
    print(json.dumps({"torch": torch.__version__, "capability": name}), flush=True)
    for line in sys.stdin:
        word, number = line.split()
        if word == "losses":
            print(json.dumps([step(batches[i % len(batches)]).item() for i in range(int(number))]), flush=True)
        elif word == "memory":
            print(json.dumps(torch.cuda.max_memory_allocated()), flush=True)
        else:
            turns = [1] * int(number) if DEVICE == "cpu" else [int(number)]
            print(json.dumps([timed(steps) for steps in turns]), flush=True)


if __name__ == "__main__":
    main()
