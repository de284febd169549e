"""Web pages of results, from the templates in `templates/`.

A page loads nothing: it can be mailed, archived and opened without a network. It serves a phone and
a wide screen, light and dark.
"""

from functools import lru_cache
from typing import Any

from fedda.errors import import_extra
from fedda.reports.figures import Panel, line_style, metric_label, sentence_case
from fedda.reports.tables import markdown_table, markdown_text


@lru_cache
def _environment(package: str) -> Any:
    """Templates of a package, then those of this one. Values are escaped in HTML, not in text."""
    jinja2 = import_extra("jinja2", extra="report", action="write web pages")
    found = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in (package, __package__)]),
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (markdown_table, markdown_text, metric_label, plot_data, sentence_case):
        found.filters[function.__name__] = function
    return found


def render(template: str, package: str = __package__, **values: Any) -> str:
    """Fill a template with values.

    Args:
        template: A file in the folder `templates` of the package. It may extend `page.html`, the
            frame of every page, and define its block `body`. `parts.html` has macros for tables,
            for facts that unfold, and for interactive plots.
        package: The package of the template.
        values: The variables of the template.
    """
    return str(_environment(package).get_template(template).render(**values))


def plotly_script() -> str:
    """Return the program that draws plots: the value of `plotly` for a page that has some."""
    return str(import_extra("plotly.offline", "report", "write web pages").get_plotlyjs())


def plot_data(panel: Panel) -> dict[str, Any]:
    """Return a panel as `templates/plots.js` draws it."""
    lines = []
    for curve, number, thick in panel.lines:
        colour, dash = line_style(number)
        lines.append(curve._asdict() | {"colour": colour, "dash": dash, "thick": thick})
    return panel._asdict() | {"lines": lines, "x_ticks": panel.x_ticks}
