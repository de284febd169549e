"""Check that this environment holds all dependencies of fedda, in versions that are allowed.

The lock files are installed without pip's resolver, which in older versions refuses a pin of a
package that is also asked for with extras. This check takes the resolver's place: a lock file that
is incomplete, or does not match pyproject.toml, is refused by name.

Usage: python tools/check_environment.py [EXTRA ...]
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement


def problems(root: str) -> list[str]:
    """What is missing or has the wrong version, of a requirement and of all that it requires."""
    found, visited, queue = [], set(), [(Requirement(root), "the command line")]
    while queue:
        requirement, asked_by = queue.pop()
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            found.append(f"{wanted} is missing, which {asked_by} asks for")
            continue
        if not requirement.specifier.contains(package.version, prereleases=True):
            found.append(f"{wanted} is {package.version} here, which {asked_by} refuses")
        for extra in ("", *requirement.extras):
            if (package.name, extra) in visited:
                continue
            visited.add((package.name, extra))
            for line in package.requires or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    queue.append((needed, package.name))
    return sorted(set(found))


if __name__ == "__main__":
    wrong = problems(f"fedda[{','.join(sys.argv[1:])}]")
    if wrong:
        advice = "The lock file does not match pyproject.toml. Run `make lock` to update it."
        sys.exit("\n".join([*wrong, advice]))
