"""On how many devices a script trains fastest: predicted, tried, and proved.

basis.py        what it starts from: the tune on one device, and the time that is left
choosing.py     the order of everything, within the budget
prediction.py   what a step would take, from the parts of one on one device and ...
measuring.py    ... the exchange between ranks, and steps with fewer threads
sides.py        one device under its best plan against several, each in new processes
ranks_trial.py  a trial that is a script on several devices
proving.py      that several devices train as one
found.py        what was predicted, tried and proved of each number of devices, and the plan with it
"""
