"""torch's own profiler around some steps."""

import torch
from small import net, train

model = net()
train(model, 30)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    train(model, 10)
print(sorted((event.key, event.count) for event in profile.key_averages() if event.key.startswith("aten::")))
