"""`python -m distcell.launch`: starts the ranks of a job, or joins those that a launcher started.

command_line.py reads the flags, local_ranks.py starts processes on this machine, monitor.py watches
one rank from beside it, rank.py runs the script on it, agreement.py compares what the ranks were
started with. standing.py says where a rank is, faults.py what went wrong, and takes the job down;
watchdog.py notices collectives that do not finish, deadlock.py those that cannot, copies.py a
script that is not parallel at all. output.py marks and keeps what is printed. doctor.py looks at a
machine, with probe.py on each rank.
"""
