"""`flatout launch`: the ranks of a job on one machine or several, watched until they end.

launch.py         the entry: this machine leads, or follows the one that does
leader.py         decides for all machines: who takes part, whether all start again
attempt.py        what it knows of the ranks: which failed first, which hang
member.py         does on its machine what the leader says
machines.py       this machine, and others, as the leader sees them; the gate through which they come
messages.py       what machines say to one another
local_ranks.py    the processes of this machine
output.py         their lines, merged
guard.py          ends them if the launcher itself is killed
store_process.py  where ranks meet: torch's store, on one address only
"""
