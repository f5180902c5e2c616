"""Logits that outlive the weights of FSDP2: values of the weights that the forward had, or an error
that says what to do. One model, whose logits are used early, late, or by one rank only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from tests.ranks.case import Case, Found, Rank, Values
from tests.ranks.networks import Network, batches
from tests.ranks.training import FREED, RATE, blocks_and_root, outputs, read
from tests.support.numerics import FLOOR, error

ADVICE = 'computed with the loss (FUSEDCE_LOGITS=keep, or options={"fusedce.logits": "keep"})'
CHANGED = "was changed in place (through .data) before they were used"


class Logits:
    """Each ``when_`` method runs a step, and returns by name what came of it: of values, how far
    they are off from those with the weights of that time; of an error, its text."""

    def __init__(self, here: Rank) -> None:
        self.rank = here.rank
        self.model: Any = Network().to(here.device)
        self.copy = Network().to(here.device)
        blocks_and_root(self.model, here.mesh(), MixedPrecisionPolicy())
        self.compiled = here.compile(self.model)
        options: dict[str, Any] = {"fusedce.inner": "aot_eager", "fusedce.logits": "keep"}
        self.kept = torch.compile(self.model, backend="fusedce", options=options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.ids = here.move(batches(range(here.rank, here.rank + 1)))[0]

    def right(self) -> Tensor:
        """The logits with the weights of now, by a model without FSDP."""
        whole = {name: p.full_tensor() for name, p in self.model.named_parameters()}
        self.copy.load_state_dict(whole)
        with torch.no_grad():
            return self.copy(self.ids, self.ids)[1]

    def forward(self, call: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, logits, and what the logits should be."""
        right = self.right()
        return *outputs((self.compiled if call is None else call)(self.ids, self.ids)), right

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def when_one_rank_reads(self) -> dict[str, Any]:
        """The others go on to the collectives of backward."""
        loss, logits, right = self.forward()
        found = off(logits, right) if self.rank == 0 else 0.0
        self.step(loss)
        return {"values": found}

    def when_after_backward(self) -> dict[str, Any]:
        loss, logits, _ = self.forward()
        loss.backward()
        return {"freed": off(logits, logits)}

    def when_after_the_next_forward(self) -> dict[str, Any]:
        """The weight is the same tensor again, of the same version; its values are new."""
        loss, logits, right = self.forward()
        weight = self.model.lm_head.weight
        version, values = weight._version, weight.detach().clone()
        self.step(loss)
        moved = error(self.right(), right)
        loss, *_ = self.forward()
        now = self.model.lm_head.weight
        found = off(logits, right)
        # else the weight tells by itself that it is another: nothing was tested
        assert now is weight
        assert now._version == version
        assert not torch.equal(now, values)
        self.step(loss)
        return {"changed": found, "moved": moved}

    def when_gathered_unchanged(self) -> dict[str, Any]:
        """As between the parts of an accumulated gradient: the weight is the right one again."""
        loss, logits, right = self.forward()
        loss.backward()
        self.optimizer.zero_grad()
        loss, *_ = self.forward()
        found = off(logits, right)
        self.step(loss)
        return {"values": found}

    def when_read_before(self) -> dict[str, Any]:
        """What was read stays; a row that was read stays, the other rows are not to be had."""
        loss, logits, right = self.forward()
        assert isinstance(read(logits), Tensor)
        self.step(loss)
        loss, rows, right_rows = self.forward()
        last = rows[:, -1]
        assert isinstance(read(last), Tensor)
        self.step(loss)
        row = off(last, right_rows[:, -1])
        return {"values": off(logits, right), "row": row, "freed": off(rows, right_rows)}

    def when_not_resharded(self) -> dict[str, Any]:
        """The weight stays after backward, and is cloned before the optimizer's step."""
        self.model.set_reshard_after_backward(False)
        loss, logits, right = self.forward()
        self.step(loss)
        self.model.set_reshard_after_backward(True)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {"values": off(logits, right), "moved": error(self.right(), right)}

    def when_kept(self) -> dict[str, Any]:
        loss, logits, right = self.forward(self.kept)
        self.step(loss)
        return {"values": off(logits, right)}


def off(logits: Tensor, right: Tensor) -> float | str:
    found = read(logits)
    return found if isinstance(found, str) else error(found, right)


WHEN = [name for name in vars(Logits) if name.startswith("when_")]


def step(here: Rank) -> Values:
    logits = Logits(here)
    here.facts |= {name: getattr(logits, name)() for name in WHEN}
    return {}


def check(case: Case, each: list[Found]) -> None:
    for rank in each:
        for when in WHEN:
            for what, found in rank.facts[when].items():
                if what in ("freed", "changed"):
                    assert isinstance(found, str), f"{when}: values that are off by {found}"
                    assert found.startswith("StaleLogitsError: "), when
                    assert {"freed": FREED, "changed": CHANGED}[what] in found, when
                    assert "FSDP" in found, when
                    assert found.endswith(ADVICE), when
                elif what == "moved":
                    assert found > 0.05, when
                else:
                    assert found < 4 * FLOOR[torch.float32], when


CASES = {"that outlive weights": Case(step=step, check=check)}
