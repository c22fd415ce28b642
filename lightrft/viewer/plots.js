// Draws the plots of a page with uPlot. The element #plot-data holds their descriptions as JSON, in
// the order of the elements of class "plot". plots.py documents and writes the descriptions.
"use strict";
{
  const HEIGHT = 208;
  // Ticks on the axis of steps are whole numbers, also where a zoom shows two steps.
  const WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  const UNITS = [[999.5e6, 1e9, "G"], [999.5e3, 1e6, "M"], [1e4, 1e3, "k"]];
  // uPlot divides the range of an axis by powers of ten, which must neither overflow nor become 0.
  const LARGEST = 1e300;
  const SMALLEST = 1e-280;

  // formatting.py has the same forms. "extra" adds digits, which ticks of a narrow range need.
  const FORMS = {
    compact,
    percent: (value, extra = 0) => `${(value * 100).toFixed(1 + extra).replace(/\.?0+$/, "")}%`,
    count: (value, extra = 0) =>
      Math.abs(value) < 1e4
        ? value.toLocaleString("en-US", { minimumFractionDigits: extra, maximumFractionDigits: extra })
        : compact(value, extra),
    seconds: (value, extra = 0) => `${compact(value, extra)} s`,
  };

  function compact(value, extra = 0) {
    const size = Math.abs(value);
    for (const [limit, scale, unit] of UNITS) {
      if (size >= limit) return general(value / scale, 3 + extra) + unit;
    }
    if (size >= 1000) return value.toFixed(extra);
    return general(value, (size > 0 && size < 1e-3 ? 2 : 3) + extra);
  }

  // Python's format "g".
  function general(value, digits) {
    const [mantissa, power] = value.toExponential(digits - 1).split("e");
    const exponent = Number(power);
    if (exponent >= -4 && exponent < digits) return String(Number(value.toPrecision(digits)));
    const size = String(Math.abs(exponent)).padStart(2, "0");
    return `${Number(mantissa)}e${exponent < 0 ? "-" : "+"}${size}`;
  }

  function tickLabels(values, form) {
    for (let extra = 0; extra < 6; extra += 1) {
      const labels = values.map((value) => form(value, extra));
      if (new Set(labels).size === labels.length) return labels;
    }
    return values.map(String);
  }

  // A canvas takes no CSS variables. Reading one at each drawing follows a change to dark mode.
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

  class PlotView {
    constructor(box, plot) {
      this.box = box;
      this.plot = plot;
      this.bars = plot.kind === "bars";
      this.form = FORMS[plot.form];
      this.shown = plot.series.map(() => true);
      // uPlot draws in order. The whole bar comes first, and shorter ones cover it.
      this.order = [...plot.series.keys()];
      if (this.bars) this.order.reverse();
      this.named = [...plot.series.keys()].filter((i) => !plot.series[i].faint);
      this.main = this.named[0];
      this.now = box.closest("figure").querySelector(".now");
      this.latest = this.now.textContent;
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.hidden = true;
      this.chart = new uPlot(this.options(), this.columns(), box);
      this.chart.over.append(this.tip);
      this.chart.over.addEventListener("mouseenter", () => (this.inside = true));
      this.chart.over.addEventListener("mouseleave", () => {
        this.inside = false;
        this.tip.hidden = true;
      });
      new ResizeObserver(() => this.resize()).observe(box);
      const keys = box.closest("figure").querySelectorAll(".key");
      keys.forEach((key, i) => {
        key.disabled = false;
        key.addEventListener("click", () => this.toggle(key, this.named[i]));
      });
    }

    options() {
      const muted = () => color("--muted");
      const axis = { stroke: muted, font: `11px ${color("--sans")}`, ticks: { show: false } };
      return {
        width: this.box.clientWidth,
        height: HEIGHT,
        padding: [10, 10, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, range: (chart, low, high) => this.stepRange(low, high) },
          y: { range: (chart, low, high) => this.valueRange(low, high) },
        },
        axes: [
          { ...axis, size: 30, grid: { show: false }, space: 44, ...this.steps() },
          {
            ...axis,
            size: 48,
            gap: 4,
            grid: { stroke: () => color("--line"), width: 1 },
            values: (chart, values) => tickLabels(values, this.form),
          },
        ],
        series: [{}, ...this.order.map((i) => this.line(this.plot.series[i]))],
        cursor: {
          y: false,
          sync: { key: this.plot.axis, scales: ["x", null] },
          // A click that trembles is no zoom.
          drag: { x: true, y: false, dist: 5 },
          points: this.bars ? { show: false } : this.marks(),
        },
        hooks: { setCursor: [() => this.hover()] },
      };
    }

    // Ticks of the step axis: uPlot chooses fractions where steps are not whole.
    steps() {
      if (!this.plot.whole) return { values: (chart, steps) => tickLabels(steps, compact) };
      return { incrs: WHOLE, values: (chart, steps) => steps };
    }

    // The marks of the values at the pointer are elements, so they take CSS variables.
    marks() {
      return {
        size: 7,
        width: 1.5,
        fill: (chart, i) => `var(--s${this.plot.series[this.order[i - 1]].color})`,
        stroke: () => "var(--card)",
      };
    }

    line(series) {
      const ink = () => color(`--s${series.color}`);
      if (this.bars) {
        return { fill: ink, width: 0, paths: uPlot.paths.bars({ size: [0.85, 60] }), points: { show: false } };
      }
      const alone = series.values.filter((value) => value !== null).length === 1;
      return {
        stroke: ink,
        width: series.faint ? 1.2 : series.dashed ? 1.3 : 1.9,
        alpha: series.faint ? 0.35 : 1,
        dash: series.dashed ? [4, 4] : undefined,
        // Series of a plot may be measured at different steps.
        spanGaps: true,
        points: { show: series.dots || alone, size: 5.5, fill: ink, width: 0 },
      };
    }

    stepRange(low, high) {
      const { steps } = this.plot;
      if (steps.length === 1) return [steps[0] - 1, steps[0] + 1];
      if (!this.bars) return [low, high];
      // Half a bar at each end.
      const half = (steps.at(-1) - steps[0]) / (steps.length - 1) / 2;
      return [low - half, high + half];
    }

    valueRange(low, high) {
      if (this.plot.range) return this.plot.range;
      // Every line is hidden, or every value is 0.
      if (low === null || Math.max(Math.abs(low), Math.abs(high)) < SMALLEST) return [0, 1];
      const bottom = this.plot.zero || this.bars ? Math.min(0, low) : low;
      const side = { pad: 0.08, soft: 0, mode: 3 };
      return uPlot.rangeNum(Math.max(bottom, -LARGEST), Math.min(high, LARGEST), { min: side, max: side });
    }

    // The values as uPlot draws them: bars are stacked, without the hidden series.
    columns() {
      let values = this.plot.series.map((series) => series.values);
      if (this.bars) {
        const heights = this.plot.steps.map(() => 0);
        values = values.map((column, i) =>
          column.map((value, k) => (heights[k] += this.shown[i] ? value : 0)),
        );
      }
      return [this.plot.steps, ...this.order.map((i) => values[i])];
    }

    toggle(key, i) {
      const show = !this.shown[i];
      const both = this.plot.series[i - 1]?.faint ? [i - 1, i] : [i];
      key.setAttribute("aria-pressed", String(show));
      for (const k of both) this.shown[k] = show;
      this.chart.batch(() => {
        // First the data, because setSeries fits the value axis to it. "false" keeps the zoom.
        if (this.bars) this.chart.setData(this.columns(), false);
        for (const k of both) this.chart.setSeries(this.order.indexOf(k) + 1, { show });
      });
    }

    resize() {
      const width = this.box.clientWidth;
      if (width > 0 && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
    }

    hover() {
      const { idx, left } = this.chart.cursor;
      const outside = idx == null || left < 0;
      const value = outside ? null : this.valueAt(idx);
      this.now.textContent = value === null ? this.latest : this.form(value);
      this.tip.hidden = outside || !this.inside;
      if (!this.tip.hidden) this.tell(idx, left);
    }

    // The value that stands for the plot: of its main line, or of the whole bar.
    valueAt(idx) {
      if (!this.bars) return this.plot.series[this.main].values[idx];
      return this.plot.series.reduce((sum, { values }, i) => sum + (this.shown[i] ? values[idx] : 0), 0);
    }

    tell(idx, left) {
      const head = document.createElement("b");
      head.textContent = this.plot.heads[idx] ?? `${this.plot.axis} ${this.step(idx)}`;
      // From the top down, as the parts of a bar are.
      const rows = this.order.filter((i) => this.tells(i, idx)).map((i) => this.row(i, idx));
      this.tip.replaceChildren(head, ...rows);
      const right = left > this.chart.over.clientWidth / 2;
      this.tip.style.left = right ? "" : `${left + 12}px`;
      this.tip.style.right = right ? `${this.chart.over.clientWidth - left + 12}px` : "";
    }

    step(idx) {
      const step = this.plot.steps[idx];
      return this.plot.whole ? step : compact(step);
    }

    tells(i, idx) {
      const { faint, dashed, values } = this.plot.series[i];
      if (faint || dashed || !this.shown[i]) return false;
      return this.bars ? values[idx] > 0 : values[idx] !== null;
    }

    row(i, idx) {
      const { name, color: index, values } = this.plot.series[i];
      const row = document.createElement("div");
      row.className = `key ${this.plot.kind} c${index}`;
      row.textContent = `${name}: ${this.form(values[idx])}`;
      return row;
    }
  }

  const plots = JSON.parse(document.getElementById("plot-data").textContent);
  const boxes = document.querySelectorAll(".plot");
  const views = plots.map((plot, i) => new PlotView(boxes[i], plot));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const view of views) view.chart.redraw(false, true);
  });
}
