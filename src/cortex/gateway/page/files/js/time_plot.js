// Lines or stacked areas over time.
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef } from "./html.js";

const HEIGHT = 180;

const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

/** `series`: [{label, values, colour}] with one value, or null, per time. `most`: the top of the scale; `increments`: what its lines may be apart; `steps`: values hold for a whole step;
 * `points`: mark each value, since many times have none; `stack`: areas on top of each other. */
export function TimePlot({ times, series, format, label, most = null, increments = null, steps = false, points = false, stack = false }) {
  const element = useRef(null);
  useEffect(() => {
    const holder = element.current;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const sum = (index, position) => series.slice(0, index + 1).reduce((total, each) => total + each.values[position], 0);
    const data = series.map((each, index) => (stack ? each.values.map((value, position) => (value == null ? null : sum(index, position))) : each.values));
    const paths = steps ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
    const lines = series.map((each, index) => ({
      label: each.label, stroke: colour(each.colour), width: stack ? 0 : 1.5, fill: stack ? colour(each.colour) : undefined, paths, spanGaps: false,
      points: { show: points, size: 3 }, value: (_, __, ___, position) => (position == null ? "–" : format(series[index].values[position])),
    }));
    const plot = new uPlot({
      width: holder.clientWidth, height: HEIGHT, cursor: { drag: { x: false, y: false }, points: { show: false } }, legend: { live: true },
      scales: { x: { range: () => [times[0], times.at(-1)] }, y: { range: (_, low, high) => [0, most ?? (high > 0 ? high * 1.05 : 1)] } },
      axes: [
        { ...axis, size: 28, grid: { show: false }, values: (_, splits) => splits.map(clock) },
        { ...axis, size: 68, ...(increments && { incrs: increments }), values: (_, splits) => splits.map((value) => format(value)) },
      ],
      // Areas are drawn from the tallest down, so that each covers the part below it.
      series: [{ label: "Time", value: (_, unix) => (unix == null ? "–" : clock(unix)) }, ...(stack ? lines.reverse() : lines)],
    }, [times, ...(stack ? data.reverse() : data)], holder);
    const resized = new ResizeObserver(() => plot.setSize({ width: holder.clientWidth, height: HEIGHT }));
    resized.observe(holder);
    return () => {
      resized.disconnect();
      plot.destroy();
    };
  }, [times, series]);
  return html`<div class="plot time-plot" ref=${element} role="img" aria-label=${label}></div>`;
}
