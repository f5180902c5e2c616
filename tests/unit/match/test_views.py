"""Movements of rows: replayed on the hidden states where they are that, and declined otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.support.programs import B, D, S, V, check, head_of, inputs, last, reason_of

EAGER = {"fusedce.inner": "eager"}
ROWS = torch.tensor([3, 0, 5])
CLASSES = torch.tensor([7, 2, 9, 0])

# logits [B, S, V] and labels [B, S] -> what the loss is given
ACCEPTED = {
    "transpose": lambda z, t: (z.transpose(1, 2), t),
    "torch.transpose": lambda z, t: (torch.transpose(z, -1, 1), t),
    "swapaxes": lambda z, t: (z.swapaxes(1, 2), t),
    "mT": lambda z, t: (z.mT, t),
    "mT, as Dynamo of torch 2.14 writes it": lambda z, t: (torch.ops.aten.mT(z), t),
    "mH": lambda z, t: (z.mH, t),
    "mH, as Dynamo of torch 2.14 writes it": lambda z, t: (torch.ops.aten.mH(z), t),
    "H": lambda z, t: (z[0].H.H, t[0]),
    "permute": lambda z, t: (z.permute(0, 2, 1), t),
    "permute, another order": lambda z, t: (z.permute((1, 2, 0)), t.T),
    "movedim": lambda z, t: (z.movedim(-1, 1), t),
    "movedim, several": lambda z, t: (
        z.movedim((0, 1), (1, 0)).reshape(-1, V), t.T.reshape(-1)),
    "a dimension of one flattened with the classes": lambda z, t: (
        z.unsqueeze(2).flatten(2).transpose(1, 2), t),
    "there and back": lambda z, t: (last(z.transpose(0, 1).contiguous()), t.T.reshape(-1)),
    "t of t": lambda z, t: (last(z).t().t(), t.view(-1)),
    "unsqueeze": lambda z, t: (last(z).unsqueeze(-1), t.view(-1, 1)),
    "squeeze": lambda z, t: (last(z.unsqueeze(1)).unsqueeze(2).squeeze(2), t.view(-1)),
    "new dimension by index": lambda z, t: (last(z[:, None]), t.view(-1)),
    "unflatten": lambda z, t: (last(last(z).unflatten(0, (S, B))), t.view(-1)),
    "view behind the classes": lambda z, t: (z.transpose(1, 2).reshape(B, V, S), t),
    "clone": lambda z, t: (last(z.clone()), t.view(-1)),
    "select": lambda z, t: (z.select(1, 2), t[:, 2]),
    "number by index": lambda z, t: (z[:, -1], t[:, -1]),
    "narrow": lambda z, t: (last(z.narrow(1, 1, 2).contiguous()), t[:, 1:3].reshape(-1)),
    "slice of rows": lambda z, t: (z[:, 1:3].reshape(-1, V), t[:, 1:3].reshape(-1)),
    "every other row": lambda z, t: (last(z)[::2], t.view(-1)[::2]),
    "index_select": lambda z, t: (last(z).index_select(0, ROWS), t.view(-1)[ROWS]),
    "rows by a tensor": lambda z, t: (last(z)[ROWS], t.view(-1)[ROWS]),
    "rows by a tensor, batch first": lambda z, t: (
        z[:, ROWS % S].transpose(1, 2), t[:, ROWS % S]),
    "rows by two tensors": lambda z, t: (z[ROWS % B, ROWS % S], t[ROWS % B, ROWS % S]),
    "one row": lambda z, t: (z[0, 0], t[0, 0]),
    "a slice of the classes": lambda z, t: (last(z[..., :7]), t.view(-1) % 7),
    "a slice of the classes, then rows": lambda z, t: (z[:, 1:, 2:9].flatten(0, 1), t[:, 1:].flatten() % 7),
    "classes by a tensor": lambda z, t: (last(z)[:, CLASSES], t.view(-1) % 4),
    "a class twice": lambda z, t: (last(z)[:, CLASSES % 3], t.view(-1) % 4),
    "classes by index_select": lambda z, t: (last(z).index_select(1, CLASSES), t.view(-1) % 4),
    "classes by narrow": lambda z, t: (last(z).narrow(1, 2, 5), t.view(-1) % 5),
    "classes by narrow, then rows": lambda z, t: (z.narrow(-1, 2, 5)[:, 1:].flatten(0, 1), t[:, 1:].flatten() % 5),
    "classes by a tensor, then rows": lambda z, t: (z[..., CLASSES][:, 1:].flatten(0, 1), t[:, 1:].flatten() % 4),
    "every other class": lambda z, t: (last(z[..., ::2]), t.view(-1) % 5),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    def program(x, weight, labels):
        logits, target = ACCEPTED[case](F.linear(x, weight).tanh() * 3, labels)
        return F.cross_entropy(logits, target)

    x, weight, labels = inputs()
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


@pytest.mark.parametrize("case", ["transpose", "select", "rows by a tensor", "one row"])
def test_one_loss_per_row_keeps_its_shape(case):
    def program(x, weight, labels):
        logits, target = ACCEPTED[case](F.linear(x, weight), labels)
        loss = F.cross_entropy(logits, target, reduction="none")
        assert loss.shape == target.shape
        return (loss * torch.arange(loss.numel()).view(loss.shape)).sum()

    x, weight, labels = inputs()
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


def test_a_slice_of_the_classes_with_a_bias():
    def program(x, weight, bias, labels):
        return F.cross_entropy(last(F.linear(x, weight, bias)[..., 1:8]), labels.view(-1) % 7)

    x, weight, labels = inputs()
    bias = torch.randn(V, requires_grad=True)
    check(program, labels, x, weight, bias)


def rejected(logits_of, target_of=lambda t: t.view(-1)):
    return lambda x, w, t: F.cross_entropy(logits_of(F.linear(x, w)), target_of(t))


REJECTED = {
    "classes joined with rows": (
        rejected(lambda z: z.reshape(-1, V * 2), lambda t: t.view(-1)[::2]), "changes the class dimension"),
    "classes flattened": (rejected(lambda z: z.flatten(1), lambda t: t[:, 0]), "changes the class dimension"),
    "classes split": (
        rejected(lambda z: last(z).unflatten(1, (V, 1)), lambda t: t.view(-1, 1)), "class dim"),
    "classes in reverse": (rejected(lambda z: z.flip(-1).view(-1, V)), "is not known"),
    "classes scrambled": (
        rejected(lambda z: z.transpose(1, 2).reshape(B * S, V)), "changes the class dimension"),
    "rows as classes": (
        rejected(lambda z: z[0].t(), lambda t: t.new_zeros(V)), "is not over the classes"),
    "one class": (
        rejected(lambda z: z[..., 0], lambda t: t[:, 0] % S), "selects one class, or"),
    "all dimensions of one": (rejected(lambda z: last(z).squeeze()), "name the one dimension"),
    "index tensors that are not adjacent": (
        rejected(lambda z: z[None][torch.zeros(8, dtype=torch.long), :, ROWS[:1]][:, 0]),
        "tensors that are not adjacent"),
    "numbers and tensors": (
        rejected(lambda z: z[0, ROWS % S], lambda t: t[0, ROWS % S]), "with tensors and with"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case):
    program, reason = REJECTED[case]
    assert reason in reason_of(program, *inputs())


OF_EQUAL_SIZES = {
    "classes flattened with rows": lambda z, t: F.cross_entropy(z.mT.flatten(0, 1), t),
    "as many rows as classes": lambda z, t: z.permute(2, 1, 0).flatten(1, 2).logsumexp(-1).mean(),
    "a new dimension by True": lambda z, t: z[True].logsumexp(1).square().mean(),
    "a new dimension by True, behind": lambda z, t: z[:, True].logsumexp(2).square().mean(),
}


@pytest.mark.parametrize("case", OF_EQUAL_SIZES)
def test_the_class_dimension_is_not_told_by_its_size(case):
    rows = (4, 2) if "True" in case else (2, 4)
    x, weight, labels = torch.randn(*rows, 4), torch.randn(4, 4), torch.randint(2, (8,))
    answers = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="fusedce", options=EAGER)):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = wrap(lambda x, w, t: OF_EQUAL_SIZES[case](F.linear(x, w), t))(*leaves, labels)
        out.backward()
        answers.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*answers)


BY_A_MASK = {
    "rows": lambda z, t, m: F.cross_entropy(z[m], t[m]),
    "of a sum": lambda z, t, m: F.cross_entropy(z[m], t[m], reduction="sum") / m.sum().clamp(min=1),
    "rows and classes": lambda z, t, m: F.cross_entropy(z[m, 2:], t[m].clamp(min=2) - 2),
    "log-probabilities": lambda z, t, m: -z[m].log_softmax(-1).gather(1, t[m][:, None]).mean(),
    "positions": lambda z, t, m: (
        lambda some: F.cross_entropy(z[:, some].flatten(0, 1), t[:, some].flatten()))(m[0]),
    "flat": lambda z, t, m: (
        lambda some: F.cross_entropy(z.flatten(0, 1)[some], t.flatten()[some]))(m.flatten()),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_A_MASK)
def test_rows_by_a_mask(case):
    """Dynamo breaks the graph there, unless it is told to capture dynamic shapes."""

    def program(x, weight, labels):
        mask = labels > 2  # one mask: of two, torch 2.11 does not know that they count the same
        return BY_A_MASK[case](F.linear(x, weight), labels, mask)

    x, weight, labels = inputs()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        head_of(program, x, weight, labels)
        for some in (labels, labels * 0):  # no row
            check(program, some, x, weight)


def test_logits_of_a_size_that_depends_on_data_are_not_deferred():
    """A deferred tensor has a shape before its values are known."""

    def program(x, weight, labels):
        rows, mask = F.linear(x, weight), labels > 2
        return F.cross_entropy(rows[mask], labels[mask]), rows[mask]

    x, weight, labels = inputs()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        loss, rows = fused(x, weight, labels)
    assert type(rows) is torch.Tensor
    torch.testing.assert_close((loss, rows), program(x, weight, labels))


def test_classes_by_a_mask():
    def program(x, weight, labels):
        some = torch.arange(len(weight)) % 2 == 0
        return F.cross_entropy(F.linear(x, weight)[..., some].flatten(0, 1), labels.flatten() // 3)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert "selects classes by a mask" in reason_of(program, *inputs())


def test_shapes_that_are_not_numbers():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        return F.cross_entropy(z.view(z.size(0) * z.size(1), z.size(2)), labels.view(-1))

    x, weight, labels = inputs()
    for tensor in (x, labels):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


def test_sizes_differ():
    """D is no size that a test could mistake for V."""
    assert len({B, S, D, V}) == 4


@pytest.mark.parametrize(
    "view",
    [
        lambda z: z.unsqueeze(0).flatten(0, 1),
        lambda z: z.view(1, V, V)[0],
        lambda z: z.unflatten(0, (1, V)).squeeze(0),
    ],
)
def test_as_many_rows_as_classes(view):
    """The sizes do not say which dimension is that of the classes."""
    x, weight, _ = inputs()
    x = torch.randn(V, x.shape[-1], requires_grad=True)
    labels = (torch.arange(V) * 2 + 1) % V
    before = counters["fusedce"]["matched"]
    check(lambda x, w, t: F.cross_entropy(view(F.linear(x, w)), t), labels, x, weight)
    assert counters["fusedce"]["matched"] > before
