"""Clients of `jetrl bench serve`, as threads of a process that imports no torch and starts at once.

Standard input has a line of JSON, then one to begin; standard output a line `ready`, then answers:

    {"port": 8000, "clients": 64, "stream": false, "bodies": [[0, "{...}"], ...]}
    {"began": 3.1, "ended": 9.2, "answers": [[0, [5, 7], [-0.1, -2.3], 0.8], ...]}

An answer has its number, token ids, log-probs and seconds. Times are of the clock of all processes.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any


def read_answer(reply: http.client.HTTPResponse, stream: bool) -> tuple[list[int], list[float]]:
    """Return the token ids and log-probs of an answer."""
    if reply.status != 200:
        raise RuntimeError(reply.read())
    ids: list[int] = []
    logprobs: list[float] = []
    lines: Iterable[bytes] = reply if stream else [b"data: " + reply.read()]
    for line in lines:
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            ids += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
    return ids, logprobs


def run_client(
    port: int, left: Iterator[tuple[int, str]], stream: bool, answers: list[Any]
) -> None:
    """Ask one request after the other over a connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    for number, body in left:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        ids, logprobs = read_answer(connection.getresponse(), stream)
        answers.append((number, ids, logprobs, time.perf_counter() - began))
    connection.close()


def main() -> None:
    given = json.loads(sys.stdin.readline())
    left, answers = iter(given["bodies"]), list[Any]()  # threads may share both
    arguments = (given["port"], left, given["stream"], answers)
    threads = [threading.Thread(target=run_client, args=arguments) for _ in range(given["clients"])]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"began": began, "ended": time.perf_counter(), "answers": answers}))


if __name__ == "__main__":
    main()
