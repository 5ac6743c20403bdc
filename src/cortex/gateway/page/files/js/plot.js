// Stacked bars by day.
import uPlot from "../vendor/uplot.js";
import { compact } from "./format.js";
import { html, useEffect, useRef } from "./html.js";

const HEIGHT = 230;
const DAY_S = 86400;

/** `series`: [{label, values, colour}] with one value per day; `days` are Unix times at midnight, UTC. */
export function StackedBars({ days, series, format = compact }) {
  const element = useRef(null);
  useEffect(() => {
    const holder = element.current;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const sums = series.map((_, index) => days.map((_, day) => series.slice(0, index + 1).reduce((total, each) => total + each.values[day], 0)));
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const plot = new uPlot({
      width: holder.clientWidth, height: HEIGHT, tzDate: (unix) => uPlot.tzDate(new Date(unix * 1000), "UTC"),
      cursor: { drag: { x: false, y: false }, points: { show: false } }, legend: { live: true },
      scales: { x: { range: (_, low, high) => [low - DAY_S / 2, high + DAY_S / 2] }, y: { range: (_, low, high) => [0, high || 1] } },
      axes: [
        { ...axis, size: 30, grid: { show: false }, incrs: [1, 2, 7, 14, 30, 90].map((days) => days * DAY_S), values: (_, splits) => splits.map((unix) => new Date(unix * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" })) },
        { ...axis, size: 58, values: (_, splits) => splits.map((value) => format(value)) },
      ],
      series: [
        { label: "Day", value: (_, unix) => (unix == null ? "–" : new Date(unix * 1000).toISOString().slice(0, 10)) },
        // Drawn from the tallest down, so that each covers the part below it.
        ...series.map((each, index) => ({
          label: each.label, fill: colour(each.colour), stroke: colour(each.colour), width: 0, paths: uPlot.paths.bars({ size: [0.7, 42] }), points: { show: false },
          value: (_, __, ___, position) => (position == null ? "–" : format(series[index].values[position])),
        })).reverse(),
      ],
    }, [days, ...sums.reverse()], holder);
    const resized = new ResizeObserver(() => plot.setSize({ width: holder.clientWidth, height: HEIGHT }));
    resized.observe(holder);
    return () => {
      resized.disconnect();
      plot.destroy();
    };
  }, [days, series]);
  return html`<div class="plot" ref=${element} role="img" aria-label=${series.map((each) => each.label).join(", ") + " by day; the tables below have the numbers"}></div>`;
}
