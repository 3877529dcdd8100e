"""Caption cleaning as LlamaGen's text features were made with: a fixed list of replacements, twice.

The rules are those that LlamaGen took over from earlier text-to-image models; a caption that was
cleaned otherwise lies off what the model was trained on. Knows nothing of tokens.

Source: LlamaGen, https://github.com/FoundationVision/LlamaGen, ``language/t5.py``.
"""

from __future__ import annotations

import html
import io
import re
from urllib.parse import unquote_plus

from ciar.errors import InputError

_SITE = r"[a-z0-9.\-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/\-]*\b/?(?!@)"
_FILE = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    "\u002d\u058a\u05be\u1400\u1806\u2010\u2011\u2012\u2013\u2014\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    "\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_MARKS = "#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~()[]{}|\\/*"

Rules = tuple[tuple[re.Pattern[str], str], ...]


def _rules(*pairs: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


#: Before the text is read as HTML.
_LINKS = _rules(
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_SITE})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_SITE})", ""),
)
#: After it.
_CHARACTERS = _rules(
    (r"@\w+\b", ""),
    (r"[\u31c0-\u9fff]+", ""),  # Chinese and its neighbours, but not kana
    (f"[{re.escape(_DASHES)}]+", "-"),
    ("[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    ("[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_FILE})", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (f"[{re.escape(_MARKS)}]+", " "),
    (r"\s+\.\s+", " "),
)
#: After mis-decoded characters are mended.
_WORDS = _rules(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILE})(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    ("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b", ""),
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    # The edges, before white space is stripped, which is one reason why two passes differ from one.
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)
_JOINERS = re.compile(r"[-_]")


def clean_caption(text: str, passes: int = 2) -> str:
    """A caption as LlamaGen's text encoder reads it.

    Args:
        text: any text; the result may be empty.
        passes: LlamaGen cleans twice.

    Raises:
        InputError: the packages of the extra ``t5`` are missing.
    """
    for _ in range(passes):
        text = _pass(text)
    return text


def _pass(text: str) -> str:
    text = unquote_plus(text).strip().lower().replace("<person>", "person")
    text = _replaced(text, _LINKS)
    text = _replaced(_text_of(text), _CHARACTERS)
    if len(_JOINERS.findall(text)) > 3:  # this-is-a-file-name
        text = _JOINERS.sub(" ", text)
    text = html.unescape(html.unescape(_mended(text))).strip()
    return _replaced(text, _WORDS).strip()


def _replaced(text: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _text_of(markup: str) -> str:
    """What a browser would show of the caption read as HTML."""
    try:
        from bs4 import BeautifulSoup, ParserRejectedMarkup
    except ImportError:
        raise _missing("beautifulsoup4") from None
    try:
        # A file is never mistaken for the name of a page, which would be warned of.
        return BeautifulSoup(io.StringIO(markup), features="html.parser").text
    except ParserRejectedMarkup:
        return markup


def _mended(text: str) -> str:
    try:
        import ftfy
    except ImportError:
        raise _missing("ftfy") from None
    return ftfy.fix_text(text)


def _missing(package: str) -> InputError:
    return InputError(f"Cleaning prompts for LlamaGen needs {package}. Run: pip install 'ciar[t5]'")
