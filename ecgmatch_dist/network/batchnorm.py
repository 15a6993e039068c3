"""BatchNorm with the statistics of the global batch: by torch's SyncBatchNorm kernels on GPUs, by its plain ones elsewhere."""

from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from ecgmatch_dist.distributed.collectives import Group, all_gather, all_sum_nograd, world

Module = TypeVar("Module", bound=nn.Module)


class _GlobalNorm(torch.autograd.Function):
    """Training BatchNorm of [n_r, C, ...] over the rows of all ranks, with one small all-reduce in each direction.

    Torch's own kernels do the heavy passes: statistics, the affine map with given statistics, and the sums of its backward.
    Only two C-vectors per direction cross the ranks, in fp64.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Group) -> tuple[Tensor, ...]:
        n, width = x.numel() // x.shape[1], x.shape[1]
        sums = weight.new_zeros(2 * width + 1, dtype=torch.float64)
        if n > 0:  # the kernels refuse a rank without rows
            # The dummy running statistics have the parameters' type, so that the kernel returns it for bf16 rows too.
            mean, var = torch.batch_norm_update_stats(x, torch.zeros_like(weight), torch.ones_like(weight), 0.0)
            mean, var = mean.double(), var.double()
            sums = torch.cat([n * mean, n * (var + mean**2), sums.new_full((1,), n)])
        sums = all_sum_nograd(sums, group, "batchnorm")
        total = sums[-1]
        mean = sums[:width] / total
        var = (sums[width:-1] / total - mean**2).clamp_(min=0)
        mean, var = mean.to(weight.dtype), var.to(weight.dtype)
        ctx.save_for_backward(x, weight, mean, var, total)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(mean, var, total)
        return F.batch_norm(x, mean, var, weight, bias, eps=eps), mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, total = ctx.saved_tensors
        grad_weight, grad_bias = torch.zeros_like(weight), torch.zeros_like(weight)
        if x.numel() > 0:
            _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
            )
        # The gradients of weight and bias stay local sums: DDP averages them like those of every other parameter.
        sums = torch.stack([grad_weight, grad_bias]).double()
        slope, offset = all_sum_nograd(sums, ctx.group, "batchnorm") / total
        # dx = scale (dy - offset - xhat slope), scale = weight / std. The part in xhat is affine in x: again a batch_norm.
        scale = weight.double() / (var.double() + ctx.eps).sqrt()
        inner, shift = (-scale * slope).to(weight.dtype), (-scale * offset).to(weight.dtype)
        grad_x = F.batch_norm(x, mean, var, inner, shift, eps=ctx.eps)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        grad_x.addcmul_(grad, scale.to(weight.dtype).view(shape))
        return grad_x, grad_weight, grad_bias, None, None


class _GlobalNormCuda(torch.autograd.Function):
    """The same by the kernels of torch's SyncBatchNorm, which only GPUs have: 17 operations per layer instead of 53.

    SyncBatchNorm itself makes the host wait in every layer, to leave out ranks without rows. Here such a rank counts as a
    vanishing part of a row, with mean 0 and variance 1, which changes no sum.
    """

    NOTHING = 1e-30

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        eps: float,
        momentum: float,
        group: Group,
    ) -> Tensor:
        x = _dense(x)
        n, width = x.numel() // x.shape[1], x.shape[1]
        mean, invstd = torch.batch_norm_stats(x, eps) if n else (torch.zeros_like(weight), torch.ones_like(weight))
        own = torch.cat([mean, invstd, mean.new_full((1,), n or _GlobalNormCuda.NOTHING)])
        means, invstds, counts = torch.split(all_gather(own, group, "batchnorm"), [width, width, 1], 1)
        counts = counts.flatten()
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            x, means.contiguous(), invstds.contiguous(), running_mean, running_var, momentum, eps, counts
        )
        ctx.save_for_backward(x, weight, mean, invstd, counts.to(torch.int32))
        ctx.group = group
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps) if n else torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        width = x.shape[1]
        if not x.numel():
            zero = torch.zeros_like(weight)
            all_sum_nograd(mean.new_zeros(2 * width), ctx.group, "batchnorm")
            return torch.empty_like(x), zero, zero, None, None, None, None, None
        grad = _dense(grad)
        dy, dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, invstd, weight, True, True, True
        )
        # The gradients of weight and bias stay local sums, as above.
        dy, dy_xmu = torch.split(all_sum_nograd(torch.cat([dy, dy_xmu]), ctx.group, "batchnorm"), width)
        grad_x = torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, dy, dy_xmu, counts)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _dense(x: Tensor) -> Tensor:
    """In a layout that the kernels know."""
    return x if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def has_kernels(device: torch.device) -> bool:
    """Whether torch has the kernels of its SyncBatchNorm on this device."""
    return device.type == "cuda"


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """nn.BatchNorm1d/2d over the rows of all ranks, with the same parameters, buffers and state_dict.

    Ranks may hold different numbers of rows, or none. With one rank or in eval mode it is torch's own BatchNorm. Torch's
    SyncBatchNorm refuses CPUs, and on GPUs the host waits in every layer to learn which ranks have rows.
    """

    group: Group = None

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2, f"[n, C, ...], not {tuple(input.shape)}"

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or world(self.group) == 1:
            return super().forward(input)
        return self._over_ranks(input)

    @_disable_dynamo  # the compiler does not support its kernels; why not torch.compiler: backbones/base.py
    def _over_ranks(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        if has_kernels(input.device):
            own = self.weight, self.bias, self.running_mean, self.running_var
            return _GlobalNormCuda.apply(input, *own, self.eps, momentum, self.group)  # type: ignore[no-any-return, no-untyped-call]
        out, mean, var, total = _GlobalNorm.apply(input, self.weight, self.bias, self.eps, self.group)  # type: ignore[no-untyped-call]
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_((var * (total / (total - 1).clamp(min=1))).to(var.dtype), momentum)
        return out  # type: ignore[no-any-return]


def convert_batchnorm(model: Module, mode: Literal["global", "local"], group: Group = None) -> Module:
    """Replace every BatchNorm by one over all ranks ("global"), or change nothing ("local": other results, no traffic).

    Parameters and buffers are reused, not copied.
    """
    if mode == "local" or world(group) == 1:
        return model
    for name, child in list(model.named_modules()):
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, GlobalBatchNorm):
            assert child.affine, f"{name}: {child} has no weight"
            norm = GlobalBatchNorm(child.num_features, child.eps, child.momentum)
            norm.weight, norm.bias, norm.group, norm.training = child.weight, child.bias, group, child.training
            norm.running_mean, norm.running_var = child.running_mean, child.running_var
            norm.num_batches_tracked = child.num_batches_tracked
            model.set_submodule(name, norm)
    return model
