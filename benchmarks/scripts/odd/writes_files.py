"""Checkpoints, a log and a pickle, byte for byte."""

import csv
import json
import pickle

import numpy
import torch
from small import net, train

model = net()
optimizer = torch.optim.AdamW(model.parameters())
with open("log.csv", "w", newline="") as file:
    rows = csv.writer(file)
    for epoch in range(4):
        rows.writerow([epoch, train(model, 15, optimizer).hex()])
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, "all.pt")
torch.save(model, "whole.pt")
numpy.save("weights.npy", model[0].weight.detach().numpy())
open("hyper.json", "w").write(json.dumps({name: one.numel() for name, one in model.named_parameters()}))
pickle.dump([group["lr"] for group in optimizer.param_groups], open("rates.pkl", "wb"))
