"""A checkpoint's own chat templates: found in its folder, rendered as transformers'
`apply_chat_template` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.errors import JobError
from worker.loading.config import present, read_json
from worker.loading.tokenizer import CONFIG as TOKENIZER_CONFIG
from worker.loading.tokenizer import Tokenizer
from worker.prompt.sandbox import SANDBOX


class ChatTemplate:
    """The templates of one model. `source` is the default one's text; `takes_parts`: whether it
    reads the parts of a content, or texts alone. Raises JobError for what isn't Jinja."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._special_tokens, self._sources = special_tokens, sources
        self.source = sources.get("default") or next(iter(sources.values()))
        self.hash = hashlib.sha256(json.dumps(sorted(sources.items())).encode()).hexdigest()[:32]
        for source in sources.values():
            SANDBOX.check(source)
        self.takes_parts = self._probe()

    @classmethod
    def read(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The templates of a model folder: chat_template.jinja counts before
        tokenizer_config.json, and that before chat_template.json; additional_chat_templates/ adds
        named ones. None if there is none."""
        sources: dict[str, str] = {}
        file, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
        named = folder / "additional_chat_templates"
        present(named)
        if present(file):
            sources["default"] = _text(file)
        elif configured := tokenizer.config.get("chat_template"):
            sources.update(_named(configured, folder / TOKENIZER_CONFIG))
        elif present(legacy):
            sources.update(_named(read_json(legacy).get("chat_template"), legacy))
        for path in sorted(named.glob("*.jinja")):
            sources[path.stem] = _text(path)
        if not sources:
            return None
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
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise JobError(
                "unsupported_model",
                f"the model has chat templates for {', '.join(sorted(self._sources))} and none by "
                "default: put a chat_template.jinja into its folder",
            )
        given = {
            **self._special_tokens,
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return SANDBOX.render(self._sources[name], given)

    def _probe(self) -> bool:
        """Whether it reads a content of several parts, or knows texts alone."""
        parts = [{"type": "text", "text": text} for text in ("a7q", "b7q")]
        try:
            text = self.render([{"role": "user", "content": parts}])
        except JobError:
            return False
        shown_as_data = "'type'" in text or '"type"' in text
        return "a7q" in text and "b7q" in text and not shown_as_data


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
