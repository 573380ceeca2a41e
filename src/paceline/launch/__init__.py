"""Starting ranks, or finding out who started them, and bringing them together.

environment.py   where this process stands among its peers (torchrun, srun, mpirun, or our own ranks)
group.py         device, threads and process group of one rank
local.py         starts the ranks of one machine and waits for them
fork_server.py   what the new process runs: it imports torch once and forks the ranks
blame.py         of several failed ranks, which one to show
signals.py       "please stop" as a flag that the loop reads
"""
