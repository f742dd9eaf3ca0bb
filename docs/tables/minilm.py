"""One real model: what it knows of position, and TISA in place of its table."""

from tables.results_folder import MISSING, ResultsFolder

DISTILLED = {
    "original": "the original, with its table",
    "deleted": "table deleted",
    "rows": "table deleted, its mean rows moved into the words",
    "fitted": "TISA fitted",
    "tuned": "TISA fitted and tuned",
}


def minilm(stored: ResultsFolder) -> str:
    """The key numbers of one real model, each beside what it must be held against."""
    results = stored.json("inspect_minilm.json")
    if results is None:
        return MISSING.format("python docs/make_pictures.py")
    rows = ["| | | to hold it against |", "|---:|---|---|"]
    for number in results["telling"]:
        rows.append(f"| {number['value']} | {number['what']} | {number['against']} |")
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    model = results["model"]
    place = f"{model['name']}, SHA-256 {model['sha256'][:16]}... Read with {versions}."
    return "\n".join([*rows, "", place]) + "\n"


def minilm_windows(stored: ResultsFolder) -> str:
    """R^2 of one table as a function of the window, with and without the main diagonal."""
    results = stored.json("inspect_minilm.json")
    if results is None:
        return MISSING.format("python docs/make_pictures.py")
    rows = [
        "| positions | R² | random table | without the main diagonal | random table |",
        "|---|---:|---:|---:|---:|",
    ]
    for window in results["windows"]:
        numbers = ("r2", "null_r2", "r2_off_diagonal", "null_r2_off_diagonal")
        cells = [f"{window[name]:.3f}" for name in numbers]
        rows.append(f"| {window['start']}..{window['stop'] - 1} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def minilm_fits(stored: ResultsFolder) -> str:
    """The heads of one model that sense position: how far they go by lag, and their fits."""
    results = stored.json("inspect_minilm.json")
    if results is None:
        return MISSING.format("python docs/make_pictures.py")
    near, far = (results["fits"][0][name]["reach"] for name in ("near", "all"))
    rows = [
        "| head | strength | R² of F, all positions | positions 1..63 "
        f"| S, to lag {near:.0f} | R² of the curve | S, to lag {far:.0f} | R² of the curve |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in results["fits"]:
        cells = [str(one["head"]), f"{one['strength']:.3f}"]
        cells += [f"{one[name]:.2f}" for name in ("r2_of_f", "near_r2_of_f")]
        for part in (one["near"], one["all"]):
            cells += [str(part["chosen"]), f"{part['r2'][part['chosen'] - 1]:.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def distilled(stored: ResultsFolder) -> str:
    """One real model with TISA in place of its table: score, change and closeness."""
    results = stored.json("distill_minilm.json")
    if results is None:
        return MISSING.format("python benchmarks/distill_minilm.py")
    rows = [
        "| | S | rows moved | text | Spearman | change | pooled cosine | error, last layer |",
        "|---|---:|---|---|---:|---:|---:|---:|",
    ]
    start = results["rows"][0]["score"]
    for row in results["rows"]:
        name = DISTILLED[row["stage"]] + (f", seed {row['seed']}" if row.get("seed") else "")
        cells = [name, str(row.get("kernels", "")), row.get("rows", ""), row["text"]]
        cells += [f"{row['score']:.2f}", f"{row['score'] - start:+.2f}"]
        cells += [f"{row['pooled']:.3f}", f"{row['error'][-1]:.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    config, machine = results["config"], results["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    place = (
        f"{results['model']}, SHA-256 {results['sha256'][:16]}...; {results['pairs']:,} pairs of "
        f"STS-B's dev set. Tuned for {config['steps']} steps of {config['batch']} sequences. "
        f"{results['cpu_seconds'] / 60:.0f} minutes of one core of {machine['cpu']}, commit "
        f"{machine['commit']}, {versions}."
    )
    return "\n".join([*rows, "", place]) + "\n"


def distilled_long(stored: ResultsFolder) -> str:
    """A document longer than the table, by what the kernels were fitted to."""
    results = stored.json("distill_minilm.json")
    if results is None:
        return MISSING.format("python benchmarks/distill_minilm.py")
    rows = [
        "| | tokens | cosine with the mean of the original's pieces |",
        "|---|---:|---:|",
    ]
    cut = results["long"]["cosine_of_the_originals_first_512_tokens"]
    rows.append(f"| the original, the rest cut off | 512 | {cut:.3f} |")
    texts = {
        "long": "S = 5, fitted and tuned on train.tsv",
        "long_wikitext": "S = 5, fitted to wikitext-2.train.txt",
    }
    for key, text in texts.items():
        found = results[key]
        cosine = f"{found['cosine_with_mean_of_pieces']:.3f}"
        rows.append(f"| {text} | {found['tokens']:,} | {cosine} |")
    pieces = ", ".join(f"{x:.3f}" for x in results["long"]["cosines_of_pieces_with_their_mean"])
    return "\n".join([*rows, "", f"The original's pieces themselves: {pieces}."]) + "\n"
