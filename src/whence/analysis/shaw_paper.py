"""The results of Shaw et al. (2018), on WMT 2014: for the eye, as their data is another.

The gains of +1.3 and +0.3 BLEU of the big model and its 29.2 and 41.5 are in the paper's abstract
and on its page of results. UNCHECKED marks tables whose numbers were recalled and not compared with
the paper.
"""

UNCHECKED = "recalled, not compared with the paper"

# Table 1, newstest2014: model -> (En-De sinusoidal, relative, En-Fr sinusoidal, relative)
TABLE_1 = {"base": (26.5, 26.8, 38.2, 38.7), "big": (27.9, 29.2, 41.2, 41.5)}
# Table 2, newstest2013 En-De, base: clipping distance -> BLEU
TABLE_2 = {0: 12.5, 1: 25.5, 2: 25.8, 4: 25.9, 16: 25.8, 64: 25.9, 256: 25.8}
# Table 3, the same text: (keys, values) -> BLEU
TABLE_3 = {(True, True): 25.8, (True, False): 25.8, (False, True): 25.3, (False, False): 12.5}
STEPS_LOST = 0.07  # fewer steps a second
