"""Exported models in PyTorch: makes the data of a job, and later the loss of the exported model on its validation part.

    exported.py make FOLDER              train.bin, val.bin, images/*.npy, features/*.npy
    exported.py loss FOLDER FILE MODEL   MODEL: the configuration that torch_engine.py takes, as JSON
"""

import json
import sys
from pathlib import Path

import numpy as np

WINDOWS, CONTEXT, SAMPLES = 256, 32, 64


def make(folder):
    random = np.random.default_rng(7)
    words = [random.integers(97, 123, 6).tolist() + [32] for _ in range(12)]

    def text(count):
        tokens = []
        while len(tokens) < count:
            tokens += words[random.integers(0, len(words)) if random.random() < 0.3 else len(tokens) % len(words)]
        return np.array(tokens[:count], dtype="<u2")

    text(60_000).tofile(folder / "train.bin")
    # For sequences with special tokens another number of them: what is left over at the end is not used.
    text(WINDOWS * CONTEXT + 1).tofile(folder / "val.bin")
    (folder / "masked").mkdir()
    text(60_000).tofile(folder / "masked/train.bin")
    text(WINDOWS * (CONTEXT - 2)).tofile(folder / "masked/val.bin")
    for part, count in [("", 512), ("validation_", SAMPLES)]:
        labels = random.integers(0, 4, count)
        images = random.integers(0, 128, (count, 8, 8, 3))
        for index, label in enumerate(labels):
            images[index, 2 * label:2 * label + 2, :, :] += 100
        features = random.normal(size=(count, 12)).astype("<f4")
        features[np.arange(count), labels] += 2
        for name, arrays in [("images", images.astype(np.uint8)), ("features", features)]:
            where = folder / name
            where.mkdir(exist_ok=True)
            np.save(where / f"{part}{name}.npy", arrays)
            np.save(where / f"{part}labels.npy", labels.astype("<i8"))


def batches(folder, model):
    """The validation part, whole; of hidden tokens many draws, since ours are not repeated here."""
    import torch

    kind = model["kind"]
    if kind == "gpt":
        tokens = torch.from_numpy(np.fromfile(folder / "val.bin", dtype="<u2").astype(np.int64))
        yield {"tokens": tokens[:-1].view(WINDOWS, CONTEXT), "targets": tokens[1:].view(WINDOWS, CONTEXT)}
    elif kind == "bert":
        tokens = np.fromfile(folder / "masked/val.bin", dtype="<u2").astype(np.int64).reshape(WINDOWS, CONTEXT - 2)
        vocabulary, random = model["vocabulary"], np.random.default_rng(1)
        mask, cls, sep = vocabulary, vocabulary + 1, vocabulary + 2
        each = max(round(CONTEXT * 0.15), 1)
        for _ in range(20):
            ends = [np.full((WINDOWS, 1), token) for token in (cls, sep)]
            rows = np.concatenate([ends[0], tokens, ends[1]], axis=1)
            places = np.stack([1 + random.permutation(CONTEXT - 2)[:each] for _ in range(WINDOWS)])
            places = (places + CONTEXT * np.arange(WINDOWS)[:, None]).reshape(-1)
            targets = rows.reshape(-1)[places].copy()
            choice = random.integers(0, 10, len(places))
            hidden = np.where(choice < 8, mask, np.where(choice == 8, random.integers(0, vocabulary, len(places)), targets))
            rows.reshape(-1)[places] = hidden
            rows = torch.from_numpy(rows)
            yield {"tokens": rows, "segments": torch.zeros_like(rows), "positions": torch.from_numpy(places),
                   "targets": torch.from_numpy(targets)}
    else:
        name, key = ("images", "pixels") if kind == "resnet" else ("features", "values")
        yield {key: torch.from_numpy(np.load(folder / name / f"validation_{name}.npy")),
               "targets": torch.from_numpy(np.load(folder / name / "validation_labels.npy"))}


def of_peer(tensors):
    """The tensors of a file, which are those of the published GPT-2 and BERT, for the peer: all its matrices are [outputs, inputs], its query, key and
    value are one layer, and the bias beside BERT's decoder is in it."""
    import torch

    own = {}
    for name, tensor in tensors.items():
        if name.startswith("transformer.h.") and tensor.dim() == 2:
            own[name] = tensor.t().contiguous()
        elif ".self.query." in name:
            parts = [tensors[name.replace("query", part)] for part in ("query", "key", "value")]
            own[name.replace("query", "qkv")] = torch.cat(parts)
        elif ".self.key." not in name and ".self.value." not in name:
            own[name.replace("cls.predictions.bias", "cls.predictions.decoder.bias")] = tensor
    return own


def loss(folder, file, model):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "worker/benches"))
    import torch
    import torch_engine as peer
    from safetensors.torch import load_file

    classes = {"gpt": peer.Gpt, "bert": peer.Bert, "resnet": peer.ResNet, "mlp": peer.Mlp}
    network = classes[model["kind"]](model)
    # Every name and shape, and nothing else. Counters of batches that PyTorch keeps are in no file: it fills them in itself.
    network.load_state_dict(of_peer(load_file(file)), strict=True)
    network.eval()
    with torch.no_grad():
        losses = [network(batch).item() for batch in batches(folder, model)]
    print(sum(losses) / len(losses))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        loss(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
