"""The colours of figures and pages; they can be read in grey print and by the colour-blind."""

INK, FAINT, AXIS, GRID, SPREAD = "#222222", "#666666", "#b5b5b5", "#e3e3e3", "#dcdcdc"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"
AMBER, SKY, BROWN, GREY, PINK = "#c28a00", "#56b4e9", "#8a5a2b", "#8b9199", "#e07bb5"
SERIES = (  # a colour, a marker and a dash each, so that no line is told by colour alone
    (BLUE, "o", "-"),
    (ORANGE, "s", "--"),
    (INK, "^", "-."),
    (GREEN, "D", ":"),
    (PURPLE, "v", "-"),
    (AMBER, "P", "--"),
    (SKY, "X", "-."),
    (BROWN, "<", ":"),
    (GREY, ">", "-"),
    (PINK, "*", "--"),
)
# 17 colours at equal steps of two maps: viridis is for logits and attention, inferno for inner
# products of positions. matplotlib has both, and takes half a second to be imported.
VIRIDIS = [
    "#440154",
    "#48186a",
    "#472d7b",
    "#424086",
    "#3b528b",
    "#33638d",
    "#2c728e",
    "#26828e",
    "#21918c",
    "#1fa088",
    "#28ae80",
    "#3fbc73",
    "#5ec962",
    "#84d44b",
    "#addc30",
    "#d8e219",
    "#fde725",
]
INFERNO = [
    "#000004",
    "#0b0724",
    "#210c4a",
    "#3d0965",
    "#57106e",
    "#71196e",
    "#8a226a",
    "#a32c61",
    "#bc3754",
    "#d24644",
    "#e45a31",
    "#f1731d",
    "#f98e09",
    "#fcac11",
    "#f9cb35",
    "#f2ea69",
    "#fcffa4",
]
