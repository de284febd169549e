"""Turn the docstring of an algorithm, written for a terminal, into Markdown with typeset equations.

In such a docstring, single backticks hold formulas and double ones code. An indented block is a
list of options if a line `Option...:` stands above it, else equations. A line of equations has an
optional label, then parts with two spaces between them; parts mix formulas and words.
"""

import re
import textwrap
from html import escape

from mathml import NotationError, formula, is_symbol

LABEL = re.compile(
    r"( *)((?:[AB] )?(?:client i|server)|control II?|sgdm|adagrad|adam|yogi|mimelite|mime)(?::| ) +"
)
# Blocks end at an empty line, above and below a list of options, and above the costs.
BLOCK = re.compile(r"\n\s*\n|(?<=:)\n(?=    \S)|\n(?=Option|Communication)")
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_']*(?:\+(?=[\s),;]|$))?")


def markdown(docstring: str) -> str:
    """Return the Markdown of a docstring without its title.

    Raises:
        NotationError: An equation is not in the notation of `mathml`.
    """
    parts = []
    above = ""
    for block in BLOCK.split(docstring.strip("\n")):
        if not block.startswith("    "):
            parts.append(inline(block))
        elif above.startswith("Option"):
            parts.append(options(block))
        else:
            parts.append(equations(block))
        above = block.splitlines()[-1]
    return "\n\n".join(parts)


def inline(text: str) -> str:
    """Return prose with its formulas typeset and its sections as bold words."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", lambda found: formula(found[1], is_block=False), text)
    text = text.replace("``", "`")
    return re.sub(r"^(Options?|Weighting|Communication, in models)\b([^:\n]*):", r"**\1\2:**", text)


def options(block: str) -> str:
    """Return a list of options as Markdown: `name  meaning`, continued by indentation."""
    found = re.findall(r"^ {4}(\w+) +(.*\n?(?: {5,}.*\n?)*)", block, re.MULTILINE)
    if len(found) != len(re.findall(r"^ {4}\S", block, re.MULTILINE)):
        raise NotationError(f"options: {block!r}")
    return "\n".join(f"- `{name}`: {inline(' '.join(text.split()))}" for name, text in found)


def equations(block: str) -> str:
    """Return a block of equations as HTML: rows with a label, formulas and remarks."""
    lines = textwrap.dedent(block).splitlines()
    first = LABEL.match(lines[0])
    start = first.end() if first else 0
    rows = []
    for line in lines:
        label = LABEL.match(line)
        body = line[label.end() :] if label else line.lstrip()
        column = len(line) - len(body)
        classes = "actor" if label and label[2][-1] in "ir" else "variant"
        name = f'<span class="{classes}">{escape(label[2])}</span>' if label else ""
        parts = [
            _part(part, is_remark=number > 0)
            for number, part in enumerate(re.split(r" {2,}", body))
        ]
        level = max(0, column - start) // 4
        rows.append(f'{name and f"<dt>{name}</dt>"}<dd class="level{level}">{" ".join(parts)}</dd>')
    return f'<dl class="equations">{"".join(rows)}</dl>'


def _part(text: str, is_remark: bool) -> str:
    """Return one part of a line: formulas as MathML, words as text."""
    shown, run, depth, place = [], "", 0, 0

    def close() -> None:
        nonlocal run
        if run.strip():
            shown.append(formula(run.strip(), is_block=True))
        run = ""

    while place < len(text):
        word = WORD.match(text, place)
        if word and not is_symbol(word[0]) and not depth:
            close()
            shown.append(f"<span>{escape(word[0])}</span>")
            place = word.end()
        elif word:
            run += word[0]
            place = word.end()
        elif text[place] in ",;:." and not depth and text[place : place + 2] != "..":
            close()
            shown.append(f'<span class="mark">{text[place]}</span>')
            place += 1
        else:
            size = 2 if text[place : place + 2] in ("..", "<-", "<=", ">=") else 1
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            run += text[place : place + size]
            place += size
    close()
    body = " ".join(shown).replace(' <span class="mark">', '<span class="mark">')
    is_words = not is_symbol(WORD.match(text)[0]) if WORD.match(text) else False
    return f'<span class="{"remark" if is_remark and is_words else "part"}">{body}</span>'
