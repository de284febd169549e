"""Web pages of results, from the templates in `templates/`.

A page loads no other files, so it can be sent, archived and opened without a network. It fits
phones and wide screens, in light and dark mode.
"""

from functools import lru_cache
from typing import Any

from fedda.errors import import_extra
from fedda.reports.figures import Panel, line_style, metric_label, sentence_case
from fedda.reports.tables import interval_text, markdown_table, markdown_text

_FILTERS = (interval_text, markdown_table, markdown_text, metric_label, sentence_case)
_DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}  # in pixels


@lru_cache
def _environment(package: str) -> Any:
    """Return the templates of a package and of this one. Values are escaped in HTML only."""
    jinja2 = import_extra("jinja2", extra="report", action="write web pages")
    found = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in (package, __package__)]),
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (*_FILTERS, plot_data):
        found.filters[function.__name__] = function
    return found


def render(template: str, package: str = __package__, **values: Any) -> str:
    """Fill a template with values.

    Args:
        template: A file in the folder `templates` of the package. It may extend `page.html`, the
            frame of every page, and define its block `body`. `parts.html` has macros for tables,
            for collapsible details, and for interactive plots.
        package: The package of the template.
        values: The variables of the template.
    """
    return str(_environment(package).get_template(template).render(**values))


def plot_data(panel: Panel) -> dict[str, Any]:
    """Return the data of a panel for `templates/plots.js`."""
    lines = []
    for line in panel.lines:
        colour, dash = line_style(line.style)
        drawn = {"colour": colour, "dash": _DASHES[dash], "thick": line.thick, "faded": line.faded}
        lines.append(line.curve._asdict() | drawn)
    derived = {"x_ticks": panel.x_ticks, "band_opacity": panel.band_opacity}
    return panel._asdict() | {"lines": lines, **derived}
