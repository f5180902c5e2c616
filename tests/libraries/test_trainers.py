"""transformers.Trainer on a model that was compiled in place: eager's losses, metrics, checkpoints.

accelerate knows a fixed list of backends, so ``TrainingArguments(torch_compile_backend=...)`` does not
do; ``model.compile(backend="fusedce")`` before the Trainer does, and so does
``torch.compiler.set_stance(force_backend="fusedce")`` with ``torch_compile=True``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from benchmarks.trainers.hugging_face import ARGUMENTS
from tests.support import tiny

DTYPES = [torch.float32, torch.bfloat16]
STEPS, HALF, BATCH, ACCUMULATE = 20, 10, 4, 2


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    split = tiny.tokenizer()
    return [{"input_ids": split(text)["input_ids"]} for text in tiny.texts(count, seed)]


def accuracy(prediction) -> dict[str, float]:
    """Of the next token, from logits [N, S, V] or from their argmax [N, S]."""
    guesses = prediction.predictions
    if guesses.ndim == 3:
        guesses = guesses.argmax(-1)
    guesses, labels = guesses[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != -100].mean())}


class Recorder(Trainer):
    """Keeps what every micro-batch was divided by, and how its logits print after the backward."""

    items: list[int]
    logits: list[str]
    outputs: Any

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, self.outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (loss, self.outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        assert isinstance(num_items_in_batch, torch.Tensor)
        self.items.append(int(num_items_in_batch))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.logits.append(repr(self.outputs.logits))
        del self.outputs  # an optimizer step would compute logits that someone still holds
        return loss


def trainer(
    model, folder: Path, dtype: torch.dtype = torch.float32, kind: Any = Recorder, **arguments
) -> Recorder:
    made = kind(
        model,
        TrainingArguments(
            **ARGUMENTS
            | {
                "output_dir": str(folder),
                "bf16": dtype == torch.bfloat16,
                "max_steps": STEPS,
                "per_device_train_batch_size": BATCH,
                "per_device_eval_batch_size": BATCH,
                "gradient_accumulation_steps": ACCUMULATE,
                "learning_rate": 0.5,
                "save_strategy": "steps",
                "save_steps": HALF,
                **arguments,
            }
        ),
        # 77: the last batch of an epoch has one text
        train_dataset=rows(77, seed=1),
        eval_dataset=rows(11, seed=2),
        data_collator=DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False),
        compute_metrics=accuracy,
    )
    made.items, made.logits = [], []
    return made


def compiled(inner: str = "eager", **kwargs) -> LlamaForCausalLM:
    model = tiny.llama()
    model.compile(backend="fusedce", options={"fusedce.inner": inner}, **kwargs)
    return model


def logged(trainer: Trainer, what: str) -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if what in entry]


@dataclass
class Run:
    """What a run of ``STEPS`` steps left behind, and then its evaluation."""

    trainer: Recorder
    counted: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)
    prediction: Any = None
    metrics: dict[str, float] = field(default_factory=dict)


def run(model, folder: Path, dtype: torch.dtype) -> Run:
    torch._dynamo.reset()
    counters.clear()
    made = Run(trainer(model, folder, dtype))
    made.trainer.train()
    made.graphs["train"] = counters["stats"]["unique_graphs"]
    made.prediction = made.trainer.predict(rows(11, seed=2))
    made.trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    made.metrics = made.trainer.evaluate()
    made.graphs["all"] = counters["stats"]["unique_graphs"]
    made.counted = dict(counters["fusedce"])
    return made


@pytest.fixture(scope="module", params=DTYPES, ids=["f32", "bf16"])
def runs(request, tmp_path_factory) -> tuple[Run, Run, torch.dtype]:
    """The compiled model's run and eager's."""
    fused = run(compiled(), tmp_path_factory.mktemp("fused"), request.param)
    return fused, run(tiny.llama(), tmp_path_factory.mktemp("eager"), request.param), request.param


def test_losses_of_twenty_steps(runs):
    fused, eager, dtype = runs
    losses = logged(eager.trainer, "loss")
    assert len(losses) == STEPS
    tiny.assert_same_course(logged(fused.trainer, "loss"), losses, dtype)
    norms = [logged(r.trainer, "grad_norm") for r in (fused, eager)]
    assert norms[0] == pytest.approx(norms[1], rel=4 * tiny.RTOL[dtype])


def test_every_graph_of_training_was_fused_and_there_are_few(runs):
    """Twenty batches of many lengths and a short one: one static graph, then dynamic ones. An
    evaluation returns its logits, of which its loss is computed."""
    fused, eager, _ = runs
    assert fused.counted["matched"] == fused.graphs["train"]
    assert fused.counted["rejected"] == fused.graphs["all"] - fused.graphs["train"]
    assert fused.graphs["train"] <= 3
    assert fused.graphs["all"] <= 5
    assert eager.graphs["all"] == 0


def test_training_never_computes_the_logits_that_it_returns(runs):
    fused, _, _ = runs
    assert len(fused.trainer.logits) == STEPS * ACCUMULATE
    for text in fused.trainer.logits:
        assert "not computed" in text


def test_micro_batches_are_divided_by_the_items_of_the_whole_batch(runs):
    fused, eager, _ = runs
    items = fused.trainer.items
    assert items == eager.trainer.items
    assert len(items) == STEPS * ACCUMULATE
    assert items[0::2] == items[1::2]
    assert len(set(items)) > STEPS // 2  # they vary, so dividing by another number would show


def test_metrics_over_logits(runs):
    fused, eager, dtype = runs
    assert fused.prediction.predictions.shape == (11, 16, tiny.V)
    scale = np.abs(eager.prediction.predictions).max()
    difference = np.abs(fused.prediction.predictions - eager.prediction.predictions).max()
    assert difference <= 4 * tiny.RTOL[dtype] * scale
    assert eager.prediction.metrics["test_accuracy"] > 0.5
    ours, theirs = (r.prediction.metrics["test_loss"] for r in (fused, eager))
    assert ours == pytest.approx(theirs, rel=tiny.RTOL[dtype])
    ours, theirs = (r.prediction.metrics["test_accuracy"] for r in (fused, eager))
    assert ours == pytest.approx(theirs, rel=0, abs=tiny.TIES[dtype])


def test_logits_that_are_preprocessed_for_metrics(runs):
    fused, eager, dtype = runs
    assert fused.metrics["eval_accuracy"] == fused.prediction.metrics["test_accuracy"]
    ours = fused.metrics["eval_loss"]
    assert ours == pytest.approx(eager.metrics["eval_loss"], rel=tiny.RTOL[dtype])


def test_a_checkpoint_of_the_compiled_model_is_a_plain_one(runs):
    fused, eager, dtype = runs
    folder = Path(fused.trainer.args.output_dir) / f"checkpoint-{STEPS}"
    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    theirs = eager.trainer.model.state_dict()
    assert loaded.keys() == theirs.keys()
    for name, ours in fused.trainer.model.state_dict().items():
        assert torch.equal(loaded[name], ours)
        tolerance = 4 * tiny.RTOL[dtype]
        torch.testing.assert_close(ours, theirs[name], rtol=tolerance, atol=tolerance)


def test_resuming_goes_on_with_the_same_losses(runs):
    fused, _, dtype = runs
    folder = Path(fused.trainer.args.output_dir)
    again = trainer(compiled(dynamic=True), folder / "again", dtype)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
    assert counters["fusedce"]["matched"] == counters["stats"]["unique_graphs"] >= 1
    assert again.items == fused.trainer.items[HALF * ACCUMULATE :]
    before, after = (logged(t, "loss") for t in (fused.trainer, again))
    assert after == pytest.approx(before, rel=tiny.RTOL[dtype])


def smoothed(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    """A loss outside of the model, with the labels' smoothing."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=0.1)
    return total / num_items_in_batch


class OwnLoss(Trainer):
    """The compiled method calls the model, which is not compiled itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return smoothed(model(**inputs), labels, num_items_in_batch)


class GivenLoss(Trainer):
    """The loss is ``Trainer(compute_loss_func=...)``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, compute_loss_func=smoothed, **kwargs)


# torch's own, when Dynamo traces a cached function of transformers
@pytest.mark.filterwarnings("ignore:.*Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", [OwnLoss, GivenLoss])
def test_a_loss_outside_of_the_model(kind, dtype, tmp_path):
    inner = {"fusedce.inner": "eager"}
    method = torch.compile(kind.compute_loss, backend="fusedce", options=inner)
    losses = []
    for made in (type("Compiled", (kind,), {"compute_loss": method}), kind):
        torch._dynamo.reset()
        counters.clear()
        run = trainer(tiny.llama(), tmp_path, dtype, made)
        run.train()
        losses.append(logged(run, "loss"))
        if made is not kind:
            assert counters["fusedce"]["matched"] == counters["stats"]["unique_graphs"] >= 2
            assert counters["fusedce"]["rejected"] == 0
    tiny.assert_same_course(*losses, dtype)


def test_accelerate_refuses_the_name(tmp_path):
    """If this fails, ``torch_compile_backend="fusedce"`` works: say so in fxpass/TRAINERS.md, and
    delete the patch in contrib."""
    with pytest.raises(ValueError, match="'FUSEDCE' is not a valid DynamoBackend"):
        trainer(tiny.llama(), tmp_path, torch_compile=True, torch_compile_backend="fusedce")


@pytest.mark.parametrize("enabled", ["1", "0"])
def test_torch_compile_with_a_forced_backend(enabled, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDCE", enabled)
    monkeypatch.setenv("FUSEDCE_INNER", "aot_eager")
    losses = []
    for torch_compile in (True, False):
        arguments = {"torch_compile": torch_compile, "save_strategy": "no"}
        made = trainer(tiny.llama(), tmp_path, **arguments)
        with torch.compiler.set_stance(force_backend="fusedce"):
            made.train()
        losses.append(logged(made, "loss"))
    tiny.assert_same_course(*losses, torch.float32)
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 3
    assert counters["fusedce"]["matched"] == (graphs if enabled == "1" else 0)
    assert counters["fusedce"]["rejected"] == 0


@pytest.fixture
def _new_accelerator():
    """accelerate keeps the arguments of the first Accelerator of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_new_accelerator")
def test_an_accelerator_with_a_forced_backend(monkeypatch):
    monkeypatch.setenv("FUSEDCE_INNER", "aot_eager")
    model = Accelerator(cpu=True, dynamo_backend="inductor").prepare(tiny.llama())
    ids = torch.randint(tiny.V, (4, 16))
    with torch.compiler.set_stance(force_backend="fusedce"):
        loss = model(input_ids=ids, labels=ids).loss
    assert counters["fusedce"]["matched"] == counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(loss, tiny.llama()(input_ids=ids, labels=ids).loss)
