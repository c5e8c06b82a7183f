"""The protocol of contestants that run as child processes: a JSON object a line on stdin, and a
reply for each on stdout. Imports the standard library only: each contestant has an environment of
its own.

    python -m bench.peers.NAME MODEL THREADS

{"prompts": [[token id, …], …], "tokens": n} asks for n greedy tokens after each prompt, as one
batch; the reply is {"seconds": s}. {"serve": [[[token id, …], n], …], "at_once": k} asks for n
greedy tokens after each prompt, of which k run at any time; the reply has the seconds from the
beginning at which each was submitted and each token came: {"submitted": […], "arrivals": [[…], …]}.
llama_cpp_peer answers two questions more. No answer ends before its n tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def run(start: Callable[[str, int], tuple[str, Mapping[str, Answer]]]) -> None:
    """Load the model and answer until stdin ends. `start` returns the engine's version, and an
    answer for each key by which questions are told apart."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # some engines print to stdout
    version, answers = start(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": True, "version": version}), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        (answer,) = [answers[key] for key in asked if key in answers]
        print(json.dumps(answer(asked)), file=replies, flush=True)
