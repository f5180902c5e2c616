"""What torch is told before it compiles: log-once methods between the linear and the loss do not
break the graph, other calls still do; and the backend is found from any thread."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import logging
import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.config as config
import torch.nn.functional as F

from fxpass import backend
from fxpass.report import explain
from fxpass.rewrite.dynamo import trace_through_log_once

NAME = "ignore_logging_functions"
INPUTS = (torch.ones(4, 8), torch.ones(10, 8, requires_grad=True), torch.zeros(4).long())
log = logging.getLogger("a_library")

# Dynamo itself looks at the .grad of logits that enter a graph
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@functools.lru_cache(None)  # as libraries write it
def say_once(self, *args):
    self.warning(*args)


def say(self, *args):
    self.warning(*args)


@pytest.fixture(autouse=True)
def _hung_on_the_logger(monkeypatch):
    """Two methods on every logger and nothing known to Dynamo; as it was afterwards."""
    monkeypatch.setattr(logging.Logger, "say_once", say_once, raising=False)
    monkeypatch.setattr(logging.Logger, "say", say, raising=False)
    with config.patch({NAME: set()}):
        yield
    say_once.cache_clear()


def cached(x, w, target):
    logits = F.linear(x, w)
    log.say_once("only once")
    return F.cross_entropy(logits, target)


def ordinary(x, w, target):
    logits = F.linear(x, w)
    log.warning("every time")
    return F.cross_entropy(logits, target)


def test_a_cached_method_is_stepped_over():
    trace_through_log_once()
    assert say_once in getattr(config, NAME)
    report = explain(cached, *INPUTS)
    assert (report.graphs, len(report.matches)) == (1, 1)


def test_a_method_of_a_library_that_is_imported_later(monkeypatch):
    trace_through_log_once()

    @functools.lru_cache(maxsize=4)
    def say_later(self, *args):
        self.warning(*args)

    monkeypatch.setattr(logging.Logger, "say_later", say_later, raising=False)

    def program(x, w, target):
        logits = F.linear(x, w)
        log.say_later("later")
        return F.cross_entropy(logits, target)

    report = explain(program, *INPUTS)
    assert (report.graphs, len(report.matches)) == (1, 1)


@NON_LEAF
def test_without_it_the_graph_breaks():
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(cached, backend=backend)(*INPUTS)
    assert len(graphs) == 2


@NON_LEAF
def test_ordinary_logging_still_breaks_the_graph(caplog):
    report = explain(ordinary, *INPUTS)
    assert (report.graphs, len(report.matches), len(report.rejections)) == (2, 0, 1)
    assert "graph break" in report.rejections[0].reason
    assert [record.getMessage() for record in caplog.records].count("every time") == 1


def test_only_cached_methods_are_added():
    trace_through_log_once()
    added = getattr(config, NAME)
    assert say_once in added
    ordinary_methods = {say, logging.Logger.warning, logging.Logger.info, logging.Logger.error}
    assert not added & ordinary_methods


def test_it_adds_to_what_the_user_chose_and_may_be_called_twice():
    setattr(config, NAME, {logging.Logger.debug})
    trace_through_log_once()
    once = set(getattr(config, NAME))
    trace_through_log_once()
    assert getattr(config, NAME) == once
    assert {logging.Logger.debug, say_once} <= once


def test_torch_can_log_its_settings():
    """torch 2.11 logs an error with a traceback for each graph where it cannot."""
    config_of = torch._dynamo.utils._get_dynamo_config_for_logging
    setattr(config, NAME, {logging.Logger.debug, logging.Logger.info})
    trace_through_log_once()
    assert json.loads(config_of())
    assert copy.deepcopy(getattr(config, NAME)) >= {"Logger.debug", "Logger.info", "say_once"}
    assert {logging.Logger.debug, say_once} <= getattr(config, NAME)


def test_the_backend_calls_it_before_it_is_first_used(monkeypatch):
    importlib.reload(backend)
    assert say_once in getattr(config, NAME)
    setattr(config, NAME, set())
    monkeypatch.setenv("FUSEDCE", "0")
    importlib.reload(backend)
    assert getattr(config, NAME) == set()


# ---------------------------------------------------------------- found from any thread

# Eight threads look the backend up, as often as asked, each time as if for the first time.
LOOKED_UP = """
import sys, threading, time, torch
from importlib.abc import MetaPathFinder
from torch._dynamo.backends import registry

class Slow(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("fxpass"):
            time.sleep(float(sys.argv[2]))

def look_up():
    start.wait()
    try:
        found.append(torch.compile(lambda x: x, backend="fusedce"))
    except BaseException as error:
        raised.append(error)

sys.meta_path.insert(0, Slow())
sys.setswitchinterval(1e-5)
entry_point = registry._BACKENDS.get("fusedce")
if sys.argv[3] == "discovered":
    torch._dynamo.list_backends()
    entry_point = registry._BACKENDS["fusedce"]
found, raised, start = [], [], threading.Barrier(8)
for _ in range(int(sys.argv[1])):
    for name in [name for name in sys.modules if name.startswith("fxpass")]:
        del sys.modules[name]
    registry._COMPILER_FNS = {k: v for k, v in registry._COMPILER_FNS.items() if k != "fusedce"}
    if entry_point:
        registry._BACKENDS["fusedce"] = entry_point
    threads = [threading.Thread(target=look_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert not raised, (len(raised), raised[0])
assert "fusedce" in torch._dynamo.list_backends()
assert type(registry._COMPILER_FNS) is dict
assert "fusedce" in registry._COMPILER_FNS
assert not {"fxpass.rewrite.transform", "fxpass.op.rows", "fxpass.rewrite.inner"} & set(sys.modules)
print(len(found))
"""


@pytest.mark.full  # a compile cache of its own
@pytest.mark.parametrize(
    ("times", "seconds", "torch_has", "enabled"),
    [(200, 0.0, "discovered", "1"), (5, 0.05, "discovered", "0"), (1, 0.05, "nothing", "1")],
)
def test_several_threads_look_it_up_at_once(times, seconds, torch_has, enabled):
    code = [sys.executable, "-c", LOOKED_UP, str(times), str(seconds), torch_has]
    environ = {**os.environ, "FUSEDCE": enabled}
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run(code, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 8 * times
