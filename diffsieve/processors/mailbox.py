"""Receives the cache context that a pipeline opens around its transformer calls.

diffusers hands the context to every stateful hook below the transformer, in eager code, and resets these hooks when a
pipeline call is over. The hook sits on the list of blocks, which is never called itself: a hook on the transformer
would wrap its `forward`, and CPU offload throws such wrappers away after each call.
"""

from typing import Any

from diffusers.hooks.hooks import BaseState, HookRegistry, ModelHook, StateManager
from torch import nn

from .clock import CallContext, StepClock

_HOOK_NAME = "diffsieve_context"


class _ContextSlot(StateManager):
    def __init__(self, clock: StepClock) -> None:
        super().__init__(BaseState)
        self.latest: CallContext | None = None
        self._clock = clock

    def set_context(self, context: CallContext | None) -> None:
        self.latest = context

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self.latest = None
        self._clock.finish()


class _ContextHook(ModelHook):
    _is_stateful = True

    def __init__(self, clock: StepClock) -> None:
        super().__init__()
        self.slot = _ContextSlot(clock)

    def reset_state(self, module: nn.Module) -> nn.Module:
        self.slot.reset()
        return module


class ContextMailbox:
    """The latest cache context of one transformer."""

    def __init__(self, transformer: nn.Module, blocks: nn.Module, clock: StepClock) -> None:
        """Args: transformer; blocks: a container below it that is never called; clock: told when a call is over."""
        self._transformer, self._blocks = transformer, blocks
        hook = _ContextHook(clock)
        self._slot = hook.slot
        bare = "forward" not in blocks.__dict__
        HookRegistry.check_if_exists_or_initialize(blocks).register_hook(hook, _HOOK_NAME)
        if bare:
            # the wrapper around a `forward` that nobody calls would keep the model from being pickled
            del blocks.__dict__["forward"]
            hook.fn_ref.forward = None
        self._forget_cached_registries()

    @property
    def context(self) -> CallContext | None:
        """The context of the call in progress, None if the pipeline opened none."""
        return self._slot.latest

    def remove(self) -> None:
        """Take the hook off and leave the modules as they were."""
        registry = HookRegistry.check_if_exists_or_initialize(self._blocks)
        registry.remove_hook(_HOOK_NAME, recurse=False)
        if not registry.hooks:
            del self._blocks._diffusers_hook
            self._blocks.__dict__.pop("forward", None)
        self._forget_cached_registries()

    def _forget_cached_registries(self) -> None:
        HookRegistry.check_if_exists_or_initialize(self._transformer).invalidate_child_registries_cache()
