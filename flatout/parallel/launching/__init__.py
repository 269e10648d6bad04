"""`flatout launch`: the ranks of a job on one machine or several, watched until they end.

launch.py         the entry: this machine leads, or follows the one that does
leader.py         decides for all machines: who takes part, what failed, whether to start again
member.py         does on its machine what the leader says
local_ranks.py    the processes of this machine
output.py         their lines, merged
guard.py          ends them if the launcher itself is killed
store_process.py  where ranks meet: torch's store, on one address only
"""
