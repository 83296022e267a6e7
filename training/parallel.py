"""How Lightning and torch share a run between its ranks: the network whole on each, or a part of it.

A checkpoint is the same file in either, and that of one device: whole tensors, under the same names and numbers.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from model.transformer import Transformer
from training.ranks import Ranks
from training.strategy import DDP, FSDP


class Replicated(DDPStrategy):
    """The whole network on each rank; gradients are averaged as the backward pass goes. `training/ranks.py` has started the
    processes, so that Lightning is to start none."""

    def __init__(self) -> None:
        super().__init__(broadcast_buffers=False, gradient_as_bucket_view=True)

    def _configure_launcher(self) -> None: ...

    def setup_distributed(self) -> None:
        """Each rank has its own seed by now, where Lightning would give all of them the one in its variable."""
        os.environ.pop("PL_GLOBAL_SEED", None)
        super().setup_distributed()


class Sharded(Replicated):
    """The network is sharded already (`shard`), and torch's hooks on it average the gradients: nothing is wrapped. Here are
    its parts put together for a checkpoint, and taken from one."""

    def configure_ddp(self) -> None: ...

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return _mapped(super().lightning_module_state_dict(), self._whole)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return _mapped(super().optimizer_state(optimizer), self._whole)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        mine = self.lightning_module.state_dict()
        parts = {name: _part(tensor, mine[name]) for name, tensor in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(parts, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                number: {name: _part(value, parameters[number]) for name, value in entry.items()}
                for number, entry in stored["state"].items()
            }
            optimizer.load_state_dict(stored | {"state": state})

    def teardown(self) -> None:
        """Lightning would move each tensor to the CPU, which a part of one does not do."""
        assert self.cluster_environment and self.accelerator
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def _whole(self, tensor: Tensor) -> Tensor | None:
        """On rank 0 the whole of a tensor, gathered one at a time; elsewhere nothing, though it takes part."""
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole.detach().cpu() if self.is_global_zero else None


def strategy(trainer: DDP | FSDP, ranks: Ranks) -> Any:
    """Lightning's, for `Trainer(strategy=...)`."""
    if ranks.world == 1:
        return "auto"
    return Sharded() if isinstance(trainer, FSDP) else Replicated()


def cluster(ranks: Ranks) -> ClusterEnvironment:
    """Where Lightning finds rank and world. Of Slurm's signals it handles none: `training/signals.py` does."""
    if ranks.world == 1:
        return LightningEnvironment()
    return SLURMEnvironment(auto_requeue=False) if ranks.by == "srun" else TorchElasticEnvironment()


def shard(model: Transformer, ranks: Ranks, device: str) -> list[nn.Parameter]:
    """Replace each parameter by this rank's part of it, block by block, so that one block is whole at a time; scalars,
    which have no parts, stay, and are returned: nobody averages their gradients.

    Source: Zhao et al. 2023 (FSDP), arXiv 2304.11277; torch's `fully_shard`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (ranks.world,))
    scalars = [parameter for parameter in model.parameters() if parameter.ndim == 0]
    for module in (*model.blocks, model):
        # the root's too, which torch would leave whole until its backward pass: a look at the weights between two steps would
        # have the next step see the old ones, and `zero_grad` miss their gradient
        fully_shard(module, mesh=mesh, ignored_params=set(scalars), reshard_after_forward=True)
    return scalars


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def without_lightnings_signals(trainer: Any) -> None:
    """Lightning's handler of SIGTERM sends a message of its own from wherever the program is, and its loop another before
    each micro-batch, for which a GPU waits; `Task` asks all ranks once a step."""
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def _part(whole: Any, like: Any) -> Any:
    """This rank's part of a whole tensor where `like` is sharded."""
    if not hasattr(like, "device_mesh") or not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    on_device = whole.to(like.device_mesh.device_type)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def _mapped(node: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same containers with each tensor changed, in their order: on all ranks the same."""
    if isinstance(node, Mapping):
        return {key: _mapped(value, change) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_mapped(value, change) for value in node)
    return change(node) if isinstance(node, Tensor) else node
