"""`python -m distcell.launch`: starts the ranks of a job, or joins those that a launcher started.

Starting: command_line.py reads the flags, local_ranks.py starts processes on this machine,
job_files.py hands a job to a cluster. On each rank: monitor.py watches it from beside, output.py
marks and keeps what it prints, rank.py runs the script, agreement.py compares what the ranks were
started with. When something is wrong: standing.py says where a rank is, faults.py what went wrong,
and takes the job down; watchdog.py notices collectives that do not finish, deadlock.py those that
cannot, copies.py a script that is not parallel at all. doctor.py looks at a machine before, with
probe.py on each rank.
"""
