"""PyTorch Geometric: batches of graphs, and a whole graph."""

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, global_add_pool

torch.manual_seed(0)


def graph():
    nodes, label = int(torch.randint(10, 40, ())), int(torch.randint(2, ()))
    edges = torch.randint(nodes, (2, nodes * (2 + 2 * label)))
    return Data(x=torch.randn(nodes, 8), edge_index=edges, y=torch.tensor([label]))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = GINConv(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))
        self.head = nn.Linear(16, 2)

    def forward(self, x, edges, batch):
        return self.head(global_add_pool(self.convolution(x, edges).relu(), batch))


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(32, 16, cached=True), GCNConv(16, 4, cached=True)

    def forward(self, x, edges):
        return self.second(F.dropout(self.first(x, edges).relu(), 0.5, self.training), edges)


classifier = Classifier()
optimizer = torch.optim.Adam(classifier.parameters(), lr=1e-2)
for epoch in range(3):
    for batch in DataLoader([graph() for _ in range(96)], batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(classifier(batch.x, batch.edge_index, batch.batch), batch.y)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item().hex())

model, x, y = Gcn(), torch.randn(200, 32), torch.randint(4, (200,))
edges, known = torch.randint(200, (2, 800)), torch.rand(200) < 0.5
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(40):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, edges)[known], y[known])
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        print(epoch, loss.item().hex())
torch.save([classifier.state_dict(), model.state_dict()], "models.pt")
