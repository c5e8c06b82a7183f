"""Settings of the process that generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.checkpoints import make_checkpoint

FAULTS = """
import resource, sys
from jobs.api.sampling import Sampling
from worker import Engine

engine = Engine.load(sys.argv[1], device="cpu", max_batch=16, prefix_cache=False)
prompts = [[number + 3] * 32 for number in range(16)]
found = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    engine.generate(prompts, Sampling(temperature=0, max_tokens=1))
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_prefill_does_not_request_its_memory_from_the_system_again(tmp_path: Path) -> None:
    """Activations of a layer are 512 rows of up to 62.5 KiB: 8,000 pages."""
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    model = make_checkpoint(tmp_path, intermediate_size=8000, num_hidden_layers=4, **heads)
    run = subprocess.run(
        [sys.executable, "-c", FAULTS, str(model)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 2000
