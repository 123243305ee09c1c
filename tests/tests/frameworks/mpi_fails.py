"""The last process ends with exit code 3 while the others wait for it."""

import os

from mpi4py import MPI

world = MPI.COMM_WORLD
if world.Get_rank() == world.Get_size() - 1:
    os._exit(3)
world.Barrier()
