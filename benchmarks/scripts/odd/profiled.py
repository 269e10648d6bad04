"""torch's own profiler, with stacks around the first call and without around some steps."""

import torch
from small import data, net, train

model = net()
cpu = [torch.profiler.ProfilerActivity.CPU]
with torch.profiler.profile(activities=cpu, with_stack=True):
    model(data()[0])
train(model, 30)
with torch.profiler.profile(activities=cpu) as profile:
    train(model, 10)
print(sorted((event.key, event.count) for event in profile.key_averages() if event.key.startswith("aten::")))
