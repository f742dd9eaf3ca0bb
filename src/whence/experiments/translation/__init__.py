"""Translation with each positional method: the experiment of Shaw et al. (2018)."""
