"""What one DDP model does collectively in a step, and how to mirror it with zeros.

Everything that touches the inside of DistributedDataParallel and its reducer is
here. Names and order were read in torch 2.1.2, 2.6.0, 2.7.1, 2.13.0 and 2.15.0
(``torch/nn/parallel/distributed.py``) and in ``reducer.cpp``.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ._vote import Forward, inner

# What mirroring needs. Where one is missing the patch "join" reports itself as skipped.
NEEDED = (
    "_active_ddp_module",
    "_assign_modules_buffers",
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_check_sync_bufs_post_fwd",
    "_check_sync_bufs_pre_fwd",
    "_ddp_init_helper",
    "_post_forward",
    "_pre_forward",
    "_sync_module_buffers",
)
NEEDED_OF_REDUCER = (
    "_check_reducer_finalized",
    "_get_local_used_map",
    "_get_zeros_like_grad_buckets",
    "_push_all_rebuilt_params",
    "_rebuild_buckets",
    "_run_comm_hook",
)


def why_not(ddp: DistributedDataParallel) -> Optional[str]:
    """Say why a model cannot be shadowed, or ``None`` where it can.

    Arguments:
        ddp: a constructed DDP model.

    Returns:
        One clause for the log; such a model runs as stock on all ranks.
    """
    if getattr(ddp, "_use_python_reducer", False):  # torch 2.6 and up; all-reduces per parameter
        return "torch._dynamo.config.optimize_ddp is 'python_reducer', whose all-reduces have no buckets"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params reduces outside of the buckets"
    if getattr(ddp, "mixed_precision", None) is not None:
        # Its comm hook calls queue_callback, legal only inside a backward
        # (torch/distributed/algorithms/ddp_comm_hooks/mixed_precision_hooks.py).
        return "mixed_precision= of DistributedDataParallel reduces through callbacks of the backward"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()):
        return "an optimizer applied in the backward would step on ranks without batches"
    return None


class Shadow:
    """One DDP model, as the vote sees it.

    Arguments:
        ddp: the model.
        on_first_gradient: called right before the first gradient after a forward
            is accumulated into a parameter, with whether the reducer is going
            to all-reduce in this backward.
    """

    def __init__(
        self, ddp: DistributedDataParallel, on_first_gradient: Callable[[Shadow, bool], None]
    ) -> None:
        self.number = -1
        self.source = 0  # rank that the next buffer broadcast comes from
        self.device = ddp.device
        this = weakref.ref(self)

        def gone(_: Any) -> None:
            shadow = this()
            if shadow is not None:
                shadow.detach()  # an AccumulateGrad node keeps its parameter alive

        self._ddp = weakref.ref(ddp, gone)
        self._kept: Optional[DistributedDataParallel] = None
        self._on_first_gradient = on_first_gradient
        self._armed = False  # a synchronised forward has run and its backward has not begun
        self._waiting = False  # a forward with gradients has run and its backward has not begun
        # Synchronised backwards, own and shadowed, since the reducer was made;
        # and whether this rank has run one itself.
        self._backwards = 0
        self._ran_itself = False
        self._hooks: List[Any] = []
        self._accumulators: List[Any] = []
        self._watch_gradients(ddp)

    # -- life time ---------------------------------------------------------------

    def get(self) -> Optional[DistributedDataParallel]:
        """The model, or ``None`` once it is gone."""
        return self._ddp()

    @property
    def gone(self) -> bool:
        """Whether the script has dropped the model, and nobody keeps it."""
        return self._ddp() is None

    def hold(self) -> None:
        """Keep the model alive: another rank may still train it."""
        self._kept = self._ddp()

    def release(self) -> None:
        """Let the script decide again about the model's life."""
        self._kept = None

    def detach(self) -> None:
        """Take the hooks off the model's parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._accumulators.clear()
        self._kept = None

    def _alive(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None, "asked before (Shadow.gone)"
        return ddp

    # -- the rank's own step -------------------------------------------------------

    def _watch_gradients(self, ddp: DistributedDataParallel) -> None:
        """Be called right before the reducer's own hooks on the parameters.

        The reducer counts gradients in post hooks of the AccumulateGrad nodes
        (reducer.cpp, ``Reducer::Reducer``). A pre-hook of the same nodes runs
        just before the first bucket can start, and only when gradients do
        accumulate: ``autograd.grad`` w.r.t. an input, which reduces nothing,
        does not reach it, and a reentrant checkpoint does.
        """
        parameters, _ = ddp._build_params_for_reducer()
        this = weakref.ref(self)

        def before_gradient(_: Any) -> None:
            shadow = this()
            if shadow is not None and shadow._waiting:
                shadow._first_gradient()

        with torch.enable_grad():
            for parameter in parameters:
                # As in DistributedDataParallel._module_wait_for_copy_hook: the
                # node exists once, and lives as long as somebody holds it.
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                self._hooks.append(node.register_prehook(before_gradient))
                self._accumulators.append(node)

    def ran_forward(self, ddp: DistributedDataParallel) -> None:
        """Note a forward of this rank (``_post_forward`` has run)."""
        self.source = 0
        if torch.is_grad_enabled():
            self._waiting = True
            # As in _post_forward: prepare_for_backward() makes the reducer expect gradients.
            if ddp.require_backward_grad_sync:
                self._armed = True

    def _first_gradient(self) -> None:
        synchronised, self._armed, self._waiting = self._armed, False, False
        if synchronised:
            self._backwards += 1
            self._ran_itself = True
        self._on_first_gradient(self, synchronised)

    @property
    def waits_for_backward(self) -> bool:
        """Whether a forward with gradients has run whose backward has not begun."""
        return self._waiting

    def next_forward(self, ddp: DistributedDataParallel, fresh: bool, after: bool = False) -> Forward:
        """What is collective in the forward that is about to run.

        Arguments:
            ddp: the model.
            fresh: no model of the process group waits for its backward.
            after: ask for the part after the computation (a buffer comm hook
                placed at ``POST_FORWARD``).
        """
        grad = torch.is_grad_enabled()
        return Forward(
            fresh,
            self.number,
            rebuild=grad and not after and self._rebuild_is_due(ddp),
            buffers=ddp._check_sync_bufs_post_fwd() if after else ddp._check_sync_bufs_pre_fwd(),
            sync=grad and ddp.require_backward_grad_sync,
            trains=grad,
        )

    def _rebuild_is_due(self, ddp: DistributedDataParallel) -> bool:
        # reducer.cpp should_rebuild_buckets(), and rebuilt_params_ not empty: filled
        # by the first synchronised backward, with a static graph by the second
        # (its first one is delayed and only counts).
        if ddp._has_rebuilt_buckets:
            return False
        if ddp.static_graph:
            return self._backwards >= 2
        return self._backwards >= 1 and not ddp.find_unused_parameters

    # -- shadowing -------------------------------------------------------------

    def shadow_forward(self, forward: Forward, source: int) -> None:
        """Mirror the collectives of another rank's forward."""
        ddp = self._alive()
        with inner(), torch.no_grad():
            if forward.rebuild and ddp.reducer._rebuild_buckets():
                ddp._has_rebuilt_buckets = True
            if forward.buffers:
                # Buffers may have been reassigned (pytorch#63916), as in DDP._sync_buffers.
                ddp._assign_modules_buffers()
                ddp._sync_module_buffers(source)
        ddp.require_forward_param_sync = forward.sync

    def shadow_backward(self) -> None:
        """Mirror the collectives of another rank's synchronised backward, with zeros."""
        ddp = self._alive()
        self._backwards += 1
        delayed = ddp.static_graph and self._backwards == 1
        with inner(), torch.no_grad():
            try:
                buckets = ddp.reducer._get_zeros_like_grad_buckets()
            except RuntimeError:
                # A bucket of a sparse gradient is undefined until this rank has
                # had one (mark_variable_ready_sparse fills it).
                with torch.enable_grad():
                    self._backward_of_zeros(ddp)
                ddp.require_forward_param_sync = True
                return
            # A static graph delays its first iteration: the map of used
            # parameters goes first, then all buckets (reducer.cpp delay_all_reduce).
            if delayed:
                self._reduce_used_map(ddp)
            works = [ddp.reducer._run_comm_hook(bucket) for bucket in buckets]
            for work in works:
                work.wait()
            if ddp.find_unused_parameters and not ddp.static_graph:
                self._reduce_used_map(ddp)
            if self._backwards >= 2 or not ddp.static_graph:
                # So that this rank rebuilds its buckets where the others do.
                ddp.reducer._push_all_rebuilt_params()
        ddp.require_forward_param_sync = True

    @staticmethod
    def _reduce_used_map(ddp: DistributedDataParallel) -> None:
        # Zeros: this rank uses no parameter. The map itself would be the one of this
        # rank's last backward, and make unused parameters look used.
        unused = torch.zeros_like(ddp.reducer._get_local_used_map())
        ddp.process_group.allreduce([unused]).wait()

    @staticmethod
    def _backward_of_zeros(ddp: DistributedDataParallel) -> None:
        """Run a real backward whose gradients are zeros, leaving ``.grad`` as it was."""
        parameters, sparse = ddp._build_params_for_reducer()
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        total = torch.zeros((), device=ddp.device)
        for parameter, is_sparse in zip(parameters, sparse):
            if is_sparse:
                nothing = torch.empty(0, dtype=torch.long, device=parameter.device)
                rows = torch.nn.functional.embedding(nothing, parameter, sparse=True)
                total = total + rows.sum()
            else:
                total = total + (parameter * 0).sum()
        ddp.reducer.prepare_for_backward([])
        total.backward()
        for parameter, gradient in zip(parameters, kept):
            parameter.grad = gradient

    # -- starting afresh -----------------------------------------------------------

    @property
    def missed_first_iteration(self) -> bool:
        """Whether others have run the first iteration of a static graph that this rank only shadowed."""
        ddp = self._ddp()
        return ddp is not None and bool(ddp.static_graph) and self._backwards > 0 and not self._ran_itself

    def make_reducer_anew(self) -> None:
        """Give the model a new reducer, on all ranks.

        A static graph is recorded in the first iteration of a reducer, and the
        record cannot be handed over (reducer.cpp ``numGradHooksTriggeredMap_``).
        When a rank has only shadowed that iteration, all ranks begin again.
        """
        ddp = self._alive()
        parameters, expect_sparse_gradient = ddp._build_params_for_reducer()
        # As DistributedDataParallel.__setstate__ does for an unpickled model.
        ddp._ddp_init_helper(
            parameters,
            expect_sparse_gradient,
            ddp._build_debug_param_to_name_mapping(parameters),
            True,
        )
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        if ddp.logger is not None:
            ddp.logger._set_static_graph()
        for hook, state in getattr(ddp, "_comm_hooks", []):
            dist._register_comm_hook(ddp.reducer, state, hook)
        ddp._has_rebuilt_buckets = False
        self._backwards = 0
        self._ran_itself = False
