"""TabNet: attentive features on tables, trained by its own fit."""

import torch
from pytorch_tabnet.tab_model import TabNetClassifier
from sklearn.datasets import load_breast_cancer

x, y = load_breast_cancer(return_X_y=True)
x = (x - x.mean(0)) / x.std(0)
classifier = TabNetClassifier(seed=0, verbose=0, device_name="cpu")
classifier.fit(x[:450], y[:450], eval_set=[(x[450:], y[450:])], max_epochs=6, batch_size=128, virtual_batch_size=64)
for loss, found in zip(classifier.history["loss"], classifier.history["val_0_auc"], strict=True):
    print(float(loss).hex(), float(found).hex())
torch.save(classifier.network.state_dict(), "network.pt")
