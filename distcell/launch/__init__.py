"""`python -m distcell.launch`: starts the ranks of a job, or joins those that a launcher started.

command_line.py reads the flags, local_ranks.py starts processes on this machine, rank.py runs the
script on one rank, agreement.py compares what the ranks were started with, faults.py says what went
wrong and takes the job down, watchdog.py notices collectives that do not finish.
"""
