"""Prove that a change left every bit as it was: run the same cases on two trees and compare.

    python tools/same_bits.py --base COMMIT                  every case, this tree against a commit
    python tools/same_bits.py --base COMMIT --case ppo       one case
    python tools/same_bits.py --base-tree DIR --device cuda  on a machine without git

The cases (same_bits_cases.py) are short runs of tiny models through the command line. Compared are
the metrics (but times, speeds and memory), the rollouts, the settings, the precision plan, the
tensors and states of the checkpoints, the exported models, and the output of commands that print
JSON. A tree's own names may change: only the command line, the recipes and the files are touched.

The new tree is copied first, so it may be edited meanwhile. The results of a commit are kept in
build/same-bits and used again (--cache, or the environment variable SAME_BITS_CACHE, names another
folder, which several worktrees may share).

Exit codes: 0 all the same, 1 a difference, 2 a case that could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import platform
import re
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from same_bits_cases import CASES, Case, Command

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("recipes", "examples")  # folders of the tree that a case's commands may name
COPIED = ("src", *LINKED)  # what a case needs of a tree
LIMIT_S = 900.0  # seconds that one command may take

# --- Comparing two folders of results ------------------------------------------------------------

NOT_COMPARED = (  # what holds times, process numbers or pictures of both
    *("log.txt", "attempts.jsonl", "status.json", "hang.txt", "report.html", "plots/*"),
    *(".lock", "*.lock", "checkpointed.txt", "*.pyc"),
)
MEASURED = re.compile(r"(timing|throughput|memory)/")  # metrics that depend on the machine
MEASURED_KEYS = {"metrics.jsonl": ("time",), "manifest.json": ("bytes", "sha256")}
FIRST = ("*metrics.jsonl", "*rollouts/*", "*checkpoints/*")  # where a difference begins


class Literal(str):
    """A number as it stands in a JSON file, so that no rounding hides a digit."""


@dataclass(frozen=True)
class Difference:
    """The first place where two files differ: the file, the place in it, and both values."""

    file: str
    place: str
    base: str
    new: str

    def __str__(self) -> str:
        where = f"{self.file}, {self.place}" if self.place else self.file
        return f"{where}: {self.base} -> {self.new}"


@dataclass
class Comparison:
    """The files, tensors and values that a comparison of two folders read, and their differences.

    Attributes:
        files: The number of files compared.
        tensors: The number of tensors compared, byte for byte.
        values: The number of values in JSON and TOML files compared.
        differences: The first difference of each file that differs, in the order of the run.
    """

    files: int = 0
    tensors: int = 0
    values: int = 0
    differences: list[Difference] = field(default_factory=list)


def compare_folders(base: Path, new: Path) -> Comparison:
    """Return what two folders of results have in common and where they differ."""
    comparison = Comparison()
    files = [set(compared_files(folder)) for folder in (base, new)]
    for name in sorted(files[0] | files[1], key=lambda name: (order_of(name), name)):
        if name not in files[0] or name not in files[1]:
            states = ["there" if name in found else "no such file" for found in files]
            comparison.differences.append(Difference(name, "", *states))
            continue
        comparison.files += 1
        first = next(compare_files(name, base / name, new / name, comparison), None)
        if first is not None:
            comparison.differences.append(first)
    return comparison


def compared_files(folder: Path) -> Iterator[str]:
    """Yield the relative names of the files of a folder that are compared."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        skipped = any(fnmatch.fnmatch(name, f"*/{p}") or name == p for p in NOT_COMPARED)
        if path.is_file() and not path.is_symlink() and not skipped:
            yield name


def order_of(name: str) -> int:
    """Return the place of a file in the order of a run: what is written first comes first."""
    return next((i for i, p in enumerate(FIRST) if fnmatch.fnmatch(name, p)), len(FIRST))


def compare_files(name: str, base: Path, new: Path, seen: Comparison) -> Iterator[Difference]:
    """Yield the differences between two files, and count in `seen` what was compared."""
    if name.endswith(".safetensors"):
        yield from compare_tensors(name, base, new, seen)
    elif name.endswith((".json", ".jsonl", ".toml")):
        try:
            contents = [dict(values_of(path)) for path in (base, new)]
        except (ValueError, UnicodeDecodeError) as error:
            yield Difference(name, "cannot be read", str(error), "")
            return
        seen.values += len(contents[0])
        yield from compare_mappings(name, *contents)
    elif base.read_bytes() != new.read_bytes():
        sizes = [f"{path.stat().st_size} bytes" for path in (base, new)]
        yield Difference(name, "other bytes", *sizes)


def compare_mappings(name: str, base: dict[str, str], new: dict[str, str]) -> Iterator[Difference]:
    """Yield where two mappings from a place in a file to a value differ."""
    for place in [*base, *(place for place in new if place not in base)]:
        values = [side.get(place, "absent") for side in (base, new)]
        if values[0] != values[1]:
            yield Difference(name, place, *map(shortened, values))


def shortened(value: str) -> str:
    """Return a value as one short line."""
    return value if len(value) <= 80 else f"{value[:77]}..."


def values_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield place and literal text of each compared value of a JSON, JSON lines or TOML file."""
    read = functools.partial(
        json.loads, parse_float=Literal, parse_int=Literal, parse_constant=Literal
    )
    ignored = MEASURED_KEYS.get(path.name, ())
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        yield from leaves(tomllib.loads(text), "", ignored)
    elif path.suffix == ".json":
        yield from leaves(read(text), "", ignored)
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            yield from leaves(read(line), f"line {number}", ignored)


def leaves(value: Any, place: str, ignored: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each value of nested dictionaries and lists.

    Values that depend on the machine are left out.
    """
    if isinstance(value, dict):
        if not value:
            yield place, "{}"
        for key, item in value.items():
            if key not in ignored and not MEASURED.match(key):
                yield from leaves(item, f"{place}, {key}" if place else key, ignored)
    elif isinstance(value, list):
        yield f"{place} (length)", str(len(value))
        for index, item in enumerate(value):
            yield from leaves(item, f"{place}[{index}]", ignored)
    else:
        yield place, str(value) if isinstance(value, Literal) else repr(value)


def compare_tensors(name: str, base: Path, new: Path, seen: Comparison) -> Iterator[Difference]:
    """Yield where the tensors of two safetensors files differ in name, type, shape or bytes."""
    sides = [read_tensors(path) for path in (base, new)]
    headers = [{key: header for key, (header, _) in side.items()} for side in sides]
    yield from compare_mappings(name, *headers)
    for key in (key for key in sides[0] if key in sides[1]):
        seen.tensors += 1
        (header, before), (_, after) = sides[0][key], sides[1][key]
        if before == after:
            continue
        dtype = header.split()[0]
        size = WIDTHS.get(dtype, 1)
        starts = range(0, min(len(before), len(after)), size)
        changed = [i for i in starts if before[i : i + size] != after[i : i + size]]
        first = changed[0]
        place = f"{key}, element {first // size} ({len(changed)} of {len(starts)} differ)"
        yield Difference(
            name, place, *(element(s[first : first + size], dtype) for s in (before, after))
        )


WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
FORMATS = {"F64": "<d", "I64": "<q", "F32": "<f", "I32": "<i", "F16": "<e", "I16": "<h"}


def element(data: bytes, dtype: str) -> str:
    """Return one element of a tensor as its value, where it has a plain one, and its bits."""
    bits = f"0x{int.from_bytes(data, 'little'):0{2 * len(data)}x}"
    if dtype == "BF16":
        data, dtype = b"\0\0" + data, "F32"
    return f"{struct.unpack(FORMATS[dtype], data)[0]!r} ({bits})" if dtype in FORMATS else bits


def read_tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return type and shape as text, and the bytes, of each tensor of a safetensors file by name.

    The file's metadata stands under `__metadata__`, without bytes.
    """
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for key, entry in sorted(json.loads(data[8 : 8 + length]).items()):
        if key == "__metadata__":
            tensors[key] = (json.dumps(entry, sort_keys=True), b"")
        else:
            start, end = entry["data_offsets"]
            header = f"{entry['dtype']} {entry['shape']}"
            tensors[key] = (header, data[8 + length + start : 8 + length + end])
    return tensors


# --- Running a case on a tree --------------------------------------------------------------------

PRELOADED = (  # imported once, before a process is forked for each command; nothing of jetrl
    *("torch", "torch._dynamo", "transformers", "tokenizers", "safetensors.torch", "numpy"),
    *("pydantic", "rich.live", "rich.table", "matplotlib.figure", "math_verify"),
)


class CannotRunError(Exception):
    """A case could not be run: a command failed, or did not do what the case is for."""


def preload() -> None:
    """Import what every command imports, so that a forked command starts at once."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_commands(
    tree: Path, folder: Path, commands: Iterable[Command], device: str, log: Path
) -> None:
    """Run commands one after the other in a folder, with the package of a tree.

    Args:
        tree: The tree, which holds src/, recipes/ and examples/.
        folder: The working folder; the commands' paths are relative to it.
        commands: The commands.
        device: The device, as in run.device.
        log: The file that gets what the commands print.

    Raises:
        CannotRunError: a command failed, took too long, or ended before it was to be killed.
    """
    links = [folder / name for name in LINKED if (tree / name).is_dir()]
    for link in links:
        link.symlink_to((tree / link.name).resolve())
    try:
        for command in commands:
            run_command(tree, folder, command, device, log)
    finally:
        for link in links:
            link.unlink()


def run_command(tree: Path, folder: Path, command: Command, device: str, log: Path) -> None:
    """Run one command in a fork of this process; see `run_commands`."""
    words = [device if word == "DEVICE" else word for word in command.words]
    if words[0] in ("train", "sft"):
        words.insert(2, f"run.device={device}")
    output = folder / command.output if command.output else log
    child = os.fork()
    if child == 0:
        become(tree, folder, words, output, log)
    deadline = time.monotonic() + LIMIT_S
    killed, ended, status = False, 0, 0
    while not ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        killed = bool(command.killed_at) and any(folder.glob(command.killed_at))
        if not ended and (killed or time.monotonic() > deadline):
            os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0)
        time.sleep(0.003)
    code = os.waitstatus_to_exitcode(status)
    if command.killed_at and code == -signal.SIGKILL and killed:
        return
    if code != 0 or command.killed_at:
        text = log.read_text(encoding="utf-8", errors="replace")
        raise CannotRunError(f"jetrl {' '.join(words)}: exit code {code}\n{text[-3000:].strip()}")


def become(tree: Path, folder: Path, words: list[str], output: Path, log: Path) -> None:
    """Turn this forked process into `python -m jetrl WORDS` with the package of a tree."""
    code: object = 99
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with open(log, "a", encoding="utf-8") as errors, open(output, "a", encoding="utf-8") as out:
            print(f"$ jetrl {' '.join(words)}", file=errors, flush=True)
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
        os.chdir(folder)
        source = str(tree.resolve() / "src")
        rest = [path for path in (os.environ.get("PYTHONPATH"),) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join([source, *rest])
        sys.path[:] = ["", source, *(p for p in sys.path if p != str(Path(__file__).parent))]
        found = importlib.util.find_spec("jetrl")
        if found is None or not str(found.origin).startswith(source):
            raise CannotRunError(f"jetrl of {source} is not what Python imports: {found}")
        sys.argv = ["jetrl", *words]
        runpy.run_module("jetrl", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if end.code is not None else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def check_measures(case: Case, folder: Path) -> None:
    """Check that a case exercised what it is for.

    Raises:
        CannotRunError: a metric that it names or a run's gradient norm was absent or always 0.
    """
    runs = {
        path.parent.name: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in sorted(folder.rglob("metrics.jsonl"))
    }
    lines = [line for run in runs.values() for line in run]
    hollow = [name for name in case.measures if not any(line.get(name) for line in lines)]
    for name, run in runs.items():
        gradients = [line["policy/grad_norm"] for line in run if "policy/grad_norm" in line]
        if gradients and not any(gradients):
            hollow.append(f"policy/grad_norm of the run {name}")
    if hollow:
        raise CannotRunError(f"the case is hollow: {', '.join(hollow)} absent or 0 in every line")


# --- BASE's results, kept between calls ----------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """The tree that another is compared with: a commit of a repository, or a folder.

    Attributes:
        name: The commit's hash, or the folder's path.
        tree: The folder with the sources of BASE; of a commit, `export` writes it.
        results: The folder that keeps the results, a folder a case.
        repository: The repository of the commit; None for a folder.
    """

    name: str
    tree: Path
    results: Path
    repository: Path | None = None

    def export(self) -> None:
        """Write the sources of the commit into `tree`; nothing is to be done for a folder."""
        if self.repository is None:
            return
        command = ["git", "-C", str(self.repository), "archive", self.name, *COPIED]
        archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            members.extractall(self.tree, filter="tar")


def fingerprint(case: Case, device: str) -> str:
    """Return what kept results depend on besides BASE: the case, the machine and its packages."""
    versions = {}
    for package in ("torch", "transformers", "numpy", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu = re.findall(r"model name\s*: (.*)", read_or_empty(Path("/proc/cpuinfo")))[:1]
    known = [repr(case), device, versions, cpu, platform.machine(), platform.python_version()]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def read_or_empty(path: Path) -> str:
    """Return the text of a file, or an empty text where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def kept_results(base: Base, case: Case, device: str) -> Path:
    """Return the folder that keeps BASE's results of a case; it exists once they are complete.

    A case that changes, or another machine, gets a folder of its own.
    """
    return base.results / f"{case.name}-{fingerprint(case, device)[:12]}"


def run_on_base(base: Base, case: Case, device: str) -> None:
    """Run a case on BASE and keep its results.

    `prepared` in their folder is what both trees start from, `done` what BASE made of it.
    """
    kept = kept_results(base, case, device)
    base.results.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{case.name}-", dir=base.results))
    try:
        done = making / "done"
        done.mkdir()
        for name, text in case.files.items():
            (done / name).parent.mkdir(parents=True, exist_ok=True)
            (done / name).write_text(text, encoding="utf-8")
        run_commands(base.tree, done, case.prepared_by, device, making / "prepared.txt")
        shutil.copytree(done, making / "prepared")
        run_commands(base.tree, done, case.commands, device, making / "done.txt")
        check_measures(case, done)
        if not kept.is_dir():
            making.rename(kept)
    except OSError:
        if not kept.is_dir():  # else another process has kept its own there meanwhile
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


# --- The command line ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The end of the comparison of one case.

    Attributes:
        case: The case's name.
        exit_code: 0 the same, 1 a difference, 2 it could not be run.
        text: The line of the table, and for a failure the end of the output.
    """

    case: str
    exit_code: int
    text: str


def run_case(case: Case, base: Base, tree: Path, device: str, scratch: Path) -> Outcome:
    """Run a case on the new tree, and on BASE if its results are not kept, and compare."""
    began = time.monotonic()
    kept = kept_results(base, case, device)
    was_kept = kept.is_dir()
    side = f"BASE {base.name[:12]}"
    try:
        if not was_kept:
            run_on_base(base, case, device)
        base_s = time.monotonic() - began
        side, began = "the new tree", time.monotonic()
        folder = scratch / case.name / "done"
        shutil.copytree(kept / "prepared", folder)
        run_commands(tree, folder, case.commands, device, scratch / case.name / "done.txt")
    except (CannotRunError, OSError, subprocess.CalledProcessError) as error:
        text = str(error).replace("\n", "\n    ")
        return Outcome(case.name, 2, f"FAILED     {case.name:20} on {side}: {text}")
    took = f"{time.monotonic() - began:.1f} s" + ("" if was_kept else f", BASE {base_s:.1f} s")
    result = compare_folders(kept / "done", folder)
    if result.differences:
        more = len(result.differences) - 1
        rest = f"; {more} more files differ" if more else ""
        return Outcome(case.name, 1, f"DIFFERENT  {case.name:20} {result.differences[0]}{rest}")
    counts = f"{result.files} files, {result.tensors} tensors, {result.values} values"
    return Outcome(case.name, 0, f"same       {case.name:20} {counts} ({took})")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--base", metavar="COMMIT", help="the commit to compare with")
    which.add_argument("--base-tree", type=Path, metavar="DIR", help="a folder with its sources")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the new tree (default: this one)")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this (repeatable)")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="run.device")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once (default: 1)")
    parser.add_argument("--keep", action="store_true", help="keep the new tree's results")
    default = os.environ.get("SAME_BITS_CACHE", str(ROOT / "build" / "same-bits"))
    parser.add_argument("--cache", type=Path, default=Path(default), help="results of commits")
    args = parser.parse_args(arguments)
    known = [case.name for case in CASES]
    if unknown := [name for name in args.case or [] if name not in known]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    if not args.list and args.base is None and args.base_tree is None:
        parser.error("name what to compare with: --base COMMIT or --base-tree DIR")
    return args


def open_base(args: argparse.Namespace, scratch: Path) -> Base:
    """Return BASE as the command line names it.

    Raises:
        SystemExit: there is no such commit.
    """
    if args.base_tree is not None:
        return Base(str(args.base_tree), args.base_tree.resolve(), scratch / "base-results")
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{args.base}^{{commit}}"]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode != 0:
        raise SystemExit(f"error: {ROOT} has no commit {args.base}")
    commit = found.stdout.strip()
    results = args.cache.resolve() / commit[:12] / args.device
    return Base(commit, scratch / "base-tree", results, repository=ROOT)


def copy_tree(tree: Path, copy: Path) -> None:
    """Copy what a case needs of a tree, which may be edited while the cases run."""
    for name in COPIED:
        if (tree / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(tree / name, copy / name, symlinks=True, ignore=ignored)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print a line for each, and return the exit code."""
    args = parse(arguments)
    cases = [case for case in CASES if args.case is None or case.name in args.case]
    if args.list:
        for case in cases:
            print(f"{case.name:20} {case.about}")
        return 0
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the scratch folder goes
    scratch = Path(tempfile.mkdtemp(prefix="same-bits-"))
    began = time.monotonic()
    worst = 0
    try:
        base, tree = open_base(args, scratch), scratch / "new-tree"
        copy_tree(args.tree, tree)
        if not all(kept_results(base, case, args.device).is_dir() for case in cases):
            base.export()
        preload()
        run = functools.partial(run_case, base=base, tree=tree, device=args.device, scratch=scratch)
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(args.jobs, mp_context=fork) as pool:
            for outcome in pool.map(run, cases):
                print(outcome.text, flush=True)
                worst = max(worst, outcome.exit_code)
    finally:
        if args.keep:
            print(f"results: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    words = ("every bit is the same", "there are differences", "not every case could be run")[worst]
    print(f"{words}: {len(cases)} cases in {time.monotonic() - began:.0f} s")
    return worst


if __name__ == "__main__":
    sys.exit(main())
