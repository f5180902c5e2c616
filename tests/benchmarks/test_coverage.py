"""The coverage table on a few classes that differ: made tiny, traced, fused, compared, written."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.compiled import Records
from benchmarks.coverage import __main__ as coverage
from benchmarks.coverage import worker as coverage_worker
from benchmarks.coverage.chain import chains
from benchmarks.coverage.models import V, batches, build, classes
from benchmarks.coverage.table import kind, outcome, spelled, table

SOFT_CAP = "truediv(_, 30.0) → tanh(_) → mul(_, 30.0)"
CHAINS = {
    "LlamaForCausalLM": "linear → .float() → .view(-1, V) → cross_entropy",
    "Gemma2ForCausalLM": f"linear → {SOFT_CAP} → .float() → .view(-1, V) → cross_entropy",
    "GPT2LMHeadModel": "linear → .float() → .view(-1, V) → cross_entropy",
    "GitForCausalLM": (
        "linear → getitem(_, (:, 17:-1, :)) → .contiguous() → .float() → .view(-1, V) "
        "→ cross_entropy"
    ),
    "BertForMaskedLM": "linear → .view(-1, V) → cross_entropy",
    "BartForConditionalGeneration": "linear → add(_, to) → .view(-1, V) → cross_entropy",
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_class_fuses_in_both_forms(name):
    row = coverage_worker.examine(name)
    assert [outcome(row, form) for form in ("loss", "model")] == ["fused", "fused"]
    assert [spelled(chain) for chain in row["chains"]] == [CHAINS[name]]


def test_the_form_of_the_loss_is_what_a_step_gives():
    model = build("LlamaForCausalLM")
    batch = next(batches(model))
    [in_row] = coverage_worker.examine("LlamaForCausalLM")["forms"]["loss"]["matched"]
    counters.clear()
    found = []
    with Records(found):
        torch.compile(
            lambda **kwargs: model(**kwargs).loss,
            backend="fusedce",
            options={"fusedce.inner": "eager"},
        )(**batch)
    assert [str(match) for match in found] == [in_row]
    assert counters["fusedce"]["matched"] == 1


def test_a_class_without_a_loss_says_so():
    row = coverage_worker.examine("PI0ForConditionalGeneration")
    assert outcome(row, "loss").startswith("not run (build): ValueError: it takes no labels")


def off(out, factor):
    out["loss"] = out["loss"] * factor
    return out


@pytest.mark.parametrize("form", ["loss", "model"])
@pytest.mark.parametrize("factor", [1.0, 1.001, float("nan")])
def test_wrong_numbers_are_found(form, factor):
    subject = coverage_worker.subject_of(build("LlamaForCausalLM"))
    wrong = coverage_worker.compare(subject, form, lambda **k: off(subject.model(**k), factor))
    assert bool(wrong) == (factor != 1.0)


def test_without_its_other_outputs_a_graph_keeps_what_writes():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    kept = graph.call_function(torch.sum, (x,))
    graph.call_method("add_", (x, 1))
    read = graph.call_function(torch.exp, (graph.call_function(torch.sin, (x,)),))
    graph.output((kept,))
    coverage_worker.erase_unused(graph, [kept, read, None])
    assert [node.name for node in graph.nodes] == ["x", "sum_1", "add_", "output"]


def test_a_linear_in_another_graph_is_a_graph_break():
    found = []

    def backend(gm, inputs):
        found.extend(chains([gm], 5))
        return gm.forward

    def program(x, w, y):
        logits = torch.nn.functional.linear(x, w)
        torch._dynamo.graph_break()
        return torch.nn.functional.cross_entropy(logits, y)

    torch.compile(program, backend=backend)(
        torch.ones(2, 3), torch.ones(5, 3), torch.ones(2).long()
    )
    assert [chain.end for chain in found] == ["graph break"]


def test_all_classes_are_distinct_and_from_the_four_mappings():
    found = classes()
    assert len(found) > 100
    assert found["T5ForConditionalGeneration"] == "SEQ_TO_SEQ_CAUSAL_LM"
    assert set(found.values()) == {
        "CAUSAL_LM",
        "MASKED_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
    }


def test_the_logits_have_the_classes_that_chains_call_v():
    model = build("LlamaForCausalLM")
    assert model(**next(batches(model))).logits.shape[-1] == V


# ---------------------------------------------------------------- rows and table


def row(name, **form):
    result = {"matched": ["fused"], "rejected": [], "wrong": "", "apart": "", "errors": [], **form}
    chain = {
        "steps": ["linear(mul:f32[2, 4], param:f32[8, 4], None):f32[2, 8]", ".float(_):f32[2, 8]"],
        "loss": "cross_entropy(_, input:i64[2]):f32[]",
        "end": "linear",
    }
    forms = {"loss": result, "model": result}
    return {"name": name, "stage": "done", "chains": [chain], "breaks": [""], "forms": forms}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({}, "fused"),
        ({"matched": []}, "not fused: 0 of 1 losses"),
        ({"matched": [], "rejected": ["why", "why"]}, "not fused: why"),
        ({"wrong": "loss is off"}, "wrong: loss is off"),
        ({"errors": ["ValueError"]}, "error: ValueError"),
        (
            {"matched": ["fused: a.py:1 (logits kept: why)"]},
            "fused, with logits kept: something else in the graph reads them",
        ),
    ],
)
def test_outcomes(form, text):
    assert outcome(row("A", **form), "model") == text
    assert text.startswith(kind(text))


def test_the_table_counts_and_lists():
    crash = {"name": "B", "stage": "crash", "error": "took too long"}
    text = table({"B": crash, "A": row("A")}, "eager")
    assert "| all classes | 2 | 2 |" in text
    assert "| `linear → .float() → cross_entropy` | 1 |" in text
    assert "| A | `linear → .float() → cross_entropy` | fused | fused |" in text
    assert "- B: took too long" in text


def test_the_table_says_when_its_rows_are_not_of_one_source():
    one, other = {**row("A"), "fxpass": "aa"}, {**row("B"), "fxpass": "bb"}
    assert "several states" not in table({"A": one}, "eager")
    assert "several states" in table({"A": one, "B": other}, "eager")
    assert "several states" in table({"A": row("A")}, "eager")


def test_rows_are_kept_and_run_again_on_demand(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert coverage.read(file) == {}
    file.write_text('{"name": "LlamaForCausalLM", "stage": "crash", "error": "x"}\n')
    rows = coverage.read(file)
    assert "LlamaForCausalLM" not in coverage.wanted(rows, "", failed=False)
    assert "LlamaForCausalLM" in coverage.wanted(rows, "", failed=True)
    assert coverage.wanted(rows, "^Llama", failed=False)[0] == "LlamaForCausalLM"
    rows = {"LlamaForCausalLM": row("LlamaForCausalLM")}
    assert "LlamaForCausalLM" not in coverage.wanted(rows, "", failed=True)
