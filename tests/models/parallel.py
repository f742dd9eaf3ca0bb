"""One process of several: run by test_parallel.py, once for each rank, over gloo."""

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from models import VOCAB, causal
from shaking import gain
from whence.models import WhenceForCausalLM, WhenceForConditionalGeneration
from whence.models.layer import WhenceLayer

STEPS = 2
CUT = {"tp": WhenceForCausalLM, "tp-seq2seq": WhenceForConditionalGeneration}


def trained(model: Any, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(model: Any, kind: str) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=plugin.auto_wrap_policy,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrapped = 0
    for module in list(model.modules()):
        if module is not model and plugin.auto_wrap_policy(
            module, recurse=False, nonwrapped_numel=0
        ):
            assert isinstance(module, WhenceLayer)
            fully_shard(module, mesh=mesh)
            wrapped += 1
    assert wrapped == len(model.model.stack.layers)
    return fully_shard(model, mesh=mesh)


def data_parallel(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model = causal(name).train()
    if kind.endswith("+checkpointing"):
        kind = kind.removesuffix("+checkpointing")
        model.gradient_checkpointing_enable()
    plain = copy.deepcopy(model)
    ids = torch.randint(2, VOCAB, (4, 9))
    rank = dist.get_rank()
    model = sharded(model, kind)
    if kind == "fsdp1":
        assert sum(isinstance(m, FullyShardedDataParallel) for m in model.modules()) == 3
    trained(model, ids[2 * rank : 2 * rank + 2])
    trained(plain, ids)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def tensor_parallel(cls: Any, folder: str, name: str) -> None:
    """The model of a folder, cut over two processes, against the same in one."""
    plain = cls.from_pretrained(folder).train()
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    model = cls.from_pretrained(folder, distributed_config=config).train()
    assert plain.config.position == name
    whole = dict(plain.named_parameters())
    for key, parameter in model.named_parameters():
        if "q_proj" in key:
            assert parameter.to_local().shape[0] * 2 == whole[key].shape[0]
    torch.manual_seed(0)
    ids = torch.randint(2, VOCAB, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, attention_mask=mask, labels=ids).logits,
            plain(ids, attention_mask=mask, labels=ids).logits,
        )
    model.eval(), plain.eval()
    arguments = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "attention_mask": mask}
    torch.testing.assert_close(model.generate(ids, **arguments), plain.generate(ids, **arguments))
    for m in (model.train(), plain.train()):
        for part in (ids[:1], ids[1:]):  # two, as when gradients are accumulated
            m(part, labels=part).loss.backward()
    for key, parameter in model.named_parameters():
        found = parameter.grad
        if hasattr(found, "full_tensor"):
            found = found.full_tensor()
        unit = gain(key)
        torch.testing.assert_close(found / unit, whole[key].grad / unit, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=size)
    for case in sys.argv[2:]:
        kind, name, folder = case.split(";")
        if kind in CUT:
            tensor_parallel(CUT[kind], folder, name)
        else:
            data_parallel(kind, name)
        if dist.get_rank() == 0:
            print("equal", kind, name, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may wait for each other at exit
