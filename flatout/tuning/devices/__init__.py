"""On how many devices a script trains fastest: predicted, tried, and proved.

choosing.py     the order of everything, within the budget; and the proof, in a process that starts the ranks
prediction.py   what a step would take, from the parts of one on one device and the exchange between ranks
ranks_trial.py  what it starts from; a trial that is a script on several devices, against one under its best plan
found.py        what was predicted, tried and proved of each number of devices, and the plan with it
"""
