"""Linear regression by asynchronous SGD, with the weights divided over the parameter servers.

Role ps: owns every n-th weight, and applies the gradients of each worker as they arrive.
Role worker: pulls the weights, computes gradients on samples of its own, pushes them.
"""

import os
import random
import time
from multiprocessing.connection import Client, Listener
from threading import Lock, Thread

PORT = 7070
KEY = b"plain-ps"
WEIGHTS = 32
BATCH = 64
STEPS = 100
RATE = 0.02

role = os.environ["SWITCHYARD_ROLE"]
index = int(os.environ["SWITCHYARD_ROLE_INDEX"])
servers = os.environ["SWITCHYARD_HOSTS_PS"].split(",")


def serve():
    """Answers pulls and pushes until the job is complete."""
    own = [0.0] * len(range(index, WEIGHTS, len(servers)))
    lock = Lock()

    def answer(connection):
        try:
            while True:
                gradients = connection.recv()
                with lock:
                    for at, gradient in enumerate(gradients):
                        own[at] -= RATE * gradient
                    connection.send(list(own))
        except EOFError:
            connection.close()

    with Listener((servers[index], PORT), authkey=KEY) as listener:
        print(f"{len(own)} weights on {servers[index]}:{PORT}")
        while True:
            Thread(target=answer, args=(listener.accept(),), daemon=True).start()


def connect(host):
    """Connects to a server, which may start later."""
    for _ in range(600):
        try:
            return Client((host, PORT), authkey=KEY)
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"no server on {host}:{PORT}")


def train():
    """Trains on samples of a linear function, and checks the weights at the end."""
    truth = [(at % 7 - 3) / 3 for at in range(WEIGHTS)]
    sampler = random.Random(index)
    shards = [connect(host) for host in servers]
    weights = [0.0] * WEIGHTS
    gradients = [0.0] * WEIGHTS
    for step in range(STEPS + 1):
        for shard, connection in enumerate(shards):
            connection.send(gradients[shard :: len(shards)])
        for shard, connection in enumerate(shards):
            weights[shard :: len(shards)] = connection.recv()
        gradients, loss = [0.0] * WEIGHTS, 0.0
        for _ in range(BATCH):
            sample = [sampler.gauss(0, 1) for _ in range(WEIGHTS)]
            error = sum((weight - true) * x for weight, true, x in zip(weights, truth, sample))
            loss += error * error / BATCH
            for at, x in enumerate(sample):
                gradients[at] += 2 * error * x / BATCH
        if step % 25 == 0:
            print(f"step={step} loss={loss:.3g}")
    if loss > 1e-3:
        raise SystemExit(f"loss {loss:.3g} after {STEPS} steps; expected at most 0.001")


serve() if role == "ps" else train()
