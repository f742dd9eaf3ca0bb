(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const themes = {
    light: { ink: "#1c1f24", faint: "#5c636e", line: "#e3e6ea", blue: "#0072b2", orange: "#d55e00",
      green: "#008f68", amber: "#b98200", sky: "#3d9bd6", brown: "#8a5a2b", pink: "#d6619f", purple: "#8f3a82", purplePale: "#8f3a8238", teal: "#1f7a74", tealPale: "#1f7a7438",
      grey: "#7d848e", greyPale: "#7d848e38" },
    dark: { ink: "#e8eaee", faint: "#a3abb8", line: "#2d333d", blue: "#5ab4f0", orange: "#ff9a52",
      green: "#45c79b", amber: "#e3b341", sky: "#a9dbff", brown: "#c99b6b", pink: "#ff9fcf", purple: "#d98bce", purplePale: "#d98bce40", teal: "#4fc4bb", tealPale: "#4fc4bb40",
      grey: "#9aa2ae", greyPale: "#9aa2ae40" },
  };
  const bar = (box) => box.matches(".chart, .wide .square") ? "hover" : false;
  const config = (box) => ({ responsive: true, displaylogo: false, displayModeBar: bar(box),
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });

  function themed(name) {
    const colors = themes[dark.matches ? "dark" : "light"];
    const fill = (key, value) => // a name may begin with "@" too, but no name is under such a key
      /color$/.test(key) && value[0] === "@" ? colors[value.slice(1)] : value;
    const figure = JSON.parse(JSON.stringify(figures[name]), fill);
    const family = getComputedStyle(document.body).fontFamily;
    Object.assign(figure.layout, {
      autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: 11, color: colors.faint },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colors.faint, activecolor: colors.ink },
      hoverlabel: { font: { family, size: 12 }, namelength: -1, align: "left" },
    });
    for (const axis of ["xaxis", "yaxis"]) {
      figure.layout[axis] = { gridcolor: colors.line, zerolinecolor: colors.line,
        linecolor: colors.line, ...figure.layout[axis] };
    }
    return figure;
  }

  async function draw(box) {
    const { data, layout } = themed(box.dataset.figure);
    await Plotly.react(box, data, layout, config(box));
    box.dataset.drawn = "yes";
  }

  const hidden = (box) => box.closest("details:not([open])");
  async function drawAll(boxes) {
    for (const box of boxes) {
      if (hidden(box)) continue;
      await draw(box);
      await new Promise((done) => setTimeout(done)); // the page stays alive between two plots
    }
  }

  const all = () => [...document.querySelectorAll(".plot")];
  document.querySelectorAll("details").forEach((part) =>
    part.addEventListener("toggle", () =>
      drawAll([...part.querySelectorAll(".plot")].filter((box) => !box.dataset.drawn))));
  dark.addEventListener("change", () => drawAll(all().filter((box) => box.dataset.drawn)));
  drawAll(all()).then(() => { document.body.dataset.ready = "yes"; });
})();
