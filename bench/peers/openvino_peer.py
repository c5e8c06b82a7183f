"""OpenVINO GenAI with continuous batching, as a child process that answers measurements on stdin.

    python openvino_peer.py FOLDER THREADS

The protocol is that of llama_cpp_peer.py. The KV cache and all scheduling stay at the library's
defaults, but for the number of tokens of one step, which lets a whole batch prefill at once.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 4


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_batched_tokens = 2048
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )
    print(json.dumps({"ready": True, "version": version("openvino-genai")}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = asked["tokens"], True, False
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in asked["prompts"]]
        start = time.perf_counter()
        results = pipeline.generate(prompts, [options] * len(prompts))
        seconds = time.perf_counter() - start
        if any(len(result.m_generation_ids[0]) != asked["tokens"] for result in results):
            raise SystemExit("OpenVINO generated another number of tokens than asked for")
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
