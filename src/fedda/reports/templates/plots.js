// Draws one panel with Plotly: a line for each curve, and a band from its lowest to its highest.

// One page serves light and dark: half-transparent grey shows on both, and CSS colours the text.
const grey = alpha => `rgba(128, 128, 128, ${alpha})`;

// Plotly reads a subset of HTML in names.
const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function drawPanel(panel) {
  const traces = panel.lines.flatMap((line, index) => {
    const common = {type: "scatter", legendgroup: String(index), name: escaped(line.label)};
    const drawn = {
      ...common, x: line.x, y: line.mean, mode: panel.markers ? "lines+markers" : "lines",
      line: {color: line.colour, dash: line.dash, width: line.thick ? 4 : 2},
      ...(line.thick ? {zorder: 1} : {}),
    };
    const points = [...line.x.keys()].filter(i => Number.isFinite(line.mean[i]));
    if (!points.some(i => line.low[i] < line.high[i])) return [drawn];
    const back = [...points].reverse();
    const band = {
      ...common, x: [...points, ...back].map(i => line.x[i]),
      y: [...points.map(i => line.low[i]), ...back.map(i => line.high[i])],
      mode: "lines", fill: "toself", fillcolor: line.colour, opacity: 0.15, line: {width: 0},
      hoverinfo: "skip", showlegend: false,
    };
    return [band, drawn];
  });
  const axis = {automargin: true, gridcolor: grey(0.3), zerolinecolor: grey(0.3)};
  const layout = {
    paper_bgcolor: grey(0), plot_bgcolor: grey(0),
    font: {family: "system-ui, sans-serif", size: 13},
    // Plotly leaves out a label that has no room, and the last stands half in the margin.
    margin: {l: 8, r: 24, t: 36, b: 8},
    xaxis: {
      ...axis, title: {text: escaped(panel.x_label)}, exponentformat: "none",
      separatethousands: true,
      ...(panel.markers ? {type: "log", tickvals: panel.x_ticks, tickangle: 0} : {}),
    },
    yaxis: {...axis, title: {text: escaped(panel.y_label)}, ...verticalAxis(panel)},
    legend: {orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom"},
    modebar: {bgcolor: grey(0), color: grey(0.8), activecolor: "#0072B2"},
    dragmode: false,  // on a phone a finger that crosses a plot must scroll the page
    showlegend: true,
    hoverlabel: {namelength: -1},
  };
  Plotly.newPlot(`plot-${panel.name}`, traces, layout, {
    responsive: true,
    displaylogo: false,
    displayModeBar: true,
    // Newer Plotly releases add a button that uploads the figure, hence a list of what is allowed.
    modeBarButtons: [["toImage", "zoom2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    showSendToCloud: false,
  });
}

// Plotly counts the range of a logarithmic axis in exponents. Such an axis has labels at 1, 2 and 5
// if these are few, and all in full, for Plotly shortens some to a digit.
function verticalAxis(panel) {
  if (!panel.log_y) return panel.y_range ? {range: panel.y_range} : {};
  const means = panel.lines.flatMap(line => line.mean).filter(Number.isFinite);
  const [low, high] = panel.y_range ?? [Math.min(...means), Math.max(...means)];
  return {
    type: "log", tickformat: "~g",
    ...(high < 1000 * low ? {dtick: "D2"} : {}),
    ...(panel.y_range ? {range: panel.y_range.map(Math.log10)} : {}),
  };
}
