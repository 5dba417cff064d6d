"""The hook by which the controller of a transformer sees every forward."""

from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

# Where a transformer holds its controller. Copied and pickled with it.
CONTROLLER = "_diffsieve_controller"


class _Watcher(Protocol):
    def before_forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor | None) -> None: ...


def watch_forwards(transformer: nn.Module) -> RemovableHandle:
    """Tell the controller that a transformer holds of every forward, before it runs.

    The controller is looked up at each call: a deep copy of the transformer shares the hook, but must run by its own
    copy of the controller instead of driving the layers of the original.
    """
    return transformer.register_forward_pre_hook(_before_forward, with_kwargs=True)


# Compiled callers must not trace this: it reads Python state that changes every step. A name of the module, so that a
# pickled transformer can refer to it.
@torch.compiler.disable
def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    controller: _Watcher | None = module.__dict__.get(CONTROLLER)
    named = dict(zip(("hidden_states", "timestep"), args, strict=False)) | kwargs
    if controller is not None and "hidden_states" in named:  # without, the model's own error says more
        controller.before_forward(named["hidden_states"], named.get("timestep"))
