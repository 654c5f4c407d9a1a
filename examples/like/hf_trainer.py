"""A script like many for the Trainer of Hugging Face: a language model, regular checkpoints, clipped gradients.

torchrun --nproc-per-node 2 hf_trainer.py --output_dir out
torchrun --nproc-per-node 2 hf_trainer.py --output_dir out --resume_from_checkpoint out/checkpoint-150
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    n_embd: int = field(default=64)
    n_layer: int = field(default=2)


@dataclass
class DataArguments:
    block_size: int = field(default=64)


class BlockDataset(Dataset):
    def __init__(self, text, block_size):
        whole = len(text) // block_size * block_size
        self.blocks = text[:whole].view(-1, block_size).long()

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return {"input_ids": self.blocks[i], "labels": self.blocks[i]}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    parser.set_defaults(
        max_steps=300,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        save_steps=150,
        logging_steps=1,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(s.read_bytes() for s in sources)), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    config = GPT2Config(
        vocab_size=256,
        n_positions=data_args.block_size,
        n_embd=model_args.n_embd,
        n_layer=model_args.n_layer,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=BlockDataset(text[:cut], data_args.block_size),
        eval_dataset=BlockDataset(text[cut : cut + 40_000], data_args.block_size),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"val loss {metrics['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
