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
