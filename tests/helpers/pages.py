"""The pages of the documentation, and the blocks of code on them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# A caption of a block that this page alone cannot run; after the colon stands why.
NOT_RUN, RUN_ELSEWHERE = "Not run by the tests: ", "Run by other tests: "
FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code: its language, its caption and its text."""

    language: str
    caption: str
    text: str

    @property
    def is_run_here(self) -> bool:
        return not self.caption.startswith((NOT_RUN, RUN_ELSEWHERE))


def blocks(page: Path, language: str = "") -> list[Block]:
    """Return the blocks of a page, of one language or of all."""
    text = page.read_text()
    found = [Block(*groups) for groups in FENCE.findall(text)]
    fences = [line for line in text.splitlines() if line.lstrip().startswith("```")]
    assert len(fences) == 2 * len(found), f"{page.name} has a fence of another form"
    rest = FENCE.sub("", text)
    assert not re.search(r"^[^-\d\s].*\n\n {4}", rest, re.MULTILINE), f"{page.name} indents code"
    return [block for block in found if language in ("", block.language)]
