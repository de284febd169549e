"""MkDocs hook: pages that lie elsewhere in the repository, links to its files, notes to its tests.

The pages of `docs/` link to files as they lie in the repository, so that the links work there too.
A link to a file that is a page of the site becomes a link to that page; any other becomes the path
of the file. A link to nothing fails the build.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "conformance/README.md": "test_vectors.md",
    "conformance/audit/README.md": "audit.md",
    "reproduction/protocol.md": "protocol.md",
    "reproduction/results/README.md": "paper.md",
    "reproduction/results/study/README.md": "study.md",
    "reproduction/results/tables/README.md": "tables/index.md",
    "reproduction/results/theory/README.md": "theory.md",
}
PAGES |= {
    f"reproduction/results/tables/{path.name}": f"tables/{path.name}"
    for path in sorted((ROOT / "reproduction/results/tables").glob("*.md"))
    if path.name != "README.md"
}
# What captions of blocks say to the tests, not to readers.
UNTESTED = re.compile(
    r'^(```\w+) title="(?:Not run by the|Run by other) tests: [^"]*"$', re.MULTILINE
)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def examples() -> dict[str, str]:
    """Return the page of each example by its path in the repository."""
    found = sorted((ROOT / "examples").iterdir())
    return {
        f"examples/{path.name}": f"examples/{path.stem}.md"
        for path in found
        if path.suffix == ".py" or (path / "pyproject.toml").exists()
    }


def on_config(config: Any) -> Any:
    """Add the examples and the tables to the sections that begin with their index."""
    rest = {"examples": list(examples().values())}
    rest["tables"] = [page for page in PAGES.values() if re.match("tables/(?!index)", page)]
    for section in config.nav:
        for pages in section.values():
            for name in [*rest]:
                if pages == [f"{name}/index.md"]:
                    pages += rest.pop(name)
    if rest:
        raise ValueError(f"mkdocs.yml has no section of {next(iter(rest))}/index.md alone.")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and the images that they show."""
    listed = ["# Examples", "", "Each of these programs is run by the tests.", ""]
    for path, page in examples().items():
        content, title = example(ROOT / path)
        listed.append(f"- [{title}]({page.partition('/')[2]}): `{path}`")
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "examples/index.md", content="\n".join(listed) + "\n"))
    for path, page in PAGES.items():
        text = re.sub(r"<!--.*?-->", "", (ROOT / path).read_text(), flags=re.DOTALL)
        for image in images(path, text):
            files.append(File.generated(config, image, abs_src_path=str(ROOT / image)))
        files.append(File.generated(config, page, content=rewritten(text, path, page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that leave `docs/`, and drop notes to the tests."""
    if page.file.generated_by is None:
        markdown = rewritten(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
    return UNTESTED.sub(r"\1", markdown)


def example(path: Path) -> tuple[str, str]:
    """Return a page with the code of an example, and its title."""
    files = [path] if path.is_file() else [*sorted(path.rglob("*.py")), path / "pyproject.toml"]
    title = path.stem.replace("_", " ").replace("-", " ").capitalize()
    parts = [f"# {title}"]
    for file in files:
        language = {".py": "python", ".toml": "toml"}[file.suffix]
        name = file.relative_to(ROOT)
        parts.append(f'```{language} title="{name}"\n{file.read_text().rstrip()}\n```')
    return "\n\n".join(parts) + "\n", title


def images(path: str, text: str) -> list[str]:
    """Return the images that a page shows, by their paths in the repository."""
    shown = [target for mark, _, target in LINK.findall(text) if mark]
    return [
        str((ROOT / path).parent.joinpath(target).resolve().relative_to(ROOT)) for target in shown
    ]


def rewritten(text: str, path: str, page: str) -> str:
    """Return the text of a file of the repository with links for its page on the site."""

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        name, _, anchor = target.partition("#")
        inside = (ROOT / path).parent.joinpath(name).resolve().relative_to(ROOT).as_posix()
        if inside.startswith("docs/"):
            goal = inside.removeprefix("docs/")  # which MkDocs checks
        elif not (ROOT / inside).exists():
            raise PluginError(f"{path}: the link {target} leads to nothing.")
        else:
            goal = inside if mark else (PAGES | examples()).get(inside, "")
        if not goal:
            return label if label.strip("`") == inside else f"{label} (`{inside}`)"
        relative = os.path.relpath(goal, Path(page).parent)
        return f"{mark}[{label}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, text)
