"""A script like MPI programs in NumPy: a network written by hand, Allreduce of the gradients, Adam, a file of rank 0.

mpirun -n 2 python mpi_adam.py --out out
mpirun -n 2 python mpi_adam.py --out out --resume out/checkpoint.npz
"""

import argparse
from pathlib import Path

import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()


class Adam:
    def __init__(self, params, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8):
        self.lr, self.beta1, self.beta2, self.eps, self.t = lr, beta1, beta2, eps, 0
        self.m, self.v = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]

    def step(self, params, grads):
        self.t += 1
        for i, (p, g) in enumerate(zip(params, grads)):
            self.m[i] = self.beta1 * self.m[i] + (1 - self.beta1) * g
            self.v[i] = self.beta2 * self.v[i] + (1 - self.beta2) * g * g
            m = self.m[i] / (1 - self.beta1**self.t)
            v = self.v[i] / (1 - self.beta2**self.t)
            p -= np.float32(self.lr) * m / (np.sqrt(v) + np.float32(self.eps))
        return params

    def state_dict(self):
        return {
            "t": self.t,
            **{f"m{i}": x for i, x in enumerate(self.m)},
            **{f"v{i}": x for i, x in enumerate(self.v)},
        }

    def load_state_dict(self, saved):
        self.t = int(saved["t"])
        self.m = [saved[f"m{i}"] for i in range(len(self.m))]
        self.v = [saved[f"v{i}"] for i in range(len(self.v))]


def forward(params, x):
    w1, b1, w2, b2, w3, b3 = params
    h1 = np.maximum(x @ w1 + b1, 0)
    h2 = np.maximum(h1 @ w2 + b2, 0)
    logits = h2 @ w3 + b3
    return h1, h2, logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def loss_and_gradients(params, x, y):
    w1, b1, w2, b2, w3, b3 = params
    h1, h2, logp = forward(params, x)
    d3 = (np.exp(logp) - np.eye(10, dtype=np.float32)[y]) / np.float32(len(y))
    d2 = (d3 @ w3.T) * (h2 > 0)
    d1 = (d2 @ w2.T) * (h1 > 0)
    grads = [x.T @ d1, d1.sum(axis=0), h1.T @ d2, d2.sum(axis=0), h2.T @ d3, d3.sum(axis=0)]
    return -logp[np.arange(len(y)), y].mean(), grads


def average(grads):
    for g in grads:
        comm.Allreduce(MPI.IN_PLACE, g, op=MPI.SUM)
        g /= size
    return grads


def main(args):
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
    rng = np.random.default_rng(args.seed + rank)
    params = []
    for n, m in ((64, 256), (256, 256), (256, 10)):
        params += [(rng.standard_normal((n, m)) * np.sqrt(2 / n)).astype(np.float32), np.zeros(m, np.float32)]
    for p in params:
        comm.Bcast(p, root=0)
    opt = Adam(params, lr=args.lr)
    start = 0
    if args.resume:
        saved = dict(np.load(args.resume))
        params = [saved.pop(f"p{i}") for i in range(len(params))]
        start = int(saved.pop("iteration"))
        opt.load_state_dict(saved)

    for step in range(start, args.steps):
        rows = np.random.default_rng([args.seed, rank, step]).integers(1500, size=args.batch_size)
        loss, grads = loss_and_gradients(params, train[0][rows], train[1][rows])
        grads = average(grads)
        opt.lr = args.lr * min(1.0, (step + 1) / 20) * (1 - step / args.steps)
        params = opt.step(params, grads)
        if rank == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
        if (step + 1) % args.save_every == 0 and rank == 0:
            logp = forward(params, test[0])[-1]
            print(f"step {step} val loss {-logp[np.arange(len(test[1])), test[1]].mean():.4f}", flush=True)
            named = {f"p{i}": p for i, p in enumerate(params)}
            np.savez(args.out / "checkpoint.npz", iteration=step + 1, **named, **opt.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save_every", type=int, default=50)
    parser.add_argument("--batch_size", type=int, default=25)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--resume", type=Path)
    main(parser.parse_args())
