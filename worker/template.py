"""A checkpoint's own chat templates: found in its folder, rendered as transformers'
`apply_chat_template` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError

from jobs.types import JobError, invalid
from worker.loading.config import read_json
from worker.loading.tokenizer import CONFIG as TOKENIZER_CONFIG
from worker.loading.tokenizer import Tokenizer
from worker.sandbox import Endless, Refusal, Sandbox


class ChatTemplate:
    """The templates of one model. `source` is the default one's text."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self.source = sources["default"]
        self.hash = hashlib.sha256(json.dumps(sorted(sources.items())).encode()).hexdigest()[:32]
        self._sandbox = Sandbox()
        try:
            self._templates = {
                name: self._sandbox.from_string(text) for name, text in sources.items()
            }
        except Exception as error:  # untrusted code: Jinja's errors, and Python's own from compile
            raise JobError(
                "unsupported_model",
                f"the model's chat template is not valid Jinja ({type(error).__name__}: {error}): "
                "put a valid chat_template.jinja into its folder",
            ) from None

    @classmethod
    def read(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The templates of a model folder: chat_template.jinja counts before
        tokenizer_config.json, and that before chat_template.json; additional_chat_templates/ adds
        named ones. None if there is none."""
        sources: dict[str, str] = {}
        file, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
        if file.is_file():
            sources["default"] = _text(file)
        elif configured := tokenizer.config.get("chat_template"):
            sources.update(_named(configured, folder / TOKENIZER_CONFIG))
        elif legacy.is_file():
            sources.update(_named(read_json(legacy).get("chat_template"), legacy))
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = _text(path)
        if not sources:
            return None
        sources.setdefault("default", next(iter(sources.values())))
        return cls(sources, tokenizer.special_tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text that the model reads. Raises JobError: invalid_request where the template says
        no, unsupported_model where it is broken, leaves the sandbox or doesn't end."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        given = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._sandbox.write(self._templates[name], given)
        except Refusal as error:
            raise invalid(f"the model's chat template refuses: {error}", "messages") from None
        except SecurityError as error:
            raise JobError(
                "unsupported_model", f"the model's chat template leaves its sandbox: {error}"
            ) from None
        except Endless as error:
            raise JobError(
                "unsupported_model", f"the model's chat template doesn't seem to end: {error}"
            ) from None
        except (RecursionError, MemoryError):
            raise JobError(
                "unsupported_model", "the model's chat template recurses without end"
            ) from None
        except Exception as error:  # untrusted code can raise anything
            raise invalid(
                f"the model's chat template fails on these messages: {error}", "messages"
            ) from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise JobError(
            "unsupported_model", f"{path} can't be read ({error}): download the model again"
        ) from None


def _named(value: Any, where: Path) -> dict[str, str]:
    """A template, or a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = {}
    for entry in value if isinstance(value, list) else [None]:
        parts = entry if isinstance(entry, dict) else {}
        name, template = parts.get("name"), parts.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise JobError(
                "unsupported_model",
                f"{where}: chat_template must be a text or a list of {{name, template}}: put a "
                "valid chat_template.jinja beside it",
            )
        named[name] = template
    return named


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token that the template puts after an assistant's words, if any."""
    marker = "x7q"
    try:
        text = template.render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}],
            add_generation_prompt=False,
        )
    except JobError:
        return None
    _, _, after = text.rpartition(marker)
    ids = tokenizer.encode(after.lstrip())
    return ids[0] if ids and tokenizer.is_special(ids[0]) else None
