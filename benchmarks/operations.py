"""Single operations of `jetrl bench NAME`: one record per operation, and one function to run them.

The record is OPERATION of the module `benchmarks.NAME`; it yields rows for a shape of
`benchmarks.shapes` on a device. On a GPU the bits of the kernels are checked before the timing. On
a CPU the references run, to try an operation out with a small shape.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from benchmarks.harness import Row, command_typed, print_table, write_results
from benchmarks.shapes import SHAPES

from jetrl.errors import MismatchError, UserError
from jetrl.precision.backend import REFERENCE, Backend, backend_for


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def none_different(args: argparse.Namespace) -> int:
    """Return 0, for an operation without a comparison."""
    return 0


@dataclass(frozen=True)
class Operation:
    """A timed operation.

    Attributes:
        document: The help of its command.
        rows: Returns the rows of a shape, given the command's arguments.
        add_arguments: Adds arguments other than --shape, --device and --out.
        different: Counts elements in which GPU kernels differ from their references.
        show: Prints the rows.
        on_cpu: Whether all of its kernels have references.
    """

    document: str | None
    rows: Callable[[str, argparse.Namespace], Iterable[Row]]
    add_arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    different: Callable[[argparse.Namespace], int] = none_different
    show: Callable[[list[Row]], None] = print_table
    on_cpu: bool = True


def operation_named(name: str) -> Operation:
    """Return the record of an operation."""
    operation = importlib.import_module(f"benchmarks.{name}").OPERATION
    assert isinstance(operation, Operation)
    return operation


def bench(
    name: str, shapes: Sequence[str], backend: Backend, args: argparse.Namespace
) -> Iterator[Row]:
    """Yield the rows of an operation at each shape.

    Raises:
        MismatchError: A kernel of the backend has wrong bits.
    """
    operation = operation_named(name)
    torch.manual_seed(0)
    if backend is REFERENCE:
        if not operation.on_cpu:
            raise UserError(f"jetrl bench {name}: the reference has no such kernels")
    elif different := operation.different(args):
        raise MismatchError(f"jetrl bench {name}: {different} elements differ; nothing measured")
    for shape in shapes:
        yield from operation.rows(shape, args)


def main(name: str, argv: Sequence[str] | None = None, program: str = "") -> None:
    """Run `jetrl bench NAME`: print the rows as a table and write them as JSON, after each row."""
    program = program or f"jetrl bench {name}"
    operation = operation_named(name)
    parser = argparse.ArgumentParser(
        prog=program,
        description=operation.document,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape", action="append", choices=sorted(SHAPES), help="repeatable; default: qwen3-8b"
    )
    operation.add_arguments(parser)
    parser.add_argument("--device", default="cuda", help="cpu: to try it out")
    parser.add_argument("--out", default=f"build/bench/{name}.json", help="JSON file")
    args = parser.parse_args(argv)
    backend = backend_for(torch.device(args.device))
    rows: list[Row] = []
    for row in bench(name, args.shape or ["qwen3-8b"], backend, args):
        rows.append(row)
        write_results(args.out, name, command_typed(program, argv), rows)
    operation.show(rows)
