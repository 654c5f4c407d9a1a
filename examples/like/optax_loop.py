"""A script like training loops with optax: one program on all devices, pmean of the gradients, process 0 saves.

python optax_loop.py --out out --devices 2
python optax_loop.py --out out --devices 2 --resume out/checkpoint.pkl
"""

import argparse
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits


def init_params(key):
    sizes = [(64, 256), (256, 256), (256, 10)]
    keys = jax.random.split(key, len(sizes))
    return [
        {"w": jax.random.normal(k, size) * np.sqrt(2 / size[0]), "b": jnp.zeros(size[1])}
        for k, size in zip(keys, sizes)
    ]


def loss_fn(params, batch):
    x, labels = batch
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(args):
    jax.config.update("jax_num_cpu_devices", args.devices)
    images, labels = load_digits(return_X_y=True)
    images, labels = images.astype(np.float32) / 16, labels.astype(np.int32)
    mesh = jax.make_mesh((args.devices,), ("data",))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, 20, args.steps)
    tx = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.01)

    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init_params(jax.random.key(args.seed))
    opt_state = tx.init(params)
    start = 0
    if args.resume:
        params, opt_state, start = pickle.loads(args.resume.read_bytes())
    state_specs = P()
    train_step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=mesh,
            in_specs=(P(), state_specs, P("data")),
            out_specs=(P(), state_specs, P()),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )
    eval_step = jax.jit(loss_fn)
    params = jax.device_put(params, replicated)
    for step in range(start, args.steps):
        rows = np.random.default_rng([args.seed, step]).integers(1500, size=args.batch_size)
        batch = jax.device_put((images[rows], labels[rows]), split)
        params, opt_state, loss = train_step(params, opt_state, batch)
        if jax.process_index() == 0:
            print(f"step {step} loss {float(loss):.4f}", flush=True)
        if (step + 1) % args.eval_every == 0:
            val_loss = float(eval_step(params, (images[1500:], labels[1500:])))
            if jax.process_index() == 0:
                print(f"step {step} val loss {val_loss:.4f}", flush=True)
                saved = jax.device_get((params, opt_state, step + 1))
                (args.out / "checkpoint.pkl").write_bytes(pickle.dumps(saved))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval_every", type=int, default=50)
    parser.add_argument("--batch_size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--resume", type=Path)
    main(parser.parse_args())
