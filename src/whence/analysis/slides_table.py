"""Table 1 of the TISA slides, and why a measurement differs from it."""

CRITERIA = (
    "inductive",
    "data-driven",
    "parameter efficient",
    "translation invariant",
    "parallelizable",
    "interpretable",
)

# In the order of CRITERIA. The slides' "absolute" is learned, "flow-based" floater, "untied" tupe.
TABLE_1 = {
    "sinusoidal": "y n y n y n",
    "learned": "n y n n y n",
    "shaw": "n y y y n n",
    "t5": "n y y y y y",
    "floater": "y y y n n n",
    "synthesizer": "n y y n y n",
    "tupe": "n y n n y n",
    "rope": "y n y y y n",
    "tisa": "y y y y y y",
}

WHY = {
    ("shaw", "inductive"): (
        "It runs at any length: lags beyond the clip share the vector of the clip. The slides' "
        "cross can only mean that such lags are no longer told apart."
    ),
    ("shaw", "parallelizable"): (
        "q A_K^T is one product, looked up by lag: the number of operations does not grow with the "
        "length. The article's own algorithm needs n x n x d numbers, which makes it slower "
        "(7% fewer steps a second), not sequential."
    ),
    ("t5", "inductive"): (
        "It runs at any length: lags beyond max_distance share the last bucket. The slides' cross "
        "can only mean that such lags are no longer told apart."
    ),
    ("floater", "parameter efficient"): (
        "It does not grow with the length, which may be what the slides count. But its flow is "
        "two matrices of 768 x 768: 1.1% of BERT-base, three times BERT's table of positions."
    ),
    ("synthesizer", "parameter efficient"): (
        "Measured is the random kind, an n x n matrix for each head and layer: 37.7 million at "
        "n = 512. The factorized kind, of rank 8, has 1.2 million, and grows with the length too."
    ),
}

# What else a reader should know of a verdict.
NOTES = {
    ("tisa2d", "translation invariant"): (
        "It is invariant to shifts on the image; this shift is along the sequence, where a patch "
        "at the end of a row moves to the next one."
    ),
    ("table2d", "translation invariant"): (
        "It is invariant to shifts on the image; this shift is along the sequence, where a patch "
        "at the end of a row moves to the next one."
    ),
    ("fire", "translation invariant"): (
        "It is invariant up to its threshold (512 positions at first), and not beyond."
    ),
    ("nope", "interpretable"): "There is no positional contribution to interpret.",
}


def tick(method: str, criterion: str) -> bool | None:
    """What the slides say, or None where they say nothing."""
    row = TABLE_1.get(method)
    return None if row is None else row.split()[CRITERIA.index(criterion)] == "y"
