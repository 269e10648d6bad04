"""The script's own global hooks around optimizer steps."""

from small import net, train
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

log = []
before = register_optimizer_step_pre_hook(lambda *_: log.append("before"))
after = register_optimizer_step_post_hook(lambda *_: log.append("after"))
train(net(), 80)
print(log[:4], len(log), before.id, after.id)
before.remove()
train(net(), 20)
print(len(log))
