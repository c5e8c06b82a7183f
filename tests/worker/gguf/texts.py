"""Texts for tokenizers: prose, code, digits, scripts, emoji, odd white space, random mixtures."""

# ruff: noqa: RUF001  (characters of many scripts)

from __future__ import annotations

import random

FIXED = (
    "",
    " ",
    "Hello, world!",
    " The quick brown fox jumps over the lazy dog, and then the dog sleeps in the morning sun.",
    "What is two plus three? It is five; seven times eight is fifty-six, and 12 + 30 = 42.",
    "I'm sure they've said we'll go; she'd know it's what you're after. DON'T I'LL WE'VE",
    'def answer(question: str) -> str:\n    return "the answer to " + question + " is 42"\n',
    "for (int i = 0; i < 10; ++i) {\n\t\tsum += a[i] * b[i];\n\t}\n\n\n    // done\r\n",
    '<html><body class="x">&amp; {\'json\': [1, 2.5, -3e-7], "k": null}</body></html>',
    "1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 0x1F 2024-01-31 v2.0.1",
    "naïve café über señor Ärger Straße ŒUVRE œuvre ĐÀ NẴNG",
    "Привет мир. Это ТЕСТ, не так ли? ΑΒΓ αβγ ς",
    "你好世界。今天天气很好！我们去公园吧？『引用』",
    "こんにちは、世界。カタカナとひらがな ﾊﾝｶｸ",
    "안녕하세요 세계 한국어 텍스트입니다",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם ١٢٣ ४५६",
    "नमस्ते दुनिया ไทย ภาษา বাংলা",
    "e\u0301 a\u030a n\u0303 combining, and ﬁ ligature, Å vs Å",
    "😀 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️ ☃ ✓ → ∑ ≤ €100 £5 ½ ² ™",
    "a  b   c    d     e      f        g                h",
    "   leading and trailing   ",
    "tabs\tand\t\ttabs\n\nlines\n\n\nmore\r\nwindows\r\n\r\nend\n",
    "\n\n\n   \n \t \n",
    "nbsp\u00a0here \u2003em\u2009thin \u3000wide\u200bzero\u200djoin \ufeffbom",
    "control \x01\x02 \x7f \x1b[0m \x85next \x0bvt \x0cff",
    "user@example.com https://example.com/a?b=c&d=e#f C:\\path\\file.txt #tag @name $var",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case x86_64 UTF-8 GPT4o HTTPServer",
    "...!!!???---***///\\\\||| (((nested [brackets {here}])))",
    "The model's users' answers: 'quoted' \"double\" `code` ``two`` “curly” ‘single’ «guillemets»",
    "�replacement 𝒳𝓎𝔷 𐍈 \U0001f9ea",
    "<0x41> <unk> ▁under ▁▁bar",
)


def texts() -> list[str]:
    """The fixed texts and 150 random ones, the same every time."""
    source = random.Random(7)
    classes = (
        "abcdefghijklmnopqrstuvwxyz",
        "etaoin ",
        "ABCDEFGHIJ",
        "0123456789",
        " \t\n\r",
        "  ",
        ".,;:!?'\"-_()[]{}<>/\\|@#$%^&*+=~`",
        "éüßñøçàêÉÜ",
        "приветМИР",
        "你好世界天气",
        "かなカナ",
        "한국어",
        "😀👍🏽‍❤️",
        "'s't're've'm'll'd",
    )
    made = []
    for _ in range(150):
        pieces = []
        for _ in range(source.randint(1, 14)):
            letters = source.choice(classes)
            pieces.append("".join(source.choice(letters) for _ in range(source.randint(1, 6))))
        made.append("".join(pieces))
    return [*FIXED, *made]
