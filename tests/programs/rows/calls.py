"""Calls are read by the names of the callee's parameters, in whatever order they are given.

Sizes that are symbols, and heads that are stacked, are read as well.
"""

from __future__ import annotations

import torch

from fxpass import messages
from tests.programs.row import BF16, BOTH, F16, NOTHING, RAISES, REGION, Row, becoming

KIND = "calls"
SYMBOLS = ("dynamic",)


class Twice(torch.autograd.Function):
    """What it returns is an intermediate of another name, in three ways."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x @ w
        return y.mul_(2).contiguous().to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g @ w.t(), 2 * x.t() @ g


# fmt: off
ROWS = becoming((
    Row("matmul, shuffled", "F.cross_entropy(torch.matmul(other=weight.T, input=x), labels)"),
    Row("mm, shuffled", "F.cross_entropy(torch.mm(mat2=weight.t(), input=x), labels)"),
    Row("a method by name", "F.cross_entropy(x.matmul(other=weight.T), labels)"),
    Row("linear, shuffled", "F.cross_entropy(F.linear(weight=weight, input=x), labels)"),
    Row("addmm, shuffled",
        "F.cross_entropy(torch.addmm(mat2=weight.t(), input=weight.sum(1), mat1=x), labels)"),
    Row("loss, shuffled", "F.cross_entropy(target=labels, reduction='sum', input=z)"),
    Row("NumPy's names", "-z.log_softmax(-1).gather(axis=-1, index=labels[:, None]).mean()"),
    Row("squeezed along an axis", "F.cross_entropy(z[None].squeeze(axis=0), labels)"),
    Row("swapaxes by name",
        "F.cross_entropy(z.swapaxes(axis1=0, axis0=1).transpose(dim1=0, dim0=1), labels)"),
    Row("reshape by name", "F.cross_entropy(torch.reshape(shape=(N, V), input=z[None]), labels)"),
    Row("permute by name", "F.cross_entropy(torch.permute(dims=(1, 0), input=z.t()), labels)"),
    Row("a factor by name", "F.cross_entropy(torch.mul(other=2.5, input=z), labels)"),
    Row("clamp by name", "F.cross_entropy(torch.clamp(max=1, input=z, min=-1), labels)", REGION),
    Row("lse by name",
        "torch.sub(other=z.gather(-1, labels[:, None]), "
        "input=torch.logsumexp(keepdim=True, dim=-1, input=z)).sum() * 0 "
        "+ F.cross_entropy(z, labels)"),
    Row("einsum of a diagonal", "F.cross_entropy(torch.einsum('nn,vn->nv', x[:D], weight), labels[:D])",
        NOTHING, messages.UNKNOWN_READER),
    Row("einsum of a stretched dimension",
        "F.cross_entropy(torch.einsum('nd,vd->nv', x[:, :1], weight), labels)", NOTHING, messages.UNKNOWN_READER),
    # an index counts from the end; gather and cross_entropy have no such labels
    Row("negative labels that a mask removes later",
        "labels = torch.where(rows, labels, torch.where(labels < 9, -1, -V)); "
        "picked = z.log_softmax(-1)[torch.arange(N), labels]; kept = labels >= 0; "
        "-(picked * kept).sum() / kept.sum()"),
    Row("take_along_dim counts round the classes",
        "labels = torch.where(rows, labels, torch.where(labels < 50, -1, V + 2)); "
        "torch.take_along_dim(z.log_softmax(-1), labels.view(-1, 1), dim=-1).sum()"),
    Row("take_along_dim counts round the classes, a difference",
        "labels = torch.where(rows, labels, torch.where(labels < 50, -V, -100)); "
        "(z.logsumexp(-1, keepdim=True) - torch.take_along_dim(z, labels.view(-1, 1), -1)).sum()"),
    Row("labels beyond the classes",
        "labels = torch.where(rows, labels, -V - 1); "
        "-z.log_softmax(-1)[torch.arange(N), labels].mean()",
        RAISES, never=("exported", "made")),
    Row("float8 on the way", "F.cross_entropy(z.to(torch.float8_e5m2).float(), labels)",
        NOTHING, "float8", trained=()),
    # log priors in f32, and a constant before another: what is added is not rounded
    *(Row(f"added to logits that are cast up from {str(dtype)[6:]}",
          "p = 5 * bias.float() - 30; y = (z.float() + p + 100.3) - temperature.float() * p; "
          "F.cross_entropy(y * 0.7, labels, reduction='none')",
          dtype=dtype)
      for dtype in (BF16, F16)),
    # of any number of rows, hidden values and classes: one graph
    Row("nothing between", "F.cross_entropy(z, labels % z.shape[-1])", ways=SYMBOLS),
    Row("a turn between",
        "y = z[None].transpose(0, 1).reshape(-1, z.shape[-1]) + 1; "
        "F.cross_entropy(y, labels % y.shape[-1])",
        ways=SYMBOLS),
    Row("ones between",
        "y = (z + 1) * z.new_ones(()) / 3; F.cross_entropy(y, labels % y.shape[-1])", ways=SYMBOLS),
    Row("a slice between", "y = z[:, 1:]; F.cross_entropy(y, labels % y.shape[-1])", REGION, ways=SYMBOLS),
    Row("a view between", "y = z.view(z.shape); F.cross_entropy(y, labels % y.shape[-1])",
        ways=SYMBOLS),
    # which is read where the first of them stands
    Row("calls that share the number of classes",
        "log = z.log_softmax(1); loss = F.nll_loss(log, labels); "
        "given = torch.arange(weight.shape[0]).expand(log.shape) / 7 + loss.detach(); "
        "cross = (log.exp() * (log - given)).sum(-1); p = F.softmax(log, dim=1); "
        "entropy = -(p * p.log()).sum(1); "
        "(loss * torch.ones(())).sum() + cross.sin().sum() + entropy.square().sum()", REGION, ways=SYMBOLS),
    Row("a view to a whole size",
        "y = z.view(torch.Size((1,)) + labels.shape + (weight.shape[0],)); "
        "F.cross_entropy(y.view(-1, weight.shape[0]), labels)",
        ways=SYMBOLS),
    Row("a head of a stack, by a constant",
        "y = torch.stack([z, F.linear(x, second_weight)])[torch.tensor(1)]; "
        "F.cross_entropy(y, labels)",
        REGION),
    Row("a head of a stack, by a tensor",
        "y = torch.stack([z, F.linear(x, second_weight)])[rows[1].long()]; "
        "F.cross_entropy(y, labels)",
        NOTHING, "Data dependent"),
    Row("one head stacked twice", "F.cross_entropy(torch.stack([z, z])[1], labels)", NOTHING),
    # its gradient is zeros, as eager has it, and not None
    Row("a head of a stack that no loss reads",
        "F.cross_entropy(torch.stack([z, F.linear(x, second_weight)])[0], labels)", REGION),
    # of a function that writes to what it returns, under three names; traced, it is its operators
    Row("a linear that an autograd function writes to",
        "Twice.apply(x, weight.t()).square().mean()", REGION, ways=("aot_eager",),
        never=("exported", "made")),
), {
    BOTH: ("added to logits that are cast up from bfloat16", "added to logits that are cast up from float16",),
})
