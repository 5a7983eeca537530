"""A training in bf16 on several processes, which you may stop at any time and start again.

    torchrun --standalone --nproc-per-node 2 train.py runs/mine
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py runs/mine --epochs 20

It computes on GPUs if there is one for every process, and else on the CPU. Every 20 steps it saves
a checkpoint in the folder, and it goes on from the newest one that it finds there. The second
command starts it again when a process dies. Each process has a whole copy of the model (DDP), or
with --sharded a part of it (FSDP2).

To make it yours, replace `load_data` and `build_model`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 64  # images per step, of all processes together
SAVE_EVERY = 20  # steps


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    labels = torch.tensor(labels)
    return TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])


def build_model():
    torch.manual_seed(0)  # every process starts from the same weights
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))


def shard(model, device, dtype):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def state_of(model, optimizer, step):
    weights, moments = state_dict.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def resume(folder, model, optimizer):
    """Load the newest complete checkpoint, if there is one; returns the number of steps done."""
    complete = sorted(folder.glob("step-*/.metadata"))  # the last file of a checkpoint
    if not complete:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=complete[-1].parent)  # fills the tensors in place
    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    state_dict.set_state_dict(model, optimizer, **loaded)
    return state["step"]


def say(*words):
    if dist.get_rank() == 0:
        print(*words, flush=True)


def sum_over_processes(numbers, device):
    numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(numbers)
    return numbers.tolist()


@torch.no_grad()
def accuracy(model, data, autocast, device):
    rank = dist.get_rank()
    world = dist.get_world_size()
    right = 0
    seen = 0
    model.eval()
    for start in range(0, len(data), BATCH):  # as often in every process: FSDP2 needs that
        images, labels = data[start + rank : start + BATCH : world]
        with autocast:
            logits = model(images.to(device))
        right += (logits.argmax(1) == labels.to(device)).sum().item()
        seen += len(labels)
    model.train()
    right, seen = sum_over_processes([right, seen], device)  # sums, because counts may differ
    return right / seen


def train(device, folder, epochs=5, sharded=False, fp32=False):
    dtype = torch.float32 if fp32 else torch.bfloat16
    use_autocast = not sharded and not fp32  # FSDP2 casts by its policy
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=use_autocast)
    if sharded:
        model = shard(build_model(), device, dtype)
    else:
        model = DistributedDataParallel(build_model().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # For fp16: scaler = torch.amp.GradScaler(device.type), with scaler.scale(loss).backward(),
    # scaler.unscale_(optimizer) before clipping, scaler.step(optimizer) and scaler.update(). Save
    # scaler.state_dict() in the checkpoint, and drop error_if_nonfinite.

    train_set, test_set = load_data()
    sampler = DistributedSampler(train_set)
    batch = BATCH // dist.get_world_size()
    loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True)
    steps = epochs * len(loader)
    done = resume(folder, model, optimizer)
    say(f"{dist.get_world_size()} processes, {device.type}, from step {done + 1}")
    loss_sum = 0.0
    seen = 0
    for epoch in range(done // len(loader), epochs):
        sampler.set_epoch(epoch)  # another order in every epoch
        for step, (images, labels) in enumerate(loader, start=epoch * len(loader) + 1):
            if step <= done:
                continue  # trained before the interruption
            optimizer.zero_grad()
            with autocast:
                loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()  # averages the gradients over the processes
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
            seen += len(labels)
            if step % SAVE_EVERY == 0 or step == steps:
                state = state_of(model, optimizer, step)
                dcp.save(state, checkpoint_id=folder / f"step-{step:06}")
                loss_sum, seen = sum_over_processes([loss_sum, seen], device)
                say(f"step {step} of {steps}: loss {loss_sum / seen:.3f}")
                loss_sum = 0.0
                seen = 0
    say(f"accuracy on images not trained on: {accuracy(model, test_set, autocast, device):.1%}")
    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")


def start():
    """Join the other processes; returns the device of this one."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets these two
    processes_here = int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < processes_here:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="for checkpoints, and at last weights.pt")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sharded", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--fp32", action="store_true", help="compute in float32, to compare")
    options = parser.parse_args(arguments)
    train(start(), **vars(options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
