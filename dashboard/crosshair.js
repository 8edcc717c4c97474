// A crosshair that all charts over time share: the moment under the pointer in one is marked in the others.
// Streamlit cannot link charts, and Plotly links only axes of one figure.
(() => {
  const overTime = (chart) => chart?._fullLayout?.xaxis?.type === "date";
  const charts = () => [...document.querySelectorAll(".js-plotly-plot")].filter(overTime);
  const marked = new Set();

  function lineOf(chart) {
    let line = chart.querySelector(":scope > .tf-crosshair");
    if (!line) {
      line = document.createElement("div");
      line.className = "tf-crosshair";
      line.setAttribute("aria-hidden", "true");
      chart.append(line);
    }
    return line;
  }

  function hide() {
    for (const line of marked) line.hidden = true;
    marked.clear();
  }

  function mark(chart, moment) {
    const { xaxis, _size } = chart._fullLayout;
    const x = xaxis.c2p(moment);
    if (!(x >= 0 && x <= xaxis._length)) return;
    const line = lineOf(chart);
    line.style.left = `${xaxis._offset + x}px`;
    line.style.top = `${_size.t}px`;
    line.style.height = `${_size.h}px`;
    line.hidden = false;
    marked.add(line);
  }

  document.addEventListener("pointermove", ({ target, clientX }) => {
    hide();
    const pointed = target.closest?.(".js-plotly-plot");
    if (!overTime(pointed)) return;
    const { xaxis } = pointed._fullLayout;
    const x = clientX - pointed.getBoundingClientRect().left - xaxis._offset;
    if (x < 0 || x > xaxis._length) return;
    for (const chart of charts()) if (chart !== pointed) mark(chart, xaxis.p2c(x));
  }, { passive: true });
  document.documentElement.addEventListener("pointerleave", hide);
})();
