"""skorch: a network behind scikit-learn's interface, with its own split for validation."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
np.random.seed(0)
x, y = load_digits(return_X_y=True)


class Net(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.layers(x)


net = NeuralNetClassifier(
    Net, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, max_epochs=10, lr=1e-3, batch_size=64,
    iterator_train__shuffle=True, verbose=0,
)  # fmt: skip
net.fit((x / 16).astype(np.float32), y.astype(np.int64))
for row in net.history:
    print(row["epoch"], row["train_loss"].hex(), row["valid_loss"].hex(), row["valid_acc"])
net.save_params(f_params="net.pt", f_optimizer="optimizer.pt")
