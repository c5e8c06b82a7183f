"""The modes of `chatjobs run` and of Ray Data: what a row of a data set is asked for.

Imports nothing: every command reads it when it starts.
"""

from __future__ import annotations

SCORE_MODES = ("loglikelihood", "choice", "perplexity")  # the types of the items of scoring jobs
MODES = ("chat", "completion", *SCORE_MODES)
