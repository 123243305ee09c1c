"""Open MPI's all-reduce for the network benchmark.

Usage: mpirun ... python mpi_network.py SIZES; SIZES is a JSON list of bytes and calls. Rank 0 prints JSON lines. Each
rank pins itself to a core, as the launcher pins the other sides.
"""
import json
import os
import sys
import time

from mpi4py import MPI
import numpy

world = MPI.COMM_WORLD
cores = sorted(map(int, os.environ["NETWORK_CORES"].split(",")))
os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
for size, calls in json.loads(sys.argv[1]):
    buffer = numpy.empty(size // 4, numpy.float32)
    seconds = []
    for _ in range(calls + 1):
        buffer.fill(1.0)
        world.Barrier()
        start = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, buffer)
        seconds.append(world.allreduce(time.perf_counter() - start, MPI.MAX))
        assert buffer[-1] == world.size, "wrong sum"
    if world.rank == 0:
        print(json.dumps({"bytes": size, "seconds": seconds[1:]}), flush=True)
