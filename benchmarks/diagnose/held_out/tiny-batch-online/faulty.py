# subject: tiny-batch
# also: python-time
# thread: own
# steps: 3000
# gain: yes
# device: cpu
# what: Rows go through the network two at a time, and the optimizer's overhead is paid for each pair.

import argparse

import torch
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=6000, help="rows to train on, with repetition")
    parser.add_argument("--batch-size", type=int, default=2)  # <- here
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(99)
    x, y = load_diabetes(return_X_y=True)
    x = torch.tensor(scale(x), dtype=torch.float32)
    y = torch.tensor(scale(y), dtype=torch.float32).unsqueeze(1)
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.randint(len(x), (args.rows,))
    running = 1.0
    for number, rows in enumerate(order.split(args.batch_size)):  # <- here
        prediction = model(x[rows])  # <- here
        loss = nn.functional.mse_loss(prediction, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += 0.01 * (loss.item() - running)
        if number % 500 == 0:
            print(f"after {number * args.batch_size} rows: {running:.3f}")
    with torch.no_grad():
        print(f"whole table: {nn.functional.mse_loss(model(x), y).item():.3f}")


if __name__ == "__main__":
    main()
