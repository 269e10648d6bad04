"""Stable-Baselines3: PPO on CartPole, whose loop and environment are the libraries' own."""

import gymnasium
import torch
from stable_baselines3 import PPO

model = PPO("MlpPolicy", gymnasium.make("CartPole-v1"), seed=0, n_steps=256, batch_size=64, device="cpu")
model.learn(total_timesteps=1024)
for name, one in model.policy.named_parameters():
    print(name, one.abs().sum().item().hex())
torch.save(model.policy.state_dict(), "policy.pt")
