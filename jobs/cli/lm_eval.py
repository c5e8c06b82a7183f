"""`chatjobs lm-eval`: the command line of lm-evaluation-harness, with the model `chatjobs`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

from jobs.cli.failures import Unavailable
from jobs.cli.interrupts import interrupts_raise

MODEL = "chatjobs"
TARGET = "jobs.lm_eval.model:QueueLM"  # as the entry point in pyproject.toml


@click.command(
    "lm-eval",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-evaluation-harness over the queue.

    Hands all arguments to lm-eval's own command line, which has the model 'chatjobs' here:

    \b
      chatjobs lm-eval run --model chatjobs --model_args model=demo --tasks arc_easy

    The model's arguments are in docs/lm-eval.md; 'chatjobs lm-eval run --help' shows those of
    lm-eval. Needs the extra 'lm-eval'.
    """
    if find_spec("lm_eval") is None:
        raise Unavailable("this command needs lm_eval: pip install 'chatjobs[lm-eval]'")
    import lm_eval.models  # noqa: F401  (else the first registration hides the models it has)
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=TARGET)
    sys.argv = ["lm-eval", *arguments]
    with interrupts_raise():
        cli_evaluate()
