"""The command line: ``fxpass demo``, ``fxpass doctor``, ``fxpass explain``.

In: arguments. Out: text on standard output, errors on standard error, and an exit status that
``fxpass --help`` explains. A command imports torch and other large packages when it needs them.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import fxpass
from fxpass import messages

EXIT_CODES = """\
exit status: 0 no problem, 1 the command found a problem, 2 wrong usage"""

EXPLAIN = """\
Imports FILE, calls FUNCTION once and prints what fusedce does to it: the fused losses, the other
losses with the reason, and every inserted cast. FUNCTION may also be a module (torch.nn.Module).

If FUNCTION has required parameters, define FUNCTION_inputs() in the same file; it takes nothing
and returns a tuple of positional or a dict of keyword arguments:

    def loss(x, weight, target):
        return F.cross_entropy(F.linear(x, weight), target)

    def loss_inputs():
        return torch.randn(8, 16), torch.randn(100, 16), torch.zeros(8, dtype=torch.long)"""

DEMO = """\
Trains a small GPT with a vocabulary of 50,304 tokens on the sources of Python's standard library,
each provider in a separate process with the same seed and data, and compares speed, memory and loss
curves. The model does not import fxpass. Needs no network."""

DOCTOR = """\
Prints versions, devices, compilers, the current settings, and the implementation of the fused loss
for each device; then problems and their remedies."""


class UsageError(Exception):
    """The command cannot start; the message is one line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, by default that of the process, and returns the exit status."""
    try:
        try:
            options = _parser().parse_args(arguments)
            return options.command(options)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at the interpreter's end a closed pipe would show a traceback
    except UsageError as error:
        print(f"fxpass: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `fxpass doctor | head`
        nothing = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # the buffers are not empty
            os.dup2(nothing, descriptor)
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fxpass",
        description='What torch.compile(model, backend="fusedce") does on this machine.',
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"fxpass {fxpass.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, command: Callable[..., int], summary: str, description: str
    ) -> Callable[..., Any]:
        made = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(command=command)
        return made.add_argument

    demo = add("demo", _demo, "train a GPT with and without fusedce, compare", DEMO)
    demo("--device", help="cpu, cuda or cuda:INDEX (default: cuda if there is one)")
    demo(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of autocast (parameters are float32); float16 uses a GradScaler; 16 bits are very "
        "slow on a CPU without native support (default: float32; bfloat16 on a "
        "GPU with native support)",
    )
    every = ("eager", "inductor", "fusedce")
    text = "what to compare with eager: inductor, fusedce (default: both)"
    demo("--providers", nargs="+", choices=every, default=every, metavar="PROVIDER", help=text)
    for option, least, default, text in (
        ("--steps", 4, 10, "training steps; three are untimed (default: %(default)s)"),
        ("--batch", 1, None, "sequences per step (default: 8, on a GPU 16)"),
        ("--seq", 1, 256, "tokens per sequence (default: %(default)s)"),
        ("--layers", 1, 1, "blocks of the model (default: %(default)s)"),
        ("--heads", 1, 6, "attention heads, 32 wide each (default: %(default)s)"),
    ):
        demo(option, type=_at_least(least), default=default, metavar="N", help=text)
    add("doctor", _doctor, "check the machine and the settings", DOCTOR)
    explain = add("explain", _explain, "show what is fused in a function", EXPLAIN)
    explain("target", metavar="FILE:FUNCTION", help="for example train.py:loss")
    return parser


def _at_least(minimum: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(messages.WHOLE_NUMBER.format(text=text, least=minimum))
        return int(text)

    return whole_number


def _demo(options: argparse.Namespace) -> int:
    from fxpass.cli import demo

    _check_settings()
    sizes = {name: getattr(options, name) for name in ("batch", "heads", "layers", "seq")}
    try:
        job = demo.job_of(options.device, options.dtype, **sizes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return demo.compare_providers(job, options.steps, options.providers)


def _doctor(options: argparse.Namespace) -> int:
    from fxpass.cli import doctor

    return doctor.print_report()


def _explain(options: argparse.Namespace) -> int:
    _check_settings()
    path, colon, name = options.target.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise UsageError(messages.TARGET_FORM.format(target=options.target))
    try:
        module = _import_file(Path(path))
        function = getattr(module, name, None)
        if not callable(function):
            raise UsageError(messages.NO_FUNCTION.format(path=path, name=name))
        args, kwargs = _inputs(module, name, function)
        report = fxpass.explain(function, *args, **kwargs)
    except (UsageError, BrokenPipeError):
        raise
    except Exception as error:
        print(_traceback(error, Path(path)), file=sys.stderr)
        return 1
    print(report)
    return 0


def _traceback(error: Exception, path: Path) -> str:
    """The traceback of an error from the first frame of the user's file on, as text. The text of
    Dynamo's errors has the user's lines."""
    from torch._dynamo.exc import TorchDynamoException

    shown = traceback.TracebackException.from_exception(error, compact=True)
    frames = [] if isinstance(error, TorchDynamoException) else shown.stack
    own = [i for i, f in enumerate(frames) if Path(f.filename).resolve() == path.resolve()]
    shown.stack = traceback.StackSummary.from_list(frames[own[0] if own else len(frames) :])
    return "".join(shown.format()).rstrip()


def _check_settings() -> None:
    from fxpass.settings import Settings

    try:
        Settings.read()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(messages.NO_FILE.format(path=path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(messages.NO_PYTHON.format(path=path))
    module = importlib.util.module_from_spec(spec)
    # as for `python FILE`: the file can import its neighbours, and is imported under its name
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _inputs(
    module: ModuleType, name: str, function: Callable[..., Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Positional and keyword arguments for a call of ``function``."""
    make = getattr(module, f"{name}_inputs", None)
    if make is not None:
        inputs = make()
        if not isinstance(inputs, dict | tuple | list):
            kind = type(inputs).__name__
            raise UsageError(messages.INPUTS_TYPE.format(name=name, kind=kind))
        return ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    try:  # torch.nn.Module.__call__ accepts any arguments; forward has the real signature
        inspect.signature(getattr(function, "forward", function)).bind()
    except TypeError as error:
        raise UsageError(messages.INPUTS_MISSING.format(name=name, error=error)) from error
    return (), {}


if __name__ == "__main__":
    sys.exit(main())
