"""`jetrl serve` as typed: what it prints, how it stops, and what is missing."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from jetrl.cli.main import main


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_lets_answers_end_when_it_is_stopped(
    model_directory: Path, number: signal.Signals, code: int
) -> None:
    words = ["serve", "tiny", "--port", "0", "--max-batch-size", "2", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jetrl", *words],
        cwd=model_directory.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.match(r"tiny at (http://127\.0\.0\.1:\d+)/v1 \(int8 on cpu; 2 sequences", line)
    assert found, line + process.communicate()[1]
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{found[1]}/v1/completions", json=body, timeout=600) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(number)
        rest = [text for text in lines if text]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors.strip()) == (
        code,
        "terminated" if code == 143 else "interrupted",
    )


def test_what_it_refuses(
    model_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: object) -> str:
        assert main(["serve", str(model_directory), *map(str, words)]) == 2
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: Address already in use" in refused("--port", port)
    assert "choose another port" in refused("--port", 99999)
    assert "--max-queue must be at least 1" in refused("--max-queue", 0)
    assert "max_model_len 999: the model's context is 256" in refused(
        "--port", 0, "--max-model-len", 999
    )
    too_few = refused("--port", 0, "--num-pages", 2)
    assert "raise --num-pages to at least 4, or lower --max-model-len" in too_few
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "jetrl serve needs uvicorn: pip install 'jetrl[serve]'" in refused("--port", 0)
