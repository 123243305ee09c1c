"""One process under mpirun: sums rank + 1 over all processes."""

import os
import socket

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
rank = world.Get_rank()
value, total = numpy.full(1000, rank + 1.0), numpy.zeros(1000)
world.Allreduce(value, total)
assert total.min() == total.max(), total
local = os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]
version = ".".join(map(str, MPI.get_vendor()[1]))
# The environment of a rank is that of its node's pod: the daemon hands its own on.
print(f"rank={rank} world={world.Get_size()} node={socket.gethostname().rsplit('-', 1)[-1]} local={local} sum={int(total[0])} version={version}", flush=True)
